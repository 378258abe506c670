"""All that the clients of a federation hold, brought together: what one owner of everybody's data trains on.

Shape legend: M nodes of all clients, U different ones among them, N nodes of the prepared global graph.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch_geometric.data import Data

from fl_lightning.batches import ClientData, ClientGraph


@dataclass(frozen=True, kw_only=True)
class Pool:
    """What is pooled.

    Attributes:
        client_data: As one client holds it. Its training examples are the clients'; no other example has a role.
        rows: Of a whole graph, for each client where its nodes are in it, int64; else empty.
        num_contradictory: Nodes that are training examples of one client and validation or test examples of another,
            and are left out of the training.
    """

    client_data: ClientData
    rows: tuple[Tensor, ...] = ()
    num_contradictory: int = 0


def pool_of(clients: Sequence[ClientData], training: Sequence[int], whole_graph: Data | None = None) -> Pool:
    """Bring together what clients hold.

    Args:
        clients: What each client of the federation holds.
        training: Indices of those that train, ascending; the others' examples train nothing.
        whole_graph: The prepared graph whose nodes they have, for its edges between clients too, and for each node
            once; None for what they hold, one client's after another's.

    Raises:
        ValueError: No training example is left, since all have another role at another client.
    """
    chosen = set(training)
    trained = [_of_role(client, client.train_mask_N) for place, client in enumerate(clients) if place in chosen]
    scored = [_of_role(client, client.val_mask_N | client.test_mask_N) for client in clients]
    twice_I = torch.unique(torch.cat(trained)[torch.isin(torch.cat(trained), torch.cat(scored))])
    seen = [
        (place, client.seen()) for place, client in enumerate(clients) if place in chosen or whole_graph is not None
    ]
    members = [
        dataclasses.replace(client, **_roles(client, twice_I if place in chosen else None)) for place, client in seen
    ]
    if len(twice_I) and not any(bool(member.train_mask_N.any()) for member in members):
        raise ValueError(
            f"all {len(twice_I):,} training examples of the clients are validation or test examples of other clients, "
            "so none is left to train on: set data.splitter to GlobalSplit, which gives an example one role"
        )
    pooled = type(members[0]).pooled(members)
    if whole_graph is None:
        return Pool(client_data=pooled, num_contradictory=len(twice_I))
    whole, row_M = merged(cast("ClientGraph", pooled), whole_graph)
    rows = torch.split(row_M, [client.size for client in clients])
    return Pool(client_data=whole, rows=rows, num_contradictory=len(twice_I))


def merged(pooled: ClientGraph, graph: Data) -> tuple[ClientGraph, Tensor]:
    """Each node of a pool once, where it is first, with all edges of a graph between them.

    Args:
        pooled: Of :meth:`ClientGraph.pooled`.
        graph: The prepared graph that ``node_idx_N`` counts the nodes of.

    Returns:
        The graph, and which of its nodes each of the pool's is, (M,).
    """
    idx_U, place_M = torch.unique(pooled.node_idx_N, return_inverse=True)
    first_U = torch.zeros_like(idx_U).scatter_reduce(0, place_M, torch.arange(len(place_M)), "amin", include_self=False)
    order_U = first_U.argsort()
    row_M = order_U.argsort()[place_M]
    row_N = torch.full((graph.num_nodes or 0,), -1)
    row_N[idx_U[order_U]] = torch.arange(len(idx_U))
    edge_2E = row_N[graph.edge_index]
    inside_E = (edge_2E >= 0).all(dim=0).nonzero().flatten()
    sorted_E = inside_E[(edge_2E[0] * len(idx_U) + edge_2E[1])[inside_E].argsort()]
    train_mask_U = torch.zeros(len(idx_U), dtype=torch.bool)
    train_mask_U[row_M[pooled.train_mask_N]] = True
    kept_U = first_U[order_U]
    per_node: dict[str, Any] = {name: getattr(pooled, name)[kept_U] for name in ("x_NF", "y_N", "node_idx_N")}
    per_edge: dict[str, Any] = {
        f"{name}_{axes}": None if graph.get(name) is None else graph[name][sorted_E]
        for name, axes in (("edge_weight", "E"), ("edge_attr", "EK"))
    }
    whole = dataclasses.replace(
        pooled,
        **per_node,
        **per_edge,
        edge_index_2E=edge_2E[:, sorted_E],
        train_mask_N=train_mask_U,
        val_mask_N=torch.zeros_like(train_mask_U),
        test_mask_N=torch.zeros_like(train_mask_U),
    )
    return whole, row_M


def _of_role(client: ClientData, mask_N: Tensor) -> Tensor:
    """The nodes of a client in a mask, by their indices in the global graph; no two clients have an example else."""
    idx_N = client.global_idx_N
    return torch.empty(0, dtype=torch.int64) if idx_N is None else idx_N[mask_N]


def _roles(client: ClientData, left_out_I: Tensor | None) -> dict[str, Any]:
    """The masks of a client in a pool: its training examples, but for some nodes; none where it does not train."""
    nobody_N = torch.zeros_like(client.train_mask_N)
    train_mask_N = nobody_N if left_out_I is None else client.train_mask_N
    if client.global_idx_N is not None and left_out_I is not None:
        train_mask_N = train_mask_N & ~torch.isin(client.global_idx_N, left_out_I)
    return {"train_mask_N": train_mask_N, "val_mask_N": nobody_N, "test_mask_N": nobody_N}
