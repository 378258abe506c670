"""Whether FedAux's projection vectors become the principal axes of the clients' embeddings, as in its Theorem 3.1."""

import torch
from torch import Tensor

from fl_lightning.batches.base import Batch
from fl_lightning.round.client import ClientModule
from fl_lightning.round.context import Context, Parameters
from fl_lightning.round.stage import Stage
from fl_lightning.run.callback import Callback, Trainer
from fl_lightning.run.processes import gather
from fl_lightning.strategies.base import server_dtype

#: The projection vector's name among the net's parameters.
PROJECTION = "projection"


def principal_alignment(client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
    """|cos(a, v)| and (a^T S a) / (|a|^2 λ) for a client's vector a and the first eigenpair (λ, v) of its S, (2,).

    S is the covariance of the embeddings of its nodes.
    """
    embedding_ND = client.output(parameters, batch).embedding
    embedding_ND = embedding_ND.to(server_dtype(embedding_ND.dtype))
    weight_N = batch.example_mask.to(embedding_ND.dtype)
    centered_ND = embedding_ND - weight_N @ embedding_ND / weight_N.sum()
    covariance_DD = centered_ND.T @ (weight_N[:, None] * centered_ND) / weight_N.sum()
    value_D, vector_DD = torch.linalg.eigh(covariance_DD)
    projection_D = parameters[PROJECTION].to(embedding_ND.dtype)
    unit_D = projection_D / projection_D.norm()
    return torch.stack([(unit_D @ vector_DD[:, -1]).abs(), unit_D @ covariance_DD @ unit_D / value_D[-1]])


class ProjectionAlignment(Callback):
    """Adds to each round's metrics how close the projection vectors are to the first principal components.

    ``projection/cosine`` is the mean over clients of the absolute cosine (a random vector of D numbers has about
    √(2 / (π D)), 0.07 for 128), ``projection/variance`` the variance of the embeddings along the vector as a share of
    the largest along any. Source: Zhuo et al., "Personalized Subgraph Federated Learning with Differentiable Auxiliary
    Projections", Theorem 3.1.

    Args:
        every_n_rounds: Rounds between measurements; the last one is always measured.

    Raises:
        ValueError: ``every_n_rounds`` is below 1.
    """

    invents_stages = True

    def __init__(self, *, every_n_rounds: int = 1) -> None:
        if every_n_rounds < 1:
            raise ValueError(f"ProjectionAlignment.every_n_rounds must be at least 1, got {every_n_rounds}")
        self.every_n_rounds = every_n_rounds

    def on_fit_start(self, trainer: Trainer) -> None:
        """Refuse nets without a projection vector."""
        if PROJECTION not in trainer.run.architectures[0]:
            raise ValueError(
                f"ProjectionAlignment: {type(trainer.run.model.nets[0]).__name__} has no parameter {PROJECTION!r}: use "
                "it with FedAux, or leave it out of trainer.callbacks"
            )

    def on_round_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Measure the alignment at every client."""
        number = trainer.run.round_idx + 1
        if number % self.every_n_rounds and number != trainer.num_rounds:
            return
        stage = Stage(name="projection alignment", client_outputs={"alignment": principal_alignment})
        run, clients = trainer.run, trainer.run.training_clients
        asked = run.executor.ask(stage, clients, run.round_idx, run.strategy.model_for(clients))
        upload = gather(trainer.fabric, asked)
        cosine, variance = upload.extras["alignment"].mean(dim=0).tolist()
        metrics |= {"projection/cosine": cosine, "projection/variance": variance}
