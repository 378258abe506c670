"""Makes a trainer's federation a remote one."""

from pathlib import Path
from typing import Any

from fl_lightning.relations.topology import Topology
from fl_lightning.remote.channel import Channel
from fl_lightning.remote.data import RemoteData
from fl_lightning.remote.digests import digests_of
from fl_lightning.remote.executor import RemoteExecutor
from fl_lightning.remote.registry import check_at_sites, check_no_references
from fl_lightning.remote.schema import MOST_OUTPUTS
from fl_lightning.remote.secure import DEFAULT_SHARE, check_participation
from fl_lightning.round.payload import Payload
from fl_lightning.run import checkpoint
from fl_lightning.run.callback import Callback, Trainer
from fl_lightning.strategies import Strategy
from fl_lightning.trainer import FederatedTrainer


class SiteStates(Callback):
    """Has sites delete states that no checkpoint refers to; it runs after the callbacks that write checkpoints."""

    def __init__(self) -> None:
        self._seen: dict[Path, tuple[int, set[tuple[int, str]]]] = {}

    def on_fit_start(self, trainer: Trainer) -> None:
        """Keep the states of all existing checkpoints, including those that are not resumed."""
        executor = trainer.run.executor
        assert isinstance(executor, RemoteExecutor)
        for path in _checkpoints(trainer):
            executor.pinned |= _states_in(path)

    def on_checkpoint_point(self, trainer: Trainer) -> None:
        """Check whether checkpoints were written."""
        self._clean(trainer, at_end=False)

    def on_fit_end(self, trainer: Trainer) -> None:
        """Check once more."""
        self._clean(trainer, at_end=True)

    def _clean(self, trainer: Trainer, *, at_end: bool) -> None:
        executor = trainer.run.executor
        assert isinstance(executor, RemoteExecutor)
        files = {path: path.stat().st_mtime_ns for path in _checkpoints(trainer)}
        if {path: written for path, (written, _) in self._seen.items()} == files and not at_end:
            return  # a state that is about to be written may be in memory
        self._seen = {
            path: self._seen[path] if self._seen.get(path, (0,))[0] == written else (written, _states_in(path))
            for path, written in files.items()
        }
        needed = {state for _, states in self._seen.values() for state in states}
        executor.forget(executor.pinned - needed)


def _checkpoints(trainer: Trainer) -> set[Path]:
    """All existing checkpoints: in the run's folder, and those written or read elsewhere."""
    checkpoints = (trainer.run.folder / "checkpoints").glob("[!.]*.ckpt")
    return {path.resolve() for path in (*checkpoints, *trainer.run.checkpoints) if path.exists()}


def _states_in(path: Path) -> set[tuple[int, str]]:
    """Clients and digests of a checkpoint; empty for a damaged one."""
    try:
        clients: dict[str, Any] = checkpoint.read(path)["clients"]
    except ValueError:
        return set()
    return set(digests_of(Payload(clients=tuple(clients["clients"]), extras=clients["signals"])).items())


def federate(
    trainer: FederatedTrainer,
    channel: Channel,
    strategy: Strategy,
    *,
    num_outputs: int | None = None,
    relation_graph: Topology | None = None,
    seed: int = 0,
    retries: int = 1,
    secure: bool = False,
    secure_share: float = DEFAULT_SHARE,
    max_outputs: int = MOST_OUTPUTS,
) -> RemoteData:
    """Make the sites of a channel a trainer's clients.

    Args:
        trainer: Its executor is replaced.
        channel: The channel to the sites.
        strategy: The algorithm, which is passed to ``trainer.fit`` as well.
        num_outputs: Classes of the whole federation; None for as many as the sites have seen.
        relation_graph: Draws or reads the client relation graph; None for none.
        seed: Seed of that draw.
        retries: How often a message without a response is sent again.
        secure: Secure aggregation: the server learns only the weighted sum of the clients' responses, and of metrics.
        secure_share: More than this share of the clients that start a sum must complete it, in [0.5, 1].
        max_outputs: The most outputs that a site's data may have; a site with more is refused.

    Returns:
        The data module for ``trainer.fit``.

    Raises:
        ValueError: A callback needs the clients' data, or has clients do what their strategy does not say; or the
            strategy needs more than sums, or all data in one place; or the clients of a secure sum are to do different
            amounts of work.
    """
    check_at_sites(type(strategy))
    check_no_references(trainer.references)
    if secure:
        check_participation(vars(trainer.participation))
    for callback in trainer.callbacks:
        if callback.needs_data or callback.invents_stages:
            what = (
                "reads or changes the clients' data" if callback.needs_data else "has clients do what no strategy says"
            )
            raise ValueError(
                f"trainer.callbacks: {type(callback).__name__} {what}, and these are at their sites: leave it out"
            )
    data = RemoteData(
        channel,
        strategy,
        num_outputs=num_outputs,
        relation_graph=relation_graph,
        seed=seed,
        retries=retries,
        max_outputs=max_outputs,
    )
    trainer.executor = RemoteExecutor(
        channel, strategy, data, precision=trainer.precision, retries=retries, secure=secure, secure_share=secure_share
    )
    trainer.callbacks = [*trainer.callbacks, SiteStates()]
    return data
