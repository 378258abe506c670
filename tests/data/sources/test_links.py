"""Links of graphs: roles that leak nothing, pools, candidates, and what is refused."""

import io
import itertools

import pytest
import torch
from link_leaks import check_no_leak, codes
from rich.console import Console
from task_data import link_data, link_graph, relational_graph
from torch_geometric.data import Data

from fl_lightning import FederatedDataModule
from fl_lightning.data import (
    ChronologicalSplit,
    ClientSplit,
    DirichletPartitioner,
    GivenPartitioner,
    GivenSplit,
    InMemorySource,
    Links,
    ManyGraphs,
    MetisPartitioner,
    OverlappingMetisPartitioner,
    PlantedCommunities,
    RandomPartitioner,
    ScarceSplit,
    SEALSource,
)

COMMUNITIES = PlantedCommunities(num_nodes=120, num_communities=3, num_features=4, intra_degree=8.0)


@pytest.mark.parametrize("fraction", [0.3, 0.7])
def test_a_training_link_does_not_see_itself(fraction, tmp_path) -> None:
    data = link_data(
        tmp_path,
        OverlappingMetisPartitioner(4, draws_per_part=2, node_fraction=0.7),
        source=COMMUNITIES,
        message_fraction=fraction,
    )
    check_no_leak(data)
    for client in data.clients:
        nodes = client.graph.node_idx_N
        trained = codes(client.pair_P2[client.train_mask_N], nodes)
        assert not trained & codes(client.graph.edge_index_2E.t(), nodes)
    sent = sum(client.graph.num_edges // 2 for client in data.clients)
    kept = sum(int((client.train_mask_N & (client.y_N[:, 0] > 0.5)).sum()) for client in data.clients)
    assert sent / (sent + kept) == pytest.approx(fraction, abs=0.1)


def test_shares_and_pools(tmp_path) -> None:
    data = link_data(tmp_path)
    linked = [client.y_N[:, 0] > 0.5 for client in data.clients]
    total = sum(int(each.sum()) for each in linked)
    for role, share in (("train", 0.85), ("val", 0.05), ("test", 0.1)):
        masks = [getattr(client, f"{role}_mask_N") for client in data.clients]
        count = sum(int((mask & each).sum()) for mask, each in zip(masks, linked, strict=True))
        assert count / total == pytest.approx(share, abs=0.03)
        others = [int((mask & ~each).sum()) for mask, each in zip(masks, linked, strict=True)]
        expected = [int((m & each).sum()) for m, each in zip(masks, linked, strict=True)] if role == "train" else 60
        assert others == (expected if role == "train" else [60] * 3)
    table = data.statistics()
    assert table.columns[:3] == ("client", "num_nodes", "num_edges")
    assert [row.num_test_pool for row in table.rows] == [60] * 3
    assert [row.num_edges for row in table.rows] == [2 * int(each.sum()) for each in linked]
    pairs = [client.pair_P2[each].flatten() for client, each in zip(data.clients, linked, strict=True)]
    most = [int(ends.bincount().max()) for ends in pairs]
    assert [greatest for *_, greatest in table.spreads["links of each node"]] == most


@pytest.mark.filterwarnings("ignore:GivenSplit leaves clients")
def test_clients_without_tested_links_have_no_pool(tmp_path) -> None:
    """Accuracy and loss of the pool alone counted in the means, and could choose the round."""
    graph = link_graph().update({"test_edge_index": torch.tensor([[0, 1], [2, 6]])})  # of the first client alone
    data = link_data(tmp_path, source=InMemorySource(graph), splitter=GivenSplit())
    assert not data.has_validation
    assert [int(client.test_mask_N.sum()) for client in data.clients] == [62, 0, 0]
    rows = data.statistics().rows
    assert [(row.num_test, row.num_test_pool, row.num_val_pool) for row in rows] == [(2, 60, 0), (0, 0, 0), (0, 0, 0)]


def test_the_table_fits_into_80_columns(tmp_path) -> None:
    console = Console(width=80, file=io.StringIO())
    console.print(link_data(tmp_path, pool_size=500).statistics().rich_table())
    text = console.file.getvalue()
    assert "…" not in text
    assert " client     nodes" in text


def test_pools_are_kept_and_depend_on_the_settings(tmp_path) -> None:
    first, again, other = (link_data(tmp_path, negatives=kind) for kind in ("hard", "hard", "uniform"))
    assert first.partition_hash == again.partition_hash != other.partition_hash
    assert len(list((tmp_path / "partitions").iterdir())) == 2
    for one, two in zip(first.clients, again.clients, strict=True):
        for name in ("pair_P2", "candidate_M2", "test_mask_N"):
            assert torch.equal(getattr(one, name), getattr(two, name))
    [changed, *_] = [link_data(tmp_path, seed=seed).partition_hash for seed in (1, 2)]
    assert changed != other.partition_hash


def test_negatives_go_by_degree_and_by_common_neighbors(tmp_path) -> None:
    means, shared = {}, {}
    for kind in ("uniform", "degree", "hard"):
        data = link_data(tmp_path, negatives=kind, source=COMMUNITIES)
        degrees, common = [], []
        for client in data.clients:
            dense = torch.zeros(client.graph.num_nodes, client.graph.num_nodes)
            dense[tuple(client.graph.edge_index_2E)] = 1
            pool = client.pair_P2[(client.val_mask_N | client.test_mask_N) & (client.y_N[:, 0] < 0.5)]
            degrees.append(dense.sum(dim=1)[pool].mean())
            common.append(((dense @ dense)[tuple(pool.t())] > 0).float().mean())
        means[kind], shared[kind] = torch.stack(degrees).mean(), torch.stack(common).mean()
    assert means["degree"] > 1.1 * means["uniform"]
    assert shared["hard"] > 0.95
    assert shared["uniform"] < 0.9 * shared["hard"]


def test_links_in_the_order_of_time(tmp_path) -> None:
    graph = link_graph()
    graph.edge_time = torch.rand(graph.num_edges, generator=torch.Generator().manual_seed(2))
    data = link_data(tmp_path, source=InMemorySource(graph), splitter=ChronologicalSplit(0.7, 0.1))
    check_no_leak(data)
    first = {}
    for pair, time in zip(graph.edge_index.t().tolist(), graph.edge_time.tolist(), strict=True):
        first[tuple(sorted(pair))] = min(time, first.get(tuple(sorted(pair)), 2.0))
    for client in data.clients:
        linked = client.y_N[:, 0] > 0.5
        times = [
            [first[each] for each in codes(client.pair_P2[mask & linked], client.graph.node_idx_N)]
            for mask in (client.train_mask_N, client.val_mask_N, client.test_mask_N)
        ]
        assert max(times[0]) <= min(times[1])
        assert max(times[1]) <= min(times[2])


def test_given_roles_of_edges_that_the_graph_is_saved_without(tmp_path) -> None:
    graph = link_graph()
    pairs = torch.unique(graph.edge_index.sort(dim=0).values, dim=1)
    pairs = pairs[:, pairs[0] != pairs[1]]
    role = torch.arange(pairs.shape[1]) % 10
    graph.edge_index = pairs[:, role > 3]
    graph.val_edge_index, graph.test_edge_index = pairs[:, role <= 1], pairs[:, (role > 1) & (role <= 3)].flip(0)
    source = InMemorySource(graph, largest_component=True)
    data = link_data(tmp_path, RandomPartitioner(2), source=source, splitter=GivenSplit())
    check_no_leak(data)
    for client, own in zip(data.clients, data.allocation.source_idx, strict=True):
        linked = client.y_N[:, 0] > 0.5
        for mask, edges in (
            (client.val_mask_N, graph.val_edge_index),
            (client.test_mask_N, graph.test_edge_index),
            (client.train_mask_N, graph.edge_index),
        ):
            mine = {tuple(sorted(each)) for each in own[mask & linked].tolist()}
            assert mine
            assert mine <= {tuple(sorted(each)) for each in edges.t().tolist()}


def test_given_edges_in_both_directions_twice_and_in_other_roles(tmp_path) -> None:
    """Tested edges that are named as training edges, too, and backward, are not trained on."""
    graph = link_graph()
    pairs = torch.unique(graph.edge_index.sort(dim=0).values, dim=1)
    pairs = pairs[:, pairs[0] != pairs[1]]
    role = torch.arange(pairs.shape[1]) % 10
    train, val, test = pairs[:, role > 3], pairs[:, role <= 1], pairs[:, (role > 1) & (role <= 3)]
    graph.edge_index = torch.cat([train, train.flip(0), test[:, :9], val.flip(0)], dim=1)
    graph.val_edge_index = torch.cat([val, val.flip(0), test[:, :3], torch.tensor([[4], [4]])], dim=1)
    graph.test_edge_index = torch.cat([test.flip(0), test, test], dim=1)
    data = link_data(tmp_path, RandomPartitioner(2), source=InMemorySource(graph), splitter=GivenSplit())
    check_no_leak(data)
    for name, edges in (("val", val), ("test", test)):
        masks = [getattr(client, f"{name}_mask_N") & (client.y_N[:, 0] > 0.5) for client in data.clients]
        scored = [
            codes(client.pair_P2[mask], client.graph.node_idx_N)
            for client, mask in zip(data.clients, masks, strict=True)
        ]
        assert all(each and each <= {tuple(pair) for pair in edges.t().tolist()} for each in scored)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"val_edge_index": torch.zeros(7, 2, dtype=torch.int64)}, r"val_edge_index is torch.int64 of shape \(7, 2\)"),
        (
            {"test_edge_index": torch.zeros(2, 7)},
            "test_edge_index is torch.float32 .* numbers of nodes: `data.test",
        ),
        ({"test_edge_index": torch.tensor([[0], [90]])}, r"edge 0 joins nodes \[0, 90\].* correct test_edge_index"),
        ({"val_edge_index": [[0], [1]]}, "val_edge_index is a list; give a tensor"),
        (
            {"edge_weight": torch.ones(link_graph().num_edges)},
            "edge_weight is of edge_index alone: append that of val_edge_index to it",
        ),
    ],
)
def test_wrong_given_edges_are_named(given, message, tmp_path) -> None:
    graph = link_graph().update({"val_edge_index": torch.tensor([[0], [1]]), **given})
    with pytest.raises(ValueError, match=message):
        link_data(tmp_path, source=InMemorySource(graph), splitter=GivenSplit())


@pytest.mark.parametrize(
    ("splitter", "lacking"),
    [
        (ChronologicalSplit(0.7, 0.1), "edge_time"),
        (ScarceSplit(ChronologicalSplit(0.7, 0.1)), "edge_time"),
        (GivenSplit(), "val_edge_index or test_edge_index"),
    ],
)
def test_splits_of_what_the_graph_does_not_say_are_refused(splitter, lacking, tmp_path) -> None:
    """Without times the order of the edges, which is that of their nodes, was taken for that of time."""
    with pytest.raises(ValueError, match=f"data.splitter goes by {lacking} of the graph, which has none: give it one"):
        link_data(tmp_path, splitter=splitter)


@pytest.mark.parametrize("lost", ["edge_time", "edge_type", "test_edge_index"])
def test_what_is_lost_where_graphs_are_joined_is_named(lost, tmp_path) -> None:
    one, two = link_graph(60).update({"y": torch.zeros(60)}), link_graph(90).update({"y": torch.zeros(90)})
    two[lost] = two.edge_index if lost == "test_edge_index" else torch.zeros(two.num_edges, dtype=torch.int64)
    data = FederatedDataModule(Links(ManyGraphs([InMemorySource(one), InMemorySource(two)])), cache_dir=str(tmp_path))
    with pytest.raises(ValueError, match=rf"links of .* have {lost}, which is lost where graphs are joined: leave it"):
        data.setup()


def test_links_without_a_role_are_no_negatives(tmp_path) -> None:
    data = link_data(tmp_path, splitter=ScarceSplit(ClientSplit(0.8, 0.1), clients=1.0, keep=0.4))
    check_no_leak(data)
    unused = [~(c.train_mask_N | c.val_mask_N | c.test_mask_N) for c in data.clients]
    assert all(
        bool(client.y_N[mask].all()) and bool(mask.any()) for client, mask in zip(data.clients, unused, strict=True)
    )


@pytest.mark.parametrize("features", ["structure", "identity"])
def test_features_of_graphs_without(features, tmp_path) -> None:
    data = link_data(tmp_path, features=features)
    x = torch.cat([client.graph.x_NF for client in data.clients])
    if features == "identity":
        nodes = torch.cat([client.graph.node_idx_N for client in data.clients])
        assert torch.equal(x, torch.eye(90)[nodes])
        return
    for client in data.clients:  # of the edges of messages alone
        degree = torch.bincount(client.graph.edge_index_2E[0], minlength=client.graph.num_nodes)
        assert torch.allclose(client.graph.x_NF[:, 1], degree.float().log1p())


def test_edge_weights_stay_with_their_edges(tmp_path) -> None:
    graph = link_graph()
    pairs = torch.unique(graph.edge_index.sort(dim=0).values, dim=1)
    pairs = pairs[:, pairs[0] != pairs[1]]
    weight = 0.5 + torch.arange(pairs.shape[1]).float()
    data = link_data(tmp_path, source=InMemorySource(graph.update({"edge_index": pairs, "edge_weight": weight})))
    known = {tuple(pair): value for pair, value in zip(pairs.t().tolist(), weight.tolist(), strict=True)}
    for client in data.clients:
        ends = client.graph.node_idx_N[client.graph.edge_index_2E.t()].sort(dim=1).values.tolist()
        assert client.graph.edge_weight_E.tolist() == [known[tuple(each)] for each in ends]


def test_pooled_clients_keep_their_pairs(tmp_path) -> None:
    clients = link_data(tmp_path).clients
    pool = type(clients[0]).pooled(clients)
    start = 0
    for client, pairs in zip(clients, torch.split(pool.pair_P2, [each.size for each in clients]), strict=True):
        assert torch.equal(pairs - start, client.pair_P2)
        start += client.graph.num_nodes
    assert pool.graph.num_nodes == start
    assert torch.equal(pool.global_idx_N, torch.cat([each.global_idx_N for each in clients]))


def test_the_graphs_of_the_benchmark(tmp_path) -> None:
    from scipy.io import savemat
    from scipy.sparse import csc_matrix

    graph = link_graph()
    ends = graph.edge_index[:, graph.edge_index[0] != graph.edge_index[1]].unique(dim=1).numpy()
    (tmp_path / "links").mkdir()
    ones = torch.ones(ends.shape[1]).numpy()
    savemat(tmp_path / "links" / "USAir.mat", {"net": csc_matrix((ones, tuple(ends)), shape=(90, 90))})
    check_no_leak(link_data(tmp_path, MetisPartitioner(2), source=SEALSource("USAir"), features="structure"))
    with pytest.raises(FileNotFoundError, match=r"NS.mat is missing: put the file NS.mat"):
        link_data(tmp_path, source=SEALSource("NS"))
    (tmp_path / "links" / "PB.mat").write_text("no matrix")
    with pytest.raises(ValueError, match=r"PB.mat is not a MATLAB file with a sparse matrix 'net'"):
        link_data(tmp_path, source=SEALSource("PB"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": COMMUNITIES, "features": "none"}, "features must be own or structure or identity, got 'none'"),
        ({"source": COMMUNITIES, "negatives": "easy"}, "negatives must be uniform or degree or hard, got 'easy'"),
        ({"source": COMMUNITIES, "candidates": "all"}, "candidates must be own or across, got 'all'"),
        ({"source": COMMUNITIES, "candidates": "across"}, "candidates: across pairs own nodes with those of other"),
        ({"source": COMMUNITIES, "pool_size": 0}, "pool_size must be at least 1, got 0"),
        ({"source": COMMUNITIES, "message_fraction": 0.0}, r"message_fraction must be a number in \(0, 1\], got 0"),
        ({"source": 3}, "Links.source is int: give the source of a graph"),
        ({"source": Links(COMMUNITIES)}, "Links.source is Links: give the source of a graph"),
    ],
)
def test_wrong_settings_are_named(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        Links(**settings)


@pytest.mark.parametrize("several", [False, True])
def test_graphs_that_were_left_directed_are_refused(several, tmp_path) -> None:
    one_way = torch.stack([torch.arange(20), (torch.arange(20) + 1) % 20])

    def pairs_of(edges):
        graph = InMemorySource(Data(x=torch.ones(20, 1), edge_index=edges, y=torch.arange(20) % 2), undirected=False)
        source, partitioner = (ManyGraphs([graph] * 2), GivenPartitioner("graph")) if several else (graph, None)
        return link_data(tmp_path, partitioner or RandomPartitioner(1), source=source, pool_size=5).clients

    with pytest.raises(ValueError, match="some edges go one way only, but Links is for undirected graphs: set"):
        pairs_of(one_way)
    both_ways = pairs_of(torch.cat([one_way, one_way.flip(0)], dim=1))
    assert {int((client.y_N[:, 0] > 0.5).sum()) for client in both_ways} == {20}


def test_features_that_are_made_need_none(tmp_path) -> None:
    graph = link_graph()
    del graph.x
    graph.num_nodes = 90
    data = link_data(tmp_path, source=InMemorySource(graph), features="structure")
    with_others = link_data(tmp_path, source=InMemorySource(link_graph()), features="structure")
    for one, other in zip(data.clients, with_others.clients, strict=True):
        assert torch.equal(one.graph.x_NF, other.graph.x_NF)
    with pytest.raises(ValueError, match="has no x: node features"):
        link_data(tmp_path, source=InMemorySource(graph))


def test_graphs_of_a_client_each_need_no_labels_and_no_features(tmp_path) -> None:
    """Labels that nobody reads, and features that are made, were asked of each of several graphs."""
    graphs, found = [link_graph(60), link_graph(90)], []
    for labels in (True, False):
        for graph in graphs:
            if labels:
                graph.update({"y": torch.zeros(graph.num_nodes)})
            else:
                graph.num_nodes = graph.num_nodes
                del graph.x, graph.y
        source = Links(ManyGraphs([InMemorySource(graph) for graph in graphs]), features="structure", pool_size=20)
        data = FederatedDataModule(source, cache_dir=str(tmp_path))
        data.setup()
        check_no_leak(data)
        found.append([client.graph.x_NF for client in data.clients])
    assert all(map(torch.equal, *found))
    one = [InMemorySource(graph) for graph in graphs]
    with pytest.raises(ValueError, match="has no x: node features, edges and labels"):
        FederatedDataModule(Links(ManyGraphs(one)), cache_dir=str(tmp_path)).setup()
    with pytest.raises(ValueError, match="has no x, y: node features, edges and labels"):
        FederatedDataModule(ManyGraphs(one), cache_dir=str(tmp_path)).setup()
    graphs[1].x = torch.ones(90, 1)
    with pytest.raises(ValueError, match=r"^graph 0 has no x, but graph 1 has: add it"):
        FederatedDataModule(source, cache_dir=str(tmp_path)).setup()


def test_wrong_data_are_named(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"SEALSource.name is 'Cora': give one of USAir, NS"):
        SEALSource("Cora")
    with pytest.raises(ValueError, match=r"message_fraction=0.001 leaves client \d with \d+ links to send"):
        link_data(tmp_path, message_fraction=0.001)
    graph = link_graph()
    graph.edge_time = torch.ones(3)
    with pytest.raises(ValueError, match=r"edge_time has shape \(3,\); give a finite number for each of"):
        link_data(tmp_path, source=InMemorySource(graph))
    complete = torch.tensor(list(itertools.combinations(range(8), 2))).t()
    source = InMemorySource(Data(x=torch.ones(8, 1), edge_index=complete))
    with pytest.raises(ValueError, match="client 0 has 8 nodes and 28 links, which leaves no pair"):
        link_data(tmp_path, RandomPartitioner(1), source=source, splitter=ClientSplit(0.5, 0.2))
    with pytest.raises(ValueError, match=r"clients \[.*\] have no link: use fewer and larger clients"):
        link_data(tmp_path, RandomPartitioner(45))
    graph = link_graph()
    graph.edge_type = torch.ones(graph.num_edges)
    with pytest.raises(ValueError, match=r"edge_type is torch.float32 of shape \(\d+,\); give the number of"):
        link_data(tmp_path, source=InMemorySource(graph))
    graph = Data(x=torch.ones(9, 1), edge_index=torch.tensor([[0, 1, 2], [1, 0, 3]]), edge_type=torch.tensor([4, 2, 0]))
    with pytest.raises(ValueError, match="nodes 0 and 1 have edges of the types 2 and 4, but a pair of nodes has one"):
        link_data(tmp_path, RandomPartitioner(1), source=InMemorySource(graph))
    graph = relational_graph()
    graph.edge_type *= 4
    with pytest.warns(UserWarning, match="edge_type goes up to 4, but 3 of the 5 relations occur in no edge"):
        link_data(tmp_path, source=InMemorySource(graph))
    across = {"candidates": "across", "features": "identity", "source": COMMUNITIES}
    with pytest.raises(ValueError, match=r"candidates: across is for disjoint clients, but node \d+ is at"):
        link_data(tmp_path, OverlappingMetisPartitioner(2, 2, 0.9), **across)
    with pytest.raises(ValueError, match=r"ClientSplit splits inside each client, and these clients overlap"):
        link_data(tmp_path, RandomPartitioner(3), splitter=ClientSplit(0.8, 0.1), **across)
    numbers = InMemorySource(link_graph().update({"y": torch.rand(90, 2)}))
    with pytest.raises(ValueError, match="DirichletPartitioner shares nodes out by their classes, but these have"):
        link_data(tmp_path, DirichletPartitioner(3), source=numbers)
