"""Secure aggregation: which strategies need only sums, and how the server uses a sum.

The protocol is in ``sum_member.py`` (a site's part), ``sum_server.py`` (the server's) and ``masking.py`` (arithmetic).
What is promised against whom is in docs/explanation/what-leaves-a-client.md.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fl_lightning.remote.schema import MOST
from fl_lightning.round.payload import Payload, flatten, unflatten
from fl_lightning.round.stage import Stage
from fl_lightning.strategies.base import Strategy, SumWeighting

#: With two clients, each would learn the other's response.
FEWEST_CLIENTS = 3
#: More than this share of the clients that start a sum must complete it.
DEFAULT_SHARE = 2 / 3
#: Below a half, a server could have two disjoint groups of clients open both masks of one client.
LEAST_SHARE = 1 / 2
#: Rounds whose stages are checked before a run, since a strategy may ask for something only occasionally.
_ROUNDS_LOOKED_AT = 20
#: Name of what leaves a client: the masked numbers, the last of which is its weight.
MASKED = "masked"
#: What a site reports about another one whose shares are not valid.
CANNOT_OPEN = "the shares of client {} cannot be opened"
#: What a site's report about another one begins with whose keys, or whose signature of who survived, it refuses.
WRONG_KEYS, WRONG_SURVIVORS = "the keys of client {}", "the survivors of client {}"
#: Shown before a run starts.
WARNING = (
    "secure aggregation: the server learns the weighted sum of each round's responses. Two runs whose clients differ, "
    "or two rounds, still reveal something about the clients by which they differ, by the difference of their sums, "
    "which a dishonest server can make one client's response: set a policy with GaussianNoise(distributed=true) at the "
    "sites if that matters"
)


def threshold_of(count: int, share: float) -> int:
    """How many of ``count`` clients a sum needs: more than the given share of them."""
    return min(count, math.floor(share * count + 1e-9) + 1)


def check_share(share: float) -> None:
    """Refuse a threshold that a dishonest server can circumvent.

    Raises:
        ValueError: It is below a half, or above 1.
    """
    if not LEAST_SHARE <= share <= 1:
        raise ValueError(
            f"secure_share must be in [{LEAST_SHARE:g}, 1], got {share}: more than this share of a sum's clients must "
            "complete it"
        )


def check_participation(settings: Mapping[str, Any]) -> None:
    """Refuse a participation whose clients do different amounts of work: the masks of a sum cancel only for the same.

    Args:
        settings: The settings of :class:`~fl_lightning.round.participation.Participation` by name.

    Raises:
        ValueError: Some clients are stragglers.
    """
    if probability := settings.get("straggler_probability", 0.0):
        raise ValueError(
            f"participation.straggler_probability is {probability}, but under secure aggregation all clients of a "
            "round do the same work, since the difference of two sums would otherwise reveal a client's: leave it at "
            "0, or run without secure aggregation"
        )


def weighting_of(strategy: Strategy) -> SumWeighting:
    """How a strategy that needs only the weighted sum weights the clients.

    Raises:
        ValueError: Its server needs each client's own response.
    """
    owner = next(cls for cls in type(strategy).__mro__ if "sum_weighting" in vars(cls))
    below = type(strategy).__mro__[: type(strategy).__mro__.index(owner)]
    uses_rows = any(name in vars(cls) for cls in below for name in ("aggregate", "onboard", "mixing_matrix"))
    weighting = None if uses_rows else strategy.sum_weighting()
    if weighting is None:
        settings = [] if uses_rows else strategy.settings_against_sums()
        if settings:
            raise ValueError(
                "secure aggregation gives the server only the weighted sum of all responses, but "
                f"{', '.join(f'strategy.{name}' for name in settings)} of {type(strategy).__name__} needs the response "
                "of each client: leave it out, or run without secure aggregation"
            )
        raise ValueError(
            f"secure aggregation gives the server only the weighted sum of all responses, but "
            f"{type(strategy).__name__} "
            "needs the response of each client: choose a strategy that averages (FedAvg, FedProx, FedPer, FedOpt, "
            "Ditto, ... without a robust aggregation), or run it without secure aggregation"
        )
    return weighting


def check_stage(stage: Stage) -> None:
    """Refuse a stage whose responses are more than the parameters of one net.

    Raises:
        ValueError: They are.
    """
    if stage.client_outputs or stage.flat:
        what = (
            f"the client outputs {', '.join(stage.client_outputs)}"
            if stage.client_outputs
            else "models of several architectures"
        )
        raise ValueError(f"secure aggregation is for parameters only, but stage {stage.name!r} asks for {what}")


def check_stages(strategy: Strategy) -> None:
    """Refuse a strategy, after its ``setup``, if a stage asks for more than parameters; before anything is trained.

    Raises:
        ValueError: A stage does.
    """
    for stage in (
        *strategy.initial_stages(),
        *(stage for r in range(_ROUNDS_LOOKED_AT) for stage in strategy.stages(r)),
    ):
        check_stage(stage)


def summand(response: Payload, weighting: SumWeighting) -> tuple[Tensor, float]:
    """One client's numbers in a sum, float64 (D,), and its weight."""
    assert response.num_examples is not None
    weight = float(response.num_examples[0]) if weighting == "examples" else 1.0
    rows = {name: tensor.double() for name, tensor in response.parameters.items()}
    return flatten(rows)[0] if rows else torch.zeros(0, dtype=torch.float64), weight  # a stage that sends nothing


def wrong_weight(total_D: Tensor, num_clients: int) -> str:
    """What is wrong with the weight of a sum, its last number, which counts the clients or their examples."""
    weight = float(total_D[-1])
    whole = weight == round(weight) and 0 < weight <= num_clients * MOST
    return "" if whole else f"its weight is {weight:g}, which is not a number of examples"


def mean_of(total_D: Tensor, clients: tuple[int, ...], stage: Stage, like: Mapping[str, Tensor]) -> Payload:
    """The weighted mean of all responses, as if each client had sent it and had one training example.

    Args:
        total_D: The sum of all clients' numbers times their weights, and the sum of the weights, float64.
        clients: The clients in the sum.
        stage: The stage.
        like: A parameter of one client by name, for its shape and type.

    Raises:
        ValueError: No client has any weight.
    """
    if not total_D[-1] > 0:
        raise ValueError("secure aggregation: the clients of the round have no training examples")
    mean_1D = (total_D[:-1] / total_D[-1])[None]
    count = len(clients)
    parts = unflatten(mean_1D, {name: like[name].shape for name in stage.upload})
    return Payload(
        clients=clients,
        parameters={name: part.to(like[name]).expand(count, *part.shape[1:]) for name, part in parts.items()},
        num_examples=torch.ones(count, dtype=torch.int64, device=next(iter(like.values())).device),
    )
