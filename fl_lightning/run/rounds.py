"""The rounds of a run: send, work, receive, aggregate, evaluate, log, checkpoint.

:meth:`Rounds.train` runs all rounds, :meth:`Rounds.run_round` a single round, and :meth:`Rounds.exchange` its exchange
of messages.
"""

import functools
import math
import time
import warnings
from collections.abc import Mapping, Sequence

from fl_lightning.executors import StageRequest, StageResult
from fl_lightning.round.inspection import check_models, inspect_upload
from fl_lightning.round.participation import Participation, check_draw
from fl_lightning.round.payload import Payload
from fl_lightning.round.stage import Phase, Stage, StageAddress
from fl_lightning.run import unseen
from fl_lightning.run.assembly import Run
from fl_lightning.run.callback import Hooks, take_numbers
from fl_lightning.run.curve import NUM_OVERFLOWS
from fl_lightning.run.evaluation import Evaluator, epsilons
from fl_lightning.run.failures import Failures, TooFewUpdates
from fl_lightning.run.processes import gather, gather_by_client, gather_objects
from fl_lightning.run.profiling import RoundClock


class Rounds:
    """The rounds of a run that is set up.

    Args:
        run: The run, which has all state.
        hooks: The callbacks.
        participation: Which clients take part in a round.
        num_rounds: Rounds of training (R).
        evaluate_every: Rounds between evaluations; the last round is always evaluated.
        evaluate_union: Whether models are also scored on the examples of all training clients together.
    """

    def __init__(
        self,
        run: Run,
        hooks: Hooks,
        participation: Participation,
        *,
        num_rounds: int,
        evaluate_every: int,
        evaluate_union: bool,
    ) -> None:
        self.run, self.hooks, self.participation = run, hooks, participation
        self.num_rounds, self.evaluate_every = num_rounds, evaluate_every
        self.failures = Failures(run, participation)
        self.evaluate = Evaluator(run, hooks, self.failures, union=evaluate_union)

    def train(self, *, resumed: bool) -> None:
        """Run the remaining rounds, and onboard unseen clients at the end.

        Args:
            resumed: Whether a checkpoint was read, so that the stages before the first round are over.

        Raises:
            ClientFailure: A client failed and ``participation.on_failure`` is ``stop``, or all do in the first round.
            TooFewUpdates: Too few clients responded before the first round, in too many rounds, or in all of them.
        """
        run = self.run
        first = () if resumed else run.strategy.initial_stages()
        if not self.exchange(first, run.training_clients, "initial"):
            raise TooFewUpdates(f"no round can begin, {self.failures.shortage()}")
        self.evaluate.check_monitor()
        run.clock = RoundClock()  # measures only the rounds
        while run.round_idx < self.num_rounds and not run.should_stop:
            self.run_round()
            self.failures.check_failed_rounds()
        self.failures.check_any_round()
        self._warn_without_choice()
        if run.unseen_clients and not run.interrupted:
            run.selection.result.update(unseen.join_chosen_server(run, self.exchange, self.evaluate))

    def run_round(self) -> None:
        """Run one round: draw its clients, exchange messages, evaluate the models; then log and save it."""
        run, start = self.run, time.perf_counter()
        if run.trace is not None:
            run.trace.start_round()
        self.hooks.call("on_round_start")
        drawn = self.participation.draw(run.training_clients, run.round_idx, run.seed)
        check_draw(self.participation, drawn, run.training_clients)
        work_fraction, dropped = drawn
        run.failures, run.dropouts = {}, tuple(run.registry.names[client] for client in dropped)
        run.num_overflows = 0
        is_failed = not self.exchange(run.strategy.stages(run.round_idx), work_fraction, "round")
        metrics: dict[str, float] = dict(run.strategy.metrics())
        take_numbers(metrics, f"strategy {type(run.strategy).__name__}")
        is_last = run.should_stop or run.round_idx + 1 == self.num_rounds
        if is_due := is_last or (run.round_idx + 1) % self.evaluate_every == 0:
            metrics = self._evaluated(metrics)
        metrics |= epsilons(run)
        if run.strategy.federation.has_schedule:
            metrics["learning_rate"] = run.strategy.federation.learning_rate_in(run.round_idx)
        metrics["num_participants"] = len(work_fraction)
        metrics["num_failures"] = len(run.failures)
        metrics["num_dropouts"] = len(run.dropouts)
        metrics |= {NUM_OVERFLOWS: run.num_overflows} if run.num_overflows else {}
        metrics["failed_round"] = int(is_failed)
        with run.clock.part("logging"):
            self.hooks.measured("on_round_end", metrics)
        if run.should_stop and not is_due:  # a callback has just made it the last round
            metrics = self._evaluated(metrics)
        with run.clock.part("logging"):
            metrics["seconds"] = time.perf_counter() - start
            run.history.append({"round": run.round_idx, **metrics})
            for logger in run.loggers:
                logger.log_metrics(metrics, run.round_idx)
        run.round_idx += 1
        if any(gather_objects(run.fabric, run.interruption.received is not None)):
            run.should_stop = run.interrupted = True
        with run.clock.part("checkpoint"):
            self.hooks.call("on_checkpoint_point")
        run.clock.end_round(time.perf_counter() - start)
        if run.trace is not None:
            run.trace.end_round()

    def _evaluated(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The metrics of the round with those of its models, by which the best round is chosen."""
        run = self.run
        with run.clock.part("evaluation"):
            result = {**metrics, **self.evaluate(run.evaluated_clients, whole=True)}
        run.selection.update(run.round_idx, result, run.scores[""])
        unseen.keep_chosen_server(run)
        return result

    def exchange(self, stages: Sequence[Stage], clients: Sequence[int] | Mapping[int, float], phase: Phase) -> bool:
        """Send, work, receive, aggregate: one exchange per stage. A client that fails is left out of later stages.

        Args:
            stages: The stages, in order.
            clients: The clients that take part, with the work fraction of each if not all are 1.
            phase: The phase that the stages belong to.

        Returns:
            False if too few clients are left; the server then aggregates nothing more, and a round fails.
        """
        work_fraction = clients if isinstance(clients, Mapping) else dict.fromkeys(clients, 1.0)
        quorum = 1 if phase == "onboarding" else self.failures.quorum
        began: Payload | None = None  # the models that clients were sent last, possibly in an earlier stage
        for stage in stages:
            if len(work_fraction) < quorum:
                return False
            payload = self._send(stage, work_fraction)
            began = payload if payload is not None and payload.parameters else began
            upload, failures = self._receive(stage, self._work(stage, phase, work_fraction, payload), began)
            self.failures.report(failures, f"in stage {stage.name!r} {self._when(phase)}", len(work_fraction))
            work_fraction = {client: share for client, share in work_fraction.items() if client not in failures}
            if phase != "onboarding" and len(work_fraction) < quorum:
                return False
            self._aggregate(stage, phase, upload)
        return True

    def _send(self, stage: Stage, work_fraction: Mapping[int, float]) -> Payload | None:
        with self.run.clock.part("server"):
            payload = self.run.strategy.configure(stage, tuple(work_fraction))
            check_models(payload, self.run.registry.names)
        self.hooks.call("on_send", stage, payload)
        return payload

    def _work(
        self, stage: Stage, phase: Phase, work_fraction: Mapping[int, float], payload: Payload | None
    ) -> StageResult:
        address = StageAddress(phase=phase, round_idx=self.run.round_idx, name=stage.name)
        stops = self.participation.on_failure == "stop"
        request = StageRequest(
            stage=stage, address=address, work_fraction=work_fraction, payload=payload, until_failure=stops
        )
        done = functools.partial(self.hooks.call, "on_clients_done", stage)
        with self.run.clock.part("clients"):
            return self.run.executor.run(request, done)

    def _receive(self, stage: Stage, result: StageResult, began: Payload | None) -> tuple[Payload, dict[int, str]]:
        """The valid updates of all processes' clients, and why the other updates are missing."""
        run = self.run
        with run.clock.part("payloads"):
            upload = gather(run.fabric, result.upload)
            failures = gather_by_client(run.fabric, result.failures)
            sent = upload.clients
            upload = self.hooks.passed("on_upload", stage, upload)
            failures |= dict.fromkeys(sorted(set(sent).difference(upload.clients)), "its update was lost")
            limit = self.participation.max_update_norm
            upload, rejected, unusual = inspect_upload(
                upload, stage, run.architectures, sent=began, max_update_norm=limit
            )
            self._warn_once(unusual)
        return upload, failures | rejected

    def _aggregate(self, stage: Stage, phase: Phase, upload: Payload) -> None:
        with self.run.clock.part("server"):
            (self.run.strategy.onboard if phase == "onboarding" else self.run.strategy.aggregate)(stage, upload)
        self.hooks.call("on_stage_end", stage, upload)

    def _warn_once(self, unusual: Mapping[int, str]) -> None:
        """Warn of the first client whose update is aggregated although it outweighs all others; count the rest."""
        run, is_first = self.run, not self.run.unusual
        run.unusual |= unusual.keys()
        if unusual and is_first and run.fabric.is_global_zero:
            client = min(unusual)
            warnings.warn(
                f"{run.registry.names[client]} in round {run.round_idx}: {unusual[client]}; it is aggregated "
                "(participation.max_update_norm would leave it out, robust aggregation bounds what it does), and "
                "clients like it are only counted from now on",
                stacklevel=2,
            )

    def _warn_without_choice(self) -> None:
        """Warn if no round could be chosen, although there are validation examples."""
        run, chosen = self.run, self.run.selection
        has_none = chosen.best_value is not None and math.isnan(chosen.best_value)
        if has_none and run.datamodule.has_validation and run.fabric.is_global_zero:
            warnings.warn(
                f"{chosen.monitor} has no value in any round, so that no best round can be chosen: the last one is "
                "reported (set trainer.monitor to another metric, such as val/loss, or give clients more validation "
                "examples with data.splitter.val)",
                stacklevel=2,
            )

    def _when(self, phase: Phase) -> str:
        """A phase in words."""
        if phase == "round":
            return f"round {self.run.round_idx}"
        return "before round 0" if phase == "initial" else "while unseen clients joined"
