"""Client data, whatever the task: examples with their targets and roles."""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ClientData(ABC):
    """A client's private data.

    Shape legend: N examples of this client, H labels or numbers of a target.

    Attributes:
        name: A natural name if the data have one (a state, a sensor), else zero-padded, so that names sort as clients
            do.
        y_N: Class of each example, int64 (N,), negative if unknown; or its labels (0 or 1) or numbers, float32 (N, H),
            nan if missing.
        train_mask_N: Training examples, boolean; the three masks never overlap.
        val_mask_N: Validation examples, boolean.
        test_mask_N: Test examples, boolean.
        num_outputs: How many of a net's outputs, the first ones, are the client's own; None if all are everybody's.
    """

    name: str
    y_N: Tensor
    train_mask_N: Tensor
    val_mask_N: Tensor
    test_mask_N: Tensor
    num_outputs: int | None = None

    @property
    @abstractmethod
    def inputs(self) -> Tensor:
        """The inputs of a net: a row for each example, or for each node of the examples."""

    @abstractmethod
    def with_inputs(self, inputs: Tensor) -> Self:
        """The same data with other inputs, of the same shape."""

    def with_graph(self, change: Callable[[Any, Tensor], Any]) -> Self:
        """The same data with another graph.

        Args:
            change: From the client's graph and the number of the graph that each node is in, ascending, int64 (N,), to
                a graph with other edges.
        """
        raise NotImplementedError(f"{type(self).__name__} has no graph to change")

    def widened(self, num_features: int | tuple[int, ...], num_targets: int) -> Self:
        """The same data for a net that is wider than this client needs: nothing is removed.

        Args:
            num_features: Zeros are appended to each row of the inputs until there are as many; inputs that are no
                vectors stay.
            num_targets: Missing labels or numbers are appended to each target until there are as many; classes stay.
        """
        wide = self
        if isinstance(num_features, int):
            wide = self.with_inputs(F.pad(self.inputs, (0, num_features - self.inputs.shape[1])))
        if self.y_N.dim() == 1:
            return wide
        return dataclasses.replace(wide, y_N=F.pad(self.y_N, (0, num_targets - self.y_N.shape[1]), value=torch.nan))

    def seen(self) -> Self:
        """What training may see of the data: everything, unless examples are hidden from it."""
        return self

    @property
    def size(self) -> int:
        """Number of examples of the client, whatever their roles."""
        return len(self.y_N)

    @property
    def cost(self) -> int:
        """Computational cost of the client relative to others: its number of examples, which all have one shape."""
        return self.size

    @property
    def num_examples(self) -> int:
        """Number of labeled training examples, by which strategies weight clients."""
        return int(self.train_mask_N.sum())

    @property
    def num_features(self) -> int | tuple[int, ...]:
        """Width of a row of the inputs, or its shape if it is not a vector."""
        shape = tuple(self.inputs.shape[1:])
        return shape[0] if len(shape) == 1 else shape

    @property
    def global_idx_N(self) -> Tensor | None:
        """Index of each example among those of all clients, int64, if clients may have some in common; else None."""
        return None

    @classmethod
    def pooled(cls, members: Sequence[Self]) -> Self:
        """What some clients hold as if one held it: their examples one after another, with their roles."""
        return cls(name="pool", **joined_fields(members))

    @property
    def edge_facts(self) -> Mapping[str, Any]:
        """Facts about the client's edges for the registry, by name; empty without edges."""
        return {}


def joined_fields(members: Sequence[ClientData], *, but: Collection[str] = ()) -> dict[str, Any]:
    """The tensors that some clients have under each name, their rows one after another; without some names."""
    names = [each.name for each in dataclasses.fields(members[0]) if each.name not in but]
    parts = {name: [getattr(member, name) for member in members] for name in names}
    return {name: torch.cat(each) for name, each in parts.items() if isinstance(each[0], Tensor)}
