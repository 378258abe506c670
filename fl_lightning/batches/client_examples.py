"""The independent examples of one client."""

import dataclasses
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from fl_lightning.batches.client_data import ClientData


@dataclass(frozen=True, kw_only=True)
class ClientExamples(ClientData):
    """A client's private rows of a table, sequences or images, with their targets and roles.

    Shape legend: N examples of this client, X the shape of one example.

    Attributes:
        x_NX: Inputs, float32, (N, *X); images are in [0, 1].
    """

    x_NX: Tensor

    @property
    def inputs(self) -> Tensor:
        """The examples."""
        return self.x_NX

    def with_inputs(self, inputs: Tensor) -> Self:
        """Other examples with the same targets."""
        return dataclasses.replace(self, x_NX=inputs)
