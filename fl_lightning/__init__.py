"""Personalised federated learning on graphs, trained by PyTorch Lightning and Fabric."""

from fl_lightning.callback import Callback
from fl_lightning.data import FederatedDataModule
from fl_lightning.executors import SequentialExecutor, StackedExecutor
from fl_lightning.report import compare
from fl_lightning.round.client import ClientModule, RegressionClient
from fl_lightning.round.participation import Participation
from fl_lightning.round.payload import Payload
from fl_lightning.round.stage import Evaluation, Stage
from fl_lightning.strategies import Strategy
from fl_lightning.trainer import FederatedTrainer

__version__ = "0.1.0"
__all__ = [
    "Callback",
    "ClientModule",
    "Evaluation",
    "FederatedDataModule",
    "FederatedTrainer",
    "Participation",
    "Payload",
    "RegressionClient",
    "SequentialExecutor",
    "StackedExecutor",
    "Stage",
    "Strategy",
    "compare",
]
