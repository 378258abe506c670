"""What server and sites build from a job, and the files of their owners.

A job (:mod:`fl_lightning.remote.job_schema`) says what is computed. A site's own file says what data it holds and what
it refuses; a job contains no data, and a site without ``data`` in its file takes part in none.

    own: [features, outputs]  # which of these mean something else here than at other sites; none if left out
    client: 0                 # which of its data's clients the site is; 0 for the only one
    named_as: site            # the client's name: that of its site, or that in its data
    data:
      source: {class_path: FileSource, init_args: {path: /data/ward-7.pt}}
      partitioner: {class_path: RandomPartitioner, init_args: {num_clients: 1}}
      splitter: {class_path: ClientSplit}
    policy:                   # the settings of SitePolicy
      strategies: [FedAvg, FedPer]
      min_examples: 10
      local: ["head.*"]
      filters: [{class_path: TopK, init_args: {fraction: 0.1}}]
    accelerator: cpu

The server's own file has ``policy`` (the settings of JobPolicy) and ``accelerator``.
"""

import contextlib
import dataclasses
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from jsonargparse import ArgumentError, ArgumentParser
from lightning.pytorch.cli import LightningArgumentParser

from fl_lightning.cli import FederatedCLI
from fl_lightning.data import FederatedDataModule
from fl_lightning.data.settings import check_count
from fl_lightning.files import whole_file
from fl_lightning.relations.topology import Topology
from fl_lightning.remote.identity import Identity
from fl_lightning.remote.job_schema import Job
from fl_lightning.remote.policy import JobPolicy, SitePolicy
from fl_lightning.remote.registry import Registry
from fl_lightning.remote.schema import MOST_OUTPUTS
from fl_lightning.remote.site import Site
from fl_lightning.round.client import ClientModule
from fl_lightning.strategies import Strategy
from fl_lightning.trainer import FederatedTrainer
from fl_lightning.yaml_input import dump_yaml, read_yaml

#: Names of the files of their owners in the folder ``local`` of a kit, and of the job in what FLARE deploys.
SITE_FILE, SERVER_FILE, JOB_FILE = "fl_site.yaml", "fl_server.yaml", "job.json"
_SITE_KEYS = ("client", "named_as", "data", "own", "policy", "accelerator")
_SERVER_KEYS = ("policy", "accelerator")
_Policy = TypeVar("_Policy", bound=JobPolicy)
_Made = TypeVar("_Made", bound="Parts")


class Parts(FederatedCLI):
    """The objects that a configuration of ``fit`` builds, without training.

    Args:
        arguments: Options of ``fit``.
    """

    trainer: FederatedTrainer  # type: ignore[assignment]
    model: ClientModule
    datamodule: FederatedDataModule

    def __init__(self, arguments: Sequence[str]) -> None:
        super().__init__(["fit", *arguments])

    def _run_subcommand(self, subcommand: str) -> None:
        """Run nothing."""

    @property
    def strategy(self) -> Strategy:
        """The algorithm."""
        result: Strategy = self._get(self.config_init, "strategy")
        return result


class ServerParts(Parts):
    """The objects that the server builds from a job: no data.

    Attributes:
        max_outputs: The most outputs that a site's data may have, by the server's own file.
    """

    max_outputs = MOST_OUTPUTS

    def add_data(self, parser: LightningArgumentParser) -> None:
        """Add only the relation graph, which the server draws."""
        parser.add_subclass_arguments(Topology, "relation_graph", required=False)

    @property
    def relation_graph(self) -> Topology | None:
        """The topology that draws the client relation graph."""
        result: Topology | None = self._get(self.config_init, "relation_graph")
        return result


def open_site(
    job: Job,
    site_file: Path,
    folder: Path,
    name: str = "",
    *,
    account: Path | None = None,
    startup: Path | None = None,
) -> Site:
    """The site that its own file describes, for a job, which is checked before anything is built.

    Args:
        job: What was sent.
        site_file: The site's own file.
        folder: Where the site keeps its states of the run.
        name: Name of the client; if empty, its name in the data.
        account: Where it records, for all runs, what it has revealed; None for ``folder``.
        startup: The folder with its kit's certificates, with which secure sums are signed; None without certificates.

    Raises:
        ValueError: The site's file is not valid, or the job is not allowed here.
    """
    site_settings = _own_settings(site_file, _SITE_KEYS)
    policy = _policy(SitePolicy, site_settings, site_file)
    registry = Registry(policy.classes)
    job.check(registry)
    policy.check_job(job)
    if "data" not in site_settings:
        raise ValueError(f"{site_file} has no data: add a section data with what the site holds")
    settings = job.configuration(registry)
    settings["trainer"] = {"accelerator": "cpu", "logger": False, "callbacks": []}  # the server's are not built here
    settings["data"] = site_settings["data"]
    make_private(folder)
    parts = _built(Parts, settings, folder)
    data = parts.datamodule
    data.prepare_data()
    data.setup()
    client = site_settings.get("client", 0)
    if client >= data.num_clients:
        raise ValueError(f"{site_file}: client is {client}, but the data have {data.num_clients} clients")
    client_data = data.clients[client]
    if name and site_settings.get("named_as", "site") == "site":
        client_data = dataclasses.replace(client_data, name=name)
    parts.model.take_task(data.task)
    return Site(
        client_data,
        parts.model,
        parts.strategy,
        folder,
        policy=policy,
        drawing=data.drawing,
        names=data.user_names(client),
        accelerator=str(site_settings.get("accelerator", "cpu")),
        job=job,
        account=account,
        identity=None if startup is None else Identity.of_kit(startup, policy.peers),
        own=site_settings.get("own", data.registry.own),
    )


def open_server(job: Job, server_file: Path, root: Path, folder: Path) -> ServerParts:
    """Trainer, strategy and client module of a job, which is checked before anything is built.

    Args:
        job: What was sent.
        server_file: The server's own file; it may be missing.
        root: The folder that contains those of all runs.
        folder: For the job's own files.

    Raises:
        ValueError: The server's file is not valid, or the job is not allowed here.
    """
    site_settings = _own_settings(server_file, _SERVER_KEYS)
    policy = _policy(JobPolicy, site_settings, server_file)
    registry = Registry(policy.classes)
    job.check(registry)
    policy.check_job(job)
    settings = job.configuration(registry)
    settings["trainer"] |= {
        "accelerator": str(site_settings.get("accelerator", "cpu")),
        "default_root_dir": str(root),
        "run_name": job.name,
    }
    if job.relation_graph is not None:
        settings["relation_graph"] = job.relation_path(registry)
    make_private(root)
    parts = _built(ServerParts, settings, folder)
    parts.max_outputs = policy.max_outputs
    return parts


def memory_of(own_file: Path) -> float | None:
    """``policy.max_memory_gib`` of a site's or a server's own file.

    Raises:
        ValueError: It is no positive number.
    """
    given = _own_settings(own_file, _SITE_KEYS).get("policy", {}).get("max_memory_gib")
    if given is None:
        return None
    with contextlib.suppress(TypeError, ValueError):
        if not isinstance(given, bool) and 0 < float(given) < math.inf:  # in quotes it is a number, too
            return float(given)
    raise ValueError(f"{own_file}: policy.max_memory_gib is {given!r}: give a number of GiB, or null")


def make_private(folder: Path) -> None:
    """Create a folder and its missing parents, accessible to their owner only."""
    for each in (*reversed(folder.parents), folder):
        each.mkdir(mode=0o700, exist_ok=True)


def _built(kind: type[_Made], settings: dict[str, Any], folder: Path) -> _Made:
    """The parts of a configuration, whose mistakes do not end the process."""
    make_private(folder)
    whole = folder / "settings.yaml"
    with whole_file(whole) as temporary:
        temporary.write_text(dump_yaml(settings))
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return kind(["--config", str(whole)])
    except SystemExit as error:
        last = said.getvalue().strip().rpartition("\n")[2].removeprefix("fl-train: error: ")
        raise ValueError(last or "the job's settings are inconsistent") from error


def _policy(kind: type[_Policy], site_settings: dict[str, Any], file: Path) -> _Policy:
    try:
        return read_policy(site_settings.get("policy", {}), kind)
    except (ArgumentError, ValueError) as error:
        raise ValueError(f"{file}: {' '.join(str(error).split())}") from error


def _own_settings(own_file: Path, known: Sequence[str]) -> dict[str, Any]:
    """The settings in a site's or a server's file, without empty ones.

    Raises:
        ValueError: The file has settings that it may not have.
    """
    site_settings = read_yaml(own_file) if own_file.exists() else None
    keys = ", ".join(known)
    if not isinstance(site_settings, dict | None):
        raise ValueError(f"{own_file} holds {site_settings!r}: write the settings {keys}, each on a line of its own")
    given = {key: value for key, value in (site_settings or {}).items() if value is not None}
    if unknown := sorted(map(str, set(given) - set(known))):
        whose = "server" if known is _SERVER_KEYS else "site"
        raise ValueError(f"{own_file} has {', '.join(unknown)}: a {whose}'s file has {keys}")
    check_count(f"{own_file}: client", given.get("client", 0), least=0)
    if given.get("named_as", "site") not in ("site", "data"):
        raise ValueError(f"{own_file}: named_as is {given['named_as']!r}: write site, or data for the data's own name")
    for key in ("data", "policy"):
        if not isinstance(given.get(key, {}), dict):
            raise ValueError(f"{own_file}: {key} is {given[key]!r}: write its settings below it")
    if "policy" in given:
        given["policy"] = {name: value for name, value in given["policy"].items() if value is not None}
    return given


def read_policy(settings: dict[str, Any], kind: type[_Policy] = SitePolicy) -> _Policy:  # type: ignore[assignment]
    """A site's or a server's rules, from its file."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(kind, "policy", fail_untyped=False)
    result = parser.instantiate(parser.parse_object({"policy": settings}))
    policy: _Policy = result["policy"]
    return policy
