"""Topologies of decentralized training: connected, undirected graphs over the clients."""

import bz2
import gzip
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fl_lightning.counts import Counted
from fl_lightning.kernels.randomness import derive_key

if TYPE_CHECKING:
    import networkx as nx


class Topology(Counted, ABC):
    """Builds the graph of a decentralized federation.

    Args:
        seed: Seed of a random graph; None for that of the run.
    """

    def __init__(self, *, seed: int | None = None) -> None:
        self.seed = seed

    @abstractmethod
    def draw(self, num_clients: int, seed: int) -> "nx.Graph":
        """Draw a graph on the nodes 0..num_clients-1; it need not be connected."""

    def __call__(self, num_clients: int, seed: int) -> Tensor:
        """Return the adjacency matrix, boolean (C, C), symmetric, without self loops.

        Random graphs are drawn again, up to 100 times, until one is connected.

        Raises:
            ValueError: The graph is not connected.
        """
        import networkx as nx

        root = seed if self.seed is None else self.seed
        for attempt in range(100):
            graph = self.draw(num_clients, derive_key(root, "topology", attempt) % 2**32)
            adjacency_CC = torch.from_numpy(nx.to_numpy_array(graph, nodelist=range(num_clients))) > 0
            if nx.is_connected(graph):
                break
        return check_connected(adjacency_CC, type(self).__name__)

    def relations(self, num_clients: int, seed: int) -> Tensor:
        """Return such a graph as a client relation graph, float32 (C, C); a random one is a draw of its own.

        It need not be connected.
        """
        import networkx as nx

        root = seed if self.seed is None else self.seed
        graph = self.draw(num_clients, derive_key(root, "relations") % 2**32)
        return torch.from_numpy(nx.to_numpy_array(graph, nodelist=range(num_clients), dtype="float32"))


def check_connected(adjacency_CC: Tensor, name: str) -> Tensor:
    """Return the adjacency, boolean (C, C), if the graph is connected.

    Raises:
        ValueError: It is not connected.
    """
    import networkx as nx

    if not nx.is_connected(nx.from_numpy_array(adjacency_CC.cpu().numpy())):
        raise ValueError(
            f"{name} on {len(adjacency_CC)} clients is not connected, so some would never receive from others: add "
            "edges"
        )
    return adjacency_CC


class Ring(Topology):
    """Each client has two neighbors."""

    def draw(self, num_clients: int, seed: int) -> "nx.Graph":
        """A cycle."""
        import networkx as nx

        return nx.cycle_graph(num_clients) if num_clients > 2 else nx.path_graph(num_clients)


class Complete(Topology):
    """All clients are neighbors."""

    def draw(self, num_clients: int, seed: int) -> "nx.Graph":
        """All pairs."""
        import networkx as nx

        return nx.complete_graph(num_clients)


class Star(Topology):
    """Client 0 is the only neighbor of all other clients."""

    def draw(self, num_clients: int, seed: int) -> "nx.Graph":
        """Client 0 in the middle."""
        import networkx as nx

        return nx.star_graph(num_clients - 1)


class ErdosRenyi(Topology):
    """Each pair is joined with the same probability.

    Args:
        edge_probability: Probability of an edge, in (0, 1].
        seed: Seed of the graph; None for that of the run.
    """

    def __init__(self, *, edge_probability: float = 0.2, seed: int | None = None) -> None:
        super().__init__(seed=seed)
        if not 0 < edge_probability <= 1:
            raise ValueError(f"topology.edge_probability must be in (0, 1], got {edge_probability}")
        self.edge_probability = edge_probability

    def draw(self, num_clients: int, seed: int) -> "nx.Graph":
        """Independent edges."""
        import networkx as nx

        return nx.gnp_random_graph(num_clients, self.edge_probability, seed=seed)


class WattsStrogatz(Topology):
    """A small world: a ring of near neighbors, some of whose edges are rewired.

    Args:
        num_neighbors: Neighbors on the ring before rewiring, even, at least 2.
        rewiring_probability: Probability that an edge is rewired, in [0, 1].
        seed: Seed of the graph; None for that of the run.
    """

    def __init__(self, *, num_neighbors: int = 4, rewiring_probability: float = 0.1, seed: int | None = None) -> None:
        super().__init__(seed=seed)
        if num_neighbors < 2 or num_neighbors % 2:
            raise ValueError(f"topology.num_neighbors must be even and at least 2, got {num_neighbors}")
        if not 0 <= rewiring_probability <= 1:
            raise ValueError(f"topology.rewiring_probability must be in [0, 1], got {rewiring_probability}")
        self.num_neighbors = num_neighbors
        self.rewiring_probability = rewiring_probability

    def draw(self, num_clients: int, seed: int) -> "nx.Graph":
        """Rewire a ring lattice."""
        import networkx as nx

        if num_clients <= self.num_neighbors:
            raise ValueError(f"topology.num_neighbors is {self.num_neighbors}, but there are {num_clients} clients")
        return nx.watts_strogatz_graph(num_clients, self.num_neighbors, self.rewiring_probability, seed=seed)


class BarabasiAlbert(Topology):
    """Preferential attachment: each new node joins those that have many neighbors.

    Args:
        num_edges: Edges of each new node, at least 1.
        seed: Seed of the graph; None for that of the run.
    """

    def __init__(self, *, num_edges: int = 2, seed: int | None = None) -> None:
        super().__init__(seed=seed)
        if num_edges < 1:
            raise ValueError(f"topology.num_edges must be at least 1, got {num_edges}")
        self.num_edges = num_edges

    def draw(self, num_clients: int, seed: int) -> "nx.Graph":
        """Grow the graph."""
        import networkx as nx

        if num_clients <= self.num_edges:
            raise ValueError(f"topology.num_edges is {self.num_edges}, but there are {num_clients} clients")
        return nx.barabasi_albert_graph(num_clients, self.num_edges, seed=seed)


class EdgeListFile(Topology):
    """A graph from a file of edges, with two client indices per line, separated by white space.

    Args:
        path: The file.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        if not Path(path).is_file():
            raise ValueError(f"topology.path {path!r} is not a file")
        self.path = path

    def draw(self, num_clients: int, seed: int) -> "nx.Graph":
        """Read the edges."""
        import networkx as nx

        graph: nx.Graph = nx.Graph()
        graph.add_edges_from(self._edges())
        strangers = set(graph.nodes) - set(range(num_clients))
        if strangers:
            raise ValueError(f"{self.path} names clients {sorted(strangers)}, but there are {num_clients} from 0 on")
        graph.add_nodes_from(range(num_clients))
        graph.remove_edges_from(list(nx.selfloop_edges(graph)))
        return graph

    def _edges(self) -> Iterator[tuple[int, int]]:
        """The pairs of the file; what follows on a line, as networkx writes it, and comments (#) are left out."""
        opened: Any = {".gz": gzip.open, ".bz2": bz2.open}.get(Path(self.path).suffix, open)
        with opened(self.path, "rt", encoding="utf-8", errors="backslashreplace") as file:
            for number, line in enumerate(file, start=1):
                words = line.partition("#")[0].split()
                if not words:
                    continue
                if len(words) < 2 or not all(word.isascii() and word.isdigit() for word in words[:2]):
                    raise ValueError(
                        f"{self.path}, line {number}: {' '.join(words)[:40]!r} has not the numbers of two clients: "
                        "write them as 0 1"
                    )
                yield int(words[0]), int(words[1])
