"""Personalized federated learning on graphs, trained by PyTorch Lightning and Fabric.

What the package exports is imported when it is first used, so that ``import fl_lightning`` is fast.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fl_lightning import callbacks, data, datasets, models, relations, strategies
    from fl_lightning.choice import choose
    from fl_lightning.data import FederatedDataModule
    from fl_lightning.executors import SequentialExecutor, StackedExecutor
    from fl_lightning.report import compare
    from fl_lightning.round.client import ClientModule
    from fl_lightning.round.participation import Participation
    from fl_lightning.round.payload import Payload
    from fl_lightning.round.stage import Evaluation, Stage
    from fl_lightning.run.allocator import keep_freed_memory
    from fl_lightning.run.callback import Callback
    from fl_lightning.strategies import Strategy
    from fl_lightning.trained import load_run
    from fl_lightning.trainer import FederatedTrainer

__version__ = "0.2.0"
__all__ = [
    "Callback",
    "ClientModule",
    "Evaluation",
    "FederatedDataModule",
    "FederatedTrainer",
    "Participation",
    "Payload",
    "SequentialExecutor",
    "StackedExecutor",
    "Stage",
    "Strategy",
    "callbacks",
    "choose",
    "compare",
    "data",
    "datasets",
    "keep_freed_memory",
    "load_run",
    "models",
    "relations",
    "strategies",
]

#: The module of each class and function; names that are not listed are modules of the package.
_HOMES = {
    "Callback": "run.callback",
    "ClientModule": "round.client",
    "Evaluation": "round.stage",
    "FederatedDataModule": "data",
    "FederatedTrainer": "trainer",
    "Participation": "round.participation",
    "Payload": "round.payload",
    "SequentialExecutor": "executors",
    "StackedExecutor": "executors",
    "Stage": "round.stage",
    "Strategy": "strategies",
    "choose": "choice",
    "compare": "report",
    "keep_freed_memory": "run.allocator",
    "load_run": "trained",
}
#: Former names.
_FORMER = {"RegressionClient": "ClientModule, which takes its task from the data"}


def __getattr__(name: str) -> Any:
    if name in _FORMER:
        raise ImportError(f"fl_lightning.{name} was renamed to {_FORMER[name]}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in _HOMES:
        return importlib.import_module(f"{__name__}.{name}")
    value = globals()[name] = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
