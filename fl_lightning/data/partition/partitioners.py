"""Which nodes of the global graph each client holds.

A partitioner is a pure function of the prepared graph and a seed. ``seed`` of a partitioner fixes the partition while
the data module's seed, its default, goes on to vary the split: papers draw splits per seed on one partition.
"""

import hashlib
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from fl_lightning.counts import Counted
from fl_lightning.data.partition.communities import louvain_communities, members, metis_parts, packed, pieces
from fl_lightning.data.settings import check_count, check_flag, check_number, check_seed, check_text, is_file, user_path
from fl_lightning.data.sources.array_file import reading
from fl_lightning.kernels.randomness import generator
from fl_lightning.saved_tensors import load_data


class Partitioner(Counted, ABC):
    """Assigns nodes to clients.

    Args:
        num_clients: Clients.
        seed: Fixes the partition; None for the seed of the data module.
    """

    #: Whether it goes by the nodes' classes.
    needs_classes: ClassVar[bool] = False
    #: Whether it goes by the edges between the nodes, so that it cannot share out independent graphs.
    needs_edges: ClassVar[bool] = False

    def __init__(self, num_clients: int, seed: int | None = None) -> None:
        check_count("num_clients", num_clients)
        if seed is not None:
            check_seed("seed", seed)
        self.num_clients = num_clients
        self.seed = seed

    def __call__(self, data: Data, seed: int = 0) -> list[Tensor]:
        """Partition a prepared graph.

        Args:
            data: The graph. Partitioners see which nodes its edges join; directions and weights count for nothing. Of a
                set of graphs, an entry for each graph (``examples`` is then what messages call them).
            seed: Used unless the partitioner has its own.

        Returns:
            For each client the ascending int64 indices of its nodes.

        Raises:
            ValueError: If a client would have no node.
        """
        if self.num_clients > data.num_nodes:
            raise ValueError(
                f"num_clients={self.num_clients} exceeds the {data.num_nodes} {noun(data)}; use fewer clients."
            )
        parts = [nodes.sort().values for nodes in self.assign(data, seed if self.seed is None else self.seed)]
        num_empty = sum(nodes.numel() == 0 for nodes in parts)
        if num_empty:
            raise ValueError(
                f"num_clients={self.num_clients}: {type(self).__name__} left {num_empty} clients without a node; "
                f"{self.remedy_for_empty_clients}."
            )
        return parts

    remedy_for_empty_clients = "use fewer clients"

    @abstractmethod
    def assign(self, data: Data, seed: int) -> list[Tensor]:
        """Return the node indices of each client, in any order."""

    def identity(self) -> dict[str, Any]:
        """Return everything the partition depends on besides the graph and the module's seed, as JSON-ready values."""
        return {"partitioner": type(self).__name__, **vars(self)}


def noun(data: Data) -> str:
    """What messages call what is shared out."""
    return "nodes of the graph" if data.get("examples") is None else f"{data.examples} of the set"


class MetisPartitioner(Partitioner):
    """Disjoint clients by METIS (k-way, minimal edge cut; recursive bisection where k-way leaves clients empty).

    Args:
        num_clients: Clients; within a few percent of each other in size.
        seed: Of METIS; None for the seed of the data module. Seed 0 is METIS's own default.

    Source: Karypis and Kumar, "A Fast and High Quality Multilevel Scheme for Partitioning Irregular Graphs", SIAM
    Journal on Scientific Computing, 1998.
    """

    needs_edges = True

    def assign(self, data: Data, seed: int) -> list[Tensor]:  # noqa: D102
        return members(metis_parts(data, self.num_clients, seed), self.num_clients)


class OverlappingMetisPartitioner(Partitioner):
    """Overlapping clients: METIS parts, from each of which several clients draw a share of the nodes.

    Args:
        num_clients: Clients, a multiple of ``draws_per_part``.
        draws_per_part: Clients that draw from one part.
        node_fraction: Share of the part's nodes, in (0, 1], that each of them draws without replacement.
        seed: Of METIS and of the draws; None for the seed of the data module.

    Source: the overlapping setting of FED-PUB (Baek et al., "Personalized Subgraph Federated Learning", ICML 2023).
    """

    needs_edges = True

    def __init__(
        self, num_clients: int, draws_per_part: int = 5, node_fraction: float = 0.5, seed: int | None = None
    ) -> None:
        super().__init__(num_clients, seed)
        check_count("draws_per_part", draws_per_part)
        if num_clients % draws_per_part:
            raise ValueError(
                f"num_clients={num_clients} is not a multiple of draws_per_part={draws_per_part}; every METIS part "
                f"serves draws_per_part clients, so use e.g. num_clients={draws_per_part * 6}."
            )
        check_number("node_fraction", node_fraction, most=1, above_0=True)
        self.draws_per_part = draws_per_part
        self.node_fraction = node_fraction

    def assign(self, data: Data, seed: int) -> list[Tensor]:  # noqa: D102
        draw = generator(seed, "overlapping clients")
        num_parts = self.num_clients // self.draws_per_part
        return [
            part[torch.randperm(part.numel(), generator=draw)[: int(part.numel() * self.node_fraction)]]
            for part in members(metis_parts(data, num_parts, seed), num_parts)
            for _ in range(self.draws_per_part)
        ]


class LouvainPartitioner(Partitioner):
    """Communities by Louvain, each given whole to the client that has the fewest nodes so far, largest first.

    Args:
        num_clients: Clients; at most the number of communities.
        resolution: Of the modularity; higher gives more and smaller communities.
        max_share: METIS cuts communities of more nodes than this share of ``num_nodes / num_clients``; clients then
            differ by at most that (and METIS's few percent). None keeps all communities whole.
        seed: Of the order in which Louvain visits the nodes, and of METIS; None for the seed of the data module.

    Source: Blondel et al., "Fast Unfolding of Communities in Large Networks", Journal of Statistical Mechanics, 2008.
    The public code of graph methods (FederatedScope, OpenFGL) cuts what is larger than a client's share, by the order
    of the nodes: ``max_share: 1.0`` is that with fewer lost edges.
    """

    needs_edges = True

    remedy_for_empty_clients = "raise `resolution` for more communities, set `max_share`, or use fewer clients"

    def __init__(
        self, num_clients: int, resolution: float = 1.0, max_share: float | None = None, seed: int | None = None
    ) -> None:
        super().__init__(num_clients, seed)
        check_number("resolution", resolution, above_0=True)
        if max_share is not None:
            check_number("max_share", max_share, most=1, above_0=True)
        self.resolution = resolution
        self.max_share = max_share

    def assign(self, data: Data, seed: int) -> list[Tensor]:  # noqa: D102
        community_N = louvain_communities(data, self.resolution, seed)
        if self.max_share is not None:
            community_N = pieces(data, community_N, self.max_share * data.num_nodes / self.num_clients, seed)
        return members(packed(community_N, self.num_clients), self.num_clients)


class RandomPartitioner(Partitioner):
    """Equal shares of a random permutation: the IID extreme, which cuts most edges.

    Args:
        num_clients: Clients; their sizes differ by at most one node.
        seed: Of the permutation; None for the seed of the data module.
    """

    def assign(self, data: Data, seed: int) -> list[Tensor]:  # noqa: D102
        order = torch.randperm(data.num_nodes, generator=generator(seed, "random partition"))
        return list(order.tensor_split(self.num_clients))


class GivenPartitioner(Partitioner):
    """Clients that are given: one client for each value of a node attribute, in ascending order of the values.

    Args:
        attribute: Name of an integer node attribute of the graph, or the path of a ``.npy`` or ``.pt`` file with one
            integer per node of the *prepared* graph.
        leave_out_negative: Nodes with a negative number are in no client; otherwise such numbers are refused.
    """

    def __init__(self, attribute: str = "membership", leave_out_negative: bool = False) -> None:
        check_text("attribute", attribute, "membership")
        check_flag("leave_out_negative", leave_out_negative)
        self.attribute = attribute
        self.leave_out_negative = leave_out_negative
        self.seed = None

    def __call__(self, data: Data, seed: int = 0) -> list[Tensor]:  # noqa: D102
        return self.assign(data, seed)

    def assign(self, data: Data, seed: int) -> list[Tensor]:  # noqa: D102
        client_N = self._read(data)
        if (
            client_N.dim() != 1
            or client_N.numel() != data.num_nodes
            or client_N.is_floating_point()
            or client_N.is_complex()
        ):
            raise ValueError(
                f"attribute={self.attribute!r} holds {client_N.dtype} of shape {tuple(client_N.shape)} where one "
                f"integer for each of the {data.num_nodes} nodes of the prepared graph is needed. If it was made for "
                "the raw graph, set largest_component to false on the source."
            )
        client_N = client_N.long()
        negative_N = client_N < 0
        if bool(negative_N.any()) and not self.leave_out_negative:
            node = int(negative_N.nonzero()[0])
            raise ValueError(
                f"attribute={self.attribute!r} is {int(client_N[node])} at node {node}, which is not a client's "
                f"number: "
                "set the partitioner's leave_out_negative to true if such nodes are in no client, or correct it."
            )
        if bool(negative_N.all()):
            raise ValueError(
                f"attribute={self.attribute!r} is negative everywhere, so that leave_out_negative leaves no node: give "
                "some of them a number from 0."
            )
        selected = (~negative_N).nonzero().squeeze(1)
        values, group_M = np.unique(client_N[selected].numpy(), return_inverse=True)
        return [selected[indices] for indices in members(group_M, len(values))]

    def identity(self) -> dict[str, Any]:
        """A file counts by its contents; an attribute is part of the graph."""
        identity: dict[str, Any] = {"partitioner": type(self).__name__, "attribute": self.attribute}
        if self.leave_out_negative:
            identity["leave_out_negative"] = True
        if self._is_path:
            identity["attribute"] = hashlib.sha256(self._path.read_bytes()).hexdigest()
        return identity

    @property
    def _is_path(self) -> bool:
        return self.attribute.endswith((".npy", ".pt"))

    @property
    def _path(self) -> Path:
        path = user_path("attribute", self.attribute)
        if not is_file(path):
            raise FileNotFoundError(
                f"attribute={self.attribute!r}: {path.absolute()} is not a file; correct the partitioner's attribute."
            )
        return path

    def _read(self, data: Data) -> Tensor:
        if self._is_path:
            path = self._path
            with reading(path, "an array of one integer per node, written by `numpy.save` or `torch.save`"):
                if path.suffix == ".npy":
                    return torch.from_numpy(np.load(path, allow_pickle=False))
                return torch.as_tensor(load_data(path)).to_dense()
        if self.attribute not in data:
            raise ValueError(
                f"attribute={self.attribute!r} is not on the graph, which has {sorted(data.keys())}; name one of "
                "these, or a .npy or .pt file."
            )
        value = data[self.attribute]
        return value if isinstance(value, Tensor) else torch.empty(0)
