"""Tasks on the nodes of a client's graph, which is trained full-batch or on sampled parts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from fl_lightning.batches.base import Batch, Collator
from fl_lightning.batches.graphs import GraphBatch, GraphCollator
from fl_lightning.batches.sampled_graphs import SampledGraphCollator
from fl_lightning.models.gcn import GCN
from fl_lightning.tasks.base import Classification, Drawing, Regression, Task
from fl_lightning.tasks.class_metrics import PER_DEGREE, degree_scores


@dataclass(frozen=True, kw_only=True)
class NodeTask(Task):
    """A task on the nodes of a client's graph (:class:`~fl_lightning.batches.ClientGraph`)."""

    examples = "nodes"
    example = "node"
    has_graphs = is_on_nodes = True
    not_private = (
        "is for clients with independent examples, but these have graphs: a node enters the losses of its "
        "neighbors, and so more gradients than its own"
    )

    def collator(  # noqa: D102
        self,
        clients: Sequence[Any],
        *,
        layout: Mapping[str, Any] | None = None,
        drawing: Drawing | None = None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Collator:
        layout = self.layout_of(clients) if layout is None else layout
        seen = [each.seen() for each in clients]
        collator: Collator
        if drawing is None or drawing.sampler is None:
            collator = GraphCollator(seen, layout=layout, device=device, dtype=dtype)
        else:
            collator = SampledGraphCollator(seen, **vars(drawing), layout=layout, device=device, dtype=dtype)
        if any(each.is_inductive for each in clients):
            collator.evaluation = GraphCollator(clients, layout=layout, device=device, dtype=dtype)
        return collator

    def layout_of(self, clients: Sequence[Any]) -> dict[str, Any]:
        """Whether features are multiplied as sparse matrices."""
        return GraphCollator.layout_of(clients)

    def layout_for(self, density: float) -> dict[str, Any]:
        """The same."""
        return GraphCollator.layout_for(density)

    def default_net(
        self, num_features: int | tuple[int, ...], local: type[nn.Module] | None = None
    ) -> Callable[..., nn.Module]:
        """The strategy's own, or a GCN."""
        return local or GCN


@dataclass(frozen=True, kw_only=True)
class NodeClassification(NodeTask, Classification):
    """The class of each node, or its labels."""

    @property
    def on_demand(self) -> tuple[str, ...]:
        """Of classes also those by degree."""
        return self.target.on_demand if self.multi_label else (*self.target.on_demand, *PER_DEGREE)

    def whole_scores(  # noqa: D102
        self, metrics: Sequence[str], parts: Sequence[Batch], logits: Tensor, y: Tensor, masks: Tensor
    ) -> dict[str, tuple[Tensor, Tensor]]:
        result = super().whole_scores([name for name in metrics if name not in PER_DEGREE], parts, logits, y, masks)
        if any(name in PER_DEGREE for name in metrics):
            degree = torch.cat([cast("GraphBatch", part).degree for part in parts], dim=parts[0].key.dim())
            result |= degree_scores(logits, y, masks, degree)
        return result


@dataclass(frozen=True, kw_only=True)
class NodeRegression(NodeTask, Regression):
    """Numbers of each node."""
