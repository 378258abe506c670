"""What a run is measured by: Local and Pooled with its own settings, trained once and kept in the cache folder.

Each lies in ``references/<key>/`` there, as any run lies in its folder; the key is of everything that it is made of. Of
nets, optimizers or clients that are not of this package or of torch nobody knows what they compute, so those references
are trained anew by every run.
"""

import copy
import functools
import hashlib
import inspect
import json
import math
import signal
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from fl_lightning.data import FederatedDataModule
from fl_lightning.data.sources.folders import cache_folder
from fl_lightning.models.batch_norm import statistics_of
from fl_lightning.models.pretrained import Pretrained
from fl_lightning.round.client import ClientModule
from fl_lightning.round.participation import Participation
from fl_lightning.run.processes import gather_objects
from fl_lightning.run.version import version_of
from fl_lightning.strategies import Local, Pooled, Strategy

Reference = Literal["local", "pooled"]
KINDS: dict[str, type[Strategy]] = {"local": Local, "pooled": Pooled}
#: Whose classes and functions are known by their names and versions.
_KNOWN = ("fl_lightning", "torch", "torch_geometric", "jsonargparse")


def check_references(names: Sequence[str]) -> None:
    """Refuse what is no reference.

    Raises:
        ValueError: One of them is none, or is there twice.
    """
    if unknown := [name for name in names if name not in KINDS]:
        raise ValueError(f"trainer.references holds {unknown[0]!r}: give local, pooled, or both")
    if len(set(names)) < len(names):
        raise ValueError(f"trainer.references is {list(names)}: give each once")


def results_of(trainer: Any, client: ClientModule, data: FederatedDataModule, strategy: Strategy) -> dict[str, Any]:
    """The metrics of the best round of each of a trainer's references, by the strategy's name; collective.

    Args:
        trainer: A :class:`~fl_lightning.FederatedTrainer`, whose run is put together, and its rounds, precision,
            executor, seed and evaluations are those of the references.
        client: The run's client, whose nets are built.
        data: The run's data.
        strategy: The run's, for the local epochs.
    """
    return {
        KINDS[name].__name__: _result(trainer, _client_for(client, strategy, name), data, strategy, name)
        for name in trainer.references
    }


def heuristics_of(run: Any) -> dict[str, dict[str, float]]:
    """The evaluated clients' metrics by predictions without learning, by name; empty if their task has none.

    Args:
        run: The run, put together; clients whose data are elsewhere have none.
    """
    clients = getattr(run.datamodule, "clients", None)
    if clients is None or any(clients[client] is None for client in run.evaluated_clients):
        return {}
    result: dict[str, dict[str, float]] = run.registry.task.heuristics([clients[c] for c in run.evaluated_clients])
    return result


def _result(
    trainer: Any, client: ClientModule, data: FederatedDataModule, strategy: Strategy, name: str
) -> dict[str, float]:
    epochs = {"num_epochs": strategy.num_epochs, "reset_optimizer": strategy.reset_optimizer}
    reference = KINDS[name](**epochs)  # type: ignore[arg-type]
    given = trainer.participation
    settings = {
        "num_rounds": trainer.num_rounds,
        "evaluate_every": trainer.evaluate_every,
        "monitor": None if trainer.monitor is None else "/".join(trainer.monitor.split("/")[-2:]),  # of its own model
        "monitor_mode": trainer.monitor_mode,
        "precision": trainer.precision,
        "seed": trainer.seed,
    }
    part = {"held_out_fraction": given.held_out_fraction, "evaluation_clients": given.evaluation_clients}
    folder = Path(cache_folder(getattr(data, "cache_dir", None))) / "references"
    key = _key({"name": type(reference).__name__, "local": epochs, **settings, **part}, client, data)
    kept = gather_objects(trainer.fabric, None if key is None else _kept(folder / key))[0]  # what holds for all
    if kept is not None:
        return kept
    with TemporaryDirectory() as temporary:
        made = type(trainer)(
            **settings,
            executor=copy.copy(trainer.executor),
            participation=Participation(**part),
            logger=False,
            default_callbacks=False,
            accelerator="cpu",
            default_root_dir=temporary if key is None else str(folder),
            run_name=key or "reference",
        )
        made.fabric, made.launched = trainer.fabric, True
        result = made.fit(client, data, reference)
        if (received := made.run.interruption.received) is not None:
            signal.raise_signal(received)  # which was meant for the run
        return dict(result)


def _client_for(client: ClientModule, strategy: Strategy, name: str) -> ClientModule:
    """A copy of the run's client; a plain one with its net and optimizer where the strategy has a class of its own."""
    if type(client) is ClientModule or strategy.client_class is ClientModule:
        result = copy.copy(client)
        result._modules = {}
    else:
        result = ClientModule(
            **_own_parts(client),
            gradient_clip_val=client.gradient_clip_val,
            running_statistics=client.running_statistics,
            metrics=list(client.metrics),
            privacy=client.privacy,
            lr_scheduler=client.lr_scheduler,
        )
    if name == "pooled" and any(map(statistics_of, client.nets)):
        result.running_statistics = "shared"
    return result


def _own_parts(client: ClientModule) -> dict[str, Any]:
    """The net and the optimizer that the user chose; None for each that is the strategy's."""
    return {
        "net": client.net_factories if client.has_own_net else None,
        "optimizer": client.optimizer_factory if client.has_own_optimizer else None,
    }


def _key(facts: Mapping[str, Any], client: ClientModule, data: FederatedDataModule) -> str | None:
    """A digest of all that a reference is made of; None where that is not known."""
    names = ("gradient_clip_val", "running_statistics", "metrics", "privacy", "lr_scheduler")
    module = {name: getattr(client, name) for name in names}
    try:
        made_of = _plain({**facts, **module, **_own_parts(client), "client": type(client)})
    except LookupError:
        return None
    contents = [zlib.crc32(each.inputs.contiguous().numpy().data) for each in data.clients]
    drawing = data.drawing.plain if hasattr(data, "drawing") else None
    source = type(getattr(data, "source", None)).__name__
    settings = {"data.source": source, **{f"data.{name}": value for name, value in (drawing or {}).items()}}
    everything = [made_of, data.registry.partition_hash, contents, drawing, version_of(facts["name"], settings)]
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()[:20]


def _plain(value: Any) -> Any:
    """A value as JSON.

    Raises:
        LookupError: It is, or holds, an object of which nobody knows what it computes.
    """
    if value is Pretrained:
        raise LookupError(value)  # what is in its file may change
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, functools.partial):
        return [_plain(value.func), _plain(value.args), _plain(value.keywords)]
    is_named = (inspect.isclass(value) or inspect.isfunction(value)) and "<" not in value.__qualname__
    if is_named and value.__module__.partition(".")[0] in _KNOWN:
        return f"{value.__module__}.{value.__qualname__}"
    raise LookupError(value)


def _kept(folder: Path) -> dict[str, float] | None:
    """The metrics of a reference that was trained to its end; None where there is none."""
    for path in sorted(folder.glob("version_*/result.json")):
        try:
            content = json.loads(path.read_text())
            if content["status"] == "finished":
                return {name: math.nan if value is None else float(value) for name, value in content["result"].items()}
        except (OSError, ValueError, LookupError, TypeError, AttributeError):  # a damaged one is trained again
            continue
    return None
