"""Random settings of every strategy, on graphs and on examples, keep what every run must keep.

Settings that do not go together are refused before anything is trained. With all others both executors come to the
same, a resume is exact, and a checkpoint scores as the fit reported.
"""

import functools
import math
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from campaign.draws import CASES, Drawn
from campaign.record import Record
from saving import SavesAfter

from fl_lightning import Callback, SequentialExecutor, StackedExecutor
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
from fl_lightning.strategies import Strategy

NUM_DRAWS, NUM_ROUNDS = 2, 5
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

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # many settings warn, as they should


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
    make_trainer: Any,
    assert_same: Any,
    tmp_path: Path,
) -> None:
    draw = random.Random(f"{seed}, {kind.__name__}, {on}, {number}")
    drawn = Drawn(kind=kind, on=on, num_rounds=NUM_ROUNDS, draw=draw)
    union = draw.random() < 0.2 and not kind.needs_own_examples
    stacked = draw.choice((functools.partial(StackedExecutor, max_padding=0.9), SMALL_GROUPS))
    resumed_under = draw.choice((SequentialExecutor, stacked))
    callbacks = draw.choice(CALLBACKS), *([RunReport] if draw.random() < 0.5 else [])
    print(union, stacked, resumed_under, callbacks)

    def parts() -> tuple[Any, Any, Strategy]:
        return drawn.model(), drawn.data(federation, tmp_path), drawn.strategy()

    def trainer(executor: Callable[[], Any], precision: str, *more: Callback) -> Any:
        return make_trainer(
            executor=executor(),
            precision=precision,
            participation=drawn.participation(),
            callbacks=[*(build() for build in callbacks), *more],
            evaluate_union=union,
            **drawn.given,
        )

    survived = False
    try:
        reference = trainer(SequentialExecutor, "64-true")
        try:
            expected = reference.fit(*parts())
        except ValueError:
            survived = not (reference.has_run and reference.run.history)
            assert survived, "refused after rounds were run"
            return
        if not any(math.isinf(value) for row in reference.run.history for value in row.values()):
            other = trainer(stacked, "64-true")  # unless they diverge, which multiplies rounding without bound
            assert_same(other.fit(*parts()), expected, tolerance=1e-5)  # scores are float32
            assert_same(other.run.history, reference.run.history, tolerance=1e-5)
            for tensors in ("parameters", "signals"):
                one, two = (each.state_dict()["clients"][tensors] for each in (reference, other))
                both = one.keys() & two.keys()
                assert_same({name: two[name] for name in both}, {name: one[name] for name in both}, tolerance=1e-7)
                assert not any({**one, **two}[name].any() for name in one.keys() ^ two.keys())

        whole = trainer(resumed_under, "32-true", FederatedCheckpoint())
        result = whole.fit(*parts())
        saved = tmp_path / "stopped" / "two.ckpt"
        with pytest.raises(KeyboardInterrupt):
            trainer(resumed_under, "32-true", SavesAfter(2, saved, stops=True)).fit(*parts())
        torch.manual_seed(number)
        resumed = trainer(resumed_under, "32-true")
        assert_same(resumed.fit(*parts(), ckpt_path=str(saved)), result)
        assert_same(lasting(resumed.state_dict()), lasting(whole.state_dict()))

        best = str(whole.run.folder / "checkpoints" / "best.ckpt")
        actual = trainer(resumed_under, "32-true").test(*parts(), ckpt_path=best)
        assert_same(actual, {name: result[name] for name in actual}, tolerance=1e-6)
        survived = True
    finally:
        record.count(f"random settings, {on}", survived=survived)
