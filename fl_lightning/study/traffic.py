"""What went over the wire: bytes up to the best round, and up to a target that a method's validation sets."""

import shlex
import statistics
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from fl_lightning.study.column import scale_of
from fl_lightning.study.definition import TOTAL_BYTES, Study
from fl_lightning.study.progress import Progress
from fl_lightning.study.store import Record, Rounds, is_less_better, metric_reported
from fl_lightning.study.table import markdown, mean_and_spread

#: Which share of an error above the target's, and how much accuracy below it, still counts as there.
_ERROR_SLACK, _ACCURACY_SLACK = 0.02, 0.01


def traffic(progress: Progress) -> str:
    """The tables of all cases that have runs; empty if there are none."""
    parts, history, sizes = [], progress.store.history(), _Sizes()
    for case in progress.study.cases:
        table = _table(progress, case, history, sizes)
        if len(table):
            parts.append(f"**{case}**\n\n{markdown(table, 'method')}")
    return "\n\n".join([*parts, _note(progress.study)] if parts else [])


def _note(study: Study) -> str:
    lines = ["MB up to the round that validation chose: of all clients, and of the one that sends the most."]
    assert study.traffic is not None
    if study.traffic.target:
        lines.append(
            f"The target is at most a point (of an error: two percent) worse than the best validation of "
            f"{study.traffic.target} in the same seed; median over the seeds that come so far."
        )
    if study.traffic.by_examples:
        lines.append("The last columns are test metrics of clients with that many training examples, over all seeds.")
    return " ".join(lines)


def _table(progress: Progress, case: str, history: Mapping[str, Rounds], sizes: "_Sizes") -> pd.DataFrame:
    study = progress.study
    result: dict[str, list[tuple[Record, Rounds]]] = {}
    for method in study.methods:
        study_runs = progress.report(method, case) if case in study.cases_of(method) else []
        study_runs = [run for run in study_runs if not progress.has_other_data(run)]
        found = [(progress.records[run.key], history.get(run.key)) for run in study_runs if run.key in progress.records]
        result[method] = [(record, rounds) for record, rounds in found if rounds is not None and not record["error"]]
    assert study.traffic is not None
    target = {record["seed"]: _target(record) for record, _ in result.get(study.traffic.target, [])}
    rows = {
        method: {**_sent(runs), **_to_target(runs, target), **_by_examples(runs, study.traffic.by_examples, sizes)}
        for method, runs in result.items()
        if runs
    }
    return pd.DataFrame.from_dict(rows, orient="index")


def _sent(runs: Sequence[tuple[Record, Rounds]]) -> dict[str, str]:
    """Test metrics, over clients and weighted by their examples, and what they cost."""
    scale, metric = scale_of(is_error=is_less_better(runs[0][0])), metric_reported(runs[0][0])
    test, weighted = (
        pd.Series([record["result"].get(f"test/{metric}{end}") for record, _ in runs], dtype=float).dropna()
        for end in ("", "_weighted")
    )
    chosen = [rounds["round"].index(record["result"]["best_round"]) for record, rounds in runs]
    study_runs = {
        "test": mean_and_spread(test, scale),
        "by examples": f"{scale * weighted.mean():.1f}" if len(weighted) else "",
    }
    for column, name in {"MB, all": TOTAL_BYTES, "MB, busiest": "comm/bytes_busiest"}.items():
        sent = [rounds[name][index] for (_, rounds), index in zip(runs, chosen, strict=True) if name in rounds]
        study_runs[column] = shown(statistics.mean(sent) / 1e6) if len(sent) == len(runs) else ""
    return study_runs


def _target(record: Record) -> float:
    is_error = is_less_better(record)
    best: float = record["val"]
    return (1 + _ERROR_SLACK) * best if is_error else best - _ACCURACY_SLACK


def _to_target(runs: Sequence[tuple[Record, Rounds]], target: Mapping[int, float]) -> dict[str, str]:
    if not target:
        return {}
    there = []
    runs = [(record, rounds) for record, rounds in runs if record["seed"] in target]
    for record, rounds in runs:
        if record["monitor"] not in rounds:
            return {"MB to the target": "", "reached in": f"unknown: {record['monitor']} of every round was not kept"}
        sign = -1.0 if is_less_better(record) else 1.0
        values = sign * np.array(rounds[record["monitor"]], dtype=float)
        indices = np.flatnonzero(values >= sign * target[record["seed"]])
        if len(indices):
            there.append(rounds[TOTAL_BYTES][indices[0]] / 1e6 if TOTAL_BYTES in rounds else 0.0)
    median = shown(statistics.median(there)) if there else ""
    return {"MB to the target": median, "reached in": f"{len(there)} of {len(runs)}"}


class _Sizes:
    """Training examples of every client of a record; the data are made once for each partition."""

    def __init__(self) -> None:
        self.known: dict[str, list[int]] = {}

    def of(self, record: Record) -> list[int]:
        if record["partition"] not in self.known:
            from fl_lightning.study.worker import RunCLI

            data = RunCLI(shlex.split(record["command"])[1:], run=False).datamodule
            data.prepare_data()
            data.setup()
            self.known[record["partition"]] = [int(client.train_mask_N.sum()) for client in data.clients]
        return self.known[record["partition"]]


def _by_examples(runs: Sequence[tuple[Record, Rounds]], bounds: Sequence[float], sizes: _Sizes) -> dict[str, str]:
    """Mean over the clients of each bin, over all seeds."""
    values: dict[float, list[float]] = {bound: [] for bound in (*bounds, float("inf"))} if bounds else {}
    for record, _ in runs if values else ():
        num_examples, clients = sizes.of(record), record["clients"]
        for client, test in zip(clients["client"], clients["test"], strict=True):
            if test is not None:
                bound = next(bound for bound in values if num_examples[client] <= bound)
                values[bound].append(scale_of(is_error=is_less_better(record)) * test)
    names = [*(f"up to {bound:g} example{'' if bound == 1 else 's'}" for bound in bounds), "more"]
    return {name: f"{statistics.mean(v):.1f}" if v else "" for name, v in zip(names, values.values(), strict=False)}


def shown(value: float) -> str:
    """Three digits.

    Example:
        >>> shown(0.01234), shown(1634.2)
        ('0.0123', '1,630')
    """
    return f"{float(f'{value:.3g}'):,.6g}"
