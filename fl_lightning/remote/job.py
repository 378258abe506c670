"""Settings of a run over a network: the server's configuration, and each site's own file.

The run's configuration is an ordinary one of ``fl-train``. A site's own file says where its data are and what it
refuses; ``data`` replaces the configuration's.

    client: 0                 # which of its data's clients the site is; 0 for the only one
    data:                     # leave out to draw the run's own data, as a try-out on one machine does
      source: {class_path: FileSource, init_args: {path: /data/ward-7.pt}}
      partitioner: {class_path: RandomPartitioner, init_args: {num_clients: 1}}
      splitter: {class_path: ClientSplit}
    policy:                   # the settings of SitePolicy
      strategies: [FedAvg, FedPer]
      min_examples: 10
      filters: [{class_path: TopK, init_args: {fraction: 0.1}}]
    accelerator: cpu
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentError, ArgumentParser

from fl_lightning.cli import FederatedCLI
from fl_lightning.data import FederatedDataModule
from fl_lightning.data.settings import check_count
from fl_lightning.remote.policy import SitePolicy
from fl_lightning.remote.site import Site
from fl_lightning.round.client import ClientModule
from fl_lightning.strategies import Strategy
from fl_lightning.trainer import FederatedTrainer
from fl_lightning.yaml_input import dump_yaml, read_yaml

#: Name of a site's own file in its kit's folder ``local``.
SITE_FILE = "fl_site.yaml"
_SITE_KEYS = ("client", "data", "policy", "accelerator")


class Parts(FederatedCLI):
    """What a configuration of ``fit`` builds, without training.

    Args:
        arguments: Options of ``fit``.
    """

    trainer: FederatedTrainer  # type: ignore[assignment]
    model: ClientModule
    datamodule: FederatedDataModule

    def __init__(self, arguments: Sequence[str]) -> None:
        super().__init__(["fit", *arguments])

    def _run_subcommand(self, subcommand: str) -> None:
        """Nothing is run."""

    @property
    def strategy(self) -> Strategy:
        """The algorithm."""
        found: Strategy = self._get(self.config_init, "strategy")
        return found


def open_site(run_file: Path, site_file: Path, folder: Path, name: str = "") -> Site:
    """The site that its own file describes, for a run.

    Args:
        run_file: The run's configuration.
        site_file: The site's own; a missing one says nothing.
        folder: Where the site keeps states and keys.
        name: What a client of data that its own file names is called; if empty, what it is called there.

    Raises:
        ValueError: The site's file holds something else.
    """
    own = _own_settings(site_file)
    settings = read_yaml(run_file)
    settings["trainer"] = {"accelerator": "cpu", "logger": False, "callbacks": []}  # the server's are not made here
    if "data" in own:
        settings["data"] = own["data"]
    folder.mkdir(parents=True, exist_ok=True)
    whole = folder / "settings.yaml"
    whole.write_text(dump_yaml(settings))
    try:
        policy = read_policy(own.get("policy", {}))
    except (ArgumentError, ValueError) as error:
        raise ValueError(f"{site_file}: {' '.join(str(error).split())}") from error
    parts = Parts(["--config", str(whole)])
    policy.check_strategy(type(parts.strategy).__name__)
    data = parts.datamodule
    data.prepare_data()
    data.setup()
    client = own.get("client", 0)
    if client >= data.num_clients:
        raise ValueError(f"{site_file}: client is {client}, but the data have {data.num_clients} clients")
    holds = data.clients[client]
    if name and "data" in own:
        holds = dataclasses.replace(holds, name=name)
    return Site(
        holds,
        parts.model,
        parts.strategy,
        folder,
        policy=policy,
        batch_size=data.batch_size,
        steps_per_epoch=data.steps_per_epoch,
        drop_last=data.drop_last,
        own=data.own_names(client),
        accelerator=str(own.get("accelerator", "cpu")),
    )


def _own_settings(site_file: Path) -> dict[str, Any]:
    """What a site's file says; what is empty in it is left out.

    Raises:
        ValueError: It says something else than a site's file may.
    """
    own = read_yaml(site_file) if site_file.exists() else None
    keys = ", ".join(_SITE_KEYS)
    if not isinstance(own, dict | None):
        raise ValueError(f"{site_file} holds {own!r}: write settings, one of {keys} on a line")
    said = {key: value for key, value in (own or {}).items() if value is not None}
    if unknown := sorted(map(str, set(said) - set(_SITE_KEYS))):
        raise ValueError(f"{site_file} has {', '.join(unknown)}: a site's file has {keys}")
    check_count(f"{site_file}: client", said.get("client", 0), least=0)
    for key in ("data", "policy"):
        if not isinstance(said.get(key, {}), dict):
            raise ValueError(f"{site_file}: {key} is {said[key]!r}: write its settings below it")
    return said


def read_policy(settings: dict[str, Any]) -> SitePolicy:
    """A site's rules, from its file."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(SitePolicy, "policy", fail_untyped=False)
    found = parser.instantiate_classes(parser.parse_object({"policy": settings}))
    policy: SitePolicy = found["policy"]
    return policy
