"""Clients of this process: those of a round are loaded, and what lives on of all others is in a store."""

import dataclasses
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor

from fl_lightning.batches.base import AnyBatch, Batch, Collator
from fl_lightning.executors.base import Executor
from fl_lightning.executors.hooks import check_hooks
from fl_lightning.executors.optimizer_state import check_optimizer, check_state
from fl_lightning.executors.private import SPENT, check_client, check_examples, private_state_specs, rate_of
from fl_lightning.executors.stage_request import StageRequest
from fl_lightning.executors.store import ClientStore
from fl_lightning.executors.time_limit import check_time_limit
from fl_lightning.executors.trial import check_batches_of_one, check_buffers, check_returns
from fl_lightning.memory import require, state_copies
from fl_lightning.models.plain import parameters_as_stored
from fl_lightning.round.client import ClientModule
from fl_lightning.round.lr_schedule import LRSchedule
from fl_lightning.round.payload import Payload, pad_examples
from fl_lightning.round.privacy import epsilon_spent, spend
from fl_lightning.round.stage import Evaluation, Persistence, Phase, Stage, StateSpec


class InProcessExecutor(Executor):
    """Loads clients while they are needed, and stores what lives on of the others.

    Nothing is allocated for a client before it takes part.

    Attributes:
        initial: The parameters that all clients start from, by name.
        members: The clients of this process.
        lasting: Names of the parameters that live on.
        store: What lives on of clients that are not loaded.
        rewritten: Data of clients whose graphs a stage has changed.
        originals: What they had before.
    """

    def setup(
        self,
        fabric: Fabric,
        client: ClientModule,
        collator: Collator,
        clients: Sequence[int],
        *,
        seed: int,
        client_state: Mapping[str, StateSpec] | None = None,
        persistence: Persistence | None = None,
        num_together: int | None = None,
        time_limit: float | None = None,
    ) -> None:
        """Set up the clients of this process, without loading any of them."""
        if time_limit is not None:
            check_time_limit()
        check_hooks(client)
        check_client(client)
        names = dict(client.net.named_parameters()).keys()
        twins = dict(client.net.named_parameters(remove_duplicate=False)).keys() - names
        if twins:
            raise ValueError(
                f"model.net has {', '.join(sorted(twins))} as second names of parameters: a client's "
                f"parameters are communicated "
                "once, so keep the shared layer under one name and call it where it is needed"
            )
        self.fabric = fabric
        self.client = client.eval()  # the server may compute with it
        self.collator = collator
        self.clients = tuple(clients)
        self.members = frozenset(clients)
        self.seed = seed
        self.time_limit = time_limit
        self.persistence = persistence or Persistence()
        if self.persistence.optimizer:
            check_state(check_optimizer(client.configure_optimizers()))
        self.lr_schedule = LRSchedule(client.lr_scheduler, client.configure_optimizers)
        self.num_together = len(clients) if num_together is None else min(num_together, len(clients))
        self.round, self.active = None, set()
        self.num_flat = client.num_communicated
        self.lasting = lasting_parameters(client, self.persistence)
        check_batches_of_one(client, collator, self.clients)
        self.state_specs = {**(client_state or {}), **private_state_specs(client)}
        self.rewritten: dict[int, Any] = {}
        self.originals: dict[int, Any] = {}
        self._scored_batches: dict[tuple[int, ...], Batch] = {}
        if clients:
            check_buffers(client, collator, clients[0], time_limit)
            check_returns(client, collator, clients[0], time_limit)
        self.client.to(fabric.device)
        self.initial = parameters_as_stored(client.net)
        self.store = ClientStore(
            self.allocate, len(clients), [f"s/client_state/{name}" for name in self._ragged_state_specs()]
        )
        self._arrange()
        require(
            self.needed_bytes(),
            f"{self.num_together} clients of {client.num_parameters:,} parameters (with their optimizers' state)",
            "choose fewer clients or a smaller net, or set max_group_mib and storage 'disk' of trainer.executor "
            "(StackedExecutor)",
            fabric.device,
        )
        self._clear()
        if clients:
            check_examples(client, collator, clients[0])

    def original_size(self, client: int) -> int:
        """Number of a client's own examples, whatever a stage has added to its data."""
        kept = self.collator.evaluation is None and client in self.originals
        return int(self.originals[client].size) if kept else self.evaluation_collator.size(client)

    def _scored_batch(self, clients: Sequence[int], collator: Collator) -> Batch:
        """A batch that models are scored on; that of examples which training does not see is made once."""
        if collator is not self.collator.evaluation:
            return collator(clients)
        members = tuple(clients)
        if members not in self._scored_batches:
            self._scored_batches[members] = collator(members)
        return self._scored_batches[members]

    def _examples_of(self, evaluation: Evaluation, batch: AnyBatch) -> AnyBatch:
        """What an evaluation scores of a batch; if examples have states of their own, these keep their places."""
        if evaluation.training_examples or self._ragged_state_specs():
            return batch
        return batch.without_training_examples()

    def _predicted_of(
        self, evaluation: Evaluation, clients: Sequence[int], batch: AnyBatch
    ) -> tuple[AnyBatch, Sequence[int]]:
        """What is predicted of a batch, and of how many examples of each client: the first ones."""
        chosen = self._examples_of(evaluation, batch)
        if chosen is batch:
            return batch, [self.original_size(client) for client in clients]
        return chosen, chosen.example_mask.sum(dim=-1).reshape(-1).tolist()

    def _arrange(self) -> None:
        """Decide which clients are run together."""
        return

    def needed_bytes(self) -> int:
        """A lower bound of the memory in bytes that the clients of a round need."""
        return self.num_together * (1 + self._optimizer_copies()) * self._parameter_bytes()

    def stored_bytes(self) -> int:
        """Bytes of the parameters and of the optimizer's state that live on."""
        num_bytes = sum(self.initial[name].nbytes for name in self.lasting)
        if self.persistence.optimizer:
            num_bytes += self._optimizer_copies() * self._parameter_bytes()
        return len(self.clients) * num_bytes

    def _optimizer_copies(self) -> int:
        """Number of values in the optimizer's state for each parameter value."""
        optimizer = check_optimizer(self.client.configure_optimizers())
        try:
            return state_copies(optimizer)
        except ValueError as error:
            raise ValueError(f"model.optimizer: {error}") from error

    def _parameter_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.initial.values())

    # ---------------------------------------------------------------- loaded clients

    @abstractmethod
    def _clear(self) -> None:
        """Unload all clients."""

    @abstractmethod
    def _at_hand(self) -> list[int]:
        """Clients that are loaded and have taken part, ascending."""

    @abstractmethod
    def _rows(self, clients: Sequence[int]) -> Payload:
        """The complete state of loaded clients."""

    @abstractmethod
    def _load_rows(self, rows: Payload) -> None:
        """Load clients with the state in the rows."""

    @abstractmethod
    def _copies(self, clients: Sequence[int]) -> AbstractContextManager[None]:
        """A context in which active copies of clients are loaded instead of the clients themselves."""

    @contextmanager
    def _for_stage(self, request: StageRequest) -> Iterator[list[int]]:
        """The clients of this process in a stage; for the stage of a callback, copies are loaded."""
        self._begin(request.address)
        clients = sorted(self.members.intersection(request.work_fraction))
        if request.address.phase != "callback":
            yield clients
            return
        active = self.active
        with self._copies(clients):
            self.active = set(clients)
            try:
                yield clients
            finally:
                self.active = active

    def _put_away(self, clients: Sequence[int]) -> None:
        """Store what lives on of loaded clients."""
        rows = self._that_lasts(self._rows(clients)) if clients and self._anything_lasts() else Payload(clients=())
        self.store.put(rows.clients, _named(rows))

    # ---------------------------------------------------------------- what lives on

    def lasting_state_specs(self) -> dict[str, StateSpec]:
        """Specification of the client state that lives on between stages."""
        return {name: spec for name, spec in self.state_specs.items() if spec.lasting}

    def _ragged_state_specs(self) -> set[str]:
        """Names of client state with a row for every example."""
        return {name for name, spec in self.state_specs.items() if spec.per_example}

    def _anything_lasts(self) -> bool:
        return bool(self.lasting or self.persistence.optimizer or self.lasting_state_specs())

    def _that_lasts(self, rows: Payload) -> Payload:
        """The part of the rows that lives on, without clients that have no such part."""
        kinds = ["client_state/"] + ["optimizer/"] * self.persistence.optimizer
        client_outputs = {name: t for name, t in rows.extras.items() if name.startswith(tuple(kinds))}
        parameters = {name: t for name, t in rows.parameters.items() if name in self.lasting}
        result = dataclasses.replace(rows, parameters=parameters, extras=client_outputs)
        if parameters or self.lasting_state_specs():
            return result
        started = [tensor for name, tensor in client_outputs.items() if name.startswith("optimizer/started/")]
        if not started:
            return Payload(clients=())
        chosen_C = torch.stack(started).any(dim=0).tolist()
        return result.rows([client for client, chosen in zip(rows.clients, chosen_C, strict=True) if chosen])

    def lasting_state(self) -> Payload:
        """What lives on of loaded clients, and what is stored of the others."""
        here = self._at_hand() if self._anything_lasts() else []
        elsewhere = sorted(self.store.row_of.keys() - set(here))
        parts = [self._that_lasts(self._rows(here))] if here else []
        return self._overlaid([*parts, self._stored(elsewhere)])

    def state(self) -> Payload:
        """The complete state of every client; for those not active, what does not live on is initial."""
        active = [client for client in self._at_hand() if client in self.active]
        if len(active) == len(self.clients):
            return self._rows(active)
        parts = [self._first_rows(self.clients), self.lasting_state()]
        return self._overlaid([*parts, self._rows(active)] if active else parts)

    def load_state(self, state: Payload, now: tuple[Phase, int] | None = None) -> None:
        """Restore clients.

        Args:
            state: The result of :meth:`lasting_state` or of :meth:`state`.
            now: The round in which the latter was taken, if it was taken within one.
        """
        parameters = state.rows([client for client in state.clients if client in self.members]).to(self.fabric.device)
        self._clear()
        self.store.clear()
        self.round, self.active = now, set()
        if now is not None and parameters.clients:
            self._load_rows(parameters)
            self.active = set(parameters.clients)
        elif parameters.clients:
            lasting = self._that_lasts(parameters)
            self.store.put(lasting.clients, _named(lasting))

    def _stored(self, clients: Sequence[int]) -> Payload:
        """What is stored of clients."""
        return self._as_rows(clients, self.store.get(clients)) if clients else Payload(clients=())

    def _first_rows(self, clients: Sequence[int]) -> Payload:
        """The initial state of clients."""
        number = len(clients)
        parameters = {name: tensor.expand(number, *tensor.shape) for name, tensor in self.initial.items()}
        started = torch.zeros(number, dtype=torch.bool, device=self.fabric.device)
        client_outputs = {f"optimizer/started/{name}": started for name in self.initial}
        for name, spec in self.lasting_state_specs().items():
            client_outputs[f"client_state/{name}"] = self.first_client_state(spec, clients)
        rows = Payload(clients=tuple(clients), parameters=parameters, extras=client_outputs)
        return self._as_rows(clients, rows.named())

    def first_client_state(self, spec: StateSpec, clients: Sequence[int], num_examples: int | None = None) -> Tensor:
        """The initial client state, (C, *shape) or (C, N, *shape)."""
        return self.initial_client_state(spec, clients, num_examples).clone()

    def initial_client_state(self, spec: StateSpec, clients: Sequence[int], num_examples: int | None = None) -> Tensor:
        """:meth:`first_client_state` to be read only, without a copy for each client."""
        initial = spec.initial.to(self.fabric.device)
        size = () if not spec.per_example else (num_examples or max(map(self.collator.size, clients), default=0),)
        return initial.expand(len(clients), *size, *initial.shape)

    def _as_rows(self, clients: Sequence[int], named: Mapping[str, Tensor]) -> Payload:
        """Rows of clients by their names, with client state of examples as long as that of the largest client."""
        sizes = [self.collator.size(client) for client in clients]
        sizes_C, tensors = torch.tensor(sizes, device=self.fabric.device), dict(named)
        for name in self._ragged_state_specs():
            if (key := f"s/client_state/{name}") in tensors:
                tensors[key] = without_padding(pad_examples(tensors[key], max(sizes)), sizes_C)
                tensors[f"l/client_state/{name}"] = sizes_C
        return Payload.from_named(clients, tensors)

    def _overlaid(self, parts: Sequence[Payload]) -> Payload:
        """Merge rows; for a client and name that are in several of them, the last one counts."""
        parts = [part for part in parts if part.clients]
        if len(parts) < 2:
            return parts[0] if parts else Payload(clients=())
        rows = ClientStore(self.allocate, len(self.clients), self.store.ragged)
        for part in parts:
            rows.put(part.clients, _named(part))
        return self._as_rows(rows.clients, rows.get(rows.clients))

    # ---------------------------------------------------------------- privacy

    def private_steps(self, stage: Stage, client: int, work_fraction: float) -> int:
        """Number of steps of a stage that count toward a client's privacy budget; 0 without private training."""
        trained = (p.requires_grad and stage.trains(name) for name, p in self.client.net.named_parameters())
        return self.num_steps(stage, client, work_fraction) if self.client.privacy is not None and any(trained) else 0

    def spend(self, spent_3: Tensor, stage: Stage, client: int, work_fraction: float) -> Tensor:
        """What a client has spent of its privacy budget after a stage, (3,).

        Raises:
            PrivacySpent: The budget does not suffice.
        """
        assert self.client.privacy is not None, "asked of private training alone"
        steps = self.private_steps(stage, client, work_fraction)
        return spend(self.client.privacy, spent_3, rate_of(self.collator, client), steps)

    def epsilons(self) -> dict[int, float]:
        """ε that clients have spent, from their client state."""
        if self.client.privacy is None:
            return {}
        lasting, first_3 = self.lasting_state(), self.state_specs[SPENT].initial
        spent = dict(zip(lasting.clients, lasting.extras.get(f"client_state/{SPENT}", ()), strict=True))
        return {client: epsilon_spent(self.client.privacy, spent.get(client, first_3)) for client in self.clients}

    # ---------------------------------------------------------------- client data

    def rewritten_data(self) -> dict[int, dict[str, Tensor]]:
        """Data of this process's clients whose graphs a stage has changed, by client and field."""
        return {
            client: {name: value for name, value in vars(client_data).items() if isinstance(value, Tensor)}
            for client, client_data in self.rewritten.items()
        }

    def load_rewritten_data(self, rewritten_data: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Restore :meth:`rewritten_data` of this process's clients, before their state is loaded."""
        mine = {client: fields for client, fields in rewritten_data.items() if client in self.members}
        self.rewrite({c: dataclasses.replace(self.collator.client_data(c), **fields) for c, fields in mine.items()})

    def reset(self, clients: Sequence[int]) -> None:
        """Bring clients back to their initial state and data."""
        super().reset(clients)
        changed = self.rewritten.keys() & set(clients)
        self.rewrite({client: self.originals[client] for client in changed})
        for client in changed:
            del self.rewritten[client]

    def rewrite(self, client_data: Mapping[int, Any]) -> None:
        """Replace the data of clients; loaded clients are grouped again."""
        if not client_data:
            return
        here = self._at_hand()
        rows = self._rows(here) if here else Payload(clients=())
        rows = rows._map(rows.clients, torch.Tensor.clone)
        sizes = {client: self.collator.size(client) for client in client_data}
        self.rewritten |= client_data
        for client, each in client_data.items():
            self.originals.setdefault(client, self.collator.client_data(client))
            self.collator.set_client_data(client, each)
        self._arrange()
        self._clear()
        if not here:
            return
        client_state = {}
        for name in self._ragged_state_specs() & self.lasting_state_specs().keys():
            value = client_state[f"client_state/{name}"] = self.first_client_state(self.state_specs[name], here)
            for row, client in enumerate(here):
                size = sizes.get(client, self.collator.size(client))
                value[row, :size] = rows.extras[f"client_state/{name}"][row, :size]
        self._load_rows(self._as_rows(here, {**rows.named(), **{f"s/{name}": t for name, t in client_state.items()}}))


def lasting_parameters(client: ClientModule, state: Persistence) -> frozenset[str]:
    """Names of the parameters that live on: those that the strategy declares, and personal running statistics."""
    communicated = client.communicated(client.net)
    return frozenset(n for n, _ in client.net.named_parameters() if n not in communicated or state.keeps(n))


def _named(rows: Payload) -> dict[str, Tensor]:
    """Rows by their names, without counts."""
    return {name: tensor for name, tensor in rows.named().items() if name.startswith(("p/", "s/"))}


def without_padding(tensor_CN: Tensor, sizes_C: Tensor) -> Tensor:
    """The rows of examples, with zeros for padding, (C, N, ...)."""
    real_CN = torch.arange(tensor_CN.shape[1], device=sizes_C.device) < sizes_C[:, None]
    return torch.where(real_CN.view(*real_CN.shape, *[1] * (tensor_CN.dim() - 2)), tensor_CN, tensor_CN.new_zeros(()))
