"""A run from Python leaves the configuration that the command line would have taken."""

import functools
import inspect
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.fabric.loggers.logger import Logger

import fl_lightning as fl
from fl_lightning import ClientModule, FederatedDataModule, FederatedTrainer
from fl_lightning.callbacks import EarlyStopping, PerClientMetrics
from fl_lightning.cli import FederatedCLI
from fl_lightning.data import GivenPartitioner, PlanetoidSource, PlantedCommunities
from fl_lightning.models import GCN
from fl_lightning.relations import topology
from fl_lightning.run import loggers
from fl_lightning.run.description import Description
from fl_lightning.run.loggers import CSVLogger, RoundTable, WandbLogger
from fl_lightning.strategies import FedProx, FedSheafHN


class Keeps(Logger):
    """Keeps the hyperparameters that it is given."""

    name, version = "keeps", "0"

    def __init__(self) -> None:
        self.params: dict[str, Any] = {}

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Nothing."""

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Keep them."""
        self.params = params


def test_the_command_line_repeats_a_run_from_its_configuration(tmp_path: Path) -> None:
    logger = Keeps()
    trainer = FederatedTrainer(
        num_rounds=2,
        accelerator="cpu",
        default_root_dir=str(tmp_path / "python"),
        callbacks=EarlyStopping(patience=3),
        default_callbacks=False,
        logger=logger,
        seed=5,
    )
    data = FederatedDataModule(
        PlantedCommunities(num_nodes=120, num_communities=4), GivenPartitioner(), cache_dir=str(tmp_path / "cache")
    )
    model = ClientModule(functools.partial(GCN, hidden_channels=8), functools.partial(torch.optim.SGD, lr=0.1))
    result = trainer.fit(model, data, FedProx(proximal_weight=0.2))
    config = trainer.run.folder / "config.yaml"
    settings = yaml.safe_load(config.read_text())
    assert settings["trainer"].pop("logger")[0]["class_path"].endswith("test_description.Keeps")
    assert logger.params["strategy"]["init_args"]["proximal_weight"] == 0.2
    assert logger.params["trainer"]["num_rounds"] == 2
    assert "cannot be written" not in config.read_text()
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(settings))
    cli = FederatedCLI(["fit", f"--config={again}", f"--trainer.default_root_dir={tmp_path / 'again'}"])
    assert cli.trainer.run.selection.result == result  # type: ignore[attr-defined]
    assert cli.trainer.run.seed == 5  # type: ignore[attr-defined]


def test_what_cannot_be_written_is_named() -> None:
    class Own(GCN):
        def __init__(self, width: int) -> None:
            super().__init__(width, 2)

    description = Description()
    description.of(ClientModule(Own, lambda parameters: torch.optim.SGD(parameters, lr=0.1)), "model")
    assert [name.partition(" (")[0] for name in description.unwritten] == ["model.net.0", "model.optimizer"]
    itself = EarlyStopping()
    itself.patience = [itself, torch.zeros(3), signal.SIGTERM]  # type: ignore[assignment]
    description = Description()
    assert description.of(itself, "it")["init_args"]["patience"] == [None, None, 15]
    assert description.unwritten == ["it.patience.0", "it.patience.1"]


def objects() -> Iterator[Any]:
    """One of every class that a configuration may name and that has no required setting, and some with settings."""
    yield from (PlanetoidSource(name="Cora", undirected=True), FedSheafHN(num_neighbors=3))
    yield from (fl.data.FileSource("graph.pt"), fl.data.FileSource(["a.pt", "b.pt"], undirected=False))
    yield fl.data.MoleculeSource("table.csv", targets=["y"], names="name", columns=["mass"], clients="laboratory")
    yield from (fl.data.Tox21(["NR-AR"]), fl.data.TwitchSource(["DE", "PT"], undirected=False))
    yield fl.data.PyGGraphs("torch_geometric.datasets.Twitch", ["DE", "PT"], ignore_label=3)
    yield fl.data.ManyGraphs([PlantedCommunities(), PlantedCommunities()], ["a", "b"])
    yield from (CSVLogger("logs"), WandbLogger(offline=True, save_dir="logs"), PerClientMetrics(metrics=["acc"]))
    for module in (fl.data, fl.strategies, fl.callbacks, loggers, topology):
        for kind in vars(module).values():
            is_one = (
                inspect.isclass(kind) and kind.__module__.startswith("fl_lightning") and not inspect.isabstract(kind)
            )
            if is_one and not issubclass(kind, RoundTable | Exception):
                required = [each for each in inspect.signature(kind).parameters.values() if each.default is each.empty]
                if not [each for each in required if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]:
                    with suppress(ValueError):  # it requires one of several
                        yield kind()


def test_objects_of_the_package_are_written_whole() -> None:
    values = list(objects())
    assert len(values) > 100
    for value in values:
        description = Description()
        actual = description.of(value, "it")
        assert description.unwritten == [], value
        assert yaml.safe_load(yaml.safe_dump(actual)) == actual
        if "class_path" not in str(actual["init_args"]):
            assert Description().of(type(value)(**actual["init_args"]), "it") == actual
