"""CPU time of a round of every strategy, beside that of FedAvg on the same net, on Cora with 20 clients.

    FL_DATA_ROOT=... .venv/bin/python benchmarks/method_speed.py
    FL_DATA_ROOT=... .venv/bin/python benchmarks/method_speed.py --only fgssl flow

A method is a file configs/<name>_cora.yaml or configs/papers/<name>_cora.yaml. FedAvg has its net, optimizer and
epochs; the two run one after the other, a few rounds of each, with one thread. Seconds are the median round's, of the
process's CPU, without evaluation. Writes benchmarks/results/method_speed.csv (what is there of other methods is kept)
and method_speed.md.
"""

import argparse

import torch
from methods import CASES, RESULTS, ROOT, config_of, read, run, write

from fl_lightning.yaml_input import read_yaml

FIELDS = ("method", "net", "seconds", "fedavg_seconds", "ratio")
#: Phases that come after many rounds of another kind, measured at once.
PHASES = {"adafgl, second phase": ("adafgl", "--strategy.init_args.num_federated_rounds=1")}


def measure(name: str, num_rounds: int) -> dict[str, str]:
    """Both, in CPU seconds of a round."""
    method, *phase = PHASES.get(name, (name,))
    config = read_yaml(ROOT / config_of(method))
    arguments = ["fit", f"--config={config_of(method)}", *CASES["Cora-20"], f"--trainer.num_rounds={num_rounds}"]
    settings = config["strategy"].get("init_args", {})
    epochs = sum(settings.get(setting, 0) for setting in ("num_epochs", "num_head_epochs")) or 1
    metrics = run([*arguments, *phase, "--trainer.accelerator=cpu"])
    beside = run([*arguments, "--trainer.accelerator=cpu", "--strategy=FedAvg", f"--strategy.num_epochs={epochs}"])
    seconds, fedavg = metrics["cpu_train"], beside["cpu_train"]
    net = config["model"]["init_args"]["net"]["class_path"].rpartition(".")[2]
    values = (name, net, f"{seconds:.4f}", f"{fedavg:.4f}", f"{seconds / fedavg:.2f}")
    return dict(zip(FIELDS, values, strict=True))


def main() -> None:
    """Measure what was asked for and rewrite file and table."""
    known = sorted(
        file.stem.removesuffix("_cora")
        for file in (ROOT / "configs").rglob("*_cora.yaml")
        if file.parent.name != "sweeps"
    )
    known += PHASES
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=known, default=known, metavar="NAME")
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    torch.set_num_threads(1)
    path = RESULTS / "method_speed.csv"
    for method in options.only:
        row = measure(method, options.rounds)
        rows = read(path, FIELDS[:1])
        rows[row["method"],] = row
        write(path, rows, FIELDS)
        ordered = sorted(rows.values(), key=lambda result: -float(result["ratio"]))
        lines = ["| method | net | s a round | FedAvg on this net | ratio |", "|---|---|---|---|---|"]
        lines += ["| " + " | ".join(result[name] for name in FIELDS) + " |" for result in ordered]
        path.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
