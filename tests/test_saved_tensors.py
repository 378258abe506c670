"""Files of tensors from anybody: nothing outside a tensor is touched, and what holds no numbers is named."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch_geometric.data import Data

from fl_lightning.data import (
    ExampleFile,
    ExampleSetFile,
    FederatedDataModule,
    FileSource,
    GivenPartitioner,
    GraphSetFile,
    PlantedCommunities,
    RandomPartitioner,
)
from fl_lightning.run import checkpoint
from fl_lightning.trained.new_data import read_new

pytestmark = pytest.mark.filterwarnings("ignore")
NUM_NODES = 12
GRAPH = {
    "x": torch.rand(NUM_NODES, 4),
    "edge_index": torch.stack([torch.arange(NUM_NODES), torch.arange(NUM_NODES).roll(1)]),
    "y": torch.arange(NUM_NODES) % 3,
}


def forged(shape: tuple[int, ...]) -> Tensor:
    """A sparse tensor with an index far outside."""
    index = torch.tensor([[0, 10**9]] * len(shape))
    return torch.sparse_coo_tensor(index, torch.ones(2), shape, check_invariants=False)


def forged_rows() -> Tensor:
    return torch.sparse_csr_tensor(
        torch.tensor([0, *[1] * NUM_NODES]),
        torch.tensor([10**9]),
        torch.ones(1),
        (NUM_NODES, 4),
        check_invariants=False,
    )


def setup(path: Path, saved: Any) -> None:
    """Read a file as what it is."""
    torch.save(saved, path)
    if isinstance(saved, list):
        FederatedDataModule(GraphSetFile(str(path)), RandomPartitioner(num_clients=2)).setup()
    elif "edge_index" in saved:
        FederatedDataModule(FileSource(str(path), largest_component=False), RandomPartitioner(num_clients=2)).setup()
    elif "x" in saved:
        FederatedDataModule(ExampleSetFile(str(path)), RandomPartitioner(num_clients=2)).setup()
    else:
        FederatedDataModule(ExampleFile(str(path))).setup()


@pytest.mark.parametrize("make", [lambda: forged((NUM_NODES, 4)), forged_rows], ids=["coordinates", "rows"])
def test_indices_of_sparse_tensors_stay_within_them(make: Any, tmp_path: Path) -> None:
    x, y, path = make(), torch.arange(NUM_NODES) % 2, tmp_path / "forged.pt"
    pairs = {"a": (x, y), "b": (x, y)}
    for saved in (GRAPH | {"x": x}, [GRAPH | {"x": x, "y": torch.tensor([0])}], {"x": x, "y": y}, pairs):
        with pytest.raises(ValueError, match=r"forged\.pt cannot be read"):
            setup(path, saved)
    torch.save(x, path)
    with pytest.raises(ValueError, match=r"forged\.pt cannot be read"):
        read_new(path, PlantedCommunities())
    with pytest.raises(ValueError, match=r"forged\.pt cannot be read"):
        GivenPartitioner(str(path)).assign(Data(**GRAPH), 0)
    torch.save({"format_version": checkpoint.FORMAT_VERSION, "state": x}, path)
    with pytest.raises(checkpoint.DamagedCheckpoint):
        checkpoint.peek(path)


ODD = {
    "meta": (lambda t: t.to("meta"), "is a meta tensor"),
    "nested": (lambda t: torch.nested.nested_tensor([t[:5].float(), t[5:].float()]), "is nested"),
    "complex": (lambda t: t.to(torch.complex64), r"torch\.complex64"),
    "float8": (lambda t: t.float().to(torch.float8_e4m3fn), r"torch\.float8"),
    "uint64": (lambda t: t.to(torch.uint64), r"torch\.uint64"),
    "endless": (lambda t: t[:1].expand(10**12, *t.shape[1:]), "expanded"),
    "negated": (lambda t: torch._neg_view(t.float()), "negates"),
    "no axis": (lambda t: t.flatten()[0], r"\(\)|axes"),
}


@pytest.mark.parametrize(("change", "message"), ODD.values(), ids=ODD)
@pytest.mark.parametrize("key", ["x", "edge_index", "y"])
def test_what_holds_no_numbers_is_named(key: str, change: Any, message: str, tmp_path: Path) -> None:
    odd, path = change(GRAPH[key]), tmp_path / "odd.pt"
    files: list[Any] = [GRAPH | {key: odd}]
    if key != "y" or message != ODD["no axis"][1]:  # a number is a graph's target
        files.append([GRAPH | {"y": torch.tensor([0])}, GRAPH | {"y": torch.tensor([1])} | {key: odd}])
    if key != "edge_index":
        examples = {"x": GRAPH["x"], "y": GRAPH["y"], key: odd}
        files += [examples, {"a": (examples["x"], examples["y"])}]
    for saved in files:
        with pytest.raises(ValueError, match=message) as refused:
            setup(path, saved)
        assert "odd.pt" in str(refused.value) or "'a'" in str(refused.value) or "a: " in str(refused.value)


@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
def test_sparse_tensors_are_read_where_they_make_sense(layout: str, tmp_path: Path) -> None:
    sparse = getattr(GRAPH["x"], layout)()
    setup(tmp_path / "graph.pt", GRAPH | {"x": sparse})
    graphs = [GRAPH | {"x": sparse, "y": torch.tensor([0])}] * 4
    for saved, message in (
        ({"x": sparse, "y": GRAPH["y"]}, r"x is sparse: give it dense, as x\.to_dense\(\)"),
        ({"a": (sparse, GRAPH["y"])}, r"a: x is sparse: give it dense"),
        (graphs, r"graph 0: x is sparse"),
    ):
        with pytest.raises(ValueError, match=message):
            setup(tmp_path / "odd.pt", saved)
    huge = torch.sparse_coo_tensor(torch.tensor([[0], [1]]), torch.ones(1), (NUM_NODES, 10**12))
    with pytest.raises(ValueError, match=r"x is sparse, and \(12, 1000000000000\) numbers do not fit into memory"):
        setup(tmp_path / "huge.pt", GRAPH | {"x": huge})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"note": 5}, r"columns: 'note' is a int: give a list"),
        ({"note": "by hand 2026"}, r"columns: 'note' is a str: give a list"),
        ({"note": torch.tensor(5)}, r"columns: 'note' is a int: give a list"),
        ({"note": {"a": 1}}, r"columns: 'note' is a dict: give a list"),
    ],
)
def test_columns_have_an_entry_for_each_example(change: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        setup(tmp_path / "set.pt", {"x": GRAPH["x"], "y": GRAPH["y"], **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": [[1.0]]}, r"graph 1: x is a list"),
        ({"edge_index": "abc"}, r"graph 1: edge_index is a str"),
        ({"y": "cat"}, r"graph 1: y is a str without numbers; number the classes"),
        ({"edge_attr": torch.tensor(1.0)}, r"graph 1: edge_attr is a tensor of 0 axes"),
    ],
)
def test_parts_of_a_graph_that_are_no_tensors_are_named(change: Any, message: str, tmp_path: Path) -> None:
    graph = GRAPH | {"y": torch.tensor([1])}
    with pytest.raises(ValueError, match=message):
        setup(tmp_path / "set.pt", [graph, graph | change])


def test_a_number_of_nodes_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"num_nodes is a Tensor; leave it out"):
        setup(tmp_path / "graph.pt", GRAPH | {"num_nodes": torch.arange(3)})


@pytest.mark.parametrize("value", [GRAPH["y"].to(torch.complex64), GRAPH["y"].to(torch.uint64)])
def test_clients_in_a_file_are_whole_numbers(value: Tensor, tmp_path: Path) -> None:
    torch.save(value, tmp_path / "clients.pt")
    with pytest.raises(ValueError, match=r"clients\.pt cannot be read"):
        GivenPartitioner(str(tmp_path / "clients.pt")).assign(Data(**GRAPH), 0)


def test_sparse_clients_in_a_file_are_read(tmp_path: Path) -> None:
    torch.save(GRAPH["y"].to_sparse(), tmp_path / "clients.pt")
    assert len(GivenPartitioner(str(tmp_path / "clients.pt")).assign(Data(**GRAPH), 0)) == 3
