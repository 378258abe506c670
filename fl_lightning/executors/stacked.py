"""All clients of a process trained at once: parameters stacked along a leading client dimension, the objective vmapped.

The losses are summed, so each client's gradient is its own. Clients that do not take part keep their optimiser state
untouched, exactly as if alone (``executors/stack.py``).
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.batches.base import Batch, Collator, single
from fl_lightning.executors.base import Executor, Outcome, Work, check_optimizer
from fl_lightning.executors.budget import client_bytes
from fl_lightning.executors.stack import ClientStack, rows_of
from fl_lightning.executors.storage import in_memory, on_disk
from fl_lightning.round.client import ClientModule
from fl_lightning.round.context import Context, Parameters
from fl_lightning.round.payload import Payload, concatenate, finite_rows
from fl_lightning.round.stage import Evaluation, Stage

#: The client's functions that compute on a stack as they are, if the net does and none is overridden.
_STACKABLE = ("objective", "output", "loss", "scores")


class StackedExecutor(Executor):
    """Trains all clients of a process at once with ``vmap`` over their stacked parameters.

    A net that says ``takes_stacks`` is called on the whole stack without ``vmap``, which saves its overhead.
    Clients are grouped by size so that padding wastes little, and so that a group fits the budget; the result does not
    depend on the grouping.

    Args:
        max_padding: Largest share of padding nodes in a group, in [0, 1).
        max_clients_per_group: Largest number of clients in a group; None for no bound.
        max_group_mib: Memory in MiB that the training of a group may take beside the data and the state of all clients;
            None for no bound. How many clients that is, is estimated from a forward pass of the largest one.
        storage: Where parameters, optimiser state and answers of all clients lie: in ``memory``, or on ``disk``, from
            where the system maps those of a group into memory. The results are the same.
        storage_folder: Folder of the files for ``disk``; None for the system's for temporary files.

    Raises:
        ValueError: A value is out of its range, or a folder is given for nothing.
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
        self.storage = storage
        self.allocate = on_disk(storage_folder) if storage == "disk" else in_memory

    def _allocate(self) -> None:
        if type(self.client).training_step is not ClientModule.training_step:
            raise ValueError(
                f"{type(self.client).__name__} overrides training_step, which the stacked executor does not call: "
                "override objective or loss, or set trainer.executor to SequentialExecutor"
            )
        if self.storage == "disk" and self.fabric.device.type != "cpu":
            raise ValueError(
                f"storage 'disk' is for clients on a CPU, but they are on {self.fabric.device}: use 'memory'"
            )
        self.client.to(self.fabric.device)
        plain = all(getattr(type(self.client), name) is getattr(ClientModule, name) for name in _STACKABLE)
        self.takes_stacks = plain and getattr(self.client.net, "takes_stacks", False)
        check_optimizer(self.client.configure_optimizers())
        self.groups = self._group()
        # the clients of a group stand side by side in the stack
        self.position = {client: position for position, client in enumerate(c for group in self.groups for c in group)}
        self.group_of = {client: group for group in self.groups for client in group}
        start = {
            name: self.allocate((len(self.clients), *parameter.shape), parameter.dtype, parameter.device).copy_(
                parameter.detach()
            )
            for name, parameter in self.client.net.named_parameters()
        }
        self.stack = ClientStack(self.client, start, self.allocate)
        self._batches: dict[tuple[int, ...], Batch] = {}
        self._part: tuple[tuple[int, ...], Batch] | None = None

    def _group(self) -> list[tuple[int, ...]]:
        """Cut the clients, largest first, wherever padding, number or memory would exceed its bound."""
        groups: list[list[int]] = []
        limits: dict[int, int] = {}  # by the size of a group's largest client
        for client in sorted(self.clients, key=lambda c: (-self.collator.size(c), c)):
            size = self.collator.size(client)
            largest = self.collator.size(groups[-1][0]) if groups else 0
            if not groups or size < (1 - self.max_padding) * largest or len(groups[-1]) == limits[largest]:
                groups.append([])
                if size not in limits:
                    limits[size] = self._limit(client)
            groups[-1].append(client)
        # those that take as many steps are neighbours, for they step together
        return [tuple(sorted(group, key=lambda c: (self.collator.steps_per_epoch(c), c))) for group in groups]

    def _limit(self, largest: int) -> int:
        """How many clients of the size of the given one may be in a group."""
        limit = self.max_clients_per_group or len(self.clients)
        if self.max_group_mib is None:
            return limit
        batch = single(self.collator([largest]))
        step = next(batch.draws(torch.zeros(1, dtype=torch.int64, device=self.fabric.device)))
        with self.fabric.autocast():
            needed = client_bytes(self.client.train(), step)
        self.client.eval()
        return max(1, min(limit, int(self.max_group_mib * 2**20 / needed)))

    def run(self, work: Work) -> Outcome:
        """Run the stage, one group of clients after another, all clients of a group at once."""
        failures: dict[int, str] = {}

        def uploads() -> Iterator[Payload]:
            for members in self._split(work.num_epochs):
                upload, failed = self._run_group(members, work)
                self.report(len(members))
                why = "its parameters or its answer are not finite after local training"
                failures.update(dict.fromkeys(failed, why))
                yield upload

        clients = [client for client in self.clients if client in work.num_epochs]
        return Outcome(upload=Payload.collect(uploads(), clients, self.allocate), failures=failures)

    def _in_step(self, stack: ClientStack, clients: tuple[int, ...], num_epochs: Mapping[int, int]) -> tuple[int, ...]:
        """The clients in an order in which many can step together."""
        positions = [self.position[client] for client in clients]
        order = stack.in_step(positions, self._steps(clients, [num_epochs[client] for client in clients]))
        return tuple(clients[row] for row in order)

    def _steps(self, clients: Sequence[int], epochs: Sequence[int]) -> list[int]:
        return [n * self.collator.steps_per_epoch(client) for n, client in zip(epochs, clients, strict=True)]

    def _run_group(self, clients: tuple[int, ...], work: Work) -> tuple[Payload, list[int]]:
        stack, stage = self.stack, work.stage
        if stage.reset_optimizer:
            stack.forget([self.position[client] for client in clients])
        clients = self._in_step(stack, clients, work.num_epochs)
        positions = [self.position[client] for client in clients]
        received = self.received(work.payload, clients)
        stack.load(received, positions)
        rows = rows_of(positions, self.fabric.device)
        anchor = {
            name: received[name].to(tensor) if name in received else tensor[rows].clone()
            for name, tensor in stack.parameters.items()
        }
        epochs = [work.num_epochs[client] for client in clients]
        trained = self._train(stack, clients, positions, stage, anchor, epochs, work.round_idx)
        batch = self._batch(clients)
        signals = self._map_signals(stage, trained, batch)
        finite = finite_rows((*trained.values(), *signals.values()))
        failed = [row for row, fine in enumerate(finite.tolist()) if not fine]
        upload = Payload(
            clients=clients,
            parameters=self.sent(stage, trained, anchor),
            signals=signals,
            num_examples=self.client.example_count(batch),
        )
        if failed:
            lost = [positions[row] for row in failed]
            stack.load({name: tensor[failed] for name, tensor in anchor.items()}, lost)
            stack.forget(lost)
            upload = upload.rows([client for client, fine in zip(clients, finite.tolist(), strict=True) if fine])
        return upload, [clients[row] for row in failed]

    def _train(
        self,
        stack: ClientStack,
        clients: tuple[int, ...],
        positions: Sequence[int],
        stage: Stage,
        anchor: Mapping[str, Tensor],
        epochs: Sequence[int],
        round_idx: int,
    ) -> dict[str, Tensor]:
        """Train clients of a stack and return their parameters, (clients, *shape)."""
        client, batch = self.client.train(), self._batch(clients)
        trained = [n for n, parameter in client.net.named_parameters() if parameter.requires_grad and stage.trains(n)]
        steps = self._steps(clients, epochs)
        crew = stack.crew(positions, steps)

        def loss(parameters: dict[str, Tensor], tensors: dict[str, Tensor], anchor: dict[str, Tensor]) -> Tensor:
            context = Context(anchor=anchor)
            loss = client.objective(parameters, batch.replace(tensors), context)
            return loss if stage.penalty is None else loss + stage.penalty(parameters, context)

        compute = loss if self.takes_stacks and stage.penalty is None else torch.vmap(loss)
        num_steps = max(steps, default=0) if trained else 0
        draws = batch.draws(self.keys(round_idx, stage.name, clients, num_steps))
        leaves = {name: tensor.detach() for name, tensor in crew.parameters.items()}  # the crew steps their memory
        inputs = [leaves[name].requires_grad_() for name in trained]
        for step, drawn in enumerate(draws):
            with self.fabric.autocast():
                loss_C = compute(leaves, drawn.tensors(), dict(anchor))
            gradients = torch.autograd.grad(loss_C, inputs, torch.ones_like(loss_C), allow_unused=True)
            crew.step(client.clip(dict(zip(trained, gradients, strict=True))), step)
        crew.store(stack)
        client.eval()
        return crew.parameters

    @torch.no_grad()
    def _map_signals(self, stage: Stage, parameters: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        def signals(parameters: dict[str, Tensor], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            one = batch.replace(tensors)
            return {name: signal(self.client, parameters, one, Context()) for name, signal in stage.signals.items()}

        if not stage.signals:
            return {}
        with self.fabric.autocast():
            return torch.vmap(signals)(dict(parameters), batch.tensors())

    def evaluate(
        self, evaluation: Evaluation, clients: Sequence[int], round_idx: int, *, collator: Collator | None = None
    ) -> Payload:
        """Score the given clients, one group at a time, one forward for all splits."""
        parts = []
        for members in self._split(clients):
            batch = self._batch(members) if collator is None else collator(members)
            parameters = self._evaluated(evaluation, members, round_idx)
            parts.append(Payload(clients=members, signals=self.sum_scores(parameters, batch, self._score)))
        return concatenate(parts)

    def _score(self, parameters: Parameters, batch: Batch) -> dict[str, Tensor]:
        if self.takes_stacks:
            return self.client.score_table(parameters, batch)
        compute = torch.vmap(lambda p, tensors: self.client.score_table(p, batch.replace(tensors)))
        return compute(dict(parameters), batch.tensors())

    def predict(self, evaluation: Evaluation, clients: Sequence[int]) -> dict[int, Tensor]:
        """Predict the given clients, one group at a time."""
        predictions: dict[int, Tensor] = {}
        for members in self._split(clients):
            batch = self._batch(members)
            parameters = self._evaluated(evaluation, members, 0)
            with torch.no_grad(), self.fabric.autocast():
                compute = torch.vmap(lambda p, t, b=batch: self.client.predictions(self.client.output(p, b.replace(t))))
                found = torch.cat([compute(parameters, part.tensors()) for part in batch.parts()], dim=1)
            for row, client in enumerate(members):
                predictions[client] = found[row, : self.collator.size(client)].float()
        return predictions

    def _evaluated(self, evaluation: Evaluation, clients: tuple[int, ...], round_idx: int) -> dict[str, Tensor]:
        """The parameters to score: the clients' own, or others, or a copy after some more training."""
        rows = rows_of([self.position[client] for client in clients], self.fabric.device)
        parameters = {name: tensor[rows] for name, tensor in self.stack.parameters.items()}
        if evaluation.payload is not None:
            received = self.received(evaluation.payload, clients)
            parameters |= {name: tensor.to(parameters[name]) for name, tensor in received.items()}
        if evaluation.num_epochs:
            finetuning = Stage(name="finetune", trained=evaluation.trained)
            copies = ClientStack(self.client, {name: tensor.clone() for name, tensor in parameters.items()})
            epochs = [evaluation.num_epochs] * len(clients)
            parameters = self._train(copies, clients, range(len(clients)), finetuning, {}, epochs, round_idx)
        self.client.eval()
        return parameters

    def state(self) -> Payload:
        """Parameters and optimiser state of all clients."""
        return self.stack.state(self.clients, [self.position[client] for client in self.clients], self.fabric.device)

    def load_state(self, state: Payload) -> None:
        """Restore parameters and optimiser state."""
        self.stack.load_state(state.rows(self.clients), [self.position[client] for client in self.clients])

    def _split(self, clients: Sequence[int] | Mapping[int, int]) -> list[tuple[int, ...]]:
        """The given clients of this process by group."""
        wanted = set(clients)
        chosen = (tuple(client for client in group if client in wanted) for group in self.groups)
        return [members for members in chosen if members]

    def _batch(self, clients: tuple[int, ...]) -> Batch:
        """The batch of clients of one group; those of whole groups are kept, of parts of them only the last."""
        if self._part is not None and self._part[0] == clients:
            return self._part[1]
        group = self.group_of[clients[0]]
        if group not in self._batches:
            self._batches[group] = self.collator(group)
        if clients == group:
            return self._batches[group]
        rows = torch.tensor([self.position[client] - self.position[group[0]] for client in clients])
        chosen = self._batches[group].select(rows.to(self.fabric.device))
        self._part = clients, chosen
        return chosen
