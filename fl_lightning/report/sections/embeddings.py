"""Nodes or examples in the plane, by class and by client."""

import numpy as np

from fl_lightning.report.axes import class_colors
from fl_lightning.report.document import Section
from fl_lightning.report.folder import Recorded
from fl_lightning.report.pictures import Album
from fl_lightning.report.theme import stand_in


def section(run: Recorded, album: Album) -> Section:
    """The section "Embeddings"."""
    record = run.record
    points = record.points if record else None
    anchor, title = "embeddings", "Embeddings"
    if record is None or points is None or not points.x:
        notes = record.left_out("embedding") if record else []
        return Section(anchor=anchor, title=title, empty="No embeddings were kept.", notes=notes)
    x, y = np.array(points.x), np.array(points.y)
    what = record.examples
    first, second = (f"{axis} principal component" for axis in ("first", "second"))
    pictures = []
    if not record.regression and not record.own_outputs:  # classes of their own have no common colors
        classes = 1 + max((int(label) for label in points.label if label is not None), default=0)
        if record.partition and record.partition.labels:
            classes = len(record.partition.labels[0])
        groups, colors = [record.class_name(label) for label in range(classes)], class_colors(classes)
        group = [classes if label is None else int(label) for label in points.label]
        if classes in group:
            groups, colors = [*groups, "unknown"], [*colors, stand_in("faint")]
        pictures.append(
            album.points(
                x,
                y,
                group,
                groups,
                title=f"{what.capitalize()} by class",
                x_label=first,
                y_label=second,
                colors=colors,
            )
        )
    members = sorted(set(points.client))
    pictures.append(
        album.points(
            x,
            y,
            [members.index(client) for client in points.client],
            [record.names[client] for client in members],
            title=f"{what.capitalize()} by client",
            x_label=first,
            y_label=second,
            note="" if len(members) <= 20 else f"{len(members)} clients, each with its own color.",
        )
    )
    shares = " and ".join(f"{100 * share:.0f} %" for share in points.explained)
    return Section(
        anchor=anchor,
        title=title,
        text=f"The last layer before the read-out of {len(x):,} of {points.total:,} {what}, by each client's own model "
        f"as round {points.round} left it, on two principal components, which explain {shares} of the variance.",
        pictures=pictures,
    )
