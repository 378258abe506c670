"""Which evaluations a site performs for a server: only those of its own strategy, on the models that these use."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from fl_lightning.remote.policy import Refused
from fl_lightning.remote.references import describe
from fl_lightning.round.payload import Payload
from fl_lightning.round.stage import Evaluation
from fl_lightning.strategies import Strategy


def allowed_evaluation(
    strategy: Strategy, client: int, kind: str, described: dict[str, Any], payload: Payload | None
) -> Evaluation:
    """The requested evaluation of the strategy, with the models that were sent.

    Args:
        strategy: The site's own strategy, after ``setup``.
        client: Index of the site's client.
        kind: Prefix of the metrics.
        described: What ``references.describe`` made of it.
        payload: The models that were sent, if any.

    Raises:
        Refused: The strategy has no such evaluation, performs it in another way, or sends no such models for it.
    """
    known = list(ways(strategy, client, kind))
    if not known:
        raise Refused(f"{type(strategy).__name__} has no evaluation {kind!r}")
    alike = [way for way in known if describe(way, strategy) == described]
    if not alike:
        raise Refused(f"{type(strategy).__name__} does its evaluation {kind!r} in another way")
    for way in alike:
        if _names(way.payload) == _names(payload):
            # the server knows who took part in the round, and leaves out their models
            return dataclasses.replace(way, payload=payload, others={}, prefer_trained=False)
    raise Refused(f"{type(strategy).__name__} sends other models, or none, for its evaluation {kind!r}")


def ways(strategy: Strategy, client: int, kind: str) -> Iterable[Evaluation]:
    """All ways in which a strategy may evaluate a client's models of a kind, now or later in a run."""
    try:
        now = strategy.evaluations((client,))
    except ValueError:  # it has no models before clients have responded
        now = {}
    for result in (now, strategy.later_evaluations((client,))):
        if kind not in result:
            continue
        for way in (result[kind], *(way for other, way in result[kind].others.items() if other == client)):
            yield way
            if way.prefer_trained:  # of a client that has taken part in the round
                yield way.without_parameters()


def _names(payload: Payload | None) -> set[str]:
    """What is sent to a client, by kind and name."""
    return set() if payload is None else set(payload.named())
