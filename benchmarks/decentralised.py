"""What the studies of decentralised methods came to, beside what went over the wire.

    fl-train study run studies/sheaf_fmtl_vehicle.yaml        (and the others of STUDIES)
    FL_DATA_ROOT=... .venv/bin/python benchmarks/decentralised.py

Trains nothing: reads studies/results/*, and writes benchmarks/results/decentralised.md and the same tables in
docs/results.md between its two markers. MB up to the chosen round are given for all edges and for the client that sends
the most (the count of Sheaf-FMTL's paper). MB to the target are those up to the first evaluated round whose validation
is at most a point (of an error: two per cent) worse than the best of the random graph's dFedU in the same seed; the
median over the seeds that come so far.
"""

import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from accuracy import write_table

from fl_lightning.round.goal import less_is_better
from fl_lightning.study.definition import Study
from fl_lightning.study.progress import Progress
from fl_lightning.study.store import Record, Store
from fl_lightning.study.table import scale_of
from fl_lightning.study.worker import CellCLI

ROOT = Path(__file__).parents[1]
STUDIES = ("vehicle", "topologies", "starts", "school", "har", "rotated_mnist", "architectures")
#: Cases whose accuracy is also told by the training examples of a client, in bins up to these.
BINS: Mapping[str, tuple[float, ...]] = {"Vehicle": (5, 50, float("inf"))}
#: Whose validation sets the target.
REFERENCE = "dFedU"
_FIRST = ("method", "seeds", "test", "by examples", "MB, all", "MB, busiest", "MB to the target", "reached in")


def runs(progress: Progress, method: str, case: str) -> list[tuple[Record, dict[str, list[float]]]]:
    """The records and rounds of the seeds that are done."""
    history = progress.store.history()
    cells = [cell for cell in progress.report(method, case) if progress.state(cell) in ("done", "stale")]
    return [(progress.records[cell.key], history.get(cell.key, {})) for cell in cells]


def training_examples(record: Record) -> list[int]:
    """How many each client of a cell has."""
    data = CellCLI(shlex.split(record["command"])[1:], run=False).datamodule
    data.prepare_data()
    data.setup()
    return [int(client.train_mask_N.sum()) for client in data.clients]


def targets(progress: Progress, case: str) -> dict[int, float]:
    """The validation figure to reach, by seed."""
    if REFERENCE not in progress.study.methods:
        return {}
    found = {}
    for record, _ in runs(progress, REFERENCE, case):
        is_error = less_is_better(record["monitor"])
        found[record["seed"]] = 1.02 * record["val"] if is_error else record["val"] - 0.01
    return found


def first_there(record: Record, rounds: Mapping[str, Sequence[float]], target: float) -> int | None:
    """The place of the first evaluated round that comes to the target."""
    sign = -1.0 if less_is_better(record["monitor"]) else 1.0
    values = sign * np.array(rounds[record["monitor"]], dtype=float)
    there = np.flatnonzero(values >= sign * target)
    return int(there[0]) if len(there) else None


def megabytes(rounds: Mapping[str, Sequence[float]], name: str, place: int) -> float:
    """Sent up to an evaluated round; 0 where nothing was counted."""
    return rounds[name][place] / 1e6 if name in rounds else 0.0


def shown(value: float) -> str:
    """Three digits.

    Example:
        >>> shown(0.01234), shown(1634.2)
        ('0.0123', '1,630')
    """
    return f"{float(f'{value:.3g}'):,.6g}"


def row(progress: Progress, method: str, case: str, sizes: Mapping[int, Sequence[int]]) -> list[str]:
    """A row of the table; empty where nothing was run."""
    found = runs(progress, method, case)
    if not found:
        return []
    scale, metric = scale_of(found[0][0]["monitor"]), found[0][0]["monitor"].rpartition("/")[2]
    test = [scale * record["result"][f"test/{metric}"] for record, _ in found]
    by_examples = [scale * record["result"][f"test/{metric}_weighted"] for record, _ in found]
    chosen = [rounds["round"].index(record["result"]["best_round"]) for record, rounds in found]
    sent = [
        statistics.mean(megabytes(rounds, name, place) for (_, rounds), place in zip(found, chosen, strict=True))
        for name in ("comm/bytes_total", "comm/bytes_busiest")
    ]
    target = targets(progress, case)
    there = [
        megabytes(rounds, "comm/bytes_total", place)
        for record, rounds in found
        if record["seed"] in target and (place := first_there(record, rounds, target[record["seed"]])) is not None
    ]
    spread = f" ± {statistics.stdev(test):.1f}" if len(test) > 1 else ""
    cells = [method, str(len(found)), f"{statistics.mean(test):.1f}{spread}", f"{statistics.mean(by_examples):.1f}"]
    cells += [shown(sent[0]), shown(sent[1]) if any(sent) and "FedAvg" not in method else ""]
    cells += [shown(statistics.median(there)) if there else "", f"{len(there)} of {len(found)}" if target else ""]
    return cells + by_size(found, case, sizes, scale)


def by_size(
    found: Sequence[tuple[Record, object]], case: str, sizes: Mapping[int, Sequence[int]], scale: float
) -> list[str]:
    """Mean over the clients of each bin, over all seeds."""
    values: dict[float, list[float]] = {bound: [] for bound in BINS.get(case, ())}
    for record, _ in found if values else ():
        clients = record["clients"]
        for client, test in zip(clients["client"], clients["test"], strict=True):
            if test is not None:
                bound = next(bound for bound in values if sizes[record["seed"]][client] <= bound)
                values[bound].append(scale * test)
    return [f"{statistics.mean(each):.1f}" if each else "" for each in values.values()]


def table(progress: Progress, case: str) -> str:
    """A case's table."""
    rows: list[list[str]] = []
    sizes: dict[int, list[int]] = {}
    for method in progress.study.methods:
        if case in progress.study.cases_of(method):
            for record, _ in runs(progress, method, case) if case in BINS else ():
                if record["seed"] not in sizes:
                    sizes[record["seed"]] = training_examples(record)
            rows.append(row(progress, method, case, sizes))
    bins = [f"up to {bound:g}" if np.isfinite(bound) else "more" for bound in BINS.get(case, ())]
    head = [*_FIRST, *(f"{name} examples" for name in bins)]
    lines = [f"**{case}**", "", f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *(f"| {' | '.join(cells)} |" for cells in rows if cells)])


def main() -> None:
    """Write the tables."""
    parts = []
    for name in STUDIES:
        study = Study(ROOT / "studies" / f"sheaf_fmtl_{name}.yaml")
        progress = Progress(study, Store(study.results))
        for case in study.cases:
            if any(runs(progress, method, case) for method in study.methods if case in study.cases_of(method)):
                parts.append(table(progress, case))
    text = "\n\n".join(parts)
    (ROOT / "benchmarks/results/decentralised.md").write_text(f"# Decentralised methods\n\n{text}\n")
    write_table("decentralised", text)


if __name__ == "__main__":
    main()
