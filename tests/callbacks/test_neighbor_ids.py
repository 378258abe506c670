"""Ids of neighbors: all of them, alike in all clients, and only for those who know the key."""

import pytest
import torch

from fl_lightning import FederatedDataModule
from fl_lightning.callbacks import NeighborIds
from fl_lightning.callbacks.neighbor_ids import neighbor_ids
from fl_lightning.data import GivenPartitioner, PlantedCommunities
from fl_lightning.strategies import FedGNN

STAR = torch.tensor([[0, 1, 0, 2, 0, 3, 1, 2], [1, 0, 2, 0, 3, 0, 2, 1]])


def test_nodes_with_the_same_neighbors_have_the_same_ids() -> None:
    ids = neighbor_ids(STAR, 5, secret="one", max_ids=100)
    assert ids.shape == (5, 3)
    assert [int((row > 0).sum()) for row in ids] == [3, 2, 2, 1, 0]
    assert set(ids[1].tolist()) & set(ids[2].tolist()) - {0} == {int(ids[3, 0])}  # node 0
    assert set(ids[0].tolist()) == {*ids[1].tolist(), *ids[2].tolist(), *neighbor_of(3)} - {int(ids[3, 0]), 0}


def neighbor_of(node: int) -> list[int]:
    """By what a node is known to others."""
    edge = torch.tensor([[4, node], [node, 4]])
    return [int(neighbor_ids(edge, 5, secret="one", max_ids=1)[4, 0])]


def test_neighbors_are_those_that_send_messages() -> None:
    ids = neighbor_ids(torch.tensor([[3, 0], [0, 1]]), 5, secret="one", max_ids=100)
    assert [int((row > 0).sum()) for row in ids] == [1, 1, 0, 0, 0]
    assert ids[0].tolist() == neighbor_of(3)
    assert ids[1].tolist() == neighbor_of(0)


def test_the_key_makes_the_ids_and_the_smallest_are_kept() -> None:
    ids, others = (neighbor_ids(STAR, 5, secret=secret, max_ids=2) for secret in ("one", "two"))
    assert not set(ids.flatten().tolist()) & set(others.flatten().tolist()) - {0}
    whole = neighbor_ids(STAR, 5, secret="one", max_ids=100)
    assert torch.equal(ids, whole[:, :2])


def test_lost_neighbors_are_known(make_model, make_trainer, tmp_path) -> None:
    source = PlantedCommunities(num_nodes=60, num_communities=3, num_classes=3, num_features=6)
    data = FederatedDataModule(source, GivenPartitioner(), cache_dir=str(tmp_path), root=str(tmp_path))
    trainer = make_trainer(callbacks=NeighborIds())
    strategy = FedGNN(num_warmup_rounds=0)
    trainer.fit(make_model(FedGNN), data, strategy)
    known = [int((strategy.sent["ids"][client] > 0).sum()) for client in range(3)]
    kept = [graph.num_edges for graph in data.clients]
    assert [all_of - own for all_of, own in zip(known, kept, strict=True)] == list(data.allocation.edges_lost)
    assert trainer.run.history[-1]["server/matched"] > 0


def test_graphs_that_nobody_cut_are_refused(graphs, given_clients, make_model, make_trainer) -> None:
    with pytest.raises(ValueError, match="NeighborIds is for one graph that is cut into clients"):
        make_trainer(callbacks=NeighborIds()).fit(make_model(FedGNN), given_clients(graphs), FedGNN())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"secret": ""}, r"NeighborIds\.secret must have 1 to 64 bytes, got 0"),
        ({"max_ids": 0}, r"NeighborIds\.max_ids must be at least 1, got 0"),
    ],
)
def test_settings(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        NeighborIds(**settings)
