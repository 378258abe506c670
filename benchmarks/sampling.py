"""Training on parts of graphs: accuracy beside full batch, and a graph of ogbn-products' size.

    .venv/bin/python benchmarks/sampling.py cora [--rounds 100] [--seeds 0 1 2]
    .venv/bin/python benchmarks/sampling.py arxiv [--rounds 12] [--seeds 0]
    .venv/bin/python benchmarks/sampling.py products [--scale 1.0]

``cora`` trains FedAvg on Cora (10 clients by METIS, the settings of configs/fedavg_cora.yaml) full-batch and on parts,
and reports the test accuracy of the round with the best validation accuracy. ``arxiv`` does the same with what the
folder of the data sets has in ogbn-arxiv's layout; the committed numbers are of a generated graph of its size.
``products`` generates a graph with the numbers of nodes, edges, features, classes and training nodes of ogbn-products
(times ``--scale``), cuts it into 10 clients by METIS and trains one round of one epoch with sampled neighbors: the
seconds and the largest memory of each part (on Linux). Writes its part of benchmarks/results/sampling.json, and
sampling.md.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

import fl_lightning as fl
from fl_lightning.data import (
    ClusterSampler,
    FederatedDataModule,
    GivenSplit,
    GlobalSplit,
    GraphSampler,
    GraphSource,
    MetisPartitioner,
    NeighborSampler,
    OgbSource,
    PlanetoidSource,
    prepare_graph,
)
from fl_lightning.data.partition import communities
from fl_lightning.data.partition.subgraphs import client_graphs
from fl_lightning.data.sources import base
from fl_lightning.executors import SequentialExecutor
from fl_lightning.kernels.edge_codes import codes, distinct, edges_of, with_reverses
from fl_lightning.kernels.metis import metis
from fl_lightning.models import GCN, GraphSAGE
from fl_lightning.run.allocator import keep_freed_memory
from fl_lightning.strategies import FedAvg

RESULTS = Path(__file__).parent / "results"
#: Samplers on each graph, with their batch sizes.
CASES: dict[str, dict[str, tuple[GraphSampler | None, int | None]]] = {
    "cora": {
        "full batch": (None, None),
        "neighbors, fan-outs 10 and 10, 64 nodes a step": (NeighborSampler([10, 10]), 64),
        "8 clusters, 4 a step": (ClusterSampler(8), 4),
    },
    "arxiv": {
        "full batch": (None, None),
        "neighbors, fan-outs 10 and 10, 1,024 nodes a step": (NeighborSampler([10, 10]), 1024),
    },
}
#: Local steps of a round.
STEPS = {"cora": 3, "arxiv": 10}
TITLES = {"cora": "Cora", "arxiv": "A generated graph of ogbn-arxiv's size"}
#: ogbn-products.
NODES, EDGES, FEATURES, CLASSES, COMMUNITY = 2_449_029, 61_859_140, 100, 47, 500
#: Edges, or nodes, that are drawn at once.
PART = 1_000_000


class LikeProducts(GraphSource):
    """A graph of ogbn-products' size: communities of 500 nodes, four fifths of the edges within them.

    Four fifths of a community's nodes are of its class. Features are centroids of classes and noise. Edges have both
    directions.

    Args:
        scale: Share of the nodes and edges.
    """

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__(undirected=False)
        self.scale = scale

    def load(self, root: Path, cache_dir: Path | None = None) -> Data:
        """Generate it."""
        draw = np.random.default_rng(0)
        num_nodes, num_edges = round(NODES * self.scale), round(EDGES * self.scale)
        number_N = draw.permutation(num_nodes)  # no order of the nodes gives communities away
        place_N = np.empty_like(number_N)
        place_N[number_N] = np.arange(num_nodes)
        class_M = draw.integers(CLASSES, size=-(-num_nodes // COMMUNITY))
        y_N = np.where(
            draw.random(num_nodes) < 0.8, class_M[place_N // COMMUNITY], draw.integers(CLASSES, size=num_nodes)
        )
        del place_N
        code_E = torch.empty(0, dtype=torch.int64)
        while len(code_E) < num_edges:
            missing = round((num_edges - len(code_E)) * 1.05) + 1000
            drawn = [self._drawn(draw, number_N, min(PART, missing - start)) for start in range(0, missing, PART)]
            code_E = distinct(torch.cat([code_E, *drawn]))
            del drawn
        code_E = code_E[draw.permutation(len(code_E))[:num_edges]]
        edge_index_2E = edges_of(with_reverses(distinct(code_E), num_nodes), num_nodes)
        centroid_KF = draw.standard_normal((CLASSES, FEATURES), dtype=np.float32)
        x_NF = draw.standard_normal((num_nodes, FEATURES), dtype=np.float32)
        x_NF *= 3
        for first in range(0, num_nodes, PART):
            x_NF[first : first + PART] += centroid_KF[y_N[first : first + PART]]
        return Data(x=torch.from_numpy(x_NF), edge_index=edge_index_2E, y=torch.from_numpy(y_N))

    @staticmethod
    def _drawn(draw: np.random.Generator, number_N: Any, count: int) -> Tensor:
        """Codes of undirected edges, from the smaller number to the larger one; they may repeat."""
        source_E = draw.integers(len(number_N), size=count)
        target_E = source_E // COMMUNITY * COMMUNITY + draw.integers(COMMUNITY, size=count)
        is_far_E = draw.random(count) < 0.2
        target_E[is_far_E] = draw.integers(len(number_N), size=int(is_far_E.sum()))
        ends_2E = np.sort(number_N[np.stack([source_E, np.minimum(target_E, len(number_N) - 1)])], axis=0)
        low_E, high_E = torch.from_numpy(ends_2E[:, ends_2E[0] != ends_2E[1]])
        return codes(low_E, high_E, len(number_N))

    def identity(self) -> dict[str, Any]:
        """The scale."""
        return {"source": "LikeProducts", "scale": self.scale}


def compared(graph: str, num_rounds: int, seeds: list[int]) -> dict[str, Any]:
    """Test accuracy and seconds a round of each sampler."""
    result: dict[str, Any] = {"rounds": num_rounds, "seeds": seeds, "cases": {}}
    for name, (sampler, batch_size) in CASES[graph].items():
        accuracies, seconds = [], []
        for seed in seeds:
            data = FederatedDataModule(
                PlanetoidSource("Cora") if graph == "cora" else OgbSource("ogbn-arxiv"),
                MetisPartitioner(10, seed=0),
                GlobalSplit(train=0.4, val=0.3) if graph == "cora" else GivenSplit(),
                sampler=sampler,
                batch_size=batch_size,
                steps_per_epoch=None if sampler is None else 1,  # as many as full batch has
                seed=seed,
            )
            scores, run = trained(data, num_rounds, seed, GCN, 0.5, num_epochs=STEPS[graph])
            accuracies.append(scores["test/acc"])
            seconds += [row["seconds"] for row in run.history[1:]]
        result["cases"][name] = {"accuracy": accuracies, "seconds": statistics.median(seconds)}
        print(name, result["cases"][name], flush=True)
    return result


def trained(
    data: FederatedDataModule, num_rounds: int, seed: int, net: Any, dropout: float, *, num_epochs: int, **settings: Any
) -> tuple[Any, Any]:
    """The scores of a run, and the run."""
    keep_freed_memory()  # as the command line does; here not before, so that the memory of each part is seen
    client = fl.ClientModule(
        lambda *widths: net(*widths, hidden_channels=128, dropout=dropout),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = fl.FederatedTrainer(
            num_rounds=num_rounds,
            accelerator="cpu",
            default_callbacks=False,
            logger=False,
            seed=seed,
            default_root_dir=folder,
            **settings,
        )
        return trainer.fit(client, data, FedAvg(num_epochs=num_epochs)), trainer.run


def products(scale: float) -> dict[str, Any]:
    """Seconds and memory of each part."""
    parts: dict[str, Any] = {}
    first, first_cpu = time.perf_counter(), time.process_time()
    interpreter = memory_gib("VmRSS")

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            before = memory_gib("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            begin = time.perf_counter()
            result = function(*args, **kwargs)
            seconds = time.perf_counter() - begin
            parts[name] = {"seconds": seconds, "before_gib": before, "peak_gib": memory_gib("VmHWM")}
            print(name, parts[name], flush=True)
            return result

        return call

    source = LikeProducts(scale)
    source.load = timed("generated", source.load)  # type: ignore[method-assign]
    vars(base)["prepare_graph"] = timed("prepared", prepare_graph)
    vars(communities)["metis"] = timed("cut by METIS", metis)
    vars(base)["client_graphs"] = timed("graphs of the clients", client_graphs)
    with tempfile.TemporaryDirectory() as cache_dir:
        splitter, sampler = GlobalSplit(train=0.08, val=0.02), NeighborSampler([10, 10])
        data = FederatedDataModule(
            source,
            MetisPartitioner(10),
            splitter,
            sampler=sampler,
            batch_size=1024,
            memory_map=True,
            cache_dir=cache_dir,
        )
        begin = time.perf_counter()
        data.setup()
        facts = {
            "setup_seconds": time.perf_counter() - begin,
            "interpreter_gib": interpreter,
            "edges_gib": 2 * 2 * 8 * round(EDGES * scale) / 2**30,
            "features_gib": 4 * FEATURES * round(NODES * scale) / 2**30,
            "nodes": sum(client.num_nodes for client in data.clients),
            "edges": round(EDGES * scale),
            "kept_edges": sum(client.num_edges for client in data.clients) // 2,
            "training_nodes": sum(client.num_examples for client in data.clients),
        }
        fit = timed("a round: one epoch of all clients, two evaluations on whole graphs", trained)
        scores, run = fit(data, 1, 0, GraphSAGE, 0.0, num_epochs=1, executor=SequentialExecutor())
    facts["cores"] = (time.process_time() - first_cpu) / (time.perf_counter() - first)
    return {"scale": scale, **facts, "parts": parts, "test_acc": scores["test/acc"], "clock": dict(run.clock.seconds)}


def memory_gib(field: str) -> float:
    """A field of the system's account of this process, which is in KiB."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[field].split()[0]) / 2**20


def page(found: dict[str, Any]) -> str:
    """The page of results."""
    lines = [
        "# Training on parts of graphs",
        "",
        "Written by `benchmarks/sampling.py`, on two CPU cores that others used too.",
    ]
    for graph, title in TITLES.items():
        if (cases := found.get(graph)) is None:
            continue
        several = len(cases["seeds"]) > 1
        seeds = f"seed{'s' * several} {', '.join(map(str, cases['seeds']))}"
        full = statistics.mean(cases["cases"]["full batch"]["accuracy"])
        lines += [
            "",
            f"## {title}",
            "",
            f"FedAvg, 10 clients, {cases['rounds']} rounds of {STEPS[graph]} steps, {seeds}: test accuracy at "
            "the round with the best validation accuracy, in percent"
            f"{', with the standard deviation over seeds' * several}.",
            "",
            "| training | test accuracy | beside full batch | seconds a round |",
            "|---|---|---|---|",
        ]
        for name, case in cases["cases"].items():
            mean, spread = (100 * f(case["accuracy"]) for f in (statistics.mean, statistics.pstdev))
            accuracy = f"{mean:.1f}" + f" ± {spread:.1f}" * several
            lines.append(f"| {name} | {accuracy} | {mean - 100 * full:+.1f} | {case['seconds']:.2f} |")
    if made := found.get("products"):
        beyond = made["interpreter_gib"] + made["features_gib"]
        lines += [
            "",
            "## A graph of ogbn-products' size",
            "",
            f"Generated: {made['nodes']:,} nodes, {made['edges']:,} edges, {FEATURES} features, {CLASSES} classes; "
            f"{made['scale']:.0%} of the size. 10 clients by METIS keep {made['kept_edges']:,} edges and have "
            f"{made['training_nodes']:,} training nodes. "
            "GraphSAGE of width 128, fan-outs 10 and 10, 1,024 nodes a step, clients one after another, their features "
            f"mapped from a file. An epoch of all clients took {made['clock']['clients']:.0f} seconds, the evaluation "
            f"of a round on whole graphs {made['clock']['evaluation']:.0f}; others used the machine, and the process "
            f"got {made['cores']:.2f} of its two cores on average.",
            "",
            f"The edges, int64 in both directions, are {made['edges_gib']:.2f} GiB, the features "
            f"{made['features_gib']:.2f} GiB; the interpreter with its libraries takes {made['interpreter_gib']:.2f} "
            "GiB. The last column is the largest memory without interpreter and features (which are there twice while "
            "clients get theirs), as a multiple of the edges.",
            "",
            "| part | seconds | memory before, GiB | largest memory, GiB | times the edges |",
            "|---|---|---|---|---|",
        ]
        for name, part in made["parts"].items():
            twice = made["features_gib"] if name == "graphs of the clients" else 0
            multiple = (part["peak_gib"] - beyond - twice) / made["edges_gib"]
            numbers = f"{part['before_gib']:.1f} | {part['peak_gib']:.1f} | {multiple:.1f}"
            lines.append(f"| {name} | {part['seconds']:.0f} | {numbers} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=("cora", "arxiv", "products", "page"))
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--scale", type=float, default=1.0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    path = RESULTS / "sampling.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    if args.case != "page":
        is_products = args.case == "products"
        found[args.case] = products(args.scale) if is_products else compared(args.case, args.rounds, args.seeds)
    path.write_text(json.dumps(found, indent=1) + "\n")
    path.with_suffix(".md").write_text(page(found))


if __name__ == "__main__":
    main()
