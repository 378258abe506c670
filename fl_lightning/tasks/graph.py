"""Tasks on whole graphs, of which each client has many."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from fl_lightning.batches.graph_sets import GraphSetCollator
from fl_lightning.models.pooled_gcn import PooledGCN
from fl_lightning.tasks.base import Classification, DrawnTask, Regression


@dataclass(frozen=True, kw_only=True)
class GraphTask(DrawnTask):
    """A task on whole graphs (:class:`~fl_lightning.batches.ClientGraphs`)."""

    examples = "graphs"
    example = "graph"
    has_graphs = has_graph_examples = True
    collator_class = GraphSetCollator
    not_private = "is for clients with independent rows, series or images so far, but these have graphs"

    def default_net(
        self, num_features: int | tuple[int, ...], local: type[nn.Module] | None = None
    ) -> Callable[..., nn.Module]:
        """The strategy's own, if it pools, or a GCN that pools."""
        return local if local is not None and getattr(local, "pools", False) else PooledGCN

    def check_net(self, net: nn.Module) -> None:
        """Refuse a net whose outputs are for nodes."""
        if not getattr(net, "pools", False):
            raise ValueError(
                f"{type(self).__name__} needs a net with an output for each graph: set model.net to "
                "fl_lightning.models.PooledGCN, or give a net of your own that pools: one of PyG's layers, "
                "forward(x, edge_index, batch), or one for batches, with pools = True"
            )


@dataclass(frozen=True, kw_only=True)
class GraphClassification(GraphTask, Classification):
    """The class of each graph, or its labels."""


@dataclass(frozen=True, kw_only=True)
class GraphRegression(GraphTask, Regression):
    """Numbers of each graph."""
