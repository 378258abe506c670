"""The graphs that a report draws, where graphs are the examples."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fl_lightning.kernels.randomness import generator
from fl_lightning.report.record import ExampleGraph
from fl_lightning.run.callback import Trainer

#: Of so many clients, so many graphs each; larger ones cannot be made out.
_MOST_CLIENTS, _MOST_GRAPHS, _MOST_NODES = 12, 3, 40


def example_graphs(trainer: Trainer, clients: Sequence[Any]) -> list[ExampleGraph]:
    """A few small graphs of the first training clients, drawn by the run's seed: of different targets if there are.

    Nodes are numbered by kind, the most frequent of a client first: the first of their features that is largest.
    """
    run, result = trainer.run, list[ExampleGraph]()
    names = getattr(run.datamodule, "class_names", None)
    for client in run.training_clients[:_MOST_CLIENTS]:
        graphs = clients[client]
        draw = generator(run.seed, "drawn graphs", run.registry.names[client])
        order = torch.randperm(graphs.size, generator=draw)
        by_target: dict[str, list[int]] = {}
        for index in order[graphs.num_nodes_G[order] <= _MOST_NODES].tolist():
            by_target.setdefault(in_words(graphs.y_N[index], names), []).append(index)
        in_turn = [(place, target, index) for target, own in by_target.items() for place, index in enumerate(own)]
        kind_F = (
            graphs.inputs.argmax(dim=1).bincount(minlength=graphs.inputs.shape[1]).argsort(descending=True).argsort()
        )
        for _, target, index in sorted(in_turn, key=lambda each: each[0])[:_MOST_GRAPHS]:
            x_NF, edge_2E = graphs.graph(index)
            pairs = sorted({(min(pair), max(pair)) for pair in edge_2E.t().tolist()})
            kinds, edges = kind_F[x_NF.argmax(dim=1)].tolist(), [list(pair) for pair in pairs]
            result.append(ExampleGraph(client=client, num_nodes=len(x_NF), edges=edges, kinds=kinds, target=target))
    return result


def in_words(y: Tensor, class_names: Sequence[str] | None) -> str:
    """A target: the name or the number of a class, or the first labels or numbers."""
    if y.dim() == 0:
        label = int(y)
        return "unlabeled" if label < 0 else class_names[label] if class_names else f"class {label}"
    words = [f"{value:.3g}".replace("-", "\N{MINUS SIGN}") for value in y.tolist() if value == value]
    return ", ".join([*words[:3], *(["..."] if len(words) > 3 else [])]) or "unlabeled"
