"""The federation's data: what each client holds and how it is split, behind Lightning's data interface."""

import hashlib
import logging
import warnings
from collections.abc import Sequence
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from lightning import LightningDataModule
from torch import Tensor
from torch_geometric.data import Data

from fl_lightning.batches.base import Collator
from fl_lightning.batches.client_examples import ClientExamples
from fl_lightning.batches.client_graph import ClientGraph
from fl_lightning.batches.examples import ExampleCollator
from fl_lightning.batches.graphs import GraphCollator
from fl_lightning.counts import Counted
from fl_lightning.data.partition.partitioners import GivenPartitioner, Partitioner
from fl_lightning.data.partition.record import (
    FORMAT_VERSION,
    PartitionRecord,
    canonical_json,
    hash_features,
    hash_graph,
)
from fl_lightning.data.partition.subgraphs import client_graphs
from fl_lightning.data.partition.table import PartitionTable
from fl_lightning.data.preparation import (
    Dropped,
    check_num_classes,
    dropped,
    names_of_classes,
    names_of_nodes,
)
from fl_lightning.data.settings import check_count, check_folder, check_seed
from fl_lightning.data.sources.base import GraphSource, Source
from fl_lightning.data.sources.examples import ExampleSource
from fl_lightning.data.sources.folders import cache_folder, data_root
from fl_lightning.data.sources.own import as_source
from fl_lightning.data.split import ClientSplit, GlobalSplit, Role, Splitter
from fl_lightning.federation import OwnNames, Roster
from fl_lightning.relations.topology import Topology

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    AnySource: TypeAlias = Source | Data | Sequence[GraphSource | Data | str | Path]
else:
    AnySource = Source  # what a configuration can hold


class FederatedDataModule(LightningDataModule, Counted):
    """Gives every client its subgraph of a global graph, or the examples that a source has for it.

    A graph's partition is cached: node indices and roles under a key of everything they depend on, the graph's content
    included; a record that is damaged is made anew. After :meth:`setup` only the clients' own data stay in memory.

    Args:
        source: A global graph, or clients that have examples of their own. From Python also a graph in memory, or a
            list of graphs, which are a client each.
        partitioner: Assigns a graph's nodes to clients; None where the graphs are clients by themselves.
        splitter: Gives nodes or examples their roles; None for ``GlobalSplit(train=0.4, val=0.3)`` on a graph and
            ``ClientSplit(train=0.6, val=0.2)`` on examples.
        relation_graph: Draws or reads the client relation graph; None for the one that the data set has, if any.
        batch_size: Examples of a mini-batch; None for all of a client's at once. Graphs are trained full-batch.
        steps_per_epoch: None for epochs that are passes: each client's training examples in random order, cut into
            mini-batches. A number for sampling: an epoch is so many mini-batches, each drawn by itself.
        drop_last: Leave out the last mini-batch of a pass if it is short (for nets with ``BatchNorm``, which cannot
            train on one example). A client with fewer examples than ``batch_size`` keeps its only batch.
        root: Folder of the data sets; None for ``$FL_DATA_ROOT``, else ``./data``.
        cache_dir: Folder of derived files; None for ``$FL_CACHE_DIR``, else ``~/.cache/fl_lightning``.
        seed: Of the split, of what a source of examples draws, and of the partition unless the partitioner has its own.

    Raises:
        ValueError: Settings are missing, out of range, or do not fit the kind of source.

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

    settings_prefix = "data."

    def __init__(
        self,
        source: AnySource,
        partitioner: Partitioner | None = None,
        splitter: Splitter | None = None,
        *,
        relation_graph: Topology | None = None,
        batch_size: int | None = None,
        steps_per_epoch: int | None = None,
        drop_last: bool = False,
        root: str | None = None,
        cache_dir: str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.source: Source = as_source(source)
        kind = type(self.source).__name__
        if isinstance(self.source, GraphSource):
            if partitioner is None and self.source.clients_by is not None:
                partitioner = GivenPartitioner(self.source.clients_by)
            if partitioner is None:
                raise ValueError(f"data.partitioner is missing: {kind} is one graph, which has to be cut into clients")
            if batch_size is not None or steps_per_epoch is not None:
                raise ValueError(
                    f"data.batch_size and data.steps_per_epoch are for examples; {kind} is a graph, trained full-batch"
                )
        elif not isinstance(self.source, ExampleSource):
            raise ValueError(f"data.source is {kind}, which is neither a GraphSource nor an ExampleSource")
        elif partitioner is not None:
            raise ValueError(
                f"data.partitioner is {type(partitioner).__name__}, but {kind} has its own clients: drop it"
            )
        for count, value in {"batch_size": batch_size, "steps_per_epoch": steps_per_epoch}.items():
            if value is not None:
                check_count(f"data.{count}", value)
        if not isinstance(drop_last, bool):
            raise ValueError(f"data.drop_last is {drop_last!r}: give true or false")
        if drop_last and (batch_size is None or steps_per_epoch is not None):
            raise ValueError(
                "data.drop_last is for passes in mini-batches: set data.batch_size and leave data.steps_per_epoch unset"
            )
        check_seed("data.seed", seed)
        for name, part, base in (
            ("partitioner", partitioner, Partitioner),
            ("splitter", splitter, Splitter),
            ("relation_graph", relation_graph, Topology),
        ):
            if not isinstance(part, base | None):
                raise ValueError(f"data.{name} is {part!r}, which is no {base.__name__}: give one, or none")
        self.partitioner = partitioner
        self.splitter = splitter or (GlobalSplit() if partitioner is not None else ClientSplit(train=0.6, val=0.2))
        self.relation_graph = relation_graph
        self.batch_size = batch_size
        self.steps_per_epoch = steps_per_epoch
        self.drop_last = drop_last
        self.root = data_root(root)
        self.cache_dir = cache_folder(cache_dir)
        check_folder("data.root", self.root, "Set FL_DATA_ROOT or data.root to the folder of the data sets.")
        check_folder("cache_dir", self.cache_dir, "Set FL_CACHE_DIR or data.cache_dir to a folder of yours.")
        self.seed = seed
        self._clients: tuple[ClientGraph, ...] | tuple[ClientExamples, ...] = ()
        self._prepared: tuple[Data, PartitionRecord] | None = None  # until setup(), so that a graph is read once
        self._edges_lost: tuple[int, ...] = ()
        self._source_idx: tuple[Tensor, ...] = ()
        self._node_names: tuple[str, ...] | None = None
        self._named_nodes: tuple[tuple[str, ...], ...] | None = None
        self._class_names: tuple[str, ...] | None = None
        self._dropped = Dropped()
        self._num_outputs = 0
        self._groups: tuple[int, ...] = ()
        self._relation_CC: Tensor | None = None
        self._partition_hash = ""

    def prepare_data(self) -> None:
        """Make and cache the partition unless it is cached (one process of a machine; :meth:`setup` needs no more)."""
        if isinstance(self.source, GraphSource) and not self._clients:
            data = self._load_graph()
            self._prepared = data, self._record(data)

    def setup(self, stage: str | None = None) -> None:
        """Build ``clients``: read a graph and its cached partition (without a cache it is made first), or examples."""
        if self._clients:
            return
        if isinstance(self.source, GraphSource):
            self._setup_graph()
        elif isinstance(self.source, ExampleSource):
            self._setup_examples(self.source)
        if self.relation_graph is not None:
            self._relation_CC = self.relation_graph.relations(self.num_clients, self.seed)

    def _setup_graph(self) -> None:
        assert isinstance(self.source, GraphSource)
        if self._prepared is None:
            self.prepare_data()
        assert self._prepared is not None
        data, record = self._prepared
        self._prepared = None
        own = self.partitioner is not None and getattr(self.partitioner, "attribute", None) == self.source.clients_by
        self._clients, self._edges_lost = client_graphs(data, record, self.source.client_names if own else None)
        index_N = data.get("own_idx", data.source_idx)
        self._source_idx = tuple(index_N[node_idx_N] for node_idx_N in record.node_idx)
        if (names := self._node_names) is not None:
            loaded = [data.source_idx[node_idx_N].tolist() for node_idx_N in record.node_idx]
            self._named_nodes = tuple(tuple(names[node] for node in nodes) for nodes in loaded)
        self._groups = record.groups()
        self._num_outputs = max(int(data.y.max()) + 1, len(self._class_names or ()))
        self._partition_hash = record.content_hash(self._identity)

    def _setup_examples(self, source: ExampleSource) -> None:
        try:
            examples = source.load(self.root, self.seed)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from error
        labels = [torch.zeros(len(y_N), dtype=torch.int64) if y_N.is_floating_point() else y_N for y_N in examples.y]
        offsets = torch.tensor([0, *map(len, labels)]).cumsum(0)
        slices = [torch.arange(*offsets[client : client + 2].tolist()) for client in range(len(labels))]
        label_N = torch.cat(labels)
        roles = self.splitter(Data(y=label_N, num_nodes=len(label_N)), slices, self.seed)
        used = [role_N != Role.UNUSED for role_N in roles]  # what has no role would only be carried along
        self._clients = tuple(
            ClientExamples(
                name=name,
                x_NX=x_NX[used_N],
                y_N=y_N[used_N],
                train_mask_N=(role_N == Role.TRAIN)[used_N],
                val_mask_N=(role_N == Role.VAL)[used_N],
                test_mask_N=(role_N == Role.TEST)[used_N],
            )
            for name, x_NX, y_N, role_N, used_N in zip(examples.names, examples.x, examples.y, roles, used, strict=True)
        )
        self._source_idx = tuple(used_N.nonzero().squeeze(1) for used_N in used)
        self._num_outputs = examples.num_outputs
        self._relation_CC = examples.relation_CC
        digest = hashlib.sha256(canonical_json(self._identity).encode())
        for tensor in (*examples.x, *examples.y, *roles):
            digest.update(f"{tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().numpy().tobytes())
        self._partition_hash = digest.hexdigest()

    @property
    def clients(self) -> tuple[ClientGraph, ...] | tuple[ClientExamples, ...]:
        """What each client holds, in the partitioner's or the source's order.

        Raises:
            RuntimeError: Before :meth:`setup`.
        """
        if not self._clients:
            raise RuntimeError("The clients exist only after setup(); call datamodule.setup() first.")
        return self._clients

    @cached_property
    def roster(self) -> Roster:
        """Who the clients are; what a federation is set up from instead of their data.

        Raises:
            RuntimeError: Before :meth:`setup`.
        """
        return Roster.of(
            self.clients,
            num_outputs=self.num_outputs,
            relation_CC=self.relation_CC,
            groups=self.groups,
            partition_hash=self.partition_hash,
        )

    @property
    def num_clients(self) -> int:
        """Clients."""
        return len(self.clients)

    @property
    def num_features(self) -> int | tuple[int, ...]:
        """Features of a node or of an example that is a vector, else the shape of an example; alike in all clients."""
        return self.roster.num_features

    @property
    def num_outputs(self) -> int:
        """Classes of the whole federation (a client may lack some), or numbers of a target."""
        return self._num_outputs if self.clients else 0

    @property
    def relation_CC(self) -> Tensor | None:
        """The client relation graph, non-negative, symmetric, zero diagonal, (C, C); None if there is none."""
        return self._relation_CC if self.clients else None

    @property
    def groups(self) -> tuple[int, ...]:
        """Each client's group, where clients of one group were drawn from one part of the graph; empty for none."""
        return self._groups if self.clients else ()

    @property
    def has_validation(self) -> bool:
        """Whether any client has a node or example to validate on; without one there are no validation metrics."""
        return any(bool(client.val_mask_N.any()) for client in self.clients)

    def source_idx_N(self, client: int) -> Tensor:
        """The user's own numbers of what a client holds, int64 (N,).

        Of a graph's nodes the numbers that they have in what the source loads, before preparation and partition; of
        examples those within the client's own in the source.
        """
        return self._source_idx[client] if self.clients else torch.empty(0)

    @property
    def node_names(self) -> tuple[str, ...] | None:
        """For each of the source's nodes its name, where the source's graph has a list ``node_names``."""
        return self._node_names if self.clients else None

    def own_names(self, client: int) -> OwnNames:
        """What the user calls a client's nodes or examples, and the classes.

        Raises:
            RuntimeError: Before :meth:`setup`.
        """
        return OwnNames(
            number_N=self._source_idx[client] if self.clients else torch.empty(0),
            names=None if self._named_nodes is None else self._named_nodes[client],
            class_names=self.class_names,
        )

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """What the classes are called, where the source's graph has a list ``class_names`` or the source knows."""
        return self._class_names or self.source.class_names

    def collator(
        self, clients: Sequence[ClientGraph] | Sequence[ClientExamples], *, device: torch.device, dtype: torch.dtype
    ) -> Collator:
        """Make the batches of clients of this module's kind: its own, or changed copies of them."""
        graphs = [client for client in clients if isinstance(client, ClientGraph)]
        examples = [client for client in clients if isinstance(client, ClientExamples)]
        if graphs:
            return GraphCollator(graphs, layout=self.roster.layout, device=device, dtype=dtype)
        return ExampleCollator(
            examples,
            batch_size=self.batch_size,
            steps_per_epoch=self.steps_per_epoch,
            drop_last=self.drop_last,
            device=device,
            dtype=dtype,
        )

    @property
    def partition_hash(self) -> str:
        """SHA-256 (hex) of graph, partition and split: a run resumes only where it is equal."""
        return self._partition_hash if self.clients else ""

    def cache_key(self, data: Data) -> str:
        """SHA-256 (hex) of everything the partition and the split of a prepared graph are computed from."""
        key = {
            **self._identity,
            "graph": [hash_graph(data), hash_features(data.x)],
            "versions": {name: version(name) for name in ("pymetis", "scikit-network")},
            "format_version": FORMAT_VERSION,
        }
        return hashlib.sha256(canonical_json(key).encode()).hexdigest()

    def node_attribute(self, name: str) -> Tensor:
        """An attribute that the source gives each node of the prepared global graph, such as a planted community.

        Raises:
            ValueError: The graph has no such attribute.
        """
        if not isinstance(self.source, GraphSource):
            raise ValueError(f"{type(self.source).__name__} is no graph, so its nodes have no {name!r}")
        data = self._load_graph()
        if data.get(name) is None or name not in data.node_attrs():
            raise ValueError(f"{type(self.source).__name__}'s graph has no {name!r}: {', '.join(data.node_attrs())}")
        attribute: Tensor = data[name]
        return attribute

    def statistics(self, *, non_iidness: bool = True) -> PartitionTable:
        """Describe the clients: sizes, classes, of graphs also lost edges and clustering, and how unlike they are.

        Args:
            non_iidness: Whether to measure that too, which takes seconds on graphs with wide features.
        """
        if graphs := [client for client in self.clients if isinstance(client, ClientGraph)]:
            return PartitionTable.from_graphs(
                graphs,
                edges_lost=self._edges_lost,
                num_classes=self.num_outputs,
                seed=self.seed,
                dropped=self._dropped,
                non_iidness=non_iidness,
                class_names=self.class_names,
            )
        examples = [client for client in self.clients if isinstance(client, ClientExamples)]
        return PartitionTable.from_examples(examples, num_classes=self.num_outputs, class_names=self.class_names)

    @property
    def _identity(self) -> dict[str, Any]:
        identity = {"source": self.source.identity(), "splitter": self.splitter.identity(), "seed": self.seed}
        if isinstance(self.source, GraphSource) and self.partitioner is not None:
            identity["preparation"] = self.source.preparation.identity()
            identity["partitioner"] = self.partitioner.identity()
        return identity

    def _load_graph(self) -> Data:
        assert isinstance(self.source, GraphSource)
        raw, data = self.source.prepared(self.root, self.cache_dir)
        title = str(self.source)
        self._node_names = names_of_nodes(raw, title)
        self._class_names = names_of_classes(raw, int(data.y.max()) + 1, title) or self.source.class_names
        check_num_classes(data.y, self._class_names, title)
        self._dropped = dropped(raw, data)
        if self._dropped.num_nodes and not self.source.benchmark:
            warnings.warn(
                f"{self.source}: largest_component drops {self._dropped.num_nodes:,} of {len(raw.x):,} nodes, "
                f"{self._dropped.num_edges:,} of {raw.edge_index.shape[1]:,} edges and {self._dropped.num_classes} "
                "classes; set it to false on the source to keep them.",
                stacklevel=2,
            )
        return data

    def _record(self, data: Data) -> PartitionRecord:
        """Read the cached partition of a graph, or make and cache it."""
        path = self.cache_dir / "partitions" / f"{self.cache_key(data)}.pt"
        return PartitionRecord.load(path) or self._make_record(data, path)

    def _make_record(self, data: Data, path: Path) -> PartitionRecord:
        assert self.partitioner is not None
        node_idx = self.partitioner(data, self.seed)
        roles = self.splitter(data, node_idx, self.seed)
        record = PartitionRecord(node_idx=tuple(node_idx), roles=tuple(roles), graph_hash=hash_graph(data))
        record.save(path)
        _log.info("Partitioned %d nodes into %d clients: %s", data.num_nodes, len(node_idx), path)
        return record
