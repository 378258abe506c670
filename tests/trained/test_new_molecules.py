"""Molecules that a trained model has not seen are given by their SMILES."""

import csv
import gzip
from pathlib import Path
from typing import Any

import pytest
import task_data
import torch
from trained_runs import loaded

import fl_lightning as fl
from fl_lightning.command_line import main
from fl_lightning.data import ManyGraphSets, MoleculeSource
from fl_lightning.strategies import FedPer

pytest.importorskip("rdkit", reason="needs the extra molecules")
pytestmark = pytest.mark.filterwarnings("ignore")

ROOT = Path(__file__).parents[2]
SMILES = ["CCO", "C", "CC", "O", "CCN", "CO", "CCC", "N", "C=C", "C#N", "CF", "CCl"]


def table(path: Path, targets: str = "solubility", smiles: Any = SMILES) -> Path:
    """Each molecule's solubility is its number."""
    path.parent.mkdir(exist_ok=True)
    lines = [
        f"name,{targets},smiles",
        *(f"m{row},{row % 2 if targets == 'toxic' else row},{s}" for row, s in enumerate(smiles)),
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def run(tmp_path, make_trainer) -> Any:
    source = MoleculeSource(str(table(tmp_path / "known.csv")), targets=["solubility"], kind="numbers", names="name")
    data = fl.FederatedDataModule(source, fl.data.RandomPartitioner(2), cache_dir=str(tmp_path / "cache"))
    data.setup()
    return loaded(make_trainer, data, FedPer)


def test_smiles_are_predicted_as_the_runs_own_were(run, tmp_path) -> None:
    name = run.names[0]
    own = [SMILES[row] for row in run._run.datamodule.source_idx_N(0).tolist()]
    assert torch.allclose(run.predict(own, name), run.predictions()[name], atol=1e-6)
    (tmp_path / "new.csv.gz").write_bytes(gzip.compress("\n".join(["smiles", *own]).encode()))
    assert torch.equal(run.predict(tmp_path / "new.csv.gz", name), run.predict(own, name))
    assert run.new_names(tmp_path / "new.csv.gz") == tuple(own)
    assert run.new_names("new.pt") is None


def test_a_table_with_targets_trains_a_new_client(run, tmp_path) -> None:
    path = table(tmp_path / "new.csv", smiles=["CCCC", "CCCO", "CCCN"])
    path.write_text(path.read_text().replace("m1,1,", "m1,,"))
    data = run.new_data(path)
    assert data.y_N[:, 0].nan_to_num(-1).tolist() == [0, -1, 2]
    assert data.train_mask_N.tolist() == [True, False, True]
    assert run.onboard(path).predictions()["new-client"].shape == (3, 1)
    assert run.new_names(path) == ("m0", "m1", "m2")
    nothing = tmp_path / "nothing.csv"
    nothing.write_text("smiles\nCCCC\n")
    assert not run.new_data(nothing).train_mask_N.any()


def test_targets_go_by_their_names(tmp_path, make_trainer) -> None:
    lines = [f"{s},{row},{-row}.5" for row, s in enumerate(SMILES)]
    (tmp_path / "known.csv").write_text("\n".join(["smiles,a,b", *lines]) + "\n")
    source = MoleculeSource(str(tmp_path / "known.csv"), kind="numbers")
    data = fl.FederatedDataModule(source, fl.data.RandomPartitioner(2), cache_dir=str(tmp_path / "cache"))
    data.setup()
    run = loaded(make_trainer, data)
    for text, expected in (
        ("smiles,b,a\nCC,-2.5,2\n", [2.0, -2.5]),
        ("vendor,smiles,a,b\nX,CC,2,-2.5\n", [2.0, -2.5]),
        ("smiles,b\nCC,-2.5\n", [-99.0, -2.5]),
        ("smiles,vendor\nCC,X\n", [-99.0, -99.0]),
    ):
        (tmp_path / "new.csv").write_text(text)
        assert run.new_data(tmp_path / "new.csv").y_N[0].nan_to_num(-99).tolist() == expected


def test_clients_with_sets_of_their_own(tmp_path, make_trainer) -> None:
    sources = [MoleculeSource(str(table(tmp_path / f"{name}.csv", "toxic")), targets=["toxic"]) for name in "ab"]
    data = fl.FederatedDataModule(ManyGraphSets(sources), cache_dir=str(tmp_path / "cache"))
    data.setup()
    run = loaded(make_trainer, data, FedPer)
    assert torch.allclose(run.predict(SMILES, run.names[1]), run.predictions()[run.names[1]], atol=1e-6)


def test_what_does_not_fit_is_named(run, tmp_path, make_trainer) -> None:
    with pytest.raises(ValueError, match="RDKit cannot read 1 of 2 SMILES, the first is 'nonsense' in row 1: correct"):
        run.predict(["C", "nonsense"])
    (tmp_path / "bad.csv").write_text("molecule\nC\n")
    with pytest.raises(ValueError, match="the table has no column 'smiles'; it has molecule"):
        run.predict(tmp_path / "bad.csv")
    (tmp_path / "bad.csv").write_text("smiles,solubility\nC,much\n")
    with pytest.raises(ValueError, match="column 'solubility' has 'much' in row 0, which is no finite number"):
        run.predict(tmp_path / "bad.csv")
    other = loaded(make_trainer, task_data.graph_data(batch_size=4, cache_dir=str(tmp_path)))
    with pytest.raises(ValueError, match=r"the new data are texts or a table, but .* has no molecules: give a list"):
        other.predict(["C"])
    with pytest.raises(ValueError, match=r"the new data are texts or a table, but .* has no molecules: give a list"):
        other.predict(tmp_path / "bad.csv")


@pytest.mark.full
def test_the_command(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FL_CACHE_DIR", str(tmp_path / "cache"))
    table(tmp_path / "known.csv")
    source = {
        "class_path": "MoleculeSource",
        "init_args": {"path": str(tmp_path / "known.csv"), "targets": ["solubility"]},
    }
    words = ["--trainer.num_rounds=1", "--trainer.accelerator=cpu", "--strategy=FedAvg", f"--data.source={source}"]
    assert main(["fit", *words, "--data.partitioner=RandomPartitioner", "--data.partitioner.num_clients=2"]) == 0
    (tmp_path / "new.csv").write_text("smiles\nCCCC\nCCCO\n")
    assert main(["predict", "runs/federation/version_0", "--data", "new.csv", "--global"]) == 0
    with open("predictions.csv", newline="") as file:
        assert [row["name"] for row in csv.DictReader(file)] == ["CCCC", "CCCO"]
