"""Learning rates that change from round to round, on both executors and where strategies compute with them."""

import functools
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from fl_lightning import Callback, ClientModule, Participation, SequentialExecutor, StackedExecutor
from fl_lightning.models import GCN
from fl_lightning.relations.topology import Ring
from fl_lightning.round.lr_schedule import LRSchedule
from fl_lightning.strategies import APFL, SCAFFOLD, DFedU, Ditto, FedAvg, FedAvgFinetune, SheafFMTL
from fl_lightning.strategies.mixing.fedaux import FedAux

both_executors = pytest.mark.parametrize("executor", [SequentialExecutor, StackedExecutor])
NET = functools.partial(GCN, hidden_channels=8)
ONE = functools.partial(SGD, lr=0.1, momentum=0.9)
#: Nothing is learned after round 0.
STOPS = functools.partial(ExponentialLR, gamma=0.0)


def warmed_up(optimizer: torch.optim.Optimizer) -> SequentialLR:
    """Two rounds of warmup, then half of the rate every round."""
    parts = [LinearLR(optimizer, start_factor=0.25, total_iters=2), ExponentialLR(optimizer, gamma=0.5)]
    return SequentialLR(optimizer, parts, milestones=[2])


class Watched(ClientModule):
    """Notes the learning rate of every step."""

    rates: ClassVar[list[list[float]]] = []

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.rates.append([group["lr"] for group in optimizer.param_groups])


class WatchedGroups(Watched):
    """Biases have a rate of their own."""

    def build_optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        named = list(named_parameters)
        biases = [p for name, p in named if name.endswith("bias")]
        return SGD([{"params": [p for n, p in named if not n.endswith("bias")]}, {"params": biases, "lr": 1.0}], lr=0.1)


def trained(make_trainer: Any, data: Any, strategy: Any, model: ClientModule, executor: Any, **settings: Any) -> Any:
    trainer = make_trainer(**{"num_rounds": 5, "executor": executor, "precision": "64-true", **settings})
    trainer.fit(model, data, strategy)
    return trainer.run


def test_every_step_of_a_round_has_its_rate_whoever_takes_part(federation: Any, make_trainer: Any) -> None:
    Watched.rates = []
    model = Watched(NET, ONE, lr_scheduler=warmed_up)
    some = Participation(num_clients=2)
    run = trained(make_trainer, federation, FedAvg(num_epochs=3), model, SequentialExecutor(), participation=some)

    rates = [0.025, 0.0625, 0.1, 0.05, 0.025]
    assert [rate for step in Watched.rates for rate in step] == pytest.approx([r for r in rates for _ in range(6)])
    assert [row["learning_rate"] for row in run.history] == pytest.approx(rates)


def test_every_group_keeps_its_own(federation: Any, make_trainer: Any) -> None:
    Watched.rates = []
    model = WatchedGroups(NET, lr_scheduler=functools.partial(StepLR, step_size=1, gamma=0.5))
    trained(make_trainer, federation, FedAvg(num_epochs=1), model, SequentialExecutor(), num_rounds=2)

    assert Watched.rates == [[0.1, 1.0]] * 5 + [[0.05, 0.5]] * 5


@pytest.mark.parametrize("optimizer", [ONE, functools.partial(Adam, lr=0.01, fused=True), torch.optim.Adafactor])
def test_executors_agree(optimizer: Any, federation: Any, make_trainer: Any, assert_same: Any) -> None:
    """With absent clients, and an optimizer that is one per client."""
    states = []
    for executor in (SequentialExecutor(), StackedExecutor(max_padding=0.9)):
        model = Ditto.client_class(NET, optimizer, lr_scheduler=warmed_up)
        some = Participation(num_clients=3)
        run = trained(make_trainer, federation, Ditto(num_epochs=2), model, executor, participation=some)
        states.append(run.executor.lasting_state().named())

    assert_same(states[1], states[0], tolerance=1e-8)


@both_executors
@pytest.mark.parametrize(
    "strategy",
    [
        FedAvg,
        SCAFFOLD,
        functools.partial(Ditto, decoupled=True, proximal_weight=1.0),
        functools.partial(APFL, mixture=0.5, adaptive="step"),
        functools.partial(DFedU, topology=Ring(), regularization=0.5),
        functools.partial(SheafFMTL, topology=Ring(), regularization=0.5, map_step_size=0.0, projection_fraction=0.9),
    ],
    ids=["FedAvg", "SCAFFOLD", "Ditto", "APFL", "DFedU", "SheafFMTL"],
)
def test_at_rate_zero_nothing_moves(strategy: Any, executor: Any, federation: Any, make_trainer: Any) -> None:
    """Neither local steps nor what strategies multiply with the rate: pulls to neighbors or to a model, a mixture."""

    def losses(scheduler: Any) -> list[float]:
        model = ClientModule(NET, functools.partial(SGD, lr=0.1), lr_scheduler=scheduler)
        run = trained(make_trainer, federation, strategy(), model, executor(), num_rounds=3)
        return [row["train/loss"] for row in run.history]

    still, moving = losses(STOPS), losses(None)
    assert still[2] == pytest.approx(still[1], abs=1e-12)
    assert moving[2] != pytest.approx(moving[1], abs=1e-3)
    assert still[0] == moving[0]


@both_executors
def test_copies_that_are_tuned_have_the_optimizers_own_rate(executor: Any, federation: Any, make_trainer: Any) -> None:
    """Otherwise a schedule that ends at zero would leave nothing of the tuning."""
    losses = []
    for schedule in (STOPS, None):
        model = ClientModule(NET, ONE, lr_scheduler=schedule)
        run = trained(make_trainer, federation, FedAvgFinetune(num_finetune_epochs=3), model, executor(), num_rounds=1)
        losses.append(run.history[-1]["train/loss"])

    assert losses[0] == losses[1]


@both_executors
def test_it_resumes_exactly(
    executor: Any, federation: Any, make_trainer: Any, tmp_path: Path, assert_same: Any
) -> None:
    class Save(Callback):
        def on_checkpoint_point(self, trainer: Any) -> None:
            if trainer.run.round_idx == 2:
                trainer.save_checkpoint(tmp_path / "second.ckpt")

    def run(path: Path | None, *callbacks: Callback) -> Any:
        trainer = make_trainer(num_rounds=4, executor=executor(), callbacks=list(callbacks))
        schedule = functools.partial(OneCycleLR, max_lr=0.2, total_steps=6)  # cycles the momentum, too
        model = ClientModule(NET, ONE, lr_scheduler=schedule)
        trainer.fit(model, federation, FedAvg(), ckpt_path=path)
        return trainer.run.executor.lasting_state().named()

    whole = run(None, Save())
    assert_same(run(tmp_path / "second.ckpt"), whole)


def test_the_vector_of_fedaux_keeps_its_multiple(federation: Any) -> None:
    model = FedAux.client_class(optimizer=ONE, projection_lr_multiplier=30.0, lr_scheduler=STOPS)
    model.build(federation.num_features, federation.num_outputs)

    schedule = LRSchedule(functools.partial(ExponentialLR, gamma=0.5), model.configure_optimizers)
    assert [group["lr"] for group in schedule.at(1)] == pytest.approx([0.05, 1.5])


@pytest.mark.parametrize(
    ("scheduler", "message"),
    [
        (ReduceLROnPlateau, "must follow from the round"),
        (functools.partial(CosineAnnealingLR), "model.lr_scheduler: .*T_max"),
        (
            functools.partial(OneCycleLR, max_lr=1.0, total_steps=3),
            r"ends after 4 rounds, and trainer.num_rounds is 9 \(Tried to step 4 times.*set trainer.num_rounds to 4",
        ),
        (lambda optimizer: optimizer, "model.lr_scheduler is a _Groups"),
        (
            functools.partial(LambdaLR, lr_lambda=lambda epoch: None),
            r"model.lr_scheduler: .*NoneType.*\(a function must return a number\)",
        ),
        (
            functools.partial(LambdaLR, lr_lambda=lambda epoch: None if epoch else 1.0),
            r"model.lr_scheduler, in round 1: .*NoneType.*\(a function must return a number\)",
        ),
    ],
)
def test_what_is_no_function_of_the_round_is_refused_before_training(
    scheduler: Any, message: str, federation: Any, make_trainer: Any
) -> None:
    class NoRound(Callback):
        def on_round_start(self, trainer: Any) -> None:
            raise AssertionError("a round has begun")

    trainer = make_trainer(num_rounds=9, callbacks=[NoRound()])
    with pytest.raises(ValueError, match=message):
        trainer.fit(ClientModule(NET, ONE, lr_scheduler=scheduler), federation, FedAvg())
    assert not trainer.started
    assert not trainer.root.exists()


def test_a_scheduler_instead_of_its_class_is_refused() -> None:
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    with pytest.raises(ValueError, match="lr_scheduler is a ExponentialLR: give its class"):
        ClientModule(lr_scheduler=ExponentialLR(optimizer, 0.5))


def test_scaffolds_displacement_is_refused(federation: Any, make_trainer: Any) -> None:
    with pytest.raises(ValueError, match="which divides by the learning rate"):
        make_trainer().fit(
            ClientModule(NET, functools.partial(SGD, lr=0.1), lr_scheduler=STOPS),
            federation,
            SCAFFOLD(control="displacement"),
        )


def test_a_rate_that_is_a_tensor_is_nobody_elses() -> None:
    """The scheduler changed it in place, in all rounds and for all clients."""
    rate = torch.tensor(0.5)
    schedule = LRSchedule(
        functools.partial(ExponentialLR, gamma=0.5), lambda: Adam([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    )
    assert [float(schedule.at(round_idx)[0]["lr"]) for round_idx in (0, 2, 1, None)] == [0.5, 0.125, 0.25, 0.5]
    assert rate == 0.5
