"""FedSSP: encoders of spectra are averaged; all else is personal, with a preference for each client.

Tan, Wan, Huang, Ye: "Federated Graph Learning with Spectral Knowledge and Personalized Preference", NeurIPS 2024.
Graphs of different domains differ in shape, and shapes in their spectra, of which a client's net makes filters
(``models/spectral_gnn.py``). With r a graph's representation, c_i a client's preference, μ a mean over representations,

    client   CE(head(r + c_i)) + τ/2 mean((μ_batch - μ̄)²),     c_i by plain steps
    server   θ_encoders <- mean_i θ_i,   μ̄ <- mean_i μ_i       equal shares;  μ_i over a client's training graphs

where the encoders are those of the eigenvalues and of the filters. The preference takes over what is peculiar to a
client, so that representations may keep to the common mean. In the first round there is no mean, and clients without
training graphs have none.

Leaves the client: both encoders, and the mean of its training graphs' representations.

Departures from released code: it halves both means, so that its τ = 100 is 25 here. It begins AdamW anew with every
step, never clears the gradients of c, and predicts without c; here all steps are plain, and predictions are what is
trained. It takes μ_i of the last batch in training mode, begins with c in the second round, drops weights of the
attention, too, and leaves out graphs without edges, from test data as well. The identity among its filters is 0 at
every edge and is left out. Where nodes are the examples, nothing is pooled.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.optim import AdamW

from fl_lightning.batches import Batch
from fl_lightning.federation import Federation
from fl_lightning.models.spectral_gnn import SpectralGNN
from fl_lightning.round.client import ClientModule
from fl_lightning.round.context import Context, Parameters
from fl_lightning.round.payload import Payload
from fl_lightning.round.program import Change, LocalProgram
from fl_lightning.round.stage import ClientOutput, Stage
from fl_lightning.strategies.base import SumWeighting
from fl_lightning.strategies.mixing.fedavg import FedAvg

PREFERENCE = "preference"
SHARED = ("eigenvalue_encoder.", "filter_encoder.")


@dataclass(kw_only=True, eq=False)
class FedSSP(FedAvg):
    """Shared spectral encoders, and a personal preference that the common mean of representations makes room for.

    Args:
        num_epochs: Local epochs a round.
        weighting: How clients count in the encoders: alike (``equal``), or by their training ``examples``.
        mean_weight: τ, at least 0; 0 shares the encoders alone.
        preference_lr: Learning rate of the preference, at least 0; 0 is no preference.
    """

    num_epochs: int = 1
    weighting: Literal["examples", "equal"] = "equal"
    mean_weight: float = 25.0
    preference_lr: float = 0.005
    personal: Sequence[str] = field(default=(), init=False)

    server_state = ("mean_D", "has_mean")

    default_net = SpectralGNN
    default_optimizer = functools.partial(AdamW, lr=0.001, weight_decay=5e-4)
    own_net = True
    needs_graphs = needs_undirected = True

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_at_least(0, "mean_weight", "preference_lr")

    def setup(self, federation: Federation) -> None:
        """Start from the common encoders, without a mean."""
        self.require_net(federation, PREFERENCE, "a preference")
        super().setup(federation)
        self.mean_D = torch.zeros_like(federation.parameters[PREFERENCE])
        self.has_mean = False

    def kept_patterns(self, federation: Federation) -> Sequence[str]:
        """All but the encoders."""
        return tuple(name for name in federation.parameters if not name.startswith(SHARED))

    def sum_weighting(self) -> SumWeighting:
        """Not by a sum of parameters alone."""
        return None

    def training(self, round_idx: int) -> Stage:
        """With the term, and plain steps on the preference."""
        program = LocalProgram(step=self.step_preference)
        return dataclasses.replace(super().training(round_idx), objective=self.objective, program=program)

    def configure(self, stage: Stage, clients: Sequence[int]) -> Payload:
        """The encoders, and the common mean as soon as there is one."""
        payload = super().configure(stage, clients)
        if not (self.has_mean and self.mean_weight):
            return payload
        return dataclasses.replace(payload, extras={"mean": self.mean_D.expand(len(clients), -1)})

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        """Average the encoders and the means."""
        super().aggregate(stage, upload)
        assert upload.num_examples is not None
        have_any_C = upload.num_examples > 0
        if self.mean_weight and have_any_C.any():
            self.mean_D = upload.extras["mean"][have_any_C].mean(dim=0).to(self.mean_D)
            self.has_mean = True

    # ------------------------------------------------------------------ the clients

    def client_outputs(self) -> Mapping[str, ClientOutput]:
        """The mean of the representations."""
        return {"mean": mean_representation} if self.mean_weight else {}

    def objective(self, client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
        """The client's own loss, and how far the batch's mean is from the common one."""
        output = client.output(parameters, batch)
        loss = client.loss(output, batch)
        if "mean" not in context.received:
            return loss
        apart_D = mean_of(output.embedding, batch.train_mask) - context.received["mean"]
        return loss + self.mean_weight / 2 * apart_D.square().mean()

    def step_preference(
        self, client: ClientModule, parameters: Parameters, gradients: Parameters, batch: Batch | None, context: Context
    ) -> Change:
        """A plain step on the preference; the optimizer has all else."""
        stepped = parameters[PREFERENCE] - self.preference_lr * gradients[PREFERENCE]
        others = {name: gradient for name, gradient in gradients.items() if name != PREFERENCE}
        return Change(parameters={PREFERENCE: stepped}, gradients=others)

    def metrics(self) -> Mapping[str, float]:
        """The length of the common mean of representations."""
        return {**super().metrics(), "server/mean_length": float(self.mean_D.norm())}


def mean_of(value_GD: Tensor, chosen_G: Tensor) -> Tensor:
    """The mean over the chosen examples, (D,); 0 if there is none."""
    return (value_GD * chosen_G[:, None]).sum(dim=0) / chosen_G.sum().clamp(min=1)


def mean_representation(client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
    """The mean representation of one client's training graphs, (D,)."""
    return mean_of(client.output(parameters, batch).embedding, batch.train_mask)
