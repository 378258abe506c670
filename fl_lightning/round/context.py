"""What a client knows during a stage beside its parameters and its batch.

Shape legend: none of these tensors has a client dimension; ``torch.vmap`` gives it to them as to the batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

#: A client's parameters by name.
Parameters = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Context:
    """Given to every function that a stage has a client compute.

    Attributes:
        anchor: All of the client's parameters as the stage found them, what the server sent included; a stage may move
            it (``Stage.program``).
        received: The tensors that the server sent beside parameters, by name.
        client_state: The client's own tensors that live on between stages, by name (``Strategy.client_state``).
        step: Local steps taken in this stage so far, the same number for all clients that are stepped together; 0 for
            what is computed after them (client outputs, client state) and in evaluations.
    """

    anchor: Parameters = field(default_factory=dict)
    received: Mapping[str, Tensor] = field(default_factory=dict)
    client_state: Mapping[str, Tensor] = field(default_factory=dict)
    step: int = 0
