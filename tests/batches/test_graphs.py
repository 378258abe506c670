"""What a batch of graphs says of its nodes."""

import pytest
import torch

from fl_lightning.batches import GraphBatch, GraphCollator
from fl_lightning.batches.base import single


@pytest.fixture
def collator(graphs) -> GraphCollator:
    return GraphCollator(graphs, device=torch.device("cpu"), dtype=torch.float32)


def neighbors(batch: GraphBatch) -> torch.Tensor:
    """What the adjacency says, without the loop of each node."""
    dense = batch.adjacency.matrix.to_dense().view(*batch.example_mask.shape, -1)
    return (dense != 0).sum(dim=-1) - batch.example_mask.long()


def test_degrees_are_the_neighbors_of_each_node(collator, graphs) -> None:
    batch = collator([0, 2, 4])

    assert batch.degree.dtype == torch.int64
    assert torch.equal(batch.degree, neighbors(batch))
    assert (batch.degree[~batch.example_mask] == 0).all()
    assert batch.degree.sum(dim=1).tolist() == [graphs[client].num_edges for client in (0, 2, 4)]


def test_degrees_are_communicated_with_the_batch(collator) -> None:
    batch = collator([0, 2, 4])
    chosen = batch.select(torch.tensor([2, 1]))

    assert torch.equal(chosen.degree, collator([4, 2]).degree)
    assert torch.equal(single(collator([4])).degree, batch.degree[2, :8])
    one = torch.vmap(lambda tensors: batch.replace(tensors).degree.sum())(batch.tensors())
    assert torch.equal(one, batch.degree.sum(dim=1))
