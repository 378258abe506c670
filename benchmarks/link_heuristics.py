"""What needs no learning on the leaderboard of links: common neighbors, Adamic-Adar and Katz, to read its table by.

    FL_DATA_ROOT=... .venv/bin/python benchmarks/link_heuristics.py

On the clients, roles, pools and seeds of ``studies/leaderboard_links.yaml``, from the edges along which its nets send
messages; and how many of the tested links have an end that messages do not reach. Writes
benchmarks/results/link_heuristics.json and .md.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from fl_lightning.batches.pairs import ClientPairs
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


#: What is counted of the pairs that are tested on.
LINKS, OTHERS = "links", "pairs without a link"


def measured(study: Study, case: str, seed: int) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Each heuristic's test metrics, means over the clients; and how many tested pairs have an end without a link."""
    run = make_run(study, "FedAvg", case, seed, ("", {}), "report")
    data = RunCLI(run.arguments, run=False).datamodule
    data.prepare_data()
    data.setup()
    metrics = {
        heuristic: {name: round(values[f"test/{name}"], 6) for name in SHOWN.values() if f"test/{name}" in values}
        for heuristic, values in heuristic_metrics(data.clients).items()
    }
    return metrics, without_neighbors(data.clients)


def without_neighbors(clients: Sequence[ClientPairs]) -> dict[str, float]:
    """The share of the tested links, and of the tested pairs without one, with an end that messages do not reach."""
    counted: dict[str, list[torch.Tensor]] = {LINKS: [], OTHERS: []}
    for client in clients:
        graph = client.graph
        degree_N = torch.bincount(graph.edge_index_2E[0], minlength=len(graph.x_NF))
        pairs, is_link = client.pair_P2[client.test_mask_N], client.y_N[client.test_mask_N, 0] == 1
        alone = (degree_N[pairs] == 0).any(dim=1)
        counted[LINKS].append(alone[is_link])
        counted[OTHERS].append(alone[~is_link])
    return {name: round(float(torch.cat(each).float().mean()), 6) for name, each in counted.items()}


def ends(found: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    """Those shares in percent, means over seeds, a row for each case."""
    rows = [["case", LINKS, OTHERS], ["---"] * 3]
    rows += [
        [case, *(f"{100 * statistics.mean(seed[name] for seed in seeds):.0f}" for name in (LINKS, OTHERS))]
        for case, seeds in found.items()
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


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
    both = {case: [measured(study, case, seed) for seed in study.seeds] for case in study.cases}
    found = {case: [metrics for metrics, _ in seeds] for case, seeds in both.items()}
    alone = {case: [shares for _, shares in seeds] for case, seeds in both.items()}
    (RESULTS / "link_heuristics.json").write_text(json.dumps({"metrics": found, "ends": alone}, indent=1) + "\n")
    seeds = ", ".join(map(str, study.seeds))
    parts = [
        "`python benchmarks/link_heuristics.py`",
        f"Test metrics in percent, means over clients, ± standard deviation over seeds {seeds}; on the clients, links "
        "and pools of `studies/leaderboard_links.yaml`.",
    ]
    for title, metric in SHOWN.items():
        parts += [f"**{title}**", table(found, metric)]
    words = "percent of what is tested on with an end that has no link in training, means over the seeds"
    parts += [f"**Ends without a neighbor** ({words})", ends(alone)]
    (RESULTS / "link_heuristics.md").write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    main()
