"""How messages get to the sites and responses back."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from fl_lightning.remote.message import Message

_log = logging.getLogger(__name__)


class Responder(Protocol):
    """Anything that responds to messages, such as a site."""

    def respond(self, wire: bytes) -> bytes:
        """The response to a message, both as bytes."""
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
            Each client with its response, or with the reason why there is none, in any order. A channel may lose
            messages, repeat responses, or deliver responses to earlier messages; a client that is not yielded has not
            responded.
        """
        ...


class LoopbackChannel:
    """Sites in the same process, reached through the same bytes as over a network.

    Args:
        sites: The sites, by the index of their client.
        names: Their names; numbered if none are given.
    """

    def __init__(self, sites: Sequence[Responder], names: Sequence[str] = ()) -> None:
        self.sites = list(sites)
        self.names: Sequence[str] = list(names) or [f"site-{index}" for index in range(len(sites))]

    def ask(self, messages: Mapping[int, Message]) -> Iterator[tuple[int, Message | str]]:
        """Ask one site after another."""
        for client, message in messages.items():
            yield client, read_response(self.sites[client].respond(message.wire))


def read_response(wire: object) -> Message | str:
    """The message that arrived, or why it is not one."""
    try:
        return Message.read(wire)  # type: ignore[arg-type]  # it checks the type
    except ValueError as error:
        return str(error)


def ask_all(
    channel: Channel, messages: Mapping[int, Message], *, retries: int, report: Callable[[int], None] | None = None
) -> tuple[dict[int, Message], dict[int, str]]:
    """Each client's response, exactly once, whatever the channel loses, repeats or delivers too late.

    Args:
        channel: The channel to the sites.
        messages: One message for each of some clients.
        retries: How often a message without a response is sent again.
        report: Called with the number of clients that have just responded.

    Returns:
        The responses, including failures that sites report; and why the other clients did not respond.
    """
    responses: dict[int, Message] = {}
    lost: dict[int, str] = {}
    waiting = dict(messages)
    for _ in range(1 + retries):
        for client, response in channel.ask(waiting):
            if client not in waiting or client in responses:
                continue
            if isinstance(response, str):
                lost[client] = response
            elif response.about.get("to") == waiting[client].name:
                responses[client] = response
                if report is not None:
                    report(1)
            else:
                _log.info("%s responded to an earlier message", channel.names[client])
        waiting = {client: message for client, message in waiting.items() if client not in responses}
        if not waiting:
            break
    return responses, {client: lost.get(client, "it did not respond") for client in waiting}
