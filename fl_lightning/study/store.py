"""The records of a study: one line of JSON for each run, appended atomically by any number of processes."""

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from fl_lightning.direction import direction_of, metric_of, metric_on_test
from fl_lightning.files import whole_file, writing
from fl_lightning.run.own_code import digest_of_files
from fl_lightning.study.runs import StudyRun

Record = dict[str, Any]
_SEALED = re.compile(rb'(\{.*),"sum":"([0-9a-f]{12})"\}')
#: Metrics by name, each of every round.
Rounds = Mapping[str, Sequence[float]]


def metric_reported(record: Record) -> str:
    """The bare name of the metric that is reported: the monitored one, or that of which it is a summary."""
    return metric_of(record["monitor"], record["result"]).rpartition("/")[2]


def metric_tested(record: Record) -> str:
    """The test metric of the same clients or model as the monitored one: ``benign/test/acc`` of ``benign/val/acc``."""
    return metric_on_test(metric_of(record["monitor"], record["result"]))


def is_less_better(record: Record) -> bool:
    """Whether a lower value of a record's monitored metric is better; without a mode it is a metric of this package."""
    return (record.get("mode") or direction_of(record["monitor"])) == "min"


class Store:
    """The files in a study's folder of results.

    ``runs.jsonl`` has a line for each run (the last one of a key counts), ``history.jsonl`` one with the metrics of
    every round, ``sources.json`` the sources by the digests that the runs name. Each line ends with a checksum of what
    precedes it; those of older lines, which have none, are in ``checksums.txt`` (``fl-train study seal``). A damaged
    line counts as missing, and is named; so does every run that had failed before it, since it may have been any of
    these. The partial line of a killed process is removed before the next is written.

    Args:
        folder: The folder; created with the first record.

    Attributes:
        damaged: Lines that were found damaged when they were last read, such as ``runs.jsonl, line 3``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runs = folder / "runs.jsonl"
        self.rounds = folder / "history.jsonl"
        self.sources = folder / "sources.json"
        self.checksums = folder / "checksums.txt"
        self.damaged: list[str] = []
        self._num_read = 0

    def records(self) -> dict[str, Record]:
        """The newest record of each run, by key."""
        return self.records_after(0)

    def records_after(self, num_bytes: int) -> dict[str, Record]:
        """The newest record of each run, by key, of those that were added after so many bytes of ``runs.jsonl``."""
        self._num_read = _whole_bytes(self.runs)
        records: dict[str, Record] = {}
        for record in self._lines(self.runs, num_bytes):
            if record is None:  # nobody knows whose it was: what had failed before may have been done in it
                records = {key: each for key, each in records.items() if not each.get("error")}
            else:
                records.pop(record["key"], None)  # in the order of the newest ones
                records[record["key"]] = record
        return records

    def new_records(self) -> dict[str, Record]:
        """The records that were added, by any process, since they were last read here."""
        num_bytes = _whole_bytes(self.runs)
        if num_bytes == self._num_read:
            return {}
        return self.records_after(self._num_read if self._num_read < num_bytes else 0)

    @property
    def num_read(self) -> int:
        """How many bytes of ``runs.jsonl`` were read here."""
        return self._num_read

    def history(self) -> dict[str, dict[str, list[float]]]:
        """The metrics of every round, by key of the run and name."""
        return {line["key"]: line["rounds"] for line in self._lines(self.rounds) if line is not None}

    def add(self, record: Record, rounds: Mapping[str, list[float]] | None = None) -> None:
        """Append a run, its rounds first, so that every reader of the run finds them."""
        if rounds:
            _append(self.rounds, {"key": record["key"], "rounds": rounds})
        _append(self.runs, record)

    def files(self, record: Record) -> Path:
        """The folder with the files that are kept of a reported run."""
        return self.folder.joinpath("files", *(_plain(str(record[name])) for name in ("method", "case", "seed")))

    def state(self, run: StudyRun) -> Path:
        """The file of the last state of a run, or of a shorter one of its lineage."""
        return self.folder / "states" / f"{run.lineage}.ckpt"

    def partial_state(self, run: StudyRun) -> Path:
        """The file of the state of a run that is being trained, from which it continues if its worker is killed."""
        version = hashlib.sha256(run.version.encode()).hexdigest()[:8]
        return self.folder / "partial" / f"{run.key}-{version}.ckpt"

    def forget_partial(self, run: StudyRun) -> None:
        """Delete that state, and what a worker that was killed had begun to write of it."""
        path = self.partial_state(run)
        for each in (path, *path.parent.glob(f".{path.stem}.*.new.ckpt")):
            each.unlink(missing_ok=True)

    def bound_states(self, gigabytes: float) -> None:
        """Delete the states that were written first, until those that are left take no more than so much."""
        sizes: dict[Path, os.stat_result] = {}
        for path in (self.folder / "states").glob("*.ckpt"):
            with suppress(FileNotFoundError):  # another process deleted it
                sizes[path] = path.stat()
        taken = sum(each.st_size for each in sizes.values())
        for path in sorted(sizes, key=lambda path: sizes[path].st_mtime):
            if taken <= gigabytes * 1e9:
                break
            taken -= sizes[path].st_size
            path.unlink(missing_ok=True)

    def known_sources(self) -> dict[str, dict[str, str]]:
        """The digest of each source file, by the digest of all."""
        try:
            result: Any = json.loads(self.sources.read_text()) if self.sources.exists() else {}
        except ValueError:
            result = None
        if isinstance(result, dict):
            return result
        self.damaged.append(f"{self.sources.name} as a whole")
        return {}

    def keep_sources(self, digest: str, files: Mapping[str, str]) -> None:
        """Record the sources that belong to a digest."""
        with locked(self.sources):
            known = self.known_sources()
            if digest not in known:
                with whole_file(self.sources) as temporary:
                    temporary.write_text(json.dumps({**known, digest: dict(files)}, indent=1) + "\n")

    def keep_own_sources(self, run: StudyRun) -> None:
        """Record the files of the user's own classes by the digest in the run's version, unless they have changed."""
        if files := run.own_files_now:
            self.keep_sources(digest_of_files(files), files)

    def seal(self) -> int:
        """Accept the lines without a checksum: store theirs in ``checksums.txt``; returns how many are new."""
        if not self.folder.exists():
            return 0
        with locked(self.checksums):
            known, files = self._known_checksums(), (self.runs, self.rounds)
            plain = [line for path in files for line in _raw(path) if _SEALED.fullmatch(line) is None]
            new = [digest for line in plain if _is_record(line) and (digest := _checksum(line)) not in known]
            if new:
                with whole_file(self.checksums) as temporary:
                    temporary.write_text("".join(f"{digest}\n" for digest in [*known, *new]))
        return len(new)

    def rewrite(self, change: Callable[[Record], Record | None]) -> int:
        """Replace records in ``runs.jsonl`` and ``history.jsonl``; returns how many. Other processes wait meanwhile.

        Args:
            change: Returns the new record for an old one; None keeps the old one. It must not write to this store.

        Raises:
            ValueError: A line is damaged; nothing is changed then.
        """
        if not self.folder.exists():
            return 0
        with locked(self.runs):
            return self._rewrite(change)

    def _rewrite(self, change: Callable[[Record], Record | None]) -> int:
        known, count, replaced = self._known_checksums(), 0, set[str]()
        written: dict[Path, bytes] = {}
        for path in (self.runs, self.rounds):
            lines = []
            for line in _raw(path):
                sealed = _SEALED.fullmatch(line)
                content = line if sealed is None else sealed[1] + b"}"
                if _checksum(content) != sealed[2].decode() if sealed else _checksum(line) not in known:
                    raise ValueError(f"{path} has a damaged line: fl-train study status names it")
                new = change(json.loads(content))
                if new is not None:
                    count += 1
                    replaced |= set() if sealed else {_checksum(line)}
                    line = _sealed(new)
                lines.append(line + b"\n")
            if path.exists():
                written[path] = b"".join(lines)
        for path, text in written.items():
            with whole_file(path) as temporary:
                temporary.write_bytes(text)
        if replaced:
            with whole_file(self.checksums) as temporary:
                temporary.write_text("".join(f"{digest}\n" for digest in known if digest not in replaced))
        return count

    def _known_checksums(self) -> dict[str, None]:
        text = self.checksums.read_text(errors="replace") if self.checksums.exists() else ""
        return dict.fromkeys(text.splitlines())

    def _lines(self, path: Path, start: int = 0) -> Iterator[Record | None]:
        """Records of a file from a byte on, None for a damaged line, which ``damaged`` lists if all are read."""
        if not start:
            self.damaged = [entry for entry in self.damaged if not entry.startswith(path.name)]
        known: dict[str, None] | None = None
        for number, line in enumerate(_raw(path, start), start=1):
            sealed = _SEALED.fullmatch(line)
            content = line if sealed is None else sealed[1] + b"}"
            if sealed is None and known is None:
                known = self._known_checksums()
            is_whole = _checksum(content) == sealed[2].decode() if sealed else _checksum(line) in (known or {})
            record = json.loads(content) if is_whole and _is_record(content) else {}
            if {"key", *(["rounds"] if path == self.rounds else [])} <= set(record):
                yield record
            else:
                self.damaged += [] if start else [f"{path.name}, line {number}"]
                yield None

    @contextmanager
    def running(self) -> Iterator[bool]:
        """Lock the study; yields whether no other process has locked it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with _opened(self.folder / ".run.lock") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True


def _whole_bytes(path: Path) -> int:
    """Bytes of a file up to the end of its last complete line; 0 if there is none."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        return _end_of_lines(file)


def _raw(path: Path, start: int = 0) -> Iterator[bytes]:
    """The complete lines of a file from a byte on."""
    if path.exists():
        with path.open("rb") as file:
            file.seek(start)
            yield from (line[:-1] for line in file if line.endswith(b"\n") and line.strip())


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]


def _is_record(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _append(path: Path, record: Mapping[str, Any]) -> None:
    line = _sealed(record) + b"\n"
    with locked(path), writing(path, len(line)), path.open("a+b") as file:
        file.truncate(_end_of_lines(file))
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def _sealed(record: Mapping[str, Any]) -> bytes:
    """A record as a line, with its checksum at the end."""
    content = json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    return content[:-1] + f',"sum":"{_checksum(content)}"}}'.encode()


def _end_of_lines(file: IO[bytes]) -> int:
    """Number of bytes up to the end of the last complete line."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - 65536)
        file.seek(start)
        line = file.read(end - start).rfind(b"\n")
        if line >= 0:
            return start + line + 1
        end = start
    return 0


def _opened(lock: Path) -> IO[bytes]:
    """A file to be locked, created if it does not exist; a link that was planted in its place is not followed.

    Raises:
        CannotWrite: It is a link, or cannot be created.
    """
    with writing(lock):
        return os.fdopen(os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b")


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other processes from writing into the folder during the block."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _opened(path.parent / ".write.lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _plain(name: str) -> str:
    """A name as one of a folder; where that changes it, with a digest, so that no two names come to one folder."""
    plain = re.sub(r"[^\w.-]+", "_", name)
    if plain == name and name.strip("."):
        return name
    return f"{plain.strip('.')}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
