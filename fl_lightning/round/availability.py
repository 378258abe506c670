"""Availability traces: which clients are reachable in which rounds.

Shape legend: I times of reachability, N clients, R rounds.
"""

import csv
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SETTING = "participation.availability"
COLUMNS = ("client", "first", "last")


@dataclass(frozen=True)
class Trace:
    """When clients are reachable. It begins again after its last round.

    Attributes:
        client_I: Clients by their number among those in question, ascending, int64; those of a round are different.
        first_I: The first round of each time, from 0.
        last_I: The last round, inclusive.
        num_rounds: R.
    """

    client_I: Tensor
    first_I: Tensor
    last_I: Tensor
    num_rounds: int

    def reachable(self, round_idx: int) -> Tensor:
        """The clients that are reachable in a round, ascending."""
        now = round_idx % self.num_rounds
        return self.client_I[(self.first_I <= now) & (now <= self.last_I)]

    def of(self, clients: Sequence[int], num_clients: int) -> "Trace":
        """The trace of some of all clients, which are numbered anew."""
        number_N = torch.full((num_clients,), -1)
        number_N[torch.tensor(clients)] = torch.arange(len(clients))
        number_I = number_N[self.client_I]
        kept = number_I >= 0
        return Trace(number_I[kept], self.first_I[kept], self.last_I[kept], self.num_rounds)


def trace_of(given: Any, names: Sequence[str]) -> Trace:
    """Read a trace.

    Args:
        given: Path of a CSV file with the columns ``client`` (its name), ``first`` and ``last`` (rounds, from 0,
            inclusive), several rows for a client that comes back; or a table of zeros and ones (or booleans) with a
            row for each round and a column for each client, as a tensor or as lists.
        names: The clients' names.

    Raises:
        ValueError: The file or the table is not of that form, has a client that there is not, or nobody is reachable.
    """
    trace = _read(Path(given), names) if isinstance(given, str | Path) else _of_table(given, len(names))
    if not len(trace.client_I):
        raise ValueError(f"{SETTING} has no client that is ever reachable: give every client at least one round")
    return trace


def digest_of(given: Any) -> str:
    """SHA-256 (hex) of a file or table; empty if it cannot be read, which :func:`trace_of` says."""
    try:
        if isinstance(given, str | Path):
            return hashlib.sha256(Path(given).read_bytes()).hexdigest()
        return hashlib.sha256(torch.as_tensor(given).cpu().numpy().tobytes()).hexdigest()
    except (OSError, TypeError, ValueError, RuntimeError):
        return ""


def _of_table(given: Any, num_clients: int) -> Trace:
    try:
        table_RN = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{SETTING} is {given!r:.60}, which is neither a path nor a table: {error}") from error
    if table_RN.dim() != 2 or table_RN.shape[1] != num_clients or not len(table_RN):
        raise ValueError(
            f"{SETTING} has the shape {tuple(table_RN.shape)}: give a row for each round and a column for each of the "
            f"{num_clients} clients"
        )
    wrong = ((table_RN != 0) & (table_RN != 1)).nonzero()
    if len(wrong):
        row, column = wrong[0].tolist()
        raise ValueError(
            f"{SETTING} has {table_RN[row, column].item()} for round {row} and client {column}: give 1 where a client "
            "is reachable, else 0"
        )
    step_RN = torch.nn.functional.pad(table_RN.to(torch.int8), (0, 0, 1, 1)).diff(dim=0)
    client_I, first_I = (step_RN == 1).t().nonzero().t()
    last_I = (step_RN == -1).t().nonzero()[:, 1] - 1
    return Trace(client_I, first_I, last_I, len(table_RN))


def _read(path: Path, names: Sequence[str]) -> Trace:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = csv.reader(file)
            if (header := tuple(next(rows, ()))) != COLUMNS:
                raise ValueError(
                    f"{SETTING}: {path} begins with {','.join(header)!r:.60}: its columns must be {','.join(COLUMNS)}"
                )
            times = _times(path, rows, names)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{SETTING} is {str(path)!r}, which cannot be read: {error}") from error
    times_I3 = torch.tensor(times, dtype=torch.int64).view(-1, 3)
    order_I = times_I3[:, 1].argsort(stable=True)
    times_I3 = times_I3[order_I[times_I3[order_I, 0].argsort(stable=True)]]
    client_I, first_I, last_I = times_I3.unbind(dim=1)
    twice = ((client_I[1:] == client_I[:-1]) & (first_I[1:] <= last_I[:-1])).nonzero().flatten()
    if len(twice):
        where = int(twice[0]) + 1
        raise ValueError(
            f"{SETTING}: {path} has client {names[int(client_I[where])]!r} twice in round {int(first_I[where])}: let "
            "its rows not overlap"
        )
    return Trace(client_I, first_I, last_I, int(last_I.max()) + 1 if len(last_I) else 1)


def _times(path: Path, rows: Any, names: Sequence[str]) -> list[tuple[int, int, int]]:
    index, times = {name: client for client, name in enumerate(names)}, []
    for row in rows:
        where = f"{SETTING}: {path}, line {rows.line_num}"
        if len(row) != len(COLUMNS):
            raise ValueError(f"{where} has {len(row)} values: give {','.join(COLUMNS)}")
        name, *rounds = row
        if name not in index:
            raise ValueError(f"{where} has the client {name!r}, but the {len(names)} clients are {_some(names)}")
        for column, value in zip(COLUMNS[1:], rounds, strict=True):
            if not value.strip().isdecimal():
                raise ValueError(f"{where} has {column} {value!r}: give the number of a round, from 0")
        first, last = map(int, rounds)
        if last < first or last >= 2**31:
            raise ValueError(f"{where} is from round {first} to {last}: let last be at least first, below {2**31}")
        times.append((index[name], first, last))
    return times


def _some(names: Sequence[str]) -> str:
    """The first of some names."""
    return ", ".join(names[i] for i in range(min(3, len(names)))) + (", ..." if len(names) > 3 else "")
