"""All clients of a process trained at once: parameters stacked along a leading client dimension, the objective vmapped.

The losses are summed, so each client's gradient is its own; each client's slice of a stacked parameter is a parameter
of one optimiser, so clients that do not take part keep their optimiser state untouched, exactly as if alone.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.batch import Batch, Collator
from fl_lightning.client import ClientModule, Parameters
from fl_lightning.executors.base import (
    Executor,
    Outcome,
    Work,
    check_optimizer,
    pack_optimizer_state,
    unpack_optimizer_state,
)
from fl_lightning.payload import Payload, concatenate, finite_rows
from fl_lightning.stage import Evaluation, Stage


class ClientStack:
    """Stacked parameters of C clients, and the optimiser that steps them.

    Attributes:
        parameters: By name, (C, *shape); the storage.
        rows: By name, each client's slice as a parameter of the optimiser that shares the storage.
    """

    def __init__(self, client: ClientModule, parameters: dict[str, Tensor]) -> None:
        self.client = client
        self.parameters = parameters
        self.rows = {name: [nn.Parameter(row) for row in tensor] for name, tensor in parameters.items()}
        self.optimizer: Optimizer = check_optimizer(
            client.build_optimizer((name, row) for name, rows in self.rows.items() for row in rows)
        )

    def gather(self, index: Tensor | None) -> dict[str, Tensor]:
        """The chosen clients' parameters; the storage itself for None (all clients)."""
        return self.parameters if index is None else {name: t[index] for name, t in self.parameters.items()}

    def load(self, tensors: Mapping[str, Tensor], positions: Sequence[int]) -> None:
        """Overwrite some clients' parameters, one row of ``tensors`` each."""
        for name, tensor in tensors.items():
            storage = self.parameters[name]
            if len(positions) == len(storage):
                storage.copy_(tensor)
            else:
                storage[torch.tensor(positions, device=storage.device)] = tensor.to(storage.dtype)

    def forget(self, positions: Sequence[int]) -> None:
        """Start some clients' optimiser anew."""
        for rows in self.rows.values():
            for position in positions:
                self.optimizer.state.pop(rows[position], None)

    def step(self, gradients: Mapping[str, Tensor | None], positions: Sequence[int], active: Sequence[bool]) -> None:
        """One optimiser step of the active ones of the clients that the gradients belong to."""
        for name, gradient in gradients.items():
            if gradient is None:  # frozen, or not used by the objective
                continue
            rows = self.rows[name]
            for position, of_client, steps in zip(positions, gradient.contiguous().unbind(), active, strict=True):
                rows[position].grad = of_client if steps else None
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def constrain(self, positions: Sequence[int]) -> None:
        """Put some clients' parameters back where they may be."""
        if type(self.client).constrain is ClientModule.constrain:
            return
        own = {name: tensor[torch.tensor(positions, device=tensor.device)] for name, tensor in self.parameters.items()}
        self.load(torch.vmap(self.client.constrain)(own), positions)


#: The client's functions that compute on a stack as they are, if the net does and none is overridden.
_STACKABLE = ("objective", "output", "loss", "scores")


class StackedExecutor(Executor):
    """Trains all clients of a process at once with ``vmap`` over their stacked parameters.

    A net that says ``takes_stacks`` is called on the whole stack without ``vmap``, which saves its overhead.
    Clients are grouped by size so that padding wastes little, and so that a group fits the budget; the result does not
    depend on the grouping.

    Args:
        max_padding: Largest share of padding nodes in a group, in [0, 1).
        max_clients_per_group: Bounds the memory of one group's activations; None for no bound.
    """

    def __init__(self, *, max_padding: float = 0.3, max_clients_per_group: int | None = None) -> None:
        if not 0 <= max_padding < 1:
            raise ValueError(f"max_padding must be in [0, 1), got {max_padding}")
        if max_clients_per_group is not None and max_clients_per_group < 1:
            raise ValueError(f"max_clients_per_group must be at least 1, got {max_clients_per_group}")
        super().__init__()
        self.max_padding = max_padding
        self.max_clients_per_group = max_clients_per_group

    def _allocate(self) -> None:
        if type(self.client).training_step is not ClientModule.training_step:
            raise ValueError(
                f"{type(self.client).__name__} overrides training_step, which the stacked executor does not call: "
                "override objective or loss, or set trainer.executor to SequentialExecutor"
            )
        self.client.to(self.fabric.device)
        plain = all(getattr(type(self.client), name) is getattr(ClientModule, name) for name in _STACKABLE)
        self.takes_stacks = plain and getattr(self.client.net, "takes_stacks", False)
        count = len(self.clients)
        self.position = {client: position for position, client in enumerate(self.clients)}
        with torch.no_grad():
            self.stack = ClientStack(
                self.client,
                {n: p.detach().expand(count, *p.shape).clone() for n, p in self.client.net.named_parameters()},
            )
        self.groups = self._group()
        self._batches: dict[tuple[int, ...], Batch] = {}

    def _group(self) -> list[tuple[int, ...]]:
        """Cut the clients, largest first, wherever the padding or the number of clients would exceed its bound."""
        groups: list[list[int]] = []
        for client in sorted(self.clients, key=lambda c: (-self.collator.size(c), c)):
            size = self.collator.size(client)
            fits = groups and size >= (1 - self.max_padding) * self.collator.size(groups[-1][0])
            if not fits or len(groups[-1]) == self.max_clients_per_group:
                groups.append([])
            groups[-1].append(client)
        return [tuple(sorted(group)) for group in groups]

    def run(self, work: Work) -> Outcome:
        """Run the stage, one group of clients after another, all clients of a group at once."""
        uploads: list[Payload] = []
        failures: dict[int, str] = {}
        for members in self._split(work.num_epochs):
            upload, failed = self._run_group(members, work)
            uploads.append(upload)
            self.report(len(members))
            failures.update(dict.fromkeys(failed, "its parameters or its answer are not finite after local training"))
        return Outcome(upload=concatenate(uploads), failures=failures)

    def _run_group(self, clients: tuple[int, ...], work: Work) -> tuple[Payload, list[int]]:
        stack, stage = self.stack, work.stage
        positions = [self.position[client] for client in clients]
        index = self._index(positions)
        received = self.received(work.payload, clients)
        stack.load(received, positions)
        anchor = {
            name: received[name].to(tensor) if name in received else tensor.clone()
            for name, tensor in stack.gather(index).items()
        }
        if stage.reset_optimizer:
            stack.forget(positions)
        epochs = [work.num_epochs[client] for client in clients]
        self._train(stack, clients, positions, stage, anchor, epochs, work.round_idx)
        trained = stack.gather(index)
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
            upload = upload.rows([client for row, client in enumerate(clients) if row not in failed])
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
    ) -> None:
        client, batch, index = self.client.train(), self._batch(clients), self._index(positions)
        trained = [n for n, parameter in client.net.named_parameters() if parameter.requires_grad and stage.trains(n)]
        steps = [n * self.collator.steps_per_epoch(c) for n, c in zip(epochs, clients, strict=True)]
        anchor = dict(anchor) if stage.penalty is not None else {}

        def loss(parameters: dict[str, Tensor], tensors: dict[str, Tensor], anchor: dict[str, Tensor]) -> Tensor:
            return client.objective(parameters, batch.replace(tensors), anchor, stage.penalty)

        compute = loss if self.takes_stacks and stage.penalty is None else torch.vmap(loss)
        for step in range(max(steps, default=0) if trained else 0):
            leaves = {name: tensor.detach() for name, tensor in stack.gather(index).items()}
            inputs = [leaves[name].requires_grad_() for name in trained]
            keys = [self.key(round_idx, stage.name, c, step) for c in clients]
            tensors = batch.draw(torch.tensor(keys, device=self.fabric.device)).tensors()
            with self.fabric.autocast():
                loss_C = compute(leaves, tensors, anchor)
            gradients = torch.autograd.grad(loss_C.sum(), inputs, allow_unused=True)
            active = [step < own for own in steps]
            stack.step(dict(zip(trained, gradients, strict=True)), positions, active)
            stack.constrain([position for position, steps in zip(positions, active, strict=True) if steps])
        client.eval()

    @torch.no_grad()
    def _map_signals(self, stage: Stage, parameters: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        def signals(parameters: dict[str, Tensor], tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            one = batch.replace(tensors)
            return {name: signal(self.client, parameters, one) for name, signal in stage.signals.items()}

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
        parameters = dict(self.stack.gather(self._index([self.position[client] for client in clients])))
        if evaluation.payload is not None:
            received = self.received(evaluation.payload, clients)
            parameters |= {name: tensor.to(parameters[name]) for name, tensor in received.items()}
        if evaluation.num_epochs:
            finetuning = Stage(name="finetune", trained=evaluation.trained)
            copies = ClientStack(self.client, {name: tensor.clone() for name, tensor in parameters.items()})
            epochs = [evaluation.num_epochs] * len(clients)
            self._train(copies, clients, range(len(clients)), finetuning, {}, epochs, round_idx)
            parameters = copies.parameters
        self.client.eval()
        return parameters

    def state(self) -> Payload:
        """Parameters and optimiser state of all clients."""
        optimizers = [self.stack.optimizer] * len(self.clients)
        rows = ((name, rows, optimizers) for name, rows in self.stack.rows.items())
        signals = pack_optimizer_state(rows, self.fabric.device)
        return Payload(clients=self.clients, parameters=dict(self.stack.parameters), signals=signals)

    def load_state(self, state: Payload) -> None:
        """Restore parameters and optimiser state."""
        mine = state.rows(self.clients)
        self.stack.load(mine.parameters, range(len(self.clients)))
        for name, rows in self.stack.rows.items():
            for position, row in enumerate(rows):
                unpack_optimizer_state(name, position, row, self.stack.optimizer, mine)

    def _split(self, clients: Sequence[int] | Mapping[int, int]) -> list[tuple[int, ...]]:
        """The given clients of this process by group."""
        wanted = set(clients)
        chosen = (tuple(client for client in group if client in wanted) for group in self.groups)
        return [members for members in chosen if members]

    def _index(self, positions: Sequence[int]) -> Tensor | None:
        if len(positions) == len(self.clients):
            return None
        return torch.tensor(positions, dtype=torch.int64, device=self.fabric.device)

    def _batch(self, clients: tuple[int, ...]) -> Batch:
        """The clients' batch; whole groups are kept, chance subsets of them only while they are in use."""
        if clients not in self._batches:
            for members in [members for members in self._batches if members not in self.groups]:
                del self._batches[members]
            self._batches[clients] = self.collator(clients)
        return self._batches[clients]
