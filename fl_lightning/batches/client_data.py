"""What every client holds, whatever its task: examples with their targets and roles."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ClientData(ABC):
    """A client's private data.

    Shape legend: N examples of this client, H labels or numbers of a target.

    Attributes:
        name: Natural where the data has names (a state, a sensor), else zero-padded, so that names sort as clients do.
        y_N: Class of each example, int64 (N,), negative where it is unknown; or its labels (0 or 1) or numbers,
            float32 (N, H), nan where one is missing.
        train_mask_N: Boolean; the three masks never overlap.
        val_mask_N: Boolean.
        test_mask_N: Boolean.
    """

    name: str
    y_N: Tensor
    train_mask_N: Tensor
    val_mask_N: Tensor
    test_mask_N: Tensor

    @property
    @abstractmethod
    def inputs(self) -> Tensor:
        """What a net reads: a row for each example, or for each node of the examples."""

    @property
    def size(self) -> int:
        """Examples of the client, whatever their roles."""
        return len(self.y_N)

    @property
    def cost(self) -> int:
        """What the client costs, relative to others of its federation: its examples, which all have one shape."""
        return self.size

    @property
    def num_examples(self) -> int:
        """Labeled training examples: what strategies weight clients by."""
        return int(self.train_mask_N.sum())

    @property
    def num_features(self) -> int | tuple[int, ...]:
        """Width of a row of the inputs, or its shape where it is no vector."""
        shape = tuple(self.inputs.shape[1:])
        return shape[0] if len(shape) == 1 else shape

    @property
    def edge_facts(self) -> Mapping[str, Any]:
        """What a registry says of the client's edges, by the names that it has there; nothing where there are none."""
        return {}
