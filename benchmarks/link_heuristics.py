"""What needs no learning on the leaderboard of links: common neighbors, Adamic-Adar and Katz, to read its table by.

    FL_DATA_ROOT=... .venv/bin/python benchmarks/link_heuristics.py

On the clients, roles, pools and seeds of ``studies/leaderboard_links.yaml``, from the edges along which its nets send
messages. Writes benchmarks/results/link_heuristics.json and .md.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from fl_lightning.study.definition import Study
from fl_lightning.study.runs import make_run
from fl_lightning.study.worker import RunCLI
from fl_lightning.tasks.heuristics import heuristic_metrics

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
#: What is shown of the metrics, by title.
SHOWN = {
    "AUROC": "auroc",
    "Average precision": "average_precision",
    "Hits@10": "hits@10",
    "Hits@50": "hits@50",
    "MRR": "mrr",
}


def measured(study: Study, case: str, seed: int) -> dict[str, dict[str, float]]:
    """Each heuristic's test metrics, means over the clients."""
    run = make_run(study, "FedAvg", case, seed, ("", {}), "report")
    data = RunCLI(run.arguments, run=False).datamodule
    data.prepare_data()
    data.setup()
    return {
        heuristic: {name: round(values[f"test/{name}"], 6) for name in SHOWN.values() if f"test/{name}" in values}
        for heuristic, values in heuristic_metrics(data.clients).items()
    }


def table(found: Mapping[str, Sequence[Mapping[str, Mapping[str, float]]]], metric: str) -> str:
    """Mean ± standard deviation over seeds in percent, a row for each case."""
    heuristics = list(next(iter(found.values()))[0])
    rows = [["case", *heuristics], ["---"] * (len(heuristics) + 1)]
    for case, seeds in found.items():
        values = [[100 * seed[heuristic][metric] for seed in seeds] for heuristic in heuristics]
        rows.append([case, *(f"{statistics.mean(each):.1f} ± {statistics.stdev(each):.1f}" for each in values)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def main() -> None:
    """Measure all cases and write both files."""
    study = Study(ROOT / "studies" / "leaderboard_links.yaml")
    found = {case: [measured(study, case, seed) for seed in study.seeds] for case in study.cases}
    (RESULTS / "link_heuristics.json").write_text(json.dumps(found, indent=1) + "\n")
    seeds = ", ".join(map(str, study.seeds))
    parts = [
        "`python benchmarks/link_heuristics.py`",
        f"Test metrics in percent, means over clients, ± standard deviation over seeds {seeds}; on the clients, links "
        "and pools of `studies/leaderboard_links.yaml`.",
    ]
    for title, metric in SHOWN.items():
        parts += [f"**{title}**", table(found, metric)]
    (RESULTS / "link_heuristics.md").write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
