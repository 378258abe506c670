import csv
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from example_files import save
from jsonargparse import ArgumentParser
from torch_geometric.data import Data
from torch_geometric.utils import subgraph

from fl_lightning.data import (
    FL60,
    ChronologicalSplit,
    ClientSplit,
    DirichletPartitioner,
    FederatedDataModule,
    FileSource,
    GivenPartitioner,
    GivenSplit,
    GlobalSplit,
    GraphSource,
    LouvainPartitioner,
    LouvainPlusPartitioner,
    MetisPartitioner,
    MetisPlusPartitioner,
    OverlappingMetisPartitioner,
    PlanetoidSource,
    PlantedCommunities,
    RandomPartitioner,
    School,
)
from fl_lightning.data.partition.cut import cache_key
from fl_lightning.data.preparation import Dropped
from fl_lightning.run.checkpoint import CONTENTS, differing
from fl_lightning.run.predictions import Predicted, write_predictions

SOURCE = PlantedCommunities(num_nodes=300, num_communities=6, num_classes=3, num_features=8)


class HeldGraph(GraphSource):
    """A graph in memory under a fixed identity: its data can change as those of a folder can."""

    def __init__(self, data: Data) -> None:
        super().__init__(normalize_features=False, largest_component=False)
        self.data = data
        self.num_loads = 0

    def load(self, root: Path, cache_dir: Path | None = None) -> Data:
        self.num_loads += 1
        return self.data

    def identity(self) -> dict[str, Any]:
        return {"source": "held"}


def module(tmp_path: Path, **settings: Any) -> FederatedDataModule:
    arguments: dict[str, Any] = {"source": SOURCE, "partitioner": MetisPartitioner(5), "cache_dir": str(tmp_path)}
    return FederatedDataModule(**{**arguments, **settings})


def records(cache: Path) -> list[Path]:
    return sorted((cache / "partitions").iterdir())


@pytest.mark.parametrize("partitioner", [MetisPartitioner(5), OverlappingMetisPartitioner(10)])
def test_clients_hold_their_induced_subgraphs(tmp_path: Path, planted: Data, partitioner: MetisPartitioner):
    data = module(tmp_path, partitioner=partitioner)
    data.setup()
    assert (data.num_clients, data.num_features, data.num_outputs) == (partitioner.num_clients, 8, 3)
    for client, row in zip(data.clients, data.statistics().rows, strict=True):
        edge_index_2E, _ = subgraph(client.node_idx_N, planted.edge_index, relabel_nodes=True, num_nodes=300)
        assert torch.equal(client.edge_index_2E, edge_index_2E)
        assert torch.equal(client.x_NF, planted.x[client.node_idx_N])
        assert torch.equal(client.y_N, planted.y[client.node_idx_N])
        roles_N = torch.stack([client.train_mask_N, client.val_mask_N, client.test_mask_N]).sum(dim=0)
        assert roles_N.tolist() == [1] * client.num_nodes
        assert client.num_examples == int(client.train_mask_N.sum())
        leaving = torch.isin(planted.edge_index[0], client.node_idx_N)
        assert row.num_edges + row.edges_lost == int(leaving.sum())


def test_types_and_names(tmp_path: Path):
    data = module(tmp_path)
    data.setup()
    first = data.clients[0]
    assert [client.name for client in data.clients] == [f"client-{idx:02d}" for idx in range(5)]
    assert (first.x_NF.dtype, first.edge_index_2E.dtype, first.y_N.dtype) == (torch.float32, torch.int64, torch.int64)
    assert first.train_mask_N.dtype == torch.bool
    assert first.edge_index_2E.shape == (2, first.num_edges)


def test_default_split_is_global_40_30_30(tmp_path: Path):
    data = module(tmp_path)
    data.setup()
    assert [sum(int(mask.sum()) for mask in masks) for masks in zip(
        *((c.train_mask_N, c.val_mask_N, c.test_mask_N) for c in data.clients), strict=True
    )] == [120, 90, 90]  # fmt: skip


def test_nothing_before_setup(tmp_path: Path):
    for attribute in ("clients", "num_clients", "num_features", "num_outputs", "relation_CC", "partition_hash"):
        with pytest.raises(RuntimeError, match=r"call datamodule\.setup"):
            getattr(module(tmp_path), attribute)


def test_prepare_caches_and_setup_reads(tmp_path: Path, planted: Data, monkeypatch: pytest.MonkeyPatch):
    first = module(tmp_path, source=HeldGraph(planted))
    first.prepare_data()
    assert [path.name for path in records(tmp_path)] == [f"{key_of(first, planted)}.pt"]
    monkeypatch.setattr(MetisPartitioner, "assign", lambda *_: pytest.fail("the cache was not used"))
    for data in (first, module(tmp_path, source=HeldGraph(planted))):
        data.setup()
        data.setup("fit")
    assert first.source.num_loads == 1  # type: ignore[attr-defined]  # setup() reads nothing again


def test_same_seed_same_partition_without_a_cache(tmp_path: Path):
    hashes = set()
    for cache in ("a", "b"):
        data = module(tmp_path / cache)
        data.setup()
        hashes.add(data.partition_hash)
    assert len(hashes) == 1


CHANGES: list[dict[str, Any]] = [
    {},
    {"seed": 1},
    {"partitioner": MetisPartitioner(6)},
    {"partitioner": MetisPartitioner(5, seed=0)},
    {"partitioner": RandomPartitioner(5)},
    {"partitioner": LouvainPartitioner(5)},
    {"partitioner": LouvainPartitioner(5, resolution=1.5)},
    {"partitioner": LouvainPartitioner(5, max_share=0.5)},
    {"partitioner": LouvainPlusPartitioner(3, resolution=2.0)},
    {"partitioner": MetisPlusPartitioner(5, num_parts=20)},
    {"partitioner": MetisPlusPartitioner(5, num_parts=30)},
    {"partitioner": DirichletPartitioner(5)},
    {"partitioner": DirichletPartitioner(5, alpha=2.0)},
    {"partitioner": OverlappingMetisPartitioner(5)},
    {"partitioner": OverlappingMetisPartitioner(5, node_fraction=0.6)},
    {"partitioner": GivenPartitioner()},
    {"splitter": GlobalSplit(0.5, 0.3)},
    {"splitter": GlobalSplit(0.4, 0.2)},
    {"splitter": ClientSplit(0.4, 0.3)},
    {"source": PlantedCommunities(num_nodes=301, num_communities=6, num_classes=3, num_features=8)},
    {"source": PlantedCommunities(num_nodes=300, num_communities=6, num_classes=3, num_features=8, seed=1)},
]


def test_anything_that_differs_changes_key_and_hash(tmp_path: Path):
    modules = [module(tmp_path, **change) for change in CHANGES]
    for data in modules:
        data.setup()
    assert len(records(tmp_path)) == len(CHANGES)
    assert len({data.partition_hash for data in modules}) == len(CHANGES)


def key_of(data: FederatedDataModule, graph: Data) -> str:
    """The key of a graph's partition under the settings of a data module."""
    return cache_key(graph, data._asked, data.source.all_identity(data._asked))  # type: ignore[attr-defined]


def test_preparation_versions_and_content_are_part_of_the_key(
    tmp_path: Path, planted: Data, monkeypatch: pytest.MonkeyPatch
):
    data = module(tmp_path)
    keys = {key_of(data, planted)}
    for name in ("x", "edge_index", "y", "membership"):
        changed = planted.clone()
        changed[name] = changed[name].flip(0)
        keys.add(key_of(data, changed))
    monkeypatch.setattr("fl_lightning.data.partition.cut.version", lambda name: "0")
    keys.add(key_of(data, planted))
    data.source = PlantedCommunities(num_nodes=300, num_communities=6, num_classes=3, num_features=8)
    data.source.preparation = type(data.source.preparation)(largest_component=True, normalize_features=False)
    keys.add(key_of(data, planted))
    assert len(keys) == 7


@pytest.mark.parametrize("damage", [b"", b"garbage", None], ids=["empty", "garbage", "cut"])
def test_damaged_cache_is_made_anew(tmp_path: Path, damage: bytes | None):
    first = module(tmp_path)
    first.setup()
    path = records(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:500] if damage is None else damage)
    again = module(tmp_path)
    with pytest.warns(UserWarning, match="is damaged and is regenerated"):
        again.setup()
    assert again.partition_hash == first.partition_hash
    module(tmp_path).setup()  # warns no more


def test_resuming_notices_other_features_and_relations(tmp_path: Path, planted: Data):
    """They are no part of the hash of a partition; checkpoints of earlier versions say nothing of them."""
    other = planted.clone()
    other.x = other.x.roll(1, 0)
    found = []
    for graph, weight in ((planted, 1.0), (planted, 1.0000001), (other, 1.0), (planted, 2.0)):
        data = module(tmp_path, source=HeldGraph(graph))
        data.setup()
        data._relation_CC = weight * (1 - torch.eye(5))
        found.append(data.registry.contents)
    first, rounded, moved, last = ({"seed": "0", CONTENTS: contents} for contents in found)
    assert not differing(first, rounded)
    assert len(differing(first, moved)) == 1
    assert differing(first, last) == [f"features and relations: checkpoint {found[0]!r}, this run {found[-1]!r}"]
    assert differing(first, dict(first)) == differing({"seed": "0"}, last) == []


def test_what_a_cached_split_lacks_is_said_again(tmp_path: Path):
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"GlobalSplit leaves clients \[0, .*\] without a val example"):
            module(tmp_path, splitter=GlobalSplit(0.9, 0.0)).setup()
    assert len(records(tmp_path)) == 1


def test_others_may_read_the_cache_as_the_umask_has_it(tmp_path: Path):
    before = os.umask(0o027)
    try:
        module(tmp_path).setup()
    finally:
        os.umask(before)
    assert records(tmp_path)[0].stat().st_mode & 0o777 == 0o640


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a full device")
def test_a_full_disk_is_what_a_cache_that_cannot_be_written_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``torch.save`` has an error of its own in place of it."""
    opened = Path.open
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(
            "pathlib.Path.open", lambda path, *mode, **more: full if "wb" in mode else opened(path, *mode, **more)
        )
        with pytest.raises(ValueError, match=r"cache_dir=.* cannot be written \(.*No space left on device"):
            module(tmp_path).setup()


@pytest.mark.parametrize("attribute", ["x", "y"])
def test_another_graph_under_the_same_name_has_its_own_partition(tmp_path: Path, planted: Data, attribute: str):
    first = module(tmp_path, source=HeldGraph(planted))
    first.setup()
    changed = planted.clone()
    changed[attribute] = changed[attribute].roll(1, 0)
    data = module(tmp_path, source=HeldGraph(changed))
    data.setup()
    assert len(records(tmp_path)) == 2
    assert torch.equal(data.clients[0].y_N, changed.y[data.clients[0].node_idx_N])
    assert torch.equal(data.clients[0].x_NF, changed.x[data.clients[0].node_idx_N])


def test_concurrent_preparation(tmp_path: Path):
    modules = [module(tmp_path) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(FederatedDataModule.setup, modules))
    assert len({data.partition_hash for data in modules}) == 1
    assert [path.suffix for path in records(tmp_path)] == [".pt"]


def test_unwritable_cache(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(
        ValueError, match=r"cache_dir=.* is not a folder that can be written .*Set FL_CACHE_DIR or data.cache_dir"
    ):
        module(tmp_path / "file").setup()


def test_folders_come_from_argument_environment_or_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FL_CACHE_DIR", str(tmp_path / "env"))
    monkeypatch.setenv("FL_DATA_ROOT", str(tmp_path / "data"))
    data = FederatedDataModule(SOURCE, MetisPartitioner(5))
    assert (data.cache_dir, data.root) == (tmp_path / "env", tmp_path / "data")
    data = FederatedDataModule(SOURCE, MetisPartitioner(5), root=str(tmp_path), cache_dir=str(tmp_path))
    assert (data.cache_dir, data.root) == (tmp_path, tmp_path)
    monkeypatch.delenv("FL_CACHE_DIR")
    monkeypatch.delenv("FL_DATA_ROOT")
    data = FederatedDataModule(SOURCE, MetisPartitioner(5))
    assert (data.cache_dir, data.root) == (Path.home() / ".cache" / "fl_lightning", Path.cwd() / "data")


@pytest.mark.parametrize(
    "source",
    [
        {"class_path": "PlantedCommunities", "init_args": {"num_nodes": 200}},
        {"class_path": "SuperClusterSBM", "init_args": {"num_nodes": 200, "intra_edge_probability": [0.4, 0.5]}},
        {"class_path": "PlanetoidSource", "init_args": {"name": "Cora", "normalize_features": False}},
        {"class_path": "AmazonSource", "init_args": {"name": "Photo"}},
        {"class_path": "OgbSource"},
        {"class_path": "FileSource", "init_args": {"path": "graph.pt"}},
        {"class_path": "PyGSource", "init_args": {"dataset": "a.B", "arguments": {"name": "x", "seed": 3}}},
    ],
    ids=lambda source: source["class_path"],
)
def test_built_from_a_configuration(source: dict[str, Any]):
    prefix = "fl_lightning.data."
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(FederatedDataModule, "data", instantiate=True)
    config = {
        "source": {**source, "class_path": prefix + source["class_path"]},
        "partitioner": {"class_path": prefix + "OverlappingMetisPartitioner", "init_args": {"num_clients": 10}},
        "splitter": {"class_path": prefix + "GlobalSplit", "init_args": {"train": 0.5}},
        "seed": 3,
    }
    data = parser.instantiate(parser.parse_object({"data": config})).data
    assert type(data.source).__name__ == source["class_path"]
    assert data.partitioner.num_clients == 10
    assert data.splitter.train == 0.5
    assert data.seed == 3


def test_public_split_of_a_real_graph(tmp_path: Path, require_dataset: Callable[[str], Path]):
    from fl_lightning.data import PlanetoidSource

    root = str(require_dataset("Cora"))
    source = PlanetoidSource("Cora", largest_component=False)
    data = module(tmp_path, source=source, splitter=GivenSplit(), root=root, partitioner=MetisPartitioner(3))
    data.setup()
    assert sum(client.num_examples for client in data.clients) == 140


def two_countries() -> Data:
    """A path of four nodes of classes 0 and 1, and before it one of three nodes, of class 2."""
    edges = torch.tensor([[0, 1, 3, 4, 5], [1, 2, 4, 5, 6]])
    names = ["ann", "bob", "cid", "dan", "eve", "fay", "gus"]
    return Data(
        x=torch.arange(14.0).view(7, 2), edge_index=edges, y=torch.tensor([2, 2, 2, 0, 1, 0, 1]), node_names=names
    )


def saved(path: Path, data: Data) -> str:
    torch.save(data, path)
    return str(path)


def test_what_the_largest_component_drops_is_said(tmp_path: Path):
    source = FileSource(saved(tmp_path / "graph.pt", two_countries()), largest_component=True)
    data = module(tmp_path, source=source, partitioner=RandomPartitioner(1), splitter=GlobalSplit(0.5, 0.25))
    message = r"graph.pt'\): largest_component drops 3 of 7 nodes, 2 of 5 edges and 1 classes; set it to false"
    with pytest.warns(UserWarning, match=message):
        data.setup()
    table = data.statistics()
    assert table.dropped == Dropped(num_nodes=3, num_edges=2, num_classes=1)
    table.to_csv(tmp_path / "table.csv")
    with (tmp_path / "table.csv").open(newline="") as file:
        mean = list(csv.DictReader(file))[-1]
    assert (mean["nodes_dropped"], mean["edges_dropped"], mean["classes_dropped"]) == ("3", "2", "1")
    assert "dropped: 3 nodes, 2 edges, 1 classes" in str(table.rich_table().caption)


@pytest.mark.filterwarnings("ignore:GlobalSplit leaves clients")
def test_what_is_dropped_of_several_graphs_is_added_up(tmp_path: Path):
    """The first loses class 2, which the second one keeps; 1 means no label."""
    graphs = [two_countries(), two_countries()]
    graphs[1].y = torch.tensor([0, 1, 1, 0, 2, 0, 0])
    torch.save(graphs, tmp_path / "graphs.pt")
    source = FileSource(str(tmp_path / "graphs.pt"), largest_component=True, ignore_label=1)
    data = module(tmp_path, source=source, partitioner=None, splitter=GlobalSplit(0.5, 0.25))
    with pytest.warns(UserWarning, match="largest_component drops") as warned:
        data.setup()
    messages = [str(each.message) for each in warned]
    for number, classes in enumerate((1, 0)):
        start = f"graphs.pt'), graph {number}: largest_component drops 3 of 7 nodes, 2 of 5 edges and {classes} classes"
        assert any(start in message for message in messages)
    assert data.statistics().dropped == Dropped(num_nodes=6, num_edges=4, num_classes=0)


def test_a_file_that_was_changed_is_read_anew(tmp_path: Path):
    """A module has what its hash is of, whenever the file is changed."""
    raw = two_countries()
    found = []
    source = FileSource(saved(tmp_path / "graph.pt", raw))
    for number in (1, 2):
        raw.x = torch.full((7, 2), float(number))
        saved(tmp_path / "graph.pt", raw)
        for each in (source, FileSource(str(tmp_path / "graph.pt"))):
            data = module(tmp_path, source=each, partitioner=RandomPartitioner(1), splitter=GlobalSplit(0.5, 0.25))
            assert each.clients_by is None  # it looks at the file
            raw.x = torch.zeros(7, 2)
            saved(tmp_path / "graph.pt", raw)
            data.setup()
            found.append((float(data.clients[0].x_NF.mean()), data.partition_hash))
            assert data.source.clients_by is None
            raw.x = torch.full((7, 2), float(number))
            saved(tmp_path / "graph.pt", raw)
    assert [mean for mean, _ in found] == [1.0, 1.0, 2.0, 2.0]
    assert len({hash_ for _, hash_ in found}) == 2


def test_own_graphs_are_left_whole(tmp_path: Path):
    source = FileSource(saved(tmp_path / "graph.pt", two_countries()))
    data = module(tmp_path, source=source, partitioner=RandomPartitioner(1), splitter=GlobalSplit(0.5, 0.25))
    data.setup()
    assert data.clients[0].num_nodes == 7
    assert data.statistics().dropped == Dropped()
    assert "dropped" not in str(data.statistics().rich_table().caption)


@pytest.mark.parametrize("largest_component", [True, False])
@pytest.mark.filterwarnings("ignore:.*largest_component drops", "ignore:.*without a (val|test) example")
def test_nodes_have_the_users_own_numbers_and_names(tmp_path: Path, largest_component: bool):
    raw = two_countries()
    source = FileSource(saved(tmp_path / "graph.pt", raw), largest_component=largest_component)
    data = module(tmp_path, source=source, partitioner=RandomPartitioner(2), splitter=GlobalSplit(0.6, 0.2))
    data.setup()
    for number, client in enumerate(data.clients):
        assert torch.equal(raw.x[data.source_idx_N(number)], client.x_NF)
        assert torch.equal(raw.y[data.source_idx_N(number)], client.y_N)
    assert data.node_names == tuple(raw.node_names)

    write_predictions(
        tmp_path / "predictions.csv",
        [
            Predicted(
                task=data.task,
                client_data=client,
                names=data.user_names(number),
                output_NK=torch.ones(client.num_nodes, 3) / 3,
            )
            for number, client in enumerate(data.clients)
        ],
    )
    with (tmp_path / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == (4 if largest_component else 7)
    for row in rows:
        assert int(row["label"]) == int(raw.y[int(row["node"])])
        assert row["name"] == raw.node_names[int(row["node"])]


def test_examples_have_their_numbers_in_the_source(tmp_path: Path):
    splitter = ChronologicalSplit(train=0.5, val=0.25, gap=2)
    data = FederatedDataModule(FL60(num_clients=2, num_examples=12), splitter=splitter, cache_dir=str(tmp_path))
    data.setup()
    examples = data.source.load(tmp_path, 0)  # type: ignore[attr-defined]
    for number, client in enumerate(data.clients):
        assert len(client.y_N) == 8
        assert torch.equal(examples.x[number][data.source_idx_N(number)], client.x_NX)


@pytest.mark.parametrize("names", [["ann"], "seven", list(range(7))])
def test_node_names_are_a_text_for_each_node(tmp_path: Path, names: object):
    raw = two_countries()
    raw.node_names = names
    source = FileSource(saved(tmp_path / "graph.pt", raw))
    with pytest.raises(ValueError, match=r"graph.pt'\): node_names must be a list with a string for each of the 7"):
        module(tmp_path, source=source, partitioner=RandomPartitioner(1)).setup()


def test_unsound_graphs_are_refused_by_name_before_partitioning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(RandomPartitioner, "assign", lambda *_: pytest.fail("partitioned"))
    raw = two_countries()
    raw.x[4, 1] = float("nan")
    source = FileSource(saved(tmp_path / "graph.pt", raw))
    with pytest.raises(ValueError, match=r"^FileSource\('.*graph.pt'\): feature 1 of node 4 is nan"):
        module(tmp_path, source=source, partitioner=RandomPartitioner(1)).prepare_data()


def test_unsound_examples_are_refused_by_name(tmp_path: Path):
    save(tmp_path, "school/school", X=np.array([[1.0], [np.nan]]), y=np.ones(2), task=np.zeros(2))
    data = FederatedDataModule(School(), root=str(tmp_path), cache_dir=str(tmp_path))
    with pytest.raises(ValueError, match=r"^School: .*school.npz: `X`\[1, 0\] is nan, which is not a finite float32"):
        data.setup()


def test_classes_are_called_as_the_graph_or_the_source_says(tmp_path: Path) -> None:
    raw = two_countries()
    raw.class_names = [f"class {k}" for k in range(int(raw.y.max()) + 1)]
    data = FederatedDataModule(
        FileSource(saved(tmp_path / "graph.pt", raw)), MetisPartitioner(2), cache_dir=str(tmp_path)
    )
    data.setup()
    assert data.class_names == tuple(raw.class_names) == data.statistics().class_names
    raw.class_names = ["one"]
    wrong = FederatedDataModule(
        FileSource(saved(tmp_path / "other.pt", raw)), MetisPartitioner(2), cache_dir=str(tmp_path)
    )
    with pytest.raises(ValueError, match="class_names must be a list with a string for each of the"):
        wrong.setup()
    assert PlanetoidSource("Cora").class_names[0] == "theory"
    assert PlanetoidSource("PubMed").class_names is None


def test_features_of_a_graph_in_memory_are_part_of_the_hash(tmp_path: Path, planted: Data):
    other = planted.clone()
    other.x = other.x.flip(0)
    modules = [module(tmp_path, source=graph) for graph in (planted, other, planted.clone())]
    for data in modules:
        data.setup()
    first, second, same = (data.partition_hash for data in modules)
    assert first == same != second
