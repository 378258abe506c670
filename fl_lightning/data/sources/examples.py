"""Sources of clients' independent examples: the interface, and what all sources return.

Shape legend: C clients, N examples of one client, X the shape of one example, H numbers of a target.
"""

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fl_lightning.batches.client_examples import ClientExamples
from fl_lightning.data.allocation import Allocation, Asked, digest_of, masks_of, split_examples
from fl_lightning.data.sources.base import Source
from fl_lightning.data.sources.parts import check_used
from fl_lightning.data.split import Role
from fl_lightning.tasks import ExampleClassification, ExampleRegression, Task


@dataclass(frozen=True, kw_only=True)
class Examples:
    """Every client's examples, before they are split into roles.

    Attributes:
        names: Of the clients, all different.
        x: For each client its inputs, float32, (N, *X) with one X for all; images lie in [0, 1].
        y: For each client the classes, int64 (N,), negative where unknown; or labels (0 or 1) or numbers, float32
            (N, H).
        num_outputs: Classes, labels, or numbers of a target (H).
        relation_CC: Client relation graph where the data set has one: float32 weights, symmetric, non-negative, with a
            zero diagonal.
        multi_label: Targets that are no classes are labels, of which an example has or lacks each.
        gaps: Targets may be nan, where a label or a number is missing.
        roles: For each client the :class:`~fl_lightning.data.split.Role` of its examples, int8, where they come with a
            split; None for none.

    Raises:
        ValueError: If the parts do not fit together.
    """

    names: tuple[str, ...]
    x: tuple[Tensor, ...]
    y: tuple[Tensor, ...]
    num_outputs: int
    relation_CC: Tensor | None = None
    multi_label: bool = False
    gaps: bool = False
    roles: tuple[Tensor | None, ...] | None = None

    def __post_init__(self) -> None:
        num_clients = len(self.names)
        if not num_clients == len(set(self.names)) == len(self.x) == len(self.y) or num_clients == 0:
            raise ValueError(
                f"{num_clients} names ({len(set(self.names))} different), {len(self.x)} x and {len(self.y)} y: each "
                "client needs its own name, inputs and targets."
            )
        for name, x_NX, y_N in zip(self.names, self.x, self.y, strict=True):
            _check_client(name, x_NX, y_N, self)
        if self.relation_CC is not None:
            _check_relation(self.relation_CC, num_clients)

    @property
    def num_clients(self) -> int:
        """Clients."""
        return len(self.names)

    @property
    def task(self) -> Task:
        """What is learned."""
        if self.y[0].is_floating_point() and not self.multi_label:
            return ExampleRegression()
        return ExampleClassification(multi_label=self.multi_label)


class ExampleSource(Source):
    """A federation of clients with independent examples. All settings are attributes: see :meth:`identity`."""

    @abstractmethod
    def load(self, root: Path, seed: int) -> Examples:
        """Read or generate every client's examples.

        Args:
            root: Folder of the data sets (see :func:`fl_lightning.data.sources.folders.data_root`).
            seed: Of the draws that belong to the data set, such as which client gets which example.

        Raises:
            FileNotFoundError: If files are missing.
            ValueError: If files do not have the documented layout.
        """

    def allocate(self, asked: Asked, prepared: Any) -> Allocation:
        """Every client's examples; what has no role is left out."""
        try:
            examples = self.load(asked.root, asked.seed)
        except ValueError as error:
            raise ValueError(f"{self}: {error}") from error
        task = examples.task
        check_used(asked, given=any(role is not None for role in examples.roles or ()), title=str(self))
        roles = split_examples(task, examples.y, asked, examples.roles)
        used = [role_N != Role.UNUSED for role_N in roles]
        clients = tuple(
            ClientExamples(name=name, x_NX=x_NX[used_N], y_N=y_N[used_N], **masks_of(role_N[used_N]))
            for name, x_NX, y_N, role_N, used_N in zip(examples.names, examples.x, examples.y, roles, used, strict=True)
        )
        return Allocation(
            task=task,
            clients=clients,
            num_outputs=examples.num_outputs,
            source_idx=tuple(used_N.nonzero().squeeze(1) for used_N in used),
            partition_hash=digest_of(asked.identity(self.identity()), (*examples.x, *examples.y, *roles)),
            relation_CC=examples.relation_CC,
            class_names=self.class_names,
        )

    def identity(self) -> dict[str, Any]:
        """Return everything the examples depend on besides the files and the seed, as JSON-ready values."""
        return {"source": type(self).__name__, **vars(self)}


def client_names(kind: str, num_clients: int, first: int = 0) -> tuple[str, ...]:
    """Return numbered names that sort as the clients do.

    Example:
        >>> client_names("school", 3)
        ('school-00', 'school-01', 'school-02')
    """
    width = max(2, len(str(first + num_clients - 1)))
    return tuple(f"{kind}-{client:0{width}d}" for client in range(first, first + num_clients))


def split_by_client(client_N: Tensor) -> list[Tensor]:
    """Return for each client, in ascending order of their numbers, the ascending indices of its examples.

    Example:
        >>> split_by_client(torch.tensor([7, 2, 7]))
        [tensor([1]), tensor([0, 2])]
    """
    order = client_N.argsort(stable=True)
    sizes_C = torch.unique(client_N, return_counts=True)[1]
    return list(order.tensor_split(sizes_C.cumsum(0)[:-1]))


def _check_client(name: str, x_NX: Tensor, y_N: Tensor, examples: Examples) -> None:
    reference_x, reference_y = examples.x[0], examples.y[0]
    if x_NX.dtype != torch.float32 or x_NX.dim() < 2 or x_NX.shape[1:] != reference_x.shape[1:] or len(x_NX) == 0:
        raise ValueError(
            f"{name}: x is {x_NX.dtype} {tuple(x_NX.shape)}; it must be float32 (N, *X) with N > 0 and the X of the "
            f"other clients, {tuple(reference_x.shape[1:])}."
        )
    if y_N.dtype == torch.int64 and not examples.multi_label:
        fits = y_N.dim() == 1 and int(y_N.max()) < examples.num_outputs
    else:
        fits = y_N.dtype == torch.float32 and y_N.dim() == 2 and y_N.shape[1] == examples.num_outputs
    if fits and len(y_N) == len(x_NX):
        for kind, values in (("x", x_NX), ("y", y_N)):
            fine = values.isfinite() | values.isnan() if examples.gaps and kind == "y" else values.isfinite()
            if not bool(fine.all()):
                example = int((~fine).flatten(1).any(dim=1).nonzero()[0])
                raise ValueError(
                    f"{name}: the {kind} of example {example} is not finite; correct or leave out what it comes from."
                )
        if examples.multi_label and not bool(((y_N == 0) | (y_N == 1) | y_N.isnan()).all()):
            raise ValueError(f"{name}: labels are 0 or 1, and nan where they are not known; correct y.")
    elif not examples.multi_label and y_N.dtype == torch.int64 and y_N.dim() == 1 and len(y_N) == len(x_NX):
        example = int(y_N.argmax())
        raise ValueError(
            f"{name}: the class of example {example} is {int(y_N[example])}, but the classes are 0 to "
            f"{examples.num_outputs - 1}; correct it."
        )
    if not fits or y_N.dtype != reference_y.dtype or len(y_N) != len(x_NX):
        raise ValueError(
            f"{name}: y is {y_N.dtype} {tuple(y_N.shape)} for {len(x_NX)} examples and num_outputs="
            f"{examples.num_outputs}; all clients need int64 (N,) classes below num_outputs, or all float32 "
            "(N, num_outputs) targets."
        )


def _check_relation(relation_CC: Tensor, num_clients: int) -> None:
    sound = (
        relation_CC.dtype == torch.float32
        and relation_CC.shape == (num_clients, num_clients)
        and torch.equal(relation_CC, relation_CC.T)
        and bool((relation_CC >= 0).all())
        and not bool(relation_CC.diagonal().any())
    )
    if not sound:
        raise ValueError(
            f"relation_CC is {relation_CC.dtype} {tuple(relation_CC.shape)}; it must be float32 ({num_clients}, "
            f"{num_clients}), symmetric and non-negative, with a zero diagonal."
        )
