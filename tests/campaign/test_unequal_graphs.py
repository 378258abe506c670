"""Lists of graphs that are a client each and differ: in the names and numbers of their classes, in edges, in types."""

import random
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from campaign.record import Record
from campaign.test_hostile import tried
from torch_geometric.data import Data

from fl_lightning.data import FederatedDataModule

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
CLASSES = ["healthy", "ill", "dead", "unknown"]
TYPES = [torch.int64, torch.int32, torch.uint8, torch.float32]


def drawn_graph(draw: random.Random, *, named: bool, weighted: bool) -> tuple[Data, list[str]]:
    """A graph, and the name of each node's class."""
    num_nodes, num_edges = draw.randrange(9, 20), draw.randrange(0, 40)
    names = draw.sample(CLASSES, draw.randrange(3, 5)) if named else CLASSES
    number_N = [draw.randrange(len(names) if named else 3) for _ in range(num_nodes)]
    ends = torch.tensor([[draw.randrange(num_nodes) for _ in range(num_edges)] for _ in range(2)], dtype=torch.int64)
    data = Data(
        x=torch.rand(num_nodes, 3 if draw.random() < 0.95 else 4),
        edge_index=ends.reshape(2, num_edges),
        y=torch.tensor(number_N).to(draw.choice(TYPES)),
    )
    if draw.random() < 0.2:
        data.y = data.y[:, None]
    if named:
        data.class_names = names
    if weighted:
        data.edge_weight = torch.rand(num_edges) + 0.1
    return data, [names[number] for number in number_N]


def lists(number: int, seed: int, folder: Path) -> Iterator[tuple[str, bool]]:
    """Each node keeps its class by name, edges their weights; or the graph that does not fit is named."""
    for trial in range(number):
        draw = random.Random(f"{seed} {trial}")
        named, weighted = draw.random() < 0.6, draw.random() < 0.4
        odd = draw.random() < 0.1  # one graph is of the other kind
        drawn = [
            drawn_graph(draw, named=named ^ (odd and index == 1), weighted=weighted)
            for index in range(draw.randrange(2, 5))
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                data = FederatedDataModule([graph for graph, _ in drawn], cache_dir=str(folder), root=str(folder))
                data.setup()
            except ValueError as error:
                yield f"trial {trial}: {error}", "graph " in str(error) or "clients [" in str(error)
                continue
            except Exception as error:  # which is what the campaign looks for
                yield f"trial {trial}: {error!r}", False
                continue
        names = data.class_names or tuple(CLASSES)
        same = all(
            [names[label] for label in client.y_N.tolist()] == run_record
            for client, (_, run_record) in zip(data.clients, drawn, strict=True)
        )
        weights = all((client.edge_weight_E is not None) == weighted for client in data.clients)
        yield f"trial {trial}", same and weights


def test_lists_of_unequal_graphs(seed: int, record: Record, tmp_path: Path) -> None:
    tried(record, "lists of unequal graphs", lists(400, seed, tmp_path))
