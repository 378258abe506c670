"""One stage for a group of stacked clients: their local steps, and what they compute afterward.

Shape legend: C clients of the group. Everything that a client knows has a leading client dimension here.
"""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from fl_lightning.batches.base import Batch
from fl_lightning.batches.poisson import PoissonBatch
from fl_lightning.executors.base import draw_batches, spread_outputs
from fl_lightning.executors.failure import check_loss
from fl_lightning.executors.hooks import own_loss
from fl_lightning.executors.in_process import without_padding
from fl_lightning.executors.knowledge import Knowledge, context_of, knowing
from fl_lightning.executors.private import gradient_of_client, noise_of_step, private_draws
from fl_lightning.executors.stack import StackSlice, where_clients
from fl_lightning.executors.together import Together
from fl_lightning.kernels.per_client import over_clients
from fl_lightning.models.batch_norm import statistics_of
from fl_lightning.round.client import ClientModule
from fl_lightning.round.context import Context, Parameters
from fl_lightning.round.privacy import KeyedNumbers
from fl_lightning.round.program import AroundBatch
from fl_lightning.round.stage import ClientOutput, Stage

Autocast = Callable[[], AbstractContextManager[Any]]


def takes_stacks(function: object) -> bool:
    """Whether a function computes on a stack of clients by itself if the client's net and its own functions do."""
    return getattr(function, "takes_stacks", False)


class GroupTraining:
    """Runs a stage for a group.

    Args:
        client: The client module.
        stage: The stage.
        batch: The data of all of the group's clients.
        knowledge: What they know; a stage may move the anchor and the client state.
        takes_stacks: Whether the client's own functions and its net compute on stacks.
        blame: Whether to find out which clients make the group fail, and to continue without these.
        time_limit: Seconds that each client may take; the group may take their sum. None for no bound.
        ragged: Names of client state and received tensors with a row for every example.
        numbers: Source of the random draws and the noise of private training.

    Attributes:
        together: Knows why clients failed.
    """

    def __init__(
        self,
        client: ClientModule,
        stage: Stage,
        batch: Batch,
        knowledge: Knowledge,
        *,
        takes_stacks: bool,
        blame: bool = True,
        time_limit: float | None = None,
        ragged: Collection[str] = (),
        numbers: KeyedNumbers | None = None,
    ) -> None:
        self.client = client
        self.stage = stage
        self.batch = batch
        self.knowledge = knowledge
        self.blame = blame
        self.ragged = ragged
        self.numbers = numbers or KeyedNumbers()
        self.together = Together(len(batch.key), time_limit)
        self.takes_stacks = takes_stacks
        self.pull = getattr(stage.penalty, "gradient", None) if client.privacy is None else None

    def run(self, part: StackSlice, keys: Tensor, autocast: Autocast) -> dict[str, Tensor]:
        """Train, and return the parameters, (C, *shape).

        Args:
            part: The group's clients in the stack.
            keys: The random key of every step and client, (steps, C).
            autocast: Precision of the forward passes.
        """
        self.part, stage = part, self.stage
        named = self.client.net.named_parameters()
        trained = [name for name, parameter in named if parameter.requires_grad and stage.trains(name)]
        leaves = {name: tensor.detach() for name, tensor in part.parameters.items()}  # the slice updates their memory
        for name in trained:
            leaves[name].requires_grad_()
        keys = keys if trained else keys[:0]
        if self.client.privacy is None:
            batches: Iterator[Batch] = draw_batches(self.batch, keys, stage.program.repeat)
        else:
            batches = private_draws(self.batch, keys, self.numbers)
        for step, drawn in enumerate(batches):
            number = step % stage.program.repeat
            if stage.program.restart and step and number == 0:
                part.restart(step)
            if number == 0:
                self._around(stage.program.init, step)
            result = self._gradients(leaves, trained, drawn, step, autocast)
            raw = {name: result[name] for name in trained}
            if moved := {name: tensor for name, tensor in result.items() if name not in raw and tensor is not None}:
                part.put(moved, part.steps(step))
            ruled, change = self._program_step(raw, drawn, step, autocast)
            with knowing(self.client, self.knowledge, step, is_stack=True):
                clipped = self.client.clip(ruled)
            part.step(clipped, step)
            self._constrain(step)
            self._change(change, step)
            if number + 1 == stage.program.repeat:
                self._around(stage.program.final, step)
        return part.parameters

    def loss(self, parameters: Mapping[str, Tensor], batch: Batch, knowledge: Knowledge, step: int) -> Tensor:
        """Each client's objective, with a penalty that has no gradient in closed form, (C,)."""
        client, objective = self.client, self.stage.objective
        penalty = self.stage.penalty if self.pull is None else None
        method = own_loss(client)

        def values(parameters: Mapping[str, Tensor], batch: Batch, context: Context) -> Tensor:
            if objective is None:
                return client.objective(parameters, batch, context)
            return objective(client, parameters, batch, context)

        def one(parameters: dict[str, Tensor], tensors: dict[str, Tensor], knowledge: Knowledge) -> Tensor:
            with knowing(client, knowledge, step) as context:
                loss = values(parameters, batch.replace(tensors), context)
            check_loss(method, loss)
            return loss if penalty is None else loss + penalty(parameters, context)

        if not (self.takes_stacks and (objective is None or takes_stacks(objective))):
            mapped: Tensor = over_clients(one)(dict(parameters), batch.tensors(), knowledge)
            return mapped
        with knowing(client, knowledge, step, is_stack=True) as context:
            loss_C = values(parameters, batch, context)
        if penalty is None:
            return loss_C
        return loss_C + over_clients(lambda p, k: penalty(p, context_of(k, step)))(dict(parameters), knowledge)

    def _gradients(
        self, leaves: Mapping[str, Tensor], trained: Sequence[str], batch: Batch, step: int, autocast: Autocast
    ) -> dict[str, Tensor | None]:
        """The gradients of a step, and the running statistics after it, (C, *shape); zero for clients that fail."""
        running = statistics_of(self.client.net)

        def gradients(leaves: Mapping[str, Tensor], batch: Batch, knowledge: Knowledge) -> dict[str, Tensor | None]:
            if self.client.privacy is not None:
                return self._private_gradients(leaves, trained, batch, knowledge, step, autocast)
            moved = {name: leaves[name].clone() for name in running}  # changed by the forward pass
            with autocast():
                loss_C = self.loss({**leaves, **moved}, batch, knowledge, step)
            inputs = [leaves[name] for name in trained]
            result = torch.autograd.grad(loss_C, inputs, torch.ones_like(loss_C), allow_unused=True)
            return self._pulled(dict(zip(trained, result, strict=True)), leaves, knowledge, step) | moved

        def some(rows: Sequence[int]) -> dict[str, Tensor | None]:
            parameters = {name: tensor[rows].detach() for name, tensor in leaves.items()}
            for name in trained:
                parameters[name].requires_grad_()
            return gradients(parameters, *self._select(batch, rows))

        if not self.blame:
            return gradients(leaves, batch, self.knowledge)
        joined: dict[str, Tensor | None] = dict.fromkeys(trained)
        for rows, result in self.together.compute(lambda: gradients(leaves, batch, self.knowledge), some):
            if len(rows) == len(batch.key):
                return result
            for name, gradient in result.items():
                if gradient is not None:
                    whole = joined.get(name)
                    joined[name] = whole = torch.zeros_like(leaves[name]) if whole is None else whole
                    whole[rows] = gradient
        return joined

    @torch.no_grad()
    def _pulled(
        self, gradients: dict[str, Tensor | None], leaves: Mapping[str, Tensor], knowledge: Knowledge, step: int
    ) -> dict[str, Tensor | None]:
        """The gradients with that of the penalty, if this is in closed form."""
        if self.pull is not None:
            for name, pull in self.pull(leaves, context_of(knowledge, step, is_stack=True)).items():
                if name in gradients:
                    gradient = gradients[name]
                    gradients[name] = pull if gradient is None else pull.add_(gradient)
        return gradients

    @torch.no_grad()
    def _private_gradients(
        self,
        leaves: Mapping[str, Tensor],
        trained: Sequence[str],
        batch: Batch,
        knowledge: Knowledge,
        step: int,
        autocast: Autocast,
    ) -> dict[str, Tensor | None]:
        """The noisy gradients of a step of private training, (C, *shape)."""
        client, privacy = self.client, self.client.privacy
        assert privacy is not None, "of private training"
        assert isinstance(batch, PoissonBatch), "drawn so"
        parameters = {name: leaves[name].detach() for name in trained}
        others = {name: tensor.detach() for name, tensor in leaves.items() if name not in parameters}

        def one(
            parameters: Any, others: Any, noise: Any, tensors: dict[str, Tensor], known: Knowledge
        ) -> dict[str, Tensor]:
            with knowing(client, known, step) as context:
                return gradient_of_client(
                    client,
                    self.stage,
                    privacy,
                    trained=parameters,
                    others=others,
                    batch=batch.replace(tensors),
                    context=context,
                    noise=noise,
                    num_together=len(batch.key),
                )

        with autocast():
            noise = noise_of_step(self.numbers, batch, parameters, privacy)
            result: dict[str, Tensor] = torch.vmap(one)(parameters, others, noise, batch.tensors(), knowledge)
        return {**result}

    def _select(self, batch: Batch, rows: Sequence[int]) -> tuple[Batch, Knowledge]:
        """The data and knowledge of some clients, as if only they were in the group."""
        chosen = batch.select(torch.tensor(rows, device=batch.key.device))
        size = chosen.example_mask.shape[1]
        known: Knowledge = {
            kind: {
                n: (t[:, :size] if kind != "anchor" and n in self.ragged else t)[rows] for n, t in parameters.items()
            }
            for kind, parameters in self.knowledge.items()
        }
        return chosen, known

    @torch.no_grad()
    def _around(self, function: AroundBatch | None, step: int) -> None:
        """Apply the program before or after the steps on a batch, for the clients that take them."""
        if function is None:
            return
        parameters, on_stack = dict(self.part.parameters), self._on_stack(function)

        def one(p: Parameters, k: Knowledge) -> dict[str, dict[str, Tensor]]:
            return function(p, context_of(k, step, is_stack=on_stack)).values()

        self._change((one if on_stack else over_clients(one))(parameters, self.knowledge), step)

    def _on_stack(self, function: object) -> bool:
        """Whether a function is called on the whole group without ``vmap``."""
        return self.takes_stacks and takes_stacks(function)

    @torch.no_grad()
    def _program_step(
        self, raw: dict[str, Tensor | None], batch: Batch, step: int, autocast: Autocast
    ) -> tuple[Mapping[str, Tensor | None], dict[str, dict[str, Tensor]]]:
        """The gradients for the optimizer by the program's step, and its other changes."""
        rule, client = self.stage.program.step, self.client
        if rule is None:
            return raw, {}
        gradients = {name: gradient for name, gradient in raw.items() if gradient is not None}

        def compute(p: Any, g: Any, batch: Batch, knowledge: Knowledge) -> dict[tuple[str, str], Tensor]:
            on_stack = self._on_stack(rule)

            def one(p: Any, g: Any, t: dict[str, Tensor], k: Knowledge) -> dict[tuple[str, str], Tensor]:
                shown = None if client.privacy is not None else batch.replace(t)
                with knowing(client, k, step, is_stack=on_stack) as context:
                    change = rule(client, p, g, shown, context)
                kinds = {**change.values(), "gradients": g if change.gradients is None else change.gradients}
                return {
                    (kind, name): tensor for kind, parameters in kinds.items() for name, tensor in parameters.items()
                }

            with autocast():
                mapped = one if on_stack else over_clients(one)
                result: dict[tuple[str, str], Tensor] = mapped(p, g, batch.tensors(), knowledge)
            return result

        def some(rows: Sequence[int]) -> dict[tuple[str, str], Tensor]:
            parameters, pulled = ({n: t[rows] for n, t in each.items()} for each in (self.part.parameters, gradients))
            return compute(parameters, pulled, *self._select(batch, rows))

        whole = functools.partial(compute, dict(self.part.parameters), gradients, batch, self.knowledge)
        ragged = [("client_state", name) for name in self.ragged]
        changed: dict[str, dict[str, Tensor]] = {"gradients": {}}
        for (kind, name), tensor in self.together.joined(whole, some, batch, ragged).items():
            changed.setdefault(kind, {})[name] = tensor
        ruled = changed.pop("gradients")
        return {**dict.fromkeys(raw), **ruled}, changed

    @torch.no_grad()
    def _constrain(self, step: int) -> None:
        """Apply the client's constraint, for the clients that took the step."""
        client, part = self.client, self.part

        def one(p: Parameters, k: Knowledge) -> dict[str, Tensor]:
            with knowing(client, k, step) as context:
                return dict(client.constrain(p, context))

        if type(client).constrain is not ClientModule.constrain:
            part.put(over_clients(one)(dict(part.parameters), self.knowledge), part.steps(step))

    def _change(self, changed: Mapping[str, Mapping[str, Tensor]], step: int) -> None:
        """Change parameters, anchors or client state of the clients that take a step, (C, ...)."""
        if not any(changed.values()):
            return
        active_C = self.part.steps(step)
        for kind in ("anchor", "client_state"):
            old, new = self.knowledge[kind], dict(changed.get(kind, {}))
            for name, tensor in new.items():
                value = where_clients(active_C, tensor, old[name])
                new[name] = value.clone() if self._moves(value) else value
            self.knowledge[kind] = {**old, **new}
        self.part.put(changed.get("parameters", {}), active_C)

    def _moves(self, tensor: Tensor) -> bool:
        """Whether a tensor shares the memory of parameters, which the next step changes."""
        place = tensor.untyped_storage().data_ptr()
        return any(place == parameter.untyped_storage().data_ptr() for parameter in self.part.parameters.values())

    def ask(
        self,
        functions: Mapping[str, ClientOutput],
        parameters: Mapping[str, Tensor],
        autocast: Autocast,
        *,
        sizes_C: Tensor,
        per_example: Collection[str] = (),
    ) -> dict[str, Tensor]:
        """Evaluate functions of each client after training, (C, ...).

        Args:
            functions: The functions by name; several results of one are named ``name/key``.
            parameters: The trained parameters, (C, *shape).
            autocast: Precision of the forward passes.
            sizes_C: Number of examples of each client.
            per_example: Names of results with a row for every example; rows of padding become zero.
        """
        result = self._ask(functions, parameters, autocast, per_example)
        return result | {name: without_padding(result[name], sizes_C) for name in per_example if name in result}

    @torch.no_grad()
    def _ask(
        self,
        functions: Mapping[str, ClientOutput],
        parameters: Mapping[str, Tensor],
        autocast: Autocast,
        per_example: Collection[str],
    ) -> dict[str, Tensor]:
        """Evaluate functions of each client on its data, (C, ...)."""
        if not functions:
            return {}

        def compute(parameters: Mapping[str, Tensor], batch: Batch, knowledge: Knowledge) -> dict[str, Tensor]:
            def one(
                p: dict[str, Tensor], t: dict[str, Tensor], k: Knowledge, *, on_stack: bool = False
            ) -> dict[str, Tensor]:
                values = batch.replace(t)
                chosen = {name: f for name, f in functions.items() if self._on_stack(f) == on_stack}
                with knowing(self.client, k, is_stack=on_stack) as context:
                    return spread_outputs({name: f(self.client, p, values, context) for name, f in chosen.items()})

            given = dict(parameters), batch.tensors(), knowledge
            with autocast():
                result = one(*given, on_stack=True)
                if not all(map(self._on_stack, functions.values())):
                    result |= over_clients(one)(*given)
            return result

        def some(rows: Sequence[int]) -> dict[str, Tensor]:
            values = {name: tensor[rows] for name, tensor in parameters.items()}
            return compute(values, *self._select(self.batch, rows))

        whole = functools.partial(compute, parameters, self.batch, self.knowledge)
        return self.together.joined(whole, some, self.batch, per_example)
