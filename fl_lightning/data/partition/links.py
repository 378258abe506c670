"""Roles of the links of every client, and the pairs without a link that they are compared with.

Links are divided before clients get copies of them: a link has the same role at every client that has it. Whether a
pair without a link is for training, validation or test follows from a hash of its two nodes, so clients agree on this
as well.

Shape legend: N nodes of the global graph or of a client, U undirected edges, P pairs, M candidates.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data

from fl_lightning.data.adjacency import adjacency_matrix
from fl_lightning.data.allocation import Asked
from fl_lightning.data.partition.cross_edges import cross_edges
from fl_lightning.data.partition.record import PartitionRecord, hash_graph
from fl_lightning.data.settings import check_count, check_number
from fl_lightning.data.split import Role
from fl_lightning.kernels.randomness import derive_key, generator, pair_words, subkey

#: Which pairs of nodes a client scores.
Candidates = Literal["own", "across"]
#: How pairs without a link are drawn.
Negatives = Literal["uniform", "degree", "hard"]
#: Candidates of a client for each negative of a step.
CANDIDATES = 8
#: With at most this many pairs of nodes all of them are listed; of more, random ones are drawn.
_LISTED = 2_000_000
#: Pairs that are drawn for one that is needed, since some are drawn twice, are links or have another role.
_DRAWN = 3


@dataclass(frozen=True, kw_only=True)
class LinkDraws:
    """How links are trained on and compared.

    Attributes:
        negatives: Pairs without a link are drawn uniformly (``uniform``), both nodes in proportion to their degrees
            (``degree``), or among those with a common neighbor (``hard``), in proportion to these; the degrees and
            neighbors are those of the edges along which messages are sent. Where there are too few, uniform ones are
            added.
        num_negatives: Negatives for each link in training.
        pool_size: Pairs in each of a client's fixed pools, for validation and test; fewer where there are not as many.
        message_fraction: Share of the training links along which messages are sent. Below 1 only the others are trained
            on, so that no training link sees itself.
        candidates: ``own``, pairs of a client's own nodes; ``across``, pairs of an own node with a node of another
            client to which the client has an edge, too.

    Raises:
        ValueError: A setting is out of range.
    """

    negatives: Negatives = "uniform"
    num_negatives: int = 1
    pool_size: int = 500
    message_fraction: float = 1.0
    candidates: Candidates = "own"

    def __post_init__(self) -> None:
        if self.candidates not in get_args(Candidates):
            raise ValueError(f"candidates must be {' or '.join(get_args(Candidates))}, got {self.candidates!r}")
        if self.negatives not in get_args(Negatives):
            raise ValueError(f"negatives must be {' or '.join(get_args(Negatives))}, got {self.negatives!r}")
        check_count("num_negatives", self.num_negatives, most=1000)
        check_count("pool_size", self.pool_size)
        check_number("message_fraction", self.message_fraction, most=1, above_0=True)

    def identity(self) -> dict[str, Any]:
        """The settings as JSON-ready values, without what is as it always was."""
        settings = asdict(self)
        return {name: value for name, value in settings.items() if (name, value) != ("candidates", "own")}


def undirected_edges(data: Data) -> Tensor:
    """Each edge of a graph once, its smaller node first, int64 (U, 2)."""
    edge_2E: Tensor = data.edge_index
    return edge_2E[:, edge_2E[0] < edge_2E[1]].t()


def link_record(data: Data, asked: Asked, draws: LinkDraws) -> PartitionRecord:
    """Partition a prepared graph, divide its links and draw the pools.

    Args:
        data: Undirected. Of the edges of :func:`undirected_edges` it may have the given roles, ``link_role`` (U,),
            times, ``link_time`` (U,), by which they are then ordered for the splitter, and ``link_relation`` (U,).
        asked: The settings of the data module; the splitter is for the links.
        draws: How pairs without a link are drawn.

    Raises:
        ValueError: A client has no link or no other pair to train on.
    """
    assert asked.partitioner is not None
    node_idx = asked.partitioner(data, asked.seed)
    cross = cross_edges(data, node_idx, "candidates: across") if draws.candidates == "across" else ()
    held = held_nodes(node_idx, cross)
    edge_U2, masks = undirected_edges(data), dict[str, Tensor]()
    time_U, role_U = data.get("link_time"), data.get("link_role")
    order_U = torch.arange(len(edge_U2)) if time_U is None else time_U.argsort(stable=True)
    edge_U2 = edge_U2[order_U]
    relation_U = None if data.get("link_relation") is None else data.link_relation[order_U]
    if role_U is not None:
        roles_given = (Role.TRAIN, Role.VAL, Role.TEST)
        masks = {f"{role.name.lower()}_mask": role_U[order_U] == role for role in roles_given}
    inside = [_inside(edge_U2, nodes, data.num_nodes or 0, reaching=bool(cross)) for nodes in node_idx]
    if lacking := [client for client, edges in enumerate(inside) if not len(edges)]:
        raise ValueError(f"clients {lacking} have no link: use fewer and larger clients, or another partitioner")
    split = Data(y=torch.zeros(len(edge_U2), dtype=torch.int64), num_nodes=len(edge_U2), **masks)
    roles = asked.splitter(split, inside, asked.seed)
    key = torch.tensor(derive_key(asked.seed, "links"))
    clients = [
        _pairs(nodes, torch.isin(nodes, own), edge_U2[edges], role, key, draws, client)
        for client, (nodes, own, edges, role) in enumerate(zip(held, node_idx, inside, roles, strict=True))
    ]
    if relation_U is not None:
        clients = [
            (_with_relations(pair_P3, role_P, relation_U[edges]), role_P, candidate_M2)
            for (pair_P3, role_P, candidate_M2), edges in zip(clients, inside, strict=True)
        ]
    return PartitionRecord(
        node_idx=tuple(node_idx),
        roles=tuple(each[1] for each in clients),
        graph_hash=hash_graph(data),
        pairs=tuple(each[0] for each in clients),
        candidates=tuple(each[2] for each in clients),
        cross_edges=cross,
    )


def held_nodes(node_idx: Sequence[Tensor], cross: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The nodes of each client, ascending, with those of other clients to which it has an edge, if these are kept."""
    if not cross:
        return tuple(node_idx)
    every = (torch.cat([nodes, edges.flatten()]) for nodes, edges in zip(node_idx, cross, strict=True))
    return tuple(torch.unique(each) for each in every)


def _inside(edge_U2: Tensor, nodes: Tensor, num_nodes: int, *, reaching: bool) -> Tensor:
    """Which edges have both ends among some nodes, or also one of them."""
    has_N = torch.zeros(num_nodes, dtype=torch.bool)
    has_N[nodes] = True
    ends_U2 = has_N[edge_U2]
    return (ends_U2.any(dim=1) if reaching else ends_U2.all(dim=1)).nonzero().flatten()


def _pairs(
    nodes: Tensor, own_N: Tensor, edge_E2: Tensor, role_E: Tensor, key: Tensor, draws: LinkDraws, client: int
) -> tuple[Tensor, Tensor, Tensor]:
    """A client's pairs (P, 3) and their roles (P,) as the record has them, and its candidates (M, 2).

    Args:
        nodes: The nodes that it knows of.
        own_N: Which of them are its own.
        edge_E2: Its links.
        role_E: Their roles.
        key: Of the draws that all clients share.
        draws: The settings.
        client: Its index.
    """
    link_E2 = torch.searchsorted(nodes, edge_E2)
    trains_E = role_E == Role.TRAIN
    sends_E = trains_E & (_share(key, "messages", edge_E2) < draws.message_fraction)
    if draws.message_fraction < 1:
        role_E = torch.where(sends_E, torch.tensor(Role.UNUSED, dtype=role_E.dtype), role_E)
    count = int((role_E == Role.TRAIN).sum())
    if not count or not bool(sends_E.any()):
        raise ValueError(
            f"message_fraction={draws.message_fraction:g} leaves client {client} with {int(sends_E.sum())} links to "
            f"send messages along and {count} to train on: bring it nearer to 0.5, or use fewer and larger clients"
        )
    others = _Others(nodes, own_N, link_E2, link_E2[sends_E], key, draws, client)
    val_V2, test_T2, candidate_M2 = others.pools(count * draws.num_negatives)
    if not len(candidate_M2):
        raise ValueError(
            f"client {client} has {len(nodes)} nodes and {len(link_E2)} links, which leaves no pair without a link to "
            "train on: use fewer and larger clients"
        )
    first = torch.arange(count * draws.num_negatives) % len(candidate_M2)
    parts = [(candidate_M2[first], Role.TRAIN), (val_V2, Role.VAL), (test_T2, Role.TEST)]
    role_P = torch.cat([role_E, *(torch.full((len(part),), role, dtype=role_E.dtype) for part, role in parts)])
    pair_P2 = torch.cat([link_E2, *(part for part, _ in parts)])
    kind_P = torch.zeros(len(pair_P2), dtype=torch.int64)
    kind_P[: len(link_E2)] = 1 + sends_E.long()
    return torch.cat([pair_P2, kind_P[:, None]], dim=1), role_P, candidate_M2


def _with_relations(pair_P3: Tensor, role_P: Tensor, relation_E: Tensor) -> Tensor:
    """The pairs with the relation of each, (P, 4): those without a link have, in turn, those of the links of a role."""
    count = len(relation_E)
    relation_P = torch.cat([relation_E, torch.zeros(len(pair_P3) - count, dtype=torch.int64)])
    for role in (Role.TRAIN, Role.VAL, Role.TEST):
        of_links = relation_E[role_P[:count] == role]
        others = count + (role_P[count:] == role).nonzero().flatten()
        if len(of_links):
            relation_P[others] = of_links[torch.arange(len(others)) % len(of_links)]
    return torch.cat([pair_P3, relation_P[:, None]], dim=1)


def _share(key: Tensor, purpose: str, pair_P2: Tensor) -> Tensor:
    """A random number in [0, 1) of each pair of nodes of the global graph, float64."""
    word_P = pair_words(subkey(key, purpose), pair_P2[:, 0], pair_P2[:, 1])
    return (word_P & 0xFFFFFF).double() / 2**24


@dataclass(frozen=True)
class _Others:
    """The pairs of a client's nodes that are not linked, whatever the role of the links.

    Args:
        nodes: The nodes that the client knows of, by index in the global graph, ascending.
        own_N: Which of them are its own; one of each pair is.
        link_E2: All of its links, by place among its nodes.
        message_E2: Those along which messages are sent.
        key: Of the draws that all clients share.
        draws: The settings.
        client: Its index.
    """

    nodes: Tensor
    own_N: Tensor
    link_E2: Tensor
    message_E2: Tensor
    key: Tensor
    draws: LinkDraws
    client: int

    def pools(self, num_negatives: int) -> tuple[Tensor, Tensor, Tensor]:
        """The pools for validation (V, 2) and test (T, 2), and the candidates for training (M, 2), which are disjoint.

        Args:
            num_negatives: Negatives of a step.
        """
        sizes = (self.draws.pool_size, self.draws.pool_size, CANDIDATES * num_negatives)
        wanted = max(4 * sizes[0], 2 * sizes[2])
        drawn = self._drawn(_DRAWN * wanted)
        share_P = _share(self.key, "roles", self.nodes[drawn])
        parts = [share_P < 0.25, (share_P >= 0.25) & (share_P < 0.5), share_P >= 0.5]
        val_V2, test_T2, candidate_M2 = (drawn[part][:size] for part, size in zip(parts, sizes, strict=True))
        return val_V2, test_T2, candidate_M2

    def _drawn(self, count: int) -> Tensor:
        """At least so many different pairs in the order of their draw, or all that there are."""
        chosen = self._uniform(count)
        if self.draws.negatives == "degree":
            weight_N = self._degree_N.double()
            chosen = torch.cat([self._random(weight_N, 4 * count), chosen])
        elif self.draws.negatives == "hard":
            chosen = torch.cat([self._two_steps(4 * count), chosen])
        code_P = self._code(chosen.sort(dim=1).values)
        fits_P = (chosen[:, 0] != chosen[:, 1]) & ~torch.isin(code_P, self._code(self.link_E2))
        fits_P &= self.own_N[chosen].any(dim=1)
        _, first = np.unique(code_P[fits_P].numpy(), return_index=True)
        code_P = code_P[fits_P][torch.from_numpy(np.sort(first))]
        return torch.stack([code_P // len(self.nodes), code_P % len(self.nodes)], dim=1)

    def _code(self, pair_P2: Tensor) -> Tensor:
        return pair_P2[:, 0] * len(self.nodes) + pair_P2[:, 1]

    @property
    def _degree_N(self) -> Tensor:
        return torch.bincount(self.message_E2.flatten(), minlength=len(self.nodes))

    @property
    def _generator(self) -> torch.Generator:
        return generator(int(self.key), self.client)

    def _uniform(self, count: int) -> Tensor:
        """All pairs in random order, or random ones of very many."""
        number = len(self.nodes)
        if number * (number - 1) // 2 > _LISTED:
            share = 1 - (1 - float(self.own_N.double().mean())) ** 2  # of the pairs, with an own node
            return self._random(torch.ones(number, dtype=torch.float64), round((count + len(self.link_E2)) / share))
        pairs = torch.combinations(torch.arange(number))
        return pairs[_share(self.key, "order", self.nodes[pairs]).argsort(stable=True)]

    def _random(self, weight_N: Tensor, count: int) -> Tensor:
        """Pairs of nodes that are drawn independently, in proportion to weights."""
        total_N = weight_N.cumsum(0)
        place = torch.rand(count, 2, generator=self._generator, dtype=torch.float64) * total_N[-1]
        return torch.searchsorted(total_N, place, right=True).clamp(max=len(weight_N) - 1)

    def _two_steps(self, count: int) -> Tensor:
        """Pairs with a common neighbor, which is drawn in proportion to its pairs of neighbors."""
        edges = torch.cat([self.message_E2, self.message_E2.flip(1)]).t()
        matrix = adjacency_matrix(edges, len(self.nodes))
        neighbor_E, start_N = torch.from_numpy(matrix.indices).long(), torch.from_numpy(matrix.indptr).long()
        degree_N = self._degree_N
        total_N = (degree_N * (degree_N - 1)).double().cumsum(0)
        if not total_N[-1]:
            return torch.empty(0, 2, dtype=torch.int64)
        draw_3 = torch.rand(count, 3, generator=self._generator, dtype=torch.float64)
        middle = torch.searchsorted(total_N, draw_3[:, 0] * total_N[-1], right=True)
        ends = (draw_3[:, 1:] * degree_N[middle, None]).long()
        return neighbor_E[start_N[middle, None] + ends]
