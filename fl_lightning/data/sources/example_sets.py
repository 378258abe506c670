"""One table, series or set of images, shared out by a partitioner: your own, in memory or in a file, and known ones.

Shape legend: N examples, X the shape of one, H numbers of a target.
"""

import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch_geometric.data import Data

from fl_lightning.batches.client_examples import ClientExamples
from fl_lightning.data.allocation import Allocation, Asked, digest_of, masks_of, user_masks_of
from fl_lightning.data.columns import Column, numbered, plain_column
from fl_lightning.data.settings import check_is_file, user_path
from fl_lightning.data.sources.array_file import reading
from fl_lightning.data.sources.in_file import InFile
from fl_lightning.data.sources.own_examples import OfKind, examples_of, rows_of
from fl_lightning.data.sources.parts import check_used, has_parts
from fl_lightning.data.sources.sets import SetSource
from fl_lightning.data.split import MASKS, GivenSplit, Role, Splitter
from fl_lightning.saved_tensors import load_data

#: What partitioners see of every example beside its class: the mean of its inputs.
_MEAN = "features"


class ExampleSetSource(OfKind, SetSource):
    """Independent examples without clients. Partitioners see of each its class, ``features`` (mean), and columns."""

    @abstractmethod
    def load(self, root: Path) -> tuple[Any, Mapping[str, Column]]:
        """Read the examples: a pair of inputs ``(N, *X)`` and targets, and columns by name, with N entries each.

        Args:
            root: Folder of the data sets (see :func:`fl_lightning.data.sources.folders.data_root`).

        Raises:
            FileNotFoundError: Files are missing.
            ValueError: They are not sound.
        """

    def allocate(self, asked: Asked, prepared: Any) -> Allocation:
        """Every client's examples; what has no role is left out."""
        assert asked.partitioner is not None
        try:
            given, columns = self.load(asked.root)
            whole = examples_of({"the set": rows_of("it", given)}, self.kind)
            _check_columns(columns, len(whole.y[0]))
            columns = {name: each if name in MASKS else plain_column(name, each) for name, each in columns.items()}
        except ValueError as error:
            raise ValueError(f"{self}: {error}") from error
        [x_NX], [y_N] = whole.x, whole.y
        task = whole.task
        traits = {name: numbered(column) for name, column in columns.items()}
        traits[_MEAN] = x_NX.flatten(1).double().mean(dim=1)
        [role_N] = whole.roles or (None,)
        if role_N is not None:
            traits |= user_masks_of(role_N)
        check_used(asked, given=role_N is not None, title=str(self))
        if MASKS[0] in columns and not asked.splitter_is_given:
            warnings.warn(
                f"{self}: the columns {', '.join(name for name in MASKS if name in columns)} are not used, the split "
                f"is {type(asked.splitter).__name__}'s; set data.splitter to GivenSplit to use them.",
                stacklevel=2,
            )
        summary = Data(y=task.target.strata(y_N), num_nodes=len(y_N), examples=self.noun, **traits)
        names, shares, roles = self.shared_out(asked, task, summary, columns)
        used = [share_M[role_M != Role.UNUSED] for share_M, role_M in zip(shares, roles, strict=True)]
        identity = asked.identity(self.identity(), partitioner=asked.partitioner.identity())
        return Allocation(
            task=task,
            clients=tuple(
                ClientExamples(name=name, x_NX=x_NX[M], y_N=y_N[M], **masks_of(role_M[role_M != Role.UNUSED]))
                for name, M, role_M in zip(names, used, roles, strict=True)
            ),
            num_outputs=whole.num_outputs,
            source_idx=tuple(used),
            partition_hash=digest_of(identity, (x_NX, y_N, *shares, *roles)),
            class_names=self.class_names,
        )


class InMemoryExampleSet(ExampleSetSource):
    """One table, series or set of images in memory.

    Args:
        examples: A pair of inputs (N, *X) and targets, as tensors, as arrays, or as a table and a column of pandas; or
            a ``Dataset`` of PyTorch with such pairs, as torchvision's are. Whole numbers (N,) are classes, a matrix of
            0 and 1 is of labels, everything else is numbers. A set with a split of its own is ``{"train": pair, "val":
            pair, "test": pair}``, of which ``val`` and ``test`` may be left out; it needs no splitter.
        columns: More about each example, texts or numbers by name: ``GivenPartitioner("hospital")`` makes a client of
            each value of one.
        task: Whether targets are ``classes``, ``labels`` or ``numbers``; None to tell by their type and shape.

    Example:
        >>> import torch
        >>> import fl_lightning as fl
        >>> images = torch.randn(200, 1, 8, 8), torch.arange(200) % 10
        >>> data = fl.FederatedDataModule(images, fl.data.DirichletPartitioner(num_clients=4, min_nodes=10))
        >>> data.setup()
        >>> len(data.clients), sum(client.size for client in data.clients), data.registry.num_outputs
        (4, 200, 10)
    """

    def __init__(self, examples: Any, columns: Mapping[str, Column] | None = None, task: str | None = None) -> None:
        super().__init__(task)
        self.examples, self.columns = examples, dict(columns or {})

    @property
    def default_splitter(self) -> Splitter:
        """The set's own split, if it comes with one."""
        return GivenSplit() if has_parts(self.examples) else super().default_splitter

    def load(self, root: Path) -> tuple[Any, Mapping[str, Column]]:  # noqa: D102
        return self.examples, self.columns


class ExampleSetFile(InFile, ExampleSetSource):
    """The same in a file: ``x``, ``y`` and columns, written by ``torch.save`` (a dictionary) or ``numpy.savez``.

    A set with a split of its own has columns ``train_mask``, ``val_mask`` and ``test_mask`` of 0 and 1, and needs
    ``data.splitter`` set to ``GivenSplit``.

    Args:
        path: The file, ``.npz`` if it is numpy's; a relative path starts at the working directory.
        task: Whether targets are ``classes``, ``labels`` or ``numbers``; None to tell by their type and shape.
    """

    def __init__(self, path: str, task: str | None = None) -> None:
        super().__init__(task)
        self.path = user_path("path", path)

    def load(self, root: Path) -> tuple[Any, Mapping[str, Column]]:  # noqa: D102
        check_is_file(self.path, "{'x': inputs, 'y': targets, ...}")
        with reading(self.path, "x and y, as a dictionary that loads with weights_only=True or as an .npz file"):
            saved = _arrays(self.path)
            if not isinstance(saved, dict) or not {"x", "y"} <= set(saved):
                raise ValueError(f"it holds {', '.join(map(str, saved)) if isinstance(saved, dict) else type(saved)}")
            others = {name: each for name, each in saved.items() if name not in ("x", "y")}
            columns = {str(name): _column(each) for name, each in others.items()}
        return (saved["x"], saved["y"]), columns


def _column(given: Any) -> Any:
    """A column of a file as a list, if it is one."""
    if isinstance(given, Tensor):
        return given.to_dense().tolist()
    return given.tolist() if isinstance(given, np.ndarray) else given


def _arrays(path: Path) -> Any:
    """What a file holds."""
    if path.suffix != ".npz":
        return load_data(path)
    with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
        return dict(archive)


def _check_columns(columns: Mapping[str, Sequence[Any]], num_examples: int) -> None:
    for name, column in columns.items():
        if name in (_MEAN, "y", "num_nodes", "examples"):
            raise ValueError(f"columns has {name!r}, which every set has: rename that column")
        if isinstance(column, str | Mapping) or not all(hasattr(column, part) for part in ("__len__", "__getitem__")):
            raise ValueError(
                f"columns: {name!r} is a {type(column).__name__}: give a list with an entry for each example"
            )
        if len(column) != num_examples:
            raise ValueError(f"columns: {name!r} has {len(column)} entries for {num_examples} examples: give one each")
