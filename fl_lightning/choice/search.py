"""The search within a budget, on the engine of studies: its keys, records, worker processes and lengthened runs.

A setting that goes on continues from the last state of its own run. What was trained is never trained again, so a
search that was interrupted goes on where it stopped.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fl_lightning.choice.budget import Meter
from fl_lightning.choice.candidates import CASE, CEILING, COMMON, FLOOR, Candidate, WrongChoice
from fl_lightning.choice.halving import (
    FEWEST_SEEDS,
    MOST_SEEDS,
    Arm,
    Cost,
    Plan,
    Planner,
    lengths,
    survivors,
)
from fl_lightning.choice.outcome import Dropped, Found, Memory, with_remedy
from fl_lightning.choice.runs import Known, Runs, tuning_run
from fl_lightning.counts import count
from fl_lightning.report.wording import number, size
from fl_lightning.run.curve import STILL_RISING
from fl_lightning.study.definition import Study
from fl_lightning.study.edge import at_edge
from fl_lightning.study.record import make_record
from fl_lightning.study.runs import StudyRun, make_run
from fl_lightning.study.store import Record, is_less_better


class Search:
    """Finds the best setting of each method within a budget, and trains the best methods with new seeds.

    Args:
        study: The study: a method for each candidate, and one case.
        known: The records that count, and where new ones go.
        candidates: The methods, the simplest first.
        asked: Digest of what was asked for: what was decided for the same continues.
        seed: The first of the reported seeds.
        num_rounds: Of a whole run.
        evaluate_every: Rounds between evaluations.
        meter: The budget, and what is taken of it.
        max_bytes: What a whole run may send; None for any number.
        most_seeds: Of the finalists; None for ``MOST_SEEDS``.
        say: Takes a line for the user.
    """

    def __init__(
        self,
        study: Study,
        known: Known,
        candidates: Sequence[Candidate],
        *,
        asked: str,
        seed: int,
        num_rounds: int,
        evaluate_every: int = 1,
        meter: Meter,
        max_bytes: float | None = None,
        most_seeds: int | None = None,
        say: Callable[[str], None] = print,
    ) -> None:
        self.study, self.known, self.candidates = study, known, {each.name: each for each in candidates}
        self.store = known.store
        self.seed, self.num_rounds, self.meter, self.max_bytes = seed, num_rounds, meter, max_bytes
        self.most_seeds = most_seeds or MOST_SEEDS
        self.fewest_seeds = min(FEWEST_SEEDS, self.most_seeds)
        self.say = say
        self.rungs = lengths(num_rounds, evaluate_every)
        self.points = {
            Arm(method=each.name, label=label): (label, settings)
            for each in candidates
            for label, settings in each.points
        }
        self.costs: dict[str, Cost] = {}
        self.found = Found(num_rounds=num_rounds)
        self.memory = Memory.read(self.store.folder / "choice.json", asked)
        self._lost: set[str] = set()

    def run(self, pool: Runs) -> Found:
        """Search.

        Raises:
            WrongChoice: The budget is too small, or no method can be trained.
        """
        self.pool = pool
        try:
            arms = self._begin()
            for index, length in enumerate(self.rungs[1:]):
                arms = self._rung(index, arms, length)
            self._finish(self._finalists(arms))
        except KeyboardInterrupt:
            for run, result in pool.finished(0.0) if pool.num_busy else ():  # what was computed is recorded
                self._take(run, result)
            raise
        self.found.taken, self.found.took = self.meter.taken, self.meter.text(self.meter.taken)
        return self.found

    # ------------------------------------------------------------------ the search

    def _begin(self) -> list[Arm]:
        """Train the first setting of every method for two rounds; the arms that the budget is enough for."""
        firsts = [self._arms(name)[0] for name in self.candidates]
        self._train([self._tuning(arm, self.rungs[0]) for arm in firsts], until=self.meter.limit)
        too_small = f"a budget of {self.meter.text(self.meter.limit)} is too small to try it"
        for arm in firsts:
            record = self._record(arm, self.rungs[0])
            why = too_small if record is None else with_remedy(record["error"])
            if why := why or self._too_many_bytes(arm, self.rungs[0]):
                self._leave_out(arm.method, why)
        names = [name for name in self.candidates if name not in self.found.left_out]
        if not set(names) - {CEILING}:
            raise WrongChoice(f"no method can be trained: {'; '.join(dict.fromkeys(self.found.left_out.values()))}")
        self.beside = [name for name in (FLOOR, COMMON, CEILING) if name in names]
        if joining := [name for name in names if name not in (self.memory.methods or names)]:
            if self._planner(names).plan(self._left(names)) is not None:
                self.memory.plan, self.memory.rungs = None, []
            else:
                for name in joining:
                    self._leave_out(name, "it could not be trained before, and too little is left of the budget now")
                names = self.memory.methods
        if self.memory.plan is None:
            self.memory.plan, self.memory.methods = self._plan(names), names
            self.memory.write()
        points = self.memory.plan.points
        self.say(
            f"{count(len(names), 'method')}, up to {count(points, 'setting')} each; the best go on to "
            f"{count(self.num_rounds, 'round')}, then to "
            f"{self._seeds}{'' if self.most_seeds == self.fewest_seeds else ' or more'}"
        )
        return [arm for name in names for arm in self._arms(name)[:points]]

    def _leave_out(self, method: str, why: str) -> None:
        self.found.left_out[method] = why
        self.say(f"{method} is left out: {why}")

    def _left(self, names: Sequence[str]) -> float:
        """What there is for a plan, which has the first rounds of every method, too."""
        begun = sum(self.costs[name].each for name in names) * self.rungs[0] / self._planner(names).processes
        return self.meter.limit - self.meter.taken + begun

    def _plan(self, names: Sequence[str]) -> Plan:
        planner, left = self._planner(names), self._left(names)
        if (plan := planner.plan(left)) is not None:
            return plan
        text = self.meter.text
        needed = self.meter.limit - left + planner.needed() / self.meter.filled
        raise WrongChoice(
            f"a budget of {text(self.meter.limit)} is too small for one setting of each of "
            f"{count(len(names), 'method')} and {self._seeds} of the best: these need about {text(needed)}. "
            f"{self._enough(names, left)}"
        )

    @property
    def _seeds(self) -> str:
        return count(self.fewest_seeds, "seed")

    def _planner(self, names: Sequence[str]) -> Planner:
        return Planner(
            costs={name: self.costs[name] for name in names},
            sizes={name: len(self.candidates[name].points) for name in names},
            rungs=self.rungs,
            processes=self.meter.shared_by(self.pool.processes),
            beside=self.beside,
            references=(FLOOR, CEILING),
            seeds=self.fewest_seeds,
            filled=self.meter.filled,
        )

    def _enough(self, names: Sequence[str], left: float) -> str:
        """What the budget is enough for."""
        competing = [name for name in names if name not in (FLOOR, CEILING)]
        always = [name for name in names if name in (FLOOR, CEILING)]
        enough = [
            competing[:count]
            for count in range(len(competing), 0, -1)
            if self._planner([*always, *competing[:count]]).plan(left) is not None
        ]
        whole = self._planner(names)
        shorter = next(
            (
                each
                for each in range(self.num_rounds - 1, 9, -1)
                if whole.needed(num_rounds=each) <= whole.filled * left
            ),
            0,
        )
        parts = [f"for --methods {' '.join(enough[0])}"] if enough else []
        parts += [f"for all with --trainer.num_rounds {shorter}"] if shorter else []
        return f"It is enough {' or '.join(parts)}" if parts else "It is not enough for a single method"

    def _rung(self, index: int, arms: Sequence[Arm], length: int) -> list[Arm]:
        """Train settings up to a number of rounds; those that go on, the best first."""
        assert self.memory.plan is not None
        planner = self._planner(list({arm.method: None for arm in arms}))
        finals = self.fewest_seeds * planner.seed(self.memory.plan.finalists, self.num_rounds) / planner.processes
        limit = self.meter.limit
        self._train([self._tuning(arm, length) for arm in arms], until=max(limit - finals, 0.5 * limit))
        scores = {arm: self._score(arm, length) for arm in arms}
        methods = [arm for arm in arms if arm.method != CEILING]
        if not any(math.isfinite(scores[arm]) for arm in methods):
            late = [arm for arm in methods if self._record(arm, length) is None]
            advice = f": give a larger --budget ({self.store.folder} goes on)" if late else ""
            why = self._why((late or methods)[0], length)
            raise WrongChoice(f"no method could be trained for {count(length, 'round')}: {why}{advice}")
        if index == len(self.rungs) - 2:
            return sorted(scores, key=lambda arm: -scores[arm] if math.isfinite(scores[arm]) else math.inf)
        if len(self.memory.rungs) <= index:
            chosen = survivors(
                scores,
                share=self.memory.plan.share,
                references=(FLOOR, CEILING),
                beside=self.beside,
                keep_methods=index == 0,
                finalists=self.memory.plan.finalists,
            )
            self.memory.rungs.append([[arm.method, arm.label] for arm in chosen])
            self.memory.write()
        going = [Arm(method=method, label=label) for method, label in self.memory.rungs[index]]
        for arm in arms:
            if arm not in going:
                self._drop(arm, length, "others were better")
        self.say(f"after {count(length, 'round')} {len(going)} of {len(arms)} settings go on")
        return going

    def _finalists(self, arms: Sequence[Arm]) -> list[Arm]:
        """The best setting of the methods that are trained with the reported seeds, the simplest first."""
        assert self.memory.plan is not None
        best: dict[str, Arm] = {}
        for arm in arms:
            if math.isfinite(self._score(arm, self.num_rounds)) and not self._too_many_bytes(arm, self.num_rounds):
                best.setdefault(arm.method, arm)
        others = [name for name in best if name not in self.beside][: self.memory.plan.finalists]
        chosen = [best[name] for name in self.candidates if name in best and (name in self.beside or name in others)]
        for arm in arms:
            if arm not in chosen:
                self._drop(arm, self.num_rounds, "others were better")
        for arm in chosen:
            tried = [self.points[each] for each in self._arms(arm.method)[: self.memory.plan.points]]
            self.found.edges[arm.method] = at_edge(self.candidates[arm.method].axes, self.points[arm], tried)
        return chosen

    def _drop(self, arm: Arm, rounds: int, why: str) -> None:
        record = self._record(arm, rounds)
        why = self._why(arm, rounds) or self._too_many_bytes(arm, rounds) or why
        if record is not None and not record["error"] and STILL_RISING in record["marks"]:
            why += ", although it was still rising"
        value = None if record is None else record["val"]
        dropped = Dropped(arm=arm, rounds=rounds, value=value, why=why)
        self.found.dropped.append(dropped)
        self.say(f"dropped: {dropped}")
        self.store.state(self._tuning(arm, rounds)).unlink(missing_ok=True)

    # ------------------------------------------------------------------ the finals

    def _finish(self, arms: Sequence[Arm]) -> None:
        """Train the finalists with as many seeds as there is time for."""
        self.found.finalists = {arm.method: self.points[arm] for arm in arms}
        self.say(f"finalists: {', '.join(map(str, arms))}")
        processes = self.meter.shared_by(self.pool.processes)
        cost = sum(self.costs[arm.method].of(self.num_rounds) for arm in arms) / processes
        seeds = [self.seed + index for index in range(self.most_seeds)]
        count = 0
        while count < self.most_seeds:
            done = all(self.known.record(run) for run in self._finals(arms, seeds[count]))
            more = 1 if done else max(self.fewest_seeds - count, int((self.meter.limit - self.meter.taken) / cost))
            if more <= 0:
                break
            batch = seeds[count : count + more]
            limit = self.meter.limit * (self.meter.over if count < self.fewest_seeds else 1.0)
            self._train([run for seed in batch for run in self._finals(arms, seed)], until=limit)
            trained = {seed: [self.known.record(run) for run in self._finals(arms, seed)] for seed in batch}
            whole = {seed: records for seed, records in trained.items() if None not in records}
            for record in (each for records in whole.values() for each in records if each is not None):
                self.found.records.setdefault(record["method"], {})[record["seed"]] = record
            count += len(batch)
            if len(whole) < len(batch):
                break
        if not self.found.records:
            self.found.has_new_seeds, self.found.records = False, {arm.method: self._searched(arm) for arm in arms}

    def _searched(self, arm: Arm) -> dict[int, Record]:
        """What is known of a finalist without a new seed: validation at the end of the search, by its seed."""
        record = self._record(arm, self.num_rounds)
        assert record is not None, "it is a finalist by its score"
        result = {record["monitor"]: record["val"]}
        return {record["seed"]: {**record, **record["spent"], "result": result}}

    def _finals(self, arms: Sequence[Arm], seed: int) -> list[StudyRun]:
        return [
            make_run(self.study, arm.method, CASE, seed, self.points[arm], "report", self.num_rounds) for arm in arms
        ]

    # ------------------------------------------------------------------ runs

    def _arms(self, name: str) -> list[Arm]:
        return [arm for arm in self.points if arm.method == name]

    def _tuning(self, arm: Arm, length: int) -> StudyRun:
        return tuning_run(self.study, arm.method, self.points[arm], self.seed, length)

    def _record(self, arm: Arm, length: int) -> Record | None:
        return self.known.record(self._tuning(arm, length))

    def _score(self, arm: Arm, length: int) -> float:
        """The validation metric, more being better; nan for none, or for one that sends too much."""
        record = self._record(arm, length)
        if record is None or record["val"] is None or self._too_many_bytes(arm, length):
            return math.nan
        return -float(record["val"]) if is_less_better(record) else float(record["val"])

    def _why(self, arm: Arm, length: int) -> str:
        """Why a setting has no score; empty if it has one."""
        record = self._record(arm, length)
        return "there was no time left to train it" if record is None else str(record["error"])

    def _too_many_bytes(self, arm: Arm, length: int) -> str:
        record = self._record(arm, length)
        if self.max_bytes is None or record is None or not record.get("spent") or arm.method in (FLOOR, CEILING):
            return ""
        spent = record["spent"]
        sent = sum(spent["bytes"].values()) / spent["num_rounds"] * self.num_rounds
        if sent <= self.max_bytes:
            return ""
        rounds = count(self.num_rounds, "round")
        return f"it would send {size(sent)} in {rounds}, more than --max-bytes {size(self.max_bytes)}"

    def _train(self, runs: Sequence[StudyRun], until: float) -> None:
        """Train what is not known yet; nothing is begun that would take longer than until then."""
        todo = deque[StudyRun]()
        for run in runs:
            if (record := self.known.record(run)) is None:
                todo.append(run)
            else:
                self._learn(run, record)
        while True:
            while self.pool.num_idle and (fitting := self._fitting(todo, until)) is not None:
                todo.remove(fitting)
                self.meter.begin(fitting.lineage, self._estimate(fitting))
                self.pool.submit(fitting, "train", *self._task(fitting))
            if not self.pool.num_busy:
                return
            for run, result in self.pool.finished(self.meter.seconds_left):
                if (result is None or result.get("interrupted")) and run.key not in self._lost:
                    self._lost.add(run.key)
                    todo.appendleft(run)
                    continue
                self._take(run, result)
            if self.meter.seconds_left < 0:
                return

    def _fitting(self, todo: Sequence[StudyRun], until: float) -> StudyRun | None:
        """The next run that will have ended by then; of the finals none is passed over, as whole seeds count."""
        for run in todo:
            if self.meter.taken + self._estimate(run) <= until:
                return run
            if run.purpose == "report":
                break
        return None

    def _task(self, run: StudyRun) -> tuple[Any, ...]:
        state = self.store.state(run) if run.purpose == "tuning" else None
        arguments = (*run.arguments, "--trainer.logger=false")
        return arguments, self.pool.scratch, (), (), None, state, self.store.partial_state(run)

    def _take(self, run: StudyRun, result: dict[str, Any] | None) -> None:
        if result is not None and result.get("interrupted"):
            return
        record = make_record(run, result or {"error": "its worker was killed, twice (out of memory?)"})
        if result is not None and not record["error"]:
            record["spent"] = {name: result[name] for name in ("num_rounds", "bytes", "training_seconds")}
        record |= {"asked": self.memory.asked, "elapsed": round(self.meter.taken, 3)}
        self.known.add(run, record, is_stored=result is not None and not result.get("may_pass"))
        self.store.forget_partial(run)
        self.store.bound_states(self.study.states_gb)
        self._learn(run, record)
        what = f"seed {run.seed}" if run.purpose == "report" else run.setting
        came_to = f"failed: {record['error']}" if record["error"] else f"{record['monitor']} {number(record['val'])}"
        rounds = f" after {count(record['spent']['num_rounds'], 'round')}" if record.get("spent") else ""
        left = self.meter.text(self.meter.limit - self.meter.taken)
        self.say(f"[{left} left] {run.method}{f' ({what})' if what else ''}: {came_to}{rounds}")

    def _learn(self, run: StudyRun, record: Mapping[str, Any]) -> None:
        """What a method takes, by its newest run."""
        if (cost := self.meter.end(run.lineage, record)) is not None:
            self.costs[run.method] = cost

    def _estimate(self, run: StudyRun) -> float:
        """What a run will take; 0 where nothing is known."""
        cost = self.costs.get(run.method, self.meter.known)
        if cost is None:
            return 0.0
        length = next(int(each.partition("=")[2]) for each in run.arguments if each.startswith("--trainer.num_rounds="))
        before = [rung for rung in self.rungs if rung < length] if run.purpose == "tuning" else []
        return cost.of(length - max(before, default=0))
