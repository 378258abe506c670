"""How messages get to the sites and answers back."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from fl_lightning.remote.message import Message

_log = logging.getLogger(__name__)


class Answerer(Protocol):
    """Whatever answers messages; a site."""

    def answer(self, wire: bytes) -> bytes:
        """The answer to a message, both as bytes."""
        ...


class Channel(Protocol):
    """Carries messages to sites.

    Attributes:
        names: What each site is called, by the index of its client.
    """

    @property
    def names(self) -> Sequence[str]:
        """What each site is called, by the index of its client."""

    def ask(self, messages: Mapping[int, Message]) -> Iterator[tuple[int, Message | str]]:
        """Send one message to each of some clients.

        Yields:
            Each client with its answer, or with why there is none, in any order. A channel may lose messages, repeat
            answers, or bring those to earlier messages; a client that it says nothing of has not answered.
        """
        ...


class LoopbackChannel:
    """Sites in the same process, reached through the same bytes as over a network.

    Args:
        sites: By the index of their client.
        names: What they are called; numbered if none are given.
    """

    def __init__(self, sites: Sequence[Answerer], names: Sequence[str] = ()) -> None:
        self.sites = list(sites)
        self.names: Sequence[str] = list(names) or [f"site-{place}" for place in range(len(sites))]

    def ask(self, messages: Mapping[int, Message]) -> Iterator[tuple[int, Message | str]]:
        """One site after another."""
        for client, message in messages.items():
            yield client, read_answer(self.sites[client].answer(message.wire))


def read_answer(wire: object) -> Message | str:
    """What arrived, or why it is no message."""
    try:
        return Message.read(wire)  # type: ignore[arg-type]  # which it says
    except ValueError as error:
        return str(error)


def ask_all(
    channel: Channel, messages: Mapping[int, Message], *, retries: int, report: Callable[[int], None] | None = None
) -> tuple[dict[int, Message], dict[int, str]]:
    """Each client's answer, heard once, whatever the channel loses, repeats or brings too late.

    Args:
        channel: The way to the sites.
        messages: One for each of some clients.
        retries: How often a message without an answer is sent again.
        report: Called with the number of clients that have just answered.

    Returns:
        The answers, failures that sites tell of among them; and why others did not answer.
    """
    answers: dict[int, Message] = {}
    lost: dict[int, str] = {}
    waiting = dict(messages)
    for _ in range(1 + retries):
        for client, answer in channel.ask(waiting):
            if client not in waiting or client in answers:
                continue
            if isinstance(answer, str):
                lost[client] = answer
            elif answer.about.get("to") == waiting[client].name:
                answers[client] = answer
                if report is not None:
                    report(1)
            else:
                _log.info("%s answered an earlier message", channel.names[client])
        waiting = {client: message for client, message in waiting.items() if client not in answers}
        if not waiting:
            break
    return answers, {client: lost.get(client, "it did not answer") for client in waiting}
