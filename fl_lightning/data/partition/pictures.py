"""Pictures of a partition: the clients' labels, and how their graphs are spread."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def draw_labels(axes: Any, label_counts: Sequence[Sequence[int]], names: Sequence[str], what: str) -> None:
    """Draw how many examples of each class every client has, as stacked bars.

    Args:
        axes: Where to draw.
        label_counts: For each client the number of examples of every class.
        names: What the classes are called.
        what: The label of the axis.
    """
    count_CK = np.array(label_counts)
    num_clients, num_classes = count_CK.shape
    colors = _class_colors(num_classes)
    left_CK = count_CK.cumsum(axis=1) - count_CK
    for k in range(num_classes):
        bars = {"left": left_CK[:, k], "height": 0.78, "color": colors[k], "label": names[k]}
        axes.barh(range(num_clients), count_CK[:, k], **bars)
    axes.set_xlabel(what)


def draw_spread(axes: Any, five_numbers: Sequence[Sequence[float]], what: str) -> None:
    """Draw a box for each client, from its least to its greatest value.

    Args:
        axes: Where to draw.
        five_numbers: For each client the least value, the quartiles and the greatest.
        what: The label of the axis.
    """
    keys = ("whislo", "q1", "med", "q3", "whishi")
    boxes = [dict(zip(keys, each, strict=True)) for each in five_numbers]
    places = range(len(boxes))
    color = {"color": "tab:blue"}
    style: Mapping[str, Any] = {"boxprops": color, "whiskerprops": color, "capprops": color, "medianprops": color}
    axes.bxp(boxes, positions=places, widths=0.6, showfliers=False, orientation="horizontal", **style)
    axes.set_xlabel(what)


def clients_down(axes: Any, names: Sequence[str]) -> None:
    """A line for each client, the first at the top, and no frame."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _class_colors(num_classes: int) -> list[tuple[float, float, float, float]]:
    """Return distinct colors: qualitative maps while they suffice, else steps through a continuous one."""
    from matplotlib import colormaps

    if num_classes <= 10:
        return [colormaps["tab10"](k) for k in range(num_classes)]
    qualitative = [colormaps[name](k) for name in ("tab20", "tab20b", "tab20c") for k in range(20)]
    if num_classes <= len(qualitative):
        return qualitative[:num_classes]
    return [colormaps["turbo"](k / (num_classes - 1)) for k in range(num_classes)]
