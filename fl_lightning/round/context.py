"""What a client knows during a stage in addition to its parameters and its batch.

Shape legend: none of these tensors has a client dimension; ``torch.vmap`` adds it, as to the batch. A function with a
true attribute ``takes_stacks`` is called without ``vmap`` on a stack of C clients; then everything has one, (C, ...).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

#: A client's parameters by name.
Parameters = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Context:
    """The last argument of every function that a client computes in a stage.

    Attributes:
        anchor: All of the client's parameters at the beginning of the stage or evaluation, including what the server
            sent; a stage may move it (``Stage.program``).
        received: The tensors that the server sent in addition to parameters, by name.
        client_state: The client's own tensors that live on between stages, by name (``Strategy.client_state``).
        step: Number of local steps in this stage so far, the same for all clients that are stepped together; 0 for
            what is computed after them (client outputs, client state) and in evaluations.
        is_stack: Whether all tensors are those of a stack of clients.
    """

    anchor: Parameters = field(default_factory=dict)
    received: Mapping[str, Tensor] = field(default_factory=dict)
    client_state: Mapping[str, Tensor] = field(default_factory=dict)
    step: int = 0
    is_stack: bool = False
