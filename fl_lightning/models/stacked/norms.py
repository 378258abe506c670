"""PyG's layer normalization on a stack of clients, without padding.

Shape legend: N nodes of one client, D width. On a stack everything has a leading C.
"""

from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg
from torch import Tensor, nn
from torch_geometric.utils import scatter

from fl_lightning.models.stacked.graph import StackedGraph


class StackedLayerNorm(nn.Module):
    """Over all nodes of a graph, or of each of several (``mode="graph"``), or over each node."""

    in_channels: int
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    mode: str

    @staticmethod
    def options(layer: pyg.LayerNorm) -> dict[str, bool]:
        """Which options are supported."""
        return {f"mode={layer.mode}": layer.mode in ("graph", "node")}

    def forward(self, x: Any, batch: Any = None, batch_size: Any = None) -> Tensor:
        """Normalize (N, D)."""
        if self.mode == "node":
            return F.layer_norm(x, (self.in_channels,), self.weight, self.bias, self.eps)
        if batch is not None:
            return self._within_graphs(x, batch)
        graph = StackedGraph.current()
        mask_N1 = graph.rows(x).unsqueeze(-1).to(x.dtype)
        count_11 = (mask_N1.sum(dim=-2, keepdim=True) * x.shape[-1]).clamp(min=1)
        mean_11 = (x * mask_N1).sum(dim=(-2, -1), keepdim=True) / count_11
        centered_ND = x - mean_11
        variance_11 = ((centered_ND * mask_N1).square()).sum(dim=(-2, -1), keepdim=True) / count_11
        deviation_11 = torch.where(variance_11 > 0, variance_11, 1.0).sqrt() * (variance_11 > 0)
        return self._scaled(centered_ND / (deviation_11 + self.eps))

    def _within_graphs(self, x_ND: Tensor, batch_N: Tensor) -> Tensor:
        """Over the nodes of each of several graphs; a stack of them is under ``vmap``."""
        num_graphs = StackedGraph.current().batch_size

        def mean(value_ND: Tensor) -> Tensor:
            mean_G1: Tensor = scatter(value_ND.mean(dim=-1, keepdim=True), batch_N, 0, num_graphs, "mean")
            return mean_G1.index_select(0, batch_N)

        centered_ND = x_ND - mean(x_ND)
        return self._scaled(centered_ND / (mean(centered_ND.square()) + self.eps).sqrt())

    def _scaled(self, out_ND: Tensor) -> Tensor:
        if self.weight is not None and self.bias is not None:
            out_ND = out_ND * self.weight.unsqueeze(-2) + self.bias.unsqueeze(-2)
        return out_ND
