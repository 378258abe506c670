"""Which clients take part in a round, drop out of it or are slow, and what happens if clients fail."""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fl_lightning.counts import Counted
from fl_lightning.kernels.randomness import generator
from fl_lightning.renamed import refuse_former_names
from fl_lightning.round.availability import Trace, trace_of
from fl_lightning.round.client_draws import WeightedDraw, some_of

#: The longest time limit, a year; alarms cannot be set for much later.
LONGEST_SECONDS = 365 * 24 * 3600


@refuse_former_names
class Participation(Counted):
    """Chooses the clients of each round from the seed and the round alone.

    Args:
        fraction: Share of the training clients chosen for a round, in (0, 1]; at least one client.
        num_clients: Number of clients chosen for a round, instead of ``fraction``.
        availability: Which clients are reachable in which rounds; only these are chosen. Path of a CSV file with the
            columns ``client`` (its name), ``first`` and ``last`` (rounds, from 0, inclusive), or a table of zeros and
            ones with a row for each round and a column for each client. It begins again after its last round. If fewer
            are reachable than a round asks for, all of these take part; None for everyone in every round.
        sampling_weights: Weights in proportion to which clients are chosen, without replacement: a client with the
            share p of all weights is in a round of K clients with probability K p, at most 1. ``examples`` for the
            number of training examples, or one number for each client, in order or by name; None for equal ones.
            The plain mean of the updates (``strategy.weighting: equal``) is then an unbiased estimate of their mean
            over all clients weighted by p.
        dropout_probability: Probability that a chosen client does not respond in a round.
        straggler_probability: Probability that a chosen client completes only some of its local epochs (uniform below
            the full number, as in FedProx).
        held_out_fraction: Share of all clients that are held out of training, to be onboarded to the server of the best
            round at the end as unseen clients.
        evaluation_clients: Number of training clients that are evaluated, drawn once for the whole run so that rounds
            can be compared; None for all of them. Predictions are made for all clients.
        on_failure: ``skip`` leaves a failing client out of the round and goes on, unless a user's code fails for all in
            the first round; ``stop`` ends the run.
        min_clients: Number of updates that a round needs (its quorum); robust aggregation may need more. A round with
            fewer fails: the server aggregates nothing in the stage that has too few, nor in later ones.
        max_failed_rounds: Number of failed rounds in a row after which the run ends with an error.
        max_update_norm: Largest Euclidean norm of a client's update (all parameters that it sends, minus those that it
            was sent; in a stage that sends none, the parameters themselves). A client with a longer one counts as
            failed, and so does one with a client output (a prototype, a sum of gradients) more than 1,000 times as long
            as the median of the exchange. None for no bound.
        time_limit_seconds: Time that a client may take for a stage or an evaluation. A client that takes longer counts
            as failed; a call of compiled code is interrupted only when it returns. The clients in a group of the
            stacked executor compute together, within the sum of their limits; if that is not enough, each is tried
            alone. None for no bound. (Times vary: a run in which a client is too slow may end differently when it is
            repeated or resumed.)

    Raises:
        ValueError: A value is out of range.
    """

    settings_prefix = "participation."

    _trace: Trace | None = None
    _weight_N: Tensor | None = None
    _draw_of_all: WeightedDraw | None = None

    def __init__(
        self,
        *,
        fraction: float = 1.0,
        num_clients: int | None = None,
        availability: Any = None,
        sampling_weights: Literal["examples"] | list[float] | dict[str, float] | None = None,
        dropout_probability: float = 0.0,
        straggler_probability: float = 0.0,
        held_out_fraction: float = 0.0,
        evaluation_clients: int | None = None,
        on_failure: Literal["skip", "stop"] = "skip",
        min_clients: int = 1,
        max_failed_rounds: int = 3,
        max_update_norm: float | None = None,
        time_limit_seconds: float | None = None,
    ) -> None:
        if not 0 < fraction <= 1:
            raise ValueError(f"participation.fraction must be in (0, 1], got {fraction}")
        for name, count in {
            "num_clients": num_clients,
            "evaluation_clients": evaluation_clients,
            "min_clients": min_clients,
            "max_failed_rounds": max_failed_rounds,
        }.items():
            if count is not None and count < 1:
                raise ValueError(f"participation.{name} must be at least 1, got {count}")
        if num_clients is not None and fraction != 1:
            raise ValueError("give participation.fraction or participation.num_clients, not both")
        for name, value in {
            "dropout_probability": dropout_probability,
            "straggler_probability": straggler_probability,
            "held_out_fraction": held_out_fraction,
        }.items():
            if not 0 <= value < 1:
                raise ValueError(f"participation.{name} must be in [0, 1), got {value}")
        for name, bound in {"max_update_norm": max_update_norm, "time_limit_seconds": time_limit_seconds}.items():
            if bound is not None and not bound > 0:
                raise ValueError(f"participation.{name} must be positive, or null for no bound, got {bound}")
        if time_limit_seconds is not None and time_limit_seconds > LONGEST_SECONDS:
            raise ValueError(
                f"participation.time_limit_seconds must be at most {LONGEST_SECONDS:g}, got {time_limit_seconds}: give "
                "null for no bound"
            )
        self.fraction = fraction
        self.num_clients = num_clients
        self.availability = availability
        self.sampling_weights = sampling_weights
        self.dropout_probability = dropout_probability
        self.straggler_probability = straggler_probability
        self.held_out_fraction = held_out_fraction
        self.evaluation_clients = evaluation_clients
        self.on_failure = on_failure
        self.min_clients = min_clients
        self.max_failed_rounds = max_failed_rounds
        self.max_update_norm = max_update_norm
        self.time_limit_seconds = time_limit_seconds

    def training_clients(self, num_clients: int, seed: int) -> tuple[int, ...]:
        """The clients that are not held out.

        Raises:
            ValueError: A round asks for more clients than there are, or needs more than it asks for, or no client would
                be left to train.
        """
        num_new = round(self.held_out_fraction * num_clients)
        remaining = num_clients - num_new
        if remaining < 1:
            raise ValueError(
                f"participation.held_out_fraction={self.held_out_fraction} leaves no client of {num_clients} to train"
            )
        if self.num_clients is not None and self.num_clients > remaining:
            raise ValueError(
                f"participation.num_clients is {self.num_clients}, but only {remaining} clients train: lower it"
            )
        if self.evaluation_clients is not None and self.evaluation_clients > remaining:
            raise ValueError(
                f"participation.evaluation_clients is {self.evaluation_clients}, but only {remaining} clients train: "
                "lower it, or leave it null for all of them"
            )
        if self.min_clients > (asked := self.num_chosen(remaining)):
            raise ValueError(
                f"participation.min_clients is {self.min_clients}, but a round has {asked} clients, so every "
                "round would fail: lower it, or raise participation.fraction or num_clients"
            )
        if not num_new:
            return tuple(range(num_clients))
        order = torch.randperm(num_clients, generator=generator(seed, "held_out")).tolist()
        return tuple(sorted(order[num_new:]))

    def prepare(self, names: Sequence[str], clients: Sequence[int], num_examples: Callable[[int], int]) -> None:
        """Read the availability and the weights, before :meth:`draw` is called.

        Args:
            names: Of all clients.
            clients: The training clients, ascending.
            num_examples: Number of training examples of a client.

        Raises:
            ValueError: They do not fit the clients.
        """
        self._trace, self._weight_N, self._draw_of_all = None, None, None
        if self.availability is not None:
            self._trace = trace_of(self.availability, names).of(clients, len(names))
        if self.sampling_weights is not None:
            weights = _weights(self.sampling_weights, names, clients, num_examples)
            self._weight_N = torch.tensor(weights, dtype=torch.float64)
            wanted = self.num_chosen(len(clients))
            _check_weights(self._weight_N, names, clients, wanted)
            self._draw_of_all = WeightedDraw(self._weight_N, wanted)

    def draw(self, clients: Sequence[int], round_idx: int, seed: int) -> tuple[dict[int, float], list[int]]:
        """Draw a round.

        Returns:
            The work fraction of each participating client (1 unless it is a straggler), by client ascending; and the
            chosen clients that dropped out.
        """
        rng = generator(seed, "participation", round_idx)
        chosen = sorted(clients[i] for i in self._chosen(len(clients), round_idx, rng))
        drops, slow, share = torch.rand(3, len(chosen), generator=rng, dtype=torch.float64).tolist()
        work_fraction = {
            client: share[i] if slow[i] < self.straggler_probability else 1.0
            for i, client in enumerate(chosen)
            if drops[i] >= self.dropout_probability
        }
        return work_fraction, [client for client in chosen if client not in work_fraction]

    def num_reachable(self, num_clients: int, round_idx: int) -> int:
        """How many of the training clients are reachable in a round."""
        return num_clients if self._trace is None else len(self._trace.reachable(round_idx))

    def _chosen(self, number: int, round_idx: int, rng: torch.Generator) -> list[int]:
        """The clients of a round, by their numbers among the training clients."""
        wanted = self.num_chosen(number)
        here_N = None if self._trace is None else self._trace.reachable(round_idx)
        if here_N is None:
            return some_of(number, wanted, rng) if self._draw_of_all is None else self._draw_of_all(rng)
        if self._weight_N is None:
            chosen = some_of(len(here_N), min(wanted, len(here_N)), rng)
        else:
            chosen = WeightedDraw(self._weight_N[here_N], wanted)(rng)
        return here_N[chosen].tolist()

    def evaluated(self, clients: Sequence[int], seed: int) -> tuple[int, ...]:
        """The training clients that are evaluated, ascending."""
        if self.evaluation_clients is None:
            return tuple(clients)
        order = torch.randperm(len(clients), generator=generator(seed, "evaluation clients")).tolist()
        return tuple(sorted(clients[i] for i in order[: self.evaluation_clients]))

    def num_chosen(self, num_clients: int) -> int:
        """How many of the training clients are chosen for a round."""
        return self.num_clients or max(1, math.floor(self.fraction * num_clients + 0.5))


def check_draw(participation: Participation, drawn: Any, clients: Sequence[int]) -> None:
    """Refuse what a subclass's own :meth:`Participation.draw` returned, unless it is a draw of the training clients.

    Raises:
        ValueError: It is none.
    """
    if type(participation).draw is Participation.draw:
        return
    shares, dropped = drawn if isinstance(drawn, tuple | list) and len(drawn) == 2 else (None, ())
    wrong = f"{type(participation).__name__}.draw returned"
    if not isinstance(shares, dict):
        raise ValueError(
            f"{wrong} {' '.join(repr(drawn).split()):.60}: return a dict from each client that takes part to its share "
            "of the epochs, and a list of those that dropped out"
        )
    known = set(clients)
    if others := [client for client in (*shares, *dropped) if client not in known]:
        raise ValueError(f"{wrong} client {others[0]!r}, which is not one of the training clients: give some of these")
    for client, share in shares.items():
        if not 0 <= share <= 1:
            raise ValueError(f"{wrong} the share {share!r} for client {client}: give one in [0, 1]")


def epochs_of(work_fraction: float, num_epochs: int) -> int:
    """Number of local epochs of a client: all for a work fraction of 1; for a straggler at least one, fewer than all.

    Example:
        >>> [epochs_of(work_fraction, 5) for work_fraction in (1.0, 0.99, 0.5, 0.0)]
        [5, 4, 3, 1]
    """
    return num_epochs if work_fraction == 1.0 or num_epochs < 2 else 1 + math.floor(work_fraction * (num_epochs - 1))


def _weights(
    given: str | Sequence[float] | dict[str, float],
    names: Sequence[str],
    clients: Sequence[int],
    num_examples: Callable[[int], int],
) -> list[float]:
    """The weights of some clients.

    Raises:
        ValueError: There is not one for each client.
    """
    if isinstance(given, str):
        if given != "examples":
            raise ValueError(f"participation.sampling_weights is {given!r}: give examples, or a number for each client")
        return [float(num_examples(client)) for client in clients]
    if isinstance(given, dict):
        there = dict.fromkeys(names)
        if others := [name for name in given if name not in there]:
            raise ValueError(f"participation.sampling_weights has {others[0]!r}, which is no client: leave it out")
        if missing := [name for name in names if name not in given]:
            raise ValueError(f"participation.sampling_weights has none for client {missing[0]!r}: give one for each")
        return [float(given[names[client]]) for client in clients]
    if len(given) != len(names):
        raise ValueError(
            f"participation.sampling_weights has {len(given)} numbers for {len(names)} clients: give one for each"
        )
    return [float(given[client]) for client in clients]


def _check_weights(weight_N: Tensor, names: Sequence[str], clients: Sequence[int], wanted: int) -> None:
    """Refuse weights by which a round cannot be drawn, and warn of those that are too large.

    Raises:
        ValueError: One is negative, infinite or nan, or too few are positive.
    """
    wrong = (~(weight_N.isfinite() & (weight_N >= 0))).nonzero().flatten().tolist()
    if wrong:
        raise ValueError(
            f"participation.sampling_weights of client {names[clients[wrong[0]]]!r} is {float(weight_N[wrong[0]]):g}: "
            "give a finite number that is not negative"
        )
    if (positive := int((weight_N > 0).sum())) < wanted:
        raise ValueError(
            f"participation.sampling_weights has {positive} positive numbers, but a round has {wanted} clients: give "
            "more of them, or lower participation.num_clients or fraction"
        )
    share_N = wanted * weight_N / weight_N.sum()
    largest = int(share_N.argmax())
    if wanted < len(weight_N) and float(share_N[largest]) > 1 + 1e-9:
        warnings.warn(
            f"participation.sampling_weights: client {names[clients[largest]]!r} has {share_N[largest] / wanted:.0%} "
            f"of the weights, more than one in {wanted}: it is in every round, and the plain mean is biased; have at "
            f"most {int(wanted / float(share_N[largest]) + 1e-9)} clients in a round for an unbiased one",
            stacklevel=2,
        )
