"""The table and the picture of clients that hold many graphs."""

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from task_data import graph_data
from torch_geometric.data import Data

from fl_lightning.data import FederatedDataModule, GraphSets


def stars(sizes: list[int], targets: list[Any]) -> list[Data]:
    """Stars of some nodes, each edge in one direction."""
    return [
        Data(
            x=torch.ones(size, 1),
            edge_index=torch.stack([torch.zeros(size - 1, dtype=torch.int64), torch.arange(1, size)]),
            y=torch.tensor([target]),
        )
        for size, target in zip(sizes, targets, strict=True)
    ]


def table_of(*clients: list[Data]) -> Any:
    data = FederatedDataModule(GraphSets(list(clients)))
    with pytest.warns(UserWarning, match="without a"):
        data.setup()
    return data.statistics()


def test_sizes_and_degrees_by_hand() -> None:
    table = table_of(stars([2, 4], [0, 1]), stars([5, 5, 8], [1, 1, 1]))
    one, other = table.rows
    assert (one.num_graphs, one.mean_nodes, one.mean_degree, one.num_classes) == (2, 3.0, (1 + 1.5) / 2, 2)
    assert (other.num_graphs, other.mean_nodes, other.num_classes) == (3, 6.0, 1)
    assert other.mean_degree == pytest.approx((1.6 + 1.6 + 1.75) / 3)
    assert table.label_counts == ((1, 1), (0, 3))
    assert table.spreads["nodes of a graph"] == ((2.0, 2.5, 3.0, 3.5, 4.0), (5.0, 5.0, 5.0, 6.5, 8.0))
    assert set(table.spreads) == {"nodes of a graph", "mean degree of a graph"}


def test_targets_that_are_numbers_by_hand(tmp_path: Path) -> None:
    table = table_of(stars([2, 4], [0.5, 2.5]), stars([5, 5, 8], [-1.5, -1.5, 3.0]))
    assert [(row.mean_target, row.std_target) for row in table.rows] == [(1.5, 1.0), (0.0, pytest.approx(4.5**0.5))]
    assert table.spreads["target of a graph"][0] == (0.5, 1.0, 1.5, 2.0, 2.5)
    table.to_csv(tmp_path / "table.csv")
    header, first, *_ = csv.reader((tmp_path / "table.csv").read_text().splitlines())
    assert dict(zip(header, first, strict=True))["mean_target"] == "1.5"


@pytest.mark.parametrize("kind", ["classes", "numbers", "labels"])
def test_pictures_are_drawn(kind: str, tmp_path: Path) -> None:
    table = graph_data(kind=kind).statistics()
    table.plot_labels(tmp_path / "clients.svg")
    text = (tmp_path / "clients.svg").read_text()
    for expected in ("nodes of a graph", "mean degree of a graph", "client-02"):
        assert expected in text
    assert ("target of a graph" in text) == (kind == "numbers")
    assert ("Labels of the clients" in text) == (kind == "classes")
    assert table.rich_table().row_count == 3
