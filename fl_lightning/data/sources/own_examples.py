"""Your own tables, series and images: in memory, or in a file.

Shape legend: N examples of one client, X the shape of one example, H numbers of a target.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, default_collate
from torch_geometric.data import Dataset as GraphDataset

from fl_lightning.data.settings import check_is_file, user_path
from fl_lightning.data.sources.array_file import reading
from fl_lightning.data.sources.base import Source
from fl_lightning.data.sources.examples import Examples, ExampleSource, client_names
from fl_lightning.data.sources.in_file import InFile
from fl_lightning.data.sources.parts import has_parts, is_pair, parts_in, roles_of
from fl_lightning.data.split import GivenSplit, Splitter
from fl_lightning.data.targets import checked_targets
from fl_lightning.saved_tensors import check_holds_numbers, load_data
from fl_lightning.tasks.base import kind_of_target

_KINDS = ("classes", "labels", "numbers")

#: Inputs (N, *X), targets, and roles (N,) or None.
Rows = tuple[Tensor, Tensor, Tensor | None]


class OfKind(Source):
    """A source whose kind of target may be given.

    Args:
        task: Whether targets are ``classes``, ``labels`` or ``numbers``; None to tell by their type and shape.

    Raises:
        ValueError: The task is none of these.
    """

    def __init__(self, task: str | None = None) -> None:
        if task is not None and task not in _KINDS:
            raise ValueError(f"task must be one of {', '.join(_KINDS)}, or None, got {task!r}")
        self.kind = task

    def given(self) -> dict[str, Any]:
        """Settings that are stored under other names."""
        return {"task": self.kind}

    def identity(self) -> dict[str, Any]:
        """The kind; the examples themselves are part of a partition's hash."""
        return {"source": type(self).__name__, "task": self.kind}


class _OwnExamples(OfKind, ExampleSource):
    """Examples that are the user's."""

    @abstractmethod
    def read(self) -> Mapping[str, Any]:
        """Inputs and targets of each client."""

    def load(self, root: Path, seed: int) -> Examples:
        rows = {name: rows_of(name, given) for name, given in self.read().items()}
        if not rows:
            raise ValueError("there are no clients: give at least one")
        return examples_of(rows, self.kind)


class InMemoryExamples(_OwnExamples):
    """Tables, series or images in memory, for each client its own.

    Args:
        clients: For each client a pair of inputs (N, *X) and targets, as tensors, as arrays, or as a table and a column
            of pandas, or a ``Dataset`` of PyTorch with such pairs (``TensorDataset``, ``Subset``), which is read as a
            whole; by the clients' names, or in a list. Whole numbers (N,) are classes, a matrix of 0 and 1 is of
            labels, everything else is numbers. Clients with a split of their own have ``{"train": pair, "val": pair,
            "test": pair}``, of which ``val`` and ``test`` may be left out; they need no splitter.
        names: Of clients in a list; None for their numbers.
        task: Whether targets are ``classes``, ``labels`` or ``numbers``; None to tell by their type and shape.

    Raises:
        ValueError: There are no clients, or not a name for each.

    Example:
        >>> import fl_lightning as fl
        >>> rows = [(torch.randn(20, 3), torch.arange(20) % 2), (torch.randn(30, 3), torch.arange(30) % 2)]
        >>> data = fl.FederatedDataModule(rows)
        >>> data.setup()
        >>> str(data.task), data.num_features, [client.name for client in data.clients]
        ('ExampleClassification', 3, ['client-00', 'client-01'])
    """

    def __init__(
        self, clients: Mapping[str, Any] | Sequence[Any], names: Sequence[str] | None = None, task: str | None = None
    ) -> None:
        super().__init__(task)
        if isinstance(clients, Mapping):
            clients, names = list(clients.values()), list(clients) if names is None else names
        if not clients or (names is not None and (len(names) != len(clients) or len(set(names)) < len(names))):
            raise ValueError(f"clients are {len(clients)}, names {names}: give at least one client, and each its name")
        own = client_names("client", len(clients)) if names is None else tuple(map(str, names))
        self.clients = dict(zip(own, clients, strict=True))

    @property
    def default_splitter(self) -> Splitter:
        """The clients' own split, if they come with one."""
        return GivenSplit() if any(map(has_parts, self.clients.values())) else super().default_splitter

    def read(self) -> Mapping[str, Any]:
        """What was given."""
        return self.clients


class ExampleFile(InFile, _OwnExamples):
    """The same in a file: a dictionary of the clients' pairs of tensors by their names, written by ``torch.save``.

    Clients with a split of their own need ``data.splitter`` set to ``GivenSplit``.

    Args:
        path: The file; a relative path starts at the working directory.
        task: Whether targets are ``classes``, ``labels`` or ``numbers``; None to tell by their type and shape.
    """

    def __init__(self, path: str, task: str | None = None) -> None:
        super().__init__(task)
        self.path = user_path("path", path)

    def read(self) -> Mapping[str, Any]:
        """What is in the file."""
        check_is_file(self.path, "{'name': (x, y), ...}")
        with reading(self.path, "a dictionary of pairs of tensors by clients' names that loads with weights_only=True"):
            saved = load_data(self.path)
            if not isinstance(saved, dict) or not all(isinstance(name, str) for name in saved):
                raise ValueError(f"it holds a {type(saved).__name__}")
            if has_parts(saved):
                raise ValueError("it holds one set with a split: give its clients by name, each with such parts")
        return saved


def examples_of(rows: Mapping[str, Rows], kind: str | None) -> Examples:
    """Inputs, targets and perhaps roles by client as examples.

    Raises:
        ValueError: They are not sound.
    """
    given = [y for _, y, _ in rows.values()]
    if len(shapes := sorted({tuple(y.shape[1:]) for y in given})) > 1:
        raise ValueError(f"the clients' targets have rows of the shapes {shapes}: give all of one shape")
    y = torch.cat(given)
    targets = checked_targets(y, len(y), "y", None, kind, "example")
    is_classes = targets.dim() == 1
    return Examples(
        names=tuple(rows),
        x=tuple(x.float().view(len(x), -1) if x.dim() == 1 else x.float() for x, _, _ in rows.values()),
        y=torch.split(targets, [len(each) for each in given]),
        num_outputs=int(targets.max()) + 1 if is_classes else targets.shape[1],
        multi_label=kind_of_target(y, given=kind) == "labels",
        gaps=not is_classes and bool(targets.isnan().any()),
        roles=tuple(roles for _, _, roles in rows.values()),
    )


def are_examples(given: Any) -> bool:
    """Whether this is what :class:`InMemoryExamples` has of a client."""
    if isinstance(given, Dataset):  # those of PyG are of graphs
        return not isinstance(given, IterableDataset | GraphDataset)
    if has_parts(given):
        return all(each is None or are_examples(each) for each in given.values())
    return is_pair(given)


def _numbers(given: Any, name: str) -> Tensor:
    if isinstance(given, Tensor):
        check_holds_numbers(given, name)
        if given.layout != torch.strided:
            raise ValueError(f"{name} is sparse: give it dense, as {name.rpartition(' ')[2]}.to_dense()")
        return given
    array = np.require(given, requirements=["C", "W"])  # those of pandas can be read-only
    if array.dtype.kind not in "biuf":
        raise ValueError(
            f"{name} holds {array.dtype}, not numbers: number categories, e.g. by pandas.factorize(...)[0] or "
            "numpy.unique(..., return_inverse=True)[1]"
        )
    is_large_unsigned = array.dtype.kind == "u" and array.itemsize > 1  # PyTorch can do little with these
    return torch.from_numpy(array.astype(np.int64) if is_large_unsigned else array)


def rows_of(name: str, given: Any) -> Rows:
    """A client's inputs and targets, and the roles of its examples if they come with them.

    Raises:
        ValueError: A part is no pair of equally many rows of numbers, or not of the same shape.
    """
    if not has_parts(given):
        return (*_pair_of(name, given), None)
    pairs = {part: _pair_of(f"{name}, {part}", each) for part, each in parts_in(given).items()}
    for which, key in enumerate("xy"):
        shapes = {part: tuple(pair[which].shape[1:]) for part, pair in pairs.items()}
        if len(set(shapes.values())) > 1:
            raise ValueError(f"{name}: {key} has rows of the shapes {shapes}: give all of one shape")
    x, y = (torch.cat([pair[which] for pair in pairs.values()]) for which in range(2))
    return x, y, roles_of({part: len(y) for part, (_, y) in pairs.items()})


def _pair_of(name: str, given: Any) -> tuple[Tensor, Tensor]:
    """Inputs and targets.

    Raises:
        ValueError: They are no pair of equally many rows of numbers.
    """
    pair = given
    if are_examples(given) and isinstance(given, Dataset):
        try:
            pair = default_collate([given[index] for index in range(len(given))])  # type: ignore[arg-type]
        except (TypeError, RuntimeError) as error:
            raise ValueError(
                f"{name}: the examples of {type(given).__name__} cannot be stacked ({error}): give tensors of one "
                "shape, of images by its transform (ToTensor and Resize of torchvision); of graphs list(dataset)"
            ) from error
    if not is_pair(pair):
        raise ValueError(f"{name} has a {type(given).__name__}: give a pair of inputs and targets")
    x, y = (_numbers(each, f"{name}: {key}").detach().cpu() for key, each in zip("xy", pair, strict=True))
    if x.dim() == 0 or y.dim() == 0 or len(x) != len(y) or len(x) == 0:
        raise ValueError(f"{name}: x is {tuple(x.shape)} and y {tuple(y.shape)}: give a row of both for each example")
    return x, y.flatten() if y.numel() == len(y) else y
