"""What the server asks sites for, as messages."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fl_lightning.executors import Work
from fl_lightning.federation import Roster
from fl_lightning.remote.digests import settings_of
from fl_lightning.remote.message import Message, packed
from fl_lightning.remote.references import describe
from fl_lightning.round.client import ClientModule
from fl_lightning.round.stage import Evaluation
from fl_lightning.strategies import Strategy


def start_facts(strategy: Strategy, client: ClientModule, roster: Roster, **facts: Any) -> dict[str, Any]:
    """What every site is told of a federation that begins, and a name that follows from it and the partition."""
    federation = strategy.federation
    common = {
        "strategy": type(strategy).__name__,
        "settings": settings_of(strategy, client),
        "names": list(roster.names),
        "task": roster.task.plain,
        "num_features": roster.num_features,
        "num_outputs": roster.num_outputs,
        "layout": dict(roster.layout),
        "training_clients": list(federation.training_clients),
        **facts,
    }
    identity = json.dumps([common, roster.partition_hash], sort_keys=True).encode()
    return {**common, "federation": hashlib.sha256(identity).hexdigest()}


def work_request(work: Work, client: int, state: str, **facts: Any) -> Message:
    """Have a client do its part of a stage, from a state."""
    address = {"phase": work.address.phase, "round_idx": work.address.round_idx, "name": work.address.name}
    about = {"address": address, "effort": work.effort[client], "state": state, **facts}
    return Message(kind="run", about=about, tensors=packed(work.payload, client))


def evaluation_request(ways: Mapping[str, Evaluation], strategy: Strategy, client: int, **facts: Any) -> Message:
    """Have a client score all of its models, each in the way that is the client's."""
    tensors: dict[str, Tensor] = {}
    for place, way in enumerate(ways.values()):
        tensors |= packed(way.payload, client, f"{place}/")
    described = [[kind, describe(way, strategy)] for kind, way in ways.items()]
    return Message(kind="evaluate", about={"evaluations": described, **facts}, tensors=tensors)


def prediction_request(evaluation: Evaluation, strategy: Strategy, client: int, **facts: Any) -> Message:
    """Have a client predict its examples, and write that down at its site."""
    about = {"evaluation": describe(evaluation, strategy), **facts}
    return Message(kind="predict", about=about, tensors=packed(evaluation.payload, client, "0/"))
