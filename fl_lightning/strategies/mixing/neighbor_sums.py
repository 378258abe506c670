"""Sums over all neighbors of a node, whichever clients hold them: what methods that know cross edges exchange.

Both ends of an edge between clients know of it (``data.cross_edges``). In an exchange each client sends, for each of
its nodes v and of the nodes of other clients that it has edges to, the sum over its own nodes u among v and v's
neighbors of some m_u, never m_u alone, unless there is only one such u; the server adds what clients send for the same
v, and returns the total to v's client. What is exchanged lies in the clients' graphs from then on. A client whose
message is lost has no totals, and trains on its own nodes alone.

Shape legend: C clients, N nodes of a client, first its own, then those of other clients that it has edges to; W width
of m, M nodes of all clients.
"""

import dataclasses
import functools
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fl_lightning.batches import Batch, ClientGraph, GraphBatch
from fl_lightning.federation import Federation
from fl_lightning.round.client import ClientModule
from fl_lightning.round.context import Context, Parameters
from fl_lightning.round.payload import Payload
from fl_lightning.round.program import LocalProgram
from fl_lightning.round.stage import ClientOutput, Rows, Stage, StageAddress
from fl_lightning.strategies.mixing.base import Mixing


@dataclass(kw_only=True, eq=False)
class NeighborSums(Mixing):
    """Base class of the methods whose clients exchange sums over neighbors before round 0."""

    #: What arrived, by exchange: the ids of the clients' nodes, and the sum for each node (on the server); and the
    #: clients that have no totals, but still the nodes of others that they joined with.
    server_state: ClassVar[tuple[str, ...]] = ("known", "lost")

    needs_graphs = needs_nodes = True
    needs_undirected = True
    adds_edges = True  # to nodes of other clients, within an exchange
    needs_own_examples = True

    @property
    @abstractmethod
    def num_exchanges(self) -> int:
        """Number of exchanges before round 0."""

    @abstractmethod
    def messages(self, batch: GraphBatch, number: int) -> Tensor:
        """What the nodes of one client add in an exchange, m, (N, W); that of other clients' nodes is not read."""

    @abstractmethod
    def ingest(self, graph: ClientGraph, degree_N: Tensor, sum_NW: Tensor, number: int) -> ClientGraph:
        """A client's graph after an exchange.

        Args:
            graph: Its graph with the nodes of other clients.
            degree_N: Number of neighbors of each node at all clients, int64.
            sum_NW: The total of each node; of nodes of other clients only if ``returns_others``.
            number: Of the exchange, from 0.
        """

    #: Whether a client receives the totals of other clients' nodes, too.
    returns_others = False

    @property
    def needs_cross_edges(self) -> bool:
        """Unless nothing is exchanged."""
        return self.num_exchanges > 0

    def setup(self, federation: Federation) -> None:
        """Begin without sums."""
        super().setup(federation)
        self.known: dict[str, Tensor] = {}
        self.lost: set[int] = set()
        self._onboarding: dict[str, Tensor] = {}

    def sum_weighting(self) -> None:
        """The server must know whose nodes the sums are for."""
        return

    def initial_stages(self) -> Sequence[Stage]:
        """The exchanges, once."""
        if not self.num_exchanges:
            return []
        stages = [Stage(name="join", program=LocalProgram(rewrite=self.join))]
        for number in range(self.num_exchanges):
            outputs: dict[str, ClientOutput] = {"ids": ids_of, "sums": NeighborSum(self, number)}
            rows = dict.fromkeys(outputs, Rows(of="example"))
            take = functools.partial(self.take_totals, number)
            stages.append(Stage(name=f"send-{number}", client_outputs=outputs, rows=rows))
            stages.append(Stage(name=f"receive-{number}", program=LocalProgram(rewrite=take)))
        return stages

    def stages(self, round_idx: int) -> Sequence[Stage]:
        """Train; as long as some client may have nodes of others without totals, leave these out first."""
        return [*([self.settling()] if self.lost else []), *super().stages(round_idx)]

    def settling(self) -> Stage:
        """A client without totals leaves the nodes of other clients out."""
        return Stage(name="settle", program=LocalProgram(rewrite=self.settle))

    def stage(self, address: StageAddress) -> Stage:
        """The stage at an address; a client does not know who has no totals."""
        return self.settling() if address.name == "settle" else super().stage(address)

    # ------------------------------------------------------------------ the clients

    def join(self, client: ClientModule, parameters: Parameters, graph: ClientGraph, context: Context) -> ClientGraph:
        """A client's graph with the nodes of other clients that it has edges to, without features, after its own."""
        return with_neighbors(graph)

    def take_totals(
        self, number: int, client: ClientModule, parameters: Parameters, graph: ClientGraph, context: Context
    ) -> ClientGraph:
        """A client's graph after an exchange; after the last one without nodes of others that it has no totals of."""
        received = context.received["totals"].cpu()
        sent_N, local_N = received[:, 0].round().long(), degree_of(graph)
        ingested = self.ingest(graph, torch.where(sent_N > 0, sent_N, local_N), received[:, 1:], number)
        last = number + 1 == self.num_exchanges
        return own_part(ingested) if last and not self.returns_others else ingested

    def settle(self, client: ClientModule, parameters: Parameters, graph: ClientGraph, context: Context) -> ClientGraph:
        """A client's graph without nodes of others that it has no totals of."""
        return graph if self.returns_others and graph.num_neighbors_N is not None else own_part(graph)

    # ------------------------------------------------------------------ the server

    def configure(self, stage: Stage, clients: Sequence[int]) -> Payload:
        """The model; in an exchange the totals of the clients' nodes."""
        kind, _, number = stage.name.partition("-")
        if kind in ("join", "send", "settle"):
            return Payload(clients=tuple(clients))
        if kind != "receive":
            return super().configure(stage, clients)
        known = self.known if set(clients) <= set(self.federation.training_clients) else self._onboarding
        return totals_for(known, number, clients, self.federation.num_clients, own_only=not self.returns_others)

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        """Average the models; in an exchange add what clients have sent for the same node."""
        kind, _, number = stage.name.partition("-")
        if kind == "send":
            if upload.clients:
                self.known = collected(self.known, number, upload, self.federation.num_clients)
        elif kind == "settle":
            self.lost = self.lost - set(upload.clients)
        elif kind not in ("join", "receive"):
            super().aggregate(stage, upload)
        elif stage.name == f"receive-{self.num_exchanges - 1}":
            self.lost = set(self.federation.training_clients) - set(upload.clients)
            self.known = self.known if self._has_unseen_clients else {}  # which nobody else asks for again

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the server; states of older versions do not tell who has no totals."""
        super().load_state_dict({"lost": self.lost, **state})

    @property
    def _has_unseen_clients(self) -> bool:
        return len(self.federation.training_clients) < self.federation.num_clients

    def onboard(self, stage: Stage, upload: Payload) -> None:
        """Add what unseen clients send to what the others have sent, for these alone."""
        kind, _, number = stage.name.partition("-")
        if kind == "join":
            self._onboarding = {}  # of clients that have joined before
        elif kind == "send" and upload.clients:
            self._onboarding = collected(
                {**self.known, **self._onboarding}, number, upload, self.federation.num_clients
            )


@dataclass(frozen=True)
class NeighborSum:
    """The number of neighbors of each own node, and the sum over own nodes beside each known node, (N, 1 + W).

    Args:
        strategy: Whose messages are summed.
        number: Of the exchange.
    """

    strategy: NeighborSums
    number: int

    def __call__(self, client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
        """The sums of one client."""
        assert isinstance(batch, GraphBatch)
        assert batch.node_id is not None, "checked before the run"
        own_N1 = (batch.node_id > 0).unsqueeze(-1)
        message_NW = torch.where(own_N1, self.strategy.messages(batch, self.number), 0.0)
        degree_N1 = torch.where(own_N1, batch.degree.unsqueeze(-1), 0).to(message_NW)
        return torch.cat([degree_N1, batch.sum_neighbors(message_NW) + message_NW], dim=-1)


def ids_of(client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
    """The id of each own node, and of each node of another client with an edge to one, negative, (N,)."""
    assert isinstance(batch, GraphBatch)
    assert batch.node_id is not None, "checked before the run"
    return batch.node_id


def collected(known: Mapping[str, Tensor], number: str, upload: Payload, num_clients: int) -> dict[str, Tensor]:
    """What is known with an upload of an exchange: ``ids`` (C, N), and by exchange ``nodes`` (M,), ``totals`` (M, 1+W).

    Args:
        known: What was known.
        number: The exchange.
        upload: The ids (C, N) and sums (C, N, 1 + W) of the clients that responded.
        num_clients: Number of all clients.
    """
    id_CN, mask_CN = upload.extras["ids"], upload.mask("ids")
    every_CN = id_CN.new_zeros(num_clients, id_CN.shape[1])
    if "ids" in known:
        width = max(known["ids"].shape[1], id_CN.shape[1])
        every_CN = torch.nn.functional.pad(known["ids"], (0, width - known["ids"].shape[1]))
    every_CN[list(upload.clients), : id_CN.shape[1]] = torch.where(mask_CN, id_CN, 0)
    node_A, sum_AW = id_CN[mask_CN].abs(), upload.extras["sums"][mask_CN].double()
    if f"nodes-{number}" in known:
        node_A = torch.cat([known[f"nodes-{number}"], node_A])
        sum_AW = torch.cat([known[f"totals-{number}"], sum_AW])
    node_M, place_A = torch.unique(node_A, return_inverse=True)
    total_MW = sum_AW.new_zeros(len(node_M), sum_AW.shape[1]).index_add(0, place_A, sum_AW)
    return {**known, "ids": every_CN, f"nodes-{number}": node_M, f"totals-{number}": total_MW}


def totals_for(
    known: Mapping[str, Tensor], number: str, clients: Sequence[int], num_clients: int, *, own_only: bool
) -> Payload:
    """The totals of the nodes of some clients, (C, N, 1 + W), 0 for those that have sent none.

    Args:
        known: As :func:`collected` has it.
        number: The exchange.
        clients: The clients.
        num_clients: Number of all clients.
        own_only: Leave out the nodes of other clients.
    """
    id_CN = known["ids"][list(clients)]
    wanted_CN = id_CN > 0 if own_only else id_CN != 0
    node_M, total_MW = known[f"nodes-{number}"], known[f"totals-{number}"]
    place_CN = torch.searchsorted(node_M, id_CN.abs()).clamp(max=len(node_M) - 1)
    total_CNW = torch.where(wanted_CN.unsqueeze(-1), total_MW[place_CN], 0.0).float()
    return Payload(clients=tuple(clients), extras={"totals": total_CNW}, lengths={"totals": wanted_CN.sum(dim=1)})


def degree_of(graph: ClientGraph) -> Tensor:
    """Number of neighbors of each node in a client's graph, int64 (N,)."""
    return torch.bincount(graph.edge_index_2E[1], minlength=graph.num_nodes)


def with_neighbors(graph: ClientGraph) -> ClientGraph:
    """The graph with the nodes of other clients that it has edges to: without features, labels and roles."""
    assert graph.cross_edge_2X is not None, "checked before the run"
    own, cross = graph.node_idx_N, graph.cross_edge_2X
    others = torch.unique(cross[~torch.isin(cross, own)])
    every = torch.cat([own, others])
    order = every.argsort()
    edges = torch.cat([graph.edge_index_2E, order[torch.searchsorted(every[order], cross)]], dim=1)
    edges = edges[:, (edges[0] * len(every) + edges[1]).argsort()]
    unknown: Any = torch.nan if graph.y_N.is_floating_point() else -1

    def with_rows(tensor: Tensor, value: Any) -> Tensor:
        return torch.cat([tensor, tensor.new_full((len(others), *tensor.shape[1:]), value)])

    masks = {name: with_rows(mask, False) for name, mask in vars(graph).items() if name.endswith("mask_N")}
    return dataclasses.replace(
        graph,
        x_NF=with_rows(graph.x_NF, 0),
        edge_index_2E=edges,
        y_N=with_rows(graph.y_N, unknown),
        node_idx_N=torch.cat([own, -2 - others]),
        **masks,  # type: ignore[arg-type]
    )


def own_part(graph: ClientGraph) -> ClientGraph:
    """The graph without the nodes of other clients."""
    count = int((graph.node_idx_N >= 0).sum())
    names = ("x_NF", "y_N", "node_idx_N", "num_neighbors_N", "propagated_NF", "structure_NS")
    masks = [name for name in vars(graph) if name.endswith("mask_N")]
    rows = {name: getattr(graph, name) for name in (*names, *masks)}
    inside_E = (graph.edge_index_2E < count).all(dim=0)
    return dataclasses.replace(
        graph,
        edge_index_2E=graph.edge_index_2E[:, inside_E],
        **{name: None if value is None else value[:count] for name, value in rows.items()},  # type: ignore[arg-type]
    )
