"""Labels by the names of their classes, labels that mean none, and graphs of a list that differ."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data

from fl_lightning.data import (
    FederatedDataModule,
    FileSource,
    GivenPartitioner,
    GivenSplit,
    GlobalSplit,
    InMemorySource,
    ManyGraphs,
    MetisPartitioner,
    PlantedCommunities,
    RandomPartitioner,
    TwitchSource,
)
from fl_lightning.data.partition.record import hash_graph

pytestmark = pytest.mark.filterwarnings("ignore:.*without a (val|test) example")
NAMES = ["healthy", "ill", "dead"]


def graph(num_nodes: int = 24, **attributes: Any) -> Data:
    nodes = torch.arange(num_nodes)
    x = torch.rand(num_nodes, 3, generator=torch.Generator().manual_seed(num_nodes))
    return Data(**{"x": x, "y": nodes % 3, "edge_index": torch.stack([nodes, (nodes + 1) % num_nodes]), **attributes})


def ward(names: list[str], num_nodes: int = 24) -> Data:
    """A graph whose node n is in state n % 3 of NAMES, numbered by a list of its own."""
    return graph(num_nodes, y=torch.tensor([names.index(NAMES[n % 3]) for n in range(num_nodes)]), class_names=names)


def module(source: Any, folder: Path, *parts: Any) -> FederatedDataModule:
    data = FederatedDataModule(source, *parts, cache_dir=str(folder), root=str(folder))
    data.setup()
    return data


# ------------------------------------------------------------------ classes by name


def saved(graphs: list[Data], path: Path) -> FileSource:
    torch.save(graphs, path)
    return FileSource(str(path))


@pytest.mark.parametrize("in_file", [False, True])
def test_classes_of_a_list_are_reported_by_their_names(in_file: bool, tmp_path: Path) -> None:
    graphs = [ward(NAMES), ward(["dead", "healthy", "ill"]), ward([*reversed(NAMES)], 21)]
    data = module(saved(graphs, tmp_path / "all.pt") if in_file else graphs, tmp_path)
    for client in data.clients:
        assert torch.equal(client.y_N, torch.arange(client.num_nodes) % 3)
    assert data.class_names == tuple(NAMES)
    assert data.num_outputs == 3


def test_new_classes_are_appended_and_unlabeled_nodes_stay_so(tmp_path: Path) -> None:
    first = graph(12, y=torch.arange(12) % 2, class_names=["b", "a"])
    second = graph(12, y=torch.tensor([0, 1, 2, -1] * 3), class_names=["c", "a", "d"])
    data = module([first, second], tmp_path)
    assert data.class_names == ("b", "a", "c", "d")
    assert data.clients[0].y_N.tolist() == [0, 1] * 6
    assert data.clients[1].y_N.tolist() == [2, 1, 3, -1] * 3
    assert data.num_outputs == 4


def test_the_same_names_change_nothing(tmp_path: Path) -> None:
    named, plain = ([ward(NAMES), ward(NAMES, 21)], [graph(24), graph(21)])
    actual = [ManyGraphs([InMemorySource(each) for each in graphs]).load(tmp_path) for graphs in (named, plain)]
    assert hash_graph(actual[0]) == hash_graph(actual[1])


def test_names_that_some_graphs_lack_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^graph 1 has no class_names, but other .* Give each graph a list"):
        module([ward(NAMES), graph()], tmp_path)
    with pytest.raises(ValueError, match=r"all\.pt'\), graph 0 has no class_names"):
        module(saved([graph(), ward(NAMES)], tmp_path / "all.pt"), tmp_path)
    with pytest.raises(ValueError, match=r"graph 1: class_names has 'ill' more than once"):
        module([ward(NAMES), graph(class_names=["ill", "dead", "ill"])], tmp_path)
    with pytest.raises(ValueError, match=r"graph 1: class_names must be a list with a string for each of the 3"):
        module([ward(NAMES), graph(class_names=NAMES[:2])], tmp_path)


def test_a_source_may_know_the_names(tmp_path: Path) -> None:
    known, own = InMemorySource(graph()), InMemorySource(ward([*reversed(NAMES)]))
    known.class_names = tuple(NAMES)
    data = module(ManyGraphs([known, own]), tmp_path)
    assert data.class_names == tuple(NAMES)
    assert torch.equal(data.clients[1].y_N, torch.arange(24) % 3)


def test_nodes_of_a_list_keep_their_names(tmp_path: Path) -> None:
    graphs = [graph(6), graph(9, node_names=[f"b{n}" for n in range(9)])]
    data = module(graphs, tmp_path, None, GlobalSplit(0.5, 0.2))
    assert data.user_names(0).names == ("",) * 6
    assert data.user_names(1).names == tuple(graphs[1].node_names)
    assert data.user_names(1).number_N.tolist() == list(range(9))


# ------------------------------------------------------------------ labels that mean none


def test_255_in_uint8_is_asked_about(tmp_path: Path) -> None:
    y = torch.tensor([0, 1, 2, 255] * 6, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"node 3 is 255 in uint8.*Set ignore_label .* to 255 if it does, to -1 if"):
        module(graph(y=y), tmp_path, RandomPartitioner(2))
    data = module(InMemorySource(graph(y=y), ignore_label=255), tmp_path, RandomPartitioner(2), GlobalSplit(0.5, 0.2))
    assert data.num_outputs == 3
    assert sum(int((client.y_N < 0).sum()) for client in data.clients) == 6
    many = graph(600, y=(torch.arange(600) % 256).to(torch.uint8))
    assert module(InMemorySource(many, ignore_label=-1), tmp_path, RandomPartitioner(2)).num_outputs == 256


def test_any_label_may_mean_none(tmp_path: Path) -> None:
    y = torch.tensor([0, 1, 99, -1] * 6)
    source = saved([graph(y=y), graph(y=y)], tmp_path / "all.pt")
    ignoring = FileSource(str(source.paths[0]), ignore_label=99)
    data = module(ignoring, tmp_path)
    assert data.num_outputs == 2
    assert data.clients[0].y_N.tolist() == [0, 1, -1, -1] * 6
    with pytest.raises(ValueError, match=r"which makes 100 classes of 36 labeled nodes\. Set ignore_label"):
        module(source, tmp_path)
    with pytest.raises(ValueError, match=r"no node has a label"):
        module(InMemorySource(graph(y=torch.full((24,), 99)), ignore_label=99), tmp_path, RandomPartitioner(2))
    with pytest.raises(ValueError, match=r"ignore_label must be a whole number, got 'none'"):
        InMemorySource(graph(), ignore_label="none")  # type: ignore[arg-type]


def test_partitions_keep_their_keys_where_no_label_is_ignored() -> None:
    source = PlantedCommunities()
    assert source.preparation.identity().keys() == {"normalize_features", "largest_component", "undirected"}
    assert InMemorySource(graph(), ignore_label=-1).preparation.identity()["ignore_label"] == -1
    assert GivenPartitioner().identity().keys() == {"partitioner", "attribute"}


def test_more_classes_than_labeled_nodes_are_asked_about(tmp_path: Path) -> None:
    y = torch.arange(24) % 3
    y[5] = 99
    message = r"node 5 is 99, which makes 100 classes of 24 labeled nodes\. Set ignore_label .*data\.class_names"
    with pytest.raises(ValueError, match=message):
        module(graph(y=y), tmp_path, RandomPartitioner(2))
    names = [f"species {k}" for k in range(100)]
    assert module(graph(y=y, class_names=names), tmp_path, RandomPartitioner(2)).num_outputs == 100
    few = graph(3, y=torch.tensor([7, -1, -1]))  # one of several clients may have few
    assert module([few, graph(y=torch.arange(24) % 8)], tmp_path, None, GlobalSplit(1.0, 0.0)).num_outputs == 8


def test_nan_means_no_label_beside_names_too(tmp_path: Path) -> None:
    y = torch.where(torch.arange(24) % 4 == 0, torch.nan, (torch.arange(24) % 3).float())
    data = module(graph(y=y, class_names=NAMES), tmp_path, RandomPartitioner(2))
    assert data.class_names == tuple(NAMES)
    assert sum(int((client.y_N < 0).sum()) for client in data.clients) == 6


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (
            torch.tensor([1]),
            r"of shape \(1,\) for 24 nodes.*A label of the whole graph is not supported here: give each node",
        ),
        (torch.tensor([[1, 0, 1]]), r"A label of the whole graph is not supported.*InMemoryGraphSet\(graphs\)"),
        (torch.tensor(1), r"A label of the whole graph is not supported"),
        (torch.zeros(23), r"Give a label for each node, in the order of x"),
        (
            torch.eye(3)[torch.arange(24) % 3],
            r"Convert one-hot labels by `data\.y = data\.y\.argmax\(dim=1\)`",
        ),
        (torch.full((24, 3), 2), r"Give numbers as floats, `data\.y = data\.y\.float\(\)`, or one column of classes"),
        (torch.full((24, 3), torch.inf), r"or finite numbers"),
        (torch.full((24, 2), torch.nan), r"no node has a target; nan means missing"),
        (["ill", "healthy"] * 12, r"the labels y are strings such as 'ill'; number them: .*data\.class_names = names"),
        ([0, 1] * 12, r"y is a list; give a tensor: `data\.y = torch\.as_tensor"),
        (None, r"has no y: node features, edges and labels are needed"),
    ],
)
def test_labels_that_do_not_fit_have_a_remedy_that_does(y: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        module(graph(y=y), tmp_path, RandomPartitioner(2))
    with pytest.raises(ValueError, match=r"^graph 1(: | has no y)"):  # of a list it is said which graph
        module([graph(), graph(y=y), graph()], tmp_path)


def test_the_remedies_work(tmp_path: Path) -> None:
    labels = ["ill", "healthy", "dead"] * 8
    data = graph()
    names = sorted(set(labels))
    data.y = torch.tensor([names.index(label) for label in labels])
    data.class_names = names
    assert module(data, tmp_path, RandomPartitioner(2)).class_names == ("dead", "healthy", "ill")


# ------------------------------------------------------------------ graphs of a list that differ


def test_a_graph_of_a_list_may_lack_edges(tmp_path: Path) -> None:
    none = torch.empty(2, 0, dtype=torch.int64)
    data = module([graph(), graph(edge_index=none)], tmp_path)
    assert [client.num_edges for client in data.clients] == [48, 0]
    with pytest.raises(ValueError, match="ManyGraphs has no edges"):
        module([graph(edge_index=none)] * 2, tmp_path)


def test_attributes_of_different_shapes_are_left_out_with_a_word(tmp_path: Path) -> None:
    mask = torch.arange(24) % 2 == 0
    graphs = [
        graph(train_mask=mask, age=torch.rand(24)),
        graph(train_mask=torch.ones(24, 10).bool(), age=torch.rand(24)),
    ]
    with pytest.warns(UserWarning, match=r"graph 1: train_mask is torch.bool of shape \(24, 10\), that of graph 0"):
        data = module(graphs, tmp_path)
    assert [client.num_nodes for client in data.clients] == [24, 24]
    with pytest.warns(UserWarning, match="left out of all graphs"):
        assert data.node_attribute("age").shape == (48,)
    given = FederatedDataModule(graphs, None, GivenSplit(), cache_dir=str(tmp_path))
    with (
        pytest.warns(UserWarning, match="left out of all graphs"),
        pytest.raises(ValueError, match="GivenSplit needs the graph's train_mask"),
    ):
        given.setup()


def test_the_largest_component_is_that_of_each_graph(tmp_path: Path) -> None:
    whole = graph()
    ring = torch.arange(12)
    torn = graph(15, edge_index=torch.stack([ring, (ring + 1) % 12]))  # three nodes are alone
    torch.save([whole, torn], tmp_path / "all.pt")
    with pytest.warns(UserWarning, match="graph 1: largest_component drops 3 of 15 nodes"):
        data = module(FileSource(str(tmp_path / "all.pt"), largest_component=True), tmp_path)
    assert [client.num_nodes for client in data.clients] == [24, 12]


def test_graphs_of_a_list_stay_directed_where_their_sources_say_so(tmp_path: Path) -> None:
    data = module([InMemorySource(graph(), undirected=False), InMemorySource(graph())], tmp_path)
    assert [client.num_edges for client in data.clients] == [24, 48]
    assert TwitchSource(undirected=False).sources[0].preparation.undirected is False


# ------------------------------------------------------------------ partitions and splits


def test_negative_membership_is_refused_or_in_no_client(tmp_path: Path) -> None:
    data = graph(membership=torch.tensor([4, 9, -1] * 8))
    with pytest.raises(ValueError, match=r"'membership' is -1 at node 2, .* leave_out_negative to true"):
        module(data, tmp_path, GivenPartitioner())
    actual = module(data, tmp_path, GivenPartitioner(leave_out_negative=True), GlobalSplit(0.6, 0.2))
    assert [actual.source_idx_N(client).tolist() for client in range(2)] == [
        [n for n in range(24) if n % 3 == 0],
        [n for n in range(24) if n % 3 == 1],
    ]
    with pytest.raises(ValueError, match="negative everywhere"):
        module(graph(membership=torch.full((24,), -1)), tmp_path, GivenPartitioner(leave_out_negative=True))


def test_metis_bisects_where_k_way_leaves_clients_empty(tmp_path: Path) -> None:
    import pymetis

    hub = torch.stack([torch.zeros(39, dtype=torch.int64), torch.arange(1, 40)])
    star = graph(40, edge_index=hub)
    adjacency = [list(range(1, 40)), *([0] for _ in range(39))]
    num_clients = next(
        count for count in range(8, 40) if len(set(pymetis.part_graph(count, adjacency, recursive=False)[1])) < count
    )
    data = module(star, tmp_path, MetisPartitioner(num_clients), GlobalSplit(1.0, 0.0))
    assert min(client.num_nodes for client in data.clients) > 0
    assert sum(client.num_nodes for client in data.clients) == 40


def test_a_given_split_has_a_remedy_of_its_own(tmp_path: Path) -> None:
    masks = {f"{name}_mask": torch.arange(24) == index for index, name in enumerate(("train", "val", "test"))}
    with pytest.raises(
        ValueError, match=r"\[1\] without a training .*Let some of what they have train .train_mask"
    ) as caught:
        module(graph(membership=torch.arange(24) // 12, **masks), tmp_path, GivenPartitioner(), GivenSplit())
    assert "Raise `train`" not in str(caught.value)
    y = torch.where(torch.arange(24) < 12, torch.arange(24) % 3, -1)
    with pytest.raises(ValueError, match=r"\[1\] have no label\)\. Raise `train`"):
        module(graph(membership=torch.arange(24) // 12, y=y), tmp_path, GivenPartitioner(), GlobalSplit())
