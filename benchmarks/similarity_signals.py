"""Which exchanged quantity shows the hidden groups of FedAux's Figure 3: the table of docs/explanation/fedaux.md.

    .venv/bin/python benchmarks/similarity_signals.py

From the committed runs of studies/fedaux_similarity.yaml, the mean and standard deviation over seeds of how well the
cosines of what clients send agree with the five groups of 20 clients (normalized mutual information of clusters) and
with the cosines of their mean-pooled embeddings, which the paper takes as the truth (correlation). Writes
benchmarks/results/similarity_signals.md.
"""

import statistics
from pathlib import Path

from fl_lightning.study.store import Store

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "benchmarks" / "results" / "similarity_signals.md"
SIGNALS = {"projection": "vectors", "functional_embedding": "functional embedding", "read-out": "read-out weights"}
SCORES = {"nmi": "NMI with the groups", "ground_truth": "correlation with pooled embeddings"}
ROUNDS = (9, 49)


def text() -> str:
    """The table."""
    store = Store(ROOT / "studies" / "results" / "fedaux_similarity")
    history, methods = store.history(), dict[str, list[str]]()
    for record in store.records().values():
        methods.setdefault(record["method"], []).append(record["key"])
    names = [f"{score}, {number + 1} rounds" for score in SCORES.values() for number in ROUNDS]
    lines = [f"| method | what is compared | {' | '.join(names)} |", f"|---|---|{'---|' * len(names)}"]
    for method, keys in methods.items():
        for signal, name in SIGNALS.items():
            cells = []
            for score in SCORES:
                for number in ROUNDS:
                    values = [history[key][f"similarity/{signal}_{score}"][number] for key in keys]
                    cells.append(f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}")
            lines.append(f"| {method} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(text())
