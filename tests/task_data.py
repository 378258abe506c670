"""Small federations of every task."""

import csv
from pathlib import Path
from typing import Any

import torch
from torch_geometric.data import Data

from fl_lightning import FederatedDataModule
from fl_lightning.data import (
    ClientSplit,
    Examples,
    ExampleSource,
    GivenPartitioner,
    InMemorySource,
    Links,
    RandomPartitioner,
)
from fl_lightning.run.predictions import Predicted, write_predictions

NODES, FEATURES = 60, 5
#: What is set on ``Links``, not on the data module.
LINK_SETTINGS = ("negatives", "num_negatives", "features", "message_fraction", "candidates")


def ring(num_nodes: int) -> torch.Tensor:
    """A ring with some chords."""
    nodes = torch.arange(num_nodes)
    return torch.cat([torch.stack([nodes, (nodes + step) % num_nodes]) for step in (1, 7)], dim=1)


def node_data(kind: str, folder: Path, *, gaps: bool = True) -> FederatedDataModule:
    """Three clients of one graph: two numbers of each node, or three labels, of which some are missing."""
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(NODES, FEATURES, generator=draw)
    y = x @ torch.randn(FEATURES, 2 if kind == "numbers" else 3, generator=draw)
    if kind == "labels":
        y = (y > 0).float()
    if gaps:
        y[torch.rand(y.shape, generator=draw) < 0.2] = torch.nan
        y[5] = torch.nan
    data = FederatedDataModule(
        Data(x=x, edge_index=ring(NODES), y=y),
        RandomPartitioner(3),
        ClientSplit(0.5, 0.25),
        cache_dir=str(folder),
        root=str(folder),
    )
    data.setup()
    return data


class LabeledRows(ExampleSource):
    """Rows with three labels, of which some are not known."""

    def load(self, root: Any, seed: int) -> Examples:
        draw = torch.Generator().manual_seed(5)
        slopes = torch.randn(4, 3, generator=draw)
        x = tuple(torch.randn(size, 4, generator=draw) for size in (24, 40, 31))
        y = tuple((each @ slopes > 0).float() for each in x)
        for each in y:
            each[torch.rand(each.shape, generator=draw) < 0.2] = torch.nan
        return Examples(names=("a", "b", "c"), x=x, y=y, num_outputs=3, multi_label=True, gaps=True)


class Clouds(ExampleSource):
    """Rows of three clients in two classes."""

    def load(self, root: Any, seed: int) -> Examples:
        draw = torch.Generator().manual_seed(5)
        y = tuple(torch.arange(size) % 2 for size in (24, 40, 31))
        x = tuple(torch.randn(len(each), 4, generator=draw) + each[:, None] for each in y)
        return Examples(names=("a", "b", "c"), x=x, y=y, num_outputs=2)


def graphs_of(num_clients: int = 3, *, kind: str = "classes", edge_attributes: int = 0) -> list[list[Data]]:
    """For each client some graphs: rings and stars, which only their degrees and one noisy feature tell apart."""
    draw = torch.Generator().manual_seed(9)
    clients = []
    for client in range(num_clients):
        own = []
        for number in range(9 + 4 * client):
            is_star, size = number % 2, int(torch.randint(4, 9, (), generator=draw))
            nodes = torch.arange(size)
            edges = torch.stack([torch.zeros_like(nodes[1:]), nodes[1:]]) if is_star else ring(size)[:, :size]
            x = torch.randn(size, 3, generator=draw)
            x[:, 0] += 2.0 * is_star
            weight = 0.5 + torch.rand(edges.shape[1], generator=draw)
            y = {
                "classes": torch.tensor([is_star]),
                "numbers": x.mean(dim=0)[None, :2] + 0.01,
                "labels": torch.tensor([[is_star, 1 - is_star, int(size > 6)]]).float(),
            }[kind]
            more = {}
            if edge_attributes:
                more["edge_attr"] = torch.randn(edges.shape[1], edge_attributes, generator=draw)
            own.append(Data(x=x, edge_index=edges, edge_weight=weight, y=y, **more))
        clients.append(own)
    return clients


def graph_data(
    *, kind: str = "classes", batch_size: int | None = None, edge_attributes: int = 0, **settings: Any
) -> FederatedDataModule:
    """Those clients."""
    graphs = graphs_of(kind=kind, edge_attributes=edge_attributes)
    data = FederatedDataModule(graphs, batch_size=batch_size, **settings)  # type: ignore[arg-type]
    data.setup()
    return data


def link_graph(num_nodes: int = 90) -> Data:
    """Three clients whose links follow the features; given with one direction of each edge, some twice, and loops."""
    draw = torch.Generator().manual_seed(4)
    nodes = torch.arange(num_nodes)
    membership, group = nodes * 3 // num_nodes, nodes % 3
    x = torch.randn(num_nodes, FEATURES, generator=draw)
    x[:, :3] += 2 * torch.nn.functional.one_hot(group, 3)
    pairs = torch.randint(num_nodes, (2, 25 * num_nodes), generator=draw)
    alike = (group[pairs[0]] == group[pairs[1]]) & (membership[pairs[0]] == membership[pairs[1]])
    pairs = pairs[:, alike | (torch.rand(pairs.shape[1], generator=draw) < 0.04)]
    return Data(x=x, edge_index=torch.cat([pairs, pairs[:, :9], pairs[:, 9:20].flip(0)], dim=1), membership=membership)


def relational_graph(num_nodes: int = 90) -> Data:
    """Three clients whose nodes are of two kinds: links of the relation 0 join like, those of 1 unlike nodes."""
    draw = torch.Generator().manual_seed(6)
    nodes = torch.arange(num_nodes)
    kind = nodes % 2
    x = 0.1 * torch.randn(num_nodes, FEATURES, generator=draw)
    x[:, :2] += torch.nn.functional.one_hot(kind, 2)
    pairs = torch.randint(num_nodes, (2, 12 * num_nodes), generator=draw)
    pairs = pairs[:, (pairs[0] * 3 // num_nodes == pairs[1] * 3 // num_nodes) & (pairs[0] != pairs[1])]
    relation = (kind[pairs[0]] != kind[pairs[1]]).long()
    return Data(x=x, edge_index=pairs, edge_type=relation, membership=nodes * 3 // num_nodes)


def link_data(folder: Path, partitioner: Any = None, *, source: Any = None, **settings: Any) -> FederatedDataModule:
    """Three clients of that graph and their links."""
    links = {name: settings.pop(name) for name in LINK_SETTINGS if name in settings}
    links |= {"pool_size": settings.pop("pool_size", 60)}
    data = FederatedDataModule(
        Links(source or InMemorySource(link_graph()), **links),
        partitioner or GivenPartitioner(),
        cache_dir=str(folder),
        root=str(folder),
        **settings,
    )
    data.setup()
    return data


def rows_of_predictions(trainer: Any, data: FederatedDataModule, path: Path) -> list[dict[str, str]]:
    """Write what the result's models of three clients predict, and read the file."""
    clients = [0, 1, 2]
    outputs = trainer.run.executor.predict(trainer.run.strategy.evaluations(clients)[""], clients, 0)
    parts = [
        Predicted(task=data.task, client_data=data.clients[c], names=data.user_names(c), output_NK=actual)
        for c, actual in outputs.items()
    ]
    write_predictions(path, parts)
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
