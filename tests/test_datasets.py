"""Data sets in one line, and results that show themselves as a table."""

import inspect
from pathlib import Path

import pytest

import fl_lightning as fl
from fl_lightning import datasets
from fl_lightning.callbacks import FederatedCheckpoint
from fl_lightning.run.metrics import Metrics

NAMES = [name for name, each in vars(datasets).items() if inspect.isfunction(each) and not name.startswith("_")]


@pytest.mark.parametrize("name", NAMES)
def test_every_data_set_is_one_line_over_a_source(name: str, tmp_path: Path) -> None:
    made = getattr(fl.datasets, name)(seed=3, root=str(tmp_path), cache_dir=str(tmp_path))
    assert isinstance(made, fl.FederatedDataModule)
    assert made.seed == 3


def test_the_number_of_clients_and_another_partitioner() -> None:
    assert fl.datasets.cora(clients=7).partitioner.num_clients == 7
    other = fl.data.DirichletPartitioner(4)
    assert fl.datasets.cora(partitioner=other).partitioner is other


def test_results_are_a_dictionary_a_table_and_a_frame(federation, make_trainer) -> None:
    trainer = make_trainer(num_rounds=1, callbacks=FederatedCheckpoint(every_seconds=0))
    result = trainer.fit(fl.ClientModule(), federation, fl.strategies.FedAvg())
    assert result == trainer.run.selection.result
    assert isinstance(result, dict)
    frame = result.to_frame()
    assert frame.loc["test/acc"].tolist() == [result[f"test/acc{end}"] for end in ("", "_std", "_worst", "_weighted")]
    assert "test/acc_std" not in frame.index
    assert str(result).splitlines()[0].split() == ["value", "std", "worst", "weighted"]
    assert "<table" in result._repr_html_()
    assert isinstance(trainer.test(), Metrics)
    assert str(Metrics()) == "{}"
