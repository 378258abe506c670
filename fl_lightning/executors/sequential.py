"""The reference executor: one client after another, each a LightningModule of its own with its own optimizer."""

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fl_lightning.batches.base import Batch, Collator, single
from fl_lightning.batches.poisson import PoissonBatch
from fl_lightning.executors.base import draw_batches, spread_outputs
from fl_lightning.executors.failure import WrongLoss, check_loss, failure_of
from fl_lightning.executors.hooks import SEQUENTIAL, overridden, own_loss
from fl_lightning.executors.optimizer_state import check_optimizer
from fl_lightning.executors.own_draws import begin_at, drawn_from
from fl_lightning.executors.own_terms import noticed, watched_objective
from fl_lightning.executors.private import (
    SPENT,
    check_private_stage,
    gradient_of_client,
    noise_of_step,
    private_draws,
)
from fl_lightning.executors.sequential_clients import SequentialClients, detached, load
from fl_lightning.executors.stage_request import StageRequest, StageResult, misfits
from fl_lightning.executors.time_limit import within
from fl_lightning.executors.trial import own_code
from fl_lightning.round.client import ClientModule
from fl_lightning.round.context import Context
from fl_lightning.round.lr_schedule import set_groups
from fl_lightning.round.payload import Payload, concatenate, finite_rows
from fl_lightning.round.privacy import RecordPrivacy, check_tuning
from fl_lightning.round.program import Change
from fl_lightning.round.stage import Evaluation, Stage


class SequentialExecutor(SequentialClients):
    """Trains one client after another through its LightningModule hooks.

    It is slow and simple: it defines what a stage computes, and runs any client module, even one that overrides
    ``training_step``.
    """

    def _arrange(self) -> None:
        self._batches: dict[int, Batch] = {}
        self._new_data: dict[int, Any] = {}
        self.has_own_code = bool(own_code(self.client) or overridden(self.client, SEQUENTIAL))

    def _own_draws(self, client: int, round_idx: int, what: str) -> AbstractContextManager[None]:
        """A context in which draws of the user's own code follow from the client, the round and what it does."""
        return drawn_from(self.keys(round_idx, what, [client], 1)[0, 0]) if self.has_own_code else nullcontext()

    def _watch(self, module: ClientModule, stage: Stage) -> AbstractContextManager[None]:
        """A context for a step that says, once for a stage, which terms of the loss an own ``training_step`` lacks."""
        if (stage.name, "step") in self.said or not overridden(module, ("training_step",)):
            return nullcontext()
        self.said.add((stage.name, "step"))
        return noticed(module, says=self.fabric.is_global_zero)

    def run(self, request: StageRequest, report: Callable[[int], None] | None = None) -> StageResult:
        """Run the stage for each client in turn."""
        check_private_stage(self.client, request.stage)
        uploads: dict[int, Payload] = {}
        contexts: dict[int, tuple[Context, Context]] = {}  # at the start and at the end of the stage
        failures: dict[int, str] = {}
        with self._for_stage(request) as clients:
            self._leave(sorted(self.modules.keys() - set(clients) - self.active))
            for client in clients:
                self._activate(client)
                module = self.modules[client]
                module.round_idx = request.address.round_idx
                load(
                    module,
                    {name: tensor[0] for name, tensor in self.received_parameters(request.payload, [client]).items()},
                )
                start = module.context = self._context(client, request.payload)
                try:
                    draws = self._own_draws(client, request.address.round_idx, request.stage.name)
                    with within(self.time_limit), draws:
                        uploads[client] = self._run_client(client, request)
                except Exception as error:  # a client runs the user's code: whatever it raises is its own failure
                    failures[client] = failure_of(error)
                contexts[client] = start, module.context
                if report is not None:
                    report(1)
                if failures and request.until_failure:
                    break
            failures |= misfits(uploads, request.stage.per_example)
            for client in failures:
                load(self.modules[client], contexts[client][0].anchor)
                self.optimizers[client] = check_optimizer(self.modules[client].configure_optimizers())
            succeeded = [client for client in uploads if client not in failures]
            for client in succeeded:
                self.client_states[client] = dict(contexts[client][1].client_state)
        if request.stage.program.rewrite is not None and request.address.phase != "callback":
            self.rewrite({client: self._new_data[client] for client in succeeded})
        return StageResult(upload=concatenate(uploads[client] for client in succeeded), failures=failures)

    def _context(self, client: int, payload: Payload | None) -> Context:
        """What a client knows at the beginning of a stage."""
        module = self.modules.get(client, self.client)
        anchor = {name: parameter.detach().clone() for name, parameter in module.parameter_dict().items()}
        fresh = {
            n: self.first_client_state(spec, [client])[0] for n, spec in self.state_specs.items() if not spec.lasting
        }
        received = self.received(payload, [client], self.collator.size(client))
        client_state = {**self._client_state_of(client), **fresh}
        return Context(
            anchor=anchor, received={name: tensor[0] for name, tensor in received.items()}, client_state=client_state
        )

    def _run_client(self, client: int, request: StageRequest) -> Payload:
        module, stage, batch = self.modules[client], request.stage, self._batch(client)
        start = module.context.anchor
        if stage.reset_optimizer:
            self.optimizers[client] = check_optimizer(module.configure_optimizers())
        set_groups(self.optimizers[client], self.lr_schedule.at(request.address.scheduled_round))
        optimizer = self._stage_optimizer(stage, module) or self.optimizers[client]
        if module.privacy is not None:
            spent = self.spend(module.context.client_state[SPENT], stage, client, request.work_fraction[client])
            module.context = dataclasses.replace(
                module.context, client_state={**module.context.client_state, SPENT: spent}
            )
        num_steps = self._train(
            module, optimizer, stage, client, request.work_fraction[client], request.address.round_idx
        )
        parameters = detached(module)
        context = dataclasses.replace(module.context, step=0)
        with torch.no_grad(), self.fabric.autocast():
            asked = {name: output(module, parameters, batch, context) for name, output in stage.client_outputs.items()}
            client_outputs = spread_outputs(asked)
            new = {name: value(module, parameters, batch, context) for name, value in stage.client_state.items()}
            client_state = {**context.client_state, **spread_outputs(new)}
            if (rewrite := stage.program.rewrite) is not None:
                self._new_data[client] = rewrite(module, parameters, self.collator.client_data(client), context)
        module.context = dataclasses.replace(context, client_state=client_state)
        result = (*parameters.values(), *client_outputs.values(), *client_state.values())
        if not finite_rows(tensor[None] for tensor in result if tensor.is_floating_point()).all():
            raise FloatingPointError("its parameters or its update are not finite after local training")
        trained, began, anchor = ({n: t[None] for n, t in p.items()} for p in (parameters, start, context.anchor))
        size = torch.tensor([self.collator.size(client)], device=self.fabric.device)
        return Payload(
            clients=(client,),
            parameters=self.sent(stage, trained, began, anchor),
            extras={name: tensor[None] for name, tensor in client_outputs.items()},
            num_examples=module.example_count(batch)[None],
            num_steps=torch.tensor([num_steps], device=self.fabric.device),
            lengths={name: size for name in stage.per_example},
        )

    def blank_outputs(self, stage: Stage, client: int, payload: Payload | None) -> dict[str, Tensor]:
        """Zeros of the names, shapes and types of what a client outputs in a stage, (1, ...); nothing is trained.

        They are found with the common initial parameters and client state.

        Args:
            stage: The stage.
            client: The client.
            payload: What the server sent, if the outputs need it.
        """
        module, batch = self._new_module().eval(), self._batch(client)
        parameters = detached(module)
        first = {name: self.first_client_state(spec, [client])[0] for name, spec in self.state_specs.items()}
        received = {
            name: tensor[0] for name, tensor in self.received(payload, [client], self.collator.size(client)).items()
        }
        module.context = Context(anchor=parameters, received=received, client_state=first)
        with torch.no_grad(), self.fabric.autocast():
            asked = {n: output(module, parameters, batch, module.context) for n, output in stage.client_outputs.items()}
        return {name: torch.zeros_like(tensor)[None] for name, tensor in spread_outputs(asked).items()}

    @staticmethod
    def _stage_optimizer(stage: Stage, module: ClientModule) -> Optimizer | None:
        """The stage's own optimizer, if it has one."""
        return None if stage.optimizer is None else check_optimizer(stage.optimizer(list(module.net.parameters())))

    def _train(
        self,
        module: ClientModule,
        optimizer: Optimizer,
        stage: Stage,
        client: int,
        work_fraction: float,
        round_idx: int,
    ) -> int:
        """Train a client, and return the steps that it took."""
        stage = watched_objective(module, stage, self.said, says=self.fabric.is_global_zero)
        module.stage_objective, module.penalty = stage.objective, stage.penalty
        batch = self._batch(client)
        num_epochs, steps_per_epoch = stage.schedule(work_fraction, self.collator.steps_per_epoch(client))
        trained = {name: p for name, p in module.net.named_parameters() if p.requires_grad and stage.trains(name)}
        num_steps = num_epochs * steps_per_epoch if trained else 0
        keys = self.keys(round_idx, stage.name, [client], num_steps)[:, 0]
        module.train()
        module.on_train_start()
        private = module.privacy is not None
        batches = (
            private_draws(batch, keys, self.numbers) if private else draw_batches(batch, keys, stage.program.repeat)
        )
        for step, drawn in enumerate(batches):
            batch_idx = step % steps_per_epoch
            if self.has_own_code:
                begin_at(keys[step])
            if batch_idx == 0:
                module.on_train_epoch_start()
            module.context = dataclasses.replace(module.context, step=step)
            if stage.program.restart and step and step % stage.program.repeat == 0:
                optimizer.state.clear()
            if module.on_train_batch_start(drawn, batch_idx) != -1:
                with self._watch(module, stage):
                    self._step(module, optimizer, stage, trained, drawn, batch_idx)
            if batch_idx + 1 == steps_per_epoch:
                module.on_train_epoch_end()
        module.on_train_end()
        module.eval()
        return num_steps

    def _step(
        self,
        module: ClientModule,
        optimizer: Optimizer,
        stage: Stage,
        trained: Mapping[str, Tensor],
        batch: Batch,
        batch_idx: int,
    ) -> None:
        """One local step: gradient, the stage's program, clipping, optimizer, constraint."""
        program, number = stage.program, module.context.step % stage.program.repeat
        if program.init is not None and number == 0:
            with torch.no_grad():
                self._change(module, program.init(detached(module), module.context))
        module.on_before_zero_grad(optimizer)
        module.zero_grad()
        loss = torch.zeros((), device=self.fabric.device)  # private training reveals no loss
        more: Mapping[str, Any] | None = None
        if module.privacy is None:
            with self.fabric.autocast():
                loss, more = _loss_of(module.training_step, batch, batch_idx)
            module.on_before_backward(loss)
            loss.backward()  # type: ignore[no-untyped-call]
            module.on_after_backward()
            raw = {name: p.grad for name, p in trained.items() if p.grad is not None}
        else:
            raw = self._private_gradient(module, module.privacy, stage, trained, batch)
        parameters, change = detached(module), Change()
        if program.step is not None:
            shown = None if module.privacy is not None else batch
            with torch.no_grad(), self.fabric.autocast():
                change = program.step(module, parameters, raw, shown, module.context)
        ruled = raw if change.gradients is None else change.gradients
        clipped = module.clip({name: ruled[name][None] if name in ruled else None for name in trained})
        for name, parameter in module.net.named_parameters():
            gradient = clipped.get(name)
            parameter.grad = None if gradient is None else gradient[0]
        module.on_before_optimizer_step(optimizer)
        optimizer.step()
        with torch.no_grad():
            load(module, module.constrain(parameters, module.context))
            self._change(module, change)
            if program.final is not None and number + 1 == program.repeat:
                self._change(module, program.final(parameters, module.context))
        outputs = loss.detach() if more is None else {**more, "loss": loss.detach()}
        module.on_train_batch_end(outputs, batch, batch_idx)

    @staticmethod
    def _change(module: ClientModule, change: Change) -> None:
        """Change a client's parameters, anchor or client state."""
        old = module.context  # copies, since a new value may be a parameter, which the next step changes
        anchor = {**old.anchor, **{name: value.clone() for name, value in change.anchor.items()}}
        client_state = {**old.client_state, **{name: value.clone() for name, value in change.client_state.items()}}
        load(module, change.parameters)
        module.context = dataclasses.replace(module.context, anchor=anchor, client_state=client_state)

    def _private_gradient(
        self, module: ClientModule, privacy: RecordPrivacy, stage: Stage, trained: Mapping[str, Tensor], batch: Batch
    ) -> dict[str, Tensor]:
        assert isinstance(batch, PoissonBatch), "drawn so"
        parameters = {name: parameter.detach() for name, parameter in trained.items()}
        with torch.no_grad(), self.fabric.autocast():
            return gradient_of_client(
                module,
                stage,
                privacy,
                trained=parameters,
                others={name: p for name, p in detached(module).items() if name not in parameters},
                batch=batch,
                context=module.context,
                noise=noise_of_step(self.numbers, batch, parameters, privacy),
            )

    def _score(
        self, evaluation: Evaluation, clients: Sequence[int], round_idx: int, collator: Collator | None
    ) -> StageResult:
        """Score each client in turn."""
        result: dict[int, Payload] = {}
        failures: dict[int, str] = {}
        for client in sorted(self.members.intersection(clients)):
            try:
                with within(self.time_limit), self._own_draws(client, round_idx, "scores"):
                    module = self.evaluated(evaluation, client, round_idx)
                    batch = self._batch(client) if collator is None else single(self._scored_batch([client], collator))
                    examples = self._examples_of(evaluation, batch)
                    scores = self.sum_scores(examples, functools.partial(self._table, module, evaluation))
                result[client] = Payload(clients=(client,), extras={name: pair[None] for name, pair in scores.items()})
            except Exception as error:  # as in training
                failures[client] = failure_of(error)
        return StageResult(upload=concatenate(result.values()), failures=failures)

    @staticmethod
    def _table(module: ClientModule, evaluation: Evaluation, batch: Batch) -> dict[str, Tensor]:
        return module.score_table(module.parameter_dict(), batch, module.context, evaluation.output)

    def _predict(self, evaluation: Evaluation, clients: Sequence[int], round_idx: int) -> dict[int, Tensor]:
        """Predict each client in turn."""
        predictions, collator = {}, self.collator.evaluation
        for client in sorted(self.members.intersection(clients)):
            batch = self._batch(client) if collator is None else single(self._scored_batch([client], collator))
            batch, [size] = self._predicted_of(evaluation, [client], batch)
            draws = self._own_draws(client, round_idx, "predictions")
            with torch.no_grad(), self.fabric.autocast(), draws:
                module = self.evaluated(evaluation, client, round_idx)
                module.output_rule = evaluation.output
                parts = [module.predict_step(part, 0).float() for part in batch.parts()]
                module.output_rule = None
                predictions[client] = torch.cat(parts)[:size]
        return predictions

    def evaluated(self, evaluation: Evaluation, client: int, round_idx: int) -> ClientModule:
        """The module to score: the client's own, or a copy with other parameters or additional training."""
        module = self.modules[client] if client in self.active else self._module_of(client)
        tuning = evaluation.tuning
        if module.privacy is not None:
            check_tuning(tuning, "this run")
        is_other = evaluation.payload is not None or tuning is not None or evaluation.output is not None
        if is_other:
            parameters, module = detached(module), copy.copy(module)
            net = copy.deepcopy(self.client.net)  # not the client's own, whose layers may keep state
            module._modules = {**module._modules, "net": net.to(self.fabric.device)}
            load(module, parameters)
            load(module, {name: t[0] for name, t in self.received_parameters(evaluation.payload, [client]).items()})
        if is_other or self.has_own_code:  # a client's own code may read its context
            context = self._context(client, evaluation.payload)
            anchor = {name: parameter.detach().clone() for name, parameter in module.parameter_dict().items()}
            module.context = dataclasses.replace(context, anchor=anchor)
        if tuning is not None:
            with torch.enable_grad():
                optimizer = self._stage_optimizer(tuning, module) or check_optimizer(module.configure_optimizers())
                self._train(module, optimizer, tuning, client, 1.0, round_idx)
            module.context = dataclasses.replace(module.context, step=0)
        return module.eval()

    def _batch(self, client: int) -> Batch:
        if client not in self._batches:
            batch = single(self.collator([client]))
            self._batches[client] = batch.with_inputs() if overridden(self.client, ("training_step",)) else batch
        return self._batches[client]


def _loss_of(
    step: Callable[[Batch, int], Any], batch: Batch, batch_idx: int
) -> tuple[Tensor, Mapping[str, Any] | None]:
    """The loss of a training step, and the mapping that it came in, if any.

    Raises:
        WrongLoss: It returns none.
    """
    returned: Any = step(batch, batch_idx)
    more = returned if isinstance(returned, Mapping) else None
    given = returned if more is None else more.get("loss")
    method = own_loss(step.__self__)  # type: ignore[attr-defined]
    if more is not None and not isinstance(given, Tensor):
        raise WrongLoss(method, type(returned).__name__ + " without 'loss'")
    loss = check_loss(method, given)
    if not loss.requires_grad:
        raise WrongLoss(method, "a tensor without gradient")
    return loss, more
