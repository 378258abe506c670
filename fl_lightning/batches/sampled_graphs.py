"""Many clients' graphs of which each local step sees a part; models are scored on the whole graphs.

Shape legend: C clients, N nodes and E edges of a client (padded), U training nodes or clusters that are drawn.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_lightning.batches.base import common_fields, pad, single
from fl_lightning.batches.client_graph import ClientGraph
from fl_lightning.batches.coordinates import messages, offset
from fl_lightning.batches.draws import DrawnBatch, batches_of, least_of
from fl_lightning.batches.edges_by_target import EdgesByTarget, SampledGraph
from fl_lightning.batches.graphs import GraphBatch, GraphCollator
from fl_lightning.batches.samplers import ClusterSampler, GraphSampler
from fl_lightning.kernels.block_sparse import BlockSparse

#: Metadata of a field with a row for each unit that is drawn.
UNITS = {"axes": ("units",)}


@dataclass(frozen=True, kw_only=True)
class SampledGraphBatch(GraphBatch, DrawnBatch):
    """Whole graphs, of which each local step draws a part.

    Attributes:
        collator: Makes batches of parts.
        client: Index of each client, int64 (C,).
        unit_mask: Which clusters are no padding, (C, U); None if training nodes are drawn.
    """

    collator: "SampledGraphCollator" = field(repr=False)
    client: Tensor
    unit_mask: Tensor | None = field(default=None, metadata=UNITS)

    @property
    def drawn_from(self) -> Tensor:
        """The training nodes, or the clusters."""
        return self.train_mask if self.unit_mask is None else self.unit_mask

    def masks(self) -> dict[str, Tensor]:
        """Also that of the clusters."""
        return super().masks() if self.unit_mask is None else {**super().masks(), "units": self.unit_mask}

    def without_training_examples(self) -> Self:
        """Everything: outputs of a graph's nodes are computed together."""
        return self

    def _pick(self, key: Tensor, order: Tensor, drawn_mask: Tensor) -> GraphBatch:  # type: ignore[override]
        """The parts that are drawn with the given training nodes or clusters, (C, B), some of which may be padding."""
        clients, keys = self.client.reshape(-1).tolist(), key.reshape(-1).tolist()
        rows = zip(order.view(len(keys), -1).cpu(), drawn_mask.view(len(keys), -1).cpu(), strict=True)
        parts = [
            self.collator.sampler.part(self.collator.edges_of(client), unit_B[mask_B], number)
            for client, number, (unit_B, mask_B) in zip(clients, keys, rows, strict=True)
        ]
        batch = self.collator.batch_of(parts, self).replace({"key": key.reshape(-1)})
        return batch if key.dim() else single(batch)


class SampledGraphCollator(GraphCollator):
    """Turns clients' graphs, and parts of them, into batches.

    Args:
        graphs: The clients, in client order.
        sampler: Draws the parts.
        batch_size: Training nodes or clusters of a step.
        steps_per_epoch: Number of steps in an epoch, each drawn independently; None for a pass.
        drop_last: Leave out the last step of a pass if it is short.
        layout: The decision for all clients of the federation; None to decide for these.
        device: Device of the batches.
        dtype: Floating point type of features and adjacency.
    """

    def __init__(
        self,
        graphs: Sequence[ClientGraph],
        *,
        sampler: GraphSampler,
        batch_size: int | None,
        steps_per_epoch: int | None,
        drop_last: bool,
        layout: Mapping[str, Any] | None = None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(graphs, layout=layout, device=device, dtype=dtype)
        self.sampler = sampler
        self.steps = steps_per_epoch
        self.drawing: dict[str, Any] = {
            "batch_size": batch_size,
            "drop_last": drop_last,
            "sampling": steps_per_epoch is not None,
        }
        self._edges: dict[int, EdgesByTarget] = {}

    def edges_of(self, client: int) -> EdgesByTarget:
        """A client's graph by the targets of its edges; it is made once."""
        graph = self.graphs[client]
        if client not in self._edges or self._edges[client].graph is not graph:
            self._edges[client] = EdgesByTarget(graph)
        return self._edges[client]

    def steps_per_epoch(self, client: int) -> int:
        """The number that is set, or that of a pass."""
        if self.steps is not None:
            return self.steps
        return batches_of(self._num_units(client), self.drawing["batch_size"], self.drawing["drop_last"])

    def least_examples(self, client: int) -> int:
        """A lower bound of the nodes of the smallest part."""
        return self.sampler.least_nodes(self.edges_of(client), least_of(self._num_units(client), **self.drawing))

    def _num_units(self, client: int) -> int:
        return self.sampler.num_units(self.edges_of(client))

    def __call__(self, clients: Sequence[int]) -> SampledGraphBatch:
        """Batch the given clients' whole graphs."""
        unit_mask = None
        if isinstance(self.sampler, ClusterSampler):
            unit_mask = pad([torch.ones(self._num_units(client), dtype=torch.bool) for client in clients], self.device)
        return SampledGraphBatch(
            **vars(super().__call__(clients)),
            **self.drawing,
            collator=self,
            client=torch.tensor(clients, device=self.device),
            unit_mask=unit_mask,
        )

    def batch_of(self, parts: Sequence[ClientGraph], whole: GraphBatch) -> GraphBatch:
        """Batch a part of each graph of a batch."""
        common = common_fields(parts, device=self.device, dtype=self.dtype)
        fields = self.graph_fields(parts)
        if not isinstance(parts[0], SampledGraph):
            return GraphBatch(**common, **fields)
        samples = cast("Sequence[SampledGraph]", parts)
        mask_CM = fields["node_mask"]
        num_nodes = whole.node_mask.shape[-1]
        first_C1 = torch.arange(len(parts), device=self.device)[:, None] * num_nodes
        row_M = (pad([part.position_N for part in samples], self.device) + first_C1).flatten()
        fields["adjacency"].sampled_from(whole.adjacency, row_M, mask_CM.flatten(), self._totals(samples).flatten())
        fields["links"].sampled_from(whole.edge_operator, row_M, mask_CM.flatten(), fields["degree"].flatten())
        return GraphBatch(**common, **fields)

    def _totals(self, samples: Sequence[SampledGraph]) -> Tensor:
        """What the rows of A + I of the whole graphs sum to, (C, M); 1 for padding."""
        total_CM = pad([part.total_weight_N for part in samples], self.device)
        return torch.where(total_CM > 0, total_CM, 1.0)

    # ---------------------------------------------------------------- what differs where edges are sampled

    def _degrees(
        self, graphs: Sequence[ClientGraph], row: Tensor, weight_E: Tensor | None, node_mask_CN: Tensor
    ) -> Tensor:
        """Those of the whole graphs."""
        if not isinstance(graphs[0], SampledGraph):
            return super()._degrees(graphs, row, weight_E, node_mask_CN)
        return self._totals(cast("Sequence[SampledGraph]", graphs)).cpu().flatten()

    def _weights(self, graphs: Sequence[ClientGraph], num_entries: int) -> Tensor | None:
        """Times how often each edge counts."""
        weight_E = super()._weights(graphs, num_entries)
        if not isinstance(graphs[0], SampledGraph):
            return weight_E
        factor_E = _factors(graphs).to(self.exact_dtype)
        factor_E = F.pad(factor_E, (0, num_entries - len(factor_E)), value=1.0)
        return factor_E if weight_E is None else factor_E * weight_E

    def _links(self, graphs: Sequence[ClientGraph], num_nodes: int) -> BlockSparse | None:
        """With how often each edge counts as entries."""
        if not isinstance(graphs[0], SampledGraph):
            return super()._links(graphs, num_nodes)
        edges_2E = messages(graphs, num_nodes)
        links = BlockSparse.from_coordinates(
            edges_2E,
            _factors(graphs).to(self.operator_dtype),
            (num_nodes, num_nodes),
            len(graphs),
            entries=self._attributes(graphs, edges_2E.shape[1]),
        )
        return links.to(self.device, self.operator_dtype)

    def _propagated(self, graphs: Sequence[ClientGraph], adjacency: BlockSparse) -> Tensor | None:
        """Unknown in a part, whose outermost nodes have no edges, and not stored for whole graphs."""
        return None

    def graph_fields(self, graphs: Sequence[ClientGraph]) -> dict[str, Any]:
        """The fields of a batch for nodes and edges; attributes of sampled edges count as often as these."""
        fields = super().graph_fields(graphs)
        if not isinstance(graphs[0], SampledGraph) or "edge_targets" not in fields:
            return fields
        samples = cast("Sequence[SampledGraph]", graphs)
        shape = (fields["node_mask"].shape[1], fields["edge_mask"].shape[1])
        ends = [torch.stack([part.edge_index_2E[1], torch.arange(part.num_edges)]) for part in samples]
        factor_E = _factors(samples).to(self.operator_dtype)
        targets = BlockSparse.from_coordinates(offset(ends, shape), factor_E, shape, len(graphs))
        return {**fields, "edge_targets": targets.to(self.device, self.operator_dtype)}


def _factors(graphs: Sequence[ClientGraph]) -> Tensor:
    """How often each edge of samples counts, one sample after another, (E,)."""
    return torch.cat([part.factor_E for part in cast("Sequence[SampledGraph]", graphs)])
