"""The clients of the stacked executor: those of a round are loaded as one stack, the others are stored.

The stack is kept from round to round as long as the same clients take part, so that nothing is copied.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fl_lightning.batches.base import Batch, single
from fl_lightning.executors.grouping import Groups
from fl_lightning.executors.in_process import InProcessExecutor
from fl_lightning.executors.knowledge import Knowledge, context_of, of_one
from fl_lightning.executors.own_terms import functions_of, refuse_own_parameters
from fl_lightning.executors.stack import ClientStack
from fl_lightning.executors.trial import is_ours
from fl_lightning.kernels.layout import make_like, rows_at, rows_of
from fl_lightning.round.context import Parameters
from fl_lightning.round.payload import Payload, pad_examples
from fl_lightning.round.stage import Stage


class StackedClients(InProcessExecutor):
    """Base class of the stacked executor.

    Attributes:
        grouping: Which clients are computed together.
        stack: The loaded clients.
    """

    grouping: Groups

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """The clients of each group."""
        return self.grouping.groups

    def _clear(self) -> None:
        self.stack = self._new_stack(())

    def _new_stack(self, clients: Sequence[int]) -> ClientStack:
        """An empty stack for clients."""
        number = len(clients)
        parameters = {
            name: make_like(self.allocate, (number, *tensor.shape), tensor) for name, tensor in self.initial.items()
        }
        client_state = {
            name: self.first_client_state(spec, clients) for name, spec in self.lasting_state_specs().items()
        }
        return ClientStack(self.client, clients, parameters, client_state, self.allocate)

    def _at_hand(self) -> list[int]:
        return sorted(self.stack.begun)

    def _rows(self, clients: Sequence[int]) -> Payload:
        return self._as_rows(clients, self.stack.state(clients, self.fabric.device).named())

    def _load_rows(self, rows: Payload) -> None:
        self._bring(rows.clients)
        self.stack.load_state(rows)

    def _bring(self, clients: Sequence[int]) -> None:
        """Load clients with what lives on of them; others stay loaded only if they are not too many."""
        old = self.stack
        chosen = set(clients) | (self.active & old.begun)
        if old.position.keys() >= chosen and len(old.position) <= 2 * len(chosen):
            return
        if len(old.begun | chosen) <= 2 * len(chosen) and self._anything_lasts():  # others may return
            chosen |= old.begun
        self._put_away(sorted(old.begun - chosen))
        self.stack = self._new_stack(self.grouping.order(chosen))
        staying = sorted(chosen & old.begun)
        if staying:
            self.stack.load_state(old.state(staying, self.fabric.device))
        returning = sorted(client for client in chosen - old.begun if client in self.store)
        if returning:
            self.stack.load_state(self._stored(returning))

    def _forget_optimizers(self, clients: Sequence[int], stage: Stage) -> None:
        """Reset optimizers that the stage resets, or whose state has ended with the round."""
        if not stage.reset_optimizer:
            ended = not self.persistence.optimizer
            clients = [c for c in clients if ended and c in self.stack.begun and c not in self.active]
        if clients:
            self.stack.forget(self.stack.positions_of(clients))

    def _activate(self, clients: Sequence[int], received: Mapping[str, Tensor]) -> None:
        """Let clients begin a stage of the round: what has not lived on, and is not received, is reset."""
        stack = self.stack
        resting = [client for client in clients if client not in self.active]
        new = [client for client in resting if client not in stack.begun]
        for name, tensor in stack.parameters.items():
            rows = new if name in self.lasting else resting
            if rows and name not in received:
                tensor[rows_of(stack.positions_of(rows), tensor.device)] = self.initial[name]
        stack.begun |= set(resting)
        self.active |= set(resting)

    def _try_stage(
        self,
        stage: Stage,
        parameters: Parameters,
        batch: Batch,
        knowledge: Knowledge,
        ragged: Collection[str],
    ) -> None:
        """Try a user's functions of a stage as :meth:`_try_own` does."""
        self._try_own(f"stage {stage.name!r}", functions_of(stage), parameters, batch, knowledge, ragged, stage.trains)

    def _try_own(
        self,
        what: str,
        functions: Iterable[tuple[str, Callable[..., Any]]],
        parameters: Parameters,
        batch: Batch,
        knowledge: Knowledge,
        ragged: Collection[str],
        trains: Callable[[str], bool] = bool,
    ) -> None:
        """Try a user's functions, once and on one client, whether they compute from what they are given."""
        own = [(kind, function) for kind, function in functions if not is_ours(function)]
        if not own or (what, "parameters") in self.said:
            return
        batch = single(batch.select(torch.zeros(1, dtype=torch.int64, device=self.fabric.device)))
        known = of_one(knowledge, 0, len(batch.example_mask), ragged)
        first = {name: tensor[0] for name, tensor in parameters.items()}
        trained = [name for name, p in self.client.net.named_parameters() if p.requires_grad and trains(name)]
        refuse_own_parameters(self.client, own, first, batch, context_of(known), trained)
        self.said.add((what, "parameters"))

    @contextmanager
    def _client_in_training(self) -> Iterator[None]:
        """A context with the client module in training mode; it is in evaluation mode afterward."""
        self.client.train()
        try:
            yield
        finally:
            self.client.eval()

    @contextmanager
    def _copies(self, clients: Sequence[int]) -> Iterator[None]:
        stack, order = self.stack, self.grouping.order(clients)
        size = max(map(self.collator.size, order), default=0)
        copies = ClientStack(
            self.client,
            order,
            {name: tensor.clone() for name, tensor in self._parameters_of(order).items()},
            {name: self._client_state_of(order, name, size).clone() for name in self.lasting_state_specs()},
        )
        copies.begun = set(order)
        self.stack = copies
        try:
            yield
        finally:
            self.stack = stack

    def _parameters_of(self, clients: Sequence[int], but: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Clients' current parameters, (C, *shape), except those in ``but``; they may be views."""
        stack, names = self.stack, [name for name in self.initial if name not in (but or {})]
        if self.active.issuperset(clients):
            rows = rows_of(stack.positions_of(clients), self.fabric.device)
            return {name: rows_at(stack.parameters[name], rows) for name in names}
        result = {name: self.initial[name].expand(len(clients), *self.initial[name].shape) for name in names}
        here = [row for row, client in enumerate(clients) if client in stack.begun]
        active = [row for row in here if clients[row] in self.active]
        away = [row for row, client in enumerate(clients) if client not in stack.begun and client in self.store]
        stored = self.store.get([clients[row] for row in away], [f"p/{name}" for name in names]) if away else {}
        for name in names:
            parameters = here if name in self.lasting else active
            if parameters or f"p/{name}" in stored:
                result[name] = result[name].clone()
            if parameters:
                result[name][parameters] = stack.parameters[name][
                    stack.positions_of(clients[row] for row in parameters)
                ]
            if f"p/{name}" in stored:
                result[name][away] = stored[f"p/{name}"].to(result[name])
        return result

    def _client_state_of(self, clients: Sequence[int], name: str, num_examples: int) -> Tensor:
        """Client state of a lasting name, (C, *shape), or (C, N, *shape) for N = ``num_examples``."""
        stack, spec = self.stack, self.state_specs[name]
        if stack.begun.issuperset(clients):
            value = stack.client_state[name][rows_of(stack.positions_of(clients), self.fabric.device)]
            return value[:, :num_examples] if spec.per_example else value
        result = self.first_client_state(spec, clients, num_examples)
        here = [row for row, client in enumerate(clients) if client in stack.begun]
        away = [row for row, client in enumerate(clients) if client not in stack.begun and client in self.store]
        if here:
            parameters = stack.client_state[name][stack.positions_of(clients[row] for row in here)]
            result[here] = pad_examples(parameters, num_examples) if spec.per_example else parameters
        if away:
            parameters = self.store.get([clients[row] for row in away], [f"s/client_state/{name}"])[
                f"s/client_state/{name}"
            ].to(result)
            result[away] = pad_examples(parameters, num_examples) if spec.per_example else parameters
        return result
