"""Accuracy of the benign clients when others send forged embeddings: Cora, 20 clients, by share of malicious clients.

    FL_DATA_ROOT=... .venv/bin/python benchmarks/robustness.py

Writes benchmarks/results/robustness.json (every figure with its command; what is there already is not run again) and
robustness.png. About 20 minutes on 2 cores. FedAvg sends no embedding, so there is nothing to forge: its one value is
drawn as a line.
"""

import argparse
import json
import statistics
from pathlib import Path

from accuracy import run
from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"
RATIOS = (0.0, 0.2, 0.4, 0.6, 0.8)
SCALE = 5.0
SPLIT = ("--data.splitter=GlobalSplit", "--data.splitter.train=0.4", "--data.splitter.val=0.3")
STRATEGIES = {
    "FedSheafHN": "configs/fedsheafhn_cora.yaml",
    "FED-PUB": "configs/fedpub_cora.yaml",
    "FedAux": "configs/fedaux_cora.yaml",
    "FedAvg": "configs/fedavg_cora.yaml",
}
ATTACKS = {"the same value in all entries": "SameValueAttack", "Gaussian noise": "GaussianAttack"}
Results = dict[str, dict[str, dict[str, dict[str, float | str]]]]


def command(strategy: str, attack: str, ratio: float, seed: int) -> list[str]:
    """The arguments of ``fl-train`` for one figure."""
    callback = f"fl_lightning.callbacks.{attack}"
    forged = (f"--trainer.callbacks={callback}", f"--trainer.callbacks.ratio={ratio}")
    return [
        "fit",
        f"--config={STRATEGIES[strategy]}",
        "--data.partitioner.init_args.num_clients=20",
        *SPLIT,
        *((*forged, f"--trainer.callbacks.scale={SCALE}") if ratio else ()),
        f"--data.seed={seed}",
        f"--seed_everything={seed}",
    ]


def measure(path: Path, strategy: str, attack: str, ratio: float, seed: int) -> None:
    """Run once, unless it is done, and add the figures to the file."""
    key = f"{attack} {ratio}" if ratio else "none"
    if path.exists() and str(seed) in json.loads(path.read_text()).get(strategy, {}).get(key, {}):
        return
    arguments = command(strategy, attack, ratio, seed)
    found = run(arguments)
    benign = found["benign/test/acc"] if ratio else found["test/acc"]
    entry = {"command": " ".join(["fl-train", *arguments]), "benign": benign, "all": found["test/acc"]}
    results: Results = json.loads(path.read_text()) if path.exists() else {}  # another process may write to it
    results.setdefault(strategy, {}).setdefault(key, {})[str(seed)] = entry
    path.write_text(json.dumps(results, indent=1) + "\n")


def draw(results: Results) -> None:
    """Lines of mean and standard deviation over seeds, one panel for each attack."""
    figure = Figure(figsize=(9.5, 3.8), layout="constrained")
    for axes, (title, attack) in zip(figure.subplots(1, 2, sharey=True), ATTACKS.items(), strict=True):
        for strategy, found in results.items():
            if "none" not in found:
                continue
            keys = ["none", *(f"{attack} {ratio}" for ratio in RATIOS[1:])]
            if strategy == "FedAvg":
                keys = ["none"] * len(RATIOS)
            columns = [[100 * float(entry["benign"]) for entry in found.get(key, {}).values()] for key in keys]
            shown = [(ratio, column) for ratio, column in zip(RATIOS, columns, strict=True) if column]
            means = [statistics.mean(column) for _, column in shown]
            spread = [statistics.stdev(column) if len(column) > 1 else 0.0 for _, column in shown]
            ratios = [ratio for ratio, _ in shown]
            if strategy == "FedAvg":
                axes.plot(ratios, means, "--", color="0.4", label="FedAvg (sends no embedding)")
            else:
                axes.errorbar(ratios, means, spread, marker="o", capsize=3, label=strategy)
        axes.set_title(f"{title}, $\\tau$ = {SCALE:g}", loc="left", fontsize="medium")
        axes.set_xlabel("share of malicious clients $\\rho$")
        axes.set_xticks(RATIOS)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
    figure.axes[0].set_ylabel("test accuracy of benign clients, %")
    figure.axes[0].legend(frameon=False, fontsize="small")
    figure.savefig(RESULTS / "robustness.png", dpi=130)


def main() -> None:
    """Run what was asked for and draw everything there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategies", nargs="*", default=list(STRATEGIES), choices=list(STRATEGIES))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    options = parser.parse_args()
    path = RESULTS / "robustness.json"
    for strategy in options.strategies:
        for seed in options.seeds:
            measure(path, strategy, "none", 0.0, seed)
            for attack in ATTACKS.values() if strategy != "FedAvg" else ():
                for ratio in RATIOS[1:]:
                    measure(path, strategy, attack, ratio, seed)
    draw(json.loads(path.read_text()))


if __name__ == "__main__":
    main()
