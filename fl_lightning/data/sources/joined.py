"""Many graphs as one without edges between them, so that they are clients by themselves."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch_geometric.data import Data

from fl_lightning.data.edge_data import same_edge_data
from fl_lightning.data.preparation import (
    Dropped,
    Preparation,
    classes_in,
    completed,
    dropped,
    names_of_classes,
    names_of_nodes,
    prepare_graph,
)

#: The node attribute that says which of several graphs a node is of.
GRAPH = "graph"
#: What a graph may say of its links, which is not carried over.
OF_LINKS = ("edge_time", "edge_type", "val_edge_index", "test_edge_index")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One of many graphs.

    Attributes:
        graph: As it was read.
        preparation: What is done to it.
        name: What messages call it.
        class_names: What its classes are called if it does not say so itself; None where that is not known.
        warns: Warn where its preparation adds edges or drops nodes.
    """

    graph: Data
    preparation: Preparation
    name: str
    class_names: tuple[str, ...] | None = None
    warns: bool = True


def joined(parts: Iterable[Part]) -> Data:
    """Prepare many graphs, and make them one without edges between them.

    Classes with names are matched by name: those of the first graph keep their numbers, new ones are appended.

    Args:
        parts: With the same features; what not all of them have is left out, and what differs in shape with a warning.

    Returns:
        The graph; :data:`GRAPH` is the number of the one that each node was of, ``own_idx`` its number there.
        ``x`` and ``y`` are missing if no graph has them, as links need neither; ``class_names`` and ``node_names`` are
        of all, where the graphs have them; ``not_joined`` names what of :data:`OF_LINKS` some of them have; ``dropped``
        is what their preparation has left out.

    Raises:
        ValueError: One is not sound, they have different features, only some have features, have labels or name their
            classes, or the edges of some carry what those of others do not.
    """
    prepared: list[Data] = []
    named: list[tuple[str, ...] | None] = []
    texts: list[tuple[str, ...] | None] = []
    titles: list[str] = []
    not_joined: set[str] = set()
    losses: list[Dropped] = []
    classes: tuple[set[int | str], set[int | str]] = (set(), set())
    lacking: set[str] = set()
    for part in parts:
        not_joined |= {key for key in OF_LINKS if part.graph.get(key) is not None}
        lacks = {key for key in ("x", "y") if part.graph.get(key) is None}
        if titles and (only := lacking - lacks):
            raise ValueError(f"{titles[0]} has no {min(only)}, but {part.name} has: add it")
        lacking = lacks & lacking if titles else lacks  # what the first one has, all need
        given = completed(part.graph, lacking)
        graph = prepare_graph(given, part.preparation, part.name, warns=part.warns, may_lack_edges=True)
        num_names = graph.y.shape[1] if graph.y.dim() > 1 else int(graph.y.max()) + 1
        named.append(names_of_classes(part.graph, num_names, part.name) or part.class_names)
        losses.append(dropped(given, graph, part.preparation))
        for occurring, each in zip(classes, (given, graph), strict=True):
            numbers = classes_in(each, graph, part.preparation)
            occurring |= {named[-1][number] for number in numbers} if named[-1] else numbers
        names = names_of_nodes(given, part.name)
        texts.append(None if names is None else tuple(names[node] for node in graph.source_idx.tolist()))
        prepared.append(graph)
        titles.append(part.name)
        if graph.x.shape[1] != prepared[0].x.shape[1]:
            raise ValueError(
                f"{part.name} has {graph.x.shape[1]} features of each node, the first {prepared[0].x.shape[1]}: all "
                "clients need the same features"
            )
        if graph.y.shape[1:] != prepared[0].y.shape[1:] or graph.get("task") != prepared[0].get("task"):
            raise ValueError(
                f"{part.name} has targets of shape {tuple(graph.y.shape)}, the first {tuple(prepared[0].y.shape)}: all "
                "clients need classes, or as many labels, or as many numbers"
            )
    class_names = _by_name(prepared, named, titles)
    sizes = torch.tensor([graph.num_nodes for graph in prepared])
    first = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)[:-1]])
    shared = [name for name in _shared(prepared, titles) if name not in lacking]
    attributes: dict[str, Any] = {name: torch.cat([graph[name] for graph in prepared]) for name in shared}
    attributes |= {name: torch.cat([graph[name] for graph in prepared]) for name in same_edge_data(prepared)}
    whole = Data(
        **attributes,
        edge_index=torch.cat([graph.edge_index + start for graph, start in zip(prepared, first, strict=True)], dim=1),
        own_idx=torch.cat([graph.source_idx for graph in prepared]),
        num_nodes=int(sizes.sum()),
        **{GRAPH: torch.repeat_interleave(torch.arange(len(prepared)), sizes)},
    )
    whole.class_names, whole.not_joined = class_names, sorted(not_joined)
    whole.dropped = Dropped(
        num_nodes=sum(loss.num_nodes for loss in losses),
        num_edges=sum(loss.num_edges for loss in losses),
        num_classes=len(classes[0] - classes[1]),
    )
    if (given := prepared[0].get("task")) is not None:
        whole.task = given
    if any(texts):
        empty = [("",) * graph.num_nodes for graph in prepared]
        whole.node_names = [text for names, none in zip(texts, empty, strict=True) for text in names or none]
    return whole


def _by_name(
    graphs: Sequence[Data], named: Sequence[tuple[str, ...] | None], titles: Sequence[str]
) -> tuple[str, ...] | None:
    """Number the classes of all graphs consistently by their names, and return the names."""
    silent = [title for title, names in zip(titles, named, strict=True) if names is None]
    if len(silent) == len(named):
        return None
    if silent:
        raise ValueError(
            f"{silent[0]} has no class_names, but other graphs have: it is unknown whether its classes are in "
            "their order. Give each graph a list class_names, or none of them."
        )
    if graphs[0].y.is_floating_point():
        if other := next((title for title, names in zip(titles, named, strict=True) if names != named[0]), None):
            raise ValueError(f"{other} has other class_names of its labels than {titles[0]}: give all the same")
        return named[0]
    numbers: dict[str, int] = {}
    for graph, names in zip(graphs, named, strict=True):
        place_K = torch.tensor([numbers.setdefault(text, len(numbers)) for text in names or ()])
        graph.y = torch.where(graph.y >= 0, place_K[graph.y.clamp(min=0)], graph.y)
    return tuple(numbers)


def _shared(graphs: Sequence[Data], titles: Sequence[str]) -> list[str]:
    """The attributes of nodes that all graphs have, in shapes that go together."""
    shared = set.intersection(*(set(graph.node_attrs()) for graph in graphs)) - {"source_idx", "own_idx", GRAPH}
    for name in sorted(shared):
        kinds = [(graph[name].shape[1:], graph[name].dtype) for graph in graphs]
        if (other := next((index for index, kind in enumerate(kinds) if kind != kinds[0]), None)) is not None:
            warnings.warn(
                f"{titles[other]}: {name} is {kinds[other][1]} of shape {tuple(graphs[other][name].shape)}, that of "
                f"{titles[0]} {kinds[0][1]} of shape {tuple(graphs[0][name].shape)}. It is left out of all graphs; "
                "give it the same shape and type in each to use it.",
                stacklevel=2,
            )
            shared.remove(name)
    return sorted(shared)
