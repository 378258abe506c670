"""Ranks of links among pairs without a link, by hand."""

import math

import pytest
import torch

from fl_lightning.direction import direction_of
from fl_lightning.tasks.ranking import HITS, RANKINGS, ranking_scores


def values(score, linked, mask=None) -> dict[str, float]:
    score, linked = torch.tensor(score), torch.tensor(linked, dtype=torch.bool)
    mask = torch.ones_like(linked) if mask is None else torch.tensor(mask, dtype=torch.bool)
    found = ranking_scores(RANKINGS, score, linked, mask[None])
    return {name: float(total) / float(count) if count else math.nan for name, (total, count) in found.items()}


def test_reciprocal_ranks_by_hand() -> None:
    """The links 5, 2 and 0.5 have the ranks 1, 1 + 2 and, of four above and one as high, 1 + 4 + 1/2."""
    found = values([5.0, 2.0, 0.5, 4.0, 3.0, 1.0, 0.9, 0.5], [1, 1, 1, 0, 0, 0, 0, 0])
    assert found["mrr"] == pytest.approx((1 + 1 / 3 + 1 / 5.5) / 3)
    assert all(math.isnan(found[f"hits@{rank}"]) for rank in HITS)  # there are only five other pairs


def test_hits_by_hand() -> None:
    """Of the scores 0 to 59 the tenth highest is 50 and the fiftieth is 10; a tie is no hit."""
    others = [float(number) for number in range(60)]
    found = values([50.5, 50.0, 49.0, 10.5, 10.0, *others], [1] * 5 + [0] * 60)
    assert found["hits@10"] == pytest.approx(1 / 5)
    assert found["hits@50"] == pytest.approx(4 / 5)


def test_the_mask_and_scores_that_are_none() -> None:
    found = values([3.0, 9.0, math.nan, 2.0, math.inf], [1, 0, 1, 0, 0], mask=[1, 0, 1, 1, 0])
    assert found["mrr"] == pytest.approx((1 + 1 / 2) / 2)


def test_stacks_and_padding_do_not_matter() -> None:
    draw = torch.Generator().manual_seed(1)
    score, linked = torch.randn(2, 90, generator=draw), torch.rand(2, 90, generator=draw) < 0.2
    mask = torch.rand(3, 2, 90, generator=draw) < 0.9
    mask[:, 1, 70:] = False
    stacked = ranking_scores(RANKINGS, score, linked, mask)
    for client, length in ((0, 90), (1, 70)):
        alone = ranking_scores(RANKINGS, score[client, :length], linked[client, :length], mask[:, client, :length])
        for name in RANKINGS:
            for part, expected in zip(stacked[name], alone[name], strict=True):
                assert torch.equal(part[:, client], expected)


def test_more_is_better() -> None:
    assert {direction_of(f"test/{name}_worst") for name in RANKINGS} == {"max"}
