"""Callbacks, which observe a federation, write its files and end it early."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fl_lightning.renamed import former_classes
from fl_lightning.run.callback import Callback

from .attacks import (
    Attack,
    Backdoor,
    GaussianAttack,
    LabelFlipping,
    ModelPoisoning,
    SameValueAttack,
    SignFlip,
    SimpleTuning,
)
from .checkpoint import FederatedCheckpoint
from .client_metrics import PerClientMetrics
from .early_stopping import EarlyStopping
from .label_similarity import LabelSimilarity
from .ledger import CommunicationLedger
from .neighbor_ids import NeighborIds
from .progress import RoundProgressBar
from .projection import ProjectionAlignment
from .report import RunReport
from .similarity import SimilarityLogger
from .topology import TopologyLogger

if not TYPE_CHECKING:
    __getattr__ = former_classes(__name__)

__all__ = [
    "Attack",
    "Backdoor",
    "CommunicationLedger",
    "EarlyStopping",
    "FederatedCheckpoint",
    "GaussianAttack",
    "LabelFlipping",
    "LabelSimilarity",
    "ModelPoisoning",
    "NeighborIds",
    "PerClientMetrics",
    "ProjectionAlignment",
    "RoundProgressBar",
    "RunReport",
    "SameValueAttack",
    "SignFlip",
    "SimilarityLogger",
    "SimpleTuning",
    "TopologyLogger",
    "default_callbacks",
]


def default_callbacks() -> list[Callback]:
    """The callbacks of every run on the command line, each unless the user gives one of the same class."""
    return [CommunicationLedger(), FederatedCheckpoint(), RunReport(), RoundProgressBar()]


def defaults_beside(given: Sequence[Callback]) -> list[Callback]:
    """The default callbacks whose class is not among the given ones."""
    return [each for each in default_callbacks() if not any(isinstance(local, type(each)) for local in given)]
