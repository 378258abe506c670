"""What stacked clients know beside their parameters and data, and how a client's methods are given it."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from torch import Tensor

from fl_lightning.round.client import ClientModule
from fl_lightning.round.context import Context

#: ``anchor``, ``received`` and ``client_state`` of a stack of clients: the tensors of their :class:`Context`.
Knowledge = dict[str, dict[str, Tensor]]


def context_of(knowledge: Knowledge, step: int = 0, *, is_stack: bool = False) -> Context:
    """The context for the functions of a stage."""
    return Context(step=step, is_stack=is_stack, **knowledge)


def of_one(knowledge: Knowledge, row: int, size: int, ragged: Collection[str]) -> Knowledge:
    """What one client of a stack knows: its row, of ``ragged`` tensors without the padding beyond its examples."""
    return {
        kind: {n: t[row, :size] if kind != "anchor" and n in ragged else t[row] for n, t in tensors.items()}
        for kind, tensors in knowledge.items()
    }


@contextmanager
def knowing(client: ClientModule, knowledge: Knowledge, step: int = 0, *, is_stack: bool = False) -> Iterator[Context]:
    """Let ``client.context`` be that of the clients that compute, as for a client alone: its methods may read it."""
    before, client.context = client.context, context_of(knowledge, step, is_stack=is_stack)
    try:
        yield client.context
    finally:
        client.context = before
