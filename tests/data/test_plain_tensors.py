"""Tensors that hold numbers are taken, however they came about; others are refused by name."""

import pytest
import torch
from torch_geometric.data import Data

from fl_lightning.data import FederatedDataModule, FileSource, MetisPartitioner, prepare_graph


def load(tmp_path, **tensors: torch.Tensor) -> Data:
    edges = torch.tensor([[0, 1, 2, 0], [1, 2, 0, 2]])
    data = Data(**{"x": torch.eye(3), "edge_index": edges, "y": torch.tensor([0, 1, 1]), **tensors})
    torch.save(data, tmp_path / "graph.pt")
    source = FileSource(str(tmp_path / "graph.pt"))
    return prepare_graph(source.load(tmp_path), source.preparation, str(source))


@pytest.mark.parametrize(
    "tensors",
    [
        {"x": torch.eye(3, requires_grad=True)},
        {"x": torch.eye(3).to_sparse()},
        {"x": torch.eye(3).half()},
        {"y": torch.tensor([0.0, 1.0, 1.0], requires_grad=True)},
    ],
)
def test_numbers_are_numbers(tmp_path, tensors) -> None:
    prepared = load(tmp_path, **tensors)
    assert torch.equal(prepared.x, torch.eye(3))
    assert prepared.y.tolist() == [0, 1, 1]
    assert not prepared.x.requires_grad


def test_a_graph_in_memory_may_have_learned_features_and_weights() -> None:
    """Its features were hashed with their gradient: a traceback from torch."""
    source, target = torch.arange(12), (torch.arange(12) + 1) % 12
    edges = torch.stack([torch.cat([source, target]), torch.cat([target, source])])
    x = torch.nn.Embedding(12, 3).weight  # as of Node2Vec
    graph = Data(x=x, y=source % 2, edge_index=edges, edge_weight=torch.rand(24).requires_grad_())
    data = FederatedDataModule(graph, MetisPartitioner(2))
    data.prepare_data()
    data.setup()
    assert all(
        torch.equal(client.x_NF, x[client.node_idx_N]) and not client.x_NF.requires_grad for client in data.clients
    )


@pytest.mark.filterwarnings("ignore:.*[qQ]uantiz.*")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: {"x": torch.eye(3, device="meta")}, "x is a meta tensor"),
        (lambda: {"y": torch.zeros(3, dtype=torch.long, device="meta")}, "y is a meta tensor"),
        (lambda: {"y": torch.tensor([0, 1, 1]).to_sparse()}, "y is sparse"),
        (lambda: {"x": torch.quantize_per_tensor(torch.eye(3), 0.1, 0, torch.qint8)}, "x is quantized|is damaged"),
    ],
)
def test_what_holds_no_numbers_is_refused(tmp_path, make, message) -> None:
    with pytest.raises(ValueError, match=rf"graph\.pt.*({message})"):
        load(tmp_path, **make())
