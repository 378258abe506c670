"""A partition with its split as it is cached: node indices and roles, no features."""

import hashlib
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import scipy.sparse as sp
from scipy.sparse.csgraph import connected_components
from torch import Tensor
from torch_geometric.data import Data

from fl_lightning.data.cached import load, save

FORMAT_VERSION = 2


@dataclass(frozen=True, kw_only=True)
class PartitionRecord:
    """Which nodes each client holds, and what it uses them, or pairs of them, for.

    Attributes:
        node_idx: For each client the ascending indices of its nodes in the prepared graph, int64.
        roles: For each client the :class:`~fl_lightning.data.split.Role` of each of its nodes, int8.
        graph_hash: Of the prepared graph the indices belong to.
        pairs: For link prediction, each client's pairs of nodes, int64 (P, 3): both by their place among the client's
            nodes, and 0 for no link, 1 for a link, 2 for a link along which messages are sent; roles are then theirs.
            Of links with relations a fourth column has these.
        candidates: For each client pairs without a link from which training draws, int64 (M, 2); else empty.
        cross_edges: For each client the edges to and from other clients, int64 (2, X) (``partition/cross_edges.py``);
            empty where they are not kept.
    """

    node_idx: tuple[Tensor, ...]
    roles: tuple[Tensor, ...]
    graph_hash: str
    pairs: tuple[Tensor, ...] = ()
    candidates: tuple[Tensor, ...] = ()
    cross_edges: tuple[Tensor, ...] = ()

    def groups(self) -> tuple[int, ...]:
        """Which clients were drawn from one part: those that share nodes with each other, directly or by others.

        Returns:
            Each client's group, numbered from 0 in the order of the clients; empty where no two share a node.
        """
        count = len(self.node_idx)
        client_M = np.repeat(np.arange(count), [len(nodes) for nodes in self.node_idx])
        node_M = np.concatenate([nodes.numpy() for nodes in self.node_idx])
        holds = sp.csr_matrix((np.ones(len(node_M), dtype=np.int64), (client_M, node_M)))
        num_groups, group_C = connected_components(holds @ holds.T, directed=False)
        return () if num_groups == count else tuple(int(group) for group in group_C)

    def content_hash(self, identity: dict[str, Any]) -> str:
        """Return the SHA-256 (hex) of the partition, the split, the graph and of what they were made by."""
        digest = hashlib.sha256(canonical_json(identity).encode())
        digest.update(self.graph_hash.encode())
        for tensor in (*self.node_idx, *self.roles, *self.pairs, *self.candidates, *self.cross_edges):
            digest.update(tensor.numel().to_bytes(8, "little"))
            digest.update(content(tensor))
        return digest.hexdigest()

    def save(self, path: Path) -> None:
        """Write the record in one step, so that no reader ever sees half of it.

        Raises:
            ValueError: If the cache folder cannot be written.
        """
        state = {
            "graph_hash": self.graph_hash,
            "node_idx": list(self.node_idx),
            "roles": list(self.roles),
            "pairs": list(self.pairs),
            "candidates": list(self.candidates),
            "cross_edges": list(self.cross_edges),
            "content_hash": self.content_hash({}),
        }
        save(path, state)

    @classmethod
    def load(cls, path: Path) -> "PartitionRecord | None":
        """Read a record; None if there is none, and None with a warning if the file is damaged."""

        def check(state: dict[str, Any]) -> "PartitionRecord":
            names = ("node_idx", "roles", "pairs", "candidates", "cross_edges")
            record = cls(graph_hash=state["graph_hash"], **{name: tuple(state.get(name, ())) for name in names})
            if record.content_hash({}) != state["content_hash"]:
                raise ValueError("its content has changed")
            return record

        return load(path, "The cached partition", check)


def canonical_json(value: Any) -> str:
    """Return JSON that is equal for equal values.

    Raises:
        ValueError: A value is not plain, as an attribute of a source of the user's own may be.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_refuse)


def _refuse(value: Any) -> NoReturn:
    raise ValueError(
        f"data cannot be told from others by a {type(value).__name__}, which the identity() of their source, "
        "partitioner or splitter has: keep numbers, texts, and lists and dicts of these as attributes, or override "
        "identity()"
    )


def hash_graph(data: Data) -> str:
    """Return the SHA-256 (hex) of everything on a graph but its features: edges, labels, public masks, membership."""
    digest = hashlib.sha256(str(data.num_nodes).encode())
    for key in sorted(data.keys()):
        if key not in ("x", "source_idx") and isinstance(data[key], Tensor):
            digest.update(f"{key}{tuple(data[key].shape)}".encode())
            digest.update(content(data[key]))
    return digest.hexdigest()


def content(tensor: Tensor) -> memoryview:
    """The bytes of a tensor, without a copy of them."""
    return tensor.detach().contiguous().numpy().reshape(-1).view(np.uint8).data


def hash_features(x_NF: Tensor) -> str:
    """Return shape and CRC-32 (hex) of the features: they may be gigabytes, and no partitioner here reads them."""
    return f"{tuple(x_NF.shape)} {zlib.crc32(x_NF.detach().contiguous().numpy().data):08x}"
