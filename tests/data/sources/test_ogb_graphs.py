"""Molecules of OGB, in its own files."""

import gzip
import sys
from pathlib import Path

import pytest
import torch

from fl_lightning import FederatedDataModule
from fl_lightning.data import ClientSplit, OgbGraphSource, RandomPartitioner
from fl_lightning.data.split import Role

#: Atoms in a ring, with a bond type for each bond; the fourth is an atom alone.
SIZES = (3, 4, 5, 1, 3, 4)
PARTS = {"train": [0, 2, 3], "valid": [5], "test": [1, 4]}


def write_ogb(root: Path, name: str = "ogbg-molbace", tasks: int = 1) -> Path:
    """A tiny set in OGB's layout; of several tasks one label is unknown."""
    bonds = [[(n, (n + 1) % size) for n in range(size)] if size > 1 else [] for size in SIZES]
    labels = [[str((graph + task) % 2) for task in range(tasks)] for graph in range(len(SIZES))]
    if tasks > 1:
        labels[2][1] = ""
    files = {
        "raw/edge": [f"{a},{b}" for each in bonds for a, b in each],
        "raw/edge-feat": [f"{n % 2},0,1" for each in bonds for n in range(len(each))],
        "raw/node-feat": [f"{5 + n},0,4,5,3,0,2,0,{int(size > 1)}" for size in SIZES for n in range(size)],
        "raw/num-node-list": list(map(str, SIZES)),
        "raw/num-edge-list": [str(len(each)) for each in bonds],
        "raw/graph-label": [",".join(each) for each in labels],
        **{f"split/scaffold/{part}": list(map(str, graphs)) for part, graphs in PARTS.items()},
    }
    folder = root / name.replace("-", "_")
    for file, lines in files.items():
        path = folder / f"{file}.csv.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode()))
    (folder / "RELEASE_v1.txt").touch()
    return folder


def module(source: OgbGraphSource, root: Path, *parts: object) -> FederatedDataModule:
    data = FederatedDataModule(source, *parts, root=str(root), cache_dir=str(root / "cache"))  # type: ignore[arg-type]
    data.setup()
    return data


@pytest.mark.filterwarnings("ignore:GivenSplit leaves clients")
def test_it_is_read_with_its_split(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("builtins.input", None)
    write_ogb(tmp_path)
    allowed = set(torch.serialization.get_safe_globals())
    for _ in range(2):  # converts, then reads the converted file
        data = module(OgbGraphSource("ogbg-molbace"), tmp_path, RandomPartitioner(1))
        [client] = data.clients
        assert client.num_nodes_G.tolist() == list(SIZES)
        assert client.y_N.tolist() == [0, 1, 0, 1, 0, 1]
        masks = {"train": client.train_mask_N, "valid": client.val_mask_N, "test": client.test_mask_N}
        assert {part: mask.nonzero().flatten().tolist() for part, mask in masks.items()} == PARTS
    assert set(torch.serialization.get_safe_globals()) == allowed
    assert capsys.readouterr().out == ""
    assert "outdated" not in sys.modules or sys.modules["outdated"] is not None
    assert (data.num_features, data.num_outputs, str(data.task)) == (174, 2, "GraphClassification")
    assert client.union.num_edges == 2 * sum(size for size in SIZES if size > 1)
    assert client.union.x_NF[:3, :119].argmax(dim=1).tolist() == [5, 6, 7]  # the elements
    assert client.union.x_NF.sum(dim=1).tolist() == [9] * sum(SIZES)
    assert client.union.edge_attr_EK is None


@pytest.mark.filterwarnings("ignore:ClientSplit leaves clients")
def test_bonds_gaps_and_another_split(tmp_path: Path) -> None:
    write_ogb(tmp_path, "ogbg-moltox21", tasks=12)
    data = module(OgbGraphSource("ogbg-moltox21", bonds=True), tmp_path, RandomPartitioner(2), ClientSplit(0.7, 0.0))
    y = torch.cat([client.y_N for client in data.clients])
    assert (str(data.task), y.shape, int(y.isnan().sum())) == ("GraphClassification (multi_label)", (6, 12), 1)
    attr_EK = torch.cat([client.union.edge_attr_EK for client in data.clients])
    assert attr_EK.shape == (38, 13)
    assert (attr_EK.sum(dim=1) == 3).all()
    assert sum(int(client.val_mask_N.sum()) for client in data.clients) == 0


def test_numbers(tmp_path: Path) -> None:
    write_ogb(tmp_path, "ogbg-molesol")
    loaded = OgbGraphSource("ogbg-molesol").load(tmp_path, tmp_path / "cache")
    assert loaded.kind == "numbers"
    assert loaded.roles is not None
    assert loaded.roles.tolist() == [Role.TRAIN, Role.TEST, Role.TRAIN, Role.TRAIN, Role.TEST, Role.VAL]


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    for name in ("ogbg-ppa", "ogbn-arxiv", 3):
        with pytest.raises(
            ValueError, match=rf"OgbGraphSource.name is {name!r}, no set of molecules: give one of ogbg-"
        ):
            OgbGraphSource(name)  # type: ignore[arg-type]
    folder = write_ogb(tmp_path)
    (folder / "split" / "scaffold" / "valid.csv.gz").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"split/scaffold/valid.csv.gz cannot be read .* does not hold OGB's split"):
        OgbGraphSource("ogbg-molbace").load(tmp_path, tmp_path / "cache")
    (folder / "RELEASE_v1.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"ogbg-molbace: .*ogbg_molbace has no RELEASE_v1.txt.*FL_DATA_ROOT"):
        OgbGraphSource("ogbg-molbace").load(tmp_path, tmp_path / "cache")


@pytest.mark.parametrize(
    ("file", "row", "entry", "message"),
    [
        ("split/scaffold/test", 0, "99", "test.csv.gz .*test has 99 in row 0, no whole number from 0 to 5"),
        ("split/scaffold/test", 0, "-1", "test.csv.gz .*test has -1 in row 0"),
        ("split/scaffold/test", 1, "1.5", "test.csv.gz .*test has 1.5 in row 1"),
        ("split/scaffold/test", 0, "nan", "test.csv.gz .*test has nan in row 0"),
        ("split/scaffold/test", 0, "a", "test.csv.gz cannot be read"),
        ("split/scaffold/test", 0, "0", "test.csv.gz .*test has 0, which is in train as well"),
        ("split/scaffold/test", 0, "4", "test.csv.gz .*test has 4 twice"),
        ("raw/graph-label", 2, "0.5", "graph-label.csv.gz has 0.5 in row 2, no class"),
        ("raw/graph-label", 5, "1\n1", r"graph-label, num-node-list, num-edge-list have \[7, 6, 6\] rows"),
        ("raw/num-node-list", 5, "", r"have \[6, 5, 6\] rows"),
        ("raw/node-feat", 0, "500,0,4,5,3,0,2,0,1", "raw cannot be read .*property 0 of atom 0 is 500, of 119"),
        ("raw/node-feat", 0, "-1,0,4,5,3,0,2,0,1", "raw cannot be read .*property 0 of atom 0 is -1"),
        ("raw/node-feat", 0, "5.5,0,4,5,3,0,2,0,1", "raw cannot be read .*atom holds torch.float32"),
        ("raw/edge-feat", 0, "0,6,0", "raw cannot be read .*property 1 of bond 0 is 6, of 6"),
        ("raw/edge", 0, "0,99", "raw cannot be read .*bond 0 leads out of its molecule"),
        ("raw/edge", 18, "", "raw cannot be read .*where the molecules have"),
    ],
)
@pytest.mark.filterwarnings("ignore:GivenSplit leaves clients")
def test_damaged_files_are_named(tmp_path: Path, file: str, row: int, entry: str, message: str) -> None:
    path = write_ogb(tmp_path) / f"{file}.csv.gz"
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    lines[row] = entry
    path.write_bytes(gzip.compress("".join(f"{line}\n" for line in lines if line).encode()))
    with pytest.raises(ValueError, match=message) as raised:
        module(OgbGraphSource("ogbg-molbace"), tmp_path, RandomPartitioner(1))
    assert "\n" not in str(raised.value)
