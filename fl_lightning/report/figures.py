"""What a page shows in addition to text: pictures with their legends, tables, and the curves in pictures."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
#: Characters of a cell that is no sentence.
_LONGEST_NAME = 32


@dataclass(frozen=True, kw_only=True)
class Key:
    """An entry of a legend.

    Attributes:
        label: What it stands for.
        color: CSS color.
        dash: Matplotlib's line style; ``|`` for an upright line, empty for a dot.
    """

    label: str
    color: str
    dash: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """The numbers behind a picture, as text; the first column names the row."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = "Table"

    def is_text(self, column: int) -> bool:
        """Whether a column has sentences, which wrap; numbers, intervals and names stay on one line.

        Example:
            >>> table = Table(columns=["a", "interval", "why"], rows=[["1", "0.1 to 0.2", "dropped, " * 9]])
            >>> table.is_text(1), table.is_text(2)
            (False, True)
        """
        return any(len(row[column]) > _LONGEST_NAME for row in self.rows)


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture with what goes with it.

    Attributes:
        title: What it is.
        svg: A part of a page.
        note: A line beneath it.
        keys: Its legend.
        scale: Lowest and highest value of a heat map, in words.
        table: Its numbers.
    """

    title: str
    svg: str
    note: str = ""
    keys: Sequence[Key] = ()
    scale: tuple[str, str] | None = None
    table: Table | None = None


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A line of a picture.

    Attributes:
        label: For the legend.
        x: Places.
        y: Values; what is nan is passed over.
        low: Lower edge of a band around it.
        high: Upper edge.
        order: Of its color; None for the order in which the curves come.
    """

    label: str
    x: Values
    y: Values
    low: Values | None = None
    high: Values | None = None
    order: int | None = None
