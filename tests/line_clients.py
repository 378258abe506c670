"""Four clients with lines of their own, and nets of three sizes for them."""

import functools
from typing import Any

import networkx as nx
import torch
from torch import Tensor, nn
from torch.optim import SGD

from fl_lightning import ClientModule, FederatedDataModule, Payload
from fl_lightning.batches.examples import ExampleBatch
from fl_lightning.data import Examples, ExampleSource, Role, Splitter
from fl_lightning.federation import Federation
from fl_lightning.models.output import NetOutput
from fl_lightning.relations.topology import Topology

SIZES = (7, 4, 6, 5)
PATH = ((0, 1), (1, 2), (2, 3))


class Lines(ExampleSource):
    """Clients whose targets (or labels) are their own noisy functions of two features.

    Args:
        order: Which of the clients, in which order.
        labels: Classes instead of numbers.
        relation: Weight of the relation graph, a path; 0 for none.
    """

    def __init__(self, order=(0, 1, 2, 3), *, labels: bool = False, relation: float = 0.0) -> None:
        self.order = tuple(order)
        self.labels = labels
        self.relation = relation

    def load(self, root, seed: int) -> Examples:
        draw = torch.Generator().manual_seed(7)
        x = [torch.randn(size, 2, generator=draw) for size in SIZES]
        slopes = torch.tensor([[2.0, -1.0], [1.0, -2.0], [-1.0, 1.0], [0.5, 3.0]])
        y = [
            x_N2 @ slope + shift + torch.randn(len(x_N2), generator=draw)
            for x_N2, slope, shift in zip(x, slopes, (3.0, -2.0, 0.5, 1.0), strict=True)
        ]
        targets = [(y_N > 0).long() if self.labels else y_N[:, None] for y_N in y]
        adjacency_CC = self.relation * along(PATH)
        return Examples(
            names=tuple(f"line-{client}" for client in self.order),
            x=tuple(x[client] for client in self.order),
            y=tuple(targets[client] for client in self.order),
            num_outputs=2 if self.labels else 1,
            relation_CC=adjacency_CC[list(self.order)][:, list(self.order)] if self.relation else None,
        )


class LastTwo(Splitter):
    """The last example tests, the one before it validates, the others train."""

    def assign(self, data, clients, seed):
        return [torch.tensor([Role.TRAIN] * (len(c) - 2) + [Role.VAL, Role.TEST], dtype=torch.int8) for c in clients]


class Edges(Topology):
    """Given edges."""

    def __init__(self, *edges: tuple[int, int]) -> None:
        super().__init__()
        self.edges = edges

    def draw(self, num_clients: int, seed: int) -> nx.Graph:
        graph = nx.empty_graph(num_clients)
        graph.add_edges_from(self.edges)
        return graph


class Affine(nn.Module):
    """Two slopes (a class) and an intercept."""

    def __init__(self, num_features: int, num_outputs: int) -> None:
        super().__init__()
        self.head = nn.Linear(num_features, num_outputs)

    def forward(self, batch: ExampleBatch) -> NetOutput:
        return NetOutput(self.head(batch.x), batch.x)


class Slope(nn.Module):
    """The first feature's slope alone."""

    def __init__(self, num_features: int, num_outputs: int) -> None:
        super().__init__()
        self.head = nn.Linear(1, num_outputs, bias=False)

    def forward(self, batch: ExampleBatch) -> NetOutput:
        return NetOutput(self.head(batch.x[..., :1]), batch.x)


class Wide(nn.Module):
    """A hidden layer."""

    def __init__(self, num_features: int, num_outputs: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(num_features, 5)
        self.head = nn.Linear(5, num_outputs)

    def forward(self, batch: ExampleBatch) -> NetOutput:
        hidden = self.hidden(batch.x).tanh()
        return NetOutput(self.head(hidden), hidden)


def along(edges, num_clients: int = 4) -> Tensor:
    """Adjacency of given edges, float32."""
    adjacency_CC = torch.zeros(num_clients, num_clients)
    for i, j in edges:
        adjacency_CC[i, j] = adjacency_CC[j, i] = 1
    return adjacency_CC


def lines(source: Lines | None = None, **settings: Any) -> FederatedDataModule:
    return FederatedDataModule(source or Lines(), splitter=LastTwo(), **settings)


def affine_client(*nets: type[nn.Module], lr: float = 0.05, **settings: Any) -> ClientModule:
    return ClientModule(list(nets) or [Affine], functools.partial(SGD, lr=lr, **settings))


def small_federation(*sizes: int, **settings: Any) -> Federation:
    """As many clients as sizes, each of an architecture of its own."""
    known: dict[str, Any] = {
        "num_clients": len(sizes),
        "training_clients": tuple(range(len(sizes))),
        "num_features": 1,
        "parameters": {"w": torch.zeros(sizes[0], dtype=torch.float64)},
        "architectures": tuple({"w": torch.zeros(size, dtype=torch.float64)} for size in sizes),
        "seed": 0,
        "device": torch.device("cpu"),
        "learning_rate": 0.5,
    }
    return Federation(**{**known, **settings})


def upload_of(rows: list[list[float]], clients: tuple[int, ...] | None = None) -> Payload:
    return Payload(
        clients=clients or tuple(range(len(rows))), parameters={"flat": torch.tensor(rows, dtype=torch.float64)}
    )
