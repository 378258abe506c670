"""The federation's data: a prepared graph, partitioned into clients and split, behind Lightning's data interface."""

import hashlib
import logging
import warnings
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import LightningDataModule
from torch import Tensor
from torch_geometric.data import Data

from fl_lightning.data.adjacency import adjacency_matrix
from fl_lightning.data.client_graph import ClientGraph
from fl_lightning.data.folders import cache_folder, data_root
from fl_lightning.data.partition import Partitioner
from fl_lightning.data.partition_record import FORMAT_VERSION, PartitionRecord, canonical_json, hash_graph
from fl_lightning.data.partition_table import PartitionTable
from fl_lightning.data.preparation import prepare_graph
from fl_lightning.data.source import GraphSource
from fl_lightning.data.split import GlobalSplit, Role, Splitter

_log = logging.getLogger(__name__)


class FederatedDataModule(LightningDataModule):
    """Loads a global graph, gives every client its subgraph, and caches the partition.

    The cache holds node indices and roles under a key of everything they depend on; a record that does not fit the
    graph, or is damaged, is made anew. After :meth:`setup` only the clients' subgraphs stay in memory.

    Args:
        source: The global graph.
        partitioner: Assigns nodes to clients.
        splitter: Gives nodes their roles; None for ``GlobalSplit(train=0.4, val=0.3)``.
        root: Folder of the data sets; None for ``$FL_DATA_ROOT``, else ``./data``.
        cache_dir: Folder of derived files; None for ``$FL_CACHE_DIR``, else ``~/.cache/fl_lightning``.
        seed: Of the split, and of the partition unless the partitioner has its own.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from fl_lightning.data import GivenPartitioner, PlantedCommunities
        >>> with TemporaryDirectory() as cache_dir:
        ...     source = PlantedCommunities(num_nodes=200, num_communities=4)
        ...     data = FederatedDataModule(source, GivenPartitioner(), cache_dir=cache_dir)
        ...     data.setup()
        >>> [client.name for client in data.clients], data.clients[0].num_nodes
        (['client-00', 'client-01', 'client-02', 'client-03'], 50)
    """

    def __init__(
        self,
        source: GraphSource,
        partitioner: Partitioner,
        splitter: Splitter | None = None,
        *,
        root: str | None = None,
        cache_dir: str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.source = source
        self.partitioner = partitioner
        self.splitter = splitter or GlobalSplit()
        self.root = data_root(root)
        self.cache_dir = cache_folder(cache_dir)
        self.seed = seed
        self._clients: tuple[ClientGraph, ...] = ()
        self._edges_lost: tuple[int, ...] = ()
        self._num_classes = 0
        self._partition_hash = ""

    def prepare_data(self) -> None:
        """Make and cache the partition unless it is cached (one process of a machine; sets no state)."""
        if PartitionRecord.load(self._cache_path) is None:
            self._make_record(self._load_graph())

    def setup(self, stage: str | None = None) -> None:
        """Read the graph and the cached partition and build ``clients``; without a cache it is made first."""
        if self._clients:
            return
        data = self._load_graph()
        record = PartitionRecord.load(self._cache_path)
        if record is None:
            record = self._make_record(data)
        elif record.graph_hash != hash_graph(data):
            warnings.warn(
                f"The cached partition {self._cache_path} belongs to another version of the graph in {self.root}; "
                "it is made anew.",
                stacklevel=2,
            )
            record = self._make_record(data)
        self._clients, self._edges_lost = _extract(data, record)
        self._num_classes = int(data.y.max()) + 1
        self._partition_hash = record.content_hash(self._identity)

    @property
    def clients(self) -> tuple[ClientGraph, ...]:
        """The clients' subgraphs, in the partitioner's order.

        Raises:
            RuntimeError: Before :meth:`setup`.
        """
        if not self._clients:
            raise RuntimeError("The clients exist only after setup(); call datamodule.setup() first.")
        return self._clients

    @property
    def num_clients(self) -> int:
        """Clients."""
        return len(self.clients)

    @property
    def num_features(self) -> int:
        """Features of a node, alike in all clients."""
        return self.clients[0].num_features

    @property
    def num_classes(self) -> int:
        """Classes of the global graph; a client may lack some."""
        return self._num_classes if self.clients else 0

    @property
    def partition_hash(self) -> str:
        """SHA-256 (hex) of graph, partition and split: a run resumes only where it is equal."""
        return self._partition_hash if self.clients else ""

    @property
    def cache_key(self) -> str:
        """SHA-256 (hex) of everything the partition and the split are computed from."""
        versions = {name: version(name) for name in ("pymetis", "scikit-network")}
        key = {**self._identity, "versions": versions, "format_version": FORMAT_VERSION}
        return hashlib.sha256(canonical_json(key).encode()).hexdigest()

    def node_attribute(self, name: str) -> Tensor:
        """An attribute that the source gives each node of the prepared global graph, such as a planted community.

        Raises:
            ValueError: The graph has no such attribute.
        """
        data = self._load_graph()
        if data.get(name) is None or name not in data.node_attrs():
            raise ValueError(f"{type(self.source).__name__}'s graph has no {name!r}: {', '.join(data.node_attrs())}")
        attribute: Tensor = data[name]
        return attribute

    def statistics(self) -> PartitionTable:
        """Describe the partition: sizes, lost edges, classes, clustering and how unlike the clients are."""
        return PartitionTable.from_clients(
            self.clients, edges_lost=self._edges_lost, num_classes=self.num_classes, seed=self.seed
        )

    @property
    def _identity(self) -> dict[str, Any]:
        return {
            "source": self.source.identity(),
            "preparation": asdict(self.source.preparation),
            "partitioner": self.partitioner.identity(),
            "splitter": self.splitter.identity(),
            "seed": self.seed,
        }

    @property
    def _cache_path(self) -> Path:
        return self.cache_dir / "partitions" / f"{self.cache_key}.pt"

    def _load_graph(self) -> Data:
        return prepare_graph(self.source.load(self.root, self.cache_dir), self.source.preparation)

    def _make_record(self, data: Data) -> PartitionRecord:
        node_idx = self.partitioner(data, self.seed)
        roles = self.splitter(data, node_idx, self.seed)
        record = PartitionRecord(node_idx=tuple(node_idx), roles=tuple(roles), graph_hash=hash_graph(data))
        record.save(self._cache_path)
        _log.info("Partitioned %d nodes into %d clients: %s", data.num_nodes, len(node_idx), self._cache_path)
        return record


def _extract(data: Data, record: PartitionRecord) -> tuple[tuple[ClientGraph, ...], tuple[int, ...]]:
    """Cut out each client's induced subgraph; also count the directed edges from it to other nodes."""
    matrix = adjacency_matrix(data.edge_index, data.num_nodes)
    width = max(2, len(str(len(record.node_idx) - 1)))
    clients, edges_lost = [], []
    for client, (node_idx_N, role_N) in enumerate(zip(record.node_idx, record.roles, strict=True)):
        rows = matrix[node_idx_N.numpy()]
        inside = rows[:, node_idx_N.numpy()].tocoo()
        edges_lost.append(int(rows.nnz - inside.nnz))
        clients.append(
            ClientGraph(
                name=f"client-{client:0{width}d}",
                x_NF=data.x[node_idx_N],
                edge_index_2E=torch.from_numpy(np.stack([inside.row, inside.col]).astype(np.int64)),
                y_N=data.y[node_idx_N],
                train_mask_N=role_N == Role.TRAIN,
                val_mask_N=role_N == Role.VAL,
                test_mask_N=role_N == Role.TEST,
                node_idx_N=node_idx_N,
            )
        )
    return tuple(clients), tuple(edges_lost)
