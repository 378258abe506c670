"""The state of a run between two rounds: the content of a checkpoint, captured from a run and restored to one."""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from lightning.fabric.loggers.logger import Logger
from yaml import YAMLError

from fl_lightning.round.client_draws import MANY_CLIENTS
from fl_lightning.round.payload import Payload
from fl_lightning.run import checkpoint, settings
from fl_lightning.run.assembly import Run
from fl_lightning.run.callback import Callback, WrongSetting
from fl_lightning.run.processes import gather, gather_by_client
from fl_lightning.strategies.server_state import pack

#: Parts of settings from Python that older checkpoints do not have.
_LATER = ("model", "data", "trainer.callbacks")
#: What a checkpoint has, by name.
_KINDS: dict[str, type] = {
    "round": int,
    **dict.fromkeys(("identity", "clients", "strategy", "callbacks", "random", "num_failures", "selection"), dict),
    **dict.fromkeys(("history", "changes"), list),
}


def capture(run: Run, callbacks: Sequence[Callback]) -> dict[str, Any]:
    """The complete state; collective: every process must call it. Its tensors are the run's own, not copies."""
    clients = gather(run.fabric, run.executor.lasting_state())
    return {
        "format_version": checkpoint.FORMAT_VERSION,
        "round": run.round_idx,
        "strategy": run.strategy.state_dict(),
        "clients": {
            "clients": list(clients.clients),
            "parameters": dict(clients.parameters),
            "signals": dict(clients.extras),
            "holdings": gather_by_client(
                run.fabric, run.executor.rewritten_data()
            ),  # the data of clients whose graphs a stage has changed
        },
        "callbacks": {key: _state_of(callback) for key, callback in _keyed(callbacks).items()},
        "random": checkpoint.random_state(),
        "history": [dict(row) for row in run.history],
        "num_failures": dict(run.num_failures),
        "unusual": sorted(run.unusual),
        "selection": run.selection.state_dict(),
        "best_server": run.best_server,
        "wandb_id": next((str(id_) for logger in run.loggers if (id_ := _wandb_id(logger))), None),
        "config": run.config,
        "config_file": run.config_file,
        "settings": run.settings,
        "changes": list(run.changes),
        "identity": identity(run),
        "versions": versions(),
    }


def save(run: Run, callbacks: Sequence[Callback], path: Path) -> None:
    """Write the complete state; collective: every process must call it."""
    path = Path(path)
    complete = capture(run, callbacks)
    if run.fabric.is_global_zero:
        checkpoint.write(path, complete)
    run.checkpoints.add(path)
    run.fabric.barrier()


def restore(
    run: Run,
    callbacks: Sequence[Callback],
    path: Path,
    state: Mapping[str, Any],
    *,
    changes: Literal["ignore", "refuse", "take"] = "ignore",
) -> None:
    """Give a run that is set up the state of a checkpoint.

    Args:
        run: The run.
        callbacks: The trainer's callbacks.
        path: Path of the checkpoint, for messages.
        state: Content of the checkpoint.
        changes: What to do about settings that differ from the checkpoint's.

    Raises:
        ValueError: The checkpoint belongs to another run, was made with other settings, or is not as runs write it.
    """
    for name, kind in _KINDS.items():
        if not isinstance(state.get(name), kind) or state["round"] < 0:
            raise _other(path, f"{name} is {str(state.get(name))[:40]!r}")
    checkpoint.check_identity(path, state["identity"], identity(run))
    run.changes = list(state["changes"])
    if changes != "ignore":
        _check_settings(run, path, state, take=changes == "take")
    run.strategy.load_state_dict(state["strategy"])
    clients = state["clients"]
    with _telling(path, "clients"):
        run.executor.load_rewritten_data(clients["holdings"])
        run.executor.load_state(
            Payload(clients=tuple(clients["clients"]), parameters=clients["parameters"], extras=clients["signals"])
        )
    for key, callback in _keyed(callbacks).items():
        if key in state["callbacks"]:
            callback.load_state_dict(state["callbacks"][key])
    with _telling(path, "random"):
        checkpoint.restore_random_state(state["random"])
    run.round_idx = state["round"]
    run.history = state["history"]
    run.num_failures = dict(state["num_failures"])
    with _telling(path, "unusual"):
        run.unusual = set(state.get("unusual", ()))  # which older checkpoints do not tell
    run.config_file = state["config_file"]
    if others := sorted(set(state["selection"]) - set(run.selection.state_dict())):
        raise _other(path, f"selection has {others[0]!r}")
    with _telling(path, "selection"):
        _restore_selection(run, path, state)
    for logger in run.loggers:
        if state["wandb_id"] and hasattr(logger, "continue_run"):
            logger.continue_run(state["wandb_id"])


def _restore_selection(run: Run, path: Path, state: Mapping[str, Any]) -> None:
    """Restore the choice of the best round, by the monitored metric of this run.

    Raises:
        ValueError: Another metric was monitored, by which another server was kept for unseen clients.
    """
    saved, chosen = state["selection"], run.selection
    chosen.load_state_dict(saved, run.history)
    run.best_server = state["best_server"]
    if chosen.follows(saved) or not run.history:
        return
    if run.best_server is not None and chosen.best_round != saved["best_round"]:
        raise ValueError(
            f"checkpoint {path} has the server of round {saved['best_round']} for unseen clients, the best by "
            f"{saved['monitor']}; by {chosen.monitor} it would be another round's: leave trainer.monitor and "
            "trainer.monitor_mode as they were"
        )
    if run.fabric.is_global_zero:
        warnings.warn(
            f"rounds were chosen by {saved['monitor']}; the best round is chosen anew by {chosen.monitor}, and each "
            f"client's own among the rounds from {run.round_idx} on",
            stacklevel=4,
        )


@contextlib.contextmanager
def _telling(path: Path, part: str) -> Iterator[None]:
    """Name the part of a checkpoint that is not as runs write it; what users' classes raise is not caught here."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, RuntimeError, OverflowError) as error:
        raise _other(path, f"{part}: {type(error).__name__}") from error


def _other(path: Path, why: str) -> ValueError:
    return ValueError(f"checkpoint {path} was not written by a run of this package ({why}): give another file")


def _check_settings(run: Run, path: Path, state: Mapping[str, Any], *, take: bool) -> None:
    """Refuse settings that differ from the checkpoint's, or note them as changes; more rounds are only noted."""
    run.changes += _noted(state, settings.extension(*_compared(run, state)))
    result = setting_differences(run, state)
    if not result:
        return
    if not take:
        raise ValueError(
            f"checkpoint {path} was made with other settings; {'; '.join(result)}. Use the configuration it was made "
            "with (config.yaml beside it), or take the changes with --resume_with_changes"
        )
    run.changes += _noted(state, result)
    if run.fabric.is_global_zero:
        warnings.warn(f"resumed with other settings; {'; '.join(result)}", stacklevel=4)


def _noted(state: Mapping[str, Any], changes: Sequence[str]) -> list[str]:
    return [f"from round {state['round']} on: {change}" for change in changes]


def setting_differences(run: Run, state: Mapping[str, Any]) -> list[str]:
    """Settings that change the mathematics and differ from a checkpoint's, one line each."""
    return settings.differences(*_compared(run, state))


def _compared(run: Run, state: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """The settings of a checkpoint and of a run; those of the objects if one of them is from Python."""
    if state["config"] and run.config:
        try:
            return settings.of_config(state["config"]), settings.of_config(run.config)
        except (YAMLError, AttributeError, TypeError) as error:
            raise ValueError(f"the configuration in the checkpoint is none ({type(error).__name__})") from error
    saved = state["settings"]
    return saved, {name: value for name, value in run.settings.items() if name in saved or name not in _LATER}


def identity(run: Run) -> dict[str, str]:
    """What a checkpoint must share with the run that loads it."""
    shapes = "; ".join(", ".join(f"{name} {tuple(p.shape)}" for name, p in net.items()) for net in run.architectures)
    digests = run.registry.data_digests
    sites = {checkpoint.SITES: json.dumps(list(zip(run.registry.names, digests, strict=True)))} if digests else {}
    contents = {checkpoint.CONTENTS: run.registry.contents} if run.registry.contents else {}
    return sites | {
        "data (partition hash)": run.registry.partition_hash,
        "strategy": type(run.strategy).__name__,
        "model": shapes,
        "training clients": _named(run.training_clients),
        "seed": str(run.seed),
        **contents,
    }


def _named(clients: Sequence[int]) -> str:
    """Some clients in words; of very many, a digest."""
    text = str(tuple(clients))
    if len(clients) < MANY_CLIENTS:
        return text
    return f"{len(clients)} clients, SHA-256 {hashlib.sha256(text.encode()).hexdigest()}"


def _state_of(callback: Callback) -> Any:
    """What a checkpoint has of a callback.

    Raises:
        WrongSetting: It has something that could not be read again.
    """
    try:
        return pack(callback.state_dict(), f"{type(callback).__name__}.state_dict()")
    except ValueError as error:
        raise WrongSetting(str(error)) from error


def _keyed(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """Callbacks by class name; the second one of a class is ``Name 2``."""
    keyed: dict[str, Callback] = {}
    for callback in callbacks:
        name = type(callback).__qualname__
        same = sum(type(other) is type(callback) for other in keyed.values())
        keyed[f"{name} {same + 1}" if same else name] = callback
    return keyed


def _wandb_id(logger: Logger) -> str | None:
    """The run id of a W&B logger, None for others."""
    return str(logger.version) if hasattr(logger, "continue_run") and logger.version else None


@functools.cache
def versions() -> dict[str, str]:
    """Versions of the packages that results depend on."""
    packages = ("fl-lightning", "lightning", "torch", "torch-geometric")
    return {name: importlib.metadata.version(name) for name in packages}
