"""New data for a trained model: a file, or what it would hold, in the form of a client's data.

Shape legend: N examples, H labels or numbers of a target.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from fl_lightning.batches.client_data import ClientData
from fl_lightning.batches.client_examples import ClientExamples
from fl_lightning.batches.client_graph import ClientGraph
from fl_lightning.batches.graph_sets import ClientGraphs
from fl_lightning.batches.pairs import ClientPairs
from fl_lightning.data import GraphSetSource, Links, Source
from fl_lightning.data.allocation import user_masks_of
from fl_lightning.data.graph_sets import LoadedGraphs, prepared_graphs
from fl_lightning.data.preparation import Preparation, checked_edges, completed, prepare_graph
from fl_lightning.data.sources.array_file import reading
from fl_lightning.data.sources.base import allow_pickled_graphs
from fl_lightning.data.sources.graph_sets import graphs_by_part
from fl_lightning.data.sources.own_examples import are_examples, rows_of
from fl_lightning.data.sources.parts import has_parts
from fl_lightning.data.split import MASKS
from fl_lightning.data.targets import checked_targets
from fl_lightning.federation import ClientRegistry
from fl_lightning.saved_tensors import load_data

#: What messages call the new data.
NAME = "the new data"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Like:
    """What new data have to be like.

    Attributes:
        client_data: The data of a client of the run.
        registry: The clients of the run.
        source: Where its data come from.
        preparation: How that client's graphs were prepared; components of new graphs are all kept.
    """

    client_data: ClientData
    registry: ClientRegistry
    source: Source
    preparation: Preparation

    @property
    def num_outputs(self) -> int:
        """Outputs that the client's examples can have."""
        return self.registry.outputs_of(self.client_data)

    def targets(self, y: Any, size: int, ignore_label: int | None = None) -> Tensor:
        """The targets, unknown ones included (of classes also ``ignore_label``), in the form of the client's.

        Raises:
            ValueError: They are of another kind or number, or of a class that the run does not have.
        """
        task = self.registry.task
        width = self.client_data.y_N.shape[1:]
        if y is None or self._nothing_known(y := _tensor("y", y), ignore_label):
            return torch.full((size, *width), torch.nan) if width else torch.full((size,), -1)
        y_N = checked_targets(y, size, NAME, ignore_label, given=task.target.name, example=task.example)
        self._check_targets(y_N)
        return y_N

    def _nothing_known(self, y: Tensor, ignore_label: int | None) -> bool:
        unknown = y.isnan() if self.registry.task.target.is_numeric or y.is_floating_point() else y < 0
        return bool((unknown if ignore_label is None else unknown | (y == ignore_label)).all())

    def _check_targets(self, y_N: Tensor) -> None:
        width, kind = self.client_data.y_N.shape[1:], self.registry.task.target.name
        if y_N.shape[1:] != width:
            have = f"{width[0]} {kind}" if width else kind
            raise ValueError(f"{NAME}: y has shape {tuple(y_N.shape)}; the run's clients have {have}")
        if not width and len(y_N) and int(y_N.max()) >= self.num_outputs:
            raise ValueError(
                f"{NAME}: y has class {int(y_N.max())}, but the run's classes are 0 to {self.num_outputs - 1}"
            )

    def roles(self, y_N: Tensor, masks: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a client's data that say what trains, validates and tests, of examples with a known target.

        Args:
            y_N: The targets.
            masks: Those of ``train_mask``, ``val_mask`` and ``test_mask`` that are given, None for others. Without any
                all train; what tests is the rest, if it is not said.

        Raises:
            ValueError: A mask is none, they overlap, or nobody says what trains.
        """
        known_N = self.registry.task.target.strata(y_N) >= 0
        given = {name: self._mask(name, mask, len(known_N)) for name, mask in masks.items() if mask is not None}
        if given and MASKS[0] not in given:
            raise ValueError(f"{NAME} has {' and '.join(given)} without {MASKS[0]}: say what trains as well")
        nothing_N = torch.zeros_like(known_N)
        train_N, val_N = given.get(MASKS[0], known_N), given.get(MASKS[1], nothing_N)
        test_N = given.get(MASKS[2], ~train_N & ~val_N)
        if bool(((train_N & val_N) | (train_N & test_N) | (val_N & test_N)).any()):
            raise ValueError(f"{NAME}: {' and '.join(given)} overlap; every example has one role")
        roles = zip(MASKS, (train_N, val_N, test_N), strict=True)
        return {f"{name}_N": known_N & mask_N for name, mask_N in roles}

    def _mask(self, name: str, mask: Any, size: int) -> Tensor:
        given = _tensor(name, mask)
        is_mask = given.dtype == torch.bool or (
            not given.is_floating_point() and bool(((given == 0) | (given == 1)).all())
        )
        if not is_mask or given.shape != (size,):
            raise ValueError(
                f"{NAME}: {name} is {given.dtype} of shape {tuple(given.shape)}; give true or false for each of {size} "
                f"{self.registry.task.examples}"
            )
        return given.bool()

    def check(self, new: ClientData) -> None:
        """Compare features, what edges carry, and targets.

        Raises:
            ValueError: They differ.
        """
        if new.num_features != self.client_data.num_features:
            raise ValueError(
                f"{NAME} has {new.num_features} features, the run's clients have {self.client_data.num_features}: give "
                "the same, in the same order"
            )
        for key, words in (("has_edge_weights", "edge_weight"), ("num_edge_attributes", "edge_attr")):
            has, had = (each.edge_facts.get(key, 0) for each in (new, self.client_data))
            if has != had:
                raise ValueError(f"{NAME} must have the {words} that the run's graphs have: {had}, not {has}")
        self._check_targets(new.y_N)


def read_new(path: Path, source: Source) -> Any:
    """What a file holds: a graph, a list of graphs, a tensor, or tensors by name.

    Args:
        path: The file: of ``torch.save``, or a table of molecules (``.csv``, ``.csv.gz``).
        source: Where the run's data come from.

    Raises:
        ValueError: It is no such file.
    """
    if not path.is_file():
        raise ValueError(f"there is no file {path}: write one with torch.save(data, {path.name!r})")
    if is_table(path):
        return _described(source).new_graphs(path).graphs
    expected = "a torch_geometric Data, a list of them, or tensors, that loads with weights_only=True"
    with reading(path, expected), allow_pickled_graphs():
        saved = load_data(path)
    if isinstance(saved, list):
        return [_graph_or_given(each) for each in saved]
    return _graph_or_given(saved)


def is_table(path: Path) -> bool:
    """Whether a file is a table, by its name."""
    return path.name.endswith((".csv", ".csv.gz"))


def names_in(path: Path, source: Source) -> tuple[str, ...] | None:
    """The names of the molecules in a table; None of other files."""
    return _described(source).new_graphs(path).names if is_table(path) else None


def _described(source: Source) -> GraphSetSource:
    """The source as one whose graphs may be described by texts.

    Raises:
        ValueError: It is no set of graphs.
    """
    if not isinstance(source, GraphSetSource):
        raise ValueError(f"{NAME} is a table, but {source} has no molecules: give what torch.save has written")
    return source


def _graph_or_given(saved: Any) -> Any:
    return Data.from_dict(saved) if isinstance(saved, dict) and "edge_index" in saved else saved


@functools.singledispatch
def as_client_data(client_data: ClientData, new: Any, like: Like) -> ClientData:
    """New data in the form of a client's.

    Args:
        client_data: The client's, whose class says what is expected: a graph; a list of graphs; rows as a tensor, or
            ``x`` and perhaps ``y`` and masks by name; or a graph whose ``edge_label_index`` (2, P) are the pairs in
            question, and whose ``edge_label_type`` (P,) are their relations, if links have several. Graphs and rows may
            also come as the data module takes a client's, with a split of their own or without.
        new: What is given; ``y`` may be missing, or unknown for some examples.
        like: What it has to be like.

    Raises:
        ValueError: It is something else, or does not fit.
    """
    raise ValueError(f"there are no new data for {type(client_data).__name__}")


@as_client_data.register
def _(client_data: ClientGraph, new: Any, like: Like) -> ClientData:
    graph = _graph(new)
    plain = _prepared(graph, like.preparation)
    y_N = like.targets(graph.get("y"), int(plain.num_nodes or 0), like.preparation.ignore_label)
    return ClientGraph(
        name="new",
        num_outputs=client_data.num_outputs,
        y_N=y_N,
        cross_edge_2X=torch.empty(2, 0, dtype=torch.int64) if like.registry.has_cross_edges else None,
        **like.roles(y_N, _masks_in(graph)),
        **_edges_of(plain),
    )


@as_client_data.register
def _(client_data: ClientGraphs, new: Any, like: Like) -> ClientData:
    role_M = None
    if has_parts(new):
        loaded = graphs_by_part(new)
        new, role_M = loaded.graphs, loaded.roles
    if not isinstance(new, Data | Tensor | str | Mapping) and hasattr(new, "__len__") and not len(new):
        raise ValueError(f"{NAME} has no graphs: give at least one")
    if not isinstance(new, Data | Tensor | str | Mapping) and all(isinstance(each, str) for each in new):
        new = _described(like.source).new_graphs(list(new)).graphs
    if not isinstance(new, Sequence) or not all(isinstance(each, Data) for each in new):
        raise ValueError(f"{NAME} is {_said(new)}: give a list of graphs, torch_geometric.data.Data")
    given = [each.get("y") for each in new]
    y = None if all(each is None for each in given) else _stacked(given, client_data.y_N)
    y_N = like.targets(y, len(new))
    marks = {name: [each.get(name) for each in new] for name in MASKS}
    masks = {name: None if None in each else [bool(mark) for mark in each] for name, each in marks.items()}
    roles = like.roles(y_N, masks if role_M is None else user_masks_of(role_M))
    blank = [Data(**{**each.to_dict(), "y": torch.zeros(1)}) for each in new]
    loaded = LoadedGraphs(graphs=blank)
    if client_data.max_degree is None and blank[0].get("x") is None:
        raise ValueError(f"{NAME} has no x: give features of each node, as the run's graphs have them")
    whole_graphs = dataclasses.replace(like.preparation, largest_component=False)
    prepared = prepared_graphs(loaded, whole_graphs, NAME, client_data.max_degree)
    width = client_data.union.num_features if like.registry.own_inputs else None
    own, given_width = client_data.own_width or width, prepared.num_features
    if width and given_width != own and (given_width != width or prepared.union.x[:, own:].any()):  # zeros may follow
        raise ValueError(f"{NAME} has {given_width} features, the client's graphs {own}: give the same, in that order")
    whole = torch.arange(len(new))
    made = prepared.client(
        "new", whole, y_N, torch.zeros(len(new)), num_features=width, num_outputs=client_data.num_outputs
    )
    return dataclasses.replace(made, **roles)


@as_client_data.register
def _(client_data: ClientPairs, new: Any, like: Like) -> ClientData:
    graph = _graph(new)
    if graph.get("edge_label_index") is None:
        raise ValueError(f"{NAME} has no edge_label_index: give the pairs of nodes in question, int64 (2, pairs)")
    if not isinstance(like.source, Links) or like.source.features == "identity":
        raise ValueError(
            "the run's nets have an embedding for each node of their graph (features: identity), and none for new nodes"
        )
    if like.source.features == "structure":
        graph = completed(graph, ("x",))
    plain = _prepared(graph, like.preparation)
    num_nodes = int(plain.num_nodes or 0)
    pairs = checked_edges(graph.edge_label_index, num_nodes, NAME, "edge_label_index")
    nobody = torch.zeros(num_nodes, dtype=torch.bool)
    masks: dict[str, Any] = dict.fromkeys(("train_mask_N", "val_mask_N", "test_mask_N"), nobody)
    sending = ClientGraph(name="new", y_N=torch.full((num_nodes,), -1), **masks, **_edges_of(plain))
    pair_P2 = pairs.sort(dim=0).values.t().contiguous()
    y_P1 = _linked(graph.get("edge_label"), len(pair_P2))
    roles = like.roles(y_P1, _masks_in(graph))
    known_2E = torch.cat([plain.edge_index, pair_P2[roles["train_mask_N"]].t()], dim=1)
    _check_hidden(pair_P2[(roles["val_mask_N"] | roles["test_mask_N"]) & (y_P1[:, 0] == 1)], known_2E, num_nodes)
    without_M2 = pair_P2[roles["train_mask_N"] & (y_P1[:, 0] == 0)]
    return ClientPairs(
        name="new",
        graph=like.source.described(sending, num_nodes),
        pair_P2=pair_P2,
        candidate_M2=without_M2 if len(without_M2) else pair_P2[:1],  # any, as it then replaces none
        relation_P=_relations_of(graph, len(pair_P2), like) if client_data.relation_P is not None else None,
        y_N=y_P1,
        **roles,
    )


@as_client_data.register
def _(client_data: ClientExamples, new: Any, like: Like) -> ClientData:
    if are_examples(new):
        rows, y, role_N = rows_of(NAME, new)
        given: Mapping[str, Any] = {"x": rows, "y": y, **({} if role_N is None else user_masks_of(role_N))}
    else:
        given = new if isinstance(new, Mapping) else {"x": new}
    if strangers := sorted(map(str, set(given) - {"x", "y", *MASKS})):
        raise ValueError(f"{NAME} has {strangers[0]!r}: give x, y and {', '.join(MASKS)} by these names")
    x = _tensor("x", given["x"]).float() if isinstance(given.get("x"), np.ndarray | Tensor) else None
    if x is None or x.dim() < 2 or not len(x) or not bool(x.isfinite().all()):  # in the nets' type
        raise ValueError(f"{NAME} is {_said(new)}: give finite numbers x, a row for each example, or x and y by name")
    y_N = like.targets(given.get("y"), len(x))
    return ClientExamples(name="new", x_NX=x, y_N=y_N, **like.roles(y_N, {n: given.get(n) for n in MASKS}))


def _masks_in(graph: Data) -> dict[str, Any]:
    return {name: graph.get(name) for name in MASKS}


def _linked(edge_label: Any, num_pairs: int) -> Tensor:
    """Whether each pair is linked, float32 (P, 1); nan where that is not known."""
    if edge_label is None:
        return torch.full((num_pairs, 1), torch.nan)
    y_P = _tensor("edge_label", edge_label)
    if y_P.shape not in ((num_pairs,), (num_pairs, 1)) or not bool(((y_P == 0) | (y_P == 1) | y_P.isnan()).all()):
        raise ValueError(
            f"{NAME}: edge_label is {_said(y_P)}; give 1, 0 or nan (unknown) for each of {num_pairs} pairs"
        )
    return y_P.float().reshape(num_pairs, 1)


def _check_hidden(scored_P2: Tensor, known_2E: Tensor, num_nodes: int) -> None:
    """Refuse links to validate or to test on along which messages are sent, or which are trained on."""
    known_E, scored_P = (ends.amin(0) * num_nodes + ends.amax(0) for ends in (known_2E, scored_P2.t()))
    if bool((seen_P := torch.isin(scored_P, known_E)).any()):
        raise ValueError(
            f"{NAME}: {int(seen_P.sum())} links that are tested or validated on (edge_label 1, train_mask false) are "
            f"edges of the graph or train, such as {tuple(scored_P2[seen_P][0].tolist())}: take them out of both"
        )


def _relations_of(graph: Data, num_pairs: int, like: Like) -> Tensor:
    """The relation in question of each pair, int64 (P,)."""
    given, count = graph.get("edge_label_type"), like.registry.task.plain["num_relations"]
    relation_P = _tensor("edge_label_type", given) if isinstance(given, Tensor) else torch.empty(0)
    are_numbers = relation_P.shape == (num_pairs,) and not relation_P.is_floating_point()
    if are_numbers and bool(((relation_P >= 0) & (relation_P < count)).all()):
        known_P: Tensor = relation_P.long()
        return known_P
    raise ValueError(
        f"{NAME} has no edge_label_type with a relation from 0 to {count - 1} for each of {num_pairs} pairs: give the "
        "relations in question, int64 (pairs,)"
    )


def numbers_of(new: ClientData) -> Tensor:
    """The user's numbers of the examples: their places, or of pairs both nodes."""
    return new.pair_P2 if isinstance(new, ClientPairs) else torch.arange(new.size)


def _tensor(name: str, given: Any) -> Tensor:
    """What is given as a tensor of real numbers; others are refused."""
    try:
        made = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{NAME}: {name} is {_said(given)} that makes no tensor ({error}): give numbers") from error
    if made.layout != torch.strided or made.is_complex() or made.is_meta:
        raise ValueError(f"{NAME}: {name} is sparse, complex or without values: give a dense tensor of real numbers")
    return made


def _graph(new: Any) -> Data:
    if not isinstance(new, Data):
        raise ValueError(f"{NAME} is {_said(new)}: give one graph, a torch_geometric.data.Data")
    return new


def _prepared(graph: Data, preparation: Preparation) -> Data:
    """A graph without its targets, as the run's are prepared."""
    blank = Data(**{**graph.to_dict(), "y": torch.zeros(int(graph.num_nodes or 0), dtype=torch.int64), "task": None})
    return prepare_graph(blank, dataclasses.replace(preparation, largest_component=False), NAME, may_lack_edges=True)


def _edges_of(plain: Data) -> dict[str, Any]:
    """Features and edges of a prepared graph by the names of a client's."""
    return {
        "x_NF": plain.x,
        "edge_index_2E": plain.edge_index,
        "node_idx_N": torch.arange(len(plain.x)),
        "edge_weight_E": plain.get("edge_weight"),
        "edge_attr_EK": plain.get("edge_attr"),
    }


def _stacked(given: Sequence[Any], y_N: Tensor) -> Tensor:
    """The targets of graphs, some of which may have none."""
    width = y_N.shape[1] if y_N.dim() > 1 else 1
    unknown = torch.full((width,), torch.nan if y_N.dim() > 1 else -1.0)
    rows = [unknown if each is None else _tensor("y", each).reshape(-1).float() for each in given]
    if strangers := [index for index, row in enumerate(rows) if len(row) != width]:
        raise ValueError(f"{NAME}: graph {strangers[0]} has {len(rows[strangers[0]])} targets; the run's have {width}")
    stacked = torch.stack(rows)
    return stacked if y_N.dim() > 1 else stacked.flatten()


def _said(new: Any) -> str:
    return f"{type(new).__name__} of shape {tuple(new.shape)}" if isinstance(new, Tensor) else f"a {type(new).__name__}"
