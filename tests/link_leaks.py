"""What is checked of clients that learn links: nothing that is validated or tested on is sent along or trained on."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fl_lightning import FederatedDataModule
from fl_lightning.batches.pairs import ClientPairs
from fl_lightning.kernels.csr import coordinates
from fl_lightning.models import LinkGCN

Pairs = set[tuple[int, int]]


def codes(pair_P2: Tensor, nodes: Tensor) -> Pairs:
    """Pairs as those of the global graph, the smaller node first."""
    return {tuple(sorted(each)) for each in nodes[pair_P2].tolist()}  # type: ignore[misc]


def check_no_leak(data: FederatedDataModule) -> None:
    """No client sends messages along, or trains on, a pair that any client validates or tests on."""
    trained, messages, scored = Pairs(), Pairs(), Pairs()
    whole = data.whole_graph()
    edges = codes(whole.edge_index.t(), torch.arange(whole.num_nodes))
    across = data.source.draws.candidates == "across"
    for client, own in zip(data.clients, data.partitioner(whole, data.seed), strict=True):
        nodes, linked_P = client.graph.node_idx_N, client.y_N[:, 0] > 0.5
        own_messages = codes(client.graph.edge_index_2E.t(), nodes)
        assert client.graph.num_edges == 2 * len(own_messages)  # both directions, once each
        assert own_messages == sent_along(client, data)
        held_out_P = client.val_mask_N | client.test_mask_N
        assert len(codes(client.pair_P2[held_out_P], nodes)) == int(held_out_P.sum())  # none twice
        trained |= codes(client.pair_P2[client.train_mask_N], nodes) | codes(client.candidate_M2, nodes)
        messages |= own_messages
        scored |= codes(client.pair_P2[held_out_P], nodes)
        others = codes(client.pair_P2[~linked_P], nodes) | codes(client.candidate_M2, nodes)
        assert not others & edges
        assert not any(first == second for first, second in others)
        members, enough = set(own.tolist()), 1 if across else 2
        assert codes(client.pair_P2[linked_P], nodes) == {p for p in edges if len(members.intersection(p)) >= enough}
        assert all(members.intersection(pair) for pair in others)
    assert scored
    assert not scored & (trained | messages)
    assert messages <= edges


def sent_along(client: ClientPairs, data: FederatedDataModule) -> Pairs:
    """The links along which a client has to send messages: all that train, or those that do not where they may not."""
    linked_P = client.y_N[:, 0] > 0.5
    trains_P = client.train_mask_N & linked_P
    if data.source.draws.message_fraction < 1:
        trains_P = linked_P & ~(client.train_mask_N | client.val_mask_N | client.test_mask_N)
    return codes(client.pair_P2[trains_P], client.graph.node_idx_N)


class SpyNet(LinkGCN):
    """Writes down along which links messages are sent when it computes; features are ones for the node itself."""

    #: For each client that has computed, by its nodes, the links that it has used.
    seen: dict[frozenset[int], Pairs] = {}  # noqa: RUF012

    def forward(self, batch: Any) -> Any:
        """Note the links, then compute."""
        nodes_CN = _nodes(batch)
        row, column = coordinates(batch.adjacency.matrix)
        size = nodes_CN.shape[1]
        ends = torch.stack([nodes_CN.flatten()[row], nodes_CN.flatten()[column]], dim=1)
        for slot, node_N in enumerate(nodes_CN):
            pairs = ends[(row // size == slot) & (row != column)]
            members = frozenset(node_N[node_N >= 0].tolist())
            self.seen.setdefault(members, set()).update(map(tuple, pairs.sort(dim=1).values.tolist()))
        if batch.plain is not None:
            [node_N] = nodes_CN
            pairs = codes(batch.plain.edge_index.t(), node_N)
            self.seen[frozenset(node_N[node_N >= 0].tolist())] |= pairs
        return super().forward(batch)


def _nodes(batch: Any) -> Tensor:
    """The global index of each node of a stack, (C, N), -1 for padding."""
    mask_CN = batch.node_mask if batch.node_mask.dim() == 2 else batch.node_mask[None]
    node_CN = torch.full(mask_CN.shape, -1)
    if batch.sparse_x is None:
        x_CNF = batch.x.reshape(*mask_CN.shape, -1)
        return torch.where(mask_CN, x_CNF.argmax(dim=-1), node_CN)
    row, column = coordinates(batch.sparse_x.matrix)
    node_CN.view(-1)[row] = column % (batch.sparse_x.matrix.shape[1] // batch.sparse_x.num_blocks)
    return node_CN


def check_what_nets_saw(clients: Sequence[ClientPairs], data: FederatedDataModule) -> None:
    """Every client has computed, along exactly the links that train."""
    expected = {frozenset(each.graph.node_idx_N.tolist()): sent_along(each, data) for each in clients}
    assert SpyNet.seen == expected
