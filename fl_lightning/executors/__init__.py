"""Ways to run many clients: one after another (the reference), or all at once."""

from fl_lightning.executors.base import Executor
from fl_lightning.executors.by_architecture import ByArchitecture
from fl_lightning.executors.sequential import SequentialExecutor
from fl_lightning.executors.stacked import StackedExecutor
from fl_lightning.executors.stage_request import StageRequest, StageResult

__all__ = ["ByArchitecture", "Executor", "SequentialExecutor", "StackedExecutor", "StageRequest", "StageResult"]
