"""What a user's ``forward`` gets in the place of tensors, so that it computes on a stack of clients.

Shape legend: N nodes of one client, E edges, F features, D width, G graphs (with padding), if the client has several.
On a stack everything has a leading C.
"""

from collections.abc import Callable
from functools import cached_property
from types import SimpleNamespace
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_lightning.batches.graph_sets import GraphSetBatch
from fl_lightning.batches.graphs import GraphBatch
from fl_lightning.kernels.block_sparse import block_matmul
from fl_lightning.kernels.edge_products import edge_maxima, edge_sums
from fl_lightning.kernels.incidence import Incidence, as_often
from fl_lightning.kernels.linear import linear
from fl_lightning.models.output import NetOutput
from fl_lightning.models.stacked.functions import NotStackable, StackedFunctions
from fl_lightning.models.stacked.operators import edge_operator, edge_weights


class Features:
    """The features of a batch, sparse or dense, of which linear layers need no dense copy.

    Args:
        batch: The batch.
        after: Applied to what a linear map makes of the features; it must commute with linear maps of them.
    """

    def __init__(self, batch: GraphBatch, after: Callable[[Tensor], Tensor] | None = None) -> None:
        self.batch, self.after = batch, after

    @property
    def is_plain(self) -> bool:
        """Whether nothing is applied to the features."""
        return self.after is None

    def linear(self, weight_DF: Tensor, bias_D: Tensor | None = None) -> Tensor:
        """X Wᵀ + b, (N, D), where X is what ``after`` makes of the features."""
        result_ND = self.batch.transform(weight_DF.mT)
        if self.after is not None:
            result_ND = self.after(result_ND)
        return result_ND if bias_D is None else result_ND + bias_D.unsqueeze(-2)

    def then(self, after: Callable[[Tensor], Tensor]) -> "Features":
        """The features with something more applied to them, which commutes with linear maps."""
        before = self.after
        return Features(self.batch, after if before is None else lambda z_ND: after(before(z_ND)))

    @cached_property
    def dense(self) -> Tensor:
        """As a tensor (N, F)."""
        batch = self.batch
        x_NF = batch.x
        if x_NF is None:
            assert batch.sparse_x is not None
            width = batch.sparse_x.matrix.shape[1] // batch.sparse_x.num_blocks
            one_FF = torch.eye(width, dtype=batch.dtype, device=batch.key.device)
            x_NF = batch.transform(one_FF)
        return x_NF if self.after is None else self.after(x_NF)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Any function of torch gets the dense features."""
        return func(*map(as_dense, args), **{name: as_dense(value) for name, value in (kwargs or {}).items()})

    def __getattr__(self, name: str) -> Any:
        """Everything else is an attribute of the dense features."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dense, name)


def _on_dense(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self.dense, name)(*map(as_dense, args))


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "matmul", "pow", "neg"):
    setattr(Features, f"__{_name}__", _on_dense(f"__{_name}__"))
for _name in ("getitem", "len", "gt", "ge", "lt", "le", "eq", "ne"):
    setattr(Features, f"__{_name}__", _on_dense(f"__{_name}__"))


def as_dense(value: Any) -> Any:
    """Features as a tensor, also in a list or a tuple; everything else as it is."""
    if isinstance(value, Features):
        return value.dense
    if isinstance(value, (list, tuple)) and any(isinstance(each, Features) for each in value):
        return type(value)(map(as_dense, value))
    return value


class StackedEdges:
    """The edges of a batch in the place of ``edge_index``: what message passing needs.

    Args:
        batch: The batch.

    Attributes:
        weight: Weights of the edges (E,), in the order of ``batch.edges``; None if they have none.
        attr: Their attributes (E, K), likewise.
    """

    def __init__(self, batch: GraphBatch) -> None:
        self.batch = batch
        self.owner = batch.node_mask
        self.weight: Tensor | None = None
        self.attr: Tensor | None = None
        if batch.links is not None and batch.has_edge_weights:
            value = batch.links.derived(edge_weights, batch.adjacency)
            self.weight = self.incidence.values(value, owner=self.owner).squeeze(-1).to(batch.dtype)
        if batch.edge_operator.entries is not None:
            assert self.incidence.attributes is not None
            self.attr = self.incidence.values(self.incidence.attributes, owner=self.owner).to(batch.dtype)

    @property
    def incidence(self) -> Incidence:
        """From nodes to edges and back."""
        return self.batch.edge_operator.derived(Incidence)

    def sum(self, z_ND: Tensor, weight_E: Tensor | None = None) -> Tensor:
        """Σ over the edges that lead to each node of weight (None: 1) times value of the other end, (N, D)."""
        if weight_E is None or weight_E is self.weight:
            operator = edge_operator(self.batch, weighted=weight_E is not None)
            return block_matmul(operator, z_ND, owner=self.owner)
        return self.weighted(weight_E.unsqueeze(-1), z_ND.unsqueeze(-2)).squeeze(-2)

    def weighted(self, weight_EH: Tensor, z_NHD: Tensor) -> Tensor:
        """The same with weights and values of several heads, (N, H, D)."""
        weight_HE = as_often(self.batch.edge_operator, weight_EH.movedim(-1, 0), owner=self.owner)
        sums = edge_sums(self.batch.edges, weight_HE, z_NHD.movedim(-2, 0), owner=self.owner)
        return sums.movedim(0, -2)

    def sources(self, x_ND: Tensor) -> Tensor:
        """What the node that each edge comes from has, (E, D)."""
        return self.incidence.sources(x_ND, owner=self.owner)

    def targets(self, x_ND: Tensor) -> Tensor:
        """What the node that each edge leads to has, (E, D)."""
        return self.incidence.targets(x_ND, owner=self.owner)

    def reduce(self, message_ED: Tensor, how: str) -> Tensor:
        """Sum, mean or maximum over the edges that lead to each node, (N, D); 0 where there are none.

        The gradient of a maximum is shared by the edges that have it, as in PyG.
        """
        if how == "max":
            most_ND = self.maxima(message_ED.detach())
            most_ND = torch.where(most_ND == -torch.inf, 0.0, most_ND)
            has_ED = (message_ED.detach() == self.targets(most_ND)).to(message_ED)
            count_ND = self.incidence.totals(has_ED, owner=self.owner).clamp(min=1)
            message_ED = message_ED * has_ED / self.targets(count_ND).clamp(min=1)
        total_ND = self.incidence.totals(message_ED, owner=self.owner)
        return self.mean(total_ND) if how == "mean" else total_ND

    def mean(self, total_ND: Tensor) -> Tensor:
        """A sum over edges divided by their number."""
        return total_ND / self.batch.degree.clamp(min=1).to(total_ND.dtype).unsqueeze(-1)

    def maxima(self, value_ED: Tensor) -> Tensor:
        """The greatest value of the edges that lead to each node, without gradient, (N, D); -inf without edges."""
        return edge_maxima(self.batch.edges, value_ED.movedim(-1, 0), owner=self.owner).movedim(0, -1)

    def aggregate(self, x_ND: Tensor, how: str, weight_E: Tensor | None = None) -> Tensor:
        """Sum, mean or maximum of weight (None: 1) times value of the other end, (N, D)."""
        if how != "max":
            total_ND = self.sum(x_ND, weight_E)
            return self.mean(total_ND) if how == "mean" else total_ND
        message_ED = self.sources(x_ND)
        return self.reduce(message_ED if weight_E is None else message_ED * weight_E.unsqueeze(-1), how)

    def _refuse(self, what: str) -> NoReturn:
        raise NotStackable(f"it reads edge_index ({what})")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        """No function of torch is known for the edges of a stack."""
        raise NotStackable(f"it reads edge_index ({getattr(func, '__name__', func)})")

    def __getattr__(self, name: str) -> NoReturn:
        """Nor is anything else."""
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(name)

    def __getitem__(self, index: Any) -> NoReturn:
        """Nor an index."""
        self._refuse("by index")

    def __iter__(self) -> NoReturn:
        """Nor unpacking."""
        self._refuse("by unpacking it")


def plain_graphs(batch: GraphSetBatch) -> SimpleNamespace:
    """A batch of one client in the form of PyG's layers: ``x``, ``edge_index`` and others, without padding."""
    edges, ends = StackedEdges(batch), batch.edges
    num_edges = len(ends.row)
    return SimpleNamespace(
        x=Features(batch).dense[batch.node_mask],
        edge_index=torch.stack([ends.column, ends.row]),
        edge_weight=None if edges.weight is None else edges.weight[:num_edges],
        edge_attr=None if edges.attr is None else edges.attr[:num_edges],
        batch=batch.graph_of[batch.node_mask],
        batch_size=int(batch.example_mask.sum()),
    )


class StackedGraph(StackedFunctions):
    """A batch in the place of a client's graph, and the functions of torch that mind stacks, padding and keys.

    As a context it replaces ``linear``, ``dropout``, ``batch_norm`` and ``layer_norm`` of ``torch.nn.functional``.

    Args:
        batch: The batch of one client, also under ``vmap``, or a stack.
        has_dropout: Whether dropout drops anything in training.

    Attributes:
        x: The features.
        edge_index: The edges.
        edge_weight: The weights of edges (E,), or None.
        edge_attr: Their attributes (E, K), or None.
        batch: The graph of each node, int64 (N,), if there are several: padding belongs to graphs of its own, which are
            the last, so that what a module computes of graphs is right for the others.
        batch_size: How many graphs there are with those, never as many as nodes with padding.
    """

    def __init__(self, batch: GraphBatch, *, has_dropout: bool = True) -> None:
        super().__init__(batch, has_dropout=has_dropout)
        self._data = batch
        self.x = Features(batch)
        self.edge_index = StackedEdges(batch)
        self.edge_weight, self.edge_attr = self.edge_index.weight, self.edge_index.attr
        self.batch: Tensor | None = None
        self.batch_size = 1
        if isinstance(batch, GraphSetBatch):
            num_graphs = batch.num_nodes.shape[-1]
            self.batch = torch.where(batch.node_mask, batch.graph_of, num_graphs)
            self.batch_size = num_graphs + (2 if num_graphs + 1 == batch.node_mask.shape[-1] else 1)

    @staticmethod
    def current() -> "StackedGraph":
        """The graph of the forward pass that is under way."""
        return _CURRENT[-1]

    def __enter__(self) -> "StackedGraph":
        """Begin a forward pass."""
        _CURRENT.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """End it."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _CURRENT.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, or what stands in for it here."""
        kwargs = kwargs or {}
        if args and args[0] is self.batch and func in (torch.max, Tensor.max, torch.amax, Tensor.amax):
            return torch.tensor(self.batch_size - 1)  # whichever clients a stack has
        rule = _RULES.get(func)
        if rule is not None:
            return rule(self, *args, **kwargs)
        if any(isinstance(each, (Features, list, tuple)) for each in args):
            args = tuple(map(as_dense, args))
        return func(*args, **kwargs)

    def linear(self, x: Any, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """``linear`` of features or of a tensor."""
        return x.linear(weight, bias) if isinstance(x, Features) else linear(x, weight, bias)

    def dense(self, input: Any) -> Tensor:
        """Features, too."""
        tensor: Tensor = as_dense(input)
        return tensor

    def rows(self, x: Tensor) -> Tensor:
        """Which rows are no padding, (N,).

        Raises:
            NotStackable: They are neither the nodes nor the graphs.
        """
        nodes, graphs = self._data.node_mask, self._data.example_mask
        if x.shape[:-1] == nodes.shape:
            return nodes
        if self.batch is None or x.shape[:-1] != (*graphs.shape[:-1], self.batch_size):
            raise NotStackable(f"it normalizes over something else than nodes or graphs, of shape {tuple(x.shape)}")
        return F.pad(graphs, (0, self.batch_size - graphs.shape[-1]))

    def examples(self, output: NetOutput) -> NetOutput:
        """The rows of the examples, in an output that has a row for each node or graph."""
        if self.batch is None:
            return output
        return NetOutput(*(rows[..., : self._data.example_mask.shape[-1], :] for rows in output))

    def layer_norm(
        self,
        x: Any,
        normalized_shape: Any,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor:
        """``layer_norm`` with parameters that may be a stack's."""
        result = F.layer_norm(as_dense(x), normalized_shape, None, None, eps)
        if len(normalized_shape) > 1:
            raise NotStackable("it normalizes over several dimensions")
        result = result if weight is None else result * weight.unsqueeze(-2)
        return result if bias is None else result + bias.unsqueeze(-2)


#: The forward passes that are under way, the innermost last.
_CURRENT: list[StackedGraph] = []
_RULES: dict[Any, Callable[..., Any]] = {
    F.linear: StackedGraph.linear,
    F.dropout: StackedGraph.dropout,
    torch.dropout: StackedGraph.dropout,
    F.batch_norm: StackedGraph.batch_norm,
    F.layer_norm: StackedGraph.layer_norm,
    **dict.fromkeys(
        (F.instance_norm, F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d, F.dropout2d, F.dropout3d),
        StackedGraph.refuse,
    ),
}
