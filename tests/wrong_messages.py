"""Responses that no honest site gives, and questions that no honest server asks, made of right ones."""

import dataclasses
import json
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from fl_lightning.remote import Message

#: Makes other bytes of a right message; the draw is for those that have a choice.
Wrong = Callable[[Message, random.Random], bytes]
STATE = "ab" * 32


def with_facts(**facts: Any) -> Wrong:
    """The message with other facts of the names that it has."""

    def make(message: Message, draw: random.Random) -> bytes:
        assert facts.keys() <= message.about.keys(), f"{message.kind} has no {facts.keys() - message.about.keys()}"
        return dataclasses.replace(message, about={**message.about, **facts}).wire

    return make


def more_facts(**facts: Any) -> Wrong:
    """The message with facts that it does not have."""
    return lambda message, draw: dataclasses.replace(message, about={**message.about, **facts}).wire


def without_fact(name: str) -> Wrong:
    return lambda message, draw: (
        dataclasses.replace(message, about={key: fact for key, fact in message.about.items() if key != name}).wire
    )


def with_tensor(name: str, change: Callable[[Tensor], Tensor]) -> Wrong:
    """The message with one of its tensors changed: the first whose name begins so."""

    def make(message: Message, draw: random.Random) -> bytes:
        actual = next(each for each in message.tensors if each.startswith(name))
        tensors = {**message.tensors, actual: change(message.tensors[actual].clone())}
        return dataclasses.replace(message, tensors=tensors).wire

    return make


def more_tensors(**tensors: Tensor) -> Wrong:
    named = {name.replace("__", "/"): tensor for name, tensor in tensors.items()}
    return lambda message, draw: dataclasses.replace(message, tensors={**message.tensors, **named}).wire


def without_tensor(name: str) -> Wrong:
    def make(message: Message, draw: random.Random) -> bytes:
        actual = next(each for each in message.tensors if each.startswith(name))
        return dataclasses.replace(message, tensors={k: t for k, t in message.tensors.items() if k != actual}).wire

    return make


def raw(text: str, tensors: Mapping[str, Tensor]) -> bytes:
    """Bytes with any text in place of a message's JSON."""
    return bytes(safetensors.torch.save(dict(tensors), {"message": text}))


def with_text(change: Callable[[str], str]) -> Wrong:
    """The message with its JSON changed as text."""

    def make(message: Message, draw: random.Random) -> bytes:
        text = json.dumps({"kind": message.kind, "about": message.about, "names": list(message.tensors)})
        return raw(change(text), message.tensors)

    return make


def with_header(change: Callable[[dict[str, Any]], Any]) -> Wrong:
    """The message with another safetensors header in front of the same numbers."""

    def make(message: Message, draw: random.Random) -> bytes:
        wire = message.wire
        size = int.from_bytes(wire[:8], "little")
        header = json.loads(wire[8 : 8 + size])
        text = json.dumps(change(header) or header).encode()
        return len(text).to_bytes(8, "little") + text + wire[8 + size :]

    return make


def flipped(message: Message, draw: random.Random) -> bytes:
    """One bit of the header or the JSON in it is another: what is in numbers cannot be told."""
    wire = bytearray(message.wire)
    wire[draw.randrange(8)] ^= 1 << draw.randrange(8)
    return bytes(wire)


def largest(header: dict[str, Any]) -> None:
    """Declare a tensor of 10^15 numbers."""
    name = next(name for name in header if name != "__metadata__")
    header[name]["shape"] = [1, 10**15]


def beyond(header: dict[str, Any]) -> None:
    name = next(name for name in header if name != "__metadata__")
    header[name]["data_offsets"][1] += 10**12


def deep(levels: int) -> Callable[[str], str]:
    return lambda text: text.replace('"about": {', '"about": {"deep": ' + "[" * levels + "]" * levels + ", ", 1)


#: Of whatever is responded.
ANY: dict[str, Wrong] = {
    "nothing": lambda message, draw: b"",
    "seven bytes": lambda message, draw: message.wire[:7],
    "garbage": lambda message, draw: draw.randbytes(300),
    "text": lambda message, draw: b"HTTP/1.1 502 Bad Gateway\r\n\r\n",
    "a pickle": lambda message, draw: b"\x80\x04cposix\nsystem\n(S'true'\ntR.",
    "cut off": lambda message, draw: message.wire[: draw.randrange(1, len(message.wire))],
    "something behind it": lambda message, draw: message.wire + b"more",
    "a bit of the length": flipped,
    "a giant header": lambda message, draw: (10**12).to_bytes(8, "little") + message.wire[8:],
    "no bytes": lambda message, draw: "text",  # type: ignore[return-value,arg-type]
    "a list as header": with_header(lambda header: [1, 2]),
    "a header without a message": with_header(lambda header: header["__metadata__"].clear()),
    "JSON of 100 levels": with_text(deep(100)),
    "JSON of 100,000 levels": with_text(deep(100_000)),
    "a large fact": more_facts(more="x" * 3_000_000),
    "a number of 5,000 digits": with_text(
        lambda text: text.replace('"about": {', '"about": {"n": ' + "9" * 5000 + ", ", 1)
    ),
    "no JSON": with_text(lambda text: text[:-1]),
    "a list of facts": with_text(lambda text: '{"kind": "response", "about": [1], "names": []}'),
    "facts twice": with_text(lambda text: text.replace('"about": {', '"about": {"to": "x", ', 1)),
    "a name of a tensor that is not there": with_text(
        lambda text: text.replace('"names": [', '"names": ["no", ', 1).replace(", ]", "]")
    ),
    "no UTF-8": lambda message, draw: message.wire.replace(b"about", b"ab\xff\xfet", 1),
    "another kind": lambda message, draw: dataclasses.replace(message, kind="enroll").wire,
    "control characters as kind": lambda message, draw: dataclasses.replace(message, kind="\x1b[2J\x07").wire,
    "no question": without_fact("to"),
    "the response to another question": with_facts(to="00" * 32),
    "a list as question": with_facts(to=[1]),
    "no state": without_fact("state"),
    "a number as state": with_facts(state=7),
    "a short state": with_facts(state="ab"),
    "a path as state": with_facts(state="../../etc/passwd"),
    "an unknown fact": more_facts(loss=0.5),
    "control characters in a fact": more_facts(**{"\x1b[31m": 1}),
    "an unknown tensor": more_tensors(p__more=torch.zeros(1, 2)),
    "a failure without a reason": lambda message, draw: Message(kind="failure", about={"to": message.about["to"]}).wire,
    "a failure of a list of reasons": lambda message, draw: (
        Message(kind="failure", about={"to": message.about["to"], "why": ["a"]}).wire
    ),
    "a failure for 100,000 reasons": lambda message, draw: (
        Message(kind="failure", about={"to": message.about["to"], "why": "no " * 100_000}).wire
    ),
    "a failure that writes on the terminal": lambda message, draw: (
        Message(kind="failure", about={"to": message.about["to"], "why": "\x1b[2J\x1b[1;31mall is well\x07\r\n"}).wire
    ),
}

#: Responses to a stage that are as they should be, but for their numbers.
NUMBERS: dict[str, Wrong] = {
    "nan": with_tensor("p/", lambda t: t.fill_(torch.nan)),
    "one nan": with_tensor("p/", lambda t: t.index_fill(t.dim() - 1, torch.tensor([0]), torch.nan)),
    "infinity": with_tensor("p/", lambda t: t.fill_(-torch.inf)),
    "huge numbers": with_tensor("p/", lambda t: t.fill_(3e38)),
}

#: Other responds to a stage.
RUN: dict[str, Wrong] = {
    "from another state": with_facts(**{"from": STATE}),
    "a tensor of two clients": with_tensor("p/", lambda t: torch.cat([t, t])),
    "a tensor of no client": with_tensor("p/", lambda t: t[:0]),
    "a number alone": with_tensor("p/", lambda t: t.sum()),
    "another shape": with_tensor("p/", lambda t: t[..., :-1].clone()),
    "another order of dimensions": with_tensor("p/", lambda t: t.flatten(1)[..., None]),
    "float64": with_tensor("p/", torch.Tensor.double),
    "float16": with_tensor("p/", torch.Tensor.half),
    "whole numbers": with_tensor("p/", torch.Tensor.long),
    "a parameter is missing": without_tensor("p/"),
    "no tensors": lambda message, draw: dataclasses.replace(message, tensors={}).wire,
    "a client output nobody asked for": more_tensors(s__more=torch.zeros(1, 2)),
    "rows of examples nobody asked for": more_tensors(s__more=torch.zeros(1, 2), l__more=torch.tensor([2])),
    "a tensor of 10^15 numbers": with_header(largest),
    "numbers beyond the end": with_header(beyond),
    "no number of examples": without_tensor("num_examples"),
    "examples below zero": with_tensor("num_examples", lambda t: t.fill_(-1000)),
    "10^15 examples": with_tensor("num_examples", lambda t: t.fill_(10**15)),
    "nan examples": with_tensor("num_examples", lambda t: t.double().fill_(torch.nan)),
    "half an example": with_tensor("num_examples", lambda t: t.double() + 0.5),
    "two numbers of examples": with_tensor("num_examples", lambda t: t.repeat(2)),
    "steps below zero": with_tensor("num_steps", lambda t: t.fill_(-1)),
    "10^15 steps": with_tensor("num_steps", lambda t: t.fill_(10**15)),
    "no number of steps": without_tensor("num_steps"),
}


def score(total: float, count: float, name: str = "0/val/acc") -> Wrong:
    return with_tensor(name, lambda t: torch.tensor([[total, count]], dtype=t.dtype))


#: Of the responses to an evaluation.
EVALUATE: dict[str, Wrong] = {
    "another state": with_facts(state=STATE),
    "accuracy 1000": with_tensor("0/val/acc", lambda t: t * torch.tensor([[1000.0, 1.0]])),
    "accuracy below zero": score(-1.0, 6.0),
    "accuracy of no examples": score(3.0, 0.0),
    "examples below zero": score(0.0, -6.0),
    "infinite accuracy": score(float("inf"), 6.0),
    "accuracy that is nan": score(float("nan"), 6.0),
    "of nan examples": score(1.0, float("nan")),
    "of 10^15 examples": score(1.0, 1e15),
    "a loss that is nan": score(float("nan"), 6.0, "0/val/loss"),
    "an infinite loss": score(float("-inf"), 6.0, "0/val/loss"),
    "whole numbers": with_tensor("0/", torch.Tensor.long),
    "scores of three numbers": with_tensor("0/", lambda t: torch.cat([t, t], 1)[:, :3].clone()),
    "scores of two clients": with_tensor("0/", lambda t: torch.cat([t, t])),
    "a metric is missing": without_tensor("0/val/acc"),
    "a metric more": more_tensors(**{"0__val__f1": torch.tensor([[1.0, 6.0]])}),
    "a metric of no split": more_tensors(**{"0__best__acc": torch.tensor([[1.0, 6.0]])}),
    "a metric that writes on the terminal": more_tensors(**{"0__val__\x1b[2J": torch.tensor([[1.0, 6.0]])}),
    "a model nobody asked for": more_tensors(**{"9__val__acc": torch.tensor([[1.0, 6.0]])}),
    "no failures": without_fact("failures"),
    "failures as a list": with_facts(failures=["0"]),
    "a failure nobody asked for": with_facts(failures={"more": "why"}),
    "a failure as a number": with_facts(failures={"": 7}),
    "a failure with scores": with_facts(failures={"": "ValueError"}),
}


#: Of who enrolls.
ENROLL: dict[str, Wrong] = {
    "no name": with_facts(name=""),
    "a name of 300 letters": with_facts(name="x" * 300),
    "a name that writes on the terminal": with_facts(name="ward\x1b[2J"),
    "a name of two lines": with_facts(name="ward\nward"),
    "a number as name": with_facts(name=3),
    "no features": with_facts(num_features=0),
    "10^12 features": with_facts(num_features=10**12),
    "features as text": with_facts(num_features="6"),
    "outputs below zero": with_facts(num_outputs=-1),
    "10^9 outputs": with_facts(num_outputs=10**9),
    "10^7 outputs": with_facts(num_outputs=10**7),
    "10^7 features": with_facts(num_features=10**7),
    "10^7 features of three dimensions": with_facts(num_features=[10**7, 1, 1]),
    "a density of 400 digits": with_facts(density=10**400),
    "true outputs": with_facts(num_outputs=True),
    "a density of 7": with_facts(density=7.0),
    "a density as text": with_facts(density="0.5"),
    "another kind of data": with_facts(task={"name": "NodeRegression"}),
    "a kind of data that nobody knows": with_facts(task={"name": "tables"}),
    "edges that are its own": with_facts(own=["edges"]),
    "a short digest of its classes": with_facts(class_names="ab"),
    "edges as a number": with_facts(edges=3),
    "validation as text": with_facts(has_validation="yes"),
    "no digest of its data": without_fact("data"),
}

#: Of what makes a client.
START: dict[str, Wrong] = {
    "metrics as text": with_facts(metrics="yes"),
    "names of metrics as a number": with_facts(scored=3),
    "the same metric twice": with_facts(scored=["val/acc", "val/acc"]),
    "noise as text": more_facts(noisy="yes"),
    "other parameters": with_facts(parameters=STATE),
    "a number as parameters": with_facts(parameters=1),
    "an empty state": with_facts(state=""),
}

RESPONSES: dict[str, dict[str, Wrong]] = {"run": RUN, "evaluate": EVALUATE, "enroll": ENROLL, "start": START}


def wrong_responses(*kinds: str) -> Iterator[tuple[str, str, Wrong]]:
    """Each kind of question with each wrong response to it, and its name."""
    for kind in kinds:
        numbers = NUMBERS if kind == "run" else {}
        for name, wrong in {**ANY, **RESPONSES[kind], **numbers}.items():
            yield kind, name, wrong


class Liar:
    """A site whose responses to some kinds of questions are wrong.

    Args:
        site: The honest one in it.
        kind: Of the questions.
        wrong: What becomes of the right responses.
        draw: For wrong responses that have a choice.
    """

    def __init__(self, site: Any, kind: str, wrong: Wrong, draw: random.Random) -> None:
        self.site, self.kind, self.wrong, self.draw = site, kind, wrong, draw
        self.num_lies = 0

    def respond(self, wire: bytes) -> bytes:
        right = self.site.respond(wire)
        if Message.read(wire).kind != self.kind:
            return right
        self.num_lies += 1
        return self.wrong(Message.read(right), self.draw)


def fails_after_training(message: Message, draw: random.Random) -> bytes:
    """The response of a site whose client has moved on, but whose numbers are of no use."""
    return Message(kind="failure", about={k: message.about[k] for k in ("to", "state")} | {"why": "it diverged"}).wire


def fails(message: Message, draw: random.Random) -> bytes:
    """The response of a site that says that it cannot."""
    return Message(kind="failure", about={"to": message.about["to"], "why": "it cannot"}).wire
