"""The payload: all that crosses the boundary between client and server.

Shape legend: C clients.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fl_lightning.kernels.layout import in_memory_order, make_like, rows_at

#: Name of the row with all of a client's parameters, if architectures differ.
FLAT = "flat"


def _are_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same numbers, of which a client that diverged has some that are none."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.allclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)


@dataclass(frozen=True, kw_only=True)
class Payload:
    """Named tensors of some clients, detached, each with a leading client dimension.

    Attributes:
        clients: Client indices, ascending; row c of every tensor belongs to ``clients[c]``.
        parameters: Model parameters by their name in the client's net, (C, *shape).
        extras: Everything else that is exchanged (embeddings, prototypes, ...), by name, (C, ...).
        num_examples: Number of labeled training examples of each client (C,), in uploads.
        num_steps: Number of local steps that each client took (C,), in uploads.
        lengths: For each client output with one row per example, how many rows each client has (C,); the rest is zero
            padding.
    """

    clients: tuple[int, ...]
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    extras: Mapping[str, Tensor] = field(default_factory=dict)
    num_examples: Tensor | None = None
    num_steps: Tensor | None = None
    lengths: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        both = sorted(self.parameters.keys() & self.extras.keys())  # such a tensor is communicated once
        if different := [name for name in both if not _are_same(self.parameters[name], self.extras[name])]:
            raise ValueError(
                f"payload: {different} name parameters and client outputs; a client output needs a name of its own"
            )
        for name, tensor in self.tensors().items():
            if tensor.requires_grad:
                raise ValueError(f"payload tensor {name!r} is attached to a graph; detach it before it is sent")

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor that is communicated, by name."""
        return {**self.parameters, **self.extras}

    def named(self) -> dict[str, Tensor]:
        """The tensors of :meth:`tensors` and the counts.

        The prefix of parameters is ``p/``, of client outputs ``s/``, of lengths ``l/``.
        """
        named = {f"p/{name}": tensor for name, tensor in self.parameters.items()}
        named |= {f"s/{name}": tensor for name, tensor in self.extras.items()}
        named |= {f"l/{name}": tensor for name, tensor in self.lengths.items()}
        counts = {"num_examples": self.num_examples, "num_steps": self.num_steps}
        return named | {name: tensor for name, tensor in counts.items() if tensor is not None}

    @classmethod
    def from_named(cls, clients: Sequence[int], named: Mapping[str, Tensor]) -> "Payload":
        """Undo :meth:`named`."""

        def behind(prefix: str) -> dict[str, Tensor]:
            return {name[2:]: tensor for name, tensor in named.items() if name.startswith(prefix)}

        return cls(
            clients=tuple(clients),
            parameters=behind("p/"),
            extras=behind("s/"),
            num_examples=named.get("num_examples"),
            num_steps=named.get("num_steps"),
            lengths=behind("l/"),
        )

    def mask(self, name: str) -> Tensor:
        """Which rows of a client output with one row per example are not padding, boolean (C, N)."""
        places_N = torch.arange(self.extras[name].shape[1], device=self.lengths[name].device)
        return places_N < self.lengths[name][:, None]

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire for all clients together, without padding."""
        total = sum(tensor.nbytes for tensor in self.tensors().values())
        for name, length_C in self.lengths.items():
            num_rows, num_bytes = self.extras[name].shape[:2].numel(), self.extras[name].nbytes
            total -= num_bytes * (num_rows - int(length_C.sum())) // max(num_rows, 1)
        return total

    def rows(self, clients: Sequence[int]) -> "Payload":
        """The part of the payload that belongs to some of its clients, in their order."""
        if tuple(clients) == self.clients:
            return self
        position = {client: row for row, client in enumerate(self.clients)}
        index = torch.tensor([position[client] for client in clients], dtype=torch.int64)

        def pick(tensor: Tensor) -> Tensor:
            if tensor.stride(0) == 0:  # the same for every client, stored once
                return tensor[:1].expand(len(clients), *tensor.shape[1:])
            return rows_at(tensor, index.to(tensor.device))

        return self._map(clients, pick)

    def copy(self) -> "Payload":
        """A copy that shares no memory."""
        return self._map(self.clients, torch.Tensor.clone)

    def to(self, device: torch.device) -> "Payload":
        """The payload on a device."""
        return self._map(self.clients, lambda tensor: tensor.to(device))

    def padded(self, name: str, size: int) -> "Payload":
        """The payload with a client output that has one row per example padded to ``size`` rows."""
        tensor = self.extras[name]
        if tensor.shape[1] == size:
            return self
        return dataclasses.replace(self, extras={**self.extras, name: pad_examples(tensor, size)})

    def _map(self, clients: Sequence[int], change: Callable[[Tensor], Tensor]) -> "Payload":
        """A payload of some clients, with changed tensors."""
        return Payload.from_named(clients, {name: change(tensor) for name, tensor in self.named().items()})

    @classmethod
    def collect(
        cls,
        payloads: "Iterable[Payload]",
        clients: Sequence[int],
        allocate: Callable[[Sequence[int], torch.dtype, torch.device], Tensor],
    ) -> "Payload":
        """Join payloads of disjoint clients as they arrive, in memory that is allocated once.

        Args:
            payloads: Payloads with the same names.
            clients: All clients that may appear, ascending; those that do not are left out.
            allocate: Makes a tensor from its shape, type and device.
        """
        row = {client: row for row, client in enumerate(clients)}
        arrived: list[int] = []
        whole = cls(clients=())
        for part in payloads:
            if part.clients == tuple(clients):
                return part
            if not part.clients:
                continue
            if not arrived:
                whole = part._map(clients, lambda t: make_like(allocate, (len(clients), *t.shape[1:]), t))
            rows = torch.tensor([row[client] for client in part.clients], dtype=torch.int64)
            for name in part.lengths:
                size = max(part.extras[name].shape[1], whole.extras[name].shape[1])
                part, whole = part.padded(name, size), whole.padded(name, size)
            new = part.named()
            for name, tensor in whole.named().items():
                tensor[rows.to(tensor.device)] = new[name]
            arrived += part.clients
        return whole.rows(sorted(arrived))


def concatenate(payloads: Iterable[Payload]) -> Payload:
    """Join payloads of disjoint clients into one, clients ascending.

    Raises:
        ValueError: The payloads do not have the same names and shapes.
    """
    parts = [payload for payload in payloads if payload.clients]
    if not parts:
        return Payload(clients=())
    names = parts[0].named().keys()
    for part in parts[1:]:
        if other := names ^ part.named().keys():
            missing = sorted(name[2:] if name[1] == "/" else name for name in other)
            raise ValueError(f"payloads have different tensors: {missing} are not in all")
    for name in parts[0].lengths:
        size = max(part.extras[name].shape[1] for part in parts)
        parts = [part.padded(name, size) for part in parts]
    clients = torch.tensor([client for part in parts for client in part.clients])
    ordered, order = clients.sort()
    is_ordered = torch.equal(clients, ordered)
    positions = () if is_ordered else torch.split(order.argsort(), [len(part.clients) for part in parts])

    def join(tensors: list[Tensor]) -> Tensor:
        if is_ordered:
            return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        joined = tensors[0].new_empty(len(clients), *tensors[0].shape[1:])
        for position, tensor in zip(positions, tensors, strict=True):
            joined[position.to(joined.device)] = tensor
        return joined

    named = [part.named() for part in parts]
    for name in named[0]:
        if len(shapes := {tuple(each[name].shape[1:]) for each in named}) > 1:
            raise ValueError(
                f"clients sent {name[2:]!r} in different shapes, {', '.join(map(str, sorted(shapes)))}: the nets in "
                "model.net must agree in it"
            )
    return Payload.from_named(ordered.tolist(), {name: join([each[name] for each in named]) for name in named[0]})


def pad_examples(tensor_CN: Tensor, size: int) -> Tensor:
    """Cut the second dimension, or pad it with zeros at its end, to the given size."""
    if tensor_CN.shape[1] >= size:
        return tensor_CN.narrow(1, 0, size)
    return torch.cat(
        [tensor_CN, tensor_CN.new_zeros(len(tensor_CN), size - tensor_CN.shape[1], *tensor_CN.shape[2:])], 1
    )


def flatten(parameters: Mapping[str, Tensor]) -> Tensor:
    """Lay each client's parameters out as one row: (C, *shape) each -> (C, P)."""
    return torch.cat([tensor.reshape(len(tensor), -1) for tensor in parameters.values()], dim=1)


def from_wire(tensors: Mapping[str, Tensor], shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Parameters by their own names, whether they were communicated by name or as the row ``flat``.

    ``shapes`` are those of one client.
    """
    if FLAT not in tensors:
        return dict(tensors)
    return unflatten(tensors[FLAT][:, : sum(shape.numel() for shape in shapes.values())], shapes)


def to_wire(tensors: Mapping[str, Tensor], length: int) -> dict[str, Tensor]:
    """All of the clients' parameters as rows ``flat`` (C, length), padded with zeros."""
    row_CP = flatten(tensors)
    return {FLAT: torch.nn.functional.pad(row_CP, (0, length - row_CP.shape[1]))}


def finite_rows(tensors: Iterable[Tensor]) -> Tensor:
    """Whether all numbers of each client are finite, (C,); at least one tensor, each (C, *shape)."""
    sums = [in_memory_order(tensor).sum(dim=1) for tensor in tensors]
    return torch.stack(sums).isfinite().all(dim=0)


def row_norms(tensors: Iterable[Tensor]) -> Tensor:
    """Euclidean norm of all numbers of each client, (C,), in float32 at least: infinite where squares overflow."""
    rows = [in_memory_order(tensor) for tensor in tensors]
    wide = [row.to(torch.promote_types(row.dtype, torch.float32)) for row in rows]
    norms = [torch.linalg.vector_norm(row, dim=1) for row in wide]
    together: Tensor = torch.linalg.vector_norm(torch.stack(norms), dim=0)
    return together


def unflatten(matrix_CP: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """Undo :func:`flatten`: views of the matrix by parameter name; ``shapes`` are those of one client."""
    pieces = torch.split(matrix_CP, [shape.numel() for shape in shapes.values()], dim=1)
    return {name: piece.view(-1, *shape) for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}
