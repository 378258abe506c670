import itertools

import pytest
import torch
from torch import Tensor

from fl_lightning.relations.minimum_cut import minimum_cut


def weight_of(weight_CC: Tensor, side_C: Tensor) -> float:
    return float(weight_CC[side_C][:, ~side_C].sum())


@pytest.mark.parametrize("seed", range(5))
def test_the_cut_is_the_lightest(seed) -> None:
    draw = torch.Generator().manual_seed(seed)
    weight_CC = torch.rand(6, 6, generator=draw, dtype=torch.float64)
    weight_CC = weight_CC + weight_CC.T
    sides = [torch.tensor([False, *side]) for side in itertools.product([False, True], repeat=5) if any(side)]
    actual = minimum_cut(weight_CC)
    assert weight_of(weight_CC, actual) == pytest.approx(min(weight_of(weight_CC, side) for side in sides))
    order = torch.randperm(6, generator=draw)
    relabeled = minimum_cut(weight_CC[order][:, order])
    assert torch.equal(relabeled, actual[order]) or torch.equal(~relabeled, actual[order])
