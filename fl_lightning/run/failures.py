"""Failing clients and rounds below the quorum: how they are counted and reported, and when they end a run."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fl_lightning.round.participation import Participation
from fl_lightning.run.assembly import Run
from fl_lightning.run.curve import says_overflow


class ClientFailure(RuntimeError):
    """A client failed and ``participation.on_failure`` is ``stop``, or all fail alike in the first round."""


class TooFewUpdates(RuntimeError):
    """Too many rounds in a row had fewer updates than a round needs."""


@dataclass(frozen=True)
class Failures:
    """Records failures in the run (``failures``, ``num_failures``, ``reported``) and reports them.

    Args:
        run: The run.
        participation: How failing clients are handled, and how many clients a round needs.
    """

    run: Run
    participation: Participation

    @property
    def quorum(self) -> int:
        """How many updates a round needs."""
        return max(self.participation.min_clients, self.run.strategy.min_updates)

    def report(self, failures: Mapping[int, str], where: str, num_clients: int) -> None:
        """Count failures and warn of them; a user's code's error, or an overflow, once in a run for all its clients.

        What all clients fail with in a user's code in the first round ends the run: it would go on to fail.

        Args:
            failures: Why clients failed, by client.
            where: The stage or evaluation, in words.
            num_clients: How many clients took part in it.

        Raises:
            ClientFailure: A client failed, and ``participation.on_failure`` is ``stop``; or all of several failed so.
        """
        run, stops = self.run, self.participation.on_failure == "stop"
        for client, why in failures.items():
            name = run.registry.names[client]
            run.failures[name] = str(why)
            run.num_failures[name] = run.num_failures.get(name, 0) + 1
            run.num_overflows += bool(says_overflow(why))
        for clients in alike(failures, num_clients):
            locations = {location for client in clients if (location := location_of(failures[client]))}
            if locations and locations <= run.reported:
                continue
            run.reported |= locations
            message = f"{self._named(clients, num_clients)} failed {where}: {failures[clients[0]]}"
            if stops:
                raise ClientFailure(f"{message} (participation.on_failure is 'stop')")
            if run.round_idx == 0 and len(clients) == num_clients > 1 and _is_users(failures[clients[0]]):
                raise ClientFailure(message)
            if run.fabric.is_global_zero:
                left_out = f"; {'it is' if len(clients) == 1 else 'they are'} left out"
                counted = ", and failures like it are only counted from now on" if locations else ""
                warnings.warn(message + left_out + counted, stacklevel=2)

    def check_failed_rounds(self) -> None:
        """End a run in which too many rounds have failed.

        Raises:
            TooFewUpdates: The last ``participation.max_failed_rounds`` rounds failed.
        """
        limit = self.participation.max_failed_rounds
        last = self.run.history[-limit:]
        if len(last) == limit and all(row["failed_round"] for row in last):
            raise TooFewUpdates(f"the last {limit} rounds failed (participation.max_failed_rounds): {self.shortage()}")

    def check_any_round(self) -> None:
        """Refuse the result of a run in which all rounds failed: its models are the initial ones.

        Raises:
            TooFewUpdates: All rounds failed.
        """
        run = self.run
        if not run.interrupted and run.history and all(row["failed_round"] for row in run.history):
            run.selection.reset()
            what = "the only round failed" if len(run.history) == 1 else f"all {len(run.history)} rounds failed"
            raise TooFewUpdates(f"nothing was learned, {what}: {self.shortage()}")

    def shortage(self) -> str:
        """What went wrong in a failed round: at most three reasons."""
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
        run = self.run
        if self.participation.availability is not None and run.round_idx:
            here = self.participation.num_reachable(len(run.training_clients), run.round_idx - 1)
            failures = f"participation.availability has {here} clients in the last round" + f"; {failures}" * bool(
                missing
            )
        return f"fewer than {self.quorum} clients responded ({setting}); {failures}"

    def _named(self, clients: Sequence[int], num_clients: int) -> str:
        """Describe some clients in words."""
        if len(clients) == 1:
            return self.run.registry.names[clients[0]]
        if len(clients) == num_clients:
            return f"all {num_clients} clients"
        others = len(clients) - 1
        return f"{self.run.registry.names[clients[0]]} and {others} other{'s' if others > 1 else ''}"


def alike(failures: Mapping[int, str], num_clients: int) -> list[list[int]]:
    """Group clients with the same failure: the same kind of error in the same line of the user's code.

    Other failures are groups of their own. If all clients failed with one kind of error in the user's code, they are
    one group, whatever the line.
    """
    locations = {client: location_of(why) for client, why in failures.items()}
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


def location_of(why: str) -> tuple[str, ...]:
    """The kind of error and the line of the user's code that raised it, or how numbers overflowed; otherwise empty."""
    location = getattr(why, "location", "") or says_overflow(why)
    return (why.partition(":")[0], location) if location else ()


def _is_users(why: str) -> bool:
    """Whether a user's code raised it."""
    return bool(getattr(why, "location", ""))
