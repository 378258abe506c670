"""Prepares a raw graph in the form that all federated methods here share, and refuses an invalid one.

Shape legend: N nodes, F features, E directed edges.
"""

import copy
import warnings
from collections.abc import Collection
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.transforms import LargestConnectedComponents

from fl_lightning.data.edge_data import checked_attributes, checked_weights, merged_edges
from fl_lightning.data.settings import MAX_COUNT, check_count, check_flag
from fl_lightning.data.targets import checked_targets

#: What may not be a sparse tensor.
_WHOLE = ("edge_index", "edge_weight", "edge_attr", "y")


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """How a raw graph is prepared before it is partitioned.

    Attributes:
        normalize_features: Divide each node's features by their sum, unless that is 0 (PyG's ``NormalizeFeatures``
            subtracts the smallest feature of the graph first, which differs from client to client).
        largest_component: Keep only the largest connected component.
        undirected: Add the missing direction of every edge.
        ignore_label: A label that means none, as negative ones do, such as 255; None for no other.

    Raises:
        ValueError: A setting is neither True nor False, or ``ignore_label`` is not an integer.
    """

    normalize_features: bool = True
    largest_component: bool = True
    undirected: bool = True
    ignore_label: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "ignore_label":
                check_flag(field.name, getattr(self, field.name))
        if self.ignore_label is not None:
            check_count("ignore_label", self.ignore_label, least=-MAX_COUNT)

    def identity(self) -> dict[str, Any]:
        """The settings as JSON-ready values; ``ignore_label`` only if it is set, since older versions lack it."""
        return {name: value for name, value in asdict(self).items() if name != "ignore_label" or value is not None}


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """What the largest connected component leaves out of a graph, counted as the source has it.

    Attributes:
        num_nodes: Nodes.
        num_edges: Directed edges.
        num_classes: Classes that no node is left of.
    """

    num_nodes: int = 0
    num_edges: int = 0
    num_classes: int = 0


def completed(graph: Data, keys: Collection[str]) -> Data:
    """A graph with features that say nothing and a single class, where ``x`` and ``y`` are named and missing."""
    graph, number = copy.copy(graph), graph.num_nodes or 0
    if "x" in keys and graph.get("x") is None:
        graph.x = torch.ones(number, 1)
    if "y" in keys and graph.get("y") is None:
        graph.y = torch.zeros(number, dtype=torch.int64)
    return graph


def prepare_graph(
    data: Data,
    preparation: Preparation,
    name: str = "the graph",
    *,
    warns: bool = False,
    may_lack_edges: bool = False,
) -> Data:
    """Return a copy of ``data`` with clean edges, float32 features, and int64 classes or float32 targets.

    Self-loops and duplicate edges always go: GNN layers add their own loops, and METIS allows neither. Of duplicate
    edges the weights are added and the attributes averaged; where ``undirected`` makes one of two directions, both are
    averaged, so that a graph that has both already keeps them.

    Args:
        data: Graph with ``x`` (num_nodes, num_features), ``edge_index`` (2, num_edges) and ``y``: classes 0, 1, ...
            (num_nodes) or (num_nodes, 1), negative or nan where a node has none; labels, a matrix of 0 and 1, or
            numbers, both nan where one is missing. ``edge_weight`` (num_edges), not negative, and ``edge_attr``
            (num_edges, num_attributes) are carried along.
        preparation: The optional steps.
        name: What messages call the graph.
        warns: Warn where ``undirected`` adds edges, and of what ``largest_component`` drops.
        may_lack_edges: Take a graph without any edge, as one of several may be.

    Returns:
        A graph whose node attributes (masks, ``membership`` ...) follow the kept nodes; ``source_idx`` is the number
        that each of them has in ``data``, int64.

    Raises:
        ValueError: Features, edges or targets are missing or unsound, or weights or attributes of edges are; names the
            first place and the remedy.

    Warns:
        UserWarning: Edges are added or nodes dropped, if it is asked for; self-loops with weights or attributes are
            dropped.
    """
    data = _plain(data, name)
    prepared = _checked_copy(data, name, preparation.ignore_label)
    num_nodes = prepared.num_nodes
    _set_edges(prepared, data, preparation.undirected, name, warns, may_lack_edges)
    prepared.source_idx = torch.arange(num_nodes)
    if preparation.largest_component:
        prepared = LargestConnectedComponents()(prepared)
        if warns and (left_out := dropped(data, prepared, preparation)).num_nodes:
            warnings.warn(
                f"{name}: largest_component drops {left_out.num_nodes:,} of {num_nodes:,} nodes, "
                f"{left_out.num_edges:,} of {data.edge_index.shape[1]:,} edges and {left_out.num_classes} classes; set "
                "it to false on the source to keep them.",
                stacklevel=2,
            )
    if preparation.normalize_features:
        _check_not_negative(prepared, name)
        sum_N1 = prepared.x.sum(dim=1, keepdim=True)
        prepared.x = prepared.x / sum_N1.masked_fill(sum_N1 == 0, 1.0)
    return prepared


def dropped(data: Data, prepared: Data, preparation: Preparation) -> Dropped:
    """Count what the raw graph has and the prepared one lacks; a joined graph says itself what its parts lack."""
    if isinstance(known := data.get("dropped"), Dropped):
        return known
    kept_N = torch.zeros(data.x.shape[0], dtype=torch.bool)
    kept_N[prepared.source_idx] = True
    if bool(kept_N.all()):
        return Dropped()
    return Dropped(
        num_nodes=int((~kept_N).sum()),
        num_edges=int((~kept_N[data.edge_index[0].long()]).sum()),
        num_classes=len(classes_in(data, prepared, preparation) - classes_in(prepared, prepared, preparation)),
    )


def classes_in(data: Data, prepared: Data, preparation: Preparation) -> set[int]:
    """The classes that occur in a raw graph, or in the prepared one; none where there are labels or numbers."""
    y_N = data.y.flatten()[: 0 if prepared.y.is_floating_point() else None]
    return set(y_N[y_N >= 0].long().unique().tolist()) - {preparation.ignore_label}


def names_of_nodes(data: Data, name: str = "the graph") -> tuple[str, ...] | None:
    """Return a raw graph's ``node_names``, if it has any.

    Raises:
        ValueError: They are not a text for each node.
    """
    names = data.get("node_names")
    if names is None:
        return None
    if not isinstance(names, list | tuple) or len(names) != len(data.x) or not all(isinstance(n, str) for n in names):
        raise ValueError(f"{name}: node_names must be a list with a string for each of the {len(data.x)} nodes.")
    return tuple(names)


def names_of_classes(data: Data, num_classes: int, name: str = "the graph") -> tuple[str, ...] | None:
    """Return a raw graph's ``class_names``, if it has any.

    Args:
        data: The raw graph.
        num_classes: Classes that its labels need.
        name: What error messages call the graph.

    Raises:
        ValueError: They are not a distinct string for each class.
    """
    names = data.get("class_names")
    if names is None:
        return None
    if not isinstance(names, list | tuple) or len(names) < num_classes or not all(isinstance(n, str) for n in names):
        raise ValueError(f"{name}: class_names must be a list with a string for each of the {num_classes} classes.")
    if twice := sorted({text for text in names if names.count(text) > 1}):
        raise ValueError(f"{name}: class_names has {twice[0]!r} more than once; each class needs its own name.")
    return tuple(names)


def check_num_classes(
    y_N: Tensor, class_names: tuple[str, ...] | None, name: str = "the graph", example: str = "node"
) -> None:
    """Refuse labels that are probably not class numbers: more classes than labeled examples, and no names for them.

    Args:
        y_N: The classes, int64 (N,); -1 for none.
        class_names: What they are called.
        name: What messages call the data.
        example: What messages call what has a class.

    Raises:
        ValueError: There are.
    """
    num_labeled, num_classes = int((y_N >= 0).sum()), int(y_N.max()) + 1
    if num_classes > num_labeled and class_names is None:
        of_nodes = example == "node"
        are_numbers = (
            "`data.task = 'numbers'`" if of_nodes else "`data.task = 'numbers'` of each graph, `kind` of a table"
        )
        remedies = (
            f"{'Set ignore_label on the source' if of_nodes else 'Leave it out'} if that means no label; number the "
            f"classes 0, 1, ...{', e.g. by `data.y = data.y.unique(return_inverse=True)[1]`' if of_nodes else ''}; if "
            f"these are numbers to predict, say so ({are_numbers}); or, if there really are that many classes, name "
            f"them by a list `{'data' if of_nodes else 'source'}.class_names`."
        )
        raise ValueError(
            f"{name}: the label of {example} {int(y_N.argmax())} is {num_classes - 1}, which makes {num_classes} "
            f"classes of {num_labeled} labeled {example}s. {remedies}"
        )


def _plain(data: Data, name: str) -> Data:
    """A copy whose tensors hold plain numbers in memory, without gradients or special layouts."""
    plain = copy.copy(data)
    for key, tensor in data.to_dict().items():
        if not isinstance(tensor, Tensor):
            continue
        if tensor.is_meta:
            raise ValueError(f"{name}: {key} is a meta tensor, which holds no numbers; save the graph with its values.")
        if tensor.is_quantized:
            raise ValueError(f"{name}: {key} is quantized; save numbers, by `data.{key} = data.{key}.dequantize()`.")
        if tensor.layout != torch.strided and (key in _WHOLE or key.endswith("mask")):
            raise ValueError(f"{name}: {key} is sparse; save it dense, by `data.{key} = data.{key}.to_dense()`.")
        plain[key] = tensor.detach().cpu()
    return plain


def _checked_copy(data: Data, name: str, ignore_label: int | None = None) -> Data:
    """Copy the node attributes, with features and labels in their final types."""
    missing = [key for key in ("x", "edge_index", "y") if data.get(key) is None]
    if "edge_index" in missing and data.get("adj_t") is not None:
        raise ValueError(
            f"{name} has adj_t and no edge_index: leave out the transform ToSparseTensor, or set data.edge_index = "
            "torch.stack(data.adj_t.t().coo()[:2]), of a sparse tensor of PyTorch data.adj_t.t().to_sparse_coo()"
            ".indices()"
        )
    if missing:
        raise ValueError(f"{name} has no {', '.join(missing)}: node features, edges and labels are needed, as tensors.")
    for key in ("x", "edge_index", "y"):
        _check_tensor(data[key], key, name)
    _check_pairs(data.edge_index, "edge_index", name)  # PyG counts nodes by it
    x_NF = _checked_features(data, name)
    given = data.get("task")
    if given not in (None, "classes", "labels", "numbers"):
        raise ValueError(f"{name}: task is {given!r}; it says what y holds: classes, labels or numbers.")
    y_N = checked_targets(data.y, len(x_NF), name, ignore_label, given)
    keys = [key for key in data.node_attrs() if key not in ("x", "y") and isinstance(data[key], Tensor)]
    attributes: dict[str, Any] = {key: data[key] for key in keys}
    return Data(x=x_NF, y=y_N, **attributes, **({} if given is None else {"task": given}))


def _check_tensor(value: Any, key: str, name: str) -> None:
    if isinstance(value, Tensor):
        return
    items = value.tolist() if hasattr(value, "tolist") else value
    if key == "y" and isinstance(items, list | tuple) and items and all(isinstance(item, str) for item in items):
        raise ValueError(
            f"{name}: the labels y are strings such as {items[0]!r}; number them: `names = sorted(set(labels))`, "
            "`data.y = torch.tensor([names.index(label) for label in labels])`, `data.class_names = names`."
        )
    raise ValueError(f"{name}: {key} is a {type(value).__name__}; give a tensor: `data.{key} = torch.as_tensor(...)`.")


def _checked_features(data: Data, name: str) -> Tensor:
    x_NF: Tensor = data.x
    if x_NF.dim() != 2 or 0 in x_NF.shape or x_NF.is_complex():
        raise ValueError(
            f"{name}: the features x are {x_NF.dtype} of shape {tuple(x_NF.shape)}; give a number or more for each "
            "node, shape (num_nodes, num_features): a single feature as `data.x = data.x[:, None]`."
        )
    check_num_nodes(data, name)
    x_NF = _dense(x_NF, name).float()
    if not bool(x_NF.sum().isfinite()) and not bool((finite_NF := x_NF.isfinite()).all()):  # a sum may overflow
        node, feature = (~finite_NF).nonzero()[0].tolist()
        raise ValueError(
            f"{name}: feature {feature} of node {node} is {float(data.x[node].to_dense()[feature])}, which no float32 "
            "holds; replace what is not finite, e.g. by `data.x.nan_to_num_()`, and scale what is too large."
        )
    return x_NF


def _dense(x_NF: Tensor, name: str) -> Tensor:
    if x_NF.layout == torch.strided:
        return x_NF
    try:
        return x_NF.to_dense()
    except (RuntimeError, MemoryError) as error:  # of the allocator
        raise ValueError(
            f"{name}: x is sparse, and {tuple(x_NF.shape)} numbers do not fit into memory; choose fewer features."
        ) from error


def _check_pairs(edge_index_2E: Tensor, key: str, name: str) -> None:
    kind = f"{name}: {key} is {edge_index_2E.dtype} of shape {tuple(edge_index_2E.shape)}; it must hold"
    if edge_index_2E.dim() != 2 or edge_index_2E.shape[0] != 2:
        raise ValueError(f"{kind} a column (source, target) for each edge, shape (2, num_edges): transpose it?")
    if edge_index_2E.is_floating_point() or edge_index_2E.is_complex() or edge_index_2E.dtype == torch.bool:
        raise ValueError(f"{kind} numbers of nodes: `data.{key} = data.{key}.long()`.")


def check_num_nodes(data: Data, name: str) -> None:
    """Refuse a graph whose number of nodes, given or by its tensors, is none.

    Raises:
        ValueError: It is no number, negative, or not that of the rows of ``x``.
    """
    num_nodes, x_NF = data.num_nodes, data.get("x")
    if not isinstance(num_nodes, int):
        kind = type(data.get("num_nodes")).__name__
        raise ValueError(f"{name}: num_nodes is a {kind}; leave it out, x says how many there are.")
    if x_NF is not None and len(x_NF) != num_nodes:
        raise ValueError(f"{name}: x has {len(x_NF)} rows for {num_nodes} nodes; give a row for each node.")
    if num_nodes < 0:
        raise ValueError(f"{name}: num_nodes is {num_nodes}; give the number of its nodes.")


def checked_edges(edge_index_2E: Any, num_nodes: int, name: str, key: str = "edge_index") -> Tensor:
    """Return the edges of a graph as int64 (2, E).

    Args:
        edge_index_2E: The edges.
        num_nodes: Nodes of the graph.
        name: What messages call the graph.
        key: What the graph calls the edges.

    Raises:
        ValueError: They are no pairs of its nodes.
    """
    _check_tensor(edge_index_2E, key, name)
    _check_pairs(edge_index_2E, key, name)
    if edge_index_2E.layout != torch.strided:
        raise ValueError(f"{name}: {key} is sparse; save it dense, by `data.{key} = data.{key}.to_dense()`.")
    edges_2E: Tensor = edge_index_2E.detach().cpu().long()
    if edges_2E.numel() and not 0 <= int(edges_2E.min()) <= int(edges_2E.max()) < num_nodes:
        edge = int(((edges_2E < 0) | (edges_2E >= num_nodes)).any(dim=0).nonzero()[0])
        raise ValueError(
            f"{name}: edge {edge} joins nodes {edges_2E[:, edge].tolist()}, but the nodes are 0 to "
            f"{num_nodes - 1}; correct {key}, or give x and y of all nodes."
        )
    return edges_2E


def _set_edges(prepared: Data, data: Data, undirected: bool, name: str, warns: bool, may_lack_edges: bool) -> None:
    """Give the prepared graph its edges, without self-loops and duplicates, with weights and attributes."""
    num_nodes = prepared.num_nodes
    given_2E = checked_edges(data.edge_index, num_nodes, name)
    values = {"edge_weight": checked_weights(data, name), "edge_attr": checked_attributes(data, name)}
    num_loops = int((given_2E[0] == given_2E[1]).sum())
    if num_loops == given_2E.shape[1] and not may_lack_edges:
        raise ValueError(f"{name} has no edges (self-loops do not count): add some; federated graph methods need them.")
    prepared.edge_index, carried, num_added = merged_edges(given_2E, values, num_nodes, undirected=undirected)
    prepared.update(carried)
    if carried and num_loops:
        warnings.warn(
            f"{name}: {num_loops:,} self-loops are dropped with their {' and '.join(carried)}; layers that need loops "
            "add their own, of weight 1.",
            stacklevel=2,
        )
    if num_added and warns:
        num_before = prepared.edge_index.shape[1] - num_added
        warnings.warn(
            f"{name}: undirected adds the missing direction of {num_added:,} of {num_before:,} edges; set it to "
            "false on the source to keep the directions.",
            stacklevel=2,
        )


def _check_not_negative(prepared: Data, name: str) -> None:
    """Refuse negative features, whose sum may be 0 or negative."""
    if float(prepared.x.min()) < 0:
        row, feature = (prepared.x < 0).nonzero()[0].tolist()
        raise ValueError(
            f"{name}: normalize_features is for nonnegative features, such as word counts, but "
            f"feature {feature} of node {int(prepared.source_idx[row])} is {float(prepared.x[row, feature]):g}. Set "
            "normalize_features to false on the source."
        )
