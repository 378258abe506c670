"""What a run is between two rounds: the content of a checkpoint, taken from a trainer and given back to one."""

import functools
import importlib.metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.fabric.loggers.logger import Logger

from fl_lightning.callback import Callback
from fl_lightning.round.payload import Payload
from fl_lightning.run import checkpoint
from fl_lightning.run.processes import gather, gather_objects

if TYPE_CHECKING:
    from fl_lightning.trainer import FederatedTrainer


def capture(trainer: "FederatedTrainer") -> dict[str, Any]:
    """The complete state; collective: every process must call it. Its tensors are the trainer's own, not copies."""
    clients = gather(trainer.fabric, trainer.executor.state())
    return {
        "format_version": checkpoint.FORMAT_VERSION,
        "round": trainer.round_idx,
        "strategy": trainer.algorithm.state_dict(),
        "clients": {
            "clients": list(clients.clients),
            "parameters": dict(clients.parameters),
            "signals": dict(clients.signals),
            "holdings": _holdings(trainer),
        },
        "callbacks": {key: callback.state_dict() for key, callback in _keyed_callbacks(trainer).items()},
        "random": checkpoint.random_state(),
        "history": [dict(row) for row in trainer.history],
        "selection": trainer.selection.state_dict(),
        "wandb_id": next((str(id_) for logger in trainer.loggers if (id_ := _wandb_id(logger))), None),
        "config": trainer.config,
        "identity": _identity(trainer),
        "versions": _versions(),
    }


def restore(trainer: "FederatedTrainer", path: Path) -> None:
    """Give a trainer that is set up the state of a checkpoint.

    Raises:
        ValueError: The file cannot be read, or is of another run.
    """
    state = checkpoint.read(path)
    checkpoint.check_identity(path, state["identity"], _identity(trainer))
    clients = state["clients"]
    trainer.algorithm.load_state_dict(state["strategy"])
    trainer.executor.load_holdings(clients["holdings"])
    trainer.executor.load_state(
        Payload(clients=tuple(clients["clients"]), parameters=clients["parameters"], signals=clients["signals"])
    )
    for key, callback in _keyed_callbacks(trainer).items():
        if key in state["callbacks"]:
            callback.load_state_dict(state["callbacks"][key])
    checkpoint.restore_random_state(state["random"])
    trainer.round_idx = state["round"]
    trainer.history = state["history"]
    trainer.selection.load_state_dict(state["selection"])
    for logger in trainer.logger if isinstance(trainer.logger, list) else [trainer.logger]:
        if state["wandb_id"] and hasattr(logger, "continue_run"):
            logger.continue_run(state["wandb_id"])


def _holdings(trainer: "FederatedTrainer") -> dict[int, dict[str, Any]]:
    """What clients hold whose graphs a stage has changed."""
    parts = gather_objects(trainer.fabric, trainer.executor.holdings())
    return {client: fields for part in parts for client, fields in part.items()}


def _identity(trainer: "FederatedTrainer") -> dict[str, str]:
    """What a checkpoint must share with the run that loads it."""
    shapes = "; ".join(
        ", ".join(f"{name} {tuple(p.shape)}" for name, p in net.items()) for net in trainer.architectures
    )
    return {
        "data (partition hash)": trainer.datamodule.partition_hash,
        "strategy": type(trainer.algorithm).__name__,
        "model": shapes,
        "training clients": str(trainer.training_clients),
        "seed": str(trainer.seed),
    }


def _keyed_callbacks(trainer: "FederatedTrainer") -> dict[str, Callback]:
    """Callbacks by class name; the second of a class is ``Name 2``."""
    keyed: dict[str, Callback] = {}
    for callback in trainer.callbacks:
        name = type(callback).__qualname__
        same = sum(type(other) is type(callback) for other in keyed.values())
        keyed[f"{name} {same + 1}" if same else name] = callback
    return keyed


def _wandb_id(logger: Logger) -> str | None:
    """The run id of a W&B logger, None for others."""
    return str(logger.version) if hasattr(logger, "continue_run") and logger.version else None


@functools.cache
def _versions() -> dict[str, str]:
    packages = ("fl-lightning", "lightning", "torch", "torch-geometric")
    return {name: importlib.metadata.version(name) for name in packages}
