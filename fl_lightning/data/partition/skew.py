"""Clients whose labels are skewed: by a draw for each class, or by merging similar communities.

Shape legend: N nodes, C clients, G communities, K classes.
"""

from abc import abstractmethod

import numpy as np
from torch import Tensor
from torch_geometric.data import Data

from fl_lightning.data.partition.communities import Groups, label_shares, louvain_communities, members, metis_parts
from fl_lightning.data.partition.partitioners import Partitioner, noun
from fl_lightning.data.settings import check_count, check_number
from fl_lightning.kernels.randomness import derive_key


class DirichletPartitioner(Partitioner):
    """The nodes of each class are shared out by a draw from a Dirichlet distribution: label skew, whatever the edges.

    A client that has ``num_nodes / num_clients`` nodes gets none of the classes that follow. Nodes without a label are
    one more class. All is drawn again until every client has ``min_nodes``.

    Args:
        num_clients: Clients.
        alpha: Concentration; the lower, the fewer classes a client has, and at 100 all have nearly the same shares.
        min_nodes: Nodes that every client has at least.
        max_draws: Draws that are tried.
        seed: Of the draws; None for the seed of the data module.

    Source: Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
    Classification", 2019, in the form of Li et al., "Federated Learning on Non-IID Data Silos: An Experimental Study",
    ICDE 2022, which OpenFGL takes over for the nodes of a graph.
    """

    needs_classes = True

    def __init__(
        self,
        num_clients: int,
        alpha: float = 1.0,
        min_nodes: int = 5,
        max_draws: int = 100,
        seed: int | None = None,
    ) -> None:
        super().__init__(num_clients, seed)
        check_number("alpha", alpha, above_0=True)
        check_count("min_nodes", min_nodes)
        check_count("max_draws", max_draws)
        self.alpha = alpha
        self.min_nodes = min_nodes
        self.max_draws = max_draws

    def assign(self, data: Data, seed: int) -> list[Tensor]:  # noqa: D102
        if self.num_clients * self.min_nodes > data.num_nodes:
            raise ValueError(
                f"min_nodes={self.min_nodes} for each of {self.num_clients} clients exceeds the {data.num_nodes} "
                f"{noun(data)}; lower it, or use fewer clients."
            )
        random = np.random.default_rng(derive_key(seed, "Dirichlet partition"))
        most = 0
        for _ in range(self.max_draws):
            client_N = self._draw(data.y.numpy(), random)
            least = int(np.bincount(client_N, minlength=self.num_clients).min())
            if least >= self.min_nodes:
                return members(client_N, self.num_clients)
            most = max(most, least)
        raise ValueError(
            f"alpha={self.alpha}: in none of max_draws={self.max_draws} draws has each of {self.num_clients} clients "
            f"min_nodes={self.min_nodes} nodes (at best {most}); raise alpha or max_draws, or lower min_nodes or "
            "num_clients."
        )

    def _draw(self, y_N: np.ndarray[tuple[int], np.dtype[np.int64]], random: np.random.Generator) -> Groups:
        client_N = np.empty(len(y_N), dtype=np.int64)
        load_C = np.zeros(self.num_clients)
        for label in np.unique(y_N):
            nodes = random.permutation(np.flatnonzero(y_N == label))
            share_C = random.dirichlet(np.full(self.num_clients, self.alpha)) * (load_C < len(y_N) / self.num_clients)
            if share_C.sum() == 0:  # all that was drawn fell on clients that are full
                share_C = (load_C == load_C.min()).astype(float)
            ends = (np.cumsum(share_C / share_C.sum())[:-1] * len(nodes)).astype(np.int64)
            for client, part in enumerate(np.split(nodes, ends)):
                client_N[part] = client
                load_C[client] += len(part)
        return client_N


class _AlikeCommunities(Partitioner):
    """Communities put together by k-means on the shares of their classes, into clients of any size."""

    needs_classes = True
    needs_edges = True

    def assign(self, data: Data, seed: int) -> list[Tensor]:
        from sklearn.cluster import KMeans
        from threadpoolctl import threadpool_limits

        community_N = self.communities(data, seed)
        share_GK = label_shares(data, community_N)
        different = len(np.unique(share_GK, axis=0))
        if different < self.num_clients:
            raise ValueError(
                f"num_clients={self.num_clients} exceeds the {different} communities with different classes that there "
                f"are among {len(share_GK)}; {self.remedy_for_empty_clients}."
            )
        with threadpool_limits(1):  # the order of several threads' sums is not fixed
            client_G = KMeans(self.num_clients, n_init=10, random_state=seed).fit_predict(share_GK)
        return members(client_G[community_N], self.num_clients)

    @abstractmethod
    def communities(self, data: Data, seed: int) -> Groups:
        """The community of each node, (N,)."""


class LouvainPlusPartitioner(_AlikeCommunities):
    """Communities by Louvain; those with like shares of classes are a client: topology skew and label skew.

    Args:
        num_clients: Clients, of any size; at most the number of communities.
        resolution: Of the modularity; higher gives more and smaller communities.
        seed: Of Louvain and of k-means, which puts the communities together; None for the seed of the data module.

    Source: Li et al., "OpenFGL: A Comprehensive Benchmark for Federated Graph Learning", PVLDB 2025: "Louvain+".
    """

    remedy_for_empty_clients = "raise `resolution` for more communities, or use fewer clients"

    def __init__(self, num_clients: int, resolution: float = 1.0, seed: int | None = None) -> None:
        super().__init__(num_clients, seed)
        check_number("resolution", resolution, above_0=True)
        self.resolution = resolution

    def communities(self, data: Data, seed: int) -> Groups:  # noqa: D102
        return louvain_communities(data, self.resolution, seed)


class MetisPlusPartitioner(_AlikeCommunities):
    """Many small parts by METIS; those with like shares of classes are a client: label skew in one piece or several.

    Args:
        num_clients: Clients, of any size.
        num_parts: Parts, at least as many as clients.
        seed: Of METIS and of k-means, which puts the parts together; None for the seed of the data module.

    Source: Li et al., "OpenFGL: A Comprehensive Benchmark for Federated Graph Learning", PVLDB 2025: "Metis+".
    """

    remedy_for_empty_clients = "raise `num_parts`, or use fewer clients"

    def __init__(self, num_clients: int, num_parts: int = 100, seed: int | None = None) -> None:
        super().__init__(num_clients, seed)
        check_count("num_parts", num_parts)
        if num_parts < num_clients:
            raise ValueError(
                f"num_parts={num_parts} is less than num_clients={num_clients}; a client consists of one part or more: "
                "raise num_parts."
            )
        self.num_parts = num_parts

    def communities(self, data: Data, seed: int) -> Groups:  # noqa: D102
        if self.num_parts > data.num_nodes:
            raise ValueError(
                f"num_parts={self.num_parts} exceeds the {data.num_nodes} nodes of the graph; use fewer parts."
            )
        part_N = metis_parts(data, self.num_parts, seed)
        return np.unique(part_N, return_inverse=True)[1]  # METIS may leave parts empty
