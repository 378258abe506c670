"""What server and sites say to each other: a kind, some facts in JSON, and tensors, as safetensors bytes.

Nothing in such bytes is executed when they are read, as it would be in a pickle; tensors keep their type, bfloat16 too,
and their order.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from fl_lightning.round.payload import Payload


@dataclass(frozen=True, kw_only=True, eq=False)
class Message:
    """One message.

    Attributes:
        kind: What is asked or answered.
        about: Facts: anything that JSON holds.
        tensors: By name, detached.
    """

    kind: str
    about: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    @cached_property
    def wire(self) -> bytes:
        """The message as bytes; equal messages have equal bytes."""
        about = json.dumps({"kind": self.kind, "about": self.about, "names": list(self.tensors)}, sort_keys=True)
        whole = {
            name: tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            for name, tensor in self.tensors.items()
        }
        return bytes(safetensors.torch.save(whole, {"message": about}))

    @property
    def name(self) -> str:
        """What an answer calls the message by: SHA-256 (hex) of its bytes."""
        return hashlib.sha256(self.wire).hexdigest()

    @classmethod
    def read(cls, wire: bytes) -> "Message":
        """Undo :attr:`wire`.

        Raises:
            ValueError: The bytes are no message.
        """
        try:
            found = safetensors.torch.load(wire)
            header = json.loads(wire[8 : 8 + int.from_bytes(wire[:8], "little")])
            told = json.loads(header["__metadata__"]["message"])
            message = cls(kind=told["kind"], about=told["about"], tensors={name: found[name] for name in told["names"]})
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{len(wire)} bytes arrived that are no message ({type(error).__name__})") from error
        message.__dict__["wire"] = wire
        return message

    def payload(self, clients: tuple[int, ...], prefix: str = "") -> Payload | None:
        """The payload among the tensors, if there is one; ``prefix`` was given to :func:`packed`."""
        named = {n.removeprefix(prefix): t for n, t in self.tensors.items() if n.startswith(prefix)}
        return Payload.from_named(clients, named) if named else None


def packed(payload: Payload | None, client: int, prefix: str = "") -> dict[str, Tensor]:
    """One client's row of a payload as tensors of a message, without padding; nothing where there is none."""
    if payload is None:
        return {}
    mine = payload.rows([client])
    for name, length in mine.lengths.items():
        mine = mine.padded(name, int(length.max()))
    return {prefix + name: tensor for name, tensor in mine.named().items()}
