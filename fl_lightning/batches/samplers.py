"""Parts of a client's graph on which a local step trains: sampled neighborhoods of some nodes, or clusters.

Hamilton, Ying, Leskovec: "Inductive Representation Learning on Large Graphs", NeurIPS 2017, for neighborhoods, with the
semantics of PyG's ``NeighborLoader``. Chiang and others: "Cluster-GCN", KDD 2019, for clusters, as PyG's
``ClusterLoader``.

Shape legend: N nodes, E edges, M nodes of a part, S nodes that the loss is of, P nodes that are expanded.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from fl_lightning.batches.client_graph import ClientGraph
from fl_lightning.batches.edges_by_target import EdgesByTarget
from fl_lightning.counts import Counted
from fl_lightning.kernels.metis import metis
from fl_lightning.kernels.randomness import generator


class GraphSampler(Counted, ABC):
    """Draws the part of a client's graph for each local step."""

    settings_prefix = "data.sampler."

    @property
    @abstractmethod
    def num_hops(self) -> int | None:
        """How many edges away from the nodes of the loss a part reaches; None without a bound."""

    @abstractmethod
    def num_units(self, edges: EdgesByTarget) -> int:
        """Number of training nodes or clusters, of which a batch has ``data.batch_size`` and a pass all."""

    @abstractmethod
    def least_nodes(self, edges: EdgesByTarget, num_units: int) -> int:
        """A lower bound of the nodes of a part that is drawn from so many units."""

    @abstractmethod
    def part(self, edges: EdgesByTarget, unit_S: Tensor, key: int) -> ClientGraph:
        """The part of a step.

        Args:
            edges: The client's graph.
            unit_S: What the batch has: training nodes, or indices of clusters.
            key: Random key of the step.
        """

    def plain(self) -> dict[str, Any]:
        """The class and the settings, as data."""
        return {"class": type(self).__name__, **vars(self)}


class NeighborSampler(GraphSampler):
    """Trains on ``data.batch_size`` training nodes per step, with sampled neighbors of theirs, hop by hop.

    As in PyG's ``NeighborLoader``, a node is expanded once, in the hop after the one in which it was found, along the
    edges that lead to it, and a part has the sampled edges alone. Beyond it, an edge of a node of which k of d edges
    were sampled counts d / k times, and nodes are normalized by their degrees in the whole graph: sums and means over
    neighbors, and graph convolutions, are unbiased estimates of those over the whole graph.

    Args:
        fan_outs: How many edges of a node are sampled in each hop, from the nodes of the batch outward; -1 for all. As
            many hops as the net has convolutions, or more.
        replace: Sample edges with replacement: an edge that was drawn twice counts twice in sums.

    Raises:
        ValueError: A fan-out is neither positive nor -1.
    """

    def __init__(self, fan_outs: list[int], replace: bool = False) -> None:
        is_list = isinstance(fan_outs, list | tuple) and len(fan_outs) > 0
        if not is_list or any(type(each) is not int or each == 0 or each < -1 for each in fan_outs):
            raise ValueError(
                f"data.sampler.fan_outs is {fan_outs!r}: give for each hop how many edges of a node are sampled, "
                "such as [10, 10]; -1 for all"
            )
        if not isinstance(replace, bool):
            raise ValueError(f"data.sampler.replace is {replace!r}: give true or false")
        self.fan_outs = list(fan_outs)
        self.replace = replace

    @property
    def num_hops(self) -> int:
        """One for each fan-out."""
        return len(self.fan_outs)

    def num_units(self, edges: EdgesByTarget) -> int:
        """The training nodes."""
        return edges.graph.num_examples

    def least_nodes(self, edges: EdgesByTarget, num_units: int) -> int:
        """Those of the batch."""
        return num_units

    def part(self, edges: EdgesByTarget, unit_S: Tensor, key: int) -> ClientGraph:  # noqa: D102
        is_found_N = torch.zeros(edges.graph.num_nodes, dtype=torch.bool)
        is_found_N[unit_S] = True
        nodes, places, targets, factors, node_P = [unit_S], [], [], [], unit_S
        for hop, fan_out in enumerate(self.fan_outs):
            place_E, row_E, factor_E = self._sampled(edges, node_P, fan_out, generator(key, "hop", hop))
            places.append(place_E)
            targets.append(node_P[row_E])
            factors.append(factor_E)
            source_E = edges.source_E[place_E]
            node_P = torch.unique(source_E[~is_found_N[source_E]])
            is_found_N[node_P] = True
            nodes.append(node_P)
        node_M = torch.cat(nodes)
        is_trained_M = torch.arange(len(node_M)) < len(unit_S)
        return edges.sample(node_M, torch.cat(places), torch.cat(targets), torch.cat(factors), is_trained_M)

    def _sampled(
        self, edges: EdgesByTarget, node_P: Tensor, fan_out: int, drawn_by: torch.Generator
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The places of the sampled edges of some nodes, which of these they lead to, and d / k for each."""
        first_P = edges.first_N[node_P]
        degree_P = edges.first_N[node_P + 1] - first_P
        if self.replace and fan_out > 0:
            uniform_PK = torch.rand(len(node_P), fan_out, generator=drawn_by, dtype=torch.float64)
            row_E = torch.arange(len(node_P)).repeat_interleave(torch.where(degree_P > 0, fan_out, 0))
            place_PK = first_P[:, None] + (uniform_PK * degree_P[:, None]).long()
            return place_PK[degree_P > 0].flatten(), row_E, (degree_P / fan_out).float()[row_E]
        row_E = torch.arange(len(node_P)).repeat_interleave(degree_P)
        begin_E = (degree_P.cumsum(0) - degree_P)[row_E]
        rank_E = torch.arange(len(row_E)) - begin_E
        if fan_out < 0:
            return first_P[row_E] + rank_E, row_E, torch.ones(len(row_E))
        ticket_E = row_E + torch.rand(len(row_E), generator=drawn_by, dtype=torch.float64)
        drawn_E = ticket_E.argsort() - begin_E  # the edges of a node stay together
        is_kept_E = rank_E < fan_out
        drawn_E, row_E = drawn_E[is_kept_E], row_E[is_kept_E]
        factor_P = (degree_P / degree_P.clamp(max=fan_out)).float()
        return first_P[row_E] + drawn_E, row_E, factor_P[row_E]


class ClusterSampler(GraphSampler):
    """Trains on ``data.batch_size`` clusters per step, into which METIS cuts each client's graph.

    As in PyG's ``ClusterLoader``, a part has all edges between the nodes of its clusters, also between two clusters.
    Edges to other clusters are left out, while nodes are normalized by the degrees that they have in the part: the
    estimate is biased, the less so the fewer edges are cut. Only clusters with training nodes are drawn.

    Args:
        num_clusters: Number of clusters of each client's graph; at most one per node.

    Raises:
        ValueError: The number is less than 1.
    """

    def __init__(self, num_clusters: int) -> None:
        if num_clusters < 1:
            raise ValueError(f"data.sampler.num_clusters must be at least 1, got {num_clusters}")
        self.num_clusters = num_clusters

    @property
    def num_hops(self) -> None:
        """Without a bound: every node of a part has its edges in it."""
        return

    def num_units(self, edges: EdgesByTarget) -> int:
        """The clusters with training nodes."""
        return len(self._drawn(edges))

    def least_nodes(self, edges: EdgesByTarget, num_units: int) -> int:
        """Those of the smallest clusters."""
        sizes = torch.bincount(self._clusters(edges))[self._drawn(edges)]
        return int(sizes.sort().values[:num_units].sum())

    def part(self, edges: EdgesByTarget, unit_S: Tensor, key: int) -> ClientGraph:  # noqa: D102
        is_chosen_N = torch.isin(self._clusters(edges), self._drawn(edges)[unit_S])
        return edges.induced(is_chosen_N.nonzero().squeeze(1))

    def _clusters(self, edges: EdgesByTarget) -> Tensor:
        """The cluster of each node, (N,)."""
        if edges.cluster_N is not None:
            return edges.cluster_N
        first_N, neighbor_E = edges.undirected()
        count = min(self.num_clusters, edges.graph.num_nodes)
        cluster_N = torch.zeros(edges.graph.num_nodes, dtype=torch.int64)
        if count > 1:
            cluster_N = torch.from_numpy(metis(first_N.numpy(), neighbor_E.numpy(), count, 0))
        edges.cluster_N = cluster_N
        return cluster_N

    def _drawn(self, edges: EdgesByTarget) -> Tensor:
        """The clusters with training nodes, ascending."""
        drawn: Tensor = torch.unique(self._clusters(edges)[edges.graph.train_mask_N])
        return drawn
