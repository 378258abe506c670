"""One graph that is cut into clients: the graph, and the partition with its split, which is cached."""

import copy
import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch_geometric.data import Data

from fl_lightning.data.allocation import Asked
from fl_lightning.data.own_code import own_code
from fl_lightning.data.partition.cross_edges import cross_edges
from fl_lightning.data.partition.record import (
    FORMAT_VERSION,
    PartitionRecord,
    canonical_json,
    hash_features,
    hash_graph,
)
from fl_lightning.data.preparation import Dropped
from fl_lightning.tasks import Task

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CutGraph:
    """A prepared graph with its partition.

    Attributes:
        data: The graph.
        task: What is learned of its nodes.
        record: Partition and split.
        class_names: What the classes are called; None where that is not known.
        node_names: The names of the nodes of the graph before preparation; None where they have none.
        dropped: What the preparation left out.
    """

    data: Data
    task: Task
    record: PartitionRecord
    class_names: tuple[str, ...] | None = None
    node_names: tuple[str, ...] | None = None
    dropped: Dropped = field(default_factory=Dropped)


def cache_key(data: Data, asked: Asked, identity: Mapping[str, Any]) -> str:
    """SHA-256 (hex) of everything the partition and the split of a prepared graph are computed from."""
    code = own_code(asked.partitioner, asked.splitter)
    key = {
        **identity,
        "graph": [hash_graph(data), hash_features(data.x)],
        "versions": {name: version(name) for name in ("pymetis", "scikit-network")},
        "format_version": FORMAT_VERSION,
        **({} if code is None else {"code": code}),
    }
    return hashlib.sha256(canonical_json(key).encode()).hexdigest()


def partition_of(data: Data, task: Task, asked: Asked, identity: Mapping[str, Any]) -> PartitionRecord:
    """Read the cached partition of a graph, or make and cache it.

    Raises:
        ValueError: The partitioner goes by classes, which nodes have not.
    """
    path = asked.cache_dir / "partitions" / f"{cache_key(data, asked, identity)}.pt"
    if (record := PartitionRecord.load(path)) is None:
        return _make(data, task, asked, path)
    asked.splitter.say_what_is_lacking(record.roles)
    return record


def _make(data: Data, task: Task, asked: Asked, path: Path) -> PartitionRecord:
    assert asked.partitioner is not None
    if asked.partitioner.needs_classes and not task.target.has_classes:
        raise ValueError(
            f"{type(asked.partitioner).__name__} shares nodes out by their classes, but these have "
            f"{task.target.name}: choose another partitioner, such as MetisPartitioner"
        )
    node_idx = asked.partitioner(data, asked.seed)
    split = copy.copy(data)
    split.y = task.target.strata(data.y)
    roles = asked.splitter(split, node_idx, asked.seed)
    record = PartitionRecord(
        node_idx=tuple(node_idx),
        roles=tuple(roles),
        graph_hash=hash_graph(data),
        cross_edges=cross_edges(data, node_idx, "data.cross_edges") if asked.cross_edges else (),
    )
    record.save(path)
    _log.info("Partitioned %d nodes into %d clients: %s", data.num_nodes, len(node_idx), path)
    return record
