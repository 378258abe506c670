"""What methods gain on SM at validation's round and on the last rounds: a table of docs/results/leaderboard-graphs.md.

    .venv/bin/python benchmarks/graph_gains.py

Papers on federations of graphs report the round that validation chose, or the mean of the last ones. From the committed
runs of studies/leaderboard_graphs.yaml: test accuracy in percent, mean over the clients, at validation's round and as
the mean of the last ten evaluations (rounds 154 to 199); and the mean and standard deviation over seeds of what a
method gains over Local and over FedAvg in the same seed. Writes benchmarks/results/graph_gains.md.
"""

import statistics
from collections.abc import Mapping
from pathlib import Path

from fl_lightning.study.store import Store

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "benchmarks" / "results" / "graph_gains.md"
CASE, LAST = "SM", 10
#: Test accuracy by seed, of each method.
Accuracies = dict[str, dict[int, float]]


def accuracies() -> tuple[Accuracies, Accuracies]:
    """At validation's round, and on the last rounds."""
    store = Store(ROOT / "studies" / "results" / "leaderboard_graphs")
    history = store.history()
    chosen: Accuracies = {}
    last: Accuracies = {}
    for record in store.records().values():
        if (record["case"], record["purpose"]) != (CASE, "report") or record["error"]:
            continue
        chosen.setdefault(record["method"], {})[record["seed"]] = 100 * record["result"]["test/acc"]
        curve = history[record["key"]]["test/acc"]
        last.setdefault(record["method"], {})[record["seed"]] = 100 * statistics.mean(curve[-LAST:])
    return chosen, last


def shown(values: list[float], sign: str = "") -> str:
    """Mean and standard deviation, such as ``78.6 ± 1.2``; nothing for fewer than two.

    Example:
        >>> shown([78.0, 80.0]), shown([1.0, 3.0], "+"), shown([78.0])
        ('79.0 ± 1.4', '+2.0 ± 1.4', '')
    """
    return f"{statistics.mean(values):{sign}.1f} ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""


def gains(of: Mapping[int, float], over: Mapping[int, float]) -> list[float]:
    """What is gained, seed by seed.

    Example:
        >>> gains({0: 80.0, 1: 79.0}, {1: 76.0, 2: 70.0})
        [3.0]
    """
    return [of[seed] - over[seed] for seed in sorted(of.keys() & over.keys())]


def text() -> str:
    """The table."""
    chosen, last = accuracies()
    lines = [
        "| method | seeds | validation's round | over Local | over FedAvg | last ten | over Local | over FedAvg |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for method in chosen:
        cells = [method, str(len(chosen[method]))]
        for found in (chosen, last):
            cells.append(shown(list(found[method].values())))
            for base in ("Local", "FedAvg"):
                cells.append("" if method == base else shown(gains(found[method], found.get(base, {})), "+"))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    PAGE.write_text(text())
