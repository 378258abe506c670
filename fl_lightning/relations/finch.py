"""FINCH: clusters of points by their first neighbors, without a number of clusters to choose.

Sarfraz, Sharma, Stiefelhagen: "Efficient Parameter-Free Clustering Using First Neighbor Relations", CVPR 2019.

Shape legend: M points, D width.
"""

import torch
from torch import Tensor

from fl_lightning.relations.similarity import cosine_similarity


def finch(point_MD: Tensor) -> Tensor:
    """The cluster of each point, (M,), by cosine: the coarsest partition of more than one cluster, else the first.

    Points are linked if one is the other's nearest, or if they share their nearest; linked components are clusters,
    whose means are clustered again until one is left or their number does not change.

    Example:
        >>> angle = torch.tensor([0.0, 2, 40, 43, 90, 92, 130, 133]).deg2rad()
        >>> finch(torch.stack([angle.cos(), angle.sin()], dim=1)).tolist()
        [0, 0, 0, 0, 1, 1, 1, 1]
    """
    chosen = torch.zeros(len(point_MD), dtype=torch.int64, device=point_MD.device)
    if len(point_MD) < 2:
        return chosen
    chosen = first = _linked(point_MD)
    partition = first
    while int(partition.max()) > 1:
        members = torch.nn.functional.one_hot(partition).to(point_MD).T
        coarser = _linked(members @ point_MD / members.sum(dim=1, keepdim=True))[partition]
        if int(coarser.max()) == int(partition.max()):
            break
        partition = coarser
        if int(partition.max()) > 0:
            chosen = partition
    return chosen


def _linked(point_MD: Tensor) -> Tensor:
    """Components of the links between first neighbors, numbered in the order of the points."""
    cosine_MM = cosine_similarity(point_MD).fill_diagonal_(-torch.inf)
    linked_MM = torch.nn.functional.one_hot(cosine_MM.argmax(dim=1), len(point_MD)).bool()
    linked_MM = linked_MM | linked_MM.T | torch.eye(len(point_MD), dtype=torch.bool, device=point_MD.device)
    place_M = torch.arange(len(point_MD), device=point_MD.device)
    label_M = place_M
    for _ in point_MD:  # the smallest index that is reached
        label_M = torch.where(linked_MM, label_M, len(point_MD)).amin(dim=1)
    result: Tensor = label_M.unique(return_inverse=True)[1]  # type: ignore[no-untyped-call]
    return result
