"""Senseless values of every constructor argument of the data layer end in one line that names the setting."""

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_lightning.data import (
    FL60,
    GLEAM,
    HAR,
    METRLA,
    PEMSBAY,
    TPT48,
    AmazonSource,
    ChronologicalSplit,
    CitationFullSource,
    ClientSplit,
    CoauthorSource,
    DirichletPartitioner,
    EdgeInsertion,
    EdgeRemoval,
    FeatureNoise,
    FederatedDataModule,
    FileSource,
    GeneratedClients,
    GivenPartitioner,
    GivenSplit,
    GlobalSplit,
    GRDAToy,
    HeterogeneousCIFAR10,
    HeterophilousSource,
    InductiveSplit,
    LabelNoise,
    LabelScarcity,
    Landmine,
    LouvainPartitioner,
    LouvainPlusPartitioner,
    MetisPartitioner,
    MetisPlusPartitioner,
    MissingClasses,
    MissingFeatures,
    OgbSource,
    OverlappingMetisPartitioner,
    PlanetoidSource,
    PlantedCommunities,
    PlantedRelations,
    PyGGraphs,
    PyGSource,
    RandomPartitioner,
    RotatedMNIST,
    ScarceSplit,
    School,
    SuperClusterSBM,
    TwitchSource,
    UnlabeledClients,
    Vehicle,
)

NEEDED: dict[Callable[..., Any], dict[str, Any]] = {
    FL60: {},
    PlantedRelations: {},
    GRDAToy: {},
    TPT48: {},
    METRLA: {},
    PEMSBAY: {},
    RotatedMNIST: {},
    HeterogeneousCIFAR10: {},
    Vehicle: {},
    School: {},
    Landmine: {},
    GLEAM: {},
    HAR: {},
    PlantedCommunities: {},
    SuperClusterSBM: {},
    FileSource: {"path": "graph.pt"},
    PyGSource: {"dataset": "torch_geometric.datasets.Actor"},
    PlanetoidSource: {"name": "Cora"},
    AmazonSource: {"name": "Photo"},
    CoauthorSource: {"name": "CS"},
    CitationFullSource: {"name": "DBLP"},
    HeterophilousSource: {"name": "chameleon"},
    OgbSource: {},
    PyGGraphs: {"dataset": "torch_geometric.datasets.Twitch", "names": ["DE"]},
    TwitchSource: {},
    MetisPartitioner: {"num_clients": 5},
    OverlappingMetisPartitioner: {"num_clients": 5},
    LouvainPartitioner: {"num_clients": 5},
    LouvainPlusPartitioner: {"num_clients": 5},
    MetisPlusPartitioner: {"num_clients": 5},
    DirichletPartitioner: {"num_clients": 5},
    RandomPartitioner: {"num_clients": 5},
    GivenPartitioner: {},
    GlobalSplit: {},
    ClientSplit: {},
    ChronologicalSplit: {},
    GivenSplit: {},
    ScarceSplit: {"splitter": ClientSplit()},
    InductiveSplit: {"splitter": ClientSplit()},
    MissingClasses: {"splitter": ClientSplit()},
    FeatureNoise: {"strength": 0.5},
    MissingFeatures: {"strength": 0.5},
    EdgeRemoval: {"strength": 0.5},
    EdgeInsertion: {"strength": 0.5},
    LabelNoise: {"strength": 0.5},
    LabelScarcity: {"strength": 0.5},
    UnlabeledClients: {"clients": 0.5},
    FederatedDataModule: {"source": FL60()},
}

NUMBERS = [-1, -0.5, math.nan, math.inf, 10**30, "3", [], {}, True, b"x"]
"""No setting takes any of these, but for the texts and flags among them."""

TEXTS = {"path", "dataset", "name", "attribute", "root", "cache_dir", "features", "scaling"}
FLAGS = {
    "normalize_features",
    "largest_component",
    "undirected",
    "normalize",
    "standardize",
    "leave_out_negative",
    "memory_map",
}
EMPTY_MAY = {"arguments": ({},), "ignore_label": (-1,), "heterogeneity": ([],)}


def is_sensible(name: str, value: Any) -> bool:
    return (
        (name in TEXTS and isinstance(value, str) and name not in ("name", "features", "scaling"))
        or (name in FLAGS and isinstance(value, bool))
        or any(value == given for given in EMPTY_MAY.get(name, ()))
    )


@pytest.mark.parametrize("build", NEEDED, ids=lambda build: build.__name__)
def test_senseless_values(build: Callable[..., Any]):
    for name in inspect.signature(build).parameters:
        for value in NUMBERS:
            if not is_sensible(name, value):
                given = f"{name}={value!r}"
                with pytest.raises(ValueError, match=rf"(?i){name.rstrip('s')}") as refusal:
                    pytest.fail(f"{given} is taken: {build(**{**NEEDED[build], name: value})}")
                assert "\n" not in str(refusal.value), given
                assert len(str(refusal.value)) < 400, given


@pytest.mark.parametrize("seed", [-1, 2**32, 10**20])
def test_seeds_are_those_that_everything_takes(seed: int, tmp_path: Path):
    for build in (
        lambda: FederatedDataModule(FL60(), seed=seed),
        lambda: MetisPartitioner(2, seed=seed),
        lambda: PlantedCommunities(seed=seed),
        lambda: SuperClusterSBM(seed=seed),
    ):
        with pytest.raises(ValueError, match=rf"seed must be at (least 0|most 4294967295), got {seed}"):
            build()
    FederatedDataModule(
        PlantedCommunities(num_nodes=60), LouvainPartitioner(2), cache_dir=str(tmp_path), seed=2**32 - 1
    ).setup()


def test_what_memory_does_not_hold_is_refused():
    with pytest.raises(ValueError, match="num_nodes and num_features ask for"):
        PlantedCommunities(num_nodes=10**8, num_features=10**4)
    with pytest.raises(ValueError, match="num_nodes ask"):
        SuperClusterSBM(num_nodes=10**6)
    with pytest.raises(ValueError, match="num_clients and num_examples ask"):
        FL60(num_clients=10**6)


def test_folders_that_are_files_or_have_too_long_names(tmp_path: Path):
    (tmp_path / "file").touch()
    for setting, message in (("root", "data.root"), ("cache_dir", "cache_dir")):
        for path, problem in (("file", "it is a file"), ("file/below", "Not a directory"), ("x" * 300, "too long")):
            with pytest.raises(ValueError, match=rf"{message}=.* is not a folder .*{problem}.*Set FL_"):
                FederatedDataModule(FL60(), **{setting: str(tmp_path / path)})  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["", "x" * 300 + ".pt", "~nobody-here/graph.pt", "."])
def test_paths_that_are_no_files(path: str, tmp_path: Path):
    with pytest.raises((ValueError, FileNotFoundError), match="path"):
        FileSource(path).load(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match="attribute"):
        GivenPartitioner(path if path.endswith(".pt") else path + ".npy" if path else "").identity()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"root": "x"}, "'root' is 'x'; set data.root"),
        ({"name": None}, "'name' is None; give a text"),
        ({"nmae": "x"}, r"cannot be read \(TypeError: .*nmae.*Its arguments are .*correct them"),
    ],
)
def test_arguments_of_pyg(arguments: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(ValueError, match=message):
        PyGSource("torch_geometric.datasets.Planetoid", arguments).load(tmp_path, tmp_path / "cache")


@pytest.mark.parametrize("dataset", ["torch_geometric.datasets", "torch_geometric.nn.GCNConv", "..", "a b", "x."])
def test_classes_that_are_no_data_sets(dataset: str, tmp_path: Path):
    with pytest.raises(ValueError, match=r"dataset=.* is not an importable class of data sets"):
        PyGSource(dataset).load(tmp_path)


def test_parts_of_another_kind():
    for settings in ({"splitter": MetisPartitioner(2)}, {"relation_graph": GlobalSplit()}):
        with pytest.raises(
            ValueError, match=r"data\.(splitter|relation_graph) is .* which is not a (Splitter|Topology)"
        ):
            FederatedDataModule(FL60(), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("val", [0.0, 0.3])
def test_a_module_says_whether_there_is_a_validation_split(val: float):
    data = FederatedDataModule(FL60(num_clients=3, num_examples=10), splitter=ClientSplit(train=0.5, val=val))
    if val:
        data.setup()
    else:
        with pytest.warns(UserWarning, match="without a val example"):
            data.setup()
    assert data.has_validation == (val > 0)


class Keeps(GeneratedClients):
    """A source of the user's own with one more attribute."""

    def __init__(self, kept: Any) -> None:
        super().__init__(num_clients=3)
        self.kept = kept


@pytest.mark.parametrize("kept", [Path("there"), torch.ones(2)], ids=["path", "tensor"])
def test_a_source_of_ones_own_that_keeps_what_is_not_plain_is_refused(kept: Any) -> None:
    with pytest.raises(ValueError, match=rf"told from others by a {type(kept).__name__}, .* or override identity\(\)"):
        FederatedDataModule(Keeps(kept)).setup()
