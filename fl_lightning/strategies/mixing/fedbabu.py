"""FedBABU: all clients train the backbone with one random classifier, which each client fine-tunes at the end.

Oh, Kim, Yun: "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022, Algorithm 1. In
the rounds only the backbone φ is trained and averaged; the classifier stays as it was initialized, alike in all
clients. Before it is evaluated each client tunes both (or one of them) on a copy. The released code tunes the round
that was best on test; here every evaluated round is tuned, and validation chooses one.

Leaves the client: the backbone it has trained.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from fl_lightning.round.stage import Evaluation, Persistence, Stage, tune
from fl_lightning.strategies.mixing.fedavg import FedAvg


@dataclass(kw_only=True, eq=False)
class FedBABU(FedAvg):
    """FedAvg of the backbone under a classifier that is not trained, tuned before it is evaluated.

    Args:
        personal: Shell-style patterns of the classifier's parameters.
        num_finetune_epochs: Local epochs before each evaluation, at least 1, with a new optimizer.
        finetune: What is tuned: the ``whole`` net, its ``head``, or the ``body``.
    """

    personal: Sequence[str] = ("head.*",)
    num_finetune_epochs: int = 5
    finetune: Literal["whole", "head", "body"] = "whole"
    blend: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_at_least(1, "num_finetune_epochs")

    def persistence(self) -> Persistence:
        """No parameters: classifiers are trained only on copies."""
        return dataclasses.replace(super().persistence(), parameters=())

    def training(self, round_idx: int) -> Stage:
        """The backbone alone."""
        return dataclasses.replace(super().training(round_idx), trained=self.body)

    def onboarding_stages(self) -> Sequence[Stage]:
        """Unseen clients receive the backbone."""
        return [Stage(name="join")]

    def evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """The tuned copies are the result; ``global/...`` is the backbone with the untrained classifier."""
        shared = self.model_for(clients)
        trained = {"whole": ("*",), "head": self.kept_local, "body": self.body}[self.finetune]
        tuned = Evaluation(payload=shared, tuning=tune(self.num_finetune_epochs, trained=trained))
        return {"": tuned, "global/": Evaluation(payload=shared)}
