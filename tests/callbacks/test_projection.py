"""How near a projection vector is to the principal axis of the embeddings."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from both_executors import both_executors

from fl_lightning.callbacks import ProjectionAlignment
from fl_lightning.callbacks.projection import principal_alignment
from fl_lightning.data import FederatedDataModule
from fl_lightning.strategies.mixing.fedaux import FedAux
from fl_lightning.strategies.mixing.fedavg import FedAvg


def alignment(embedding_ND: torch.Tensor, projection_D: torch.Tensor, real_N: torch.Tensor) -> list[float]:
    client = SimpleNamespace(output=lambda parameters, batch: SimpleNamespace(embedding=embedding_ND))
    batch = SimpleNamespace(example_mask=real_N)
    actual: torch.Tensor = principal_alignment(client, {"projection": projection_D}, batch, None)  # type: ignore[arg-type]
    return actual.tolist()


def test_against_the_singular_vectors() -> None:
    draw = torch.Generator().manual_seed(0)
    embedding_ND = torch.randn(40, 5, generator=draw) * torch.tensor([3.0, 1.0, 0.5, 0.2, 0.1]) + 7
    real_N = torch.arange(40) < 30
    centered_ND = embedding_ND[:30] - embedding_ND[:30].mean(dim=0)
    _, values, vectors = torch.linalg.svd(centered_ND)
    projection_D = torch.randn(5, generator=draw)
    cosine, variance = alignment(embedding_ND, projection_D, real_N)
    unit_D = projection_D / projection_D.norm()
    assert cosine == pytest.approx(float((unit_D @ vectors[0]).abs()), rel=1e-4)
    assert variance == pytest.approx(float((centered_ND @ unit_D).square().sum() / values[0] ** 2), rel=1e-4)
    assert alignment(embedding_ND, -4 * vectors[0], real_N) == pytest.approx([1.0, 1.0], rel=1e-4)
    assert alignment(embedding_ND, vectors[1], real_N)[0] == pytest.approx(0.0, abs=1e-4)


@both_executors
def test_it_is_measured_in_rounds(
    executor: Any, federation: FederatedDataModule, make_trainer: Callable[..., Any], make_model: Callable[..., Any]
) -> None:
    trainer = make_trainer(executor=executor(), callbacks=[ProjectionAlignment(every_n_rounds=2)])
    trainer.fit(make_model(FedAux), federation, FedAux(personal=["*mask*"]))
    measured = ["projection/cosine" in row for row in trainer.run.history]
    assert measured == [False, True, True]
    assert 0 <= trainer.run.history[-1]["projection/cosine"] <= 1
    assert 0 <= trainer.run.history[-1]["projection/variance"] <= 1 + 1e-6


def test_a_net_without_the_vector_is_refused(
    federation: FederatedDataModule, make_trainer: Callable[..., Any], make_model: Callable[..., Any]
) -> None:
    trainer = make_trainer(callbacks=[ProjectionAlignment()])
    with pytest.raises(ValueError, match="GCN has no parameter 'projection': use it with FedAux"):
        trainer.fit(make_model(FedAvg), federation, FedAvg())
    with pytest.raises(ValueError, match="every_n_rounds must be at least 1, got 0"):
        ProjectionAlignment(every_n_rounds=0)
