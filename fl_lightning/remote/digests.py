"""Digests of settings, parameters and data, which server and sites compare without revealing the content."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fl_lightning.batches.client_data import ClientData
from fl_lightning.federation import UserNames
from fl_lightning.remote.message import Message
from fl_lightning.round.client import ClientModule
from fl_lightning.round.payload import Payload
from fl_lightning.run import settings
from fl_lightning.strategies import Strategy
from fl_lightning.tasks import Task

_DIGEST = "digest"


def settings_of(strategy: Strategy, model: ClientModule) -> dict[str, Any]:
    """The settings that must be the same on the server and at the sites, as JSON."""
    net = model.net_factories if model.has_own_net else None  # the initial parameters show its defaults, too
    cls = type(strategy)
    defaults = [cls.default_optimizer, cls.examples_optimizer or cls.default_optimizer]
    optimizer = model.optimizer_factory if model.has_own_optimizer else defaults
    described = settings.of_objects(strategy=strategy, model=model, net=net, optimizer=optimizer)
    return dict(json.loads(json.dumps(described)))


def digest_of_facts(*facts: Any) -> str:
    """The digest of JSON values and of named tensors."""
    tensors = {str(index): fact[1] for index, fact in enumerate(facts) if isinstance(fact, tuple)}
    plain = [fact[0] if isinstance(fact, tuple) else fact for fact in facts]
    return hashlib.sha256(Message(kind="facts", about={"facts": plain}, tensors=tensors).wire).hexdigest()


def content_of(client_data: ClientData) -> bytes:
    """All data that a client holds, as bytes: those of the graph that its pairs or graphs are in, too."""
    return Message(kind="data", tensors=dict(_tensors_of(client_data))).wire


def _tensors_of(client_data: ClientData, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for name, value in vars(client_data).items():
        if isinstance(value, Tensor):
            yield prefix + name, value
        elif isinstance(value, ClientData):
            yield from _tensors_of(value, f"{prefix}{name}.")


def card_of(
    client_data: ClientData, names: UserNames, task: Task, own: Sequence[str], digest: Callable[[bytes], str]
) -> dict[str, Any]:
    """What a site says of its client when it joins.

    Args:
        client_data: What the client holds.
        names: The user's names.
        task: The task of the site's data.
        own: Whether its ``features`` and ``outputs`` mean something else than at other sites.
        digest: The digest of the data's bytes, keyed by the site.
    """
    inputs, named = client_data.inputs, names.class_names
    return {
        "name": client_data.name,
        "task": task.plain,
        "num_features": client_data.num_features,
        "num_outputs": num_outputs_of(client_data, names, task),
        "own": list(own),
        "class_names": "" if named is None else hashlib.sha256(json.dumps(named).encode()).hexdigest(),
        "has_validation": bool(client_data.val_mask_N.any()),
        "edges": dict(client_data.edge_facts),
        "density": round(int(torch.count_nonzero(inputs)) / max(1, inputs.numel()), 3),  # more would reveal its rows
        "data": digest(content_of(client_data)),
    }


def num_outputs_of(client_data: ClientData, names: UserNames, task: Task) -> int:
    """Number of outputs that a client's data need."""
    return client_data.num_outputs or task.target.num_outputs([client_data.y_N], len(names.class_names or ()))


def digest_of(architectures: Sequence[Mapping[str, Tensor]]) -> str:
    """The digest of the initial parameters of every architecture."""
    named = {f"{index}/{name}": p for index, net in enumerate(architectures) for name, p in net.items()}
    return Message(kind="parameters", tensors=named).name


def payload_of(digests: Mapping[int, str]) -> Payload:
    """The digest of each client's state, as checkpoints hold it."""
    rows = [list(bytes.fromhex(digest)) for digest in digests.values()]
    return Payload(clients=tuple(digests), extras={_DIGEST: torch.tensor(rows, dtype=torch.uint8)})


def digests_of(state: Payload) -> dict[int, str]:
    """Undo :func:`payload_of`."""
    return {client: bytes(row.tolist()).hex() for client, row in zip(state.clients, state.extras[_DIGEST], strict=True)}
