"""Stacked clients: parameters and optimizer state of many clients, and the steps that they take together.

For an optimizer that treats every value separately, it does not matter how many clients a tensor contains, so clients
that have taken the same number of steps are one parameter of one optimizer; others are separate parameters of it. With
any other optimizer, each client has one of its own.

Shape legend: C clients of the stack.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop

from fl_lightning.executors.optimizer_state import check_optimizer
from fl_lightning.executors.storage import Allocate, in_memory
from fl_lightning.kernels.layout import by_columns, is_by_columns, make_like, rows_at, rows_of, stored_as
from fl_lightning.kernels.per_client import along
from fl_lightning.optimizers import TouchedAdam, TouchedAdamW, TouchedSGD
from fl_lightning.round.client import ClientModule, OptimizerFactory
from fl_lightning.round.lr_schedule import GroupSettings, set_groups
from fl_lightning.round.payload import Payload

#: Optimizers that treat every value of a tensor separately.
ELEMENTWISE = (
    *(ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop),
    *(TouchedAdam, TouchedAdamW, TouchedSGD),
)

#: Slots with one number for a whole parameter, equal for all clients that have taken the same number of steps, unless
#: an optimizer of the user's keeps something larger under such a name.
COUNTS = frozenset({"step", "mu_product", "eta", "mu"})

#: With more runs of equal step counts than this, clients are sorted by them before they step.
MANY_BLOCKS = 32


class ClientStack:
    """Stacked parameters of C clients with their optimizer state and client state.

    Args:
        client: The client module of which they are copies.
        clients: The clients' indices.
        parameters: Parameters by name, (C, *shape).
        client_state: Client state by name, (C, *shape) or (C, N, *shape).
        allocate: Makes the storage of the optimizer state.

    Attributes:
        parameters: Parameters by name, (C, *shape); the storage.
        client_state: Client state by name; the storage.
        slots: Optimizer state by parameter and slot, (C, *shape), or (C,) for step counts and the like.
        started: Which clients have optimizer state, by parameter, boolean (C,).
        position: Position of each client in the stack.
        begun: Clients that have taken part, so that the stack has state of theirs.
    """

    def __init__(
        self,
        client: ClientModule,
        clients: Sequence[int],
        parameters: dict[str, Tensor],
        client_state: dict[str, Tensor] | None = None,
        allocate: Allocate = in_memory,
    ) -> None:
        self.client = client
        self.position = {client: index for index, client in enumerate(clients)}
        self.begun: set[int] = set()
        self.parameters = parameters
        self.client_state = client_state or {}
        self.allocate = allocate
        self.slots: dict[str, dict[str, Tensor]] = {name: {} for name in parameters}
        self.started = {name: torch.zeros(len(t), dtype=torch.bool) for name, t in parameters.items()}
        self._slices: dict[tuple[int, ...], StackSlice] = {}

    def positions_of(self, clients: Iterable[int]) -> list[int]:
        """Positions of clients in the stack."""
        return [self.position[client] for client in clients]

    def training_order(self, positions: Sequence[int], num_steps: Sequence[int]) -> list[int]:
        """An order of some clients in which those that can step as one are adjacent.

        It is their own order unless that has many more runs, because rows that are not adjacent have to be copied.
        """
        rows = list(range(len(positions)))
        if len(rows) <= MANY_BLOCKS or (tuple(positions) in self._slices and len(set(num_steps)) == 1):
            return rows
        counts = self.step_counts(positions, num_steps)
        if len(_runs(counts)) <= MANY_BLOCKS:
            return rows
        kind_C = torch.unique(counts, dim=0, return_inverse=True)[1]
        order: list[int] = kind_C.argsort(stable=True).tolist()
        return order

    def part(
        self,
        positions: Sequence[int],
        num_steps: Sequence[int],
        settings: GroupSettings = (),
        optimizer: OptimizerFactory | None = None,
    ) -> "StackSlice":
        """A slice of clients that are about to step.

        Args:
            positions: Where they are in the stack.
            num_steps: Number of steps of each.
            settings: What the schedule of learning rates sets in their optimizer; nothing if empty.
            optimizer: A temporary optimizer, without schedule, instead of theirs.
        """
        if optimizer is not None:
            return StackSlice(self, positions, num_steps, optimizer)
        part = self._lasting_part(positions, num_steps)
        for each in dict.fromkeys(part.optimizers):
            set_groups(each, settings)
        return part

    def _lasting_part(self, positions: Sequence[int], num_steps: Sequence[int]) -> "StackSlice":
        key = tuple(positions)
        known = self._slices.get(key)
        if known is not None and len(set(num_steps)) == 1:
            known.num_steps = [num_steps[0]]
            return known
        self._drop_slices(positions)
        part = StackSlice(self, positions, num_steps)
        if isinstance(part.rows, slice) and len(part.blocks) == 1:
            self._slices[key] = part
        return part

    def _drop_slices(self, positions: Sequence[int]) -> None:
        self._slices = {key: part for key, part in self._slices.items() if set(key).isdisjoint(positions)}

    def load(self, tensors: Mapping[str, Tensor], positions: Sequence[int]) -> None:
        """Overwrite some clients' parameters, one row of ``tensors`` each."""
        for name, tensor in tensors.items():
            storage = self.parameters[name]
            storage[rows_of(positions, storage.device)] = tensor.to(storage)

    def forget(self, positions: Sequence[int]) -> None:
        """Reset some clients' optimizer."""
        self._drop_slices(positions)
        for name, slots in self.slots.items():
            self.started[name][list(positions)] = False
            for slot in slots.values():
                slot[rows_of(positions, slot.device)] = 0

    def step_counts(self, positions: Sequence[int], num_steps: Sequence[int]) -> Tensor:
        """What must be equal for clients to step as one: step counts and the like, and the number of further steps."""
        columns = list(self.started.values())
        columns += [slot for slots in self.slots.values() for name, slot in slots.items() if _counts(name, slot)]
        rows = rows_of(positions, torch.device("cpu"))
        return torch.stack([torch.tensor(num_steps).double(), *(column[rows].double() for column in columns)], dim=1)

    def state(self, clients: Sequence[int], device: torch.device) -> Payload:
        """The complete state of some clients, in the given order."""
        positions = self.positions_of(clients)
        rows = rows_of(positions, device)
        client_outputs = {}
        for name, slots in self.slots.items():
            client_outputs[f"optimizer/started/{name}"] = self.started[name][
                rows_of(positions, torch.device("cpu"))
            ].to(device)
            for slot, value in slots.items():
                client_outputs[f"optimizer/{slot}/{name}"] = self._pick(value.to(device), rows)
        parameters = {name: self._pick(tensor, rows) for name, tensor in self.parameters.items()}
        client_outputs |= {
            f"client_state/{name}": self._pick(tensor, rows) for name, tensor in self.client_state.items()
        }
        return Payload(clients=tuple(clients), parameters=parameters, extras=client_outputs)

    def _pick(self, tensor: Tensor, rows: slice | Tensor) -> Tensor:
        """Some rows; a copy, which may be as large as the stack, is stored where the stack is."""
        if isinstance(rows, slice):
            return tensor[rows]
        picked = self.allocate((len(rows), *tensor.shape[1:]), tensor.dtype, tensor.device)
        return torch.index_select(tensor, 0, rows, out=picked)

    def load_state(self, state: Payload) -> None:
        """Restore the result of :meth:`state`, or part of it; its clients then count as having taken part."""
        positions = self.positions_of(state.clients)
        self._drop_slices(positions)
        self.load(state.parameters, positions)
        self.begun |= set(state.clients)
        for key, value in state.extras.items():
            if key.startswith("client_state/"):
                self.remember(key.removeprefix("client_state/"), value, positions)
                continue
            slot, _, name = key.removeprefix("optimizer/").partition("/")
            if slot == "started":
                self.started[name][list(positions)] = value.cpu()
            else:
                storage = self.slot(name, slot, value)
                storage[rows_of(positions, storage.device)] = value.to(storage)

    def remember(self, name: str, value: Tensor, positions: Sequence[int]) -> None:
        """Overwrite the client state of some clients, one row of ``value`` each, padded for others than those here."""
        storage = self.client_state[name]
        rows: Any = rows_of(positions, storage.device)
        if value.dim() > 1 and value.shape[1] != storage.shape[1]:
            width = min(value.shape[1], storage.shape[1])
            rows, value = (rows, slice(width)), value[:, :width]
        storage[rows] = value.to(storage)

    def slot(self, name: str, slot: str, like: Tensor) -> Tensor:
        """Storage of a slot, created when it is first needed; ``like`` has some clients' rows of it."""
        if slot not in self.slots[name]:
            shape = (len(self.parameters[name]), *like.shape[1:])
            if _counts(slot, like):
                self.slots[name][slot] = torch.zeros(shape, dtype=like.dtype)
            else:  # as the parameter is: fused kernels pair numbers by their place in memory, whatever the strides
                is_turned = is_by_columns(self.parameters[name]) and shape == tuple(self.parameters[name].shape)
                self.slots[name][slot] = make_like(self.allocate, shape, by_columns(like) if is_turned else like)
        return self.slots[name][slot]


class StackSlice:
    """Some clients of a stack while they step together.

    Attributes:
        parameters: Parameters by name, (clients, *shape): views of the stack's if the clients are adjacent, else copies
            that :meth:`store` writes back.
        rows: Rows of the clients in the stack.
        blocks: Their runs of equal step counts, each one parameter of an optimizer.
        optimizers: The optimizer of each block: the same for all, or one of each client.
        sizes: Number of clients in each block.
        num_steps: Number of steps of each block.
        turned: Parameters that the optimizer sees transposed, because they are stored column by column and fused
            kernels copy what is not contiguous.
    """

    def __init__(
        self,
        stack: ClientStack,
        positions: Sequence[int],
        num_steps: Sequence[int],
        optimizer: OptimizerFactory | None = None,
    ) -> None:
        self.positions = list(positions)
        self.lasting = optimizer is None
        first = next(iter(stack.parameters.values()))
        self.rows = rows_of(positions, first.device)
        self.parameters = {name: rows_at(tensor, self.rows) for name, tensor in stack.parameters.items()}
        net = dict(stack.client.net.named_parameters())
        kind = check_optimizer(optimizer(list(net.values())) if optimizer else stack.client.configure_optimizers())
        together = type(kind) in ELEMENTWISE
        together = together and not (kind._optimizer_step_pre_hooks or kind._optimizer_step_post_hooks)
        alone = [slice(row, row + 1) for row in range(len(positions))]
        self.blocks = _runs(stack.step_counts(positions, num_steps)) if together else alone
        self.sizes = [block.stop - block.start for block in self.blocks]
        self.num_steps = [num_steps[block.start] for block in self.blocks]
        self.turned = {name for name, tensor in self.parameters.items() if together and is_by_columns(tensor)}
        self.members = {
            name: [
                nn.Parameter(
                    self._turn(name, tensor)[block] if together else tensor[block.start],
                    requires_grad=net[name].requires_grad,
                )
                for block in self.blocks
            ]
            for name, tensor in self.parameters.items()
        }
        self.together = together
        self.optimizers: list[Optimizer]
        if together:
            self.optimizers = [self._spread(kind, net)] * len(self.blocks)
        else:
            named = [{name: each[block] for name, each in self.members.items()} for block in range(len(self.blocks))]
            build = stack.client.build_optimizer
            made = [optimizer(list(one.values())) if optimizer else build(one.items()) for one in named]
            self.optimizers = list(map(check_optimizer, made))
        if self.lasting:
            self._load_optimizer(stack)

    def _spread(self, optimizer: Optimizer, net: Mapping[str, Tensor]) -> Optimizer:
        """Let the optimizer of one client's parameters step all clients; each parameter stays in its group."""
        members = {id(parameter): self.members[name] for name, parameter in net.items()}
        for group in optimizer.param_groups:
            group["params"] = [member for parameter in group["params"] for member in members[id(parameter)]]
            if isinstance(optimizer, SGD) and group["momentum"]:
                group["fused"] = False  # torch's fused kernel fails where only some of the clients have momentum yet
        optimizer.state.clear()
        return optimizer

    def _turn(self, name: str, tensor: Tensor) -> Tensor:
        """A parameter, or a slot of it, as the optimizer sees it; or back."""
        return tensor.mT if name in self.turned else tensor

    def _load_optimizer(self, stack: ClientStack) -> None:
        """Give the optimizer the state that its clients have."""
        for name, members in self.members.items():
            for block, member, optimizer in zip(self.blocks, members, self.optimizers, strict=True):
                if not stack.started[name][self.positions[block.start]]:
                    continue
                group = optimizer.param_groups[0]
                on_device = group.get("fused") or group.get("capturable")
                optimizer.state[member] = state = {}
                for slot, storage in stack.slots[name].items():
                    if _counts(slot, storage):
                        scalar = storage[self.positions[block.start]].clone()
                        state[slot] = scalar.to(member.device) if on_device else scalar
                    else:
                        rows = storage[rows_of(self.positions[block], storage.device)]
                        state[slot] = stored_as(self._turn(name, rows) if self.together else rows[0], member)

    def step(self, gradients: Mapping[str, Tensor | None], step: int) -> None:
        """Take step number ``step`` of the stage, for the clients that have so many steps."""
        active = [step < number for number in self.num_steps]
        for name, gradient in gradients.items():
            if gradient is None:  # frozen, or not used by the objective
                continue
            gradient = self._turn(name, stored_as(gradient, self.parameters[name]))  # required by fused kernels
            pieces = torch.split(gradient, self.sizes) if self.together else gradient.unbind()
            for piece, member, steps in zip(pieces, self.members[name], active, strict=True):
                if steps:
                    member.grad = piece
        for optimizer in dict.fromkeys(each for each, steps in zip(self.optimizers, active, strict=True) if steps):
            optimizer.step()
        for members in self.members.values():
            for member in members:
                member.grad = None

    def steps(self, step: int) -> Tensor | None:
        """Which clients take step number ``step``, boolean (clients,); None if all do."""
        if all(step < number for number in self.num_steps):
            return None
        active = [step < number for number, size in zip(self.num_steps, self.sizes, strict=True) for _ in range(size)]
        return torch.tensor(active, device=next(iter(self.parameters.values())).device)

    @torch.no_grad()
    def put(self, tensors: Mapping[str, Tensor], active_C: Tensor | None) -> None:
        """Change parameters of the active clients, (clients, *shape)."""
        for name, tensor in tensors.items():
            self.parameters[name].copy_(where_clients(active_C, tensor, self.parameters[name]))

    def restart(self, step: int) -> None:
        """Reset the optimizer for the clients that take step number ``step``."""
        for members in self.members.values():
            for member, optimizer, number in zip(members, self.optimizers, self.num_steps, strict=True):
                if step < number:
                    optimizer.state.pop(member, None)

    @torch.no_grad()
    def store(self, stack: ClientStack) -> None:
        """Write everything back to the stack that is not a view of it."""
        if not isinstance(self.rows, slice):
            stack.load(self.parameters, self.positions)
        if not self.lasting:
            return
        indices = [rows_of(self.positions[block], torch.device("cpu")) for block in self.blocks]
        for name, members in self.members.items():
            for index, member, optimizer in zip(indices, members, self.optimizers, strict=True):
                state = {slot: v for slot, v in optimizer.state.get(member, {}).items() if isinstance(v, Tensor)}
                if state:
                    stack.started[name][index] = True
                for slot, value in state.items():
                    if _counts(slot, value[None]):
                        stack.slot(name, slot, value[None])[index] = value.cpu()
                        continue
                    turned = self._turn(name, value) if self.together else value[None]
                    storage = stack.slot(name, slot, turned)
                    rows = index if isinstance(index, slice) else index.to(storage.device)
                    if isinstance(rows, slice) and self.together:
                        here = storage[rows]
                        if here.data_ptr() != value.data_ptr():
                            here.copy_(turned)
                            optimizer.state[member][slot] = self._turn(name, here)
                    else:
                        storage[rows] = turned


def where_clients(active_C: Tensor | None, new: Tensor, old: Tensor) -> Tensor:
    """The new values of the active clients and the old ones of the others, (clients, ...); None if all are active."""
    return new if active_C is None else torch.where(along(active_C, new), new, old)


def _counts(slot: str, rows: Tensor) -> bool:
    """Whether the rows of a slot, one for each client, are counts."""
    return slot in COUNTS and rows.dim() == 1


def _runs(rows: Tensor) -> list[slice]:
    """Runs of equal rows.

    Example:
        >>> _runs(torch.tensor([[1.0], [1.0], [2.0]]))
        [slice(0, 2, None), slice(2, 3, None)]
    """
    changes = (rows[1:] != rows[:-1]).any(dim=1).nonzero().flatten() + 1
    bounds = [0, *changes.tolist(), len(rows)]
    return [slice(start, stop) for start, stop in itertools.pairwise(bounds) if stop > start]
