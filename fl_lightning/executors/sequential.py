"""The reference executor: one client after another, each a LightningModule of its own with its own optimiser."""

import copy
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.batches.base import Batch, Collator, single
from fl_lightning.executors.base import (
    Executor,
    Outcome,
    Work,
    check_optimizer,
    pack_optimizer_state,
    unpack_optimizer_state,
)
from fl_lightning.round.client import ClientModule
from fl_lightning.round.context import Context
from fl_lightning.round.payload import Payload, concatenate, finite_rows
from fl_lightning.round.stage import Evaluation, Stage


class SequentialExecutor(Executor):
    """Trains one client after another through its LightningModule hooks.

    Slow and plain: it defines what a stage computes, and runs any client module, also one that overrides
    ``training_step``.
    """

    def _allocate(self) -> None:
        self.modules: dict[int, ClientModule] = {}
        self.optimizers: dict[int, Optimizer] = {}
        self._batches: dict[int, Batch] = {}
        for client in self.clients:
            self.modules[client] = copy.deepcopy(self.client).to(self.fabric.device)
            self.modules[client].fabric = self.fabric
            self.optimizers[client] = check_optimizer(self.modules[client].configure_optimizers())

    def run(self, work: Work) -> Outcome:
        """Run the stage for each client in turn."""
        answers: dict[int, Payload] = {}
        failures: dict[int, str] = {}
        for client in (client for client in self.clients if client in work.num_epochs):
            module = self.modules[client]
            _load(module, {name: tensor[0] for name, tensor in self.received(work.payload, [client]).items()})
            anchor = {name: parameter.detach().clone() for name, parameter in module.parameter_dict().items()}
            module.context = Context(anchor=anchor)
            try:
                answers[client] = self._run_client(client, work)
            except Exception as error:  # a client runs its user's code: whatever it raises is this client's failure
                failures[client] = f"{type(error).__name__}: {error}"
            self.report(1)
        failures |= _misfits(answers)
        for client in failures:
            _load(self.modules[client], self.modules[client].context.anchor)
            self.optimizers[client] = check_optimizer(self.modules[client].configure_optimizers())
        parts = [answer for client, answer in answers.items() if client not in failures]
        return Outcome(upload=concatenate(parts), failures=failures)

    def _run_client(self, client: int, work: Work) -> Payload:
        module, stage, batch = self.modules[client], work.stage, self._batch(client)
        if stage.reset_optimizer:
            self.optimizers[client] = check_optimizer(module.configure_optimizers())
        self._train(module, self.optimizers[client], stage, client, work.num_epochs[client], work.round_idx)
        parameters = {name: parameter.detach() for name, parameter in module.parameter_dict().items()}
        context = module.context
        with torch.no_grad(), self.fabric.autocast():
            signals = {name: signal(module, parameters, batch, context) for name, signal in stage.signals.items()}
        if not finite_rows(tensor[None] for tensor in (*parameters.values(), *signals.values())).all():
            raise FloatingPointError("its parameters or its answer are not finite after local training")
        trained, anchor = ({n: t[None] for n, t in tensors.items()} for tensors in (parameters, module.context.anchor))
        return Payload(
            clients=(client,),
            parameters=self.sent(stage, trained, anchor),
            signals={name: tensor[None] for name, tensor in signals.items()},
            num_examples=module.example_count(batch)[None],
        )

    def _train(
        self, module: ClientModule, optimizer: Optimizer, stage: Stage, client: int, num_epochs: int, round_idx: int
    ) -> None:
        module.penalty = stage.penalty
        batch, num_steps = self._batch(client), self.collator.steps_per_epoch(client)
        untrained = [parameter for name, parameter in module.net.named_parameters() if not stage.trains(name)]
        module.train()
        module.on_train_start()
        draws = batch.draws(self.keys(round_idx, stage.name, [client], num_epochs * num_steps)[:, 0])
        for _ in range(num_epochs):
            module.on_train_epoch_start()
            for batch_idx, drawn in enumerate(itertools.islice(draws, num_steps)):
                module.zero_grad()
                with self.fabric.autocast():
                    loss = module.training_step(drawn, batch_idx)
                loss.backward()  # type: ignore[no-untyped-call]
                for parameter in untrained:
                    parameter.grad = None
                _clip(module)
                optimizer.step()
                with torch.no_grad():
                    _load(module, module.constrain(module.parameter_dict(), module.context))
            module.on_train_epoch_end()
        module.on_train_end()
        module.eval()

    def evaluate(
        self, evaluation: Evaluation, clients: Sequence[int], round_idx: int, *, collator: Collator | None = None
    ) -> Payload:
        """Score each client in turn."""
        mine = [client for client in self.clients if client in set(clients)]
        scores: dict[str, list[Tensor]] = {}
        for client in mine:
            module = self._evaluated(evaluation, client, round_idx)
            batch = self._batch(client) if collator is None else single(collator([client]))
            found = self.sum_scores(module.parameter_dict(), batch, module.score_table)
            for name, pair in found.items():
                scores.setdefault(name, []).append(pair)
        return Payload(clients=tuple(mine), signals={name: torch.stack(pairs) for name, pairs in scores.items()})

    def predict(self, evaluation: Evaluation, clients: Sequence[int]) -> dict[int, Tensor]:
        """Predict each client in turn."""
        predictions = {}
        for client in (client for client in self.clients if client in set(clients)):
            with torch.no_grad(), self.fabric.autocast():
                module = self._evaluated(evaluation, client, 0)
                parts = [module.predict_step(part, 0).float() for part in self._batch(client).parts()]
                predictions[client] = torch.cat(parts)
        return predictions

    def _evaluated(self, evaluation: Evaluation, client: int, round_idx: int) -> ClientModule:
        """The module to score: the client's own, or a copy with other parameters or some more training."""
        module = self.modules[client]
        if evaluation.payload is not None or evaluation.num_epochs:
            module = copy.deepcopy(module, {id(module.fabric): module.fabric})  # Fabric is shared, not copied
        if evaluation.payload is not None:
            _load(module, {name: t[0] for name, t in self.received(evaluation.payload, [client]).items()})
        if evaluation.num_epochs:
            finetuning = Stage(name="finetune", trained=evaluation.trained)
            with torch.enable_grad():
                optimizer = check_optimizer(module.configure_optimizers())
                self._train(module, optimizer, finetuning, client, evaluation.num_epochs, round_idx)
        return module.eval()

    def state(self) -> Payload:
        """Parameters and optimiser state of all clients."""
        nets = [dict(self.modules[client].net.named_parameters()) for client in self.clients]
        optimizers = [self.optimizers[client] for client in self.clients]
        names = list(nets[0]) if nets else []
        return Payload(
            clients=self.clients,
            parameters={name: torch.stack([net[name].detach() for net in nets]) for name in names},
            signals=pack_optimizer_state(
                ((name, [net[name] for net in nets], optimizers) for name in names), self.fabric.device
            ),
        )

    def load_state(self, state: Payload) -> None:
        """Restore parameters and optimiser state."""
        for client in self.clients:
            row = state.clients.index(client)
            module = self.modules[client]
            _load(module, {name: tensor[row] for name, tensor in state.parameters.items()})
            for name, parameter in module.net.named_parameters():
                unpack_optimizer_state(name, row, parameter, self.optimizers[client], state)

    def _batch(self, client: int) -> Batch:
        if client not in self._batches:
            self._batches[client] = single(self.collator([client]))
        return self._batches[client]


def _misfits(answers: Mapping[int, Payload]) -> dict[int, str]:
    """Clients whose signals have other shapes than those of most."""
    shapes = {
        client: tuple((name, tuple(tensor.shape[1:])) for name, tensor in answer.signals.items())
        for client, answer in answers.items()
    }
    usual = Counter(shapes.values()).most_common(1)
    return {
        client: f"it sent {dict(own)}, most others sent {dict(usual[0][0])}"
        for client, own in shapes.items()
        if own != usual[0][0]
    }


def _clip(module: ClientModule) -> None:
    own = module.parameter_dict()
    gradients = {name: None if p.grad is None else p.grad[None] for name, p in own.items()}
    clipped = module.clip(gradients)
    if clipped is not gradients:
        for name, gradient in clipped.items():
            own[name].grad = None if gradient is None else gradient[0]


def _load(module: ClientModule, tensors: Mapping[str, Tensor]) -> None:
    own = module.parameter_dict()
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
