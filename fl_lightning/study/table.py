"""The results as one tidy table, and as a leaderboard."""

import re
import statistics
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from fl_lightning.files import whole_file
from fl_lightning.run.curve import AT_EDGE
from fl_lightning.study.column import counts_errors, scale_in
from fl_lightning.study.definition import Study
from fl_lightning.study.marks import COLUMNS, columns_of
from fl_lightning.study.progress import Progress
from fl_lightning.study.store import Record, Rounds, is_less_better, metric_reported
from fl_lightning.terminal import PlainTable

#: Minimum width of a terminal column into which a case's name is wrapped.
_NARROW_HEAD = 12


def tidy(progress: Progress) -> pd.DataFrame:
    """A row for each finished reported run: the chosen setting, its metrics and its cost.

    ``val`` and ``test`` are those of the round that validation chose (``round``), mean over clients; ``test_std`` and
    ``test_worst`` are over clients. ``trained_val``, ``trained_test`` and the like are of other models of the run, at
    the round of their own best validation; ``unseen_...`` of clients that were held out; ``benign_...`` under attacks.
    ``always_benign_test`` is the mean over the clients that are malicious in no run of the seed: the same ones
    whatever the ratio of the attack. ``test/...`` are further metrics of the study's ``history``. The marks and what
    goes with them are in :mod:`fl_lightning.study.marks`.
    """
    rows, records = [], []
    study, history = progress.study, progress.store.history()
    for method, case in progress.groups(study.methods, study.cases):
        chosen = progress.choice(method, case)
        choice = {AT_EDGE: progress.at_edge(method, case), "tried": len(chosen.tried) if chosen else 0}
        for run in progress.report(method, case):
            record = progress.records.get(run.key)
            if record is not None:
                names = {"method": method, "case": case, "seed": run.seed}
                end = {**columns_of(record, history.get(run.key)), **choice}
                row = {**_row(record), **_further(record, study.history), **names, **end}
                row |= {"stale": progress.state(run) == "stale", "other_data": progress.has_other_data(run)}
                rows.append(row)
                records.append(record)
    _add_always_benign(rows, records)
    table = pd.DataFrame(rows)
    if "val" in table and "test" not in table:
        table["test"] = np.nan
    leading = [name for name in _LEADING if name in table.columns]
    trailing = [name for name in _TRAILING if name in table.columns]
    inner = sorted(name for name in table.columns if name not in (*leading, *trailing))
    return table[[*leading, *inner, *trailing]]


#: Metrics whose name in tables is not the one in sentences.
_WORDS = {"acc": "accuracy", "f1": "F1", "r2": "R²", "mrr": "MRR"} | {
    name: name.upper() for name in ("auroc", "ece", "mse", "rmse", "mae")
}
_LEADING = ("method", "case", "seed", "setting", "metric", "round", "val", "test", "test_std", "test_worst")
#: Columns that are metrics.
_METRIC = re.compile(r"(.*_)?(val|test)(_(std|worst|weighted|asr))?|(test|val)/.+|benign_val_acc")
_SPENT = ("seconds", "cpu_seconds", "training_seconds", "rounds", "bytes_up", "bytes_down", "bytes_peer", "failures")
_TRAILING = (*COLUMNS, *_SPENT, "stale", "other_data", "error", "partition", "version", "command")
#: Columns that are not among those of ``results.csv``.
_HIDDEN = ("is_error", "other_data")


def _add_always_benign(rows: list[dict[str, Any]], records: Sequence[Record]) -> None:
    """Add the column in place to rows with metrics of clients; do nothing if no run was attacked."""
    malicious: dict[tuple[int, int], set[float]] = {}
    for record in records:
        if not record["error"]:
            clients = record["clients"]["client"]
            malicious.setdefault((record["seed"], len(clients)), set()).update(record["malicious"])
    for row, record in zip(rows, records, strict=True):
        if record["error"] or not any(malicious.values()):
            continue
        clients = record["clients"]
        attacked = malicious[record["seed"], len(clients["client"])]
        pairs = zip(clients["client"], clients["test"], strict=True)
        values = [test for client, test in pairs if client not in attacked and test is not None]
        row["always_benign_test"] = statistics.fmean(values) if values else None


def _row(record: Record) -> dict[str, Any]:
    names = ("setting", "error", "partition", "version", "command", "seconds", "cpu_seconds")
    row: dict[str, Any] = {name: record[name] for name in names}
    if record["error"]:
        return row
    metric, metrics = metric_reported(record), record["result"]
    row |= {"metric": metric, "is_error": is_less_better(record), "round": metrics["best_round"], "val": record["val"]}
    row |= {"rounds": record["num_rounds"], "training_seconds": record["training_seconds"]}
    row |= {"failures": record["failures"], **{f"bytes_{way}": size for way, size in record["bytes"].items()}}
    for kind, (val, test) in record["kinds"].items():
        row |= {f"{kind.replace('/', '_')}_val": val, f"{kind.replace('/', '_')}_test": test}
    for name, value in metrics.items():
        kind, _, last = name.rpartition("/test/")
        kind = kind if last else ""
        if name.startswith("test/"):
            last = name.removeprefix("test/")
        if last in (metric, f"{metric}_std", f"{metric}_worst", f"{metric}_weighted"):
            column = f"{kind.replace('/', '_')}_test" if kind else "test"
            row.setdefault(column + last.removeprefix(metric), value)
        elif name.endswith("test/asr") or name == "benign/val/acc":
            row[name.replace("/", "_")] = value
    return row


def _further(record: Record, wanted: Sequence[str]) -> dict[str, float | None]:
    """The test metrics at the best round that a study keeps beside that of the monitored one."""
    if record["error"]:
        return {}
    found, main = record["result"], f"test/{metric_reported(record)}"
    return {name: found[name] for name in wanted if name.startswith("test/") and name != main and name in found}


def what_it_lacks(table: pd.DataFrame) -> Iterator[str]:
    """Sentences on the runs of a tidy table that :func:`on_current_data` leaves out, and on metrics that none has."""
    if len(table) and (number := int(table["other_data"].sum())):
        runs = "1 run is" if number == 1 else f"{number} runs are"
        yield f"{runs} left out: the data have changed since, so that they compare with no others."
    if "val" in table and not table["test"].notna().any():
        yield "There are no test examples: no test metric is known."


def on_current_data(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of a tidy table without those of runs on data that have changed since, which compare with no others."""
    return table[~table["other_data"].astype(bool)] if len(table) else table


def metrics_in(table: pd.DataFrame) -> list[str]:
    """The columns of the tidy table that a leaderboard can show, in its unit."""
    return [name for name in table.columns if _METRIC.fullmatch(name) and pd.api.types.is_numeric_dtype(table[name])]


def write_csv(table: pd.DataFrame, path: Path) -> None:
    """Write the tidy table; numbers as they are stored."""
    with whole_file(path) as temporary:
        table.drop(columns=list(_HIDDEN), errors="ignore").to_csv(temporary, index=False, lineterminator="\n")


def units(table: pd.DataFrame) -> str:
    """The metrics of a table of results and the units in which they are displayed, in words.

    Example:
        >>> units(pd.DataFrame({"metric": ["acc", "rmse", None], "is_error": [False, True, None]}))
        'accuracy in percent, RMSE × 10⁻³'
    """
    known = table[["metric", "is_error"]].dropna().drop_duplicates() if "metric" in table else table.iloc[:0]
    names = [(_WORDS.get(metric, metric.replace("_", " ")), is_error) for metric, is_error in known.to_numpy()]
    shares = " and ".join(name for name, is_error in names if not is_error)
    errors = [f"{name} × 10⁻³" for name, is_error in names if is_error]
    return ", ".join([*([f"{shares} in percent"] if shares else []), *errors]) or "no metric is known"


def leaderboard(progress: Progress, table: pd.DataFrame, metric: str = "test") -> pd.DataFrame:
    """Methods × cases: mean ± standard deviation over seeds as text; empty if nothing was run."""
    study = progress.study
    shown = pd.DataFrame("", index=list(study.methods), columns=list(study.cases))
    if not len(table) or metric not in table:
        return shown
    for (method, case), result in table.groupby(["method", "case"], sort=False):
        shown.loc[method, case] = cell_text(result, metric, study)
    return shown


def further_metrics(progress: Progress, table: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Leaderboards of the other test metrics, with the name and the unit of each."""
    for metric in (name for name in progress.study.history if name.startswith("test/") and name in table):
        rows, name = table[table[metric].notna()], metric.removeprefix("test/")
        words = units(pd.DataFrame({"metric": [name], "is_error": [counts_errors(rows, metric)]}))
        yield f"{words[0].upper()}{words[1:]}", leaderboard(progress, rows, metric)


def near_the_end(table: pd.DataFrame, study: Study) -> pd.DataFrame | None:
    """Methods × cases: rounds, and MB where they are known, to 95 % of the best validation; None without any."""
    if "rounds_to_95" not in table or not table["rounds_to_95"].notna().any():
        return None
    shown = pd.DataFrame("", index=list(study.methods), columns=list(study.cases))
    for (method, case), rows in table.dropna(subset="rounds_to_95").groupby(["method", "case"], sort=False):
        size = rows["bytes_to_95"].astype(float).median() / 1e6
        sent = "" if np.isnan(size) else f" ({float(f'{size:.3g}'):,.6g} MB)"
        shown.loc[method, case] = f"{rows['rounds_to_95'].astype(float).median():g}{sent}"
    return shown


def what_was_run(shown: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """A leaderboard's methods and cases that have a metric, and the names of the others."""
    there = shown != ""
    rows, columns = there.any(axis=1), there.any(axis=0)
    lacking = [str(name) for selected in (columns, rows) for name, has in selected.items() if not has]
    return shown.loc[rows, columns], lacking


def cell_text(result: pd.DataFrame, metric: str, study: Study) -> str:
    """Mean ± standard deviation over the seeds, and how many failed or are missing; empty if no run has the metric."""
    values = result[metric].dropna()
    if not len(values):
        return "failed" if (result["error"] != "").any() else ""
    number = "" if len(values) == len(study.seeds) else f" ({len(values)} of {len(study.seeds)})"
    return mean_and_spread(values, scale_in(result, metric)) + number


def mean_and_spread(values: pd.Series, scale: float) -> str:
    """Mean ± standard deviation as text; for a single value, the value; empty without any."""
    if not len(values):
        return ""
    spread = f" ± {scale * values.std():.1f}" if len(values) > 1 else ""
    return f"{scale * values.mean():.1f}{spread}"


def by_round(
    progress: Progress, history: Mapping[str, Rounds], method: str, case: str, metrics: Sequence[str]
) -> list[np.ndarray] | None:
    """Metrics by round, each a mean over the seeds that have all of them; None if no seed has."""
    result = [history.get(run.key, {}) for run in progress.report(method, case) if not progress.has_other_data(run)]
    result = [rounds for rounds in result if all(metric in rounds for metric in metrics)]
    if not result:
        return None
    length = min(len(rounds[metrics[0]]) for rounds in result)
    return [np.array([rounds[name][:length] for rounds in result], dtype=float).mean(axis=0) for name in metrics]


def markdown(table: pd.DataFrame, first: str) -> str:
    """A table of text as Markdown."""
    head, *rows = (
        f"| {' | '.join(map(_in_cell, line))} |"
        for line in ([first, *table.columns], *([name, *row] for name, row in _rows(table)))
    )
    return "\n".join([head, "|" + "---|" * (len(table.columns) + 1), *rows])


def _in_cell(text: object) -> str:
    """A text in one line, in which nothing ends the cell."""
    return " ".join(str(text).split("\n")).replace("|", "\\|")


def for_terminal(table: pd.DataFrame, first: str, *, title: str, width: int) -> Iterator[PlainTable]:
    """A text table, in several parts if its columns do not fit side by side in the given width."""
    names = list(map(str, table.index))
    space = left = width - max(map(len, (first, *names))) - 4  # the edges of a table; those of a column take three
    parts: list[list[tuple[str, list[str]]]] = [[]]
    for name in table.columns:
        cells = list(map(str, table[name]))
        head = textwrap.wrap(str(name), max(_NARROW_HEAD, *map(len, cells)))
        needed = max(map(len, (*head, *cells))) + 3
        if needed > left and parts[-1]:
            parts.append([])
            left = space
        parts[-1].append(("\n".join(head), cells))
        left -= needed
    for number, part in enumerate(parts):
        shown = PlainTable(first, title="" if number else title)
        for head_of_column, _ in part:
            shown.add_column(head_of_column, no_wrap=True)
        for row in zip(names, *(cells for _, cells in part), strict=True):
            shown.add_row(*row)
        yield shown


def _rows(table: pd.DataFrame) -> Sequence[tuple[object, Sequence[object]]]:
    return [(name, list(row)) for name, row in zip(table.index, table.to_numpy(), strict=True)]
