"""The task on pairs of nodes."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from fl_lightning.batches.base import Collator
from fl_lightning.batches.graphs import GraphCollator
from fl_lightning.batches.pairs import PairCollator
from fl_lightning.models.link_gcn import LinkGCN
from fl_lightning.tasks.base import Drawing, Task
from fl_lightning.tasks.heuristics import heuristic_metrics
from fl_lightning.tasks.link_target import LINKS
from fl_lightning.tasks.targets import Target


@dataclass(frozen=True, kw_only=True)
class LinkPrediction(Task):
    """Whether two nodes of a client's graph are linked (:class:`~fl_lightning.batches.ClientPairs`).

    Attributes:
        num_relations: Kinds of links; 1 if all are alike.
        across_clients: Whether a client also scores pairs of an own node with one of another client.
    """

    num_relations: int = 1
    across_clients: bool = False

    examples = "pairs"
    example = "pair"
    counted: ClassVar[tuple[str, ...]] = ("num_relations",)
    number_columns: ClassVar[tuple[str, ...]] = ("source", "target")
    has_graphs = shares_nodes = True
    not_private = (
        "is for clients with independent examples, but these have pairs of a graph's nodes: a link enters the losses "
        "of its neighbors, and so more gradients than its own"
    )

    @property
    def target(self) -> Target:
        """Linked or not."""
        return LINKS

    @property
    def notes(self) -> dict[str, str]:
        """Which pairs are candidates, as metrics depend on it."""
        other = ", and of an own node with one of another client to which there is an edge"
        return {"candidates": f"pairs of a client's own nodes{other if self.across_clients else ''}"}

    def collator(  # noqa: D102
        self,
        clients: Sequence[Any],
        *,
        layout: Mapping[str, Any] | None = None,
        drawing: Drawing | None = None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> Collator:
        settings = (drawing or Drawing()).of_examples
        return PairCollator(clients, layout=layout, **settings, device=device, dtype=dtype)

    def layout_of(self, clients: Sequence[Any]) -> dict[str, Any]:
        """Whether features are multiplied as sparse matrices."""
        return PairCollator.layout_of(clients)

    def layout_for(self, density: float) -> dict[str, Any]:
        """The same."""
        return GraphCollator.layout_for(density)

    def default_net(
        self, num_features: int | tuple[int, ...], local: type[nn.Module] | None = None
    ) -> Callable[..., nn.Module]:
        """The strategy's own, if it reads pairs, or a GCN with a decoder, which tells relations apart."""
        if local is not None and getattr(local, "pools", False):
            return local
        if self.num_relations == 1:
            return LinkGCN
        return functools.partial(LinkGCN, decoder="distmult", num_relations=self.num_relations)

    def check_net(self, net: nn.Module) -> None:
        """Refuse a net whose outputs are for nodes or graphs, or that tells other relations apart."""
        super().check_net(net)
        if not getattr(net, "pools", False):
            raise ValueError(
                "LinkPrediction needs a net with an output for each pair of nodes: set model.net to "
                "fl_lightning.models.LinkGCN, or give a net of your own that pools (batch.pool multiplies the two ends "
                "of each pair), with pools = True"
            )
        if (known := getattr(net, "num_relations", None)) not in (None, self.num_relations):
            raise ValueError(
                f"the net has num_relations={known}, but the links are of {self.num_relations} relations: set "
                f"model.net.init_args.num_relations to {self.num_relations}"
            )

    def lacks(self, client_data: Any) -> str:
        """Relations, if links elsewhere have some."""
        if self.num_relations == 1 or client_data.relation_P is not None:
            return ""
        return (
            f"the links of the federation are of {self.num_relations} relations, and those here of none: give the "
            "graph edge_type, numbered as elsewhere"
        )

    def heuristics(self, clients: Sequence[Any]) -> dict[str, dict[str, float]]:
        """Common neighbors, Adamic-Adar and Katz, from the edges along which messages are sent."""
        return heuristic_metrics(clients)
