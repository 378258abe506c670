"""Ordered axes of a grid: whether a chosen setting stands at an edge of what was tried, and what lies past the edge."""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fl_lightning.study.schema import Axis, Settings

#: A point of a grid: the label of its value on each axis, and the settings of all.
Point = tuple[str, Settings]


def label_of(name: str, value: Any) -> str:
    """A value's label on an axis.

    Example:
        >>> label_of("model.optimizer.lr", 0.05)
        'lr=0.05'
    """
    return f"{name.rpartition('.')[2]}={value}"


def points_of(name: str, axis: Axis, shown: str | None = None) -> Iterator[Point]:
    """The points of one axis.

    Args:
        name: The axis.
        axis: Its values.
        shown: The name in labels, as :func:`shown_names` gives it among other axes; None for that of the axis alone.
    """
    shown = shown or shown_names({name: axis})[name]
    if isinstance(axis, dict):
        for label, settings in axis.items():
            yield f"{shown}={label}", settings
    else:
        for value in axis:
            yield f"{shown}={value}", {name: value}


def given_twice(name: str, axis: Axis) -> int | None:
    """The place of a point of an axis that is the same as an earlier one, or has its label; None if there is none.

    Example:
        >>> given_twice("model.optimizer.lr", [0.1, 0.01, 0.10])
        2
    """
    points = list(points_of(name, axis))
    for index, (label, settings) in enumerate(points):
        if any(label == one or settings == same for one, same in points[:index]):
            return index
    return None


def shown_names(axes: Mapping[str, Axis], going_on: Collection[str] = ()) -> dict[str, str]:
    """The name of each axis in labels: of a setting's the last part.

    Axes that share it are told apart by their places in a label; where one of them goes on, by their whole names.

    Args:
        axes: Of a grid, by name.
        going_on: Those that go on past their ends.

    Example:
        >>> both = {"model.optimizer.lr": [0.1], "strategy.server.lr": [1]}
        >>> list(shown_names(both).values())
        ['lr', 'lr']
        >>> list(shown_names(both, ["model.optimizer.lr"]).values())
        ['model.optimizer.lr', 'strategy.server.lr']
    """
    short = {name: name if isinstance(axis, dict) else name.rpartition(".")[2] for name, axis in axes.items()}
    count = Counter(short.values())
    clashing = {each for name, each in short.items() if name in going_on and count[each] > 1}
    return {name: name if each in clashing else each for name, each in short.items()}


@dataclass(frozen=True)
class Ordered:
    """An axis of different numbers of one setting, whether they are listed or have labels of their own.

    Attributes:
        name: The axis.
        shown: Its name in labels.
        setting: The setting.
        values: The numbers, ascending.
        labels: Those of the numbers.
    """

    name: str
    shown: str
    setting: str
    values: Sequence[float]
    labels: Mapping[float, str]

    @classmethod
    def of(cls, name: str, axis: Axis, shown: str | None = None) -> "Ordered | None":
        """The axis, if it is one; arguments as of :func:`points_of`."""
        shown = shown or shown_names({name: axis})[name]
        points = list(points_of(name, axis, shown))
        settings = {setting for _, point in points for setting in point}
        if len(settings) != 1 or len(points) < 2:
            return None
        (setting,) = settings
        labels = {point[setting]: label for label, point in points if _is_number(point.get(setting))}
        if len(labels) < len(points):
            return None
        return cls(name, shown, setting, sorted(labels), labels)

    @classmethod
    def all_of(cls, axes: Mapping[str, Axis], going_on: Collection[str] = ()) -> "list[Ordered]":
        """Those among the axes of a grid; arguments as of :func:`shown_names`."""
        shown = shown_names(axes, going_on)
        return list(filter(None, (cls.of(name, axis, shown[name]) for name, axis in axes.items())))

    def value_of(self, point: Point) -> float | None:
        """The number at which a point stands; None where another axis has the last word on the setting."""
        label, settings = point
        value = settings.get(self.setting)
        return value if _is_number(value) and self.label(value) in label.split(", ") else None  # type: ignore[arg-type]

    def label(self, value: float) -> str:
        """The label of a number, on the axis or past its ends."""
        return self.labels.get(value, f"{self.shown}={value}")

    @property
    def goes_on(self) -> bool:
        """Whether it has a ratio by which it can go on."""
        return self.values[0] > 0

    def past(self, point: Point, steps: int | None) -> list[Point]:
        """The point with the next value, by the ratio of the last two, past each end at which it stands, or beyond.

        Of whole numbers the next is one, too: the nearest. They end where that is not a new one.

        Args:
            point: A point of the grid, or past its ends.
            steps: How many values past an end there may be; None for any number.
        """
        value = self.value_of(point)
        result: list[Point] = []
        if value is None:
            return result
        values = self.values
        for end, before in ((values[0], values[1]), (values[-1], values[-2])):
            if (value > end) if end < before else (value < end):
                continue
            if steps is not None and round(math.log(value / end) / math.log(end / before)) >= steps:
                continue
            further = value * end / before
            if all(isinstance(each, int) for each in values):
                further = round(further)
                if further < 1 or further == value:
                    continue
            else:
                further = float(f"{further:.3g}")
            parts = [self.label(further) if part == self.label(value) else part for part in point[0].split(", ")]
            result.append((", ".join(parts), point[1] | {self.setting: further}))
        return result


def at_edge(axes: Mapping[str, Axis], point: Point, tried: Sequence[Point], going_on: Collection[str] = ()) -> str:
    """At which edges of what was tried a point stands, in words; empty for none.

    Of two values there is nothing but edges, so that they say nothing. Zero is no edge of a grid but of the setting,
    and so is one among whole numbers.

    Args:
        axes: Of the grid, by name.
        point: The chosen one.
        tried: All that were tried, those past the ends of the axes too.
        going_on: Axes that go on past their ends.
    """
    found = []
    for axis in Ordered.all_of(axes, going_on):
        value = axis.value_of(point)
        if value is None:
            continue
        values = {each for each in map(axis.value_of, tried) if each is not None} | {value}
        natural = value == 0 or (value == 1 and all(float(each).is_integer() for each in values))
        if len(values) > 2 and (value == max(values) or (value == min(values) and not natural)):
            which = "highest" if value == max(values) else "lowest"
            found.append(f"{axis.label(value)} is the {which} of {len(values)}")
    return "; ".join(found)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
