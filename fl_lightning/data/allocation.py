"""What a source gives the clients of a federation, and what it is asked with."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from fl_lightning.data.partition.partitioners import Partitioner
from fl_lightning.data.partition.record import canonical_json, content
from fl_lightning.data.preparation import Dropped
from fl_lightning.data.split import Role, Splitter
from fl_lightning.tasks import Task


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The settings of a data module that a source's clients depend on.

    Attributes:
        partitioner: Assigns a graph's nodes to clients; None if the source has its own clients.
        splitter: Gives examples their roles.
        root: Folder of the data sets.
        cache_dir: Folder of derived files.
        seed: Of all draws.
        cross_edges: Keep the edges between clients.
        splitter_is_given: Whether the splitter was chosen, and is not the default.
    """

    partitioner: Partitioner | None
    splitter: Splitter
    root: Path
    cache_dir: Path
    seed: int
    cross_edges: bool = False
    splitter_is_given: bool = True

    def identity(self, source: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        """What the clients of a source depend on, as JSON-ready values."""
        kept = {"cross_edges": True} if self.cross_edges else {}
        return {"source": source, "splitter": self.splitter.identity(), "seed": self.seed, **kept, **more}


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """What each client holds, and what is known of all of them.

    Attributes:
        task: What is learned.
        clients: What each client holds.
        num_outputs: Classes or labels of the whole federation, or numbers of a target.
        source_idx: For each client the user's own numbers of its examples, int64.
        partition_hash: SHA-256 (hex) of data, partition and split.
        features: What the features of a graph's nodes are (:mod:`fl_lightning.data.sketch`), which the hash leaves out;
            empty for none.
        groups: Each client's group, where several are drawn from one part of a graph; else empty.
        relation_CC: Client relation graph; None if the data have none.
        class_names: What the classes are called; None where that is not known.
        node_names: The name of each of the source's nodes; None where they have none.
        named_nodes: For each client the names of its nodes; None if they have none.
        edges_lost: For each client the directed edges that a partition cut off; empty without graphs.
        dropped: What the preparation of a graph left out.
        own_inputs: Whether features mean something else for each client, so that the layers that read them are its own.
        own_outputs: For each client how many of the outputs are its own; empty where outputs mean the same for all.
        simulated: What ``data.heterogeneity`` has changed, and the names of the clients that it chose.
    """

    task: Task
    clients: Sequence[Any]
    num_outputs: int
    source_idx: Sequence[Tensor]
    partition_hash: str
    features: str = ""
    groups: tuple[int, ...] = ()
    relation_CC: Tensor | None = None
    class_names: tuple[str, ...] | None = None
    node_names: tuple[str, ...] | None = None
    named_nodes: tuple[tuple[str, ...], ...] | None = None
    edges_lost: tuple[int, ...] = ()
    dropped: Dropped = field(default_factory=Dropped)
    own_inputs: bool = False
    own_outputs: tuple[int, ...] = ()
    simulated: tuple[tuple[str, tuple[str, ...]], ...] = ()


def split_examples(
    task: Task,
    targets: Sequence[Tensor],
    asked: Asked,
    given: Sequence[Tensor | None] | None = None,
    columns: Mapping[str, Tensor] | None = None,
) -> list[Tensor]:
    """The role of each example of clients that have their own, by its targets.

    Args:
        task: What is learned.
        targets: Of each client.
        asked: The settings of the data module.
        given: The roles that each client's examples come with, int8; None where they come without. A split goes by
            them only if all clients have them.
        columns: More that splitters can go by, of all clients' examples one after another.
    """
    labels = [task.target.strata(y_N) for y_N in targets]
    offsets = torch.tensor([0, *map(len, labels)]).cumsum(0)
    slices = [torch.arange(*offsets[client : client + 2].tolist()) for client in range(len(labels))]
    label_N = torch.cat(labels)
    known = [roles for roles in given or () if roles is not None]
    all_say = len(known) == len(labels)
    masks = user_masks_of(torch.cat(known)) if all_say else {}
    summary = Data(y=label_N, num_nodes=len(label_N), examples=task.examples, **masks, **(columns or {}))
    return asked.splitter(summary, slices, asked.seed)


def masks_of(role_N: Tensor) -> dict[str, Any]:
    """The fields of a client's data that say its examples' roles."""
    return {f"{role.name.lower()}_mask_N": role_N == role for role in (Role.TRAIN, Role.VAL, Role.TEST)}


def user_masks_of(role_N: Tensor) -> dict[str, Tensor]:
    """The same by the names that users give them, ``train_mask`` and so on."""
    return {name.removesuffix("_N"): mask_N for name, mask_N in masks_of(role_N).items()}


def digest_of(identity: Mapping[str, Any], tensors: Sequence[Tensor]) -> str:
    """SHA-256 (hex) of what data depend on, and of the data themselves."""
    digest = hashlib.sha256(canonical_json(identity).encode())
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)}".encode())
        digest.update(content(tensor))
    return digest.hexdigest()
