"""The federation's data: what each client holds and how it is split, behind Lightning's data interface."""

import dataclasses
import functools
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from lightning import LightningDataModule
from torch import Tensor
from torch_geometric.data import Data

from fl_lightning.batches.base import Collator
from fl_lightning.batches.samplers import GraphSampler, NeighborSampler
from fl_lightning.counts import Counted
from fl_lightning.data.allocation import Allocation, Asked
from fl_lightning.data.heterogeneity.base import Heterogeneity, check_heterogeneity, with_heterogeneity
from fl_lightning.data.mapped import with_mapped_inputs
from fl_lightning.data.partition.partitioners import Partitioner
from fl_lightning.data.partition.spreads import target_spreads
from fl_lightning.data.partition.table import PartitionTable
from fl_lightning.data.settings import check_count, check_flag, check_folder, check_seed
from fl_lightning.data.sketch import sketch
from fl_lightning.data.sources.base import Source
from fl_lightning.data.sources.folders import cache_folder, data_root
from fl_lightning.data.sources.links import Links
from fl_lightning.data.sources.own import as_source
from fl_lightning.data.split import Splitter
from fl_lightning.federation import ClientRegistry, UserNames
from fl_lightning.relations.topology import Topology
from fl_lightning.tasks import Drawing, Task

if TYPE_CHECKING:
    AnySource: TypeAlias = Source | Data | Sequence[Source | Data | str | Path] | Sequence[Sequence[Data]]
else:
    AnySource = Source  # what a configuration can hold


class FederatedDataModule(LightningDataModule, Counted):
    """Gives every client its subgraph of a global graph, or the examples that a source has for it.

    A graph's partition is cached: node indices and roles under a key of everything they depend on, the graph's content
    included; a damaged record is regenerated. After :meth:`setup` only the clients' own data stay in memory. What
    is learned, ``task``, follows from the source.

    Args:
        source: A global graph, a set of graphs, or clients with their own examples. From Python also a graph in memory,
            a list or a dictionary of graphs, each a client, a list of lists of graphs, in which each graph has its own
            label, a list or a dictionary of the clients' pairs of inputs and targets, or one such pair.
        partitioner: Assigns a graph's nodes, or the examples of a set, to clients; None where these are given.
        splitter: Gives nodes, pairs or examples their roles; None for ``GlobalSplit(train=0.4, val=0.3)`` on a graph,
            ``GlobalSplit(train=0.85, val=0.05)`` on its links, ``ChronologicalSplit`` with a gap on readings of road
            sensors, and ``ClientSplit(train=0.6, val=0.2)`` on other examples.
        heterogeneity: Kinds of heterogeneity that are simulated, such as ``FeatureNoise``, applied one after another to
            what the clients hold after partition and split (:mod:`fl_lightning.data.heterogeneity`); None for none.
        relation_graph: Draws or reads the client relation graph; None for the one that the data set has, if any.
        batch_size: Examples of a mini-batch; None for all of a client's at once. Nodes are trained full-batch, unless
            there is a ``sampler``.
        cross_edges: Tell each client of the edges between its nodes and those of other clients, as both ends know of
            them in many federations; methods such as ``FedGCN`` need it. For a graph that is cut into disjoint clients.
        steps_per_epoch: None for epochs that are passes: each client's training examples in random order, cut into
            mini-batches. A number for sampling: an epoch consists of that many mini-batches, each drawn independently.
        drop_last: Leave out the last mini-batch of a pass if it is short (for nets with ``BatchNorm``, which cannot
            train on one example). A client with fewer examples than ``batch_size`` keeps its only batch.
        sampler: For graphs that do not fit: each step trains on a part of the client's graph, with ``batch_size``
            training nodes and sampled neighbors of theirs (``NeighborSampler``), or ``batch_size`` clusters
            (``ClusterSampler``). Models are scored on whole graphs. None to train full-batch.
        memory_map: Keep the clients' inputs (features of nodes, examples) in files of ``cache_dir`` that are mapped
            into memory, for data that do not fit: what a step needs is read, and the system may drop it again. The
            files vanish with the process.
        root: Folder of the data sets; None for ``$FL_DATA_ROOT``, else ``./data``.
        cache_dir: Folder of derived files; None for ``$FL_CACHE_DIR``, else ``~/.cache/fl_lightning``.
        seed: Of the split, of what a source of examples draws, of simulated heterogeneity, and of the partition unless
            the partitioner has its own.

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
        heterogeneity: list[Heterogeneity] | None = None,
        relation_graph: Topology | None = None,
        cross_edges: bool = False,
        batch_size: int | None = None,
        steps_per_epoch: int | None = None,
        drop_last: bool = False,
        sampler: GraphSampler | None = None,
        memory_map: bool = False,
        root: str | None = None,
        cache_dir: str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.source: Source = as_source(source)
        partitioner = self.source.partitioner_for(partitioner)
        self._check_sampler(sampler, batch_size)
        if not self.source.takes_batches and sampler is None and (batch_size, steps_per_epoch) != (None, None):
            raise ValueError(
                f"data.batch_size and data.steps_per_epoch are for examples; {type(self.source).__name__} is a graph, "
                "trained full-batch: leave them out, or set data.sampler to train on parts of the graph"
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
        check_flag("data.cross_edges", cross_edges)
        check_flag("data.memory_map", memory_map)
        if cross_edges and not (self.source.keeps_cross_edges and self.source.is_cut_by(partitioner)):
            hint = ": set candidates to across on Links" if isinstance(self.source, Links) else ""
            raise ValueError(
                "data.cross_edges is for the nodes of a graph that is cut into clients, but data.source is "
                f"{type(self.source).__name__}: leave it out{hint}"
            )
        for name, part, base in (
            ("partitioner", partitioner, Partitioner),
            ("splitter", splitter, Splitter),
            ("relation_graph", relation_graph, Topology),
        ):
            if not isinstance(part, base | None):
                raise ValueError(f"data.{name} is {part!r}, which is not a {base.__name__}: give one, or none")
        self.partitioner = partitioner
        self.splitter = splitter or self.source.default_splitter
        self._splitter_is_given = splitter is not None
        self.heterogeneity = check_heterogeneity(heterogeneity)
        self.relation_graph = relation_graph
        self.cross_edges = cross_edges
        self.batch_size = batch_size
        self.steps_per_epoch = steps_per_epoch
        self.drop_last = drop_last
        self.sampler = sampler
        self.memory_map = memory_map
        self.root = data_root(root)
        self.cache_dir = cache_folder(cache_dir)
        check_folder("data.root", self.root, "Set FL_DATA_ROOT or data.root to the folder of the data sets.")
        check_folder("cache_dir", self.cache_dir, "Set FL_CACHE_DIR or data.cache_dir to a folder of yours.")
        self.seed = seed
        self._allocation: Allocation | None = None
        self._prepared: Any = None  # until setup(), so that a graph is read once

    def _check_sampler(self, sampler: GraphSampler | None, batch_size: int | None) -> None:
        """Refuse a sampler for anything but the nodes of graphs, or without a batch size."""
        if sampler is None:
            return
        if not isinstance(sampler, GraphSampler):
            raise ValueError(f"data.sampler is {sampler!r}: give NeighborSampler or ClusterSampler, or leave it out")
        name = type(sampler).__name__
        if self.source.takes_batches:
            raise ValueError(
                f"data.sampler is {name}, which is for the nodes of graphs, but {type(self.source).__name__} has other "
                "examples: leave it out; data.batch_size alone draws mini-batches of these"
            )
        if batch_size is None:
            unit = "training nodes" if isinstance(sampler, NeighborSampler) else "clusters"
            raise ValueError(f"data.sampler is {name}: set data.batch_size too, the number of {unit} in a step")

    @property
    def _asked(self) -> Asked:
        return Asked(
            partitioner=self.partitioner,
            splitter=self.splitter,
            root=self.root,
            cache_dir=self.cache_dir,
            seed=self.seed,
            cross_edges=self.cross_edges,
            splitter_is_given=self._splitter_is_given,
        )

    def prepare_data(self) -> None:
        """Make and cache the partition unless it is cached (one process of a machine; :meth:`setup` needs no more)."""
        if self._allocation is None:
            self._prepared = self.source.prepare(self._asked)

    def setup(self, stage: str | None = None) -> None:
        """Build ``clients``: read a graph and its cached partition (without a cache it is made first), or examples."""
        if self._allocation is not None:
            return
        if self._prepared is None:
            self.prepare_data()
        prepared, self._prepared = self._prepared, None
        allocation = self.source.allocate(self._asked, prepared)
        del prepared
        allocation = with_heterogeneity(self.heterogeneity, allocation, self.seed)
        if self.splitter.is_inductive:
            if not allocation.task.is_on_nodes:
                raise ValueError(
                    f"data.splitter is inductive, which is for nodes, but the task is of {allocation.task.examples}, "
                    "which training does not see anyway: take the splitter in it"
                )
            clients = tuple(dataclasses.replace(client, is_inductive=True) for client in allocation.clients)
            allocation = dataclasses.replace(allocation, clients=clients)
        if self.memory_map:
            clients = tuple(with_mapped_inputs(allocation.clients, self.cache_dir))
            allocation = dataclasses.replace(allocation, clients=clients)
        self._allocation = allocation
        self._relation_CC = self._allocation.relation_CC
        if self.relation_graph is not None:
            self._relation_CC = self.relation_graph.relations(self.num_clients, self.seed)

    @property
    def allocation(self) -> Allocation:
        """What the source returned for the clients.

        Raises:
            RuntimeError: Before :meth:`setup`.
        """
        if self._allocation is None:
            raise RuntimeError("The clients exist only after setup(); call datamodule.setup() first.")
        return self._allocation

    @property
    def task(self) -> Task:
        """The task."""
        return self.allocation.task

    @property
    def clients(self) -> Sequence[Any]:
        """What each client holds, in the partitioner's or the source's order."""
        return self.allocation.clients

    @cached_property
    def registry(self) -> ClientRegistry:
        """Who the clients are; a federation is set up from this instead of from their data.

        Raises:
            RuntimeError: Before :meth:`setup`.
        """
        return ClientRegistry.of(
            self.clients,
            task=self.task,
            num_outputs=self.num_outputs,
            relation_CC=self.relation_CC,
            groups=self.groups,
            own_inputs=self.allocation.own_inputs,
            own_outputs=self.allocation.own_outputs,
            partition_hash=self.partition_hash,
            contents=self._contents,
        )

    @property
    def _contents(self) -> str:
        """What features and relations are, which not every machine computes to the last bit."""
        relations = "" if self.relation_CC is None else sketch(self.relation_CC)
        return " ".join(filter(None, (self.allocation.features, relations)))

    @property
    def num_clients(self) -> int:
        """Number of clients."""
        return len(self.clients)

    @property
    def num_features(self) -> int | tuple[int, ...]:
        """Number of features of a node or a vector example, else the shape of an example; the same for all clients."""
        return self.registry.num_features

    @property
    def num_outputs(self) -> int:
        """Classes or labels of the whole federation (a client may lack some), or numbers of a target."""
        return self.allocation.num_outputs

    @property
    def relation_CC(self) -> Tensor | None:
        """The client relation graph, non-negative, symmetric, zero diagonal, (C, C); None if there is none."""
        return self._relation_CC if self.clients else None

    @property
    def groups(self) -> tuple[int, ...]:
        """Each client's group, if clients of one group were drawn from one part of the graph; empty for none."""
        return self.allocation.groups

    @property
    def has_validation(self) -> bool:
        """Whether any client has a node or example to validate on; without one there are no validation metrics."""
        return any(bool(client.val_mask_N.any()) for client in self.clients)

    def source_idx_N(self, client: int) -> Tensor:
        """The user's own numbers of what a client holds, int64 (N,).

        Of a graph's nodes the numbers that they have in what the source loads, before preparation and partition; of
        examples those within the client's own in the source.
        """
        return self.allocation.source_idx[client]

    @property
    def node_names(self) -> tuple[str, ...] | None:
        """The name of each of the source's nodes, if the source's graph has a list ``node_names``."""
        return self.allocation.node_names

    def user_names(self, client: int) -> UserNames:
        """The user's names of a client's examples and of the classes."""
        named = self.allocation.named_nodes
        return UserNames(
            number_N=self.source_idx_N(client),
            names=None if named is None else named[client],
            class_names=self.class_names,
        )

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The names of the classes, if the source's graph has a list ``class_names`` or the source knows them."""
        return self.source.class_names if self._allocation is None else self._allocation.class_names

    @property
    def drawing(self) -> Drawing:
        """How training examples are drawn in steps."""
        return Drawing(
            batch_size=self.batch_size,
            steps_per_epoch=self.steps_per_epoch,
            drop_last=self.drop_last,
            sampler=self.sampler,
        )

    def collator(self, clients: Sequence[Any], *, device: torch.device, dtype: torch.dtype) -> Collator:
        """Make batches for this module's task, of its clients or of changed copies of them."""
        layout = self.registry.layout
        return self.task.collator(clients, layout=layout, drawing=self.drawing, device=device, dtype=dtype)

    @property
    def partition_hash(self) -> str:
        """SHA-256 (hex) of graph, partition, split and simulated heterogeneity: a run resumes only if it is equal."""
        return self.allocation.partition_hash

    def whole_graph(self) -> Data:
        """The prepared graph of which the clients hold parts.

        Raises:
            ValueError: There is none.
        """
        return self.source.whole_graph(self._asked)

    def common_graph(self) -> Data:
        """The prepared graph that was cut into the clients, for the edges between them.

        Raises:
            ValueError: The clients' graphs are no parts of one.
        """
        if not self.source.is_cut_by(self.partitioner):
            raise ValueError(
                f"strategy.graph is 'whole', but {type(self.source).__name__} is no graph that was cut into clients: "
                "set it to 'cut'"
            )
        if any(kind.changes_edges for kind in self.heterogeneity):
            raise ValueError(
                "strategy.graph is 'whole', but data.heterogeneity changes edges of the clients, which the whole graph "
                "still has: set it to 'cut'"
            )
        return self.whole_graph()

    def node_attribute(self, name: str) -> Tensor:
        """An attribute that the source gives each node of the prepared global graph, such as a planted community.

        Raises:
            ValueError: The graph has no such attribute.
        """
        data = self.whole_graph()
        if data.get(name) is None or name not in data.node_attrs():
            raise ValueError(f"{type(self.source).__name__}'s graph has no {name!r}: {', '.join(data.node_attrs())}")
        attribute: Tensor = data[name]
        return attribute

    def statistics(self, *, non_iidness: bool = True) -> PartitionTable:
        """Describe the clients: sizes, classes, of graphs also lost edges and clustering, and how unlike they are.

        Args:
            non_iidness: Whether to measure that too, which takes seconds on graphs with wide features.
        """
        table = self.source.describe(self.allocation, seed=self.seed, non_iidness=non_iidness)
        measure = table.measure_spreads or functools.partial(
            target_spreads, self.allocation.clients, self.allocation.task
        )
        return dataclasses.replace(table, measure_spreads=measure, simulated=self.allocation.simulated)
