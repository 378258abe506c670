"""What a notebook needs: exports, default callbacks, evaluation after a fit, tables."""

import ast
import dataclasses
import functools
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from net_checks import Noise
from torch.optim import SGD

import fl_lightning as fl
from fl_lightning.callbacks import FederatedCheckpoint, RoundProgressBar
from fl_lightning.data import FederatedDataModule
from fl_lightning.models import CNN, GCN, MLP, GRUForecaster, MaskedGCN
from fl_lightning.models.batch_norm import BatchNorm
from fl_lightning.strategies import (
    DFedAvgM,
    FedAux,
    FedAvg,
    FedBN,
    FedGNN,
    FedPub,
    FedRep,
    FedSage,
    Flow,
    Oracle,
    Strategy,
)
from fl_lightning.tasks import ExampleClassification

ROOT = Path(fl.__file__).parent
STRATEGIES = sorted(
    {kind for kind in vars(fl.strategies).values() if inspect.isclass(kind) and issubclass(kind, Strategy)},
    key=lambda kind: kind.__name__,
)
STRATEGIES = [kind for kind in STRATEGIES if not inspect.isabstract(kind)]
SGD_STEP = functools.partial(SGD, lr=0.1)


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
def test_packages_are_reached_by_their_name_alone(room: str) -> None:
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
    with pytest.raises(RuntimeError, match="call fit first, or test with client, data and strategy"):
        trainer.test()
    trainer.fit(make_model(), federation, FedAvg(num_epochs=1))
    with pytest.warns(UserWarning, match="no checkpoint was written: these are the models of the last round"):
        metrics = trainer.test()
    assert metrics["test/acc"] == trainer.run.history[-1]["test/acc"]
    with pytest.warns(UserWarning, match="no checkpoint"):
        predictions = trainer.predict()
    assert [len(p) for p in predictions.values()] == [client.num_nodes for client in federation.clients]
    assert all(torch.allclose(p.sum(dim=1), torch.ones(len(p))) for p in predictions.values())


def test_former_keywords_are_refused_by_their_present_names(make_trainer: Any, federation: Any) -> None:
    trainer, data, strategy = make_trainer(num_rounds=1), federation, FedAvg()
    for verb in (trainer.fit, trainer.validate, trainer.test, trainer.predict):
        for former, now in {"model": "client", "datamodule": "data", "algorithm": "strategy"}.items():
            with pytest.raises(TypeError, match=f"which was renamed to {now}: call {verb.__name__}\\({now}=...\\)"):
                verb(**{former: None})
    with pytest.raises(TypeError, match="which was renamed to data"):
        trainer.data(datamodule=data)
    assert list(inspect.signature(trainer.fit).parameters)[:3] == ["client", "data", "strategy"]
    for missing in ({"data": data}, {"strategy": strategy}, {}):
        name = "strategy" if "data" in missing else "data"
        with pytest.raises(ValueError, match=f"{name} is missing: give {name}"):
            trainer.fit(**missing)
    with pytest.raises(ValueError, match="strategy is FedAvg, which is no Strategy: give strategy=fl_lightning"):
        trainer.fit(data=data, strategy=FedAvg)
    with pytest.raises(ValueError, match="which is not a ClientModule: give client="):
        trainer.fit(data, strategy=strategy)


@pytest.mark.parametrize("kind", STRATEGIES, ids=lambda kind: kind.__name__)
def test_a_strategy_brings_its_client_its_net_and_its_optimizer(kind: Any, federation: Any) -> None:
    strategy = kind(groups=(0, 1, 1, 0, 1)) if kind is Oracle else kind()
    client = strategy.default_client()
    strategy.complete(client, federation.registry)
    assert type(client) is kind.client_class
    (factory,) = client.net_factories
    assert getattr(factory, "func", factory) == (kind.default_net or GCN)
    assert client.optimizer_factory is kind.default_optimizer


@pytest.mark.parametrize("kind", [FedRep, Flow, FedAvg], ids=lambda kind: kind.__name__)
def test_clients_with_examples_may_have_another_optimizer(kind: Any, federation: Any) -> None:
    client, registry = (
        kind().default_client(),
        dataclasses.replace(federation.registry, task=ExampleClassification(), num_features=2),
    )
    kind().complete(client, registry)
    assert client.optimizer_factory is (kind.examples_optimizer or kind.default_optimizer)
    assert (kind.examples_optimizer is None) == (kind is FedAvg)
    given = functools.partial(torch.optim.SGD, lr=0.5)
    client = fl.ClientModule(optimizer=given)
    kind().complete(client, registry)
    assert client.optimizer_factory is given


@pytest.mark.parametrize("kind", [FedPub, FedAux, FedBN, FedGNN, FedSage, DFedAvgM], ids=lambda kind: kind.__name__)
def test_data_and_a_strategy_are_enough(kind: Any, make_trainer: Any, federation: Any) -> None:
    trainer = make_trainer(num_rounds=1)
    assert trainer.fit(data=federation, strategy=kind(num_epochs=1))["val/acc"] > 0
    assert type(trainer.run.model) is kind.client_class
    assert type(trainer.run.model.net) is kind.default_net or kind is DFedAvgM


def test_a_client_takes_what_it_was_not_given_from_each_strategy(make_trainer: Any, federation: Any) -> None:
    client, trainer = fl.ClientModule(), make_trainer(num_rounds=1)
    trainer.fit(client, federation, FedPub(num_epochs=1))
    assert client.net_factories == [MaskedGCN]
    trainer.fit(client, federation, FedAvg(num_epochs=1))
    assert client.net_factories == [GCN]
    own = functools.partial(GCN, hidden_channels=8)
    client = fl.ClientModule(own, SGD_STEP)
    trainer.fit(client, federation, FedAvg(num_epochs=1))
    assert client.net_factories == [own]
    assert client.optimizer_factory is SGD_STEP


def test_what_is_none_is_of_the_last_fit(make_trainer: Any, make_model: Any, federation: Any, tmp_path: Path) -> None:
    trainer = make_trainer(num_rounds=2, default_callbacks=True)
    client, strategy = make_model(), FedAvg(num_epochs=1)
    trainer.fit(client, federation, strategy)
    expected = trainer.test()
    assert trainer.test(data=federation) == expected
    assert trainer.test(strategy=FedAvg(num_epochs=1)) == expected
    assert trainer.run.model is client
    assert trainer.test(client) == expected


@pytest.mark.parametrize(("shape", "net"), [((5,), MLP), ((1, 12, 12), CNN), ((6, 2), MLP)], ids=str)
def test_examples_get_a_net_that_fits_them(shape: Any, net: Any, make_trainer: Any) -> None:
    trainer = make_trainer(num_rounds=1)
    trainer.fit(data=FederatedDataModule(Noise(shape)), strategy=FedAvg(num_epochs=1))
    assert trainer.run.model.net_factories == [net]


def test_forecasts_come_from_a_gru(make_trainer: Any) -> None:
    trainer, data = make_trainer(num_rounds=1), FederatedDataModule(Noise((6, 2), regression=True))
    trainer.fit(fl.ClientModule(), data, FedAvg(num_epochs=1))
    assert trainer.run.model.net_factories == [GRUForecaster]
    trainer.fit(data=data, strategy=FedAvg(num_epochs=1))
    assert trainer.run.history[-1]["val/mse"] > 0


def test_a_former_name_is_refused_by_the_present_one() -> None:
    with pytest.raises(ImportError, match="RegressionClient was renamed to ClientModule, which takes its task"):
        fl.RegressionClient  # noqa: B018


def test_fedbn_normalizes_vectors_and_refuses_images(make_trainer: Any) -> None:
    trainer = make_trainer(num_rounds=1)
    trainer.fit(data=FederatedDataModule(Noise((5,))), strategy=FedBN(num_epochs=1))
    assert any(isinstance(layer, BatchNorm) for layer in trainer.run.model.net.modules())
    with pytest.raises(ValueError, match="FedBN keeps normalization layers local, but CNN has none: give model"):
        trainer.fit(data=FederatedDataModule(Noise((1, 12, 12))), strategy=FedBN(num_epochs=1))


def test_history_is_a_table(make_trainer: Any, make_model: Any, federation: Any) -> None:
    trainer = make_trainer(num_rounds=3)
    assert "FederatedTrainer" in trainer._repr_mimebundle_()["text/html"]
    trainer.fit(make_model(), federation, FedAvg(num_epochs=1))
    assert trainer.history.index.tolist() == [0, 1, 2]
    assert trainer.history["val/acc"].tolist() == [row["val/acc"] for row in trainer.run.history]
    assert "test/acc" in trainer._repr_mimebundle_()["text/html"]
    assert "client-00" in federation.statistics()._repr_mimebundle_()["text/html"]
