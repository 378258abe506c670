"""PyG's convolutions on a stack of clients: the same parameters, settings and results.

Each is a class for an object that was PyG's layer (``exchange.py``), so it has that one's attributes and reads a
:class:`StackedEdges` as ``edge_index``.

Shape legend: N nodes of one client, E edges, K attributes, F features, D width. On a stack everything has a leading C.
"""

from typing import Any

import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn

from fl_lightning.kernels.block_sparse import block_matmul
from fl_lightning.kernels.linear import linear
from fl_lightning.models.gcn import convolve
from fl_lightning.models.stacked.graph import Features, StackedEdges, as_dense
from fl_lightning.models.stacked.operators import edge_operator, normalized

#: Aggregations by their names in PyG.
SUM, MOST = ("add", "sum"), ("add", "sum", "mean", "max")


def common_options(layer: pyg.MessagePassing, aggregations: tuple[str, ...]) -> dict[str, bool]:
    """Which options of any layer are supported, by how they are written."""
    aggr = layer.aggr if isinstance(layer.aggr, str) else "a module"
    return {
        f"aggr={aggr}": aggr in aggregations,
        f"flow={layer.flow}": layer.flow == "source_to_target",
        f"decomposed_layers={layer.decomposed_layers}": layer.decomposed_layers == 1,
        "explain=True": not layer.explain,
    }


def transformed(x: Features | Tensor, weight_DF: Tensor, bias_D: Tensor | None = None) -> Tensor:
    """X Wᵀ + b."""
    return x.linear(weight_DF, bias_D) if isinstance(x, Features) else linear(x, weight_DF, bias_D)


def shifted(x_ND: Tensor, bias_D: Tensor | None) -> Tensor:
    """With a bias, if there is one."""
    return x_ND if bias_D is None else x_ND + bias_D.unsqueeze(-2)


def aggregated(
    x: Features | Tensor, edges: StackedEdges, how: str, weight_DF: Tensor, weight_E: Tensor | None = None
) -> Tensor:
    """A linear map of what nodes receive, without a bias; sums and means are of the narrower side."""
    if how == "max":
        return linear(edges.aggregate(as_dense(x), how, weight_E), weight_DF, None)
    if isinstance(x, Features) or weight_DF.shape[-2] <= weight_DF.shape[-1]:
        return edges.aggregate(transformed(x, weight_DF), how, weight_E)
    return linear(edges.aggregate(x, how, weight_E), weight_DF, None)


class StackedGCNConv(nn.Module):
    """Kipf, Welling: "Semi-Supervised Classification with Graph Convolutional Networks", ICLR 2017."""

    lin: pyg.Linear
    bias: Tensor | None
    normalize: bool
    improved: bool
    add_self_loops: bool

    @staticmethod
    def options(layer: pyg.GCNConv) -> dict[str, bool]:
        """Which options are supported."""
        return common_options(layer, SUM)

    def forward(self, x: Any, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
        """D^(-1/2) (A + I) D^(-1/2) X Wᵀ + b."""
        edges: StackedEdges = edge_index
        weighted, weight_DF = edge_weight is not None, self.lin.weight
        if edge_weight is not None and edge_weight is not edges.weight:
            return self._reweighted(transformed(x, weight_DF), edges, edge_weight)
        if not self.normalize:
            operator = edge_operator(edges.batch, weighted=weighted)
        else:
            operator = normalized(edges.batch, weighted=weighted, loop=self._loop(weighted))
        if operator is edges.batch.adjacency and not (isinstance(x, Features) and not x.is_plain):
            return convolve(None if isinstance(x, Features) else x, weight_DF.mT, self.bias, edges.batch)
        return shifted(block_matmul(operator, transformed(x, weight_DF), owner=edges.owner), self.bias)

    def _loop(self, weighted: bool) -> float:
        """The weight of loops; ``improved`` has an effect with weights of edges alone, as in PyG."""
        return (2.0 if self.improved and weighted else 1.0) if self.add_self_loops else 0.0

    def _reweighted(self, z_ND: Tensor, edges: StackedEdges, weight_E: Tensor) -> Tensor:
        """With weights that ``forward`` of the net has computed."""
        if not self.normalize:
            return shifted(edges.sum(z_ND, weight_E), self.bias)
        loop = self._loop(weighted=True)
        degree_N1 = edges.reduce(weight_E.unsqueeze(-1), "sum") + loop
        positive_N1 = degree_N1 > 0
        scale_N1 = positive_N1 * degree_N1.where(positive_N1, 1.0).rsqrt()
        scaled_ND = scale_N1 * z_ND
        return shifted(scale_N1 * (edges.sum(scaled_ND, weight_E) + loop * scaled_ND), self.bias)


class StackedSAGEConv(nn.Module):
    """Hamilton, Ying, Leskovec: "Inductive Representation Learning on Large Graphs", NeurIPS 2017."""

    lin: pyg.Linear
    lin_l: pyg.Linear
    lin_r: pyg.Linear
    aggr: str
    project: bool
    root_weight: bool
    normalize: bool

    @staticmethod
    def options(layer: pyg.SAGEConv) -> dict[str, bool]:
        """Which options are supported."""
        return common_options(layer, MOST)

    def forward(self, x: Any, edge_index: Any) -> Tensor:
        """W₁ x_v + W₂ of the mean over neighbors."""
        edges: StackedEdges = edge_index
        sent = transformed(x, self.lin.weight, self.lin.bias).relu() if self.project else x
        out_ND = shifted(aggregated(sent, edges, self.aggr, self.lin_l.weight), self.lin_l.bias)
        if self.root_weight:
            out_ND = out_ND + transformed(x, self.lin_r.weight)
        return F.normalize(out_ND, p=2.0, dim=-1) if self.normalize else out_ND


class StackedGraphConv(nn.Module):
    """Morris and others: "Weisfeiler and Leman Go Neural", AAAI 2019."""

    lin_rel: pyg.Linear
    lin_root: pyg.Linear
    aggr: str

    @staticmethod
    def options(layer: pyg.GraphConv) -> dict[str, bool]:
        """Which options are supported."""
        return common_options(layer, MOST)

    def forward(self, x: Any, edge_index: Any, edge_weight: Tensor | None = None) -> Tensor:
        """W₁ x_v + W₂ Σ e_uv x_u."""
        edges: StackedEdges = edge_index
        sum_ND = aggregated(x, edges, self.aggr, self.lin_rel.weight, edge_weight)
        return shifted(sum_ND, self.lin_rel.bias) + transformed(x, self.lin_root.weight)


class StackedGINConv(nn.Module):
    """Xu, Hu, Leskovec, Jegelka: "How Powerful are Graph Neural Networks?", ICLR 2019."""

    nn: nn.Module
    eps: Tensor
    aggr: str

    @staticmethod
    def options(layer: pyg.GINConv) -> dict[str, bool]:
        """Which options are supported."""
        return common_options(layer, MOST)

    def forward(self, x: Any, edge_index: Any) -> Tensor:
        """nn((1 + ε) x_v + Σ x_u)."""
        edges: StackedEdges = edge_index
        share = (1 + self.eps).unsqueeze(-1)

        def joined(z_ND: Tensor) -> Tensor:
            return edges.aggregate(z_ND, self.aggr) + share * z_ND

        linear_in_x = isinstance(x, Features) and self.aggr != "max"
        result: Tensor = self.nn(x.then(joined) if linear_in_x else joined(as_dense(x)))
        return result


class StackedGINEConv(nn.Module):
    """Hu and others: "Strategies for Pre-training Graph Neural Networks", ICLR 2020."""

    nn: nn.Module
    lin: pyg.Linear | None
    eps: Tensor
    aggr: str

    @staticmethod
    def options(layer: pyg.GINEConv) -> dict[str, bool]:
        """Which options are supported."""
        return common_options(layer, MOST)

    def forward(self, x: Any, edge_index: Any, edge_attr: Tensor | None = None) -> Tensor:
        """nn((1 + ε) x_v + Σ ReLU(x_u + e_uv))."""
        edges, x_ND = edge_index, as_dense(x)
        if edge_attr is None:
            raise ValueError("GINEConv needs edge_attr, which is None")
        sent_ED = edge_attr if self.lin is None else linear(edge_attr, self.lin.weight, self.lin.bias)
        message_ED = (edges.sources(x_ND) + sent_ED).relu()
        result: Tensor = self.nn(edges.reduce(message_ED, self.aggr) + (1 + self.eps).unsqueeze(-1) * x_ND)
        return result
