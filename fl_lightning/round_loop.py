"""The rounds of a run. Read :meth:`RoundLoop._run_round` for the life of one."""

import copy
import functools
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric

from fl_lightning.batches.union import UnionCollator
from fl_lightning.executors import Outcome, Work
from fl_lightning.round.inspection import check_models, inspect_upload
from fl_lightning.round.metrics import summarise, summarise_sums
from fl_lightning.round.participation import Participation
from fl_lightning.round.payload import Payload
from fl_lightning.round.stage import Phase, Stage, StageAddress
from fl_lightning.run import checkpoint, state
from fl_lightning.run.assembly import Run
from fl_lightning.run.callback import Callback, WrongSetting
from fl_lightning.run.processes import gather, gather_objects
from fl_lightning.run.profiling import RoundClock


class ClientFailure(RuntimeError):
    """A client failed and ``participation.on_failure`` is ``stop``."""


class TooFewAnswers(RuntimeError):
    """Round after round fewer clients answered than a round needs."""


def gather_failures(fabric: Fabric, outcome: Outcome) -> dict[int, str]:
    """Why clients of any process failed."""
    return {client: why for part in gather_objects(fabric, dict(outcome.failures)) for client, why in part.items()}


def alike(failures: Mapping[int, str], num_clients: int) -> list[list[int]]:
    """Clients by what is one failure: a kind of error and the line of the user's code; others stand alone.

    Where all clients failed with one kind of error in the user's code, it is one whatever the line.
    """
    places = {client: place_of(why) for client, why in failures.items()}
    if len(failures) == num_clients and all(places.values()) and len({place[0] for place in places.values()}) == 1:
        return [list(failures)]
    found: dict[tuple[str, ...], list[int]] = {}
    for client, place in places.items():
        found.setdefault(place or (str(client),), []).append(client)
    return list(found.values())


def place_of(why: str) -> tuple[str, ...]:
    """The kind of error and the line of the user's code that raised it; empty where that raised none."""
    place = getattr(why, "place", "")
    return (why.partition(":")[0], place) if place else ()


class RoundLoop:
    """What a trainer does with a run that is set up: its rounds, stage by stage, and its evaluations.

    Attributes:
        fabric: Device, precision and processes.
        num_rounds: Rounds of training (R).
        evaluate_every: Rounds between evaluations; the last round is always evaluated.
        evaluate_union: Whether models are also scored on the examples of all training clients together.
        participation: Who takes part in a round.
        callbacks: All callbacks, in the order they are called.
        datamodule: Where the present run's clients come from.
        seed: Root of every random draw of the training.
        dtype: Floating point type of batches.
    """

    fabric: Fabric
    num_rounds: int
    evaluate_every: int
    evaluate_union: bool
    participation: Participation
    callbacks: list[Callback]
    datamodule: Any
    seed: int
    dtype: torch.dtype
    _run: Run | None = None

    @property
    def run(self) -> Run:
        """What belongs to the present fit, test or prediction, or to the last one.

        Raises:
            RuntimeError: There was none yet.
        """
        if self._run is None:
            raise RuntimeError("there is no run yet: call fit, validate, test or predict first")
        return self._run

    @property
    def has_run(self) -> bool:
        """Whether there was a run yet."""
        return self._run is not None

    def _run_rounds(self, *, resumed: bool) -> None:
        run = self.run
        with run.interruption:
            first = () if resumed else run.strategy.initial_stages()
            if not self._run_stages(first, run.training_clients, "initial"):
                raise TooFewAnswers(f"no round can begin, {self._shortage()}")
            self._check_monitor()
            run.clock = RoundClock()  # of the rounds alone
            while run.round_idx < self.num_rounds and not run.should_stop:
                self._run_round()
                self._check_void_rounds()
            self._check_any_round()
            if run.interruption.received is None and run.new_clients:
                run.selection.result.update(self._join_the_chosen_server())

    def _check_monitor(self) -> None:
        """Refuse a metric of another model (``gen/val/acc``) that no evaluation has, before anything is trained by it.

        Of the model that is the result the first client's scores have told (``assembly.check_monitor``).
        """
        monitor = self.run.selection.monitor
        if monitor.startswith("val/") or any(monitor in row for row in self.run.history):
            return
        metrics = self.evaluate(self.run.training_clients)
        if monitor not in metrics:
            known = [name for name in metrics if "val/" in name and f"{name}_std" in metrics]
            raise WrongSetting(f"trainer.monitor is {monitor!r}, but there are {', '.join(sorted(known))}")

    def _run_round(self) -> None:
        run, start = self.run, time.perf_counter()
        if run.trace is not None:
            run.trace.start_round()
        self._call("on_round_start")
        effort, dropped = self.participation.draw(run.training_clients, run.round_idx, self.seed)
        run.failures, run.dropouts = {}, tuple(run.roster.names[client] for client in dropped)
        is_void = not self._run_stages(run.strategy.stages(run.round_idx), effort, "round")
        metrics: dict[str, float] = dict(run.strategy.metrics())
        if (run.round_idx + 1) % self.evaluate_every == 0 or run.round_idx + 1 == self.num_rounds:
            with run.clock.part("evaluation"):
                metrics |= self.evaluate(run.training_clients)
            run.selection.update(run.round_idx, metrics, run.scores[""])
            if run.new_clients and run.selection.best_round == run.round_idx:
                run.chosen_server = copy.deepcopy(run.strategy.state_dict())
        metrics |= self._epsilons()
        metrics["num_participants"] = len(effort)
        metrics["num_failures"] = len(run.failures)
        metrics["num_dropouts"] = len(run.dropouts)
        metrics["void"] = int(is_void)
        with run.clock.part("logging"):
            self._call("on_round_end", metrics)
            metrics["seconds"] = time.perf_counter() - start
            run.history.append({"round": run.round_idx, **metrics})
            for logger in run.loggers:
                logger.log_metrics(metrics, run.round_idx)
        run.round_idx += 1
        if any(gather_objects(self.fabric, run.interruption.received is not None)):
            run.should_stop = True
        with run.clock.part("checkpoint"):
            self._call("on_checkpoint_point")
        run.clock.end_round(time.perf_counter() - start)
        if run.trace is not None:
            run.trace.end_round()

    def _run_stages(
        self,
        stages: Sequence[Stage],
        clients: Sequence[int] | Mapping[int, float],
        phase: Phase,
    ) -> bool:
        """Send, work, answer, take in: one exchange a stage. A client that fails is out of the stages that follow.

        Returns:
            False where too few clients are left; the server then takes nothing more in, and a round is void.
        """
        effort = clients if isinstance(clients, Mapping) else dict.fromkeys(clients, 1.0)
        quorum = 1 if phase == "admission" else self._quorum
        began: Payload | None = None  # the models that clients were sent last, maybe in an earlier stage
        for stage in stages:
            if len(effort) < quorum:
                return False
            with self.run.clock.part("server"):
                payload = self.run.strategy.configure(stage, tuple(effort))
                check_models(payload, self.run.roster.names)
            self._call("on_send", stage, payload)
            began = payload if payload is not None and payload.parameters else began
            address = StageAddress(phase=phase, round_idx=self.run.round_idx, name=stage.name)
            stops = self.participation.on_failure == "stop"
            work = Work(stage=stage, address=address, effort=effort, payload=payload, until_failure=stops)
            with self.run.clock.part("clients"):
                outcome = self.run.executor.run(work, functools.partial(self._call, "on_clients_done", stage))
            with self.run.clock.part("payloads"):
                upload, failures = self._take_in(stage, outcome, began)
            self._report(failures, f"in stage {stage.name!r} {self._when(phase)}", len(effort))
            effort = {client: share for client, share in effort.items() if client not in failures}
            if phase != "admission" and len(effort) < quorum:
                return False
            with self.run.clock.part("server"):
                (self.run.strategy.admit if phase == "admission" else self.run.strategy.aggregate)(stage, upload)
            self._call("on_stage_end", stage, upload)
        return True

    def _take_in(self, stage: Stage, outcome: Outcome, began: Payload | None) -> tuple[Payload, dict[int, str]]:
        """What all processes' clients sent, as it arrives and as far as it is sound; why the others are missing."""
        upload = gather(self.fabric, outcome.upload)
        failures = gather_failures(self.fabric, outcome)
        sent = upload.clients
        for callback in self.callbacks:
            upload = callback.on_upload(self, stage, upload)
        failures |= dict.fromkeys(sorted(set(sent).difference(upload.clients)), "its answer was lost")
        limit = self.participation.max_update_norm
        nets = self.run.architectures
        upload, rejected, unusual = inspect_upload(upload, stage, nets, sent=began, max_update_norm=limit)
        self._warn_once(unusual)
        return upload, failures | rejected

    def _warn_once(self, unusual: Mapping[int, str]) -> None:
        """Name clients whose updates are taken in though they outweigh all others; each once in a run."""
        for client in sorted(unusual.keys() - self.run.unusual):
            self.run.unusual.add(client)
            if self.fabric.is_global_zero:
                warnings.warn(
                    f"{self.run.roster.names[client]} in round {self.run.round_idx}: {unusual[client]}; it is taken in "
                    "(participation.max_update_norm would leave it out, robust aggregation bounds what it does)",
                    stacklevel=2,
                )

    def evaluate(self, clients: Sequence[int], prefix: str = "", round_idx: int | None = None) -> dict[str, float]:
        """Score the given clients' models as the strategy says; keep the scores in ``run.scores``.

        Args:
            clients: Whose models.
            prefix: Goes before the metrics' names.
            round_idx: The round whose draws fine-tuning takes; None for the present one.
        """
        metrics: dict[str, float] = {}
        self.run.scored_round = round_idx = self.run.round_idx if round_idx is None else round_idx
        evaluations = self.run.strategy.evaluations(clients)
        for evaluation in evaluations.values():
            check_models(evaluation.payload, self.run.roster.names)
        executor = self.run.executor
        outcomes = dict(executor.evaluate(evaluations, clients, round_idx))
        if self.evaluate_union:
            union = UnionCollator(executor.collator, self.run.training_clients)
            found = executor.evaluate(evaluations, clients, round_idx, collator=union)
            outcomes |= {f"union/{kind}": outcome for kind, outcome in found.items()}
        for kind, outcome in outcomes.items():
            scores = self.run.scores[prefix + kind] = gather(self.fabric, outcome.upload)
            figures = summarise(scores, prefix + kind, self.run.selection.directions)
            metrics |= figures | summarise_sums(outcome.sums, prefix + kind)
            failures = gather_failures(self.fabric, outcome)
            self._report(failures, f"in the evaluation {prefix + kind!r}", len(clients))
        for callback in self.callbacks:
            callback.on_evaluate(self, metrics, prefix)
        return metrics

    def _epsilons(self) -> dict[str, float]:
        """What private training has told so far: ε of each client, and the largest; nothing without it."""
        if self.run.model.privacy is None:
            return {}
        found: dict[int, float] = {}
        for part in gather_objects(self.fabric, self.run.executor.epsilons()):
            found |= part
        named = {f"epsilon/{self.run.roster.names[client]}": found[client] for client in sorted(found)}
        return {"epsilon": max(found.values()), **named} if found else {}

    def _join_the_chosen_server(self) -> dict[str, float]:
        """Let the held-out clients join the server as it was after the round that is reported; it stays so."""
        run, num_rounds = self.run, self.run.round_idx
        if run.chosen_server is None:
            warnings.warn(
                "the checkpoint that this run went on from keeps no server of the chosen round (an older version wrote "
                "it), so new clients join that of the last one",
                stacklevel=2,
            )
        else:
            run.strategy.load_state_dict(copy.deepcopy(run.chosen_server))
            run.round_idx = run.selection.best_round + 1
        metrics = self._admit_new_clients()
        run.round_idx = num_rounds
        return metrics

    def _admit_new_clients(self) -> dict[str, float]:
        """Let the held-out clients join a trained server, and score them."""
        self._run_stages(self.run.strategy.admission_stages(), self.run.new_clients, "admission")
        return self.evaluate(self.run.new_clients, "new/")

    def _when(self, phase: Phase) -> str:
        """A phase in words."""
        if phase == "round":
            return f"round {self.run.round_idx}"
        return "before round 0" if phase == "initial" else "while new clients joined"

    def _report(self, failures: Mapping[int, str], where: str, num_clients: int) -> None:
        """Count failures and say why; of an error in a user's code once in a run, for all of its clients.

        Args:
            failures: Why clients failed.
            where: In which stage or evaluation, in words.
            num_clients: How many were asked.
        """
        run, stops = self.run, self.participation.on_failure == "stop"
        for client, why in failures.items():
            name = run.roster.names[client]
            run.failures[name] = str(why)
            run.num_failures[name] = run.num_failures.get(name, 0) + 1
        for clients in alike(failures, num_clients):
            places = {place for client in clients if (place := place_of(failures[client]))}
            if places and places <= run.reported:
                continue
            run.reported |= places
            message = f"{self._named(clients, num_clients)} failed {where}: {failures[clients[0]]}"
            if stops:
                raise ClientFailure(f"{message} (participation.on_failure is 'stop')")
            if self.fabric.is_global_zero:
                left_out = f"; {'it is' if len(clients) == 1 else 'they are'} left out"
                counted = ", and failures like it are only counted from now on" if places else ""
                warnings.warn(message + left_out + counted, stacklevel=2)

    def _named(self, clients: Sequence[int], num_clients: int) -> str:
        """Some clients in words."""
        if len(clients) == 1:
            return self.run.roster.names[clients[0]]
        if len(clients) == num_clients:
            return f"all {num_clients} clients"
        others = len(clients) - 1
        return f"{self.run.roster.names[clients[0]]} and {others} other{'s' if others > 1 else ''}"

    def _check_void_rounds(self) -> None:
        """End a run in which nothing is learnt any more."""
        limit = self.participation.max_void_rounds
        last = self.run.history[-limit:]
        if len(last) == limit and all(row["void"] for row in last):
            raise TooFewAnswers(
                f"the last {limit} rounds were void (participation.max_void_rounds): {self._shortage()}"
            )

    def _check_any_round(self) -> None:
        """Refuse a run's result where no round counted: its models are those that it began with."""
        run = self.run
        if run.interruption.received is None and run.history and all(row["void"] for row in run.history):
            run.selection.reset()
            what = "the only round was void" if len(run.history) == 1 else f"all {len(run.history)} rounds were void"
            raise TooFewAnswers(f"nothing was learned, {what}: {self._shortage()}")

    def _shortage(self) -> str:
        """What went wrong in a void round; of many reasons the first three."""
        missing = {**self.run.failures, **dict.fromkeys(self.run.dropouts, "dropped out")}
        of_kind: dict[str, list[str]] = {}
        for name, why in missing.items():
            of_kind.setdefault(why, []).append(name)
        failures = "; ".join(
            f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}: {why}"
            for why, names in list(of_kind.items())[:3]
        )
        setting = "participation.min_clients"
        if self._quorum > self.participation.min_clients:
            setting = "strategy.aggregation needs as many"
        return f"fewer than {self._quorum} clients answered ({setting}); {failures}"

    @property
    def _quorum(self) -> int:
        """Answers without which a round is void."""
        return max(self.participation.min_clients, self.run.strategy.fewest_answers)

    def _call(self, hook: str, *args: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(self, *args)

    def state_dict(self) -> dict[str, Any]:
        """The complete state between two rounds; collective: every process must call it."""
        return state.capture(self.run, self.callbacks)

    def save_checkpoint(self, path: Path) -> None:
        """Write the complete state; collective: every process must call it."""
        complete = self.state_dict()
        if self.fabric.is_global_zero:
            checkpoint.write(path, complete)
        self.run.checkpoints.add(path)
        self.fabric.barrier()
