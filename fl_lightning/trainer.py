"""The federated trainer, on Lightning Fabric: it sets up runs and owns their callbacks, loggers and checkpoints.

Every process has a share of the clients, and all processes compute the same server step on the gathered payloads, so
there is no server process to lose. The rounds themselves are in :mod:`fl_lightning.run.rounds`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from fl_lightning.counts import Counted
from fl_lightning.data import FederatedDataModule, PartitionTable
from fl_lightning.data.settings import user_path
from fl_lightning.executors import Executor, StackedExecutor
from fl_lightning.files import writing
from fl_lightning.renamed import refuse_lightnings_names, renamed
from fl_lightning.round.client import ClientModule
from fl_lightning.round.participation import Participation
from fl_lightning.round.selection import Selection
from fl_lightning.run import loggers, overview, settings, state, unseen
from fl_lightning.run.assembly import Run, assemble, prepare_data, start_clients
from fl_lightning.run.callback import Callback, Hooks, check_hooks
from fl_lightning.run.choice import open_folder, read_checkpoint
from fl_lightning.run.folder import find_checkpoint
from fl_lightning.run.lock import locked
from fl_lightning.run.loggers import AnyLogger
from fl_lightning.run.metrics import Metrics
from fl_lightning.run.parts import Parts, complete, kept_models_of
from fl_lightning.run.processes import dtype_of, gather_by_client, launch, make_fabric
from fl_lightning.run.recording import recorded
from fl_lightning.run.references import Reference, check_references, heuristics_of, results_of
from fl_lightning.run.rounds import Rounds
from fl_lightning.strategies import Strategy

if TYPE_CHECKING:
    from pandas import DataFrame

#: Former names of the verbs' arguments.
_RENAMED = {"model": "client", "datamodule": "data", "algorithm": "strategy"}


@refuse_lightnings_names
class FederatedTrainer(Counted):
    """Trains a federation.

    Args:
        num_rounds: Rounds of training (R).
        executor: How the clients of a process are run; the stacked executor by default.
        participation: Which clients take part in a round; all of them by default.
        evaluate_every: Rounds between evaluations; the last round is always evaluated.
        evaluate_union: Also score every model on the examples of all training clients together (``union/...``; with
            FedAvg and its variants, the four ways of OpenFGL). The cost grows with the number of clients squared.
        monitor: The validation metric that chooses the best round, such as ``val/acc``, its mean over clients;
            ``val/acc_weighted`` weights clients by their examples, ``val/acc_worst`` is the worst client's. None for
            the model's own choice.
        monitor_mode: Whether ``max`` or ``min`` of it is best; None to use what the client's class declares
            (``metric_directions``).
        accelerator: As in Lightning: ``auto``, ``cpu``, ``gpu``, ...
        devices: As in Lightning: the number or a list of devices on each node.
        num_nodes: Number of machines.
        precision: ``32-true`` (32), ``bf16-mixed``, ``bf16-true`` or ``64-true`` (64).
        strategy: Fabric's launch strategy, for example ``auto`` or ``ddp``. (The algorithm is an argument of ``fit``.)
        callbacks: Callbacks, in the order in which they are called.
        default_callbacks: Add the communication ledger, checkpoints, report and progress bar, unless they are given.
        logger: Loggers beside a CSV file in the run's folder; true for CSV and TensorBoard, false or null for none.
        default_root_dir: Folder of all runs.
        run_name: Subfolder in which the versions of this run are kept.
        seed: Root of every random draw of the training (the data module has its own).
        references: ``local`` or ``pooled`` or both: ``Local`` and ``Pooled`` with the run's settings, trained before
            it unless they are in the cache folder, and shown with it.

    Raises:
        TypeError: ``participation`` or ``executor`` is something else, or a setting is one of Lightning's.
        ValueError: A value is out of range.
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
        references: list[Reference] | None = None,
    ) -> None:
        settings.check_trainer(
            num_rounds=num_rounds,
            evaluate_every=evaluate_every,
            monitor_mode=monitor_mode,
            seed=seed,
            run_name=run_name,
        )
        for name, given, kind, example in (
            ("participation", participation, Participation, "Participation(fraction=0.1)"),
            ("executor", executor, Executor, "SequentialExecutor()"),
        ):
            if not isinstance(given, kind | None):
                raise TypeError(f"trainer.{name} is {given!r}: give an instance, such as {example}")
        self.num_rounds = num_rounds
        self.executor = executor or StackedExecutor()
        self.participation = participation or Participation()
        self.evaluate_every = evaluate_every
        self.evaluate_union = evaluate_union
        self.precision = str(precision)  # Lightning also accepts 32 and 64
        self.dtype = dtype_of(self.precision)
        self.callbacks: list[Callback] = settings.listed(callbacks)
        if default_callbacks:
            from fl_lightning.callbacks import defaults_beside

            self.callbacks += defaults_beside(self.callbacks)
        self.logger = logger if isinstance(logger, bool) else loggers.checked(settings.listed(logger))
        self.root = user_path("trainer.default_root_dir", default_root_dir) / run_name
        self.seed = seed
        self.references = tuple(references or ())
        check_references(self.references)
        self.fabric = make_fabric(accelerator, devices, num_nodes, self.precision, strategy)
        self.monitor, self.monitor_mode = monitor, monitor_mode
        self.launched = self.started = False
        self.config = ""
        self.config_sources: tuple[str, ...] = ()
        self.datamodule: Any = None
        self._given = {"accelerator": accelerator, "devices": devices, "num_nodes": num_nodes, "strategy": strategy}
        self._run: Run | None = None

    @property
    def _hooks(self) -> Hooks:
        return Hooks(self)  # a new one each time: a stored one would keep the trainer alive

    @property
    def run(self) -> Run:
        """The state of the current fit, validation, test or prediction, or of the last one.

        Raises:
            RuntimeError: There has been none yet.
        """
        if self._run is None:
            raise RuntimeError("there is no run yet: call fit first, or test with client, data and strategy")
        return self._run

    @property
    def has_run(self) -> bool:
        """Whether there has been a run."""
        return self._run is not None

    @property
    def should_stop(self) -> bool:
        """Whether the current round is the last; a callback may set it."""
        return self.run.should_stop

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        self.run.should_stop = value

    @property
    def history(self) -> "DataFrame":
        """The metrics of each finished round, one row per round; ``trainer.run.history`` has them as dictionaries."""
        return overview.history(self.run)

    def _repr_mimebundle_(self, *args: Any, **kwargs: Any) -> dict[str, str]:
        """What a notebook shows: the settings, or the results of the run."""
        return overview.table(self, self._run)._repr_mimebundle_((), ())

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
    ) -> Metrics:
        """Train the federation.

        Args:
            client: The client module; every client gets its own copy. None for the strategy's ``client_class``. A
                client module without a net or an optimizer gets the strategy's.
            data: The clients' data.
            strategy: The algorithm. (The trainer's own ``strategy`` is Fabric's.)
            ckpt_path: Checkpoint to continue from: a path, ``last`` or ``best``. The latter two are those of the newest
                run in ``run_name`` with the same data, partition, strategy, net and seed; if there is no run yet,
                training starts from the beginning.
            profile: Write ``trace.json`` (``torch.profiler``, two rounds) and ``profile.csv`` (seconds by part).
            resume_with_changes: Continue even if settings differ from the checkpoint's; the differences are reported.

        Returns:
            The metrics of the best round by validation, those of unseen clients under ``unseen/``, and
            ``test/max_over_rounds``: a dictionary that is shown as a table, and has ``to_frame()``.

        Raises:
            ValueError: The data or the strategy are missing; a setting does not fit the data; the checkpoint belongs
                to another run or other settings, or is damaged; or another process is writing to the run's folder.
            ClientFailure: A client failed and ``participation.on_failure`` is ``stop``, or all do in the first round.
            TooFewUpdates: ``participation.max_failed_rounds`` rounds in a row had too few updates.
        """
        parts = complete(client, data, strategy)
        meant = find_checkpoint(self.root, ckpt_path, required=ckpt_path not in (None, "last"))
        run = self._assemble(*parts)
        run.strategy.federation.learning_rate_in(self.num_rounds - 1)  # a schedule that ends earlier is refused now
        run.references = {**results_of(self, *parts), **heuristics_of(run)}
        path = open_folder(run, self.root, meant)
        with locked(self.fabric, run.folder):
            if path is not None:
                path, content = read_checkpoint(path, ckpt_path)
                changes: Literal["take", "refuse"] = "take" if resume_with_changes else "refuse"
                state.restore(run, self.callbacks, path, content, changes=changes)
                run.checkpoints.add(path)
            with recorded(run, self, self._hooks, profile=profile):
                self._hooks.call("on_fit_start")
                self.started = True
                self._rounds().train(resumed=path is not None)
                self._hooks.call("on_fit_end")
        return Metrics(run.selection.result)

    @renamed(**_RENAMED)
    def validate(
        self,
        client: ClientModule | None = None,
        data: FederatedDataModule | None = None,
        strategy: Strategy | None = None,
        ckpt_path: str | None = None,
    ) -> Metrics:
        """Evaluate a checkpoint on the validation examples.

        Args:
            client: The client module. An argument that is None is that of the last fit.
            data: The clients' data.
            strategy: The algorithm.
            ckpt_path: A path, ``last`` or ``best`` (of the newest run of these settings in ``run_name``). The default
                is ``best``; after a fit without checkpoints, the models as the last round left them.
        """
        return self._evaluate_checkpoint((client, data, strategy), ckpt_path, "val/")

    @renamed(**_RENAMED)
    def test(
        self,
        client: ClientModule | None = None,
        data: FederatedDataModule | None = None,
        strategy: Strategy | None = None,
        ckpt_path: str | None = None,
    ) -> Metrics:
        """Evaluate a checkpoint on the test examples; unseen clients are onboarded first.

        The arguments are those of :meth:`validate`.
        """
        return self._evaluate_checkpoint((client, data, strategy), ckpt_path, "test/")

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
            Class probabilities or predicted targets of each client, (N_i, num_outputs).
        """
        run = self._restore((client, data, strategy), ckpt_path)
        evaluation = run.strategy.evaluations(run.training_clients)[""]
        predicted = run.executor.predict(evaluation, run.training_clients, run.last_round)
        predictions = gather_by_client(self.fabric, predicted)
        return {client: predictions[client].cpu() for client in sorted(predictions)}

    @renamed(datamodule="data")
    def data(self, data: FederatedDataModule, csv: str | None = None, picture: str | None = None) -> PartitionTable:
        """Describe the clients: sizes, classes, heterogeneity; for graphs also edges, clustering, non-IIDness.

        Args:
            data: The clients' data.
            csv: File to which the table is written.
            picture: PNG file for a plot of each client's labels, numbers or links.
        """
        data.setup()
        table = data.statistics()
        for file, write in ((csv, table.to_csv), (picture, table.plot_labels)):
            if file is not None:
                with writing(Path(file)):
                    Path(file).parent.mkdir(parents=True, exist_ok=True)
                    write(file)
        return table

    # ------------------------------------------------------------------ setting up

    def _assemble(self, client: ClientModule, data: FederatedDataModule, strategy: Strategy) -> Run:
        """Begin a run; its folder is created once everything has been checked (:func:`open_folder`)."""
        if not self.launched:
            launch(self.fabric)
            self.launched = True
        self.started = False
        for callback in self.callbacks:
            check_hooks(callback)
        client.take_task(prepare_data(self.fabric, data).task)
        self._run = assemble(
            fabric=self.fabric,
            datamodule=data,
            model=client,
            strategy=strategy,
            executor=self.executor,
            participation=self.participation,
            evaluate_union=self.evaluate_union,
            selection=Selection(self.monitor or client.monitor, self.monitor_mode, client.directions()),
            seed=self.seed,
            settings=settings.of_run(self, client, strategy, data),
            config=self.config,
            config_sources=self.config_sources,
            loggers=[] if isinstance(self.logger, bool) else self.logger,
        )
        self.datamodule = data
        clients = self._hooks.passed("on_clients", data.clients)
        start_clients(self._run, clients, dtype=self.dtype, participation=self.participation)
        return self._run

    def _rounds(self) -> Rounds:
        """The rounds of the current run."""
        settings = {name: getattr(self, name) for name in ("num_rounds", "evaluate_every", "evaluate_union")}
        return Rounds(self.run, self._hooks, self.participation, **settings)

    def given(self) -> dict[str, Any]:
        """Settings that are stored under other names."""
        selected = {"default_root_dir": str(self.root.parent), "run_name": self.root.name, "default_callbacks": False}
        return {**self._given, **selected}

    def evaluate(self, clients: Sequence[int], prefix: str = "", round_idx: int | None = None) -> dict[str, float]:
        """Score the given clients' models as the strategy does (:class:`~fl_lightning.run.evaluation.Evaluator`)."""
        return self._rounds().evaluate(clients, prefix, round_idx)

    def state_dict(self) -> dict[str, Any]:
        """The complete state between two rounds; collective: every process must call it."""
        return state.capture(self.run, self.callbacks)

    def save_checkpoint(self, path: Path) -> None:
        """Write the complete state; collective: every process must call it."""
        state.save(self.run, self.callbacks, path)

    def restored(
        self, client: ClientModule | None, data: FederatedDataModule, strategy: Strategy, *, ckpt_path: str
    ) -> Run:
        """The run of a checkpoint, set up and with its state, of which nothing has been computed yet."""
        return self._restore((client, data, strategy), ckpt_path)

    def _restore(self, parts: Parts, ckpt_path: str | None) -> Run:
        """The run of a checkpoint, or that of the last fit as it is if no checkpoint was written."""
        if all(part is None for part in parts) and (ckpt_path := kept_models_of(self.run, ckpt_path)) is None:
            return self.run
        parts, ckpt_path = complete(*parts, last=self._run), ckpt_path or "best"
        meant = find_checkpoint(self.root, ckpt_path, required=True)
        run = self._assemble(*parts)
        path = open_folder(run, self.root, meant, trains=False)
        assert path is not None
        state.restore(run, self.callbacks, *read_checkpoint(path, ckpt_path))
        return run

    def _evaluate_checkpoint(self, parts: Parts, ckpt_path: str | None, split: str) -> Metrics:
        run = self._restore(parts, ckpt_path)
        self.started = True
        rounds = self._rounds()
        metrics = rounds.evaluate(run.evaluated_clients, round_idx=run.last_round)
        if run.unseen_clients:
            metrics |= unseen.join(run, rounds.exchange, rounds.evaluate)
        chosen = Metrics({name: metrics[name] for name in metrics if split in name})
        self._hooks.call("on_evaluation_end", chosen)
        return chosen
