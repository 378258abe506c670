"""CPU time of a round of FedAvg on SM, beside the same nets in plain PyTorch Geometric, one client after another.

    FL_DATA_ROOT=... .venv/bin/python benchmarks/graphs.py

The clients of configs/fedavg_sm.yaml: seven sets of molecules, GIN 3 x 64 with dropout, one epoch of batches of 128
or 16, Adam; averaged are the convolutions and the hidden layer. Plain is PyG's DataLoader, GINConv and global_add_pool
on the same graphs, from which it also makes its batches anew in every round. Our rounds are of the configuration's net,
and of the plain loop's own module of PyG's layers, given as ``model.net``. Each takes turns with the plain loop in one
process with one thread; seconds are the median round's, of the process's CPU, training and averaging without
evaluation. Of these clients one has half of all graphs, so that a stack has one or two clients in most steps, and small
batches cost what a step costs beside its products. Writes benchmarks/results/graphs.json and graphs.md.
"""

import argparse
import json
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.nn.functional as F
from methods import RESULTS, ROOT
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GINConv, global_add_pool

from fl_lightning.cli import FederatedCLI
from fl_lightning.run.callback import Callback, Trainer

WIDTH, LAYERS, DROPOUT, CONFIG = 64, 3, 0.5, "configs/fedavg_sm.yaml"


class PlainGIN(nn.Module):
    """The net of the configuration in PyG's layers."""

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.features = nn.Linear(num_features, WIDTH)
        self.convs = nn.ModuleList(
            GINConv(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))) for _ in range(LAYERS)
        )
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, num_classes)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        """Logits of the graphs of a batch."""
        h = self.features(x)
        for conv in self.convs:
            h = F.dropout(conv(h, edge_index).relu(), DROPOUT, self.training)
        h = self.hidden(global_add_pool(h, batch)).relu()
        result: Tensor = self.head(F.dropout(h, DROPOUT, self.training))
        return result


class Plain:
    """FedAvg over some clients, in a loop.

    Args:
        clients: Of each client its training graphs, and how many features and classes it has.
        batch_size: Graphs of a mini-batch.
    """

    def __init__(self, clients: list[tuple[list[Data], int, int]], batch_size: int) -> None:
        self.loaders = [DataLoader(graphs, batch_size=batch_size, shuffle=True) for graphs, _, _ in clients]
        self.nets = [PlainGIN(width, classes) for _, width, classes in clients]
        self.optimizers = [
            torch.optim.Adam(net.parameters(), 0.001, weight_decay=5e-4, fused=True) for net in self.nets
        ]
        self.share = torch.tensor([len(graphs) for graphs, _, _ in clients]).float()
        self.share /= self.share.sum()

    def round(self) -> float:
        """CPU seconds of a round."""
        start = time.process_time()
        for net, loader, optimizer in zip(self.nets, self.loaders, self.optimizers, strict=True):
            for batch in loader:
                optimizer.zero_grad()
                F.cross_entropy(net(batch.x, batch.edge_index, batch.batch), batch.y).backward()
                optimizer.step()
        with torch.no_grad():
            for name in dict(self.nets[0].named_parameters()):
                if name.startswith(("convs", "hidden")):
                    own = [net.get_parameter(name) for net in self.nets]
                    mean = sum(share * each for share, each in zip(self.share, own, strict=True))
                    for each in own:
                        each.copy_(mean)
        return time.process_time() - start


class Turns(Callback):
    """After each round of this project, one of the plain loop; seconds of both."""

    def __init__(self) -> None:
        self.plain: Plain | None = None
        self.seconds: dict[str, list[float]] = {"ours": [], "plain": []}

    def on_fit_start(self, trainer: Trainer) -> None:
        """Bring the clients' training graphs into PyG's form."""
        clients, outputs = trainer.run.datamodule.clients, trainer.run.registry.own_outputs
        plain = []
        for client, num_classes in zip(clients, outputs, strict=True):
            chosen = client.train_mask_N.nonzero().flatten().tolist()
            width = int(client.union.x_NF.any(dim=0).nonzero().max()) + 1  # wider ones are of other clients
            graphs = []
            for index in chosen:
                x, edge_index = client.graph(index)
                graphs.append(Data(x=x[:, :width].clone(), edge_index=edge_index, y=client.y_N[index : index + 1]))
            plain.append((graphs, width, num_classes))
        self.plain = Plain(plain, trainer.run.datamodule.batch_size or len(plain))

    def on_round_start(self, trainer: Trainer) -> None:
        """Start the clock."""
        self.start = time.process_time()

    def on_stage_end(self, trainer: Trainer, stage: Any, payload: Any) -> None:
        """The clients have trained."""
        self.trained = time.process_time() - self.start

    def on_round_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Add this round's training, and a plain round."""
        assert self.plain is not None
        self.seconds["ours"].append(self.trained)
        self.seconds["plain"].append(self.plain.round())


def measure(rounds: int, batch_size: int, net: tuple[str, ...]) -> dict[str, float]:
    """CPU seconds of our median round and of the plain loop's, whose rounds take turns."""
    with tempfile.TemporaryDirectory() as folder:
        cli = FederatedCLI(
            [
                "fit",
                f"--config={ROOT / CONFIG}",
                *net,
                f"--data.batch_size={batch_size}",
                f"--trainer.num_rounds={rounds}",
                f"--trainer.evaluate_every={rounds}",
                "--trainer.accelerator=cpu",
                "--trainer.logger=false",
                f"--trainer.default_root_dir={folder}",
                "--trainer.callbacks+=graphs.Turns",
            ]
        )
    turns: Any = next(each for each in cli.trainer.callbacks if type(each).__name__ == "Turns")  # type: ignore[attr-defined]
    return {name: statistics.median(each[1:]) for name, each in turns.seconds.items()}


def main() -> None:
    """Measure, and write file and table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    nets = {"the project's GIN": (), "the plain loop's module as model.net": ("--model.net=graphs.PlainGIN",)}
    result: dict[str, Any] = {"rounds": options.rounds, "torch": torch.__version__}
    lines = [
        "A round of FedAvg on SM, CPU seconds.\n",
        "| net | batch size | fl_lightning | plain PyG, one client after another | ratio |",
        "|---|---|---|---|---|",
    ]
    for batch_size in (128, 16):
        for name, arguments in nets.items():
            seconds = measure(options.rounds, batch_size, arguments)
            ratio = seconds["plain"] / seconds["ours"]
            result[f"{name}, {batch_size}"] = {"cpu_seconds": seconds, "ratio": round(ratio, 2)}
            lines.append(f"| {name} | {batch_size} | {seconds['ours']:.2f} | {seconds['plain']:.2f} | {ratio:.2f} |")
    (RESULTS / "graphs.json").write_text(json.dumps(result, indent=2) + "\n")
    (RESULTS / "graphs.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
