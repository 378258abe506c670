import pytest
import torch

from fl_lightning.relations.finch import finch


@pytest.mark.parametrize(
    ("degrees", "clusters"),
    [
        ((5.0,), [0]),
        ((0.0, 90.0), [0, 0]),
        ((0.0, 10.0, 20.0), [0, 0, 0]),
        ((0, 2, 40, 43, 90, 92, 130, 133), [0, 0, 0, 0, 1, 1, 1, 1]),
        ((0, 90, 2, 92), [0, 1, 0, 1]),
    ],
)
def test_clusters(degrees, clusters) -> None:
    angle = torch.tensor(degrees, dtype=torch.float64).deg2rad()
    assert finch(torch.stack([angle.cos(), angle.sin()], dim=1)).tolist() == clusters
