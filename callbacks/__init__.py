"""Callbacks: what watches a federation, writes its files and ends it early."""

from fl_lightning.callback import Callback
from fl_lightning.callbacks.checkpoint import FederatedCheckpoint
from fl_lightning.callbacks.client_metrics import PerClientMetrics
from fl_lightning.callbacks.early_stopping import EarlyStopping
from fl_lightning.callbacks.ledger import CommunicationLedger
from fl_lightning.callbacks.progress import RoundProgressBar

__all__ = [
    "CommunicationLedger",
    "EarlyStopping",
    "FederatedCheckpoint",
    "PerClientMetrics",
    "RoundProgressBar",
    "default_callbacks",
]


def default_callbacks() -> list[Callback]:
    """The callbacks of every run on the command line, unless the user gives one of the same class."""
    return [CommunicationLedger(), FederatedCheckpoint(), RoundProgressBar()]
