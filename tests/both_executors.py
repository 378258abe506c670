"""The mark of tests that run under either executor."""

import functools

import pytest

from fl_lightning import SequentialExecutor, StackedExecutor

#: Builds the executor; the stacked one has all clients in one group, however unequal they are.
both_executors = pytest.mark.parametrize(
    "executor", [SequentialExecutor, functools.partial(StackedExecutor, max_padding=0.9)], ids=["sequential", "stacked"]
)
