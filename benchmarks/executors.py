"""Stacked against sequential: seconds a round for FedAvg on Cora with 20 clients, 3 local epochs and evaluations.

Sequential runs twice: with the same GCN as the stacked executor, which multiplies sparse features and keeps its
normalised adjacency, and with a GCN of PyG's own layers, as papers' code does.

    FL_DATA_ROOT=... .venv/bin/python benchmarks/executors.py

Writes benchmarks/results/executors.json. The rounds of both executors alternate, so that whatever else the machine does
falls on both; the medians and their ratio are reported.
"""

import json
import platform
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.nn import GCNConv

from fl_lightning import ClientModule, FederatedDataModule, FederatedTrainer, SequentialExecutor, StackedExecutor
from fl_lightning.client import NetFactory
from fl_lightning.data import MetisPartitioner, PlanetoidSource
from fl_lightning.executors import Executor
from fl_lightning.graph_batch import GraphBatch
from fl_lightning.models import GCN, NetOutput
from fl_lightning.strategies.fedavg import FedAvg

NUM_ROUNDS = 20


class PyGGCN(nn.Module):
    """Two GCNConv layers and a linear head."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(in_channels, 128), GCNConv(128, 128)])
        self.head = nn.Linear(128, out_channels)

    def forward(self, batch: GraphBatch) -> NetOutput:
        """Return logits and embeddings of one client."""
        assert batch.plain is not None
        h_ND = embedding_ND = batch.plain.x
        for conv in self.convs:
            embedding_ND = conv(h_ND, batch.plain.edge_index)
            h_ND = F.dropout(embedding_ND.relu(), 0.5, self.training)
        return NetOutput(self.head(h_ND), embedding_ND)


def seconds_per_round(executor: Executor, net: NetFactory, folder: str) -> float:
    """Median seconds of a round, of a short run without loggers and checkpoints."""
    data = FederatedDataModule(PlanetoidSource("Cora"), MetisPartitioner(20), cache_dir=folder)
    trainer = FederatedTrainer(num_rounds=NUM_ROUNDS, executor=executor, logger=False, default_root_dir=folder)
    trainer.fit(ClientModule(net), data, FedAvg())
    return statistics.median(row["seconds"] for row in trainer.history)


def main() -> None:
    """Measure and write."""
    kinds: dict[str, tuple[type[Executor], NetFactory]] = {
        "stacked": (StackedExecutor, GCN),
        "sequential": (SequentialExecutor, GCN),
        "sequential, PyG layers": (SequentialExecutor, PyGGCN),
    }
    figures: dict[str, list[float]] = {name: [] for name in kinds}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(5):
            for name, (executor, net) in kinds.items():
                figures[name].append(seconds_per_round(executor(), net, folder))
    seconds = {name: statistics.median(values) for name, values in figures.items()}
    result = {
        "task": "Cora, METIS, 20 clients, FedAvg, GCN 128-128; 3 epochs, the mixed and the trained models evaluated",
        "seconds_a_round": seconds,
        "times_faster_than": {name: seconds[name] / seconds["stacked"] for name in kinds if name != "stacked"},
        "threads": torch.get_num_threads(),
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    path = Path(__file__).parent / "results" / "executors.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(path.read_text())


if __name__ == "__main__":
    main()
