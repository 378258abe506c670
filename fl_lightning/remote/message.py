"""Messages between server and sites: a kind, JSON fields, and tensors, as safetensors bytes.

Unlike a pickle, nothing in such bytes is executed when they are read; tensors keep their type, including bfloat16, and
their order.
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

from fl_lightning.remote.schema import LONGEST_NAME, WrongMessage
from fl_lightning.round.payload import Payload

#: Bounds of a message: its bytes, those of its header, levels of its JSON, and dimensions of a tensor.
MOST_BYTES, MOST_HEADER, MOST_LEVELS, MOST_DIMENSIONS = 1 << 31, 1 << 24, 32, 8
#: Maximum number of digits of an integer in it, as many as 64 bits have: longer ones are no floating-point numbers.
_MOST_DIGITS = 20


@dataclass(frozen=True, kw_only=True, eq=False)
class Message:
    """One message.

    Attributes:
        kind: What the message asks, or responds to.
        about: Fields: any JSON values.
        tensors: Tensors by name, detached.
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
        """How a response refers to the message: SHA-256 (hex) of its bytes."""
        return hashlib.sha256(self.wire).hexdigest()

    @classmethod
    def read(cls, wire: bytes) -> "Message":
        """Undo :attr:`wire`; nothing is built unless the bytes as a whole are a message within the limits.

        Raises:
            ValueError: They are not.
        """
        try:
            kind, about, names = _header(wire)
            result = safetensors.torch.load(wire)
            message = cls(kind=kind, about=about, tensors={name: result[name] for name in names})
        except (SafetensorError, KeyError, TypeError, ValueError, OverflowError, RecursionError, RuntimeError) as error:
            size = len(wire) if isinstance(wire, bytes) else "no"
            why = str(error) if isinstance(error, WrongMessage) else type(error).__name__
            raise ValueError(f"{size} bytes arrived that are not a message ({why})") from error
        message.__dict__["wire"] = wire
        return message

    @property
    def is_of_sums(self) -> bool:
        """Whether it belongs to a secure sum."""
        return self.kind.startswith("sum_") or "shares" in self.about

    def payload(self, clients: tuple[int, ...], prefix: str = "") -> Payload | None:
        """The payload in the tensors, if there is one; ``prefix`` as it was given to :func:`packed`."""
        named = {n.removeprefix(prefix): t for n, t in self.tensors.items() if n.startswith(prefix)}
        return Payload.from_named(clients, named) if named else None


def _header(wire: bytes) -> tuple[str, dict[str, Any], list[str]]:
    """Kind, facts and names of the tensors, whose sizes are compared with the bytes that there are."""
    if not isinstance(wire, bytes) or not 8 <= len(wire) <= MOST_BYTES:
        raise WrongMessage(f"a message has 8 to {MOST_BYTES:,} bytes")
    size = int.from_bytes(wire[:8], "little")
    if size > min(MOST_HEADER, len(wire) - 8):
        raise WrongMessage(f"its header would have {size:,} bytes")
    header = read_json(wire[8 : 8 + size])
    facts = read_json(header.pop("__metadata__")["message"])
    if facts.keys() != {"kind", "about", "names"} or not isinstance(facts["about"], dict):
        raise WrongMessage("it holds something other than a kind, facts and names")
    if not isinstance(facts["kind"], str) or len(facts["kind"]) > LONGEST_NAME:
        raise WrongMessage("its kind is not a name")
    if not isinstance(facts["names"], list) or sorted(facts["names"]) != sorted(header):
        raise WrongMessage("its names are not those of its tensors")
    for declared in header.values():
        if len(declared["shape"]) > MOST_DIMENSIONS or not all(0 <= size <= len(wire) for size in declared["shape"]):
            raise WrongMessage("a tensor would be larger than the message")
    return facts["kind"], facts["about"], facts["names"]


def read_json(text: str | bytes) -> dict[str, Any]:
    """A JSON mapping of bounded depth and bounded integers in which no name occurs twice.

    Raises:
        ValueError: It is not one.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) < len(pairs):
            raise WrongMessage("a name occurs twice in it")
        return result

    def bounded(digits: str) -> int:
        if len(digits.lstrip("-")) > _MOST_DIGITS:
            raise WrongMessage(f"it has an integer of more than {_MOST_DIGITS} digits")
        return int(digits)

    result = json.loads(text, object_pairs_hook=unique, parse_int=bounded)
    if not isinstance(result, dict):
        raise WrongMessage("it is not a mapping")
    level: list[Any] = [result]
    for _ in range(MOST_LEVELS):
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [part for parts in inner for part in parts]
    if level:
        raise WrongMessage(f"it has more than {MOST_LEVELS} levels")
    return result


def packed(payload: Payload | None, client: int, prefix: str = "") -> dict[str, Tensor]:
    """One client's row of a payload as tensors of a message, without padding; empty if there is no payload."""
    if payload is None:
        return {}
    mine = payload.rows([client])
    for name, length in mine.lengths.items():
        mine = mine.padded(name, int(length.max()))
    return {prefix + name: tensor for name, tensor in mine.named().items()}
