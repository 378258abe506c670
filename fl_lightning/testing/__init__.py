"""Checks that a strategy keeps what every strategy must keep: :func:`check_strategy`."""

from fl_lightning.testing.checks import CHECKS
from fl_lightning.testing.runs import StrategyRuns
from fl_lightning.testing.strategy import check_strategy

__all__ = ["CHECKS", "StrategyRuns", "check_strategy"]
