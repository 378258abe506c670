"""Ranks from one sort of the scores, against counting pair by pair."""

import torch

from fl_lightning.tasks.class_metrics import label_scores
from fl_lightning.tasks.score_order import ScoreOrder


def test_counts_with_ties_and_scores_that_are_no_numbers() -> None:
    draw = torch.Generator().manual_seed(0)
    score = torch.randint(6, (2, 3, 40), generator=draw).double()
    score[0, 0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, torch.nan])
    order, number = ScoreOrder(score), score.nan_to_num(-torch.inf, torch.inf, -torch.inf)
    for share in (0.0, 0.3, 1.0):
        chosen = torch.rand(score.shape, generator=draw) < share
        lower = number.unsqueeze(-2) < number.unsqueeze(-1)
        same = number.unsqueeze(-2) == number.unsqueeze(-1)
        assert torch.equal(order.below(chosen), (lower & chosen.unsqueeze(-2)).sum(dim=-1))
        assert torch.equal(order.up_to(chosen), ((lower | same) & chosen.unsqueeze(-2)).sum(dim=-1))


def test_one_example_alone() -> None:
    order = ScoreOrder(torch.tensor([3.0]))
    assert order.below(torch.tensor([True])).tolist() == [0]
    assert order.up_to(torch.tensor([True])).tolist() == [1]


def test_an_infinite_score_beats_no_more_than_there_are() -> None:
    """Counting the padding of a sorted copy as beaten would make an area above 1."""
    logits, y = torch.tensor([[torch.inf], [0.0], [1.0]]), torch.tensor([[1.0], [0.0], [1.0]])
    total, count = label_scores(["auroc"], logits, y, torch.ones(1, 3, dtype=torch.bool))["auroc"]
    assert (total / count).tolist() == [1.0]
