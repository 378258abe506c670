"""FedRep: a common representation and personal classifiers, trained in turn.

Collins, Hassani, Mokhtari, Shakkottai: "Exploiting Shared Representations for Personalized Federated Learning", ICML
2021, Algorithm 1. With φ the backbone and h_i a client's classifier, in each round

    client   h_i <- h_i - η ∇_h f_i(φ, h_i)      ``num_head_epochs``, φ as received
             φ_i <- φ_i - η ∇_φ f_i(φ_i, h_i)    ``num_epochs``, from φ, h_i as just trained
    server   φ <- Σ_i w_i φ_i

w_i are shares of the training examples. The optimizer skips what a step does not train; the released code on old
versions of PyTorch lets momentum move it. The new φ is evaluated with the client's classifier, which was fitted to the
previous φ; the released code trains the classifier once more after its last round (``num_finetune_epochs``).

Leaves the client: the backbone it has trained.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.optim import SGD

from fl_lightning.round.payload import Payload
from fl_lightning.round.stage import Evaluation, Stage, tune
from fl_lightning.strategies.mixing.fedavg import FedAvg


@dataclass(kw_only=True, eq=False)
class FedRep(FedAvg):
    """Classifier first, then backbone; the backbone is averaged.

    Args:
        personal: Shell-style patterns of the classifier's parameters, which are kept local.
        num_epochs: Local epochs on the backbone.
        num_head_epochs: Local epochs on the classifier before those on the backbone, at least 0.
        num_finetune_epochs: Local epochs on the classifier, on a copy, before each evaluation; at least 0.
    """

    personal: Sequence[str] = ("head.*",)
    num_epochs: int = 1
    num_head_epochs: int = 10
    num_finetune_epochs: int = 0

    #: SGD, as in the paper's experiments: with Adam, a classifier that trains alone soon memorizes its few examples.
    examples_optimizer = functools.partial(SGD, lr=0.01)

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_at_least(0, "num_head_epochs", "num_finetune_epochs")
        if not self.personal:
            raise ValueError("strategy.personal is empty: FedRep needs the classifier's parameters, such as head.*")

    def stages(self, round_idx: int) -> Sequence[Stage]:
        """The classifier's turn, then the backbone's."""
        (whole,) = super().stages(round_idx)
        body = dataclasses.replace(whole, trained=self.body)
        if not self.num_head_epochs:
            return [body]
        return [self.head_stage(), dataclasses.replace(body, reset_optimizer=False)]  # the head stage resets it

    def head_stage(self) -> Stage:
        """The classifier's turn; nothing is sent up."""
        head = self.training(0)
        return dataclasses.replace(head, name="head", num_epochs=self.num_head_epochs, trained=self.kept_local)

    def onboarding_stages(self) -> Sequence[Stage]:
        """Unseen clients train a classifier on the backbone that they are sent."""
        return [self.head_stage()]

    def configure(self, stage: Stage, clients: Sequence[int]) -> Payload | None:  # type: ignore[override]
        """The backbone, as a round begins."""
        return self.mixed_models(clients) if stage.name == "head" or not self.num_head_epochs else None

    def evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """The averaged backbone with each client's classifier, which is trained further if requested."""
        result = super().evaluations(clients)
        if not self.num_finetune_epochs:
            return result
        tuning = tune(self.num_finetune_epochs, trained=self.kept_local)
        return {**result, "": dataclasses.replace(result[""], tuning=tuning)}
