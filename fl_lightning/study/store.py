"""What is done of a study: a line of JSON for each cell, appended whole, that any number of processes may write."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fl_lightning.round.direction import direction_of
from fl_lightning.run.folder import writing

Record = dict[str, Any]
#: Figures by name, each of every round.
Rounds = Mapping[str, Sequence[float]]


def is_less_better(record: Record) -> bool:
    """Whether less of a record's monitored metric is better; what is without a mode has a metric of this package."""
    return (record.get("mode") or direction_of(record["monitor"])) == "min"


class Store:
    """The files in a study's folder of results.

    ``cells.jsonl`` has a line for each cell (the last one of a key counts), ``history.jsonl`` one with the figures of
    every round, ``sources.json`` the sources by the digest that the cells name. What a killed process left of a line is
    skipped.

    Args:
        folder: The folder; made with the first record.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.cells = folder / "cells.jsonl"
        self.rounds = folder / "history.jsonl"
        self.sources = folder / "sources.json"

    def records(self) -> dict[str, Record]:
        """The newest record of each cell, by key."""
        return {record["key"]: record for record in _lines(self.cells)}

    def history(self) -> dict[str, dict[str, list[float]]]:
        """The figures of every round, by key of the cell and name."""
        return {line["key"]: line["rounds"] for line in _lines(self.rounds)}

    def add(self, record: Record, rounds: Mapping[str, list[float]] | None = None) -> None:
        """Append a cell, its rounds first, so that whoever reads the cell finds them."""
        if rounds:
            _append(self.rounds, {"key": record["key"], "rounds": rounds})
        _append(self.cells, record)

    def known_sources(self) -> dict[str, dict[str, str]]:
        """The digest of each source file, by the digest of all."""
        found: dict[str, dict[str, str]] = json.loads(self.sources.read_text()) if self.sources.exists() else {}
        return found

    def keep_sources(self, digest: str, files: Mapping[str, str]) -> None:
        """Note what a digest of all sources stands for."""
        with _locked(self.sources):
            known = self.known_sources()
            if digest not in known:
                with writing(self.sources):
                    temporary = self.sources.with_suffix(".new")
                    temporary.write_text(json.dumps({**known, digest: dict(files)}, indent=1) + "\n")
                    os.replace(temporary, self.sources)

    @contextmanager
    def running(self) -> Iterator[bool]:
        """Hold the study's run; yields whether nobody else holds it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / ".run.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True


def _lines(path: Path) -> Iterator[Record]:
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:  # cut off by a kill
                continue


def _append(path: Path, record: Mapping[str, Any]) -> None:
    line = json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"
    with _locked(path), writing(path, len(line)), path.open("a+b") as file:
        file.seek(0, os.SEEK_END)
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = b"\n" + line
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other processes from writing into the folder meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / ".write.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
