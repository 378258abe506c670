"""Clients that fail, and rounds in which too few are left: what is counted, what is said, and what ends a run."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fl_lightning.round.participation import Participation
from fl_lightning.run.assembly import Run
from fl_lightning.run.curve import says_overflow


class ClientFailure(RuntimeError):
    """A client failed and ``participation.on_failure`` is ``stop``."""


class TooFewUpdates(RuntimeError):
    """Round after round fewer clients responded than a round needs."""


@dataclass(frozen=True)
class Failures:
    """Follows the failures of a run, which keeps them (``failures``, ``num_failures``, ``reported``).

    Args:
        run: The run.
        participation: What is done about clients that fail, and how many a round needs.
    """

    run: Run
    participation: Participation

    @property
    def quorum(self) -> int:
        """Updates without which a round fails."""
        return max(self.participation.min_clients, self.run.strategy.min_updates)

    def report(self, failures: Mapping[int, str], where: str, num_clients: int) -> None:
        """Count failures and say why; of an error in a user's code, or an overflow, once in a run for all its clients.

        Args:
            failures: Why clients failed.
            where: In which stage or evaluation, in words.
            num_clients: How many were asked.

        Raises:
            ClientFailure: There are some, and ``participation.on_failure`` is ``stop``.
        """
        run, stops = self.run, self.participation.on_failure == "stop"
        for client, why in failures.items():
            name = run.registry.names[client]
            run.failures[name] = str(why)
            run.num_failures[name] = run.num_failures.get(name, 0) + 1
            run.num_overflows += bool(says_overflow(why))
        for clients in alike(failures, num_clients):
            locations = {location for client in clients if (location := place_of(failures[client]))}
            if locations and locations <= run.reported:
                continue
            run.reported |= locations
            message = f"{self._named(clients, num_clients)} failed {where}: {failures[clients[0]]}"
            if stops:
                raise ClientFailure(f"{message} (participation.on_failure is 'stop')")
            if run.fabric.is_global_zero:
                left_out = f"; {'it is' if len(clients) == 1 else 'they are'} left out"
                counted = ", and failures like it are only counted from now on" if locations else ""
                warnings.warn(message + left_out + counted, stacklevel=2)

    def check_failed_rounds(self) -> None:
        """End a run in which nothing is learned any more.

        Raises:
            TooFewUpdates: The last ``participation.max_failed_rounds`` rounds failed.
        """
        limit = self.participation.max_failed_rounds
        last = self.run.history[-limit:]
        if len(last) == limit and all(row["failed_round"] for row in last):
            raise TooFewUpdates(f"the last {limit} rounds failed (participation.max_failed_rounds): {self.shortage()}")

    def check_any_round(self) -> None:
        """Refuse a run's result where no round counted: its models are those that it began with.

        Raises:
            TooFewUpdates: None did.
        """
        run = self.run
        if run.interruption.received is None and run.history and all(row["failed_round"] for row in run.history):
            run.selection.reset()
            what = "the only round failed" if len(run.history) == 1 else f"all {len(run.history)} rounds failed"
            raise TooFewUpdates(f"nothing was learned, {what}: {self.shortage()}")

    def shortage(self) -> str:
        """What went wrong in a failed round; of many reasons the first three."""
        missing = {**self.run.failures, **dict.fromkeys(self.run.dropouts, "dropped out")}
        of_kind: dict[str, list[str]] = {}
        for name, why in missing.items():
            of_kind.setdefault(why, []).append(name)
        failures = "; ".join(
            f"{names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}: {why}"
            for why, names in list(of_kind.items())[:3]
        )
        setting = "participation.min_clients"
        if self.quorum > self.participation.min_clients:
            setting = "strategy.aggregation needs as many"
        return f"fewer than {self.quorum} clients responded ({setting}); {failures}"

    def _named(self, clients: Sequence[int], num_clients: int) -> str:
        """Some clients in words."""
        if len(clients) == 1:
            return self.run.registry.names[clients[0]]
        if len(clients) == num_clients:
            return f"all {num_clients} clients"
        others = len(clients) - 1
        return f"{self.run.registry.names[clients[0]]} and {others} other{'s' if others > 1 else ''}"


def alike(failures: Mapping[int, str], num_clients: int) -> list[list[int]]:
    """Clients by what is one failure: a kind of error and the line of the user's code; others stand alone.

    Where all clients failed with one kind of error in the user's code, it is one whatever the line.
    """
    locations = {client: place_of(why) for client, why in failures.items()}
    if (
        len(failures) == num_clients
        and all(locations.values())
        and len({location[0] for location in locations.values()}) == 1
    ):
        return [list(failures)]
    result: dict[tuple[str, ...], list[int]] = {}
    for client, location in locations.items():
        result.setdefault(location or (str(client),), []).append(client)
    return list(result.values())


def place_of(why: str) -> tuple[str, ...]:
    """The kind of error and the line of the user's code that raised it, or how numbers overflowed; else empty."""
    location = getattr(why, "location", "") or says_overflow(why)
    return (why.partition(":")[0], location) if location else ()
