"""Sets of graphs: read from files and memory, cut into clients, and several sets as clients."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data

from fl_lightning.data import (
    ClientSplit,
    DirichletPartitioner,
    FederatedDataModule,
    GivenPartitioner,
    GraphSetFile,
    GraphSets,
    GraphSetSource,
    InMemoryGraphSet,
    LoadedGraphs,
    ManyGraphSets,
    MetisPartitioner,
    PyGGraphSet,
    RandomPartitioner,
    SortedPartitioner,
    StratifiedSplit,
    TUSource,
)


def path_of(size: int, y: Any, **attributes: Any) -> Data:
    """A path of some nodes, each edge once, with the number of each node as its feature."""
    nodes = torch.arange(size)
    x = {} if attributes.pop("bare", False) else {"x": nodes[:, None].float()}
    return Data(**x, edge_index=torch.stack([nodes[:-1], nodes[1:]]), y=torch.tensor([y]), num_nodes=size, **attributes)


def paths(count: int = 40, classes: int = 2) -> list[Data]:
    """Paths of 2 nodes and more; class 0 are the shorter ones."""
    return [path_of(2 + index, index * classes // count) for index in range(count)]


def module(source: Any, folder: Path, *parts: Any, **settings: Any) -> FederatedDataModule:
    data = FederatedDataModule(source, *parts, cache_dir=str(folder / "cache"), root=str(folder), **settings)
    data.setup()
    return data


class Shops(GraphSetSource):
    """Paths with a table of where they are from."""

    def load(self, root: Path, cache_dir: Path | None = None) -> LoadedGraphs:
        shops = ["south", "north", ""]
        return LoadedGraphs(
            graphs=paths(30),
            columns={
                "shop": [shops[index % 3] for index in range(30)],
                "price": [float(-index) for index in range(30)],
            },
            names=tuple(f"path {index}" for index in range(30)),
        )


TWO_GRAPHS = {
    # a triangle with a double edge and a loop, and an edge with a node alone
    "A": "1, 2\n2, 1\n2, 3\n3, 2\n3, 1\n1, 3\n1, 2\n1, 1\n4, 5\n5, 4\n",
    "graph_indicator": "1\n1\n1\n2\n2\n2\n",
    "graph_labels": "1\n-1\n",
    "node_labels": "3\n3\n5\n5\n3\n5\n",
    "node_attributes": "0.5, 1\n1.5, 2\n2.5, 3\n3.5, 4\n4.5, 5\n5.5, 6\n",
}


@pytest.fixture
def tu_root(tmp_path: Path) -> Path:
    raw = tmp_path / "TU" / "TWO" / "raw"
    raw.mkdir(parents=True)
    for name, text in TWO_GRAPHS.items():
        (raw / f"TWO_{name}.txt").write_text(text)
    return tmp_path


def test_a_set_of_the_tu_collection_by_hand(tu_root: Path) -> None:
    prepared = TUSource("TWO").read(tu_root, tu_root / "cache")
    assert prepared.num_nodes_G.tolist() == [3, 3]
    assert prepared.y.flatten().tolist() == [1, 0]  # PyG numbers labels in ascending order
    assert prepared.union.x.tolist() == [  # attributes, then a place for each label from 3 to 5
        [0.5, 1, 1, 0, 0],
        [1.5, 2, 1, 0, 0],
        [2.5, 3, 0, 0, 1],
        [3.5, 4, 0, 0, 1],
        [4.5, 5, 1, 0, 0],
        [5.5, 6, 0, 0, 1],
    ]
    expected = [[0, 0, 1, 1, 2, 2, 3, 4], [1, 2, 0, 2, 0, 1, 4, 3]]
    assert prepared.union.edge_index.tolist() == expected
    assert prepared.num_edges_G.tolist() == [6, 2]
    labels = TUSource("TWO", use_node_attr=False).read(tu_root, tu_root / "cache")
    assert torch.equal(labels.union.x, prepared.union.x[:, 2:])


def test_without_labels_the_degree_is_the_feature(tu_root: Path) -> None:
    raw = tu_root / "TU" / "TWO" / "raw"
    for name in ("node_labels", "node_attributes"):
        (raw / f"TWO_{name}.txt").unlink()
    degrees = [2, 2, 2, 1, 1, 0]
    by_degree = TUSource("TWO").read(tu_root, None).union.x
    assert by_degree.tolist() == torch.eye(3)[degrees].tolist()
    capped = TUSource("TWO", max_degree=1).read(tu_root, None).union.x
    assert capped.tolist() == torch.eye(2)[[1, 1, 1, 1, 1, 0]].tolist()


@pytest.mark.parametrize("edge", [("1, 2\n2, 1\n", [2, 0]), ("5, 4\n4, 5\n", [0, 2])])
def test_graphs_without_edges_stay(edge: tuple[str, list[int]], tu_root: Path) -> None:
    """Wherever they are: PyG's reader overlooks the last ones."""
    (tu_root / "TU" / "TWO" / "raw" / "TWO_A.txt").write_text(edge[0])
    prepared = TUSource("TWO").read(tu_root, tu_root / "cache")
    assert prepared.num_nodes_G.tolist() == [3, 3]
    assert prepared.num_edges_G.tolist() == edge[1]


def test_what_pyg_has_beside_the_tu_folder_is_read_too(tu_root: Path) -> None:
    (tu_root / "TU" / "TWO").rename(tu_root / "TWO")
    other = PyGGraphSet("torch_geometric.datasets.TUDataset", {"name": "TWO", "use_node_attr": True})
    for source in (TUSource("TWO"), other):
        assert source.read(tu_root, None).union.x.shape == (6, 5)


def test_the_hash_depends_on_every_setting(tu_root: Path) -> None:
    kinds = [{}, {"use_node_attr": False}, {"undirected": False}, {"max_degree": 4}]
    split = ClientSplit(0.5, 0.0)
    with pytest.warns(UserWarning, match="without a val example"):
        parts = [module(TUSource("TWO", **each), tu_root, RandomPartitioner(1), split) for each in kinds]
    hashes = {each.partition_hash for each in parts}
    assert len(hashes) == 4
    hashes = set()
    for parts in ((RandomPartitioner(2),), (RandomPartitioner(4),), (RandomPartitioner(2, seed=1),)):
        hashes.add(module(InMemoryGraphSet(paths()), tu_root, *parts).partition_hash)
    hashes.add(module(InMemoryGraphSet(paths()), tu_root, RandomPartitioner(2), seed=3).partition_hash)
    hashes.add(module(InMemoryGraphSet(paths()), tu_root, RandomPartitioner(2), ClientSplit()).partition_hash)
    hashes.add(module(InMemoryGraphSet(paths(39)), tu_root, RandomPartitioner(2)).partition_hash)
    assert len(hashes) == 6


def test_a_set_is_shared_out_at_random(tmp_path: Path) -> None:
    torch.save(paths(), tmp_path / "paths.pt")
    for source in (InMemoryGraphSet(paths()), GraphSetFile(str(tmp_path / "paths.pt"))):
        data = module(source, tmp_path, RandomPartitioner(4))
        assert [client.size for client in data.clients] == [10] * 4
        assert torch.cat([data.source_idx_N(client) for client in range(4)]).sort().values.tolist() == list(range(40))
        for client in range(4):
            held, index = data.clients[client], data.source_idx_N(client)
            assert torch.equal(held.num_nodes_G, 2 + index)
            assert torch.equal(held.y_N, index // 20)
            assert held.union.num_edges == 2 * int((1 + index).sum())
            assert torch.equal(held.union.x_NF[:, 0], torch.cat([torch.arange(2 + i) for i in index.tolist()]).float())
            source_E, target_E = held.union.edge_index_2E
            assert (source_E - target_E).abs().tolist() == [1] * held.union.num_edges
        assert (data.num_outputs, str(data.task), data.num_features) == (2, "GraphClassification", 1)


def test_clients_whose_graphs_are_alike(tmp_path: Path) -> None:
    for by in ("size", "degree", "features"):  # longer paths have more of each
        data = module(InMemoryGraphSet(paths()), tmp_path, SortedPartitioner(4, by=by))
        assert [data.source_idx_N(client).tolist() for client in range(4)] == [
            list(range(start, start + 10)) for start in (0, 10, 20, 30)
        ]
    sparse = module(InMemoryGraphSet(paths()), tmp_path, SortedPartitioner(4, by="density"))
    assert sparse.source_idx_N(0).tolist() == list(range(30, 40))
    by_price = module(Shops(), tmp_path, SortedPartitioner(3, by="price"))
    assert by_price.source_idx_N(0).tolist() == list(range(20, 30))
    tied, orders = InMemoryGraphSet([path_of(3, index % 2) for index in range(20)]), []
    for seed in (0, 0, 1):
        with pytest.warns(UserWarning, match="by='size': all graphs of the set have 3, so that clients are alike"):
            orders.append(module(tied, tmp_path, SortedPartitioner(2, "size", seed)).source_idx_N(0).tolist())
    assert orders[0] == orders[1] != orders[2]
    with pytest.raises(ValueError, match=r"by='weight' is not a number of each example, as degree, density, features"):
        module(InMemoryGraphSet(paths()), tmp_path, SortedPartitioner(2, by="weight"))


def test_a_graph_is_sorted_by_an_attribute_of_its_nodes(tmp_path: Path) -> None:
    graph = path_of(12, 0)
    graph.y, graph.age = torch.arange(12) % 2, torch.arange(12).flip(0)
    data = module(graph, tmp_path, SortedPartitioner(3, by="age"), ClientSplit(0.5, 0.25))
    assert data.clients[0].node_idx_N.tolist() == [8, 9, 10, 11]


def test_labels_are_skewed(tmp_path: Path) -> None:
    graphs = paths(120, classes=3)
    skewed = module(InMemoryGraphSet(graphs), tmp_path, DirichletPartitioner(4, alpha=0.1)).statistics()
    even = module(InMemoryGraphSet(graphs), tmp_path, DirichletPartitioner(4, alpha=100.0)).statistics()
    assert skewed.heterogeneity > 0.4 > 0.15 > even.heterogeneity
    numbers = [path_of(3, index + 0.5) for index in range(20)]
    with pytest.raises(ValueError, match="shares graphs out by their classes, but these have numbers"):
        module(InMemoryGraphSet(numbers), tmp_path, DirichletPartitioner(2))


def test_values_of_a_column_are_clients(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"attribute='shop' is -1 at node 2"):
        module(Shops(), tmp_path, GivenPartitioner("shop"))
    data = module(Shops(), tmp_path, GivenPartitioner("shop", leave_out_negative=True))
    assert [client.name for client in data.clients] == ["north", "south"]
    assert data.source_idx_N(0).tolist() == list(range(1, 30, 3))
    assert data.user_names(1).names == tuple(f"path {index}" for index in range(0, 30, 3))


def test_a_stratified_split_keeps_the_shares_of_classes(tmp_path: Path) -> None:
    graphs = [path_of(3, int(index < 30)) for index in range(40)]
    data = module(InMemoryGraphSet(graphs), tmp_path, RandomPartitioner(1), StratifiedSplit())
    [client] = data.clients
    for mask, ones, zeros in ((client.train_mask_N, 24, 8), (client.val_mask_N, 3, 1), (client.test_mask_N, 3, 1)):
        assert torch.bincount(client.y_N[mask]).tolist() == [zeros, ones]
    other = module(InMemoryGraphSet(graphs), tmp_path, RandomPartitioner(1), StratifiedSplit(), seed=1).clients[0]
    assert not torch.equal(other.train_mask_N, client.train_mask_N)


def test_sets_with_features_and_classes_of_their_own(tmp_path: Path) -> None:
    wide = [Data(**{**graph.to_dict(), "x": graph.x.repeat(1, 3)}) for graph in paths(20)]
    many = module([InMemoryGraphSet(paths(12, classes=3)), InMemoryGraphSet(wide)], tmp_path)
    assert isinstance(many.source, ManyGraphSets)
    assert (many.num_features, many.num_outputs) == (3, 3)
    assert (many.registry.own_inputs, many.registry.own_outputs) == (True, (3, 2))
    assert [client.num_outputs for client in many.clients] == [3, 2]
    assert not many.clients[0].union.x_NF[:, 1:].any()
    assert torch.equal(many.clients[1].union.x_NF[:, :1].expand(-1, 3), many.clients[1].union.x_NF)
    alike = module([InMemoryGraphSet(paths(12, classes=3)), InMemoryGraphSet(paths())], tmp_path)
    assert (alike.registry.own_inputs, alike.registry.own_outputs) == (False, ())
    forced = module(GraphSets([paths(12), paths()], own_outputs=True), tmp_path)
    assert forced.registry.own_outputs == (2, 2)
    shared = ManyGraphSets([InMemoryGraphSet(paths(12)), InMemoryGraphSet(wide)], own_outputs=False)
    assert module(shared, tmp_path).registry.own_outputs == ()


def test_a_degree_is_the_same_feature_for_all_clients(tmp_path: Path) -> None:
    ends = torch.arange(1, 7)

    def stars(size: int) -> list[Data]:
        edges = torch.stack([torch.zeros(size, dtype=torch.int64), ends[:size]])
        return [Data(edge_index=edges, num_nodes=size + 1, y=torch.tensor([index % 2])) for index in range(10)]

    data = module([stars(2), stars(4)], tmp_path)
    assert (data.registry.own_inputs, data.registry.own_outputs, data.num_features) == (False, (), 5)
    assert data.clients[0].union.x_NF[:3].argmax(dim=1).tolist() == [2, 1, 1]
    bounded = module(GraphSets([stars(2), stars(4)], max_degree=3), tmp_path)
    assert (bounded.num_features, bounded.clients[1].union.x_NF[0].argmax()) == (4, 3)


def test_positions_that_are_not_read_are_told(tmp_path: Path) -> None:
    atoms = [path_of(3, index % 2, bare=True, z=torch.arange(3), pos=torch.rand(3, 3)) for index in range(12)]
    with pytest.warns(UserWarning, match=r"features are its degree, one-hot, and z and pos are not used; .*data\.pos"):
        data = module(InMemoryGraphSet(atoms), tmp_path, RandomPartitioner(2))
    assert data.num_features == 3


def test_missing_labels_and_numbers_are_gaps(tmp_path: Path) -> None:
    one = [path_of(3, [index + 0.5]) for index in range(10)]
    two = [path_of(3, [index + 0.5, 1.5]) for index in range(10)]
    data = module(GraphSets([one, two]), tmp_path)
    assert data.num_outputs == 2
    assert data.clients[0].y_N[:, 1].isnan().all()
    assert data.registry.own_outputs == (1, 2)
    assert [client.num_outputs for client in data.clients] == [None, None]
    with pytest.raises(ValueError, match=r"own_outputs is false, but the clients have \[1, 2\] numbers"):
        module(GraphSets([one, two], own_outputs=False), tmp_path)


def test_names_of_classes_that_all_clients_share_are_kept(tmp_path: Path) -> None:
    sets = [InMemoryGraphSet(paths(12)), InMemoryGraphSet(paths(12))]
    sets[0].class_names = sets[1].class_names = ("no", "yes")
    assert module(ManyGraphSets(sets), tmp_path).class_names == ("no", "yes")
    assert module(ManyGraphSets(sets, own_outputs=True), tmp_path).class_names is None
    sets[1].class_names = ("yes", "no")
    assert module(ManyGraphSets(sets), tmp_path).class_names is None


@pytest.mark.parametrize(
    ("row", "remedy"), [(lambda index: [index % 2, 1 - index % 2], "one-hot"), (lambda index: [3, index], "as floats")]
)
@pytest.mark.parametrize("several", [False, True])
def test_a_matrix_of_whole_numbers_is_refused_unless_the_graphs_say_what_it_is(
    row: Any, remedy: str, several: bool, tmp_path: Path
) -> None:
    graphs = [path_of(4, row(index)) for index in range(12)]

    def tried() -> FederatedDataModule:
        if several:
            return module([graphs[:6], graphs[6:]], tmp_path)
        return module(InMemoryGraphSet(graphs), tmp_path, RandomPartitioner(2))

    with pytest.raises(ValueError, match=rf"the targets y are torch.int64 of shape .*{remedy}"):
        tried()
    for graph in graphs:
        graph.task = "numbers"
    assert str(tried().task) == "GraphRegression"
    graphs[3].task = "classes"
    with pytest.raises(ValueError, match="graph 3: task is 'classes', that of the first 'numbers'; it says what y"):
        tried()


def test_more_classes_than_graphs_are_refused(tmp_path: Path) -> None:
    graphs = [path_of(3 + index, index % 2) for index in range(9)]
    graphs.append(path_of(4, 255))
    message = "the label of graph 9 is 255, which makes 256 classes of 10 labeled graphs"
    for source in (InMemoryGraphSet(graphs), GraphSets([graphs[:3], graphs[3:]])):
        with pytest.raises(ValueError, match=message):
            module(source, tmp_path, *([RandomPartitioner(2)] if isinstance(source, InMemoryGraphSet) else []))
    with pytest.raises(ValueError, match="client-01: the label of graph 6 is 255, which makes 256 classes of 7"):
        module(GraphSets([graphs[:3], graphs[3:]], own_outputs=True), tmp_path)
    named = InMemoryGraphSet(graphs)
    named.class_names = tuple(map(str, range(256)))
    assert module(named, tmp_path, RandomPartitioner(2)).num_outputs == 256


def test_sets_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    numbers = [path_of(3, [index + 0.5, 0.1]) for index in range(10)]
    with pytest.raises(ValueError, match="the targets of client-01 are numbers, those of client-00 classes"):
        module(GraphSets([paths(), numbers]), tmp_path)
    with pytest.raises(ValueError, match=r"sources holds 3, which is not a set of graphs"):
        ManyGraphSets([3])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="give each of the 1 clients its own"):
        ManyGraphSets([InMemoryGraphSet(paths())], names=["a", "b"])


def numbered(num_nodes: Any, *, bare: bool = False) -> Data:
    """A path of three nodes that says to have another number of them."""
    graph = path_of(3, 1, bare=bare)
    graph.num_nodes = num_nodes
    return graph


def of_nodes(size: int) -> Data:
    """A path whose nodes have the targets."""
    graph = path_of(size, 0)
    graph.y = torch.arange(size) % 2
    return graph


def test_targets_that_may_be_of_nodes_are_warned_about(tmp_path: Path) -> None:
    """Graphs of one size were given several labels each, without a word."""
    graphs = [of_nodes(4) for _ in range(20)]
    with pytest.warns(UserWarning, match=r"if they are of its nodes, join each client's graphs.*Batch\.from_data_list"):
        module(InMemoryGraphSet(graphs), tmp_path, RandomPartitioner(2))
    for graph in graphs:
        graph.task = "labels"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(InMemoryGraphSet(graphs), tmp_path, RandomPartitioner(2))
        module(InMemoryGraphSet([path_of(4, [0, 1, 0, 1]) for _ in range(20)]), tmp_path, RandomPartitioner(2))


@pytest.mark.parametrize(
    ("graphs", "message"),
    [
        ([], "InMemoryGraphSet has no graphs"),
        ([path_of(3, 0), 7], "graph 1 is a int"),
        ([path_of(3, 0), Data(x=torch.ones(2, 1), y=torch.tensor([1]))], "graph 1 has no edge_index"),
        ([path_of(3, 0), path_of(3, 1, bare=True)], "graph 1 has no x, but graph 0 has"),
        ([path_of(3, 0, bare=True), path_of(3, 1)], "graph 0 has no x, but graph 1 has"),
        ([path_of(3, 0), path_of(3, [1, 0])], "graph 1 has 2 targets, the first 1"),
        (
            [of_nodes(3), of_nodes(4)],
            "graph 1 has 4 targets, the first 3: .*; if y is of the nodes, join each",
        ),
        ([path_of(3, 0), path_of(0, 1)], "graph 1 has no nodes"),
        ([path_of(3, 0), numbered(-1)], "graph 1: x has 3 rows for -1 nodes"),
        ([path_of(3, 0), numbered("3")], "graph 1: num_nodes is a str; leave it out"),
        ([path_of(3, 0, bare=True), numbered(-1, bare=True)], "graph 1: num_nodes is -1"),
        (
            [path_of(3, 0), Data(x=torch.ones(3, 1), edge_index=torch.tensor([[0], [3]]), y=torch.tensor([1]))],
            r"graph 1: edge 0 joins nodes \[0, 3\]",
        ),
        (
            [path_of(3, 0), Data(x=torch.full((3, 1), torch.nan), edge_index=torch.ones(2, 0).long(), y=torch.ones(1))],
            "graph 1: feature 0 of node 0 is nan",
        ),
        ([path_of(3, -1), path_of(3, -1)], "no graph has a label"),
    ],
)
def test_what_is_wrong_with_a_graph_is_said(graphs: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        module(InMemoryGraphSet(graphs), tmp_path, RandomPartitioner(1))


def test_partitioners_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    source = InMemoryGraphSet(paths())
    with pytest.raises(ValueError, match=r"MetisPartitioner, which cuts one graph along its edges"):
        FederatedDataModule(source, MetisPartitioner(2))
    with pytest.raises(ValueError, match=r"data.partitioner is missing: InMemoryGraphSet is one set of graphs"):
        FederatedDataModule(source)
    with pytest.raises(ValueError, match="num_clients=50 exceeds the 40 graphs of the set"):
        module(source, tmp_path, RandomPartitioner(50))


def test_files_that_hold_no_set_are_refused(tmp_path: Path) -> None:
    torch.save(path_of(3, 0), tmp_path / "one.pt")
    with pytest.raises(ValueError, match=r"it holds a Data"):
        module(GraphSetFile(str(tmp_path / "one.pt")), tmp_path, RandomPartitioner(1))
    with pytest.raises(FileNotFoundError, match=r"is not a file. Write one with `torch.save"):
        module(GraphSetFile(str(tmp_path / "none.pt")), tmp_path, RandomPartitioner(1))


@pytest.mark.full
def test_seven_real_sets_are_clients(require_dataset: Any, tmp_path: Path) -> None:
    root = require_dataset("TU")
    names = ["MUTAG", "BZR", "PTC_MR"]
    source = ManyGraphSets([TUSource(name, use_node_attr=False) for name in names], names)
    data = FederatedDataModule(source, splitter=StratifiedSplit(), root=str(root), cache_dir=str(tmp_path))
    data.setup()
    assert [(c.name, c.size) for c in data.clients] == [("MUTAG", 188), ("BZR", 405), ("PTC_MR", 344)]
    assert data.num_features == 53
    assert [int(c.union.x_NF.any(dim=0).sum()) for c in data.clients] == [7, 10, 18]  # of 7, 53, 18
    assert data.registry.own_outputs == (2, 2, 2)
