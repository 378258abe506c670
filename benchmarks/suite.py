"""How fast everything is, beside how fast it could be on the machine at hand.

    FL_DATA_ROOT=... .venv/bin/python benchmarks/suite.py            # everything; Cora is read from FL_DATA_ROOT
    FL_DATA_ROOT=... .venv/bin/python benchmarks/suite.py cora server

Writes benchmarks/results/suite.json and suite.md; parts that are not run keep their metrics.

First the machine's float32 rate of matrix products and its bandwidth of copying are measured. The limit of a metric is
the time that its matrix products and its unavoidable traffic would take at these rates, one after the other:

- a client's step: the products of the net with dense matrices; rows that are gathered in products with sparse ones;
  what the optimizer reads and writes (parameter, gradient and two moments; all but the gradient are written back);
- an evaluation: the same products, forward only;
- the server step of a hypernetwork: its last layer's weights, read forward and backward, written as a gradient, and
  read and written by the optimizer as above; their three products;
- mixing: what is read and what is written.

It leaves out activations, dropout, copies of payloads and Python, so a share of the limit is what is left to gain at
most. (A copy that stays in the cache can be faster than the measured bandwidth.)

Seconds a round are medians without the first round, which makes the batches. Many clients, storage and processes run in
processes of their own, memory is the peak of what is resident and not mapped from a file.
"""

import argparse
import contextlib
import functools
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn

from fl_lightning import (
    Callback,
    ClientModule,
    FederatedDataModule,
    FederatedTrainer,
    Participation,
    SequentialExecutor,
    StackedExecutor,
)
from fl_lightning.batches.graphs import SPARSE_FEATURE_DENSITY, GraphBatch
from fl_lightning.callbacks import default_callbacks
from fl_lightning.data import ClientGraph, GivenPartitioner, MetisPartitioner, PlanetoidSource, PlantedCommunities
from fl_lightning.federation import Federation
from fl_lightning.models import GCN, NetOutput
from fl_lightning.round.client import NetFactory
from fl_lightning.round.payload import Payload
from fl_lightning.run.allocator import keep_freed_memory
from fl_lightning.strategies import FedAvg, FedPer, FedSheafHN, Strategy

RESULTS = Path(__file__).parent / "results"
NUM_EPOCHS = 3
FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A measured metric.

    Attributes:
        part: Part of the suite.
        case: What was measured.
        value: The metric.
        unit: Of the metric.
        limit: The least that the machine allows, in the same unit.
    """

    part: str
    case: str
    value: float
    unit: str = "ms"
    limit: float | None = None


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the machine can do.

    Attributes:
        flops: Of a large product of float32 matrices, in operations a second.
        bandwidth: Of a large copy, in bytes read and written a second.
    """

    flops: float
    bandwidth: float

    @classmethod
    def measure(cls) -> "Machine":
        """Measure both with as many threads as PyTorch uses."""
        size = 2048
        left, right = torch.randn(2, size, size)
        numbers = torch.randn(2**26)
        copy = torch.empty_like(numbers)
        return cls(
            flops=2 * size**3 / fastest(lambda: left @ right),
            bandwidth=2 * numbers.nbytes / fastest(lambda: copy.copy_(numbers), repeats=25),
        )

    def or_better(self, other: "Machine") -> "Machine":
        """The greater of both rates: what disturbs a measurement only lowers it."""
        return Machine(flops=max(self.flops, other.flops), bandwidth=max(self.bandwidth, other.bandwidth))

    def seconds(self, *, flops: float, num_bytes: float) -> float:
        """Time of some work."""
        return flops / self.flops + num_bytes / self.bandwidth


def fastest(run: Callable[[], object], *, repeats: int = 9) -> float:
    """The least seconds of several runs."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


class PyGGCN(nn.Module):
    """Two GCNConv layers and a linear head, as papers' code has them."""

    def __init__(self, in_channels: int, out_channels: int, *, hidden_channels: int) -> None:
        super().__init__()
        widths = [(in_channels, hidden_channels), (hidden_channels, hidden_channels)]
        self.convs = nn.ModuleList([pyg.GCNConv(*width) for width in widths])
        self.head = nn.Linear(hidden_channels, out_channels)

    def forward(self, batch: GraphBatch) -> NetOutput:
        """Return logits and embeddings of one client."""
        assert batch.plain is not None
        h_ND = embedding_ND = batch.plain.x
        for conv in self.convs:
            embedding_ND = conv(h_ND, batch.plain.edge_index)
            h_ND = F.dropout(embedding_ND.relu(), 0.5, self.training)
        return NetOutput(self.head(h_ND), embedding_ND)


def cora() -> FederatedDataModule:
    """Cora, 20 clients."""
    return FederatedDataModule(PlanetoidSource("Cora"), MetisPartitioner(20))


def planted(num_clients: int, nodes_per_client: int, **settings: Any) -> FederatedDataModule:
    """A generated graph with dense features whose communities are the clients."""
    num_nodes = num_clients * nodes_per_client
    source = PlantedCommunities(num_nodes=num_nodes, num_communities=num_clients, **{"num_classes": 7, **settings})
    return FederatedDataModule(source, GivenPartitioner())


def arxiv_like() -> FederatedDataModule:
    """A generated graph of the size of ogbn-arxiv, 20 clients."""
    return planted(20, 169_343 // 20, num_classes=40, num_features=128, intra_degree=12.2, inter_degree=1.5)


def fit(data: FederatedDataModule, algorithm: Strategy, net: NetFactory, **settings: Any) -> FederatedTrainer:
    """A run without callbacks and loggers unless they are asked for, whose output goes nowhere."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        trainer = FederatedTrainer(
            accelerator="cpu", default_root_dir=folder, **{"logger": False, "default_callbacks": False, **settings}
        )
        trainer.fit(ClientModule(net), data, algorithm)
    return trainer


def seconds_a_round(trainer: FederatedTrainer, warm_up: int = 1) -> float:
    """Median without the first rounds."""
    return statistics.median(row["seconds"] for row in trainer.run.history[warm_up:])


def round_limit(
    machine: Machine, data: FederatedDataModule, hidden: int, *, num_epochs: int = NUM_EPOCHS, num_evaluations: int = 2
) -> float:
    """Least seconds of a round of a two-layer GCN with a linear head (see above)."""
    graphs = [client for client in data.clients if isinstance(client, ClientGraph)]
    num_features, num_classes = graphs[0].num_features, data.num_outputs
    num_nodes = sum(graph.num_nodes for graph in graphs)
    num_entries = sum(graph.num_edges for graph in graphs) + num_nodes  # of the adjacency, self-loops included
    num_nonzeros = sum(int(graph.x_NF.count_nonzero()) for graph in graphs)
    is_sparse = num_nonzeros < SPARSE_FEATURE_DENSITY * num_nodes * num_features

    first = 0 if is_sparse else 2 * num_nodes * num_features * hidden
    later = 2 * num_nodes * hidden * (hidden + num_classes)
    row = hidden * FLOAT_BYTES
    gathered_a = (num_entries + num_nodes) * row
    gathered_x = (num_nonzeros + num_nodes) * row
    scattered_x = (num_nonzeros + len(graphs) * num_features) * row
    num_parameters = (num_features + 1) * hidden + (hidden + 1) * (hidden + num_classes)
    optimizer = 7 * len(graphs) * num_parameters * FLOAT_BYTES

    forward = {"flops": first + later, "num_bytes": 2 * gathered_a + gathered_x if is_sparse else gathered_a}
    backward = {"flops": first + 2 * later, "num_bytes": 2 * gathered_a + scattered_x if is_sparse else gathered_a}
    step = machine.seconds(**forward) + machine.seconds(**backward) + machine.seconds(flops=0, num_bytes=optimizer)
    return num_epochs * step + num_evaluations * machine.seconds(**forward)


def client_step(machine: Machine, part: str, data: FederatedDataModule, hidden: int, **rounds: int) -> Iterator[Figure]:
    """A round of FedAvg, stacked and one client after another, with our GCN and with PyG's layers."""
    num_epochs = rounds["num_epochs"]
    own, other = (functools.partial(net, hidden_channels=hidden) for net in (GCN, PyGGCN))
    kinds: dict[str, tuple[Any, NetFactory, int]] = {
        "stacked": (StackedExecutor, own, rounds["stacked"]),
        "sequential": (SequentialExecutor, own, rounds["sequential"]),
        "sequential, PyG's GCNConv": (SequentialExecutor, other, rounds["sequential"]),
    }
    seconds = {}
    for kind, (executor, net, num_rounds) in kinds.items():
        trainer = fit(data, FedAvg(num_epochs=num_epochs), net, executor=executor(), num_rounds=num_rounds)
        seconds[kind] = seconds_a_round(trainer)
        limit = round_limit(machine, data, hidden, num_epochs=num_epochs) if kind == "stacked" else None
        case = f"hidden {hidden}, {num_epochs} epochs + evaluation, {kind}"
        yield Figure(part=part, case=case, value=1e3 * seconds[kind], limit=None if limit is None else 1e3 * limit)
    for kind in list(kinds)[1:]:
        case = f"hidden {hidden}, stacked against {kind}"
        yield Figure(part=part, case=case, value=seconds[kind] / seconds["stacked"], unit="times")


def cora_part(machine: Machine) -> Iterator[Figure]:
    """Client steps on Cora, 20 clients."""
    data = cora()
    for hidden in (64, 128):
        yield from client_step(machine, "cora", data, hidden, num_epochs=NUM_EPOCHS, stacked=60, sequential=6)


def pyg_part(machine: Machine) -> Iterator[Figure]:
    """PyG's own models, two layers of width 64, on Cora, 20 clients."""
    data = cora()
    for model in (pyg.GCN, pyg.GraphSAGE, pyg.GIN, pyg.GAT):
        net = functools.partial(model, hidden_channels=64, num_layers=2)
        seconds = {}
        for executor, num_rounds in ((StackedExecutor, 60), (SequentialExecutor, 6)):
            kind = "stacked" if executor is StackedExecutor else "sequential"
            trainer = fit(data, FedAvg(num_epochs=NUM_EPOCHS), net, executor=executor(), num_rounds=num_rounds)
            seconds[kind] = seconds_a_round(trainer)
            case = f"{model.__name__}, {NUM_EPOCHS} epochs + evaluation, {kind}"
            yield Figure(part="pyg", case=case, value=1e3 * seconds[kind])
        case = f"{model.__name__}, stacked against sequential"
        yield Figure(part="pyg", case=case, value=seconds["sequential"] / seconds["stacked"], unit="times")


def arxiv_part(machine: Machine) -> Iterator[Figure]:
    """Client steps at ogbn-arxiv's size, 20 clients."""
    yield from client_step(machine, "arxiv", arxiv_like(), 128, num_epochs=1, stacked=6, sequential=3)


def server_part(machine: Machine) -> Iterator[Figure]:
    """The server step of FedSheafHN for Cora, 20 clients: sending and aggregating."""
    num_clients, parameters = 20, {name: p.detach() for name, p in GCN(1433, 7).named_parameters()}
    strategy = FedSheafHN()
    strategy.setup(
        Federation(
            num_clients=num_clients,
            training_clients=tuple(range(num_clients)),
            num_features=1433,
            parameters=parameters,
            seed=0,
            device=torch.device("cpu"),
        )
    )

    def upload(stage_names: Sequence[str], **extras: Tensor) -> Payload:
        sent = {name: torch.randn(num_clients, *parameters[name].shape) * 1e-3 for name in stage_names}
        ones = torch.ones(num_clients)
        return Payload(clients=tuple(range(num_clients)), parameters=sent, extras=extras, num_examples=ones)

    [initial], [stage] = strategy.initial_stages(), strategy.stages(0)
    strategy.aggregate(initial, upload(initial.upload, embedding=torch.randn(num_clients, 128)))
    update = upload(stage.upload)

    def step() -> None:
        strategy.configure(stage, range(num_clients))
        strategy.aggregate(stage, update)

    weight = strategy.hypernetwork.output.weight
    traffic = {"flops": 0, "num_bytes": 10 * weight.nbytes}
    products = {"flops": 3 * 2 * num_clients * weight.numel(), "num_bytes": 0}
    case = f"FedSheafHN on Cora, last layer of {weight.numel() / 1e6:.1f} million weights"
    limit = machine.seconds(**traffic) + machine.seconds(**products)
    yield Figure(part="server", case=case, value=1e3 * fastest(step), limit=1e3 * limit)
    yield Figure(part="server", case="its traffic alone", value=1e3 * machine.seconds(**traffic))
    yield Figure(part="server", case="its products alone", value=1e3 * machine.seconds(**products))


def mixing_part(machine: Machine) -> Iterator[Figure]:
    """θ <- W θ."""
    for num_clients, num_parameters in ((20, 200_000), (1000, 20_000)):
        for num_rows in (1, num_clients):
            mixing, parameters = torch.rand(num_rows, num_clients), torch.randn(num_clients, num_parameters)
            seconds = fastest(lambda mixing=mixing, parameters=parameters: mixing @ parameters)
            limit = machine.seconds(
                flops=2 * num_rows * parameters.numel() if num_rows > 1 else 0,
                num_bytes=parameters.nbytes + num_rows * num_parameters * FLOAT_BYTES,
            )
            case = f"{num_rows} mixed models of {num_clients} clients with {num_parameters:,} parameters"
            yield Figure(part="mixing", case=case, value=1e3 * seconds, limit=1e3 * limit)


def many_part(machine: Machine) -> Iterator[Figure]:
    """10 to 10,000 clients of 100 nodes: everyone, and chance subsets."""
    for num_clients in (10, 100, 1_000, 10_000):
        result = in_process(many_clients, num_clients=num_clients)
        for case, run in result["runs"].items():
            limit = None if run["limit"] is None else 1e3 * machine.seconds(**run["limit"])
            name = f"{num_clients:,} clients, {case}"
            yield Figure(part="many clients", case=name, value=1e3 * run["seconds"], limit=limit)
            share = 100 * run["handling_share"]
            yield Figure(part="many clients", case=f"{name}: payloads, server, other", value=share, unit="% of a round")
        for case in ("setup", "first round"):
            seconds = result[case.replace(" ", "_") + "_seconds"]
            yield Figure(part="many clients", case=f"{num_clients:,} clients, {case}", value=seconds, unit="s")
        yield Figure(part="many clients", case=f"{num_clients:,} clients, memory", value=result["peak_mib"], unit="MiB")


def many_clients(num_clients: int) -> dict[str, Any]:
    """FedAvg, FedPer and partial participation of clients of 100 nodes, GCN 32-32."""
    hidden, num_rounds = 32, 40 if num_clients < 1_000 else 5
    with PeakMemory() as peak:
        start = time.perf_counter()
        data = planted(num_clients, 100)
        data.prepare_data()
        data.setup()
        result: dict[str, Any] = {"setup_seconds": time.perf_counter() - start, "runs": {}}
        # the limit is linear in the machine's two rates, which the parent process knows
        work = {
            "flops": round_limit(Machine(flops=1, bandwidth=float("inf")), data, hidden),
            "num_bytes": round_limit(Machine(flops=float("inf"), bandwidth=1), data, hidden),
        }
        net = functools.partial(GCN, hidden_channels=hidden)
        cases: dict[str, tuple[Strategy, Participation, dict[str, float] | None]] = {
            "FedAvg": (FedAvg(num_epochs=NUM_EPOCHS), Participation(), work),
            "FedPer": (FedPer(num_epochs=NUM_EPOCHS), Participation(), work),
        }
        for some in (5, 1_000) if num_clients == 10_000 else ():
            cases[f"{some:,} at a time, FedAvg"] = FedAvg(num_epochs=NUM_EPOCHS), Participation(num_clients=some), None
        for case, (strategy, participation, limit) in cases.items():
            trainer = fit(data, strategy, net, num_rounds=num_rounds, participation=participation)
            shares = {name: share for name, _, share in trainer.run.clock.rows()}
            result["runs"][case] = {
                "seconds": seconds_a_round(trainer),
                "limit": limit,
                "handling_share": shares["payloads"] + shares["server"] + shares["other"],
            }
            result.setdefault("first_round_seconds", trainer.run.history[0]["seconds"])
    return result | {"peak_mib": peak.mib}


def storage_part(machine: Machine) -> Iterator[Figure]:
    """500 clients of 196 thousand parameters: all in one group, in groups of 200 MiB, and on disk."""
    for name, settings in {
        "one group": {},
        "groups of 200 MiB": {"max_group_mib": 200},
        "groups of 200 MiB, on disk": {"max_group_mib": 200, "storage": "disk"},
    }.items():
        result = in_process(large_clients, settings=settings)
        case = f"500 clients, 195,847 parameters, {name}"
        yield Figure(part="storage", case=case, value=1e3 * result["seconds"])
        yield Figure(part="storage", case=f"{case}: memory", value=result["mib"], unit="MiB")


def large_clients(settings: dict[str, Any]) -> dict[str, float]:
    """Large models of small clients."""
    data = planted(500, 50, num_features=500)
    data.prepare_data()
    data.setup()
    with PeakMemory() as peak:
        executor, net = StackedExecutor(**settings), functools.partial(GCN, hidden_channels=256)
        trainer = fit(data, FedAvg(num_epochs=NUM_EPOCHS), net, executor=executor, num_rounds=4)
    return {"seconds": seconds_a_round(trainer), "mib": peak.mib}


class OverheadProbe(Callback):
    """Notes at the start of each round the seconds of logging, of checkpoints and of all there were before it."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, float, float]] = []

    def on_round_start(self, trainer: FederatedTrainer) -> None:
        """Note them."""
        seconds = trainer.run.clock.seconds
        self.rows.append((seconds["logging"], seconds["checkpoint"], trainer.run.clock.total))


def overhead_part(machine: Machine) -> Iterator[Figure]:
    """What callbacks, loggers and checkpoints take with default settings: of a round, and for the files at the end."""
    data, num_rounds = cora(), 100
    for strategy in (FedAvg(), FedSheafHN(init_epochs=10)):
        probe = OverheadProbe()
        callbacks = [*default_callbacks(), probe]
        trainer = fit(data, strategy, GCN, num_rounds=num_rounds, logger=True, callbacks=callbacks)
        case = f"{type(strategy).__name__} on Cora, 20 clients, {num_rounds} rounds"
        logging, checkpoint, total = (b - a for a, b in zip(probe.rows[1], probe.rows[-1], strict=True))
        yield Figure(part="overhead", case=f"{case}, logging", value=100 * logging / total, unit="% of a round")
        yield Figure(part="overhead", case=f"{case}, checkpoints", value=100 * checkpoint / total, unit="% of a round")
        at_the_end = trainer.run.clock.seconds["checkpoint"] - probe.rows[-1][1]
        yield Figure(part="overhead", case=f"{case}, files at the end", value=at_the_end, unit="s")


def processes_part(machine: Machine) -> Iterator[Figure]:
    """Two processes of one thread against one process of two."""
    for name in ("cora", "planted"):
        for num_processes, num_threads in ((1, 1), (1, 2), (2, 1)):
            result = in_process(spread, threads=num_threads, name=name, num_processes=num_processes)
            data = {"cora": "Cora, 20 clients", "planted": "1,000 clients of 100 nodes"}[name]
            case = f"{data}, processes x threads: {num_processes} x {num_threads}"
            yield Figure(part="processes", case=case, value=1e3 * result["seconds"])


def spread(name: str, num_processes: int) -> dict[str, float]:
    """FedAvg over some processes."""
    data, num_rounds = (cora(), 40) if name == "cora" else (planted(1_000, 100), 12)
    settings = {"devices": num_processes, "strategy": "ddp" if num_processes > 1 else "auto"}
    return {"seconds": seconds_a_round(fit(data, FedAvg(), GCN, num_rounds=num_rounds, **settings))}


class PeakMemory:
    """Follows the resident memory that is not mapped from files, beyond what there was at the beginning."""

    def __enter__(self) -> "PeakMemory":
        self.start, self.peak, self.over = self._now(), 0, threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.thread.join()

    @property
    def mib(self) -> float:
        """The peak."""
        return (self.peak - self.start) / 2**10

    def _watch(self) -> None:
        while not self.over.wait(0.02):
            self.peak = max(self.peak, self._now())

    def _now(self) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


def in_process(function: Callable[..., dict[str, Any]], *, threads: int | None = None, **arguments: Any) -> Any:
    """What a function of this file returns in a process of its own."""
    call = json.dumps({"function": function.__name__, "arguments": arguments})
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads or torch.get_num_threads())}
    done = subprocess.run(
        [sys.executable, __file__, "--call", call], env=environment, check=True, capture_output=True, text=True
    )
    return json.loads(done.stdout.splitlines()[-1])


PARTS: dict[str, Callable[[Machine], Iterator[Figure]]] = {
    "cora": cora_part,
    "pyg": pyg_part,
    "arxiv": arxiv_part,
    "server": server_part,
    "mixing": mixing_part,
    "many": many_part,
    "storage": storage_part,
    "overhead": overhead_part,
    "processes": processes_part,
}


def number(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def table(result: dict[str, Any]) -> str:
    """The metrics as markdown."""
    lines = [
        "# Speed",
        "",
        f"`python benchmarks/suite.py` on {result['machine']}, torch {result['torch']}. Limits are what the matrix "
        "products and the memory traffic would take at the rates measured first (see the head of the file).",
    ]
    for name, part in result["parts"].items():
        lines += [
            "",
            f"**{name}** ({part['date']}, {part['threads']} threads, {part['gemm_gflops']:.0f} GFLOP/s, "
            f"{part['copy_gb_a_second']:.0f} GB/s). {PARTS[name].__doc__}",
            "",
            "| case | metric | limit | share of the limit |",
            "|---|---:|---:|---:|",
        ]
        for row in part["figures"]:
            bounds = ("", "")
            if row["limit"] is not None:
                bounds = (f"{number(row['limit'])} {row['unit']}", f"{row['limit'] / row['value']:.0%}")
            lines.append(f"| {row['case']} | {number(row['value'])} {row['unit']} | {bounds[0]} | {bounds[1]} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all if none is given")
    parser.add_argument("--call", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    keep_freed_memory()  # as the command line does
    if arguments.call is not None:
        call = json.loads(arguments.call)
        output = globals()[call["function"]](**call["arguments"])
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(json.dumps(output))
        return
    path = RESULTS / "suite.json"
    known = json.loads(path.read_text())["parts"] if path.exists() else {}
    machine = Machine.measure()
    for name in arguments.parts or PARTS:
        machine = machine.or_better(Machine.measure())
        metrics = []
        for measured in PARTS[name](machine):
            metrics.append(asdict(measured))
            print(f"{measured.part}: {measured.case}: {measured.value:.4g} {measured.unit}", flush=True)
        known[name] = {
            "date": time.strftime("%Y-%m-%d"),
            "threads": torch.get_num_threads(),
            "gemm_gflops": machine.flops / 1e9,
            "copy_gb_a_second": machine.bandwidth / 1e9,
            "figures": metrics,
        }
        result = {
            "machine": platform.processor() or platform.machine(),
            "torch": torch.__version__,
            "parts": {part: known[part] for part in PARTS if part in known},
        }
        RESULTS.mkdir(exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n")
        (RESULTS / "suite.md").write_text(table(result))
    print((RESULTS / "suite.md").read_text())


if __name__ == "__main__":
    main()
