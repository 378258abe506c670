"""Runs one system for peers.py, in the interpreter that has its requirements; nothing of this project is needed for it.

    python peers_driver.py SYSTEM OPTIONS.json

The options: ``checkout``, ``data`` (a file of clients that peers.py writes), ``scratch``, ``algorithm``, ``rounds``,
``epochs``, ``width``, ``learning_rate``, ``seed``, ``result``. Writes to ``result``: for each round the seconds since
this process began, those of its CPU (None if others work for it) and the validation accuracy, plain mean over clients.
"""

import json
import pickle
import sys
import time
from pathlib import Path
from typing import Any

START = time.perf_counter()
#: Drop probability of the two-layer net of all systems.
DROPOUT = 0.5
Rounds = list[tuple[float, float | None, float]]


def now() -> tuple[float, float]:
    """Seconds since this process began, by the clock and of its CPU."""
    return time.perf_counter() - START, time.process_time()


def write_result(options: dict[str, Any], rounds: Rounds) -> None:
    """Hand the metrics over."""
    Path(options["result"]).write_text(json.dumps(rounds))


def ours(options: dict[str, Any]) -> None:
    """``fl-train fit`` of this project."""
    from fl_lightning import Callback, keep_freed_memory
    from fl_lightning.cli import FederatedCLI

    keep_freed_memory()  # as the command does
    rounds: Rounds = []

    class Clock(Callback):
        def on_round_end(self, trainer: Any, metrics: dict[str, float]) -> None:
            rounds.append((*now(), metrics[options["figure"]]))

    class TimedCLI(FederatedCLI):
        def instantiate_trainer(self, **kwargs: Any) -> Any:
            trainer = super().instantiate_trainer(**kwargs)
            trainer.callbacks.append(Clock())
            return trainer

    TimedCLI([*options["arguments"], f"--trainer.default_root_dir={options['scratch']}"])
    write_result(options, rounds)


def plain(options: dict[str, Any]) -> None:
    """FedAvg in a loop over PyG nets, without any framework: train, score the trained net, average by examples."""
    import copy

    import torch
    import torch.nn.functional as F

    torch.manual_seed(options["seed"])
    net, clients, share = (_plain_graphs if options["graphs"] else _plain_nodes)(options)
    nets = [copy.deepcopy(net) for _ in clients]
    optimizers = [torch.optim.Adam(net.parameters(), lr=options["learning_rate"], fused=True) for net in nets]
    share /= share.sum()
    rounds: Rounds = []
    for _ in range(options["rounds"]):
        accuracy = []
        for net, optimizer, (batches, scored) in zip(nets, optimizers, clients, strict=True):
            net.train()
            for _ in range(options["epochs"]):
                for inputs, y, mask in batches:
                    optimizer.zero_grad()
                    F.cross_entropy(net(*inputs)[mask], y[mask]).backward()
                    optimizer.step()
            net.eval()
            with torch.no_grad():
                right = torch.cat([(net(*inputs).argmax(dim=1) == y)[mask] for inputs, y, mask in scored])
            accuracy.append(float(right.float().mean()))
        with torch.no_grad():
            for each in zip(*(net.parameters() for net in nets), strict=True):
                mean = sum(weight * parameter for weight, parameter in zip(share, each, strict=True))
                for parameter in each:
                    parameter.copy_(mean)
        rounds.append((*now(), sum(accuracy) / len(accuracy)))
    write_result(options, rounds)


def _num_classes(clients: list[Any]) -> int:
    """Number of classes of all clients' nodes, or of their graphs."""
    return max(int(each["y"].max()) for client in clients for each in client.get("graphs", [client])) + 1


def _plain_nodes(options: dict[str, Any]) -> Any:
    """Net, the clients' batches (inputs, labels, mask) to train on and to score, numbers of examples."""
    import torch
    from torch_geometric.nn import GCN

    clients = torch.load(options["data"])
    net = GCN(clients[0]["x"].shape[1], options["width"], 2, _num_classes(clients), dropout=DROPOUT)
    batches = [
        tuple([((each["x"], each["edge_index"]), each["y"], each[f"{role}_mask"])] for role in ("train", "val"))
        for each in clients
    ]
    return net, batches, torch.tensor([float(each["train_mask"].sum()) for each in clients])


def _plain_graphs(options: dict[str, Any]) -> Any:
    """As :func:`_plain_nodes`; batches are made anew in every pass, as PyG's loader does."""
    import torch
    from peers_net import GraphNet
    from torch_geometric.data import Data
    from torch_geometric.loader import DataLoader

    class Batches:
        def __init__(self, graphs: list[Any], mask: Any, *, shuffle: bool) -> None:
            chosen = [Data(**graphs[index]) for index in mask.nonzero().flatten().tolist()]
            self.loader = DataLoader(chosen, options["batch_size"], shuffle=shuffle)

        def __iter__(self) -> Any:
            return (((b.x, b.edge_index, b.batch), b.y, torch.ones_like(b.y).bool()) for b in self.loader)

    clients = torch.load(options["data"])
    batches = [
        tuple(Batches(c["graphs"], c[f"{r}_mask"], shuffle=r == "train") for r in ("train", "val")) for c in clients
    ]
    net = GraphNet(clients[0]["graphs"][0]["x"].shape[1], _num_classes(clients), options["width"])
    return net, batches, torch.tensor([float(each["train_mask"].sum()) for each in clients])


def openfgl(options: dict[str, Any]) -> None:
    """OpenFGL (https://github.com/xkLi-Allen/OpenFGL) with this project's clients in place of its own simulation."""
    import torch

    sys.path.insert(0, options["checkout"])
    sys.argv = sys.argv[:1]  # it reads the command line when it is imported
    import openfgl.config
    import openfgl.flcore.trainer as core

    load = torch.load
    torch.load = lambda *arguments, **named: load(*arguments, **{"weights_only": False, **named})
    args = openfgl.config.args
    args.root, args.dataset, args.metrics = options["scratch"], ["Cora"], ["accuracy"]
    args.num_rounds, args.num_epochs, args.batch_size = options["rounds"], options["epochs"], options["batch_size"]
    args.fl_algorithm, args.hid_dim, args.lr = options["algorithm"], options["width"], options["learning_rate"]
    args.weight_decay, args.use_cuda, args.seed = 0.0, options["gpu"], options["seed"]
    args.num_layers, args.dropout = 2, DROPOUT
    args.scenario, args.task, args.model = (
        ("graph_fl", "graph_cls", ["gin"]) if options["graphs"] else ("subgraph_fl", "node_cls", ["gcn"])
    )
    clients, whole = (_openfgl_graphs if options["graphs"] else _openfgl_nodes)(torch.load(options["data"]))
    args.num_clients = len(clients)
    _write_openfgl_splits(Path(options["scratch"]) / args.task, clients)

    class Given:
        def __init__(self, args: Any) -> None:
            self.local_data, self.global_data, self.processed_dir = clients, whole, options["scratch"]

    rounds: Rounds = []

    class Timed(core.FGLTrainer):
        def evaluate(self) -> None:
            result: list[float] = []
            for client in self.clients:
                if not hasattr(client.task, "original_evaluate"):
                    client.task.original_evaluate = client.task.evaluate
                client.task.evaluate = lambda *a, task=client.task, **k: _noted(result, task.original_evaluate(*a, **k))
            super().evaluate()
            rounds.append((*now(), sum(result) / len(result)))

    core.FGLDataset = Given
    torch.manual_seed(options["seed"])
    Timed(args).train()
    write_result(options, rounds)


def _noted(output: list[float], result: dict[str, Any]) -> dict[str, Any]:
    output.append(float(result["accuracy_val"]))
    return result


def _openfgl_nodes(given: list[Any]) -> Any:
    """The clients' graphs, and all in one."""
    import torch
    from torch_geometric.data import Data

    clients, num_classes = [Data(**fields) for fields in given], _num_classes(given)
    for client in clients:
        client.num_global_classes = num_classes
    x, y = (torch.cat([client[name] for client in clients]) for name in ("x", "y"))
    offsets = torch.tensor([0, *(len(client.x) for client in clients)]).cumsum(0).tolist()
    edges = [client.edge_index + offset for client, offset in zip(clients, offsets, strict=False)]
    return clients, Data(x=x, y=y, edge_index=torch.cat(edges, dim=1), num_global_classes=num_classes)


def _openfgl_graphs(given: list[Any]) -> Any:
    """The clients' sets of graphs, and all in one."""
    import torch
    from torch_geometric.data import Data

    num_classes = _num_classes(given)

    class Graphs:
        """What OpenFGL needs of a data set in memory."""

        num_global_classes = num_classes

        def __init__(self, graphs: list[Any], **roles: Any) -> None:
            self.graphs, self.roles = graphs, roles
            self.y = torch.cat([graph.y for graph in graphs])

        def __len__(self) -> int:
            return len(self.graphs)

        def __getitem__(self, index: Any) -> Any:
            if isinstance(index, str):
                return self.roles[index]
            return self.graphs[index] if isinstance(index, int) else [self.graphs[i] for i in index.nonzero().flatten()]

        def to(self, device: Any) -> Any:
            self.graphs = [graph.to(device) for graph in self.graphs]
            return self

    clients = []
    for client in given:
        roles = {name: mask for name, mask in client.items() if name != "graphs"}
        clients.append(Graphs([Data(**graph) for graph in client["graphs"]], **roles))
    return clients, Graphs([graph for client in clients for graph in client.graphs])


def _write_openfgl_splits(root: Path, clients: list[Any]) -> None:
    import torch

    folder = root / "default_split"
    folder.mkdir(parents=True)
    offset = 0
    for number, client in enumerate(clients):
        for role in ("train", "val", "test"):
            mask = client[f"{role}_mask"]
            torch.save(mask, folder / f"{role}_{number}.pt")
            with (folder / f"glb_{role}_{number}.pkl").open("wb") as file:
                pickle.dump((mask.nonzero().flatten() + offset).tolist(), file)
        offset += len(client.y)


def fedpub(options: dict[str, Any]) -> None:
    """FED-PUB's public code (https://github.com/JinheonBaek/FED-PUB): FedAvg and FED-PUB, one worker."""
    import os

    import torch
    from torch_geometric.data import Data

    load = torch.load
    torch.load = lambda *arguments, **named: load(*arguments, **{"weights_only": False, **named})
    if not options["gpu"]:  # the code says .cuda() everywhere
        torch.Tensor.cuda = lambda self, *arguments, **named: self
        torch.nn.Module.cuda = lambda self, *arguments, **named: self
        Data.cuda = lambda self, *arguments, **named: self
    clients = torch.load(options["data"])
    base = Path(options["scratch"])
    folder = base / "datasets" / f"Cora_disjoint/{len(clients)}"
    folder.mkdir(parents=True)
    for number, fields in enumerate(clients):
        torch.save({"client_data": Data(**fields), "client_id": number}, folder / f"partition_{number}.pt")
    sys.path.insert(0, options["checkout"])
    sys.path.remove(str(Path(__file__).parent))
    os.chdir(options["checkout"])
    words = [
        "--gpu",
        "0",
        "--n-workers",
        "1",
        "--model",
        options["algorithm"],
        "--dataset",
        "Cora",
        "--mode",
        "disjoint",
    ]
    words += ["--frac", "1.0", "--n-rnds", options["rounds"], "--n-eps", options["epochs"], "--n-clients", len(clients)]
    words += ["--n-dims", options["width"], "--lr", options["learning_rate"], "--seed", options["seed"]]
    words += ["--base-path", base]
    if options["algorithm"] == "fedpub":  # as its scripts have it
        words += ["--clsf-mask-one", "--laye-mask-one", "--norm-scale", "3"]
    sys.argv = ["main.py", *map(str, words)]
    import main as program
    import modules.multiprocs as multiprocs

    ends: list[float] = []

    class Timed(multiprocs.ParentProcess):
        def __init__(self, args: Any, server: Any, client: Any) -> None:
            class TimedServer(server):  # type: ignore[misc]
                def on_round_complete(self, updated: Any) -> None:
                    super().on_round_complete(updated)
                    ends.append(time.perf_counter() - START)

            super().__init__(args, TimedServer, client)
            self.log_path = args.log_path

        def start(self) -> None:
            try:
                super().start()
            except SystemExit:
                logs = [json.loads(path.read_text())["log"] for path in Path(self.log_path).glob("client_*.txt")]
                values = zip(*(log["rnd_local_val_acc"] for log in logs), strict=True)
                write_result(options, [(end, None, sum(v) / len(v)) for end, v in zip(ends, values, strict=True)])
                raise

    program.ParentProcess = Timed
    program.main(program.Parser().parse())


if __name__ == "__main__":
    {"ours": ours, "plain": plain, "openfgl": openfgl, "fedpub": fedpub}[sys.argv[1]](
        json.loads(Path(sys.argv[2]).read_text())
    )
