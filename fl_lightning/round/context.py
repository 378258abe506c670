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
        inbox: The signals that the server sent beside parameters, by name.
        memory: The client's own tensors that live on between stages, by name (``Strategy.memory``).
        step: Local steps taken in this stage so far, the same number for all clients that are stepped together; 0 for
            what is computed after them (signals, memory) and in evaluations.
    """

    anchor: Parameters = field(default_factory=dict)
    inbox: Mapping[str, Tensor] = field(default_factory=dict)
    memory: Mapping[str, Tensor] = field(default_factory=dict)
    step: int = 0
