"""Molecules from SMILES, with the features of OGB; tables of molecules."""

import functools
import gzip
from pathlib import Path
from typing import Any

import pytest
import torch
from example_files import write_laboratories

from fl_lightning import ClientModule, SequentialExecutor, StackedExecutor
from fl_lightning.data import (
    AqSolDB,
    ClientSplit,
    FederatedDataModule,
    GivenPartitioner,
    GroupSplit,
    ManyGraphSets,
    MoleculeSource,
    RandomPartitioner,
    SortedPartitioner,
    Tox21,
)
from fl_lightning.data.sources.smiles import molecules_of
from fl_lightning.models import GINE
from fl_lightning.strategies import FedAvg

pytest.importorskip("rdkit", reason="needs the extra molecules")
pytestmark = pytest.mark.filterwarnings("ignore:ClientSplit leaves clients")

ATOM = (119, 5, 12, 12, 10, 6, 6, 2, 2)
BOND = (5, 6, 2)
TABLE = """smiles,ID,place,weight,a,b
CCO,A-1,x,46.1,1,0
C,B-1,y,16.0,,1
nonsense,A-2,x,1,0,1
CC,B-2,y,30,,
O,A-3,x,18,0,1
"""


def module(source: Any, root: Path, *parts: Any) -> FederatedDataModule:
    split = ClientSplit(1.0, 0.0)
    data = FederatedDataModule(source, *parts, splitter=split, root=str(root), cache_dir=str(root / "c"))
    data.setup()
    return data


def write(root: Path, text: str = TABLE) -> str:
    (root / "table.csv").write_text(text)
    return "table.csv"


def places(row: torch.Tensor, dims: tuple[int, ...]) -> list[int]:
    """The category of each property in a one-hot row."""
    parts = row.split(list(dims))
    assert all(part.sum() == 1 for part in parts)
    return [int(part.argmax()) for part in parts]


def test_a_molecule_by_hand(tmp_path: Path) -> None:
    """Ethanol: element, chirality, degree with hydrogens, charge + 5, hydrogens, radicals, SP3, aromatic, in a ring."""
    graph, chiral = molecules_of(["CCO", "Cl[C@H](/C=C/C)Br"], tmp_path).graphs(bonds=True)
    assert graph.x.shape == (3, 174)
    assert [places(row, ATOM) for row in graph.x] == [
        [5, 0, 4, 5, 3, 0, 2, 0, 0],
        [5, 0, 4, 5, 2, 0, 2, 0, 0],
        [7, 0, 2, 5, 1, 0, 2, 0, 0],
    ]
    assert graph.edge_index.tolist() == [[0, 1, 1, 2], [1, 0, 2, 1]]
    assert [places(row, BOND) for row in graph.edge_attr] == [[0, 0, 0]] * 4
    assert places(chiral.x[1], ATOM) == [5, 2, 4, 5, 1, 0, 2, 0, 0]  # as OGB's source says of these two
    assert places(chiral.edge_attr[4], BOND) == [1, 2, 0]


def test_molecules_are_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = molecules_of(["CCO", "?", "C"], tmp_path)
    assert first.num_atoms.tolist() == [3, 0, 1]
    with monkeypatch.context() as patch:
        patch.setattr("fl_lightning.data.sources.smiles._convert", lambda smiles: pytest.fail("converted again"))
        assert torch.equal(molecules_of(["CCO", "?", "C"], tmp_path).atom, first.atom)
    [path] = (tmp_path / "molecules").iterdir()
    path.write_bytes(path.read_bytes()[:100])
    with pytest.warns(UserWarning, match="The cached file of molecules .* is damaged and is regenerated"):
        assert torch.equal(molecules_of(["CCO", "?", "C"], tmp_path).edge, first.edge)
    molecules_of(["CCO", "C"], tmp_path)
    assert len(list((tmp_path / "molecules").iterdir())) == 2


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("atom", lambda atom: atom + 500),
        ("atom", lambda atom: atom - 500),
        ("atom", lambda atom: atom.float()),
        ("atom", lambda atom: atom[:, :8]),
        ("bond", lambda bond: bond + 100),
        ("edge", lambda edge: edge + 1),
        ("num_atoms", lambda count: torch.tensor([4, -1, 1])),
        ("num_atoms", lambda count: [3, 0, 1]),
        ("num_atoms", lambda count: torch.tensor([4])),
        ("scaffolds", lambda scaffolds: [1, 2, 3]),
    ],
)
def test_cached_molecules_that_are_none_are_converted_again(name: str, edit: Any, tmp_path: Path) -> None:
    first = molecules_of(["CCO", "?", "C"], tmp_path)
    [path] = (tmp_path / "molecules").iterdir()
    state = torch.load(path, weights_only=True)
    torch.save({**state, name: edit(state[name])}, path)
    with pytest.warns(UserWarning, match="The cached file of molecules .* is damaged and is regenerated"):
        assert torch.equal(molecules_of(["CCO", "?", "C"], tmp_path).atom, first.atom)


def test_cached_molecules_of_another_number_are_converted_again(tmp_path: Path) -> None:
    molecules_of(["CCO", "?", "C"], tmp_path)
    [path] = (tmp_path / "molecules").iterdir()
    state = torch.load(path, weights_only=True)
    state |= {"num_atoms": torch.tensor([3, 1]), "num_bonds": torch.tensor([4, 0]), "scaffolds": ["acyclic"] * 2}
    torch.save(state, path)
    with pytest.warns(UserWarning, match="it holds 2 molecules, not 3"):
        assert molecules_of(["CCO", "?", "C"], tmp_path).num_atoms.tolist() == [3, 0, 1]


def test_clients_that_a_table_numbers(tmp_path: Path) -> None:
    rows = ["smiles,lab,a", "C,7,0.1", "CC,007,0.2", "CCC,7,0.3", "CCCC,12,0.4"]
    data = module(MoleculeSource(write(tmp_path, "\n".join(rows)), targets=["a"], clients="lab"), tmp_path)
    assert [(client.name, client.size) for client in data.clients] == [("007", 1), ("12", 1), ("7", 2)]
    source = MoleculeSource("table.csv", targets=["a"], columns=["lab"])
    by_number = module(source, tmp_path, GivenPartitioner("lab"))
    assert [(client.name, client.size) for client in by_number.clients] == [("7", 3), ("12", 1)]
    source = MoleculeSource(write(tmp_path, "\n".join([*rows, "O,,0.5"])), targets=["a"], clients="lab")
    with pytest.raises(ValueError, match=r"column 'lab', whose values are the clients, is empty in row 4: say there"):
        module(source, tmp_path)


def test_more_classes_than_molecules_are_refused(tmp_path: Path) -> None:
    rows = ["smiles,c", "C,0", "CC,1", "CCC,255"]
    source = MoleculeSource(write(tmp_path, "\n".join(rows)), targets=["c"], kind="classes")
    message = (
        r"label of graph 2 is 255, which makes 256 classes of 3 labeled graphs. Leave it out if.*`kind` of a table"
    )
    with pytest.raises(ValueError, match=message):
        module(source, tmp_path, RandomPartitioner(1))


def test_scaffolds_are_rings_and_what_links_them(tmp_path: Path) -> None:
    smiles = ["CCO", "c1ccccc1C", "OC(c1ccccc1)C1CC1", "?", "C[C@H]1CCCCO1"]
    scaffolds = ["acyclic", "c1ccccc1", "c1ccc(CC2CC2)cc1", "", "C1CCOCC1"]
    assert list(molecules_of(smiles, tmp_path).scaffolds) == scaffolds
    assert list(molecules_of(smiles, tmp_path).scaffolds) == scaffolds  # as it was cached


def _trains(data: FederatedDataModule, rows: list[str]) -> dict[str, bool]:
    """Whether each SMILES trains."""
    masks = [client.train_mask_N.tolist() for client in data.clients]
    numbers = [data.source_idx_N(client).tolist() for client in range(data.num_clients)]
    return {rows[n].split(",")[0]: mask for own in map(zip, numbers, masks) for n, mask in own}


@pytest.mark.filterwarnings("ignore:GroupSplit leaves clients")
def test_no_scaffold_trains_and_tests(tmp_path: Path) -> None:
    rows = ["CCO,x,1", "Cc1ccccc1,x,2", "Oc1ccccc1,x,3", "C1CC1,y,4", "c1ccccc1,y,5", "CCC,y,6", "CC1CC1,x,7"]
    source = MoleculeSource(write(tmp_path, "\n".join(["smiles,place,a", *rows])), kind="numbers", clients="place")
    drawn = set()
    for seed in range(6):
        data = FederatedDataModule(source, splitter=GroupSplit("scaffold", 0.6, 0.0), root=str(tmp_path), seed=seed)
        data.setup()
        trains = _trains(data, rows)
        assert trains["Cc1ccccc1"] == trains["Oc1ccccc1"] == trains["c1ccccc1"]  # of two clients
        assert trains["C1CC1"] == trains["CC1CC1"]
        assert trains["CCO"] == trains["CCC"]
        drawn.add(tuple(trains.values()))
    assert len(drawn) > 1


@pytest.mark.filterwarnings("ignore:GroupSplit leaves clients")
def test_scaffolds_of_sets_that_are_clients(tmp_path: Path) -> None:
    (tmp_path / "one.csv").write_text("smiles,a\nc1ccccc1,1\nC1CC1,2\nCC,3\n")
    (tmp_path / "two.csv").write_text("smiles,a\nCC1CC1,4\nc1ccccc1C,5\nCCC,6\n")
    sources: list[Any] = [MoleculeSource(name, kind="numbers") for name in ("one.csv", "two.csv")]
    for seed in range(4):
        split = GroupSplit("scaffold", 0.5, 0.0)
        data = FederatedDataModule(ManyGraphSets(sources), splitter=split, root=str(tmp_path), seed=seed)
        data.setup()
        one, two = (client.train_mask_N.tolist() for client in data.clients)
        assert one == [two[1], two[0], two[2]]


@pytest.mark.filterwarnings("ignore:.*molecules are left out")
def test_a_table_of_molecules(tmp_path: Path) -> None:
    source = MoleculeSource(write(tmp_path), targets=["a", "b"], names="ID", columns=["place", "weight"])
    data = module(source, tmp_path, RandomPartitioner(1))
    [client] = data.clients
    assert str(data.task) == "GraphClassification (multi_label)"
    assert client.num_nodes_G.tolist() == [3, 1, 1]
    assert client.union.edge_attr_EK is None
    assert client.y_N.nan_to_num(-1).tolist() == [[1, 0], [-1, 1], [0, 1]]
    assert data.class_names == ("a", "b")
    assert data.user_names(0).names == ("A-1", "B-1", "A-3")
    by_place = module(source, tmp_path, GivenPartitioner("place"))
    assert [(each.name, each.size) for each in by_place.clients] == [("x", 2), ("y", 1)]
    by_weight = module(source, tmp_path, SortedPartitioner(3, by="weight"))
    assert [by_weight.source_idx_N(client).tolist() for client in range(3)] == [[1], [2], [0]]


@pytest.mark.filterwarnings("ignore:.*molecules are left out")
def test_the_hash_depends_on_every_setting(tmp_path: Path) -> None:
    path = write(tmp_path)
    settings: list[dict[str, Any]] = [
        {"targets": ["a", "b"]},
        {"targets": ["b", "a"]},
        {"targets": ["weight"]},
        {"targets": ["b"]},
        {"targets": ["b"], "kind": "numbers"},
        {"targets": ["a", "b"], "bonds": True},
        {"targets": ["a", "b"], "columns": ["place"]},
    ]
    parts = [module(MoleculeSource(path, **each), tmp_path, RandomPartitioner(1)) for each in settings]
    assert len({each.partition_hash for each in parts}) == len(settings)
    assert parts[5].clients[0].union.edge_attr_EK.shape == (4, 13)
    assert [str(each.task) for each in parts[2:5]] == ["GraphRegression", "GraphClassification", "GraphRegression"]


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    source = MoleculeSource(write(tmp_path), targets=["a", "b"])
    with pytest.warns(UserWarning, match="left out") as said:
        source.load(tmp_path, tmp_path)
    assert [str(each.message) for each in said] == [
        "MoleculeSource('table.csv'): 1 of 5 molecules are left out, which RDKit cannot read; the first is row 2, "
        "'nonsense'",
        "MoleculeSource('table.csv'): 1 of 5 molecules are left out, which have no target; the first is row 3, 'CC'",
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"smiles": "SMILES"}, "the table has no column 'SMILES'; it has smiles, ID"),
        ({"targets": ["place"]}, "column 'place' has 'x' in row 0, which is no finite number"),
        ({"targets": "a"}, "targets is 'a': give a list of different columns"),
        ({"columns": ["size"]}, "columns has 'size', which graphs have already"),
        ({"clients": "num_nodes"}, "columns has 'num_nodes', which graphs have already"),
        ({"targets": ["a"], "columns": ["ID", "place", "weight", "nowhere"]}, "no column 'nowhere'"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*molecules are left out")
def test_tables_that_do_not_fit_are_refused(settings: Any, message: str, tmp_path: Path) -> None:
    path = write(tmp_path)
    with pytest.raises(ValueError, match=message):
        MoleculeSource(path, **settings).load(tmp_path, tmp_path)


def test_files_that_are_no_tables_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="expected a table with SMILES and targets"):
        MoleculeSource("none.csv").load(tmp_path, tmp_path)
    with pytest.raises(ValueError, match="has '1_000' in row 0, which is no finite number"):
        MoleculeSource(write(tmp_path, "smiles,a\nC,1_000\n")).load(tmp_path, tmp_path)
    with pytest.raises(ValueError, match="column 'a' has '1e39' in row 1, which is no finite number"):
        MoleculeSource(write(tmp_path, "smiles,a\nC,1\nCC,1e39\n")).load(tmp_path, tmp_path)
    with pytest.raises(ValueError, match="it has several columns named 'a'"):
        MoleculeSource(write(tmp_path, "smiles,a,a\nC,1,2\n")).load(tmp_path, tmp_path)
    for text, message in (("smiles,a\nC\n", "line 2 has 1 entries for 2 columns"), ("smiles,a\n", "it has no rows")):
        with pytest.raises(ValueError, match=message):
            MoleculeSource(write(tmp_path, text)).load(tmp_path, tmp_path)


def test_laboratories_are_clients(tmp_path: Path) -> None:
    (tmp_path / "aqsoldb").mkdir()
    rows = [f"{lab}-{index},{'C' * (index + 1)},{index / 2 - 3},{index},G1" for lab in "BAC" for index in range(4)]
    text = "\n".join(["ID,SMILES,Solubility,MolWt,Group", *rows])
    with gzip.open(tmp_path / "aqsoldb" / "curated-solubility-dataset.csv.gz", "wt") as file:
        file.write(text)
    data = module(AqSolDB(), tmp_path)
    assert [client.name for client in data.clients] == ["A", "B", "C"]
    assert str(data.task) == "GraphRegression"
    assert data.clients[1].y_N.flatten().tolist() == [-3.0, -2.5, -2.0, -1.5]
    assert data.user_names(2).names == ("C-0", "C-1", "C-2", "C-3")
    assert len(module(AqSolDB(), tmp_path, RandomPartitioner(2)).clients) == 2


def test_assays_are_labels_or_classes(tmp_path: Path) -> None:
    (tmp_path / "molecules").mkdir()
    header = ",".join(["smiles", *Tox21.names])
    rows = [f"{'C' * (index + 1)},{index % 2},{'' if index else 1}" + ",0" * 10 for index in range(6)]
    (tmp_path / "molecules" / "tox21.csv").write_text("\n".join([header, *rows]))
    data = module(Tox21(), tmp_path, RandomPartitioner(1))
    assert (data.num_outputs, str(data.task)) == (12, "GraphClassification (multi_label)")
    one = module(Tox21(["NR-AR"]), tmp_path, RandomPartitioner(1))
    assert str(one.task) == "GraphClassification"
    assert one.clients[0].y_N.tolist() == [0, 1, 0, 1, 0, 1]
    with pytest.raises(ValueError, match="assays has 'AR', which is not one of NR-AR"):
        Tox21(["AR"])


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:AqSolDB. 2 of 9,982 molecules are left out")
def test_nine_laboratories(require_dataset: Any, tmp_path: Path) -> None:
    require_dataset("aqsoldb")
    data = FederatedDataModule(AqSolDB())
    data.setup()
    assert [client.name for client in data.clients] == list("ABCDEFGHI")
    assert sum(client.size for client in data.clients) == 9980


def test_bonds_are_read(tmp_path: Path, make_trainer: Any, assert_same: Any) -> None:
    """Without a word that they are not used; both executors agree."""
    write_laboratories(tmp_path, 6)
    data = FederatedDataModule(AqSolDB(bonds=True), batch_size=4, root=str(tmp_path), cache_dir=str(tmp_path / "c"))
    net, runs = functools.partial(GINE, edge_channels=sum(BOND), hidden_channels=8), []
    for executor in (StackedExecutor(max_padding=0.9), SequentialExecutor()):
        trainer = make_trainer(num_rounds=2, executor=executor, precision="64-true")
        trainer.fit(ClientModule(net), data, FedAvg(num_epochs=1))
        runs.append(trainer.run.history)
    assert_same(*runs, tolerance=1e-6)
    assert runs[0][-1]["train/loss"] < runs[0][0]["train/loss"]
