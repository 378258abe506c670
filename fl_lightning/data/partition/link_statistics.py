"""Statistics of clients that learn the links of a graph. Shape legend: P pairs."""

from collections.abc import Sequence
from dataclasses import dataclass

from fl_lightning.batches.pairs import ClientPairs


@dataclass(frozen=True, kw_only=True)
class LinkStatistics:
    """One client and its links.

    Attributes:
        client: Its name.
        num_nodes: Nodes.
        num_edges: Directed edges between its nodes, whatever their roles: two for each link.
        edges_lost: Directed edges of the global graph to its nodes from nodes it does not hold.
        num_messages: Links along which messages are sent.
        num_train: Links to train on.
        num_val: Validation links.
        num_test: Test links.
        num_val_pool: Pairs without a link that validation links are compared with.
        num_test_pool: The same for test links.
    """

    client: str
    num_nodes: int
    num_edges: int
    edges_lost: int
    num_messages: int
    num_train: int
    num_val: int
    num_test: int
    num_val_pool: int
    num_test_pool: int


def link_rows(clients: Sequence[ClientPairs], edges_lost: Sequence[int]) -> tuple[LinkStatistics, ...]:
    """Count the links of clients, and the pairs that they are compared with."""
    rows = []
    for client, lost in zip(clients, edges_lost, strict=True):
        linked_P = client.y_N[:, 0] > 0.5
        masks = {"train": client.train_mask_N, "val": client.val_mask_N, "test": client.test_mask_N}
        counts = {f"num_{role}": int((mask_P & linked_P).sum()) for role, mask_P in masks.items()}
        pools = {f"num_{role}_pool": int((masks[role] & ~linked_P).sum()) for role in ("val", "test")}
        rows.append(
            LinkStatistics(
                client=client.name,
                num_nodes=client.graph.num_nodes,
                num_edges=2 * int(linked_P.sum()),
                edges_lost=lost,
                num_messages=client.graph.num_edges // 2,
                **counts,
                **pools,
            )
        )
    return tuple(rows)
