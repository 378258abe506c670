"""The runs of a search, what trains them, and which of their records count."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fl_lightning.choice.candidates import CASE, WrongChoice
from fl_lightning.choice.halving import lengths
from fl_lightning.counts import count
from fl_lightning.run.interruption import uninterrupted
from fl_lightning.study.definition import Study
from fl_lightning.study.edge import Point
from fl_lightning.study.runs import StudyRun, digest_of, make_run
from fl_lightning.study.store import Record, Store

if TYPE_CHECKING:
    from fl_lightning.choice.preparation import Prepared

#: How far the seed of the search is from the first of those that are reported.
SEARCH_SEED = 1000


class Runs(Protocol):
    """What trains runs: :class:`fl_lightning.study.pool.Pool`, or jobs at sites."""

    processes: int
    scratch: Path

    @property
    def num_idle(self) -> int:
        """How many more may be given now."""
        ...

    @property
    def num_busy(self) -> int:
        """How many are being trained."""
        ...

    def submit(self, task: Any, name: str, *arguments: Any) -> None:
        """Give a run."""
        ...

    def finished(self, seconds: float) -> Iterator[tuple[Any, dict[str, Any] | None]]:
        """Wait for no longer than so many seconds; runs with their results."""
        ...

    def map(self, tasks: Sequence[tuple[Any, str, tuple[Any, ...]]]) -> Iterator[tuple[Any, dict[str, Any] | None]]:
        """Do what can be done of tasks; those with their results."""
        ...


def tuning_run(study: Study, method: str, point: Point, seed: int, length: int) -> StudyRun:
    """The run of a setting in the search, where the first of the reported seeds is given."""
    return make_run(study, method, CASE, seed + SEARCH_SEED, point, "tuning", length)


class Known:
    """The records that count: of the code, the settings, the data and the sites of now.

    Args:
        store: All records.
        sites: Digest of the sites that train, and how; empty for a simulation.

    Attributes:
        partitions: Hash of the partition by ``StudyRun.data``, as far as it is known; at sites it is not, since each
            keys the digest of its data for every run.
        digest: Of the search's data and sites, and of the version of what is computed.
    """

    def __init__(self, store: Store, sites: str = "") -> None:
        self.store, self.sites = store, sites
        self.records = store.records()
        self.partitions: dict[str, str] = {}
        self.digest = sites

    @classmethod
    def of(
        cls, prepared: "Prepared", store: Store, pool: Runs, say: Callable[[str], None], *, sites: str = ""
    ) -> "Known":
        """Those of a search, after a look at its data.

        Args:
            prepared: The search.
            store: All records.
            pool: What looks at data.
            say: Takes a line for the user.
            sites: Digest of the sites that train, and how.
        """
        known = cls(store, sites)
        firsts = [
            tuning_run(prepared.study, each.name, each.points[0], prepared.seed, prepared.num_rounds)
            for each in prepared.candidates
        ]
        runs = [firsts[0], *known._runs(prepared)]
        if sites and (earlier := known.of_search(prepared)):
            say(
                f"{count(len(earlier), 'run')} of before count: whether the sites' data have changed since cannot be "
                "seen from here; if they have, give another --output"
            )
        by_data = {run.data: run for run in reversed(runs)}
        for run, result in pool.map([(run, "partition", (run.arguments,)) for run in by_data.values()]):
            if result is not None and not result["error"]:
                known.partitions[run.data] = result["partition"]
            elif any(known.record(other) for other in runs if other.data == run.data):
                why = "its worker died" if result is None else result["error"]
                say(f"the data of seed {run.seed} cannot be compared with those of earlier runs: {why}")
        versions = sorted({run.version for run in firsts})
        known.digest = digest_of([sites, known.partitions.get(firsts[0].data, ""), versions])
        return known

    def of_search(self, prepared: "Prepared") -> dict[str, Record]:
        """The records of a search that count, by key."""
        found = {run.key: self.record(run) for run in self._runs(prepared)}
        return {key: record for key, record in found.items() if record is not None}

    def _runs(self, prepared: "Prepared") -> Iterator[StudyRun]:
        """The runs of the search that have a record."""
        points = {(each.name, point[0]): point for each in prepared.candidates for point in each.points}
        rungs = lengths(prepared.num_rounds, prepared.evaluate_every)
        for key, record in self.records.items():
            if (point := points.get((record["method"], record["setting"]))) is None:
                continue
            purpose, seed = record["purpose"], record["seed"]
            for length in rungs if purpose == "tuning" else rungs[-1:]:
                run = make_run(prepared.study, record["method"], CASE, seed, point, purpose, length)
                if run.key == key:
                    yield run

    def record(self, run: StudyRun) -> Record | None:
        """That of a run; None if it has to be trained."""
        record = self.records.get(run.key)
        if record is None or record["version"] != run.version or record.get("sites", "") != self.sites:
            return None
        now = self.partitions.get(run.data)
        return None if now is not None and record["partition"] not in ("", now) else record

    def add(self, run: StudyRun, record: Record, *, is_stored: bool) -> None:
        """Add the record of a run that was trained now.

        Raises:
            WrongChoice: It was trained on other data than the runs before it; it is not stored.
        """
        if self.sites:
            record["sites"] = self.sites
        else:
            now = self.partitions.get(run.data) or record["partition"]
            record["partition"] = record["partition"] or now  # of one that failed
            if record["partition"] != now:
                raise WrongChoice(
                    f"the data of seed {run.seed} are not those of the earlier runs in {self.store.folder}, and "
                    "methods cannot be compared on different data: give another --output"
                )
            self.partitions |= {run.data: now} if now else {}
        self.records[run.key] = record
        if is_stored:
            with uninterrupted():
                self.store.keep_own_sources(run)
                self.store.add(record)
