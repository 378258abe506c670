"""Clients whose examples are alike in one respect: all are sorted by it, and cut into equal parts."""

import warnings

import torch
from torch import Tensor
from torch_geometric.data import Data

from fl_lightning.data.columns import number_of_each
from fl_lightning.data.partition.partitioners import Partitioner, noun
from fl_lightning.data.settings import check_text
from fl_lightning.kernels.randomness import generator


class SortedPartitioner(Partitioner):
    """Equal shares of the examples in ascending order of one number: topology or feature skew of a set of graphs.

    Args:
        num_clients: Clients; their sizes differ by at most one example.
        by: Of a set of graphs: ``size`` (nodes), ``degree`` (mean degree), ``density`` (share of the possible edges),
            ``features`` (mean of all features), or a column of the source's table. Of a graph, an attribute of its
            nodes.
        seed: Of the order among equals; None for the seed of the data module.

    Source: Li et al., "OpenFGL: A Comprehensive Benchmark for Federated Graph Learning", PVLDB 2025: topology skew
    sorts graphs by their mean degree, feature skew by the mean of their features.
    """

    def __init__(self, num_clients: int, by: str = "degree", seed: int | None = None) -> None:
        super().__init__(num_clients, seed)
        check_text("by", by, "degree")
        self.by = by

    def assign(self, data: Data, seed: int) -> list[Tensor]:  # noqa: D102
        value_N = number_of_each(data, self.by, "sort by")
        least, most = float(value_N.min()), float(value_N.max())
        if most - least <= 1e-9 * abs(most):  # rounding of means
            warnings.warn(
                f"by={self.by!r}: all {noun(data)} have {most:g}, so that clients are alike, as by RandomPartitioner "
                "(so it is where features are one-hot); sort by another for clients that differ.",
                stacklevel=3,
            )
        shuffled = torch.randperm(len(value_N), generator=generator(seed, "sorted partition"))
        order = shuffled[value_N[shuffled].argsort(stable=True)]
        return list(order.tensor_split(self.num_clients))
