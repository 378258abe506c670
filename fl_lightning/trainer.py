"""The federated trainer: a round loop on Lightning Fabric that owns evaluation, callbacks, loggers and checkpoints.

Every process holds a share of the clients and all processes compute the same server step on the gathered payloads, so
there is no server process to lose. Its rounds are in :mod:`fl_lightning.round_loop`.
"""

import importlib
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning import LightningDataModule
from lightning.fabric import Fabric
from lightning.fabric.utilities.exceptions import MisconfigurationException
from rich import box
from rich.table import Table
from torch import Tensor

from fl_lightning.callback import Callback, check_hooks
from fl_lightning.counts import Counted
from fl_lightning.data import FederatedDataModule, PartitionTable
from fl_lightning.executors import Executor, StackedExecutor
from fl_lightning.executors.hooks import check_is_client
from fl_lightning.round.client import ClientModule
from fl_lightning.round.participation import Participation
from fl_lightning.round.selection import Selection
from fl_lightning.round_loop import RoundLoop
from fl_lightning.run import checkpoint, result, settings, state
from fl_lightning.run.assembly import Run, assemble, prepare_data, start_clients
from fl_lightning.run.choice import choose_checkpoint
from fl_lightning.run.description import write_configuration
from fl_lightning.run.folder import find_checkpoint, new_run_folder, run_folder_of
from fl_lightning.run.lock import RunLock
from fl_lightning.run.loggers import AnyLogger, CSVLogger, RunLogger, TensorBoardLogger
from fl_lightning.run.processes import check_cores, gather_objects, leave_at_exit
from fl_lightning.run.profiling import RoundTrace
from fl_lightning.run.renamed import renamed
from fl_lightning.strategies import Strategy

if TYPE_CHECKING:
    from pandas import DataFrame

_DTYPES = {
    "32-true": torch.float32,
    "32": torch.float32,
    "bf16-mixed": torch.float32,
    "bf16-true": torch.bfloat16,
    "64-true": torch.float64,
    "64": torch.float64,
}


#: What NumPy takes too.
LARGEST_SEED = 2**32 - 1

#: What the arguments of the verbs were called before.
_RENAMED = {"model": "client", "datamodule": "data", "algorithm": "strategy"}


class FederatedTrainer(RoundLoop, Counted):
    """Trains a federation.

    Args:
        num_rounds: Rounds of training (R).
        executor: How the clients of a process are run; the stacked executor by default.
        participation: Who takes part in a round; everyone by default.
        evaluate_every: Rounds between evaluations; the last round is always evaluated.
        evaluate_union: Also score every model on the examples of all training clients together (``union/...``; with
            FedAvg and its kin the four ways of OpenFGL), which takes as many times as long as there are clients.
        monitor: The validation metric that chooses the reported round; None for the model's own choice.
        monitor_mode: Whether ``max`` or ``min`` of it is best; None where the client's class says it
            (``metric_directions``).
        accelerator: As in Lightning: ``auto``, ``cpu``, ``gpu``, ...
        devices: As in Lightning: number or list of devices on each node.
        num_nodes: Machines.
        precision: ``32-true`` (32), ``bf16-mixed``, ``bf16-true`` or ``64-true`` (64).
        strategy: Fabric's launch strategy, for example ``auto`` or ``ddp``. (The algorithm is another argument.)
        callbacks: Callbacks, in the order they are called.
        default_callbacks: Add the usual ones (communication ledger, checkpoints, report, progress bar) where none of
            the class is given.
        logger: Loggers, with a CSV file in the run's folder beside them; true for CSV and TensorBoard, false or null
            for none.
        default_root_dir: Folder of all runs.
        run_name: Folder of this run's versions in it.
        seed: Root of every random draw of the training (the data module has its own).

    Raises:
        ValueError: A value is out of its range.
    """

    settings_prefix = "trainer."

    def __init__(
        self,
        *,
        num_rounds: int = 100,
        executor: Executor | None = None,
        participation: Participation | None = None,
        evaluate_every: int = 1,
        evaluate_union: bool = False,
        monitor: str | None = None,
        monitor_mode: Literal["max", "min"] | None = None,
        accelerator: str = "auto",
        devices: list[int] | int | str = 1,
        num_nodes: int = 1,
        precision: Literal[64, 32] | str = "32-true",
        strategy: str = "auto",
        callbacks: list[Callback] | Callback | None = None,
        default_callbacks: bool = True,
        logger: list[AnyLogger] | AnyLogger | bool | None = True,
        default_root_dir: str = "runs",
        run_name: str = "federation",
        seed: int = 0,
    ) -> None:
        if not 0 <= seed <= LARGEST_SEED:
            raise ValueError(f"seed_everything (the trainer's seed) must be in [0, {LARGEST_SEED}], got {seed}")
        for name, value in {"num_rounds": num_rounds, "evaluate_every": evaluate_every}.items():
            if value < 1:
                raise ValueError(f"trainer.{name} must be at least 1, got {value}")
        precision = str(precision)  # Lightning takes 32 and 64, too
        if precision not in _DTYPES:
            raise ValueError(f"trainer.precision must be one of {', '.join(sorted(_DTYPES))}, got {precision!r}")
        if str(accelerator) in ("gpu", "cuda") and not torch.cuda.is_available():
            raise ValueError(f"trainer.accelerator is {accelerator!r}, but there is no GPU here: use cpu or auto")
        self.num_rounds = num_rounds
        self.executor = executor or StackedExecutor()
        self.participation = participation or Participation()
        self.evaluate_every = evaluate_every
        self.evaluate_union = evaluate_union
        self.precision = precision
        self.dtype = _DTYPES[precision]
        self.callbacks = [] if callbacks is None else [*_listed(callbacks)]
        if default_callbacks:
            self.callbacks += _defaults_beside(self.callbacks)
        self.logger = logger if isinstance(logger, bool) else _listed(logger or [])
        if not isinstance(self.logger, bool) and not all(hasattr(each, "log_metrics") for each in self.logger):
            raise ValueError(
                f"trainer.logger is {logger!r}: give loggers of Lightning's, true for files, false for none"
            )
        if Path(run_name).is_absolute() or ".." in Path(run_name).parts:
            raise ValueError(f"trainer.run_name is {run_name!r}: give the name of a folder in trainer.default_root_dir")
        self.root = Path(default_root_dir) / run_name
        self.seed = seed
        self._given = {"accelerator": accelerator, "devices": devices, "num_nodes": num_nodes, "strategy": strategy}
        self.config = ""
        self.config_sources: tuple[str, ...] = ()
        try:
            self.fabric = Fabric(
                accelerator=accelerator,
                devices=devices,
                num_nodes=num_nodes,
                strategy=strategy,
                precision=precision,  # type: ignore[arg-type]
            )
        except (TypeError, ValueError, RuntimeError, ImportError, MisconfigurationException) as error:
            raise ValueError(
                f"trainer.devices is {devices!r}, trainer.accelerator {accelerator!r}, trainer.num_nodes {num_nodes}, "
                f"trainer.strategy {strategy!r}: {error}"
            ) from error
        check_cores(self.fabric.accelerator, self.fabric.world_size // num_nodes)
        self.launched = False
        self.started = False
        self.monitor, self.monitor_mode = monitor, monitor_mode
        self._run: Run | None = None

    @property
    def history(self) -> "DataFrame":
        """The figures of each round that is over: a row a round, its number the index.

        ``trainer.run.history`` has them as dictionaries.
        """
        from pandas import DataFrame

        return DataFrame(self.run.history, columns=None if self.run.history else ["round"]).set_index("round")

    def _repr_mimebundle_(self, *args: Any, **kwargs: Any) -> dict[str, str]:
        """What a notebook shows: the settings, or what the run came to."""
        table = Table(
            title="FederatedTrainer" if not self.has_run else type(self.run.strategy).__name__, box=box.SIMPLE
        )
        table.add_column("")
        table.add_column("", justify="right")
        rows: dict[str, Any] = {"num_rounds": self.num_rounds, "seed": self.seed, "device": str(self.fabric.device)}
        if self.has_run:
            result = self.run.selection.result
            rows = {name: f"{value:.4g}" for name, value in result.items() if f"{name}_weighted" in result}
            rows = {"rounds": self.run.round_idx, **rows, "folder": self.run.folder}
        for row in rows.items():
            table.add_row(*map(str, row))
        return table._repr_mimebundle_((), ())

    # ------------------------------------------------------------------ the four verbs

    @renamed(**_RENAMED)
    def fit(
        self,
        client: ClientModule | None = None,
        data: FederatedDataModule | None = None,
        strategy: Strategy | None = None,
        ckpt_path: str | None = None,
        profile: bool = False,
        resume_with_changes: bool = False,
    ) -> dict[str, float]:
        """Train the federation.

        Args:
            client: The client module; every client gets its own copy. None for the strategy's ``client_class``; a net
                and an optimizer that it was not given are the strategy's too.
            data: The clients' data.
            strategy: The algorithm. (The trainer's own ``strategy`` is Fabric's.)
            ckpt_path: Checkpoint to continue from: a path, ``last`` (of the newest run of these settings in
                ``run_name``: of the same data and partition, strategy, net and seed; without any run there: from the
                start) or ``best``.
            profile: Write ``trace.json`` (``torch.profiler``, two rounds) and ``profile.csv`` (where the time of the
                rounds went) into the run's folder.
            resume_with_changes: Continue the checkpoint though settings are not those it was made with; they are named.

        Returns:
            The figures of the round that validation chose, new clients' under ``new/``, and ``test/max_over_rounds``.

        Raises:
            ValueError: There are no data or no strategy; a setting does not fit the data; the checkpoint is of another
                run, of other settings or damaged; or another process is writing the run.
            ClientFailure: A client failed and ``participation.on_failure`` is ``stop``.
            TooFewAnswers: ``participation.max_void_rounds`` rounds in a row had too few answers.
        """
        client, data, strategy = _complete(client, data, strategy)
        meant = find_checkpoint(self.root, ckpt_path, required=ckpt_path not in (None, "last"))
        run = self._assemble(client, data, strategy)
        path = self._open_folder(meant)
        with self._lock(run.folder):
            if path is not None:
                changes: Literal["take", "refuse"] = "take" if resume_with_changes else "refuse"
                state.restore(run, self.callbacks, *_read(path, ckpt_path), changes=changes)
                run.checkpoints.add(path)
            self._start_loggers()
            self._keep_settings()
            run.trace = RoundTrace(run.folder / f"trace{self.fabric.global_rank or ''}.json") if profile else None
            try:
                self._call("on_fit_start")
                self.started = True
                self._run_rounds(resumed=path is not None)
                self._call("on_fit_end")
                self._write_profile()
            except BaseException as error:
                self._call("on_exception", error)
                self._end(error)
                raise
            self._end(None)
        return run.selection.result

    @renamed(**_RENAMED)
    def validate(
        self,
        client: ClientModule | None = None,
        data: FederatedDataModule | None = None,
        strategy: Strategy | None = None,
        ckpt_path: str | None = None,
    ) -> dict[str, float]:
        """Evaluate a checkpoint on validation.

        Args:
            client: The client module. What is None here is that of the last fit; without one, of the client, the
                strategy's.
            data: The clients' data.
            strategy: The algorithm.
            ckpt_path: A path, ``last`` or ``best`` (of the newest run of these settings in ``run_name``). Left out it
                is ``best``; after a fit without checkpoints the models as the last round left them.
        """
        return self._evaluate_checkpoint(client, data, strategy, ckpt_path, "val/")

    @renamed(**_RENAMED)
    def test(
        self,
        client: ClientModule | None = None,
        data: FederatedDataModule | None = None,
        strategy: Strategy | None = None,
        ckpt_path: str | None = None,
    ) -> dict[str, float]:
        """Evaluate a checkpoint on test; new clients join it first.

        The arguments are those of :meth:`validate`.
        """
        return self._evaluate_checkpoint(client, data, strategy, ckpt_path, "test/")

    @renamed(**_RENAMED)
    def predict(
        self,
        client: ClientModule | None = None,
        data: FederatedDataModule | None = None,
        strategy: Strategy | None = None,
        ckpt_path: str | None = None,
    ) -> dict[int, Tensor]:
        """Predict every node or example of every training client with a checkpoint.

        The arguments are those of :meth:`validate`.

        Returns:
            Class probabilities, or predicted targets, by client, (N_i, num_outputs).
        """
        run = self._restore(client, data, strategy, ckpt_path)
        evaluation = run.strategy.evaluations(run.training_clients)[""]
        predicted = run.executor.predict(evaluation, run.training_clients, _last_round(run))
        predictions: dict[int, Tensor] = {}
        for part in gather_objects(self.fabric, predicted):
            predictions.update(part)
        return {client: predictions[client].cpu() for client in sorted(predictions)}

    @renamed(datamodule="data")
    def data(self, data: FederatedDataModule, csv: str | None = None, picture: str | None = None) -> PartitionTable:
        """Describe the clients: sizes, classes, heterogeneity; of graphs also edges, clustering, non-IIDness.

        Args:
            data: The clients' data.
            csv: File to write the table to.
            picture: PNG file to draw the label distribution of each client to.
        """
        data.setup()
        table = data.statistics()
        if csv is not None:
            table.to_csv(csv)
        if picture is not None:
            table.plot_labels(picture)
        return table

    # ------------------------------------------------------------------ setting up

    def launch(self) -> None:
        """Start the other processes, once."""
        if not self.launched:
            self.fabric.launch()
            leave_at_exit()
            self.launched = True

    def _assemble(self, client: ClientModule, data: FederatedDataModule, strategy: Strategy) -> Run:
        """Begin a run; its folder comes when everything is in order (:meth:`_open_folder`)."""
        self.launch()
        self.started = False
        for callback in self.callbacks:
            check_hooks(callback)
        if self.evaluate_union and strategy.needs_own_examples:
            raise ValueError(
                f"trainer.evaluate_union is true, but {type(strategy).__name__}'s models take what is kept of each "
                "client's own nodes, so they cannot be scored on others': leave it false, or choose another strategy"
            )
        client.take_task(prepare_data(self.fabric, data).task)
        self._run = assemble(
            fabric=self.fabric,
            datamodule=data,
            model=client,
            strategy=strategy,
            executor=self.executor,
            participation=self.participation,
            selection=Selection(self.monitor or client.monitor, self.monitor_mode, client.directions()),
            seed=self.seed,
            settings=self._settings(client, strategy),
            config=self.config,
            config_sources=self.config_sources,
            loggers=[] if isinstance(self.logger, bool) else self.logger,
        )
        self.datamodule = data
        clients: tuple[Any, ...] = tuple(data.clients)
        for callback in self.callbacks:
            clients = callback.on_clients(self, clients)
        limit = self.participation.time_limit_seconds
        start_clients(self._run, clients, dtype=self.dtype, time_limit=limit)
        return self._run

    def _open_folder(self, meant: Path | str | None) -> Path | None:
        """Give the run the folder of the checkpoint that is meant, or a new one; returns the checkpoint."""
        run = self.run
        path = choose_checkpoint(run, self.root, meant) if isinstance(meant, str) else meant
        if self.fabric.is_global_zero:
            run.folder = (run_folder_of(path) if path else None) or new_run_folder(self.root)
        run.folder = self.fabric.broadcast(run.folder)
        return path

    def _settings(self, client: ClientModule, strategy: Strategy) -> dict[str, Any]:
        """What can be told of the settings that results depend on."""
        monitor = {"name": self.monitor or client.monitor, "mode": self.monitor_mode}
        trainer = {
            "num_rounds": self.num_rounds,
            "evaluate_every": self.evaluate_every,
            "precision": self.precision,
            "monitor": monitor,
        }
        private = {} if client.privacy is None else {"privacy": client.privacy}
        return settings.of_objects(strategy=strategy, participation=self.participation, trainer=trainer, **private)

    @contextmanager
    def _lock(self, folder: Path) -> Iterator[None]:
        """Keep other processes from writing the run; a folder that nothing was written to goes again.

        Raises:
            ValueError: Another process is writing it.
        """
        lock, refusal = RunLock(folder), ""
        if self.fabric.is_global_zero:
            try:
                lock.acquire()
            except ValueError as error:
                refusal = str(error)
        if refusal := self.fabric.broadcast(refusal):
            raise ValueError(refusal)
        try:
            yield
        finally:
            if self.fabric.is_global_zero:
                lock.release()
                with suppress(OSError):  # it is not empty, as a rule
                    folder.rmdir()

    def _end(self, error: BaseException | None) -> None:
        """Close the loggers and say what the run came to."""
        run = self.run
        with nullcontext() if error is None else suppress(OSError):  # which would hide what ended the run
            for logger in run.loggers:
                if hasattr(logger, "log_result"):
                    logger.log_result(run.selection.result, run.written)
                logger.finalize("success" if error is None else "failed")
            if self.started and self.fabric.is_global_zero:
                result.write(run, error)

    def _write_profile(self) -> None:
        run = self.run
        if run.trace is not None:
            run.trace.close()
            if self.fabric.is_global_zero:
                run.clock.to_csv(run.folder / "profile.csv")

    def _start_loggers(self) -> None:
        run = self.run
        if self.logger is True:
            run.loggers = [CSVLogger(), TensorBoardLogger()]
        elif run.loggers and not any(isinstance(logger, CSVLogger) for logger in run.loggers):
            run.loggers = [CSVLogger(), *run.loggers]
        for logger in run.loggers:
            if isinstance(logger, RunLogger):
                logger.begin(run.folder, run.history)
            getattr(logger, "experiment", None)  # made when it is first asked for, which takes longer than a round

    def _keep_settings(self) -> None:
        """Write the configuration, and give it to the loggers that show settings."""
        run = self.run
        run.written = write_configuration(run, self)
        for logger in run.loggers:
            # TensorBoard's is given them with the result, and what only logs metrics takes none
            if hasattr(logger, "log_hyperparams") and not isinstance(logger, TensorBoardLogger):
                logger.log_hyperparams(run.written)

    def given(self) -> dict[str, Any]:
        """Settings that are kept under other names."""
        kept = {"default_root_dir": str(self.root.parent), "run_name": self.root.name, "default_callbacks": False}
        return {**self._given, **kept}

    # ------------------------------------------------------------------ checkpoints

    def _restore(
        self,
        client: ClientModule | None,
        data: FederatedDataModule | None,
        strategy: Strategy | None,
        ckpt_path: str | None,
    ) -> Run:
        """The run of a checkpoint; that of the last fit as it is, where nothing was written."""
        if client is None and data is None and strategy is None:
            run = self.run
            client, data, strategy = run.model, run.datamodule, run.strategy
            best = run.folder / "checkpoints" / "best.ckpt"
            if ckpt_path is None and not best.is_file():
                warnings.warn("no checkpoint was written: these are the models of the last round", stacklevel=3)
                return run
            ckpt_path = str(best) if ckpt_path in (None, "best") else ckpt_path
        elif self.has_run:
            client, data, strategy = (
                client or self.run.model,
                data or self.run.datamodule,
                strategy or self.run.strategy,
            )
        client, data, strategy = _complete(client, data, strategy)
        ckpt_path = ckpt_path or "best"
        meant = find_checkpoint(self.root, ckpt_path, required=True)
        run = self._assemble(client, data, strategy)
        path = self._open_folder(meant)
        assert path is not None
        state.restore(run, self.callbacks, *_read(path, ckpt_path))
        return run

    def _evaluate_checkpoint(
        self,
        client: ClientModule | None,
        data: FederatedDataModule | None,
        strategy: Strategy | None,
        ckpt_path: str | None,
        split: str,
    ) -> dict[str, float]:
        run = self._restore(client, data, strategy, ckpt_path)
        self.started = True
        metrics = self.evaluate(run.training_clients, round_idx=_last_round(run))
        if run.new_clients:
            metrics |= self._admit_new_clients()
        metrics = {name: value for name, value in metrics.items() if split in name}
        self._call("on_evaluation_end", metrics)
        return metrics


def _complete(
    client: ClientModule | None, data: FederatedDataModule | None, strategy: Strategy | None
) -> tuple[ClientModule, FederatedDataModule, Strategy]:
    """The three of a run, the client being the strategy's where it is None.

    Raises:
        ValueError: There are no data or no strategy, or something else is given in their place.
    """
    if client is not None:
        check_is_client(client)
    kinds = {
        "data": (data, LightningDataModule, "fl_lightning.FederatedDataModule(source, partitioner)"),
        "strategy": (strategy, Strategy, "fl_lightning.strategies.FedAvg()"),
    }
    for name, (given, kind, example) in kinds.items():
        if given is None:
            raise ValueError(f"{name} is missing: give {name}, for example {name}={example}")
        if not isinstance(given, kind):
            called = given.__name__ if isinstance(given, type) else type(given).__name__
            raise ValueError(f"{name} is {called}, which is no {kind.__name__}: give {name}={example}")
    assert data is not None
    assert strategy is not None
    return client or strategy.default_client(), data, strategy


def _last_round(run: Run) -> int:
    """The round after which a checkpoint was written, or the last one of a fit."""
    return max(run.round_idx - 1, 0)


def _defaults_beside(callbacks: Sequence[Callback]) -> list[Callback]:
    """The default callbacks whose class is not among the given ones."""
    defaults: list[Callback] = importlib.import_module("fl_lightning.callbacks").default_callbacks()
    return [each for each in defaults if not any(isinstance(given, type(each)) for given in callbacks)]


def _read(path: Path, ckpt_path: str | None) -> tuple[Path, dict[str, Any]]:
    """A checkpoint's path and content; a damaged ``last`` gives way to an older one."""
    return checkpoint.read_last(path) if ckpt_path == "last" else (path, checkpoint.read(path))


def _listed(items: list[Any] | Any) -> list[Any]:
    return items if isinstance(items, list) else [items]
