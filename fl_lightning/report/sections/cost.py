"""What was communicated, and where the time went."""

import numpy as np

from fl_lightning.report.document import Fact, Section
from fl_lightning.report.figures import Curve, Picture, Table
from fl_lightning.report.folder import Recorded
from fl_lightning.report.pictures import Album
from fl_lightning.report.wording import size, size_unit

_WAYS = {"up": "up to the server", "down": "down to the clients", "peer": "between clients"}


def section(run: Recorded, album: Album) -> Section:
    """The section "Communication and time"."""
    x = run.rounds.astype(float)
    pictures: list[Picture] = []
    ways = {
        way: column for way in _WAYS if (column := run.column(f"comm/bytes_{way}")) is not None and column.max() > 0
    }
    if ways:
        totals = {way: np.nancumsum(column) for way, column in ways.items()}
        factor, unit = size_unit(max(float(column[-1]) for column in totals.values()))
        alike: dict[bytes, list[str]] = {}
        for way, column in totals.items():
            alike.setdefault(column.tobytes(), []).append(way)
        curves = [
            Curve(label=" and ".join(_WAYS[way] for way in same), x=x, y=totals[same[0]] / factor)
            for same in alike.values()
        ]
        rows = [[_WAYS[way], size(float(c[-1])), size(float(np.nanmedian(ways[way])))] for way, c in totals.items()]
        pictures.append(
            album.curves(
                curves,
                title="Bytes sent since the beginning",
                x_label="round",
                y_label=unit,
                from_zero=True,
                note="Of the payloads themselves, without what a network adds.",
                table=Table(title="Table", columns=["way", "all rounds", "a round (median)"], rows=rows),
            )
        )
    seconds = run.column("seconds")
    if seconds is not None:
        pictures.append(
            album.curves(
                [Curve(label="a round", x=x, y=seconds)],
                title="Time of the rounds",
                x_label="round",
                y_label="seconds",
                from_zero=True,
            )
        )
    timing = run.record.timing if run.record else None
    notes = []
    if timing is not None and timing.num_rounds:
        each = {name: 1000 * value / timing.num_rounds for name, value in timing.seconds.items()}
        whole = sum(each.values()) or 1.0
        rows = [[name, f"{value:,.3g}", f"{100 * value / whole:.1f} %"] for name, value in each.items()]
        pictures.append(
            album.shares(
                each,
                title="Where the time goes",
                x_label="milliseconds a round",
                table=Table(title="Table", columns=["part", "ms a round", "share"], rows=rows),
            )
        )
        if timing.first_round:
            notes.append(f"The parts were timed from round {timing.first_round} on, where the run was resumed.")
    if not ways and seconds is not None:
        notes.append(
            "Nothing was communicated." if run.column("comm/bytes_total") is not None else "Bytes were not counted."
        )
    machine = run.record.machine if run.record else {}
    facts = [Fact(name=name, value=value) for name, value in machine.items()]
    empty = "" if pictures else "Neither bytes nor seconds were logged."
    return Section(
        anchor="cost", title="Communication and time", pictures=pictures, facts=facts, notes=notes, empty=empty
    )
