import pytest
import torch

from fl_lightning.strategies.decentralized.map_initialization import (
    GaussianInitialization,
    IdentityInitialization,
    MapInitialization,
    OrthogonalInitialization,
    UniformInitialization,
)

STARTS = [
    GaussianInitialization(),
    GaussianInitialization(deviation=0.1),
    UniformInitialization(bound=0.5),
    OrthogonalInitialization(),
    IdentityInitialization(scale=2.0),
    IdentityInitialization(noise=0.01),
]


@pytest.mark.parametrize("start", STARTS, ids=str)
def test_starts(start: MapInitialization) -> None:
    map_RD = torch.empty(40, 50, dtype=torch.float64)
    start.fill(map_RD, torch.Generator().manual_seed(0))
    assert (map_RD.norm(dim=1) > 0).all()
    if isinstance(start, GaussianInitialization):
        assert map_RD.std() == pytest.approx(start.deviation or 50**-0.5, rel=0.05)
    elif isinstance(start, UniformInitialization):
        assert 0.49 < map_RD.abs().max() <= 0.5
        assert map_RD.mean().abs() < 0.02
    elif isinstance(start, OrthogonalInitialization):
        torch.testing.assert_close(map_RD @ map_RD.T, torch.eye(40, dtype=torch.float64))
    elif isinstance(start, IdentityInitialization):
        noise = map_RD - start.scale * torch.eye(40, 50, dtype=torch.float64)
        assert noise.std() == pytest.approx(start.noise, rel=0.05)


@pytest.mark.parametrize(
    "make",
    [
        lambda: GaussianInitialization(deviation=0.0),
        lambda: UniformInitialization(bound=0.0),
        lambda: IdentityInitialization(scale=0.0, noise=1.0),
        lambda: IdentityInitialization(noise=-1.0),
    ],
)
def test_refused(make) -> None:
    with pytest.raises(ValueError, match=r"above 0|at least 0"):
        make()
