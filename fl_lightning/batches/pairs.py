"""Pairs of nodes of each client's graph, linked or not, and the graph along whose edges messages are sent.

Shape legend: C clients, P pairs and N nodes of a client (padded), M candidates for negatives, D channels.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

from fl_lightning.batches.base import EXAMPLES, common_fields, pad
from fl_lightning.batches.client_data import ClientData, joined_fields
from fl_lightning.batches.client_graph import ClientGraph
from fl_lightning.batches.draws import DrawnBatch, DrawnCollator
from fl_lightning.batches.graphs import GraphBatch, GraphCollator, Pooling
from fl_lightning.kernels.randomness import random_uniform, subkey

#: Metadata of a field with a row for each candidate.
CANDIDATES = {"axes": ("candidates",)}


@dataclass(frozen=True, kw_only=True)
class ClientPairs(ClientData):
    """A client's private pairs of nodes, each of which is an example: links (1) and pairs without a link (0).

    Attributes:
        graph: The client's nodes with the edges along which messages are sent; no validation or test link is among
            them. Its nodes have no roles.
        pair_P2: The two nodes of each pair, the smaller first, int64.
        candidate_M2: Pairs without a link from which the steps of training draw; none is in a validation or test pool.
        relation_P: The relation of each pair, int64: of a link its own, of a pair without a link that of a link with
            the same role, with which it is compared. None if all links are alike.
    """

    graph: ClientGraph
    pair_P2: Tensor
    candidate_M2: Tensor
    relation_P: Tensor | None = None

    @property
    def inputs(self) -> Tensor:
        """The features of the nodes."""
        return self.graph.x_NF

    def with_inputs(self, inputs: Tensor) -> Self:
        """The pairs of nodes with other features."""
        return dataclasses.replace(self, graph=self.graph.with_inputs(inputs))

    @property
    def cost(self) -> int:
        """Nodes plus edges plus pairs."""
        return self.graph.cost + self.size

    @property
    def global_idx_N(self) -> Tensor:
        """An index of each pair that all clients share, by its nodes in the global graph."""
        first_P, second_P = self.graph.node_idx_N[self.pair_P2].unbind(dim=1)
        return first_P * 2**31 + second_P

    @property
    def edge_facts(self) -> Mapping[str, Any]:
        """The facts about the edges of the graph."""
        return self.graph.edge_facts

    @classmethod
    def pooled(cls, members: Sequence[Self]) -> Self:
        """Their graphs as one without edges between them, with the pairs of each."""
        sizes = torch.tensor([member.graph.num_nodes for member in members])
        first = (sizes.cumsum(0) - sizes).tolist()
        shifted: dict[str, Any] = {
            name: torch.cat([getattr(member, name) + start for member, start in zip(members, first, strict=True)])
            for name in ("pair_P2", "candidate_M2")
        }
        graph = ClientGraph.pooled([member.graph for member in members])
        return cls(name="pool", graph=graph, **shifted, **joined_fields(members, but=tuple(shifted)))


@dataclass(frozen=True, kw_only=True)
class PairBatch(GraphBatch, DrawnBatch):
    """Pairs as a client's model sees them: ``y`` and the masks are of pairs, everything else of nodes.

    Attributes:
        pair: The two nodes of each pair, int64 (C, P, 2); any for padding.
        candidate: Pairs that negatives are drawn from, int64 (C, M, 2).
        candidate_mask: Candidates that are not padding (C, M).
        relation: The relation of each pair, int64 (C, P); None if all links are alike.
    """

    pair: Tensor = field(metadata=EXAMPLES)
    candidate: Tensor = field(metadata=CANDIDATES)
    candidate_mask: Tensor = field(metadata=CANDIDATES)
    relation: Tensor | None = field(default=None, metadata=EXAMPLES)

    @property
    def summary_mask(self) -> Tensor:
        """Training pairs alone: which pairs are asked about tells something of the links that are to be found."""
        return self.train_mask

    def masks(self) -> dict[str, Tensor]:
        """Also that of the candidates."""
        return {**super().masks(), "candidates": self.candidate_mask}

    def pool(self, value_ND: Tensor, how: Pooling = "mean") -> Tensor:
        """The product of what the two nodes of each pair have, (P, D); also on a stack and under ``vmap``."""
        first_PD, second_PD = (
            value_ND.gather(-2, node_P.unsqueeze(-1).expand(*node_P.shape, value_ND.shape[-1]))
            for node_P in self.pair.unbind(dim=-1)
        )
        return first_PD * second_PD

    def spread(self, value_PD: Tensor) -> NoReturn:
        """Refused, as a node may be in many pairs."""
        raise ValueError("the nodes of pairs have nothing of their own pair: choose a net that asks for none")

    def draws(self, keys: Tensor) -> Iterator["PairBatch"]:
        """The batch of each step, with negatives of its own: drawn from the candidates by the step's key."""
        for batch in super().draws(keys):
            yield batch._with_drawn_negatives()

    def _with_drawn_negatives(self) -> "PairBatch":
        """Other training pairs without a link, with the same relations; what they become does not depend on padding."""
        share_P = random_uniform(subkey(self.key, "negatives"), self.pair.shape[-2], 1).squeeze(-1)
        place_P = (share_P * self.candidate_mask.sum(dim=-1, keepdim=True)).long()
        drawn_P2 = self.candidate.gather(-2, place_P.unsqueeze(-1).expand_as(self.pair))
        replaced_P = self.train_mask & (self.y[..., 0] < 0.5)
        return dataclasses.replace(self, pair=torch.where(replaced_P.unsqueeze(-1), drawn_P2, self.pair))


class PairCollator(DrawnCollator):
    """Turns clients' pairs into batches.

    Args:
        clients: Every client of the federation, in order.
        layout: The decision for all clients of the federation (:meth:`GraphCollator.layout_of`).
        settings: As for :class:`DrawnCollator`.
    """

    def __init__(self, clients: Sequence[ClientPairs], *, layout: Mapping[str, Any] | None, **settings: Any) -> None:
        super().__init__(clients, **settings)
        self.layout = self.layout_of(clients) if layout is None else layout

    @staticmethod
    def layout_of(clients: Sequence[ClientPairs]) -> dict[str, Any]:
        """That of the clients' graphs."""
        return GraphCollator.layout_of([client.graph for client in clients])

    def __call__(self, clients: Sequence[int]) -> PairBatch:
        """Batch the given clients' pairs, padded to the largest numbers of pairs, nodes and candidates."""
        members = [self.clients[client] for client in clients]
        graphs = [each.graph for each in members]
        nodes = GraphCollator(graphs, layout=self.layout, device=self.device, dtype=self.dtype)
        return PairBatch(
            pair=pad([each.pair_P2 for each in members], self.device),
            candidate=pad([each.candidate_M2 for each in members], self.device),
            relation=self._relations(members),
            candidate_mask=pad([torch.ones(len(each.candidate_M2), dtype=torch.bool) for each in members], self.device),
            **common_fields(members, device=self.device, dtype=self.dtype),
            **nodes.graph_fields(graphs),
            **self.drawing,
        )

    def _relations(self, members: Sequence[ClientPairs]) -> Tensor | None:
        known = [each.relation_P for each in members if each.relation_P is not None]
        return pad(known, self.device) if known else None
