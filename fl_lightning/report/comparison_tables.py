"""The tables of a comparison of runs, for its page and for a terminal."""

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import pandas as pd
from rich import box

from fl_lightning.report.configurations import UNSET
from fl_lightning.report.figures import Table
from fl_lightning.report.wording import duration, number, setting, signed, size
from fl_lightning.run.curve import SIGNS
from fl_lightning.terminal import PlainTable

#: Cells up to this many characters are not broken in a terminal; labels and long values are.
_SHORT = 20


def summary_table(configurations: pd.DataFrame, metric: str) -> Table:
    """A row for each configuration (:attr:`Comparison.configurations`)."""
    columns = ["mean", "std over runs", "over clients", "worst client", "runs", "sent", "time"]
    marks = [name for name in SIGNS if name in configurations and configurations[name].any()]
    rows = [
        [
            str(row["configuration"]),
            *(number(row[name]) for name in (metric, "std_over_runs", "std_over_clients", "worst_client", "runs")),
            size(row["bytes"]) if math.isfinite(row["bytes"]) else UNSET,
            duration(row["seconds"]) if math.isfinite(row["seconds"]) else UNSET,
            *(str(row[name]) for name in marks),
        ]
        for row in configurations.to_dict("records")
    ]
    columns += [SIGNS[name].words for name in marks]
    return Table(title="Configurations", columns=["configuration", *columns], rows=rows)


def settings_table(settings: pd.DataFrame, labels: Sequence[str], *, shared: bool = False) -> Table:
    """The settings that differ: all of them, or those that every configuration has."""
    result = [(str(name), *map(setting, values)) for name, *values in settings.itertuples()]
    rows = [row for row in result if not (shared and UNSET in row)]
    return Table(title="Settings that differ", columns=["setting", *labels], rows=rows)


def gaps_table(gaps: pd.DataFrame) -> Table:
    """A row for each configuration: its paired differences from the reference."""
    what = gaps.columns[1]
    columns = ["configuration", what, "mean", "95 % interval", "better", "worse"]
    unfinished = ["unfinished"] if "unfinished" in gaps and gaps["unfinished"].any() else []
    columns += [*unfinished, *(["p (signed ranks)"] if "p_value" in gaps else [])]
    rows = []
    for row in gaps.to_dict("records"):
        interval = f"{signed(row['low'])} to {signed(row['high'])}" if math.isfinite(row["low"]) else UNSET
        line = [str(row["configuration"]), number(row[what]), signed(row["mean"]), interval]
        line += [number(row[name]) for name in ("better", "worse", *unfinished)]
        rows.append(line + ([number(row["p_value"])] if "p_value" in gaps else []))
    return Table(title=f"Paired over {what}", columns=columns, rows=rows)


def rich_table(title: str, table: Table) -> PlainTable:
    """A table for a terminal."""
    style = {"title_justify": "left", "title_style": "bold", "padding": (0, 1, 0, 0)}
    drawn = PlainTable(title=title, box=box.SIMPLE_HEAD, **style)  # type: ignore[arg-type]
    for index, column in enumerate(table.columns):
        longest = max((len(row[index]) for row in table.rows), default=0)
        is_short = index > 0 and longest <= _SHORT
        width = max([longest, *map(len, column.split())])
        head = "\n".join(textwrap.wrap(column, width)) if is_short else column
        drawn.add_column(head, justify="right" if index else "left", overflow="fold", no_wrap=is_short)
    for row in table.rows:
        drawn.add_row(*row)
    return drawn


def cell(value: Any) -> str:
    """A value of a table of runs."""
    return number(value) if isinstance(value, int | float) else str(value)
