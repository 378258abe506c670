"""What a notebook needs: exports, default callbacks, evaluation after a fit, tables."""

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fl_lightning as fl
from fl_lightning.callbacks import FederatedCheckpoint, RoundProgressBar
from fl_lightning.strategies import FedAvg

ROOT = Path(fl.__file__).parent


def test_every_name_is_exported_for_types_and_at_run_time() -> None:
    tree = ast.parse(Path(fl.__file__).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    static = {
        alias.asname or alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert static == set(fl.__all__)
    assert set(fl._HOMES) < set(fl.__all__) <= set(dir(fl))
    for name in fl.__all__:
        assert getattr(fl, name) is not None
    with pytest.raises(AttributeError, match="module 'fl_lightning' has no attribute 'Missing'"):
        fl.Missing  # noqa: B018


@pytest.mark.parametrize("room", ["strategies", "callbacks", "data", "models", "relations"])
def test_rooms_are_reached_by_their_name_alone(room: str) -> None:
    code = f"import fl_lightning as fl; print(len(fl.{room}.__all__))"
    assert int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout) > 5
    for name in getattr(fl, room).__all__:
        assert hasattr(getattr(fl, room), name)


def test_default_callbacks_come_from_python_too(make_trainer: Any, make_model: Any, federation: Any) -> None:
    own = FederatedCheckpoint(every_seconds=0)
    trainer = make_trainer(num_rounds=2, callbacks=own, default_callbacks=True)
    kinds = [type(callback) for callback in trainer.callbacks]
    assert kinds.count(FederatedCheckpoint) == 1
    assert trainer.callbacks[0] is own
    assert RoundProgressBar in kinds
    result = trainer.fit(make_model(), federation, FedAvg(num_epochs=1))
    assert trainer.test()["test/acc"] == pytest.approx(result["test/acc"])
    assert trainer.run.history[-1]["comm/bytes_total"] > 0


def test_models_in_memory_are_evaluated_where_nothing_was_written(
    make_trainer: Any, make_model: Any, federation: Any
) -> None:
    trainer = make_trainer(num_rounds=2)
    with pytest.raises(RuntimeError, match="call fit, validate, test or predict first"):
        trainer.test()
    trainer.fit(make_model(), federation, FedAvg(num_epochs=1))
    with pytest.warns(UserWarning, match="no checkpoint was written: these are the models of the last round"):
        metrics = trainer.test()
    assert metrics["test/acc"] == trainer.run.history[-1]["test/acc"]
    with pytest.warns(UserWarning, match="no checkpoint"):
        predictions = trainer.predict()
    assert [len(p) for p in predictions.values()] == [client.num_nodes for client in federation.clients]
    assert all(torch.allclose(p.sum(dim=1), torch.ones(len(p))) for p in predictions.values())
    with pytest.raises(ValueError, match="give model, datamodule and algorithm, or none of them"):
        trainer.test(make_model())


def test_history_is_a_table(make_trainer: Any, make_model: Any, federation: Any) -> None:
    trainer = make_trainer(num_rounds=3)
    assert "FederatedTrainer" in trainer._repr_mimebundle_()["text/html"]
    trainer.fit(make_model(), federation, FedAvg(num_epochs=1))
    assert trainer.history.index.tolist() == [0, 1, 2]
    assert trainer.history["val/acc"].tolist() == [row["val/acc"] for row in trainer.run.history]
    assert "test/acc" in trainer._repr_mimebundle_()["text/html"]
    assert "client-00" in federation.statistics()._repr_mimebundle_()["text/html"]
