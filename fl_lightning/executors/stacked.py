"""All clients of a process trained at once: parameters stacked along a leading client dimension, the objective vmapped.

The losses are summed, so each client's gradient is its own. Clients that do not take part keep their optimizer state
untouched, exactly as if alone (``executors/stack.py``).
"""

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric import Fabric
from torch import Tensor

from fl_lightning.batches.base import Batch, Collator, single
from fl_lightning.executors.base import Executor
from fl_lightning.executors.budget import client_bytes
from fl_lightning.executors.failure import failure_of
from fl_lightning.executors.group import GroupTraining, takes_stacks
from fl_lightning.executors.grouping import Groups
from fl_lightning.executors.hand_over import handed_over, handed_over_after_trial, why_one_by_one
from fl_lightning.executors.knowledge import Knowledge, context_of, knowing, of_one
from fl_lightning.executors.own_terms import watched_objective
from fl_lightning.executors.private import SPENT, check_private_stage
from fl_lightning.executors.sequential_clients import load
from fl_lightning.executors.stack import ClientStack
from fl_lightning.executors.stacked_clients import StackedClients
from fl_lightning.executors.stage_request import StageRequest, StageResult
from fl_lightning.executors.storage import in_memory, on_disk
from fl_lightning.executors.time_limit import within
from fl_lightning.executors.trial import own_methods
from fl_lightning.kernels.layout import rows_at, rows_of
from fl_lightning.kernels.per_client import over_clients
from fl_lightning.models.batch_norm import statistics_of
from fl_lightning.round.client import ClientModule
from fl_lightning.round.payload import Payload, concatenate, finite_rows
from fl_lightning.round.privacy import PrivacySpent, check_tuning
from fl_lightning.round.stage import Evaluation

#: The client's functions that compute on a stack if the net does and none of them is overridden.
_STACKABLE = ("objective", "output", "loss", "scores")


class StackedExecutor(StackedClients):
    """Trains all clients of a process at once with ``vmap`` over their stacked parameters.

    A net with ``takes_stacks`` is called on the whole stack without ``vmap``, which saves its overhead. Clients are
    grouped by size, so that padding wastes little and a group fits the memory budget; the result does not depend on the
    grouping.

    Args:
        max_padding: Largest share of padding nodes in a group, in [0, 1).
        max_clients_per_group: Largest number of clients in a group; None for no bound.
        max_group_mib: Memory in MiB that the training of a group may take in addition to the data and the state of all
            clients; None for no bound. The number of clients is estimated from a forward pass of the largest one.
        storage: Where parameters, optimizer state and updates of clients are stored: in ``memory``, or on ``disk``,
            from where the system maps those of a group into memory. The results are the same.
        storage_folder: Folder of the files for ``disk``; None for the system's folder for temporary files.

    Raises:
        ValueError: A value is out of range, or a folder is given without ``disk``.
    """

    def __init__(
        self,
        *,
        max_padding: float = 0.3,
        max_clients_per_group: int | None = None,
        max_group_mib: float | None = None,
        storage: Literal["memory", "disk"] = "memory",
        storage_folder: str | None = None,
    ) -> None:
        if not 0 <= max_padding < 1:
            raise ValueError(f"max_padding must be in [0, 1), got {max_padding}")
        if max_clients_per_group is not None and max_clients_per_group < 1:
            raise ValueError(f"max_clients_per_group must be at least 1, got {max_clients_per_group}")
        if max_group_mib is not None and max_group_mib <= 0:
            raise ValueError(f"max_group_mib must be positive, got {max_group_mib}")
        if storage_folder is not None and (storage != "disk" or not Path(storage_folder).is_dir()):
            raise ValueError(
                f"storage_folder is {storage_folder!r}: give an existing folder, and storage 'disk' for it"
            )
        super().__init__()
        self.max_padding = max_padding
        self.max_clients_per_group = max_clients_per_group
        self.max_group_mib = max_group_mib
        self.storage, self.storage_folder = storage, storage_folder
        self.allocate = on_disk(storage_folder) if storage == "disk" else in_memory

    def suited(self, client: ClientModule) -> Executor:
        """This executor, or the sequential one for a client with hooks of its own or a PyG net that needs it."""
        return handed_over(client) or self

    def tried(
        self, client: ClientModule, first: Callable[[], Batch], fabric: Fabric, time_limit: float | None
    ) -> Executor:
        """This executor, or the sequential one if ``torch.vmap`` does not support the client's own code."""
        return handed_over_after_trial(client, first, fabric, time_limit) or self

    def needed_bytes(self) -> int:
        """The state of a round's clients, unless on disk, plus a group's state before the stage and its gradients."""
        largest = min(max(map(len, self.groups), default=0), self.num_together)
        return (0 if self.storage == "disk" else super().needed_bytes()) + 2 * largest * self._parameter_bytes()

    def _arrange(self) -> None:
        """Assign the clients to groups."""
        if why := why_one_by_one(self.client):
            raise ValueError(f"{why}: set trainer.executor to SequentialExecutor")
        if self.storage == "disk" and self.fabric.device.type != "cpu":
            raise ValueError(
                f"storage 'disk' is for clients on a CPU, but they are on {self.fabric.device}: use 'memory'"
            )
        self.client.fabric = self.fabric
        plain = all(getattr(type(self.client), name) is getattr(ClientModule, name) for name in _STACKABLE)
        plain = plain and self.client.task.target.takes_stacks
        self.has_own_methods = bool(own_methods(self.client))
        self.takes_stacks = plain and getattr(self.client.net, "takes_stacks", False)
        self.grouping = Groups(self.collator, self.clients, self.max_padding, self._limit)

    def _limit(self, largest: int) -> int:
        """How many clients of the size of the given one may be in a group."""
        limit = self.max_clients_per_group or len(self.clients)
        if self.max_group_mib is None:
            return limit
        batch = single(self.collator([largest]))
        step = next(batch.draws(torch.zeros(1, dtype=torch.int64, device=self.fabric.device)))
        statistics = {name: self.client.net.get_parameter(name) for name in statistics_of(self.client.net)}
        before = {name: statistic.detach().clone() for name, statistic in statistics.items()}
        with self.fabric.autocast():
            needed = client_bytes(self.client.train(), step)
        self.client.eval()
        for name, statistic in statistics.items():  # the pass has changed them
            statistic.data.copy_(before[name])
        return max(1, int(min(limit, self.max_group_mib * 2**20 / needed)))

    def run(self, request: StageRequest, report: Callable[[int], None] | None = None) -> StageResult:
        """Run the stage, one group of clients after another, all clients of a group at once."""
        check_private_stage(self.client, request.stage)
        failures: dict[int, str] = {}
        client_data: dict[int, Any] = {}

        def uploads() -> Iterator[Payload]:
            for members in self.grouping.split(clients):
                upload, failed, new = self._run_group(members, request)
                failures.update(failed)
                client_data.update(new)
                if report is not None:
                    report(len(members))
                yield upload
                if failures and request.until_failure:
                    return

        with self._for_stage(request) as clients:
            self._bring(clients)
            result = StageResult(upload=Payload.collect(uploads(), clients, self.allocate), failures=failures)
        if request.address.phase != "callback":
            self.rewrite(client_data)
        return result

    def _run_group(
        self, clients: tuple[int, ...], request: StageRequest
    ) -> tuple[Payload, dict[int, str], dict[int, Any]]:
        """The updates of a group's clients, why the others failed, and their data if these have changed."""
        stack, stage = self.stack, request.stage
        self._forget_optimizers(clients, stage)
        steps = {client: self.num_steps(stage, client, request.work_fraction[client]) for client in clients}
        order = stack.training_order(stack.positions_of(clients), list(steps.values()))
        clients = tuple(clients[row] for row in order)
        positions, num_steps = stack.positions_of(clients), [steps[client] for client in clients]
        received, batch = self.received_parameters(request.payload, clients), self.grouping.batch(clients)
        self._activate(clients, received)
        stack.load(received, positions)
        rows = rows_of(positions, self.fabric.device)
        start = {
            name: received[name].to(tensor) if name in received else rows_at(tensor, rows).clone()
            for name, tensor in stack.parameters.items()
        }
        training = GroupTraining(
            self.client,
            watched_objective(self.client, stage, self.said, says=self.fabric.is_global_zero),
            batch,
            self._knowledge(clients, request.payload, start, batch),
            takes_stacks=self.takes_stacks,
            time_limit=self.time_limit,
            ragged=self._ragged(request.payload),
            numbers=self.numbers,
        )
        if self.client.privacy is not None:
            client_state = training.knowledge["client_state"]
            client_state[SPENT], training.together.failures = self._spend(client_state[SPENT], clients, request)
        keys = self.keys(request.address.round_idx, stage.name, clients, max(num_steps, default=0))
        rates = self.lr_schedule.at(request.address.scheduled_round)
        self._try_stage(stage, start, batch, training.knowledge, training.ragged)
        with self._client_in_training():
            trained = training.run(stack.part(positions, num_steps, rates, stage.optimizer), keys, self.fabric.autocast)
            training.part.store(stack)
        upload, client_state = self._responses(clients, training, trained, start, num_steps)
        client_data = self._rewritten(request, clients, trained, training)
        result = [
            *trained.values(),
            *upload.extras.values(),
            *(m for m in client_state.values() if m.is_floating_point()),
        ]
        failures = training.together.failures
        for row, fine in enumerate(finite_rows(result).tolist()):
            if not fine:
                failures.setdefault(row, "its parameters or its update are not finite after local training")
        failed = sorted(failures)
        succeeded = [row for row in range(len(clients)) if row not in failures]
        if failed:
            places = [positions[row] for row in failed]
            stack.load({name: tensor[failed] for name, tensor in start.items()}, places)
            stack.forget(places)
            upload = upload.rows([clients[row] for row in succeeded])
        for name in self.lasting_state_specs():
            stack.remember(name, client_state[name][succeeded], [positions[row] for row in succeeded])
        lost = {clients[row]: why for row, why in failures.items()}
        return upload, lost, {client: new for client, new in client_data.items() if client not in lost}

    def _responses(
        self,
        clients: tuple[int, ...],
        training: GroupTraining,
        trained: dict[str, Tensor],
        start: dict[str, Tensor],
        num_steps: list[int],
    ) -> tuple[Payload, dict[str, Tensor]]:
        """What all clients of a group send after their training, and their new client state."""
        stage, sizes_C = training.stage, self._sizes(clients)
        ask = functools.partial(training.ask, parameters=trained, autocast=self.fabric.autocast, sizes_C=sizes_C)
        client_outputs = ask(stage.client_outputs, per_example=stage.per_example)
        client_state = {
            **training.knowledge["client_state"],
            **ask(stage.client_state, per_example=self._ragged_state_specs()),
        }
        parameters = self.sent(stage, trained, start, training.knowledge["anchor"])
        failed = list(training.together.failures)
        for name in parameters.keys() & client_outputs.keys():  # of clients that failed there is no output
            client_outputs[name][failed] = parameters[name][failed]
        with knowing(self.client, training.knowledge, is_stack=True):
            num_examples = self.client.example_count(training.batch)
        upload = Payload(
            clients=clients,
            parameters=parameters,
            extras=client_outputs,
            num_examples=num_examples,
            num_steps=torch.tensor(num_steps, device=self.fabric.device),
            lengths=dict.fromkeys(stage.per_example, sizes_C),
        )
        return upload, client_state

    def _spend(self, spent_C3: Tensor, clients: Sequence[int], request: StageRequest) -> tuple[Tensor, dict[int, str]]:
        """What a group's clients have spent of their privacy budgets after a stage, and failures by row."""
        after, failures = spent_C3.clone(), {}
        for row, client in enumerate(clients):
            try:
                after[row] = self.spend(spent_C3[row], request.stage, client, request.work_fraction[client])
            except PrivacySpent as error:
                failures[row] = str(failure_of(error))
        return after, failures

    def _knowledge(
        self, clients: Sequence[int], payload: Payload | None, anchor: Mapping[str, Tensor], batch: Batch
    ) -> Knowledge:
        """What the clients of a group know at the beginning of a stage."""
        num_examples = batch.example_mask.shape[1]
        client_state = {
            name: self._client_state_of(clients, name, num_examples)
            if spec.lasting
            else self.initial_client_state(spec, clients, num_examples)
            for name, spec in self.state_specs.items()
        }
        return {
            "anchor": dict(anchor),
            "received": self.received(payload, clients, num_examples),
            "client_state": client_state,
        }

    def _ragged(self, payload: Payload | None) -> set[str]:
        """Names of client state and received tensors with a row for every example."""
        return self._ragged_state_specs() if payload is None else self._ragged_state_specs() | payload.lengths.keys()

    def _rewritten(
        self, request: StageRequest, clients: Sequence[int], trained: Mapping[str, Tensor], training: GroupTraining
    ) -> dict[int, Any]:
        """The clients' new data, computed one after another, since their data differ in shape."""
        client_data: dict[int, Any] = {}
        rewrite = request.stage.program.rewrite
        if rewrite is None:
            return client_data
        ragged = self._ragged(request.payload)
        for row, client in enumerate(clients):
            parameters = {name: tensor[row] for name, tensor in trained.items()}
            known = of_one(training.knowledge, row, self.collator.size(client), ragged)
            with torch.no_grad():
                try:
                    with within(self.time_limit):
                        own = copy.deepcopy(self.client)
                        load(own, parameters)
                        own.context = context_of(known)
                        old = self.collator.client_data(client)
                        client_data[client] = rewrite(own, parameters, old, own.context)
                except Exception as error:  # as in training
                    training.together.failures.setdefault(row, failure_of(error))
        return client_data

    def _sizes(self, clients: Sequence[int]) -> Tensor:
        return torch.tensor([self.collator.size(client) for client in clients], device=self.fabric.device)

    def _score(
        self, evaluation: Evaluation, clients: Sequence[int], round_idx: int, collator: Collator | None
    ) -> StageResult:
        """Score the given clients, one group at a time, one forward for all splits."""
        parts, failures = [], {}
        for members in self.grouping.split(clients):
            try:
                with within(None if self.time_limit is None else len(members) * self.time_limit):
                    parts.append(self._score_group(evaluation, members, round_idx, collator))
            except Exception:  # clients run users' code: find out which client it was
                for client in members:
                    try:
                        with within(self.time_limit):
                            parts.append(self._score_group(evaluation, (client,), round_idx, collator))
                    except Exception as error:
                        failures[client] = failure_of(error)
        return StageResult(upload=concatenate(parts), failures=failures)

    def _score_group(
        self, evaluation: Evaluation, members: tuple[int, ...], round_idx: int, collator: Collator | None
    ) -> Payload:
        batch = self.grouping.batch(members) if collator is None else self._scored_batch(members, collator)
        parameters, knowledge = self._evaluated(evaluation, members, round_idx)
        rule = evaluation.output

        def one(part: Batch, p: Any, t: Any, k: Any) -> dict[str, Tensor]:
            with knowing(self.client, k) as context:
                return self.client.score_table(p, part.replace(t), context, rule)

        def score(part: Batch) -> dict[str, Tensor]:
            if self.takes_stacks and (rule is None or takes_stacks(rule)):
                with knowing(self.client, knowledge, is_stack=True) as context:
                    return self.client.score_table(parameters, part, context, rule)
            return over_clients(functools.partial(one, part))(parameters, part.tensors(), knowledge)

        return Payload(clients=members, extras=self.sum_scores(self._examples_of(evaluation, batch), score))

    def _predict(self, evaluation: Evaluation, clients: Sequence[int], round_idx: int) -> dict[int, Tensor]:
        """Predict the given clients, one group at a time."""
        predictions: dict[int, Tensor] = {}
        rule, collator = evaluation.output, self.collator.evaluation
        for members in self.grouping.split(clients):
            batch = self.grouping.batch(members) if collator is None else self._scored_batch(members, collator)
            batch, sizes = self._predicted_of(evaluation, members, batch)
            parameters, knowledge = self._evaluated(evaluation, members, round_idx)

            def predict(part: Batch, p: Any, t: Any, k: Any) -> Tensor:
                with knowing(self.client, k) as context:
                    return self.client.predictions(self.client.ruled_output(rule, p, part.replace(t), context))

            with torch.no_grad(), self.fabric.autocast():
                given = [(functools.partial(predict, part), part.tensors()) for part in batch.parts()]
                result = torch.cat([over_clients(one)(parameters, t, knowledge) for one, t in given], dim=1)
            predictions |= {c: rows[:size].float() for c, rows, size in zip(members, result, sizes, strict=True)}
        return predictions

    def _evaluated(
        self, evaluation: Evaluation, clients: tuple[int, ...], round_idx: int
    ) -> tuple[dict[str, Tensor], Knowledge]:
        """The parameters to score: the clients' own, others, or a copy after additional training."""
        received = self.received_parameters(evaluation.payload, clients)
        values = self._parameters_of(clients, but=received)
        parameters = {
            name: received[name].to(initial) if name in received else values[name]
            for name, initial in self.initial.items()
        }
        tuning, rule, knowledge = evaluation.tuning, evaluation.output, Knowledge()
        ragged = self._ragged(evaluation.payload)
        if self.client.privacy is not None:
            check_tuning(tuning, "this run")
        if tuning is not None or rule is not None or self.has_own_methods:  # they may read it
            batch = self.grouping.batch(clients)
            knowledge = self._knowledge(clients, evaluation.payload, parameters, batch)
        if tuning is not None:
            steps = [self.num_steps(tuning, client, 1.0) for client in clients]
            copies = ClientStack(self.client, clients, {name: tensor.clone() for name, tensor in parameters.items()})
            tuned = watched_objective(self.client, tuning, self.said, says=self.fabric.is_global_zero)
            training = GroupTraining(self.client, tuned, batch, knowledge, takes_stacks=self.takes_stacks, blame=False)
            self._try_stage(tuning, parameters, batch, knowledge, ragged)
            keys = self.keys(round_idx, tuning.name, clients, max(steps, default=0))
            with self._client_in_training():
                part = copies.part(range(len(clients)), steps, optimizer=tuning.optimizer)
                parameters = training.run(part, keys, self.fabric.autocast)
        self.client.eval()
        if rule is not None:
            what = f"evaluation by {getattr(rule, '__qualname__', type(rule).__qualname__)}"
            self._try_own(what, [("output", rule)], parameters, batch, knowledge, ragged)
        return parameters, knowledge
