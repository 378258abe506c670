"""How far each method is from the best one of a case: whether there is one that is never far."""

import pandas as pd

from fl_lightning.study.column import counts_errors, scale_of
from fl_lightning.study.statistics import by_seed
from fl_lightning.study.table import markdown

_NOTE = (
    "Points of the mean over seeds by which a method is behind the best one of a case, over the cases that it has; "
    "cases whose metric is an error are left out. Time: processor time of a run as a multiple of {first}'s in the same "
    "case, the median over cases and the largest."
)


def distances(table: pd.DataFrame, first: str) -> str:
    """A table in Markdown: of each method the mean and largest distance, where that is, and its time.

    Args:
        table: The tidy table.
        first: The method whose time the others are compared with.
    """
    behind, times = {}, {}
    for case, rows in table[table["test"].notna()].groupby("case", sort=False):
        if counts_errors(rows):
            continue
        means = by_seed(table, str(case), "test").mean()
        behind[case] = scale_of(is_error=False) * (means.max() - means)
        seconds = rows.groupby("method")["cpu_seconds"].mean()
        times[case] = seconds / seconds.get(first, float("nan"))
    if not behind:
        return ""
    methods, shown = table["method"].unique(), {}
    behind_MC, times_MC = (pd.DataFrame(each).reindex(methods) for each in (behind, times))
    for method in methods:
        known, time = behind_MC.loc[method].dropna(), times_MC.loc[method].dropna()
        shown[method] = {
            "cases": str(len(known)),
            "mean": f"{known.mean():.1f}" if len(known) else "",
            "largest": f"{known.max():.1f} ({known.idxmax()})" if len(known) else "",
            "time": f"{time.median():.1f}, {time.max():.1f}" if len(time) else "",
        }
    return f"{_NOTE.format(first=first)}\n\n{markdown(pd.DataFrame.from_dict(shown, orient='index'), 'method')}"
