"""Gives every node of a partitioned graph the ids of all its neighbors, including those lost to other clients.

Methods such as FedGNN need them to match nodes of different clients with neighbors in common. They stand for ids that
the clients of a real federation already share, such as those of the papers that a paper cites.
"""

import dataclasses
import hashlib
from typing import Any

import torch
from torch import Tensor

from fl_lightning.data import FederatedDataModule
from fl_lightning.run.callback import Callback, Trainer


class NeighborIds(Callback):
    """Gives the clients' nodes the hashes of their neighbors' ids, by a key that the clients share.

    Without the key, as on the server, the hashes can only be compared. It works only if one graph is partitioned here:
    a site of a remote federation has to provide its own ids.

    Args:
        secret: The key, at most 64 bytes.
        max_ids: Largest number of neighbor ids of a node, at least 1; all nodes select common neighbors in the same
            way.

    Raises:
        ValueError: A value is out of range.
    """

    needs_data = True
    changes_training = True

    def __init__(self, *, secret: str = "shared by the clients", max_ids: int = 100) -> None:
        if not 0 < len(secret.encode()) <= 64:
            raise ValueError(f"NeighborIds.secret must have 1 to 64 bytes, got {len(secret.encode())}")
        if max_ids < 1:
            raise ValueError(f"NeighborIds.max_ids must be at least 1, got {max_ids}")
        self.secret = secret
        self.max_ids = max_ids

    def on_clients(self, trainer: Trainer, clients: tuple[Any, ...]) -> tuple[Any, ...]:
        """Look the neighbors up in the whole graph.

        Raises:
            ValueError: There is none.
        """
        data = trainer.datamodule
        if not (isinstance(data, FederatedDataModule) and data.task.is_on_nodes):
            raise ValueError("NeighborIds is for one graph that is cut into clients: leave the callback out")
        graph = data.whole_graph()
        ids_NM = neighbor_ids(graph.edge_index, graph.num_nodes, secret=self.secret, max_ids=self.max_ids)
        return tuple(dataclasses.replace(each, neighbor_ids_NM=ids_NM[each.node_idx_N]) for each in clients)


def neighbor_ids(edge_index_2E: Tensor, num_nodes: int, *, secret: str, max_ids: int) -> Tensor:
    """The hashes of each node's neighbors, ascending, int64 (N, M) with 0 for none; the smallest if there are too many.

    Args:
        edge_index_2E: Source and target of every edge; a node's neighbors are the sources of its edges.
        num_nodes: N.
        secret: Key of the hash (BLAKE2b, 40 bits, so that nobody takes the numbers for a model that has diverged).
        max_ids: Largest number of neighbors of a node.
    """
    key = secret.encode()
    digests = [hashlib.blake2b(str(node).encode(), digest_size=5, key=key).digest() for node in range(num_nodes)]
    hash_N = torch.tensor([int.from_bytes(digest, "big") for digest in digests]).clamp(min=1)
    source_E, target_E = edge_index_2E
    order_E = hash_N[source_E].argsort(stable=True)
    order_E = order_E[target_E[order_E].argsort(stable=True)]
    target_E, hash_E = target_E[order_E], hash_N[source_E[order_E]]
    degree_N = target_E.bincount(minlength=num_nodes)
    rank_E = torch.arange(len(target_E)) - (degree_N.cumsum(0) - degree_N)[target_E]
    kept_E = rank_E < max_ids
    ids_NM = torch.zeros(num_nodes, max(1, min(int(degree_N.max()), max_ids)), dtype=torch.int64)
    ids_NM[target_E[kept_E], rank_E[kept_E]] = hash_E[kept_E]
    return ids_NM
