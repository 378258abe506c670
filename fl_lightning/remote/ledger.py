"""A site's record, over all jobs and runs, of which clients were summed from which of its states.

The difference of two sums over different clients reveals something about the clients by which they differ. So all sums
from the same state of a client are over the same clients, whatever the server calls the run, and a run sums a state
once: the same work, requested again after a restart of the server, gets the same response. The masks of a sum hide one
response: the ledger has a digest of it before it leaves, so that another one under the same masks is noticed, whichever
process of the site it comes from.

The record is one SQLite file in the folder of the site's account; an entry is on the disk before the response leaves,
and processes of several jobs share it. States are identified by a digest that is keyed by a secret in the same folder.
"""

import hashlib
import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from fl_lightning.remote.sealed import account_key, begin, has_begun

#: Columns of each table: its primary key, and the others; the last one counts the rows of the others.
_TABLES = {
    "sums": ("purpose, state", "members, survivors"),
    "work": ("run, state", "work"),
    "evaluations": ("run, round_idx, content", "models"),
    "masked": ("label", "summand"),
    "counts": ("counted", "num_rows"),
}
#: Tables whose rows are counted.
_COUNTED = [table for table in _TABLES if table != "counts"]
#: The table that ledgers of earlier versions do not have.
_ADDED = "masked"
_SECONDS_TO_WAIT = 30.0
Fact = str | int | None


class SumLedger:
    """The ledger of a site's sums and evaluations.

    Every row has a keyed digest, as have the numbers of rows, and all are checked when the ledger is opened, so that
    changes on the disk are detected.

    Args:
        folder: The site's account folder, for all runs; created if it does not exist.

    Raises:
        ValueError: The ledger or the folder's secret is damaged, or the ledger was emptied or lost.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "sums.sqlite"
        self.key = account_key(folder)
        if not has_begun(folder, self.path.name):
            self._create()
            begin(folder, self.path.name)
        with self._open() as book:
            book.execute("BEGIN IMMEDIATE")  # between a row and its count
            self._complete(book)
            for table, (names, others) in _TABLES.items():
                for *facts, seal in book.execute(f"SELECT {names}, {others}, seal FROM {table}"):
                    if seal != self._seal(table, facts):
                        raise sqlite3.DatabaseError("a row is damaged")
            for table in _COUNTED:
                self._check_count(book, table)
            if book.execute("PRAGMA integrity_check").fetchone() != ("ok",):
                raise sqlite3.DatabaseError("its pages are inconsistent")

    def name(self, content: bytes) -> str:
        """A state's name in the ledger."""
        return hashlib.blake2b(content, key=self.key, digest_size=32).hexdigest()

    def bound(self, purpose: str, state: str) -> list[str] | None:
        """The clients that a sum from a state must be over; None if there was no sum yet.

        Args:
            purpose: ``run`` or ``evaluate``.
            state: Its name in the ledger.
        """
        with self._open() as book:
            row = book.execute(
                "SELECT members, survivors FROM sums WHERE purpose = ? AND state = ?", (purpose, state)
            ).fetchone()
        return None if row is None else list(json.loads(row[1] or row[0]))

    def is_other_work(self, run: str, state: str, work: str) -> bool:
        """Whether a run has had other work of a state summed."""
        with self._open() as book:
            row = book.execute("SELECT work FROM work WHERE run = ? AND state = ?", (run, state)).fetchone()
        return row is not None and row[0] != work

    def is_spent(self, run: str, state: str) -> bool:
        """Whether a run has had a state summed."""
        return self.is_other_work(run, state, "")

    def enter(
        self, purpose: str, state: str, members: Sequence[str], *, run: str, work: str | None
    ) -> Literal["first", "again", "refused"]:
        """Record a sum before the client's numbers leave.

        Args:
            purpose: ``run`` or ``evaluate``.
            state: Its name in the ledger.
            members: Names of all clients whose numbers may be summed.
            run: The run.
            work: A digest of the request; None if there may be several requests for one state.

        Returns:
            Whether it is the first sum from this state, another one over the same clients, which must then all
            survive, or one that is refused.
        """
        text = json.dumps(sorted(members))
        with self._open() as book:
            book.execute("BEGIN IMMEDIATE")
            row = book.execute(
                "SELECT members, survivors FROM sums WHERE purpose = ? AND state = ?", (purpose, state)
            ).fetchone()
            if row is not None and (row[1] or row[0]) != text:
                return "refused"
            if row is None:
                self._write(book, "sums", purpose, state, text, None)
            if work is not None:
                old = book.execute("SELECT work FROM work WHERE run = ? AND state = ?", (run, state)).fetchone()
                if old is not None and old[0] != work:
                    return "refused"
                if old is None:
                    self._write(book, "work", run, state, work)
        return "first" if row is None else "again"

    def close(self, purpose: str, state: str, survivors: Sequence[str]) -> bool:
        """Record the clients whose sum is opened, before a share leaves; False if it was opened over others."""
        text = json.dumps(sorted(survivors))
        with self._open() as book:
            book.execute("BEGIN IMMEDIATE")
            row = book.execute(
                "SELECT members, survivors FROM sums WHERE purpose = ? AND state = ?", (purpose, state)
            ).fetchone()
            if row is None or (row[1] is not None and row[1] != text):
                return False
            self._write(book, "sums", purpose, state, row[0], text)
        return True

    def count_models(self, run: str, round_idx: int, content: str, models: int, most: int) -> bool:
        """Record an evaluation; False if the round would have more than ``most`` models. A repeated one counts once."""
        with self._open() as book:
            book.execute("BEGIN IMMEDIATE")
            known = dict(
                book.execute(
                    "SELECT content, models FROM evaluations WHERE run = ? AND round_idx = ?", (run, round_idx)
                ).fetchall()
            )
            if content in known:
                return True
            if sum(known.values()) + models > most:
                return False
            self._write(book, "evaluations", run, round_idx, content, models)
        return True

    def mask(self, label: str, summand: str) -> bool:
        """Record what the masks of a sum hide, before it leaves; False if they have hidden something else.

        Args:
            label: The sum's label.
            summand: The digest of what is masked (:meth:`name`).
        """
        with self._open() as book:
            book.execute("BEGIN IMMEDIATE")
            row = book.execute("SELECT summand FROM masked WHERE label = ?", (label,)).fetchone()
            if row is None:
                self._write(book, "masked", label, summand)
        return row is None or row[0] == summand

    def _create(self) -> None:
        """Create the tables that do not exist, and count the rows of those that do."""
        os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
        with self._open() as book:
            book.execute("BEGIN IMMEDIATE")
            for table, (names, others) in _TABLES.items():
                book.execute(f"CREATE TABLE IF NOT EXISTS {table} ({names}, {others}, seal, PRIMARY KEY ({names}))")
            for table in _COUNTED:
                self._insert(book, "counts", table, _num_rows(book, table))

    def _complete(self, book: sqlite3.Connection) -> None:
        """Add the table that a ledger of an earlier version does not have; a table that was lost is still counted."""
        there = book.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (_ADDED,)).fetchone()
        if there is None and not book.execute("SELECT 1 FROM counts WHERE counted = ?", (_ADDED,)).fetchone():
            names, others = _TABLES[_ADDED]
            book.execute(f"CREATE TABLE {_ADDED} ({names}, {others}, seal, PRIMARY KEY ({names}))")
            self._insert(book, "counts", _ADDED, 0)

    def _write(self, book: sqlite3.Connection, table: str, *facts: Fact) -> None:
        """Write a row, replacing one with the same key, and the number of rows."""
        self._check_count(book, table)
        self._insert(book, table, *facts)
        self._insert(book, "counts", table, _num_rows(book, table))

    def _insert(self, book: sqlite3.Connection, table: str, *facts: Fact) -> None:
        placeholders = ", ".join("?" * (len(facts) + 1))
        book.execute(f"INSERT OR REPLACE INTO {table} VALUES ({placeholders})", (*facts, self._seal(table, facts)))

    def _check_count(self, book: sqlite3.Connection, table: str) -> None:
        """Detect rows that were deleted."""
        facts = (table, _num_rows(book, table))
        counted = book.execute("SELECT num_rows, seal FROM counts WHERE counted = ?", (table,)).fetchone()
        if counted != (facts[1], self._seal("counts", facts)):
            raise sqlite3.DatabaseError("rows are missing")

    def _seal(self, table: str, facts: Sequence[Fact]) -> str:
        return self.name(json.dumps([table, *facts]).encode())

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """The open ledger; what is written is on the disk when the block ends."""
        try:  # a file that is missing is not created here
            book = sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=rw", uri=True, timeout=_SECONDS_TO_WAIT)
        except sqlite3.DatabaseError as error:
            raise self._damaged(error) from error
        try:
            book.execute("PRAGMA synchronous = FULL")
            with book:
                yield book
        except sqlite3.DatabaseError as error:
            raise self._damaged(error) from error
        finally:
            book.close()

    def _damaged(self, error: sqlite3.DatabaseError) -> ValueError:
        return ValueError(
            f"{self.path.name} of this site's account cannot be read or written ({error}): restore it from a copy; "
            "without it the site does not know which sums it has taken part in"
        )


def _num_rows(book: sqlite3.Connection, table: str) -> int:
    return int(book.execute(f"SELECT count(*) FROM {table}").fetchone()[0])
