"""PyG's attention layers on a stack of clients: the same parameters, settings and results (``convolutions.py``).

Shape legend: N nodes of one client, E edges, K attributes, H heads, D width of a head. On a stack everything has a
leading C.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn

from fl_lightning.kernels.linear import linear
from fl_lightning.models.stacked.convolutions import SUM, common_options, shifted, transformed
from fl_lightning.models.stacked.functions import NotStackable
from fl_lightning.models.stacked.graph import StackedEdges

#: Added to the sum of a softmax, as in PyG.
TINY = 1e-16


def attended(
    score_EH: Tensor, value_NHD: Tensor, edges: StackedEdges, *, own_NH: Tensor | None, dropout: float
) -> tuple[Tensor, Tensor]:
    """Mean of the values that nodes receive, weighted by the softmax of scores over a node's edges.

    Args:
        score_EH: Scores of the edges.
        value_NHD: Values of the nodes.
        edges: The edges.
        own_NH: Score of every node's edge to itself; None for no such edge.
        dropout: Probability that a weight is dropped.

    Returns:
        (N, H, D), and the weights (E, H).
    """
    most_NH = edges.maxima(score_EH.detach())
    most_NH = torch.where(most_NH == -torch.inf, 0.0, most_NH) if own_NH is None else most_NH.maximum(own_NH.detach())
    weight_EH = (score_EH - edges.targets(most_NH)).exp()
    total_NH = edges.reduce(weight_EH, "sum") + TINY
    if own_NH is not None:
        weight_NH = (own_NH - most_NH).exp()
        total_NH = total_NH + weight_NH
        own_NHD = F.dropout(weight_NH / total_NH, dropout).unsqueeze(-1) * value_NHD
    weight_EH = F.dropout(weight_EH / edges.targets(total_NH).clamp(min=TINY), dropout)
    mean_NHD = edges.weighted(weight_EH, value_NHD)
    return (mean_NHD if own_NH is None else mean_NHD + own_NHD), weight_EH


def in_heads(x_NX: Tensor, num_heads: int) -> Tensor:
    """(N, H · D) as (N, H, D)."""
    return x_NX.view(*x_NX.shape[:-1], num_heads, -1)


def joined(out_NHD: Tensor, *, concat: bool) -> Tensor:
    """The heads side by side, or their mean."""
    return out_NHD.flatten(-2) if concat else out_NHD.mean(dim=-2)


def as_columns(attr: Tensor, edges: StackedEdges) -> Tensor:
    """Attributes (E, K), also of one number (E,)."""
    return attr.unsqueeze(-1) if attr.dim() == edges.owner.dim() else attr


def own_attributes(attr_EK: Tensor, edges: StackedEdges, fill: float | str) -> Tensor:
    """Attributes of every node's edge to itself, (N, K): those of the edges that lead to it, or a number."""
    if isinstance(fill, str):
        return edges.reduce(attr_EK, fill)
    return attr_EK.new_full((*edges.owner.shape, attr_EK.shape[-1]), fill)


def refuse_weights(return_attention_weights: Any) -> None:
    """Refuse to return the weights of attention.

    Raises:
        NotStackable: They are asked for.
    """
    if return_attention_weights is not None:
        raise NotStackable("return_attention_weights is given")


class _Attention(nn.Module):
    """What GAT and GATv2 have in common."""

    heads: int
    concat: bool
    negative_slope: float
    dropout: float
    add_self_loops: bool
    fill_value: float | str
    lin_edge: pyg.Linear | None
    res: pyg.Linear | None
    bias: Tensor | None

    @staticmethod
    def options(layer: Any) -> dict[str, bool]:
        """Which options are supported."""
        fill = layer.fill_value
        return {
            **common_options(layer, SUM),
            f"in_channels={layer.in_channels}": isinstance(layer.in_channels, int),
            f"fill_value={fill}": isinstance(fill, (int, float)) or fill in ("mean", "add", "sum", "max"),
        }

    def attributes(self, edge_attr: Tensor | None, edges: StackedEdges) -> tuple[Tensor | None, Tensor | None]:
        """What edges and nodes add to the scores' inputs by attributes, (E, H, D) and (N, H, D)."""
        if edge_attr is None or self.lin_edge is None:
            return None, None
        attr_EK, weight = as_columns(edge_attr, edges), self.lin_edge.weight
        given_EHD = in_heads(linear(attr_EK, weight, None), self.heads)
        if not self.add_self_loops:
            return given_EHD, None
        own_NK = own_attributes(attr_EK, edges, self.fill_value)
        return given_EHD, in_heads(linear(own_NK, weight, None), self.heads)

    def result(self, out_NHD: Tensor, x: Any) -> Tensor:
        """The heads, the residual and the bias."""
        out_ND = joined(out_NHD, concat=self.concat)
        return shifted(out_ND if self.res is None else out_ND + transformed(x, self.res.weight), self.bias)

    @property
    def drop(self) -> float:
        """Drop probability of weights, by the mode."""
        return self.dropout if self.training else 0.0


class StackedGATConv(_Attention):
    """Veličković and others: "Graph Attention Networks", ICLR 2018."""

    lin: pyg.Linear
    att_src: Tensor
    att_dst: Tensor
    att_edge: Tensor

    def forward(
        self,
        x: Any,
        edge_index: Any,
        edge_attr: Tensor | None = None,
        size: Any = None,
        return_attention_weights: Any = None,
    ) -> Tensor:
        """Scores LeakyReLU(a₁ · z_u + a₂ · z_v + a₃ · e_uv)."""
        refuse_weights(return_attention_weights)
        edges: StackedEdges = edge_index
        z_NHD = in_heads(transformed(x, self.lin.weight), self.heads)
        from_NH, to_NH = ((z_NHD * a_1HD).sum(dim=-1) for a_1HD in (self.att_src, self.att_dst))
        score_EH = edges.sources(from_NH) + edges.targets(to_NH)
        own_NH = from_NH + to_NH if self.add_self_loops else None
        given_EHD, own_NHD = self.attributes(edge_attr, edges)
        if given_EHD is not None:
            score_EH = score_EH + (given_EHD * self.att_edge).sum(dim=-1)
        if own_NH is not None and own_NHD is not None:
            own_NH = own_NH + (own_NHD * self.att_edge).sum(dim=-1)
        score_EH = F.leaky_relu(score_EH, self.negative_slope)
        if own_NH is not None:
            own_NH = F.leaky_relu(own_NH, self.negative_slope)
        out_NHD, _ = attended(score_EH, z_NHD, edges, own_NH=own_NH, dropout=self.drop)
        return self.result(out_NHD, x)


class StackedGATv2Conv(_Attention):
    """Brody, Alon, Yahav: "How Attentive are Graph Attention Networks?", ICLR 2022."""

    lin_l: pyg.Linear
    lin_r: pyg.Linear
    att: Tensor

    def forward(
        self, x: Any, edge_index: Any, edge_attr: Tensor | None = None, return_attention_weights: Any = None
    ) -> Tensor:
        """Scores a · LeakyReLU(z_u + z'_v + e_uv)."""
        refuse_weights(return_attention_weights)
        edges: StackedEdges = edge_index
        from_NX, to_NX = (transformed(x, lin.weight, lin.bias) for lin in (self.lin_l, self.lin_r))
        given_EHD, own_NHD = self.attributes(edge_attr, edges)
        score_EH = self._score(in_heads(edges.sources(from_NX) + edges.targets(to_NX), self.heads), given_EHD)
        own_NH = None
        if self.add_self_loops:
            own_NH = self._score(in_heads(from_NX + to_NX, self.heads), own_NHD)
        out_NHD, _ = attended(score_EH, in_heads(from_NX, self.heads), edges, own_NH=own_NH, dropout=self.drop)
        return self.result(out_NHD, x)

    def _score(self, z_XHD: Tensor, more_XHD: Tensor | None) -> Tensor:
        z_XHD = z_XHD if more_XHD is None else z_XHD + more_XHD
        return (F.leaky_relu(z_XHD, self.negative_slope) * self.att).sum(dim=-1)


class StackedTransformerConv(nn.Module):
    """Shi and others: "Masked Label Prediction", IJCAI 2021."""

    heads: int
    out_channels: int
    concat: bool
    dropout: float
    root_weight: bool
    lin_key: pyg.Linear
    lin_query: pyg.Linear
    lin_value: pyg.Linear
    lin_edge: pyg.Linear | None
    lin_skip: pyg.Linear
    lin_beta: pyg.Linear | None

    @staticmethod
    def options(layer: pyg.TransformerConv) -> dict[str, bool]:
        """Which options are supported."""
        return common_options(layer, SUM)

    def forward(
        self, x: Any, edge_index: Any, edge_attr: Tensor | None = None, return_attention_weights: Any = None
    ) -> Tensor:
        """Scores q_v · (k_u + e_uv) / √D; the values are v_u + e_uv."""
        refuse_weights(return_attention_weights)
        edges: StackedEdges = edge_index
        query_NX, key_NX, value_NX = (
            transformed(x, lin.weight, lin.bias) for lin in (self.lin_query, self.lin_key, self.lin_value)
        )
        key_EHD = in_heads(edges.sources(key_NX), self.heads)
        given_EHD = None
        if self.lin_edge is not None:
            if edge_attr is None:
                raise ValueError("TransformerConv with edge_dim needs edge_attr, which is None")
            given_EHD = in_heads(linear(edge_attr, self.lin_edge.weight, None), self.heads)
            key_EHD = key_EHD + given_EHD
        elif edge_attr is not None:
            raise NotStackable("edge_attr is given without edge_dim")
        score_EH = (in_heads(edges.targets(query_NX), self.heads) * key_EHD).sum(dim=-1) / math.sqrt(self.out_channels)
        drop = self.dropout if self.training else 0.0
        out_NHD, weight_EH = attended(score_EH, in_heads(value_NX, self.heads), edges, own_NH=None, dropout=drop)
        if given_EHD is not None:
            sent_NX = edges.reduce((weight_EH.unsqueeze(-1) * given_EHD).flatten(-2), "sum")
            out_NHD = out_NHD + in_heads(sent_NX, self.heads)
        out_ND = joined(out_NHD, concat=self.concat)
        if not self.root_weight:
            return out_ND
        skip_ND = transformed(x, self.lin_skip.weight, self.lin_skip.bias)
        if self.lin_beta is None:
            return out_ND + skip_ND
        beta_N1 = linear(torch.cat([out_ND, skip_ND, out_ND - skip_ND], dim=-1), self.lin_beta.weight, None).sigmoid()
        return beta_N1 * skip_ND + (1 - beta_N1) * out_ND
