"""A search at the sites of a federation: each of its runs is a job, one after another, within the sites' policies.

A setting that goes on, and a run whose job was stopped, resume from the server's last checkpoint. The first job says
how many rounds the whole search plans, and every site whose privacy account could not pay for all of them refuses it
(``Job.planned_rounds``). What was trained at other sites, or without secure aggregation, does not count; whether a
site's data have changed since cannot be seen from here. What sites refused or failed in is tried again by the next
start: their policies may have changed, or they may be there again.
"""

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from fl_lightning.choice.answer import Answer
from fl_lightning.choice.asking import answer_of
from fl_lightning.choice.candidates import CEILING, COMMON, FLOOR, WrongChoice
from fl_lightning.choice.halving import MOST_FINALISTS, MOST_POINTS, Cost, Planner, lengths
from fl_lightning.choice.preparation import Asked, Prepared
from fl_lightning.choice.runs import Known
from fl_lightning.remote.schema import (
    MOST,
    MOST_CLIENTS,
    anything,
    check_facts,
    either,
    mapping,
    nothing,
    one_of,
    real,
    text,
    whole,
)
from fl_lightning.remote.submit import Submission, connected_sites, follow, session_of
from fl_lightning.study.runs import StudyRun, digest_of
from fl_lightning.study.store import Record, Store
from fl_lightning.study.worker import resolve

#: Jobs that are submitted for a run at most.
_ATTEMPTS = 3
#: Largest result.json that is read.
_MAX_BYTES = 2**24


def planned_rounds(prepared: Prepared, records: Iterable[Record] = ()) -> int:
    """Rounds of the largest search among the candidates, without those of its records that there are."""
    trained = [each for each in prepared.candidates if each.name != CEILING]
    planner = Planner(
        costs={each.name: Cost(start=0.0, each=1.0) for each in trained},
        sizes={each.name: len(each.points) for each in trained},
        rungs=lengths(prepared.num_rounds, prepared.evaluate_every),
        processes=1,
        beside=(FLOOR, COMMON),
        references=(FLOOR,),
    )
    done: int = sum(each["spent"]["num_rounds"] - each.get("resumed", 0) for each in records if each.get("spent"))
    return max(1, math.ceil(planner.needed(MOST_POINTS, share=2, finalists=MOST_FINALISTS)) - done)


def answer_at_sites(
    asked: Asked, kit: Path, sites: Sequence[str], say: Callable[[str], None], *, secure: bool = False
) -> Answer:
    """Search at the sites of a federation.

    Args:
        asked: What was asked for.
        kit: The submitter's kit.
        sites: Their names; empty for all that are connected.
        say: Takes a line for the user.
        secure: Secure aggregation.

    Raises:
        WrongChoice: It is refused, or there is no server or no site.
    """
    with contextlib.ExitStack() as stack:
        try:
            session = stack.enter_context(session_of(kit))
            names = list(sites) or connected_sites(session)
        except (ValueError, RuntimeError) as error:
            raise WrongChoice(str(error)) from error
        if not names:
            raise WrongChoice("no site is connected to the server: start them (startup/start.sh in their kits)")

        facts = {"sites": names, "secure": secure}
        of_these = digest_of(facts)

        def make_jobs(prepared: Prepared, store: Store) -> Jobs:
            records = Known(store, of_these).of_search(prepared)
            return Jobs(session, facts, asked.folder / "runs", planned_rounds(prepared, records.values()))

        return answer_of(asked, say, make_jobs, sites=of_these)


class Jobs(contextlib.AbstractContextManager["Jobs"]):
    """Trains the runs of a search at sites; it has the methods of :class:`fl_lightning.study.pool.Pool`.

    Args:
        session: Of the submitter (:func:`fl_lightning.remote.submit.session_of`).
        facts: Of every job: ``sites``, ``secure``, ...
        folder: Where the folders of runs are put.
        num_rounds: Rounds that are left of the search.
    """

    processes = 1

    def __init__(self, session: Any, facts: Mapping[str, Any], folder: Path, num_rounds: int) -> None:
        self.session, self.facts, self.folder, self.left = session, facts, folder, num_rounds
        self.scratch = folder
        self.sites = digest_of(facts)
        self._task: tuple[StudyRun, Sequence[str], Path] | None = None

    @property
    def num_busy(self) -> int:
        """Whether there is a job."""
        return int(self._task is not None)

    @property
    def num_idle(self) -> int:
        """Whether there is none."""
        return 1 - self.num_busy

    def submit(self, task: StudyRun, name: str, arguments: Sequence[str], *others: Any) -> None:
        """Take a run, as :func:`fl_lightning.study.worker.train` does; its job is submitted by :meth:`finished`."""
        *_, state, _ = others  # the server has the checkpoints, and what there is here says whose they are
        self._task = task, arguments, state or self.folder / f"{task.key}.json"

    def finished(self, seconds: float = math.inf) -> Iterator[tuple[StudyRun, dict[str, Any] | None]]:
        """Submit the job and follow it; yields the run and its result, or nothing if its time is over before."""
        if self._task is None:
            return
        (run, arguments, state), self._task = self._task, None
        with contextlib.suppress(TimeoutError):
            yield run, self._result(arguments, state, time.monotonic() + seconds)

    def map(self, tasks: Sequence[tuple[Any, str, tuple[Any, ...]]]) -> Iterator[tuple[Any, dict[str, Any] | None]]:
        """None: nobody but the sites can look at their data."""
        return iter(())

    def _result(self, arguments: Sequence[str], state: Path, end: float) -> dict[str, Any]:
        def watch() -> None:
            if time.monotonic() > end:
                raise TimeoutError

        start = time.perf_counter()
        whole = resolve(arguments)
        if whole["error"]:
            return {"error": whole["error"]}
        name, resumed = self._noted(state)
        is_begun = bool(name)
        name = name or f"choose-{digest_of([list(arguments), time.time()])}"
        try:
            submission = Submission.of_config(
                whole["config"], name=name, resume=is_begun, planned_rounds=max(1, self.left), **self.facts
            )
            self._note(state, name, resumed)  # a job that is stopped goes on from its last checkpoint
            outcome = follow(self.session, submission, self.folder, attempts=_ATTEMPTS, watch=watch)
            if outcome.status != "finished" or outcome.folder is None:
                return {"error": outcome.message, "may_pass": True}
            found = _found(outcome.folder / "result.json")
        except ValueError as error:
            return {"error": str(error)}
        except RuntimeError as error:  # of the server, not of the method
            raise WrongChoice(f"{error}; the same command goes on") from error
        rounds = int(found["num_rounds"])
        self.left -= rounds - resumed
        self._note(state, name, rounds)
        return {
            "error": "",
            **{key: found[key] for key in ("monitor", "mode", "result", "marks", "num_rounds")},
            "bytes": found["bytes"] or outcome.facts["bytes"],
            "training_seconds": found["seconds"],
            "failures": sum(found["failures"].values()),
            "partition": found["partition_hash"],
            "kinds": {},
            "clients": {},
            "malicious": [],
            "resumed": resumed,
            "seconds": round(time.perf_counter() - start, 3),
        }

    def _note(self, state: Path, name: str, rounds: int) -> None:
        state.parent.mkdir(parents=True, exist_ok=True)
        state.write_text(json.dumps({"name": name, "rounds": rounds, "sites": self.sites}))

    def _noted(self, state: Path) -> tuple[str, int]:
        """Name and rounds of the run that a job goes on from; an empty name where it begins."""
        try:
            noted = json.loads(state.read_text())
            return (str(noted["name"]), int(noted["rounds"])) if noted["sites"] == self.sites else ("", 0)
        except (OSError, ValueError, LookupError):
            return "", 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._task = None


#: The fields of the server's result.json that are used.
_FOUND = {
    "monitor": text(),
    "mode": one_of("min", "max"),
    "result": mapping(text(), either(real(-1e300, 1e300), nothing), 10_000),
    "marks": mapping(text(), anything, 100),
    "num_rounds": whole(0, MOST),
    "bytes": mapping(one_of("down", "up", "peer"), whole(0, 2**60), 3),
    "seconds": real(0, 1e12),
    "failures": mapping(text(), whole(0, MOST), MOST_CLIENTS),
    "partition_hash": text(shortest=0),
}


def _found(file: Path) -> Mapping[str, Any]:
    """What a run came to, as the server says.

    Raises:
        ValueError: It is not as its table says.
    """
    try:
        if (size := file.stat().st_size) > _MAX_BYTES:
            raise ValueError(f"it has {size} bytes, at most {_MAX_BYTES} are read")
        content = json.loads(file.read_bytes())
        used = {name: fact for name, fact in content.items() if name in _FOUND} if isinstance(content, dict) else None
        check_facts(used, _FOUND)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"the server's {file} is wrong: {error}") from error
    assert used is not None, "checked before"
    return used
