"""FedStruct: structure features of the whole graph, its net by hand, and classes that only degrees elsewhere show."""

import dataclasses
import functools

import pytest
import torch
from torch.optim import Adam
from torch_geometric.data import Data

from fl_lightning import ClientModule, FederatedDataModule, SequentialExecutor, StackedExecutor
from fl_lightning.batches.base import single
from fl_lightning.data import GlobalSplit, RandomPartitioner
from fl_lightning.models import GCN, StructureGCN
from fl_lightning.strategies import FedAvg, FedStruct

COUNT, HUBS = 300, 20


def hub_data(tmp_path) -> FederatedDataModule:
    """Half of the nodes have three neighbors of a high degree, and half of a low one; features are noise."""
    draw = torch.Generator().manual_seed(2)
    nodes = torch.arange(HUBS, COUNT).repeat_interleave(3)
    near = nodes % 2 == 1
    hubs = torch.randint(HUBS, nodes.shape, generator=draw)
    others = HUBS + 2 * torch.randint((COUNT - HUBS) // 2, nodes.shape, generator=draw)
    edges = torch.stack([nodes, torch.where(near, hubs, others)])
    y = torch.arange(COUNT) % 2
    y[:HUBS] = -1
    graph = Data(x=torch.randn(COUNT, 4, generator=draw), edge_index=edges, y=y)
    data = FederatedDataModule(
        graph, RandomPartitioner(5), GlobalSplit(0.5, 0.2), cross_edges=True, cache_dir=str(tmp_path)
    )
    data.setup()
    return data


@pytest.mark.parametrize("executor", [SequentialExecutor, StackedExecutor])
def test_structure_features_are_those_of_the_whole_graph(executor, make_trainer, tmp_path) -> None:
    data = hub_data(tmp_path)
    trainer = make_trainer(num_rounds=1, executor=executor())
    trainer.fit(ClientModule(), data, FedStruct(num_hops=2, num_degrees=6))
    whole = data.whole_graph()
    a_NN = torch.eye(COUNT)
    a_NN[tuple(whole.edge_index)] = 1
    a_NN /= a_NN.sum(dim=1, keepdim=True)
    s_NW = torch.nn.functional.one_hot(torch.bincount(whole.edge_index[1]).clamp(max=5), 6).float()
    expected = torch.cat([s_NW, a_NN @ s_NW, a_NN @ a_NN @ s_NW], dim=1)
    for client, own in enumerate(data.clients):
        graph = trainer.run.executor.collator.client_data(client)
        torch.testing.assert_close(graph.structure_NS, expected[own.node_idx_N], atol=1e-5, rtol=0)
        assert torch.equal(graph.edge_index_2E, own.edge_index_2E)
        assert torch.equal(graph.x_NF, own.x_NF)


def test_the_net_by_hand(make_trainer, tmp_path) -> None:
    data = hub_data(tmp_path)
    trainer = make_trainer(num_rounds=1)
    trainer.fit(ClientModule(), data, FedStruct(num_hops=1, num_degrees=4))
    batch = single(trainer.run.executor.collator([0]))
    net = StructureGCN(4, 2, hidden_channels=3, num_layers=2, structure_channels=8).eval()
    own = data.clients[0]
    a_NN = torch.eye(own.num_nodes)
    a_NN[tuple(own.edge_index_2E)] = 1
    a_NN /= a_NN.sum(dim=1, keepdim=True)
    hidden = (own.x_NF @ net.features.weight + net.features.bias).relu()
    expected = a_NN @ a_NN @ net.head(hidden) + batch.structure @ net.structure.weight.T
    torch.testing.assert_close(net(batch).logits, expected, atol=1e-5, rtol=0)
    unknown = net(dataclasses.replace(batch, structure=None)).logits
    torch.testing.assert_close(unknown, a_NN @ a_NN @ net.head(hidden), atol=1e-5, rtol=0)


def test_it_learns_what_degrees_at_other_clients_show(make_trainer, tmp_path) -> None:
    adam = functools.partial(Adam, lr=0.05)
    structured = make_trainer(num_rounds=10).fit(ClientModule(optimizer=adam), hub_data(tmp_path), FedStruct())
    plain = make_trainer(num_rounds=10).fit(ClientModule(GCN, adam), hub_data(tmp_path), FedAvg())
    assert structured["test/acc"] > 0.9 > plain["test/acc"] + 0.2


def test_wrong_settings_are_named(make_trainer, tmp_path) -> None:
    for name, value, least in (("num_hops", 0, 1), ("num_degrees", 1, 2)):
        with pytest.raises(ValueError, match=f"strategy.{name} must be at least {least}"):
            FedStruct(**{name: value})
    data = hub_data(tmp_path)
    with pytest.raises(ValueError, match="structure_channels=8, but num_hops=3 and num_degrees=32 make 128: set"):
        make_trainer().fit(ClientModule(functools.partial(StructureGCN, structure_channels=8)), data, FedStruct())
    with pytest.raises(ValueError, match="FedStruct needs a net with a map of structure features: set"):
        make_trainer().fit(ClientModule(GCN), data, FedStruct())
    with pytest.raises(ValueError, match="num_layers must be at least 0, got -1"):
        StructureGCN(3, 2, num_layers=-1)
