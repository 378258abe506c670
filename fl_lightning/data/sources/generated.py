"""Graphs generated from a seed: nothing to download, and ground truth to compare with.

Shape legend: N nodes, F features, M communities, K classes, E edges.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import to_undirected

from fl_lightning.data.settings import check_count, check_number, check_seed, check_size
from fl_lightning.data.sources.base import GraphSource
from fl_lightning.kernels.randomness import generator


class PlantedCommunities(GraphSource):
    """Communities that see the same classes in different proportions and in a different light: the quickstart's graph.

    Each community is a natural client (``membership``). All share the class centroids, so collaboration helps; each
    prefers some classes (label skew) and shifts all features by its own vector (feature skew), so personalization
    helps as well. Edges stay within a class with probability ``homophily``.

    Args:
        num_nodes: Nodes, spread evenly over the communities.
        num_communities: Communities.
        num_classes: Classes.
        num_features: Features.
        label_skew: Share, in [0, 1], of a community's nodes that belong to its own preferred class; the others are
            uniform over the classes.
        feature_skew: Length of a community's feature shift; a class centroid has length 1.
        noise: Standard deviation of the noise on a feature vector's every direction.
        homophily: Probability, in [0, 1], that an edge is drawn within a class.
        intra_degree: Average number of neighbors within the community.
        inter_degree: Average number of neighbors in other communities.
        seed: Of the graph; the partition and the split have the data module's.
    """

    def __init__(
        self,
        num_nodes: int = 2000,
        num_communities: int = 10,
        num_classes: int = 5,
        num_features: int = 32,
        label_skew: float = 0.4,
        feature_skew: float = 0.5,
        noise: float = 0.7,
        homophily: float = 0.7,
        intra_degree: float = 5.0,
        inter_degree: float = 0.5,
        seed: int = 0,
    ) -> None:
        super().__init__(normalize_features=False, largest_component=False)
        check_number("label_skew", label_skew, most=1)
        check_number("homophily", homophily, most=1)
        for name, length in (("feature_skew", feature_skew), ("noise", noise)):
            check_number(name, length)
        counts = {
            "num_nodes": num_nodes,
            "num_communities": num_communities,
            "num_classes": num_classes,
            "num_features": num_features,
        }
        for name, count in counts.items():
            check_count(name, count)
        if max(num_communities, num_classes) > num_nodes:
            raise ValueError(
                f"num_nodes={num_nodes} is too small for num_communities={num_communities} and num_classes="
                f"{num_classes}: give at least a node for each."
            )
        for name, degree in (("intra_degree", intra_degree), ("inter_degree", inter_degree)):
            check_number(name, degree, most=num_nodes)
        check_seed("seed", seed)
        check_size(num_nodes * num_features, "num_nodes", "num_features")
        check_size(round(num_nodes * (intra_degree + inter_degree)), "num_nodes", "intra_degree", "inter_degree")
        self.num_nodes = num_nodes
        self.num_communities = num_communities
        self.num_classes = num_classes
        self.num_features = num_features
        self.label_skew = label_skew
        self.feature_skew = feature_skew
        self.noise = noise
        self.homophily = homophily
        self.intra_degree = intra_degree
        self.inter_degree = inter_degree
        self.seed = seed

    def load(self, root: Path, cache_dir: Path | None = None) -> Data:  # noqa: D102
        draw = generator(self.seed, "planted communities")
        membership_N = torch.arange(self.num_nodes) * self.num_communities // self.num_nodes
        any_class_N = torch.randint(self.num_classes, (self.num_nodes,), generator=draw)
        skewed_N = torch.rand(self.num_nodes, generator=draw) < self.label_skew
        y_N = torch.where(skewed_N, membership_N % self.num_classes, any_class_N)

        centroid_KF = _unit_rows(torch.randn(self.num_classes, self.num_features, generator=draw))
        shift_MF = _unit_rows(torch.randn(self.num_communities, self.num_features, generator=draw))
        noise_NF = torch.randn(self.num_nodes, self.num_features, generator=draw)
        x_NF = centroid_KF[y_N] + self.feature_skew * shift_MF[membership_N] + self.noise * noise_NF

        within = membership_N * self.num_classes + y_N
        edges = [
            _random_edges(round(self.intra_degree * self.homophily * self.num_nodes / 2), within, draw),
            _random_edges(round(self.intra_degree * (1 - self.homophily) * self.num_nodes / 2), membership_N, draw),
            _random_edges(round(self.inter_degree * self.homophily * self.num_nodes / 2), y_N, draw),
            _random_edges(
                round(self.inter_degree * (1 - self.homophily) * self.num_nodes / 2), torch.zeros_like(y_N), draw
            ),
        ]
        edge_index_2E = to_undirected(torch.cat(edges, dim=1), num_nodes=self.num_nodes)
        return Data(x=x_NF, edge_index=edge_index_2E, y=y_N, membership=membership_N)

    def identity(self) -> dict[str, Any]:  # noqa: D102
        settings = {name: value for name, value in vars(self).items() if name != "preparation"}
        return {"source": "PlantedCommunities", **settings}


class SuperClusterSBM(GraphSource):
    """The stochastic block model of FedAux's similarity study: blocks are clients, blocks of a group are similar.

    Blocks of one super-cluster share the edge probability and the preferred label, and features are one-hot labels, so
    any sound measure of client similarity must find the groups. ``membership`` (the block) and ``super_cluster`` of
    each node are kept with the graph. Drawing takes O(num_nodes^2) time and memory.

    Args:
        num_nodes: Nodes, in equal blocks.
        num_blocks: Blocks, as many in each super-cluster.
        intra_edge_probability: Of two nodes of one block, for each super-cluster; its length is their number.
        inter_edge_probability: Of two nodes of different blocks.
        own_label_probability: That a node has its super-cluster's label; the rest is uniform over the other labels.
        seed: Of the graph.

    Source: FedAux, section D.4. The paper does not print the edge probabilities; these give average degrees from 9 to
    33 in a block.
    """

    def __init__(
        self,
        num_nodes: int = 3000,
        num_blocks: int = 20,
        intra_edge_probability: tuple[float, ...] = (0.06, 0.10, 0.14, 0.18, 0.22),
        inter_edge_probability: float = 0.0005,
        own_label_probability: float = 0.8,
        seed: int = 0,
    ) -> None:
        super().__init__(normalize_features=False, largest_component=False)
        if not isinstance(intra_edge_probability, list | tuple):
            raise ValueError(
                f"intra_edge_probability={intra_edge_probability!r}: give a list, a probability for each group."
            )
        for probability in intra_edge_probability:
            check_number("intra_edge_probability", probability, most=1)
        check_number("inter_edge_probability", inter_edge_probability, most=1)
        check_number("own_label_probability", own_label_probability, most=1)
        check_count("num_nodes", num_nodes)
        check_count("num_blocks", num_blocks)
        check_seed("seed", seed)
        check_size(num_nodes * num_nodes, "num_nodes")
        num_groups = len(intra_edge_probability)
        if num_groups < 2 or num_blocks % num_groups or num_nodes % num_blocks:
            raise ValueError(
                f"num_nodes={num_nodes} must be a multiple of num_blocks={num_blocks}, and that a multiple of the "
                f"number of super-clusters, {num_groups} (the length of intra_edge_probability, at least 2)."
            )
        self.num_nodes = num_nodes
        self.num_blocks = num_blocks
        self.intra_edge_probability = tuple(intra_edge_probability)
        self.inter_edge_probability = inter_edge_probability
        self.own_label_probability = own_label_probability
        self.seed = seed

    def load(self, root: Path, cache_dir: Path | None = None) -> Data:  # noqa: D102
        draw = generator(self.seed, "super-cluster SBM")
        num_groups = len(self.intra_edge_probability)
        block_N = torch.arange(self.num_nodes) * self.num_blocks // self.num_nodes
        group_N = block_N * num_groups // self.num_blocks

        own_N = torch.rand(self.num_nodes, generator=draw) < self.own_label_probability
        step_N = torch.randint(1, num_groups, (self.num_nodes,), generator=draw)
        y_N = torch.where(own_N, group_N, (group_N + step_N) % num_groups)

        intra_N = torch.tensor(self.intra_edge_probability)[group_N]
        probability_NN = torch.where(
            block_N[:, None] == block_N[None, :], intra_N[:, None], torch.tensor(self.inter_edge_probability)
        )
        linked_NN = torch.rand(self.num_nodes, self.num_nodes, generator=draw) < probability_NN
        edge_index_2E = to_undirected(linked_NN.triu(1).nonzero().T, num_nodes=self.num_nodes)
        x_NF = torch.nn.functional.one_hot(y_N, num_groups).float()
        return Data(x=x_NF, edge_index=edge_index_2E, y=y_N, membership=block_N, super_cluster=group_N)

    def identity(self) -> dict[str, Any]:  # noqa: D102
        settings = {name: value for name, value in vars(self).items() if name != "preparation"}
        return {"source": "SuperClusterSBM", **settings}


def _unit_rows(rows: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows, dim=1)


def _random_edges(num_edges: int, group_N: Tensor, draw: torch.Generator) -> Tensor:
    """Draw edges (2, num_edges) whose ends share a group: a uniform source, a uniform target of the source's group."""
    order_N = group_N.argsort(stable=True)
    size_G = torch.bincount(group_N)
    start_G = size_G.cumsum(0) - size_G
    source_E = torch.randint(group_N.numel(), (num_edges,), generator=draw)
    group_E = group_N[source_E]
    rank_E = (torch.rand(num_edges, generator=draw, dtype=torch.float64) * size_G[group_E]).long()
    return torch.stack([source_E, order_N[start_G[group_E] + rank_E]])
