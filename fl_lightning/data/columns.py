"""Columns of a set of examples, by which a partitioner can make clients: texts or numbers, one for each example."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.data.partition.partitioners import Partitioner

#: Texts (empty if unknown) or numbers.
Column = Sequence[str] | Sequence[float]


def has_texts(column: Column) -> bool:
    """Whether the entries are texts."""
    return isinstance(column[0], str)


def texts_of(column: Column) -> list[str]:
    """The different texts of a column, without the empty one, in alphabetical order; of numbers, their texts."""
    return [str(each) for each in sorted(set(column) - {""})]  # type: ignore[type-var]


def numbered(column: Column) -> Tensor:
    """A column as numbers: texts by their places among :func:`texts_of`, an empty one as -1.

    Example:
        >>> numbered(["Bern", "", "Aachen", "Bern"])
        tensor([ 1, -1,  0,  1])
    """
    if not has_texts(column):
        return torch.as_tensor(np.asarray(column))
    number = {text: place for place, text in enumerate(texts_of(column))}
    return torch.tensor([number.get(str(text), -1) for text in column])


def clients_by_column(
    partitioner: Partitioner, columns: Mapping[str, Any], shares: Sequence[Tensor]
) -> tuple[str, ...] | None:
    """The names of clients that are the values of a column; None if they are made otherwise."""
    column = columns.get(str(getattr(partitioner, "attribute", "")))
    if column is None:
        return None
    number_N = numbered(column)
    if not has_texts(column):
        return tuple(str(number_N[share[0]].item()) for share in shares)
    texts = texts_of(column)
    return tuple(texts[int(number_N[share[0]])] for share in shares)
