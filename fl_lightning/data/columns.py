"""Columns of a set of examples, by which a partitioner can make clients: texts or numbers, one for each example."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from fl_lightning.data.partition.partitioners import Partitioner

#: Texts (empty if unknown) or numbers.
Column = Sequence[str] | Sequence[float]


def plain_column(name: str, column: Any) -> Column:
    """A user's column, perhaps of numpy or pandas, as texts, empty where unknown, or as numbers, nan where unknown.

    Example:
        >>> plain_column("ward", ["north", None]), plain_column("age", [3, float("nan")])
        (['north', ''], [3, nan])

    Raises:
        ValueError: Some entries are neither, or there are both.
    """
    entries = column.tolist() if hasattr(column, "tolist") else list(column)
    entries = [each.item() if isinstance(each, np.generic | Tensor) else each for each in entries]
    is_known = [isinstance(each, str) or str(each) not in ("None", "nan", "NaT", "<NA>") for each in entries]
    known: list[Any] = [entry for entry, is_one in zip(entries, is_known, strict=True) if is_one]
    texts = [isinstance(entry, str) for entry in known]
    if known and all(texts):
        return [entry if is_one else "" for entry, is_one in zip(entries, is_known, strict=True)]
    numbers = [isinstance(each, bool | int | float) and abs(each) < 2**63 for each in known]
    if all(numbers):
        return [entry if is_one else math.nan for entry, is_one in zip(entries, is_known, strict=True)]
    other = next((entry for entry, sound in zip(known, texts if any(texts) else numbers, strict=True) if not sound))
    raise ValueError(
        f"columns: {name!r} has {other!r}, a {type(other).__name__}: give texts or numbers alone, and None where one "
        "is unknown; of dates and the like their texts, by str(...), or astype(str) of pandas"
    )


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


def number_of_each(data: Data, by: str, remedy: str) -> Tensor:
    """A number of each example, or of each node, by the name that partitioners and splitters know it by, (N,).

    Args:
        data: What they see.
        by: The name, which is their setting ``by``.
        remedy: What the user does with another.

    Raises:
        ValueError: There is no such number, or an example lacks it (nan).
    """
    sound = {
        key: data[key]
        for key in sorted(data.keys())
        if isinstance(data[key], Tensor) and data[key].shape == (data.num_nodes,) and not data[key].is_complex()
    }
    if by not in sound:
        names = ", ".join(sound)
        raise ValueError(f"by={by!r} is not a number of each example, as {names} are: {remedy} one of these.")
    value_N: Tensor = sound[by]
    if bool(value_N.isnan().any()):
        raise ValueError(
            f"by={by!r}: example {int(value_N.isnan().nonzero()[0])} has no such number (nan): {remedy} another."
        )
    return value_N


def joined(sets: Sequence[Mapping[str, Column]]) -> dict[str, Tensor]:
    """The columns that all of several sets of examples have, as numbers, one set after another.

    Example:
        >>> joined([{"patient": ["a", "b"], "age": [3]}, {"patient": ["b"]}])
        {'patient': tensor([0, 1, 1])}
    """
    result = {}
    for name in sorted(set.intersection(*map(set, sets))):
        entries: list[Any] = [entry for columns in sets for entry in columns[name]]
        is_mixed = len({isinstance(entry, str) for entry in entries}) > 1
        result[name] = numbered([str(entry) for entry in entries] if is_mixed else entries)
    return result


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
