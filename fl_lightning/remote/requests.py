"""The server's requests to sites, as messages."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fl_lightning.executors import StageRequest
from fl_lightning.federation import ClientRegistry
from fl_lightning.remote.digests import settings_of
from fl_lightning.remote.message import Message, packed
from fl_lightning.remote.references import describe
from fl_lightning.round.client import ClientModule
from fl_lightning.round.stage import Evaluation
from fl_lightning.strategies import Strategy


def start_facts(strategy: Strategy, client: ClientModule, registry: ClientRegistry, **facts: Any) -> dict[str, Any]:
    """What every site is sent when a federation starts, with a name derived from it and the partition."""
    federation = strategy.federation
    common = {
        "strategy": type(strategy).__name__,
        "settings": settings_of(strategy, client),
        "names": list(registry.names),
        "task": registry.task.plain,
        "num_features": registry.num_features,
        "num_outputs": registry.num_outputs,
        "own": registry.own,
        "layout": dict(registry.layout),
        "training_clients": list(federation.training_clients),
        **facts,
    }
    identity = json.dumps([common, registry.partition_hash], sort_keys=True).encode()
    return {**common, "federation": hashlib.sha256(identity).hexdigest()}


def work_request(request: StageRequest, client: int, state: str, **facts: Any) -> Message:
    """Ask a client to run its part of a stage, starting from a state."""
    address = {"phase": request.address.phase, "round_idx": request.address.round_idx, "name": request.address.name}
    about = {"address": address, "work_fraction": request.work_fraction[client], "state": state, **facts}
    return Message(kind="run", about=about, tensors=packed(request.payload, client))


def received_by_all(message: Message) -> str:
    """Identifies what a request for work sends, which under secure aggregation must be the same for all members.

    Their masks are drawn with it. Otherwise a server could send all members but one a model that they cannot change,
    and subtract it from the sum (Pasquini et al., "Eluding Secure Aggregation in Federated Learning via Model
    Inconsistency", CCS 2022); or, in two rounds, have one member alone train for longer, and subtract the sums. Only a
    member's own state, and what the others have sealed for it, are not covered. Evaluations are not, either: members
    that were trained evaluate models of their own.

    Args:
        message: The request.

    Returns:
        A digest of the stage, the work fraction and the tensors of ``run``; empty for other kinds.
    """
    if message.kind != "run":
        return ""
    common = {name: message.about[name] for name in ("address", "work_fraction")}
    return Message(kind="received", about=common, tensors=dict(sorted(message.tensors.items()))).name


def evaluation_request(ways: Mapping[str, Evaluation], strategy: Strategy, client: int, **facts: Any) -> Message:
    """Ask a client to evaluate all of its models, each in the way that applies to the client."""
    tensors: dict[str, Tensor] = {}
    for index, way in enumerate(ways.values()):
        tensors |= packed(way.payload, client, f"{index}/")
    described = [[kind, describe(way, strategy)] for kind, way in ways.items()]
    return Message(kind="evaluate", about={"evaluations": described, **facts}, tensors=tensors)


def prediction_request(evaluation: Evaluation, strategy: Strategy, client: int, **facts: Any) -> Message:
    """Ask a client to predict its examples and write the predictions at its site."""
    about = {"evaluation": describe(evaluation, strategy), **facts}
    return Message(kind="predict", about=about, tensors=packed(evaluation.payload, client, "0/"))
