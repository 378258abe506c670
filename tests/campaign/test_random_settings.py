"""Random settings of every strategy, on graphs and on examples, keep what every run must keep.

Settings that do not go together are refused before anything is trained. With all others both executors come to the
same, a resume is exact, and a checkpoint scores as the fit reported.
"""

import copy
import dataclasses
import functools
import random
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from campaign.record import Record
from strategies.test_contract import STRATEGIES, TINY
from torch.optim import SGD, Adam, AdamW

from fl_lightning import (
    Callback,
    FederatedDataModule,
    Participation,
    RegressionClient,
    SequentialExecutor,
    StackedExecutor,
)
from fl_lightning.callbacks import (
    EarlyStopping,
    FederatedCheckpoint,
    GaussianAttack,
    LabelFlipping,
    ModelPoisoning,
    RunReport,
    SameValueAttack,
    SignFlip,
    SimilarityLogger,
)
from fl_lightning.data import Examples, ExampleSource
from fl_lightning.models import MLP
from fl_lightning.relations import Complete, Ring
from fl_lightning.strategies import FedTAD, Strategy
from fl_lightning.strategies.mixing import aggregation

NUM_DRAWS, NUM_ROUNDS = 2, 5
SIZES = (40, 9, 23, 6, 12, 17)
#: Values of settings whose type does not list them.
VALUES: dict[str, tuple[Any, ...]] = {
    # no trimmed mean: of two values that differ by rounding alone either may go, and with it its weight
    "aggregation": (None, aggregation.CoordinateMedian(), aggregation.NormClipping(), aggregation.Krum()),
    "common_share": (None, 0.0, 0.25, 1.0),
    "exchange_every": (1, 2),
    "mixture_lr": (None, 0.1),
    "num_epochs": (1, 2, 3),
    "num_finetune_epochs": (0, 1, 2),
    "num_head_epochs": (1, 2),
    "num_neighbors": (None, 1, 2),
    "num_pairs": (None, 2),
    "num_server_steps": (1, 3),
    "personal": ((), ("head.*",), ("*.0.*",)),
    "projection_fraction": (0.3, 1.0),
    "proximal_weight": (0.0, 0.1),
    "refresh_every": (None, 1, 2),
    "snap": (None, 0.9),
    "strength": (None, 0.5),
    "topology": (None, Complete(), Ring()),
    "validate_every": (None, 1, 2),
    "validate_personal": ((), ("head.*",), ("*.0.*", "head.*")),
}
OPTIMIZERS = (
    functools.partial(Adam, lr=0.05, weight_decay=5e-4),
    functools.partial(AdamW, lr=0.02),
    functools.partial(SGD, lr=0.05, momentum=0.9),
)
#: Who watches, attacks or ends the run.
CALLBACKS = (
    functools.partial(EarlyStopping, patience=1),
    RunReport,
    SimilarityLogger,
    functools.partial(GaussianAttack, ratio=0.4),
    functools.partial(LabelFlipping, ratio=0.4),
    functools.partial(ModelPoisoning, ratio=0.4),
    functools.partial(SameValueAttack, ratio=0.4),
    functools.partial(SignFlip, ratio=0.4),
)
SMALL_GROUPS = functools.partial(StackedExecutor, max_clients_per_group=2, max_group_mib=0.2, storage="disk")
CASES = [(kind, on) for kind in STRATEGIES for on in ("graphs", "examples") if on == "graphs" or not kind.needs_graphs]

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # many settings warn, as they should


class Clouds(ExampleSource):
    """Six clients with points of two classes, one client with a single class; or with sums of their coordinates."""

    def __init__(self, *, regression: bool) -> None:
        self.regression = regression

    def load(self, root: Any, seed: int) -> Examples:
        draw = torch.Generator().manual_seed(seed)
        labels = [torch.arange(size) % (1 if client == 3 else 2) for client, size in enumerate(SIZES)]
        x = tuple(torch.randn(len(label_N), 3, generator=draw) + label_N[:, None] for label_N in labels)
        y = tuple(x_N3.sum(dim=1, keepdim=True) for x_N3 in x) if self.regression else tuple(labels)
        names = tuple(f"cloud-{client}" for client in range(len(SIZES)))
        relation_CC = torch.ones(len(SIZES), len(SIZES)).fill_diagonal_(0)
        return Examples(names=names, x=x, y=y, num_outputs=1 if self.regression else 2, relation_CC=relation_CC)


def drawn_settings(kind: type[Strategy], draw: random.Random) -> dict[str, Any]:
    """About half of a strategy's settings drawn, the others as for tiny federations or left out; it takes them all."""
    hints, settings = typing.get_type_hints(kind), dict[str, Any]()
    for name in (field.name for field in dataclasses.fields(kind) if field.init):
        choices: tuple[Any, ...] = VALUES.get(name, ())
        if hints[name] is bool:
            choices = (False, True)
        elif typing.get_origin(hints[name]) is Literal:
            choices = typing.get_args(hints[name])
        if choices and draw.random() < 0.55:
            settings[name] = draw.choice(choices)
        elif name in TINY:
            settings[name] = TINY[name]
    try:
        kind(**settings)
    except ValueError:
        return drawn_settings(kind, draw)
    if kind is FedTAD and isinstance(settings.get("aggregation"), aggregation.Krum):
        del settings["aggregation"]  # the student would begin as one of the teachers, at the kink of its distance to it
    return settings


def drawn_participation(draw: random.Random) -> dict[str, Any]:
    """Something of what participation can do to a round."""
    every = {
        "num_clients": draw.choice((2, 3)),
        "dropout_probability": 0.3,
        "straggler_probability": 0.5,
        "held_out_fraction": draw.choice((0.2, 0.4)),
        "max_void_rounds": NUM_ROUNDS,
    }
    return {name: value for name, value in every.items() if name == "max_void_rounds" or draw.random() < 0.45}


class StopsAfterTwo(Callback):
    """Saves a checkpoint after two rounds, and goes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_checkpoint_point(self, trainer: Any) -> None:
        if trainer.run.round_idx == 2:
            trainer.save_checkpoint(self.path)
            raise KeyboardInterrupt


def lasting(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a resumed run must share with one that nobody stopped."""
    return {name: value for name, value in state.items() if name not in ("random", "callbacks")}


@pytest.mark.parametrize("number", range(NUM_DRAWS))
@pytest.mark.parametrize(("kind", "on"), CASES, ids=lambda part: getattr(part, "__name__", part))
def test_random_settings(
    kind: type[Strategy],
    on: str,
    number: int,
    seed: int,
    record: Record,
    federation: Any,
    make_model: Any,
    make_trainer: Any,
    assert_same: Any,
    tmp_path: Path,
) -> None:
    draw = random.Random(f"{seed}, {kind.__name__}, {on}, {number}")
    settings, participation = drawn_settings(kind, draw), drawn_participation(draw)
    regression = on == "examples" and draw.random() < 0.4
    optimizer, clip = draw.choice(OPTIMIZERS), draw.choice((None, None, 0.5))
    batches = {"batch_size": draw.choice((None, 4, 7)), "steps_per_epoch": draw.choice((None, 1, 3))}
    given = {"num_rounds": NUM_ROUNDS, "seed": number, "evaluate_every": draw.choice((1, 1, 2, 3))}
    given["evaluate_union"] = draw.random() < 0.2 and not kind.needs_own_examples
    stacked = draw.choice((functools.partial(StackedExecutor, max_padding=0.9), SMALL_GROUPS))
    resumed_under = draw.choice((SequentialExecutor, stacked))
    callbacks = draw.choice(CALLBACKS), *([RunReport] if draw.random() < 0.5 else [])
    print(settings, participation, given, batches, regression, optimizer, clip, callbacks)  # shown where it fails

    def parts() -> tuple[Any, Any, Strategy]:
        strategy = kind(**copy.deepcopy(settings))
        if on == "graphs":
            return make_model(kind, optimizer, clip, dropout=0.5), federation, strategy
        net = functools.partial(MLP, hidden_channels=8, dropout=0.3)
        client_class = RegressionClient if regression else kind.client_class
        data = FederatedDataModule(
            Clouds(regression=regression), root=str(tmp_path), cache_dir=str(tmp_path / "cache"), **batches
        )
        return client_class(net, optimizer, gradient_clip_val=clip), data, strategy

    def trainer(executor: Callable[[], Any], precision: str, *more: Callback) -> Any:
        called = [*(build() for build in callbacks), *more]
        joins = Participation(**participation)
        return make_trainer(executor=executor(), precision=precision, participation=joins, callbacks=called, **given)

    survived = False
    try:
        reference = trainer(SequentialExecutor, "64-true")
        try:
            expected = reference.fit(*parts())
        except ValueError:
            survived = not (reference.has_run and reference.run.history)
            assert survived, "refused after rounds were run"
            return
        other = trainer(stacked, "64-true")
        assert_same(other.fit(*parts()), expected, tolerance=1e-5)  # scores are float32
        assert_same(other.run.history, reference.run.history, tolerance=1e-5)
        for tensors in ("parameters", "signals"):
            one, two = (each.state_dict()["clients"][tensors] for each in (reference, other))
            both = one.keys() & two.keys()
            assert_same({name: two[name] for name in both}, {name: one[name] for name in both}, tolerance=1e-7)
            assert not any({**one, **two}[name].any() for name in one.keys() ^ two.keys())

        whole = trainer(resumed_under, "32-true", FederatedCheckpoint())
        result = whole.fit(*parts())
        with pytest.raises(KeyboardInterrupt):
            trainer(resumed_under, "32-true", StopsAfterTwo(tmp_path / "stopped" / "two.ckpt")).fit(*parts())
        torch.manual_seed(number)
        resumed = trainer(resumed_under, "32-true")
        assert_same(resumed.fit(*parts(), ckpt_path=str(tmp_path / "stopped" / "two.ckpt")), result)
        assert_same(lasting(resumed.state_dict()), lasting(whole.state_dict()))

        best = str(whole.run.folder / "checkpoints" / "best.ckpt")
        found = trainer(resumed_under, "32-true").test(*parts(), ckpt_path=best)
        assert_same(found, {name: result[name] for name in found}, tolerance=1e-6)
        survived = True
    finally:
        record.count(f"random settings, {on}", survived=survived)
