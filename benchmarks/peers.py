"""This project beside the public code of others: time to the same number of rounds and to the same validation accuracy.

    FL_DATA_ROOT=... .venv/bin/python benchmarks/peers.py
    FL_DATA_ROOT=... .venv/bin/python benchmarks/peers.py --openfgl CHECKOUT --fedpub CHECKOUT --python INTERPRETER

Same clients and split (Cora, 10 METIS clients, 20/40/40 inside each), width, rounds, local epochs and learning rate, no
weight decay (FED-PUB's code has 1e-6 written into it); the nets are each system's own two-layer GCN. Each run has a
process of its own with one thread, and its clock starts with it. The accuracy to reach is the lowest of the best that
the systems of an algorithm come to, so that all reach it. Validation accuracy is each system's own, of what it
evaluates after a round: the locally trained model. Nothing of the others is in this repository: their checkouts are
read where they lie, in an interpreter that has their requirements. Writes benchmarks/results/peers.json and peers.md.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from fl_lightning.data import ClientGraph, ClientSplit, FederatedDataModule, MetisPartitioner, PlanetoidSource

RESULTS = Path(__file__).parent / "results"
DRIVER = Path(__file__).with_name("peers_driver.py")
NUM_CLIENTS, WIDTH, LEARNING_RATE = 10, 128, 0.01
#: For each algorithm our configuration, and what the others call it.
ALGORITHMS = {"FedAvg": ("fedavg_cora", "fedavg"), "FED-PUB": ("fedpub_cora", "fedpub")}


def write_clients(path: Path, seed: int) -> None:
    """The clients of this project as plain tensors, which any version of PyTorch reads."""
    data = FederatedDataModule(
        PlanetoidSource("Cora"), MetisPartitioner(NUM_CLIENTS), ClientSplit(train=0.2, val=0.4), seed=seed
    )
    data.prepare_data()
    data.setup()
    graphs = [client for client in data.clients if isinstance(client, ClientGraph)]
    names = {"x": "x_NF", "edge_index": "edge_index_2E", "y": "y_N"} | {
        f"{role}_mask": f"{role}_mask_N" for role in ("train", "val", "test")
    }
    torch.save([{name: getattr(graph, own) for name, own in names.items()} for graph in graphs], path)


def our_arguments(config: str, rounds: int, epochs: int, seed: int) -> list[str]:
    """The command line of this project's run."""
    return [
        "fit",
        f"--config=configs/{config}.yaml",
        f"--trainer.num_rounds={rounds}",
        f"--strategy.num_epochs={epochs}",
        f"--model.net.hidden_channels={WIDTH}",
        f"--model.optimizer.lr={LEARNING_RATE}",
        "--model.optimizer.weight_decay=0.0",
        f"--data.partitioner.num_clients={NUM_CLIENTS}",
        "--data.splitter=ClientSplit",
        "--data.splitter.train=0.2",
        "--data.splitter.val=0.4",
        f"--data.seed={seed}",
        f"--seed_everything={seed}",
    ]


def measure(system: str, interpreter: str, options: dict[str, Any]) -> list[list[float]] | None:
    """Seconds and validation accuracy after every round, of a run in a process of its own; None if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        options = {**options, "scratch": f"{folder}/runs", "result": f"{folder}/result.json"}
        Path(options["scratch"]).mkdir()
        (Path(folder) / "options.json").write_text(json.dumps(options))
        command = [interpreter, str(DRIVER), system, f"{folder}/options.json"]
        done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
        if not Path(options["result"]).exists():
            why = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
            print(f"{system} has no {options['algorithm']} here ({why}): it is left out", file=sys.stderr)
            return None
        rounds: list[list[float]] = json.loads(Path(options["result"]).read_text())
        return rounds


def table(results: dict[str, dict[str, dict[str, list[list[float]]]]]) -> str:
    """A row for each algorithm and system, mean over seeds."""
    lines = [
        "| algorithm | system | seconds of a round (median) | seconds to the last round | best validation, % "
        "| accuracy to reach, % | seconds to it |",
        "|---|---|---|---|---|---|---|",
    ]
    for strategy, systems in results.items():
        best = {
            name: statistics.mean(max(v for _, v in run) for run in runs.values()) for name, runs in systems.items()
        }
        target = min(max(v for _, v in run) for runs in systems.values() for run in runs.values())
        for name, runs in systems.items():
            pauses = [b[0] - a[0] for run in runs.values() for a, b in itertools.pairwise(run)]
            last = statistics.mean(run[-1][0] for run in runs.values())
            reached = statistics.mean(next(end for end, value in run if value >= target) for run in runs.values())
            lines.append(
                f"| {strategy} | {name} | {statistics.median(pauses):.3f} | {last:.1f} | {100 * best[name]:.1f} | "
                f"{100 * target:.1f} | {reached:.1f} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure what is there and rewrite the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--openfgl", type=Path, help="a checkout of OpenFGL")
    parser.add_argument("--fedpub", type=Path, help="a checkout of FED-PUB")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the checkouts")
    parser.add_argument("--algorithms", nargs="*", default=list(ALGORITHMS), choices=list(ALGORITHMS))
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--gpu", action="store_true", help="let the checkouts use a GPU (ours takes one by itself)")
    options = parser.parse_args()
    checkouts = {"OpenFGL": ("openfgl", options.openfgl), "FED-PUB's code": ("fedpub", options.fedpub)}
    for name, (_, path) in checkouts.items():
        if path is not None and not path.is_dir():
            sys.exit(f"peers.py: {name}: {path} is no folder: give the path of a checkout")
    results: dict[str, dict[str, dict[str, list[list[float]]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            data = Path(folder) / f"clients_{seed}.pt"
            write_clients(data, seed)
            for strategy in options.algorithms:
                config, theirs = ALGORITHMS[strategy]
                common = {
                    "data": str(data),
                    "algorithm": theirs,
                    "rounds": options.rounds,
                    "epochs": options.epochs,
                    "width": WIDTH,
                    "learning_rate": LEARNING_RATE,
                    "seed": seed,
                    "gpu": options.gpu,
                    "figure": "trained/val/acc" if strategy == "FedAvg" else "val/acc",
                    "arguments": our_arguments(config, options.rounds, options.epochs, seed),
                }
                runs = results.setdefault(strategy, {})
                systems = {"this project": ("ours", sys.executable, common)} | {
                    name: (driver, options.python, {**common, "checkout": str(path.resolve())})
                    for name, (driver, path) in checkouts.items()
                    if path is not None
                }
                for name, (driver, interpreter, settings) in systems.items():
                    if (result := measure(driver, interpreter, settings)) is not None:
                        runs.setdefault(name, {})[str(seed)] = result
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "peers.json").write_text(json.dumps(results) + "\n")
    (RESULTS / "peers.md").write_text(f"`python benchmarks/peers.py`, one thread each.\n\n{table(results)}")


if __name__ == "__main__":
    main()
