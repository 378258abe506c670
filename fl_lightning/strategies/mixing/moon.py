"""MOON: the local representation is pulled toward the global model's, and away from the client's last one.

Li, He, Song: "Model-Contrastive Federated Learning", CVPR 2021, Algorithm 1. With z the embedding of a training example
by the model in training, z_g by the global one as received and z_p by the one that the client trained last (both
without dropout and gradient), a client minimizes f_i + μ · mean c,

    c = -log(e^{cos(z, z_g) / T} / (e^{cos(z, z_g) / T} + e^{cos(z, z_p) / T}))
      = softplus((cos(z, z_p) - cos(z, z_g)) / T)

and the server averages as FedAvg. In its first round a client has no last model and takes the received one, with which
c is constant. z is the net's own embedding (``NetOutput.embedding``); the paper puts a projection head between backbone
and classifier, which is the net's to have.

The paper's gain was not found again: on Cora and on generated tables with uneven labels it is level with FedAvg for
small μ, and below it for μ from 5 on.

The last model stays at the client, as its client state. Leaves the client: its model.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_lightning.batches.base import Batch
from fl_lightning.kernels.per_client import along
from fl_lightning.round.client import ClientModule
from fl_lightning.round.context import Context, Parameters
from fl_lightning.round.stage import Stage, StateSpec
from fl_lightning.strategies.mixing.fedavg import FedAvg

#: Shorter embeddings have no direction.
SHORTEST = 1e-6


@dataclass(kw_only=True, eq=False)
class MOON(FedAvg):
    """FedAvg whose clients contrast their representation with the global model's and their own last one.

    Args:
        contrast_weight: μ, at least 0; 0 is FedAvg.
        temperature: T, positive.
    """

    contrast_weight: float = 1.0
    temperature: float = 0.5

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_at_least(0, "contrast_weight")
        if not self.temperature > 0:
            raise ValueError(f"strategy.temperature must be positive, got {self.temperature}")

    def client_state(self) -> Mapping[str, StateSpec]:
        """The model that the client trained last, and whether there is one."""
        if not self.contrast_weight:
            return {}
        client = self.federation.client
        assert client is not None
        models = {f"last/{name}": StateSpec(initial=p.detach().clone()) for name, p in client.parameter_dict().items()}
        return {**models, "has_last": StateSpec(initial=torch.zeros((), dtype=torch.bool))}

    def training(self, round_idx: int) -> Stage:
        """Train with the contrast."""
        stage = super().training(round_idx)
        if not self.contrast_weight:
            return stage
        return dataclasses.replace(stage, objective=self.contrasted, client_state={"last": trained, "has_last": yes})

    def contrasted(self, client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
        """The objective f + μ · mean c."""
        output = client.output(parameters, batch)
        last = {n.removeprefix("last/"): t for n, t in context.client_state.items() if n.startswith("last/")}
        z_g, z_p = (client.frozen_output(model, batch).embedding for model in (context.anchor, last))
        loss_N = self.contrast(
            output.embedding, z_g, torch.where(along(context.client_state["has_last"], z_g), z_p, z_g)
        )
        mask_N = batch.train_mask
        mean = (loss_N * mask_N).sum(dim=-1) / mask_N.sum(dim=-1).clamp(min=1)
        return client.loss(output, batch) + self.contrast_weight * mean

    contrasted.takes_stacks = True  # type: ignore[attr-defined]

    def contrast(self, z_ND: Tensor, global_ND: Tensor, last_ND: Tensor) -> Tensor:
        """The contrast c of every example, (..., N)."""
        apart_ND = unit(last_ND) - unit(global_ND)  # exactly zero where there is no last model
        return F.softplus((unit(z_ND) * apart_ND).sum(dim=-1) / self.temperature)


def unit(z_ND: Tensor) -> Tensor:
    """Embeddings of length one; zero and without gradient if they have no length (a whole layer was dropped)."""
    square_N1 = z_ND.square().sum(dim=-1, keepdim=True)
    long_N1 = square_N1 > SHORTEST**2
    return z_ND * torch.where(long_N1, torch.where(long_N1, square_N1, 1.0).rsqrt(), 0.0)


def trained(client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Parameters:
    """The model as it is after training."""
    return {name: parameter.clone() for name, parameter in parameters.items()}


def yes(client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
    """True: the client has a last model."""
    return torch.ones_like(context.client_state["has_last"])
