"""This project beside a plain loop over PyG nets and beside the public code of others: the same net in all of them.

    FL_DATA_ROOT=... .venv/bin/python benchmarks/peers.py
    FL_DATA_ROOT=... .venv/bin/python benchmarks/peers.py --openfgl CHECKOUT --fedpub CHECKOUT --python INTERPRETER
    FL_DATA_ROOT=... .venv/bin/python benchmarks/peers.py --clients 10 --widths 64 --threads 1 --seeds 0 --loaded

On nodes: the same clients and split (Cora, METIS, 20/40/40 inside each), net, width, rounds, local epochs, optimizer
and learning rate, no weight decay (FED-PUB's code has 1e-6 written into it). FedAvg's net is two GCNConv with ReLU and
dropout, in ours PyG's own ``GCN`` as ``model.net``; FED-PUB's is that of its paper, two masked convolutions and a
masked linear head, so that FED-PUB's code, which has another net for FedAvg, has rows of FED-PUB alone. The plain loop
is a straightforward FedAvg without any framework (``peers_driver.py``).

On whole graphs: NCI1 cut at random, 80/10/10 of each class, batches of 128, FedAvg with OpenFGL's GIN
(``peers_net.py``), in ours and the plain loop a module of PyG's layers.

Each run has a process of its own, and its clock starts with it; systems take turns within a seed. The accuracy to reach
is the lowest of the best that the systems of a row come to, so that all reach it; it is on validation examples, of what
each system evaluates after a round: the locally trained model. Ours also scores the averaged model, and writes its
report. Nothing of the others is in this repository: their checkouts are read where they lie, in an interpreter that has
their requirements; without a checkout their cells stay empty. Writes benchmarks/results/peers.json, whose other runs
stay, and peers.md. ``--loaded`` marks what was not measured on a quiet machine.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fl_lightning.batches.graph_sets import ClientGraphs
from fl_lightning.data import (
    ClientGraph,
    ClientSplit,
    FederatedDataModule,
    MetisPartitioner,
    PlanetoidSource,
    RandomPartitioner,
    StratifiedSplit,
    TUSource,
)

RESULTS = Path(__file__).parent / "results"
DRIVER = Path(__file__).with_name("peers_driver.py")
LEARNING_RATE, DROPOUT, BATCH_SIZE = 0.01, 0.5, 128
GRAPHS = "FedAvg on NCI1"
#: For each algorithm our configuration, and what the others call it.
ALGORITHMS = {
    "FedAvg": ("fedavg_cora", "fedavg"),
    "FED-PUB": ("fedpub_cora", "fedpub"),
    GRAPHS: ("fedavg_sm", "fedavg"),
}
#: For each system what the driver calls it, and which algorithms have the same net there.
OURS = "fl_lightning"
SYSTEMS = {
    OURS: ("ours", ("FedAvg", "FED-PUB", GRAPHS)),
    "plain PyG loop": ("plain", ("FedAvg", GRAPHS)),
    "OpenFGL": ("openfgl", ("FedAvg", "FED-PUB", GRAPHS)),
    "FED-PUB's code": ("fedpub", ("FED-PUB",)),
}
#: Algorithm, clients, width, threads.
Case = tuple[str, int, int, int]
#: Seconds by the clock and of the CPU since a process began, and validation accuracy, after each round.
Rounds = list[tuple[float, float | None, float]]


def write_clients(path: Path, num_clients: int, seed: int) -> None:
    """The clients of this project as plain tensors, which any version of PyTorch reads."""
    data = FederatedDataModule(
        PlanetoidSource("Cora"), MetisPartitioner(num_clients), ClientSplit(train=0.2, val=0.4), seed=seed
    )
    data.prepare_data()
    data.setup()
    graphs = [client for client in data.clients if isinstance(client, ClientGraph)]
    names = {"x": "x_NF", "edge_index": "edge_index_2E", "y": "y_N"} | {
        f"{role}_mask": f"{role}_mask_N" for role in ("train", "val", "test")
    }
    torch.save([{name: getattr(graph, own) for name, own in names.items()} for graph in graphs], path)


def write_graph_clients(path: Path, num_clients: int, seed: int) -> None:
    """The graphs of each client, and which are for what, as plain tensors."""
    source = TUSource("NCI1", use_node_attr=False)
    splitter = StratifiedSplit(train=0.8, val=0.1)
    data = FederatedDataModule(source, RandomPartitioner(num_clients), splitter, batch_size=BATCH_SIZE, seed=seed)
    data.prepare_data()
    data.setup()
    clients = []
    for client in data.clients:
        assert isinstance(client, ClientGraphs)
        graphs = [(*client.graph(index), client.y_N[index : index + 1]) for index in range(len(client.y_N))]
        roles = {f"{role}_mask": getattr(client, f"{role}_mask_N") for role in ("train", "val", "test")}
        clients.append({"graphs": [dict(zip(("x", "edge_index", "y"), each, strict=True)) for each in graphs], **roles})
    torch.save(clients, path)


def our_arguments(case: Case, rounds: int, epochs: int, seed: int) -> list[str]:
    """The command line of this project's run."""
    algorithm, num_clients, width, _ = case
    net = [f"--model.net.hidden_channels={width}"]
    data = ["--data.splitter=ClientSplit", "--data.splitter.train=0.2", "--data.splitter.val=0.4"]
    if algorithm == GRAPHS:
        net = ["--model.net=peers_net.GraphNet", f"--model.net.width={width}"]
        data = ["--data.source=TUSource", "--data.source.name=NCI1", "--data.source.use_node_attr=false"]
        data += ["--data.partitioner=RandomPartitioner", f"--data.batch_size={BATCH_SIZE}"]
    elif algorithm == "FedAvg":
        settings = json.dumps({"hidden_channels": width, "num_layers": 2, "dropout": DROPOUT})
        architecture = "--model.net.architecture=torch_geometric.nn.GCN"
        net = ["--model.net=fl_lightning.models.PyGNet", architecture, f"--model.net.arguments={settings}"]
    return [
        "fit",
        f"--config=configs/{ALGORITHMS[algorithm][0]}.yaml",
        f"--trainer.num_rounds={rounds}",
        f"--strategy.num_epochs={epochs}",
        *net,
        f"--model.optimizer.lr={LEARNING_RATE}",
        "--model.optimizer.weight_decay=0.0",
        *data,
        f"--data.partitioner.num_clients={num_clients}",
        f"--data.seed={seed}",
        f"--seed_everything={seed}",
    ]


def measure(system: str, interpreter: str, threads: int, options: dict[str, Any]) -> Rounds | None:
    """A run in a process of its own; None if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        options = {**options, "scratch": f"{folder}/runs", "result": f"{folder}/result.json"}
        Path(options["scratch"]).mkdir()
        (Path(folder) / "options.json").write_text(json.dumps(options))
        command = [interpreter, str(DRIVER), system, f"{folder}/options.json"]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if not Path(options["result"]).exists():
            why = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
            print(f"{system} has no {options['algorithm']} here ({why}): it is left out", file=sys.stderr)
            return None
        rounds: Rounds = [tuple(row) for row in json.loads(Path(options["result"]).read_text())]
        return rounds


def seconds_of_rounds(runs: list[Rounds], column: int) -> float | None:
    """The median round, by the clock (0) or of the CPU (1)."""
    pairs = [(a[column], b[column]) for run in runs for a, b in itertools.pairwise(run)]
    pauses = [b - a for a, b in pairs if a is not None and b is not None]
    return statistics.median(pauses) if pauses else None


def rows(records: dict[str, dict[str, Any]], case: Case) -> Iterator[str]:
    """A row for each system."""
    algorithm, num_clients, width, threads = case
    names = [name for name, (_, algorithms) in SYSTEMS.items() if algorithm in algorithms]
    found = {name: [r for r in records.values() if (*r["case"],) == case and r["system"] == name] for name in names}
    runs = {name: [r["rounds"] for r in each] for name, each in found.items() if each}
    target = min(max(v for *_, v in run) for each in runs.values() for run in each)
    for name in names:
        head = f"| {algorithm} | {num_clients} | {width} | {threads} | {name} |"
        if name not in runs:
            yield f"{head} | | | | | |"
            continue
        own = runs[name]
        clock, cpu = (seconds_of_rounds(own, column) for column in (0, 1))
        ours_clock, ours_cpu = (seconds_of_rounds(runs.get(OURS, []), column) for column in (0, 1))
        per_round = [f"{1000 * clock:.0f}" if clock else "", f"{1000 * cpu:.0f}" if cpu else ""]
        ratios = [f"{a / b:.1f}" if a and b else "" for a, b in ((clock, ours_clock), (cpu, ours_cpu))]
        last = statistics.mean(run[-1][0] for run in own)
        best = statistics.mean(max(v for *_, v in run) for run in own)
        reached = statistics.mean(next(end for end, _, value in run if value >= target) for run in own)
        mark = " ¹" if any(r["loaded"] for r in found[name]) else ""
        yield (
            f"{head} {' / '.join(filter(None, per_round))}{mark} | {' / '.join(filter(None, ratios))} | {last:.1f} | "
            f"{100 * best:.1f} | {reached:.1f} to {100 * target:.1f} % |"
        )


def table(records: dict[str, dict[str, Any]]) -> str:
    """All cases that were measured."""
    cases = sorted({tuple(record["case"]) for record in records.values()})
    lines = [
        "`python benchmarks/peers.py`: Cora, or graphs of NCI1, the same net in all systems; behind the stroke is the "
        "time of the CPU. Empty rows: no checkout of that system was given.\n",
        "| algorithm | clients | width | threads | system | a round, ms / CPU | times ours / CPU | whole process, s "
        "| best validation, % | seconds to equal validation accuracy |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(row for case in cases for row in rows(records, case)),
    ]
    if any(record["loaded"] for record in records.values()):
        lines.append("\n¹ Beside other load: only the times of the CPU can be compared, and roughly.")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure what is there and rewrite the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--openfgl", type=Path, help="a checkout of OpenFGL")
    parser.add_argument("--fedpub", type=Path, help="a checkout of FED-PUB")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the checkouts")
    parser.add_argument("--algorithms", nargs="*", default=list(ALGORITHMS), choices=list(ALGORITHMS))
    parser.add_argument("--clients", nargs="*", type=int, default=[10, 20])
    parser.add_argument("--widths", nargs="*", type=int, default=[64, 128])
    parser.add_argument("--threads", nargs="*", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--gpu", action="store_true", help="let the checkouts use a GPU (ours takes one by itself)")
    parser.add_argument("--loaded", action="store_true", help="other programs run on this machine: mark the rows")
    options = parser.parse_args()
    checkouts = {"OpenFGL": options.openfgl, "FED-PUB's code": options.fedpub}
    for name, path in checkouts.items():
        if path is not None and not path.is_dir():
            sys.exit(f"peers.py: {name}: {path} is no folder: give the path of a checkout")
    file = RESULTS / "peers.json"
    records: dict[str, dict[str, Any]] = json.loads(file.read_text()) if file.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        for num_clients, seed in itertools.product(options.clients, options.seeds):
            of_nodes, of_graphs = (Path(folder) / f"{kind}_{num_clients}_{seed}.pt" for kind in ("nodes", "graphs"))
            if {*options.algorithms} - {GRAPHS}:
                write_clients(of_nodes, num_clients, seed)
            if GRAPHS in options.algorithms:
                write_graph_clients(of_graphs, num_clients, seed)
            for algorithm, width, threads in itertools.product(options.algorithms, options.widths, options.threads):
                case: Case = (algorithm, num_clients, width, threads)
                settings = {
                    "data": str(of_graphs if algorithm == GRAPHS else of_nodes),
                    "graphs": algorithm == GRAPHS,
                    "algorithm": ALGORITHMS[algorithm][1],
                    "rounds": options.rounds,
                    "epochs": options.epochs,
                    "width": width,
                    "learning_rate": LEARNING_RATE,
                    "seed": seed,
                    "gpu": options.gpu,
                    "figure": "val/acc" if algorithm == "FED-PUB" else "trained/val/acc",
                    "batch_size": BATCH_SIZE,
                    "arguments": our_arguments(case, options.rounds, options.epochs, seed),
                }
                for name, (driver, algorithms) in SYSTEMS.items():
                    checkout = checkouts.get(name)
                    if algorithm not in algorithms or (name in checkouts and checkout is None):
                        continue
                    more = {} if checkout is None else {"checkout": str(checkout.resolve())}
                    interpreter = sys.executable if checkout is None else options.python
                    rounds = measure(driver, interpreter, threads, settings | more)
                    if rounds is not None:
                        key = " ".join(map(str, (*case, name, seed)))
                        record = {"case": case, "system": name, "loaded": options.loaded, "rounds": rounds}
                        records[key] = record
                        file.write_text(json.dumps(records) + "\n")
                        (RESULTS / "peers.md").write_text(table(json.loads(file.read_text())))


if __name__ == "__main__":
    main()
