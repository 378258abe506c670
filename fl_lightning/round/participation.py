"""Which clients take part in a round, drop out of it or are slow, and what happens if clients fail."""

import math
from collections.abc import Sequence
from typing import Literal

import torch

from fl_lightning.counts import Counted
from fl_lightning.kernels.randomness import generator
from fl_lightning.renamed import refuse_former_names

#: From so many clients on, those of a round are drawn without a permutation of all.
MANY_CLIENTS = 100_000
#: The longest time limit, a year; alarms cannot be set for much later.
LONGEST_SECONDS = 365 * 24 * 3600


@refuse_former_names
class Participation(Counted):
    """Chooses the clients of each round from the seed and the round alone.

    Args:
        fraction: Share of the training clients chosen for a round, in (0, 1]; at least one client.
        num_clients: Number of clients chosen for a round, instead of ``fraction``.
        dropout_probability: Probability that a chosen client does not respond in a round.
        straggler_probability: Probability that a chosen client completes only some of its local epochs (uniform below
            the full number, as in FedProx).
        held_out_fraction: Share of all clients that are held out of training, to be onboarded to the server of the best
            round at the end as unseen clients.
        evaluation_clients: Number of training clients that are evaluated, drawn once for the whole run so that rounds
            can be compared; None for all of them. Predictions are made for all clients.
        on_failure: ``skip`` leaves a failing client out of the round and goes on; ``stop`` ends the run.
        min_clients: Number of updates that a round needs (its quorum); robust aggregation may need more. A round with
            fewer fails: the server aggregates nothing in the stage that has too few, nor in later ones.
        max_failed_rounds: Number of failed rounds in a row after which the run ends with an error.
        max_update_norm: Largest Euclidean norm of a client's update (all parameters that it sends, minus those that it
            was sent; in a stage that sends none, the parameters themselves). A client with a longer one counts as
            failed. None for no bound.
        time_limit_seconds: Time that a client may take for a stage or an evaluation. A client that takes longer counts
            as failed; a call of compiled code is interrupted only when it returns. The clients in a group of the
            stacked executor compute together, within the sum of their limits; if that is not enough, each is tried
            alone. None for no bound. (Times vary: a run in which a client is too slow may end differently when it is
            repeated or resumed.)

    Raises:
        ValueError: A value is out of range.
    """

    settings_prefix = "participation."

    def __init__(
        self,
        *,
        fraction: float = 1.0,
        num_clients: int | None = None,
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

    def draw(self, clients: Sequence[int], round_idx: int, seed: int) -> tuple[dict[int, float], list[int]]:
        """Draw a round.

        Returns:
            The work fraction of each participating client (1 unless it is a straggler), by client ascending; and the
            chosen clients that dropped out.
        """
        rng = generator(seed, "participation", round_idx)
        wanted = self.num_chosen(len(clients))
        chosen = sorted(clients[i] for i in some_of(len(clients), wanted, rng))
        drops, slow, share = torch.rand(3, len(chosen), generator=rng, dtype=torch.float64).tolist()
        work_fraction = {
            client: share[i] if slow[i] < self.straggler_probability else 1.0
            for i, client in enumerate(chosen)
            if drops[i] >= self.dropout_probability
        }
        return work_fraction, [client for client in chosen if client not in work_fraction]

    def evaluated(self, clients: Sequence[int], seed: int) -> tuple[int, ...]:
        """The training clients that are evaluated, ascending."""
        if self.evaluation_clients is None:
            return tuple(clients)
        order = torch.randperm(len(clients), generator=generator(seed, "evaluation clients")).tolist()
        return tuple(sorted(clients[i] for i in order[: self.evaluation_clients]))

    def num_chosen(self, num_clients: int) -> int:
        """How many of the training clients are chosen for a round."""
        return self.num_clients or max(1, math.floor(self.fraction * num_clients + 0.5))


def some_of(number: int, wanted: int, rng: torch.Generator) -> list[int]:
    """Different indices below a number, drawn uniformly; of very many, without going through all of them.

    Args:
        number: How many there are.
        wanted: How many are drawn.
        rng: Of the draw.
    """
    if number < MANY_CLIENTS or 10 * wanted > number:
        order: list[int] = torch.randperm(number, generator=rng)[:wanted].tolist()
        return order
    chosen: dict[int, None] = {}
    while len(chosen) < wanted:
        chosen |= dict.fromkeys(torch.randint(number, (wanted,), generator=rng).tolist())
    return list(chosen)[:wanted]


def epochs_of(work_fraction: float, num_epochs: int) -> int:
    """Number of local epochs of a client: all for a work fraction of 1; for a straggler at least one, fewer than all.

    Example:
        >>> [epochs_of(work_fraction, 5) for work_fraction in (1.0, 0.99, 0.5, 0.0)]
        [5, 4, 3, 1]
    """
    return num_epochs if work_fraction == 1.0 or num_epochs < 2 else 1 + math.floor(work_fraction * (num_epochs - 1))
