"""What methods gain on SM, tuned and with the protocol's settings: tables of docs/results/leaderboard-graphs.md.

    .venv/bin/python benchmarks/graph_gains.py

Papers on federations of graphs report the round that validation chose, or the mean of the last ones, and their code
has the same settings for all methods. From the committed runs of studies/leaderboard_graphs.yaml, where every method
is tuned, and of studies/graphs_protocol.yaml, where none is: test accuracy in percent, mean over the clients, at
validation's round and as the mean of the last ten evaluations (rounds 154 to 199); and the mean and standard deviation
over seeds of what a method gains in the same seed over Local, over FedAvg of all layers that clients have in common,
and over FedPer, which averages the convolutions alone: the protocol's FedAvg. Runs of a tuned method that chose the
protocol's settings appear under both. Writes benchmarks/results/graph_gains.md.
"""

import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path

from fl_lightning.study.store import Store

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "benchmarks" / "results" / "graph_gains.md"
TUNED, UNTUNED = "leaderboard_graphs", "graphs_protocol"
CASE, LAST, PROTOCOL = "SM", 10, "lr=0.001, dropout=0.5"
BASES = ("Local", "FedAvg", "FedPer")
#: Test accuracy by seed, of each method: at validation's round, and on the last rounds.
Accuracies = dict[str, tuple[dict[int, float], dict[int, float]]]


def accuracies(study: str, setting: str | None = None) -> Accuracies:
    """Those of a study's runs; of those with one setting alone, if it is given."""
    store = Store(ROOT / "studies" / "results" / study)
    history = store.history()
    result: Accuracies = {}
    for record in store.records().values():
        if (record["case"], record["purpose"]) != (CASE, "report") or record["error"]:
            continue
        if setting in (None, record["setting"]):
            chosen, last = result.setdefault(record["method"], ({}, {}))
            chosen[record["seed"]] = 100 * record["result"]["test/acc"]
            last[record["seed"]] = 100 * statistics.mean(history[record["key"]]["test/acc"][-LAST:])
    return result


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


def rows(settings: str, found: Accuracies, place: int) -> Iterator[str]:
    """A row for each method, at validation's round (0) or on the last rounds (1)."""
    for method, both in found.items():
        cells = [settings, method, str(len(both[place])), shown(list(both[place].values()))]
        for base in BASES:
            over = found[base][place] if base in found else {}
            cells.append("" if method == base else shown(gains(both[place], over), "+"))
        yield "| " + " | ".join(cells) + " |"


def text() -> str:
    """The tables."""
    tuned, untuned = accuracies(TUNED), {**accuracies(TUNED, PROTOCOL), **accuracies(UNTUNED)}
    order = {name: untuned[name] for name in (*BASES, *untuned) if name in untuned}
    lines = []
    for place, name in enumerate(("At validation's round", "Mean of the last ten evaluations")):
        head = ["settings", "method", "seeds", "accuracy", *(f"over {base}" for base in BASES)]
        lines += [f"**{name}**", "", "| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
        lines += [*rows("tuned", tuned, place), *rows("protocol's", order, place), ""]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(text())
