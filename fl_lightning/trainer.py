"""The federated trainer: a round loop on Lightning Fabric that owns evaluation, callbacks, loggers and checkpoints.

Every process holds a share of the clients and all processes compute the same server step on the gathered payloads, so
there is no server process to lose. Read :meth:`FederatedTrainer._run_round` for the life of a round.
"""

import functools
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers.logger import Logger
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from fl_lightning.callback import Callback, check_hooks
from fl_lightning.data import ClientGraph, FederatedDataModule, PartitionTable
from fl_lightning.executors import ByArchitecture, Executor, Outcome, StackedExecutor, Work
from fl_lightning.federation import Federation
from fl_lightning.kernels.randomness import derive_key
from fl_lightning.round.client import ClientModule
from fl_lightning.round.inspection import inspect_upload
from fl_lightning.round.metrics import summarise
from fl_lightning.round.participation import Participation, epochs_of
from fl_lightning.round.payload import Payload
from fl_lightning.round.selection import Selection
from fl_lightning.round.stage import Evaluation, Stage
from fl_lightning.run import checkpoint, state
from fl_lightning.run.allocator import keep_freed_memory
from fl_lightning.run.folder import find_checkpoint, new_run_folder, run_folder_of
from fl_lightning.run.interruption import Interruption
from fl_lightning.run.loggers import RoundCSVLogger, RoundTensorBoardLogger
from fl_lightning.run.processes import gather, gather_objects, leave_at_exit, shard
from fl_lightning.run.profiling import RoundClock, RoundTrace
from fl_lightning.strategies import Strategy

_DTYPES = {
    "32-true": torch.float32,
    "32": torch.float32,
    "bf16-mixed": torch.float32,
    "bf16-true": torch.bfloat16,
    "64-true": torch.float64,
    "64": torch.float64,
}


class ClientFailure(RuntimeError):
    """A client failed and ``participation.on_failure`` is ``stop``."""


class FederatedTrainer:
    """Trains a federation.

    Args:
        num_rounds: Rounds of training (R).
        executor: How the clients of a process are run; the stacked executor by default.
        participation: Who takes part in a round; everyone by default.
        evaluate_every: Rounds between evaluations; the last round is always evaluated.
        monitor: The validation metric that chooses the reported round; None for the model's own choice.
        monitor_mode: Whether ``max`` or ``min`` of it is best; None to go by its name.
        accelerator: As in Lightning: ``auto``, ``cpu``, ``gpu``, ...
        devices: As in Lightning: number or list of devices on each node.
        num_nodes: Machines.
        precision: ``32-true``, ``bf16-mixed``, ``bf16-true`` or ``64-true``.
        strategy: Fabric's launch strategy, for example ``auto`` or ``ddp``. (The algorithm is another argument.)
        callbacks: Callbacks, in the order they are called.
        logger: Loggers; true for CSV and TensorBoard in the run's folder, false for none.
        default_root_dir: Folder of all runs.
        run_name: Folder of this run's versions in it.
        seed: Root of every random draw of the training (the data module has its own).

    Raises:
        ValueError: A value is out of its range.
    """

    def __init__(
        self,
        *,
        num_rounds: int = 100,
        executor: Executor | None = None,
        participation: Participation | None = None,
        evaluate_every: int = 1,
        monitor: str | None = None,
        monitor_mode: Literal["max", "min"] | None = None,
        accelerator: str = "auto",
        devices: list[int] | int | str = 1,
        num_nodes: int = 1,
        precision: str = "32-true",
        strategy: str = "auto",
        callbacks: list[Callback] | Callback | None = None,
        logger: list[Logger] | Logger | bool = True,
        default_root_dir: str = "runs",
        run_name: str = "federation",
        seed: int = 0,
    ) -> None:
        for name, value in {"num_rounds": num_rounds, "evaluate_every": evaluate_every}.items():
            if value < 1:
                raise ValueError(f"trainer.{name} must be at least 1, got {value}")
        if precision not in _DTYPES:
            raise ValueError(f"trainer.precision must be one of {', '.join(sorted(_DTYPES))}, got {precision!r}")
        if str(accelerator) in ("gpu", "cuda") and not torch.cuda.is_available():
            raise ValueError(f"trainer.accelerator is {accelerator!r}, but there is no GPU here: use cpu or auto")
        self.num_rounds = num_rounds
        self.executor = executor or StackedExecutor()
        self.participation = participation or Participation()
        self.evaluate_every = evaluate_every
        self.precision = precision
        self.dtype = _DTYPES[precision]
        self.callbacks = [] if callbacks is None else callbacks if isinstance(callbacks, list) else [callbacks]
        self.logger = logger
        self.root = Path(default_root_dir) / run_name
        self.seed = seed
        self.config = ""
        try:
            self.fabric = Fabric(
                accelerator=accelerator,
                devices=devices,
                num_nodes=num_nodes,
                strategy=strategy,
                precision=precision,  # type: ignore[arg-type]
            )
        except (TypeError, ModuleNotFoundError, MisconfigurationException) as error:
            raise ValueError(f"trainer.devices is {devices!r}, trainer.accelerator {accelerator!r}: {error}") from error
        self.launched = False
        self.started = False
        self.failures: dict[str, str] = {}
        self.interruption = Interruption()
        self.trace: RoundTrace | None = None
        self.monitor, self.monitor_mode = monitor, monitor_mode
        self.selection = Selection()

    # ------------------------------------------------------------------ the four verbs

    def fit(
        self,
        model: ClientModule,
        datamodule: FederatedDataModule,
        algorithm: Strategy,
        ckpt_path: str | None = None,
        profile: bool = False,
    ) -> dict[str, float]:
        """Train the federation.

        Args:
            model: The client module; every client gets its own copy.
            datamodule: The clients' data.
            algorithm: The strategy.
            ckpt_path: Checkpoint to continue from: a path, ``last`` (of the newest run in ``run_name``; none: from the
                start) or ``best``.
            profile: Write ``trace.json`` (``torch.profiler``, two rounds) and ``profile.csv`` (where the time of the
                rounds went) into the run's folder.

        Returns:
            The figures of the round that validation chose, new clients' under ``new/``, and ``test/max_over_rounds``.

        Raises:
            ValueError: A setting does not fit the data, or the checkpoint is of another run.
            ClientFailure: A client failed and ``participation.on_failure`` is ``stop``.
        """
        resume = find_checkpoint(self.root, ckpt_path, required=ckpt_path not in (None, "last"))
        self._setup(model, datamodule, algorithm, run_dir=run_folder_of(resume) if resume else None)
        if resume is not None:
            state.restore(self, resume)
        self._start_loggers()
        self.trace = RoundTrace(self.run_dir / f"trace{self.fabric.global_rank or ''}.json") if profile else None
        self.started = True
        try:
            self._call("on_fit_start")
            with self.interruption:
                if resume is None:
                    self._run_stages(algorithm.initial_stages(), self.training_clients, "before round 0")
                self.clock = RoundClock()  # of the rounds alone
                while self.round_idx < self.num_rounds and not self.should_stop:
                    self._run_round()
                if self.interruption.received is None and self.new_clients:
                    self.selection.result.update(self._admit_new_clients())
            self._call("on_fit_end")
            if self.trace is not None:
                self.trace.close()
                if self.fabric.is_global_zero:
                    self.clock.to_csv(self.run_dir / "profile.csv")
        except BaseException as error:
            self._call("on_exception", error)
            for logger in self.loggers:
                logger.finalize("failed")
            raise
        for logger in self.loggers:
            logger.finalize("success")
        return self.selection.result

    def validate(
        self, model: ClientModule, datamodule: FederatedDataModule, algorithm: Strategy, ckpt_path: str = "best"
    ) -> dict[str, float]:
        """Evaluate a checkpoint on validation."""
        return self._evaluate_checkpoint(model, datamodule, algorithm, ckpt_path, "val/")

    def test(
        self, model: ClientModule, datamodule: FederatedDataModule, algorithm: Strategy, ckpt_path: str = "best"
    ) -> dict[str, float]:
        """Evaluate a checkpoint on test; new clients join it first."""
        return self._evaluate_checkpoint(model, datamodule, algorithm, ckpt_path, "test/")

    def predict(
        self, model: ClientModule, datamodule: FederatedDataModule, algorithm: Strategy, ckpt_path: str = "best"
    ) -> dict[int, Tensor]:
        """Predict every node or example of every training client with a checkpoint.

        Returns:
            Class probabilities, or predicted targets, by client, (N_i, num_outputs).
        """
        self._restore(model, datamodule, algorithm, ckpt_path)
        evaluation = algorithm.evaluations(self.training_clients)[""]
        predictions: dict[int, Tensor] = {}
        for part in gather_objects(self.fabric, self.executor.predict(evaluation, self.training_clients)):
            predictions.update(part)
        return {client: predictions[client].cpu() for client in sorted(predictions)}

    def data(
        self, datamodule: FederatedDataModule, csv: str | None = None, picture: str | None = None
    ) -> PartitionTable:
        """Describe the clients: sizes, classes, heterogeneity; of graphs also edges, clustering, non-IIDness.

        Args:
            datamodule: The clients' data.
            csv: File to write the table to.
            picture: PNG file to draw the label distribution of each client to.
        """
        datamodule.setup()
        table = datamodule.statistics()
        if csv is not None:
            table.to_csv(csv)
        if picture is not None:
            table.plot_labels(picture)
        return table

    # ------------------------------------------------------------------ the life of a round

    def _run_round(self) -> None:
        start = time.perf_counter()
        if self.trace is not None:
            self.trace.start_round()
        self._call("on_round_start")
        effort, dropped = self.participation.draw(self.training_clients, self.round_idx, self.seed)
        self.failures = {self.client_names[client]: "dropped out" for client in dropped}
        self._run_stages(self.algorithm.stages(self.round_idx), effort, f"round {self.round_idx}")
        metrics: dict[str, float] = dict(self.algorithm.metrics())
        if (self.round_idx + 1) % self.evaluate_every == 0 or self.round_idx + 1 == self.num_rounds:
            with self.clock.part("evaluation"):
                metrics |= self.evaluate(self.training_clients)
            self.selection.update(self.round_idx, metrics, self.scores[""])
        metrics["num_participants"] = len(effort)
        metrics["num_failures"] = len(self.failures)
        with self.clock.part("logging"):
            self._call("on_round_end", metrics)
            metrics["seconds"] = time.perf_counter() - start
            self.history.append({"round": self.round_idx, **metrics})
            for logger in self.loggers:
                logger.log_metrics(metrics, self.round_idx)
        self.round_idx += 1
        if any(gather_objects(self.fabric, self.interruption.received is not None)):
            self.should_stop = True
        with self.clock.part("checkpoint"):
            self._call("on_checkpoint_point")
        self.clock.end_round(time.perf_counter() - start)
        if self.trace is not None:
            self.trace.end_round()

    def _run_stages(
        self,
        stages: Sequence[Stage],
        clients: Sequence[int] | Mapping[int, float],
        when: str,
        *,
        newcomers: bool = False,
    ) -> None:
        """Send, work, answer, take in: one exchange a stage. A client that fails is out of the stages that follow."""
        effort = clients if isinstance(clients, Mapping) else dict.fromkeys(clients, 1.0)
        for stage in stages:
            if not effort:
                return
            with self.clock.part("server"):
                payload = self.algorithm.configure(stage, tuple(effort))
            self._call("on_send", stage, payload)
            epochs = {client: epochs_of(share, stage.num_epochs) for client, share in effort.items()}
            silent, self.executor.report = self.executor.report, functools.partial(self._call, "on_clients_done", stage)
            work = Work(stage=stage, round_idx=self.round_idx, num_epochs=epochs, payload=payload)
            with self.clock.part("clients"):
                outcome = self.executor.run(work)
            self.executor.report = silent  # or the trainer would hold itself, and its memory be freed late
            with self.clock.part("payloads"):
                upload, failures = self._take_in(stage, outcome)
            self._report(failures, stage, when)
            effort = {client: share for client, share in effort.items() if client not in failures}
            with self.clock.part("server"):
                (self.algorithm.admit if newcomers else self.algorithm.aggregate)(stage, upload)
            self._call("on_stage_end", stage, upload)

    def _take_in(self, stage: Stage, outcome: Outcome) -> tuple[Payload, dict[int, str]]:
        """What all processes' clients sent, as it arrives and as far as it is sound; why the others are missing."""
        upload = gather(self.fabric, outcome.upload)
        failures = {c: why for part in gather_objects(self.fabric, dict(outcome.failures)) for c, why in part.items()}
        sent = upload.clients
        for callback in self.callbacks:
            upload = callback.on_upload(self, stage, upload)
        failures |= dict.fromkeys(sorted(set(sent).difference(upload.clients)), "its answer was lost")
        upload, rejected = inspect_upload(upload, stage, self.architectures)
        return upload, failures | rejected

    def evaluate(self, clients: Sequence[int], prefix: str = "") -> dict[str, float]:
        """Score the given clients' models as the strategy says; keep the scores in ``self.scores``."""
        metrics: dict[str, float] = {}
        for kind, evaluation in self.algorithm.evaluations(clients).items():
            scores = gather(self.fabric, self.executor.evaluate(evaluation, clients, self.round_idx))
            self.scores[prefix + kind] = scores
            metrics |= summarise(scores, prefix + kind)
        for callback in self.callbacks:
            callback.on_evaluate(self, metrics, prefix)
        return metrics

    def _admit_new_clients(self) -> dict[str, float]:
        """Let the held-out clients join a trained server, and score them."""
        self._run_stages(
            self.algorithm.admission_stages(), self.new_clients, "while new clients joined", newcomers=True
        )
        return self.evaluate(self.new_clients, "new/")

    def _report(self, failures: Mapping[int, str], stage: Stage, when: str) -> None:
        for client, why in failures.items():
            name = self.client_names[client]
            message = f"{name} failed in stage {stage.name!r} {when}: {why}"
            if self.participation.on_failure == "stop":
                raise ClientFailure(f"{message} (participation.on_failure is 'stop')")
            self.failures[name] = why
            if self.fabric.is_global_zero:
                warnings.warn(f"{message}; it is left out", stacklevel=2)

    # ------------------------------------------------------------------ setting up

    def launch(self) -> None:
        """Start the other processes, once."""
        if not self.launched:
            keep_freed_memory()
            self.fabric.launch()
            leave_at_exit()
            self.launched = True

    def _setup(
        self,
        model: ClientModule,
        datamodule: FederatedDataModule,
        algorithm: Strategy,
        *,
        run_dir: Path | None,
    ) -> None:
        self.launch()
        for callback in self.callbacks:
            check_hooks(callback)
        with self.fabric.rank_zero_first():
            datamodule.prepare_data()
        datamodule.setup()
        self.datamodule, self.algorithm = datamodule, algorithm
        if algorithm.needs_graphs and not isinstance(datamodule.clients[0], ClientGraph):
            raise ValueError(
                f"{type(algorithm).__name__} is for clients that hold graphs, but these hold examples: choose a source "
                "of graphs, or another strategy"
            )
        algorithm.check_client(model)
        self.client_names = [client.name for client in datamodule.clients]
        everyone = range(len(self.client_names))
        self.training_clients = self.participation.training_clients(len(everyone), self.seed)
        self.new_clients = tuple(sorted(set(everyone).difference(self.training_clients)))
        self.run_dir = self.fabric.broadcast(run_dir or new_run_folder(self.root))
        with self.fabric.init_module(), torch.random.fork_rng([]):
            torch.manual_seed(derive_key(self.seed, "client", "initialisation"))
            model.build(datamodule.num_features, datamodule.num_outputs)
        if len(model.nets) > 1 and not algorithm.takes_architectures:
            raise ValueError(
                f"model.net lists {len(model.nets)} nets, but {type(algorithm).__name__} needs clients that are alike: "
                "give one net, or a strategy for different architectures (SheafFMTL, Local)"
            )
        self.architectures = tuple(
            {name: p.detach().clone().to(self.fabric.device) for name, p in net.named_parameters()}
            for net in model.nets
        )
        self.initial_parameters = self.architectures[0]
        relation_CC = datamodule.relation_CC
        algorithm.setup(
            Federation(
                num_clients=len(everyone),
                training_clients=self.training_clients,
                num_features=datamodule.num_features,
                parameters=self.initial_parameters,
                seed=self.seed,
                device=self.fabric.device,
                client_names=tuple(self.client_names),
                learning_rate=float(model.configure_optimizers().param_groups[0]["lr"]),
                architectures=self.architectures,
                relation_CC=None if relation_CC is None else relation_CC.to(self.fabric.device),
            )
        )
        clients: tuple[Any, ...] = datamodule.clients
        for callback in self.callbacks:
            clients = callback.on_clients(self, clients)
        shards = shard([client.work for client in clients], self.fabric.world_size)
        collator = datamodule.collator(clients, device=self.fabric.device, dtype=self.dtype)
        if len(model.nets) > 1 and not isinstance(self.executor, ByArchitecture):
            self.executor = ByArchitecture(self.executor)
        self.executor.setup(self.fabric, model, collator, shards[self.fabric.global_rank], seed=self.seed)
        self.selection = Selection(self.monitor or model.monitor, self.monitor_mode)
        self._check_monitor()
        self.round_idx = 0
        self.clock = RoundClock()
        self.should_stop = False
        self.interruption = Interruption()
        self.scores: dict[str, Payload] = {}
        self.history: list[dict[str, float]] = []
        self.loggers: list[Logger] = []

    def _check_monitor(self) -> None:
        """Score one client before anything is trained: the monitored metric must be there."""
        scores = self.executor.evaluate(Evaluation(), self.executor.clients[:1], 0)
        if not self.selection.monitor.endswith(tuple(scores.signals)):
            raise ValueError(
                f"trainer.monitor is {self.selection.monitor!r}, but the model is scored by "
                f"{', '.join(sorted(scores.signals))}"
            )

    def _start_loggers(self) -> None:
        if self.logger is True:
            folder = str(self.run_dir)
            self.loggers = [RoundCSVLogger(folder), RoundTensorBoardLogger(folder, first_round=self.round_idx)]
        elif self.logger:
            self.loggers = self.logger if isinstance(self.logger, list) else [self.logger]
        for logger in self.loggers:
            if isinstance(logger, RoundCSVLogger):
                logger.restart(self.history)
            getattr(logger, "experiment", None)  # made when it is first asked for, which takes longer than a round

    def _call(self, hook: str, *args: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(self, *args)

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """The complete state between two rounds; collective: every process must call it."""
        return state.capture(self)

    def save_checkpoint(self, path: Path) -> None:
        """Write the complete state; collective: every process must call it."""
        state = self.state_dict()
        if self.fabric.is_global_zero:
            checkpoint.write(path, state)
        self.fabric.barrier()

    def _restore(
        self, model: ClientModule, datamodule: FederatedDataModule, algorithm: Strategy, ckpt_path: str
    ) -> None:
        path = find_checkpoint(self.root, ckpt_path, required=True)
        assert path is not None
        self._setup(model, datamodule, algorithm, run_dir=run_folder_of(path))
        state.restore(self, path)

    def _evaluate_checkpoint(
        self, model: ClientModule, datamodule: FederatedDataModule, algorithm: Strategy, ckpt_path: str, split: str
    ) -> dict[str, float]:
        self._restore(model, datamodule, algorithm, ckpt_path)
        self.started = True
        metrics = self.evaluate(self.training_clients)
        if self.new_clients:
            metrics |= self._admit_new_clients()
        metrics = {name: value for name, value in metrics.items() if split in name}
        self._call("on_evaluation_end", metrics)
        return metrics
