"""Metrics of links: how their scores rank among those of a pool of pairs without a link.

Shape legend: S splits, C clients (or no such dimension), P pairs.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fl_lightning.tasks.score_order import ScoreOrder

#: The ranks of Hits@k.
HITS = (10, 50)
#: The metrics by name.
RANKINGS = (*(f"hits@{rank}" for rank in HITS), "mrr")


def ranking_scores(
    metrics: Sequence[str], score_CP: Tensor, linked_CP: Tensor, masks_SCP: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Numerator and denominator of metrics for every split and client.

    ``hits@k`` is the share of the links that are scored higher than the k-th highest pair without a link (a tie is
    none), and has no value where there are fewer than k; ``mrr`` the mean over the links of 1 / rank, where the rank is
    1 plus the number of pairs without a link that are scored higher, plus half of those that are scored the same.

    Args:
        metrics: Names of :data:`RANKINGS`.
        score_CP: Scores.
        linked_CP: Whether the pair is linked.
        masks_SCP: Pairs of each split.

    Returns:
        By the metric's name the value times the number of links, and that number, both (S, C); both are 0 where there
        is no value.

    Source: Hits@k as in Hu et al., "Open Graph Benchmark", NeurIPS 2020.

    Example:
        >>> score, linked = torch.tensor([3.0, 1.0, 2.0, 0.0]), torch.tensor([True, True, False, False])
        >>> [total, count] = ranking_scores(["mrr"], score, linked, torch.ones(1, 4, dtype=torch.bool))["mrr"]
        >>> total.tolist(), count.tolist()
        ([1.5], [2.0])
    """
    order = ScoreOrder(score_CP.double())
    parts = [_of_split(metrics, order, linked_CP & mask_CP, ~linked_CP & mask_CP) for mask_CP in masks_SCP]
    return {name: tuple(torch.stack(each) for each in zip(*(p[name] for p in parts), strict=True)) for name in metrics}  # type: ignore[misc]


def _of_split(
    metrics: Sequence[str], order: ScoreOrder, link_CP: Tensor, other_CP: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """The metrics of one split."""
    num_others_C1 = other_CP.sum(dim=-1, keepdim=True)
    below_CP, up_to_CP = order.below(other_CP), order.up_to(other_CP)
    values = {f"hits@{rank}": (below_CP > num_others_C1 - rank).double() for rank in HITS if f"hits@{rank}" in metrics}
    values["mrr"] = 1 / (1 + num_others_C1 - (below_CP + up_to_CP) / 2)
    least = {"mrr": 1} | {f"hits@{rank}": rank for rank in HITS}
    result = {}
    for name in metrics:
        counted_CP = link_CP & (num_others_C1 >= least[name])
        result[name] = (torch.where(counted_CP, values[name], 0.0).sum(dim=-1), counted_CP.sum(dim=-1).double())
    return result
