"""What takes stacks computes on a stack what it computes for each client; penalties have a gradient in closed form."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from fl_lightning import Participation, SequentialExecutor, StackedExecutor
from fl_lightning.kernels.per_client import along, norm
from fl_lightning.round.context import Context
from fl_lightning.round.program import Change, LocalProgram
from fl_lightning.round.stage import Stage, StateSpec
from fl_lightning.strategies import FedAvg
from fl_lightning.strategies.objectives import L1Norm, Proximal, Sum

STACKED = functools.partial(StackedExecutor, max_padding=0.8)


class Shortened(FedAvg):
    """Steps by shortened gradients; each client also keeps their sum and the parameters before its last step."""

    def __init__(self, *, takes_stacks: bool) -> None:
        super().__init__(num_epochs=3)
        self.takes_stacks, self.calls, self.sent = takes_stacks, set(), []

    def marked(self, function: Any) -> Any:
        def call(*given: Any) -> Any:
            self.calls.add((function.__name__, given[-1].is_stack))
            return function(*given)

        call.takes_stacks = self.takes_stacks
        return call

    def client_state(self) -> dict[str, StateSpec]:
        zeros = {"sum": torch.zeros(3).double(), "before": torch.zeros(3, 8).double()}
        return {name: StateSpec(initial=zero, lasting=False) for name, zero in zeros.items()}

    def training(self, round_idx: int) -> Stage:
        program = LocalProgram(init=self.marked(self.init), step=self.marked(self.step), final=self.marked(self.final))
        return dataclasses.replace(super().training(round_idx), program=program)

    def client_outputs(self) -> Any:
        return {"kept": self.marked(self.kept), "bias": lambda client, parameters, *_: parameters["head.bias"].sum()}

    @staticmethod
    def init(parameters: Any, context: Context) -> Change:
        return Change(client_state={"before": parameters["head.weight"]})

    @staticmethod
    def step(client: Any, parameters: Any, gradients: Any, batch: Any, context: Context) -> Change:
        factor = 1 / (1 + norm(list(gradients.values()), is_stack=context.is_stack))
        short = {name: along(factor, gradient) * gradient for name, gradient in gradients.items()}
        return Change(gradients=short, client_state={"sum": context.client_state["sum"] + gradients["head.bias"]})

    @staticmethod
    def final(parameters: Any, context: Context) -> Change:
        return Change(anchor={"head.bias": context.anchor["head.bias"] + parameters["head.bias"]})

    @staticmethod
    def kept(client: Any, parameters: Any, batch: Any, context: Context) -> dict[str, Tensor]:
        return {**context.client_state, "anchor": context.anchor["head.bias"]}

    def aggregate(self, stage: Stage, upload: Any) -> None:
        self.sent.append(dict(upload.extras) | dict(upload.parameters))
        super().aggregate(stage, upload)


@pytest.mark.parametrize("participation", [None, Participation(num_clients=4, straggler_probability=0.5)])
def test_on_a_stack_as_for_each_client(participation, federation, make_model, make_trainer, assert_same) -> None:
    sent = []
    for executor, takes_stacks in ((SequentialExecutor, True), (STACKED, False), (STACKED, True)):
        strategy = Shortened(takes_stacks=takes_stacks)
        trainer = make_trainer(
            executor=executor(), num_rounds=2, precision="64-true", seed=1, participation=participation
        )
        trainer.fit(make_model(dropout=0.5), federation, strategy)
        on_stack = executor is STACKED and takes_stacks
        tried = {("kept", False), ("step", False)} if on_stack else set()  # on one client, before the first stage
        assert strategy.calls == {(name, on_stack) for name in ("init", "step", "final", "kept")} | tried
        sent.append(strategy.sent)
    for other in sent[1:]:
        for mine, reference in zip(other, sent[0], strict=True):
            assert_same(mine, reference, tolerance=1e-12)
    assert not torch.equal(sent[0][-1]["kept/before"], sent[0][-1]["head.weight"])  # before the last step


@pytest.mark.parametrize(
    "penalty",
    [
        Proximal(0.3),
        Proximal(0.3, ("b",)),
        Proximal(0.3, center=lambda context: {"a": context.received["u"]}),
        L1Norm(0.7, ("a",)),
        Sum((Proximal(0.3), L1Norm(0.7, ("b",)), Proximal(1.1, ("a",)))),
    ],
)
def test_the_gradient_of_a_penalty_is_that_of_autograd(penalty) -> None:
    draw = torch.Generator().manual_seed(0)
    a, b, anchor_a, anchor_b, u = torch.randn(5, 4, 3, generator=draw)
    context = Context(anchor={"a": anchor_a, "b": anchor_b}, received={"u": u})
    given = {"a": a.requires_grad_(), "b": b.requires_grad_()}
    penalty(given, context).backward()
    with torch.no_grad():
        closed = penalty.gradient(given, context)
    for name, parameter in given.items():
        assert (parameter.grad is None) == (name not in closed)
        if name in closed:
            torch.testing.assert_close(closed[name], parameter.grad)
            assert closed[name].data_ptr() not in (anchor_a.data_ptr(), anchor_b.data_ptr(), u.data_ptr())


class Pulled(FedAvg):
    """With a penalty on a part of the parameters, of which others are trained."""

    closed = True

    def training(self, round_idx: int) -> Stage:
        penalty = Sum((Proximal(0.5), L1Norm(0.1, ("head.weight",))))
        chosen = penalty if self.closed else lambda parameters, context: penalty(parameters, context)
        return dataclasses.replace(super().training(round_idx), penalty=chosen, trained=("head.*", "convs.0.bias"))


def test_a_penalty_in_closed_form_gives_the_same_steps(federation, make_model, make_trainer, assert_same) -> None:
    results = []
    for executor, closed in ((SequentialExecutor, True), (STACKED, False), (STACKED, True)):
        strategy = Pulled(num_epochs=3)
        strategy.closed = closed
        trainer = make_trainer(executor=executor(), num_rounds=2, precision="64-true", seed=1)
        trainer.fit(make_model(dropout=0.5), federation, strategy)
        results.append(strategy.models)
    assert_same(results[2], results[1], tolerance=1e-12)
    assert_same(results[2], results[0], tolerance=1e-9)
