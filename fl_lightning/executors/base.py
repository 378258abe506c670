"""An executor runs a stage for the clients of one process; it knows nothing of servers or other processes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from lightning.fabric import Fabric
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from fl_lightning.batches.base import Batch, Collator
from fl_lightning.executors.keys import derive_keys
from fl_lightning.executors.storage import Allocate, in_memory
from fl_lightning.round.client import ClientModule
from fl_lightning.round.context import Parameters
from fl_lightning.round.payload import Payload, from_wire, to_wire
from fl_lightning.round.stage import Evaluation, Stage


@dataclass(frozen=True, kw_only=True)
class Work:
    """A stage as one round asks for it.

    Attributes:
        stage: What to do.
        round_idx: For the random keys.
        num_epochs: Local epochs of each participating client (fewer than the stage's for a straggler), by client.
        payload: What the server sends to (at least) these clients.
    """

    stage: Stage
    round_idx: int
    num_epochs: Mapping[int, int]
    payload: Payload | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of it: the upload of the clients that succeeded and the reasons of those that did not."""

    upload: Payload
    failures: Mapping[int, str] = field(default_factory=dict)


class Executor(ABC):
    """Holds the clients of one process and runs stages and evaluations for them.

    Attributes:
        num_flat: Length of the rows of parameters that travel flat.
        report: Called with the number of clients that have just finished a stage.
        allocate: Makes tensors as large as the state of all clients, where that lies.
    """

    def __init__(self) -> None:
        self.report: Callable[[int], None] = lambda num_clients: None
        self.allocate: Allocate = in_memory

    def setup(
        self, fabric: Fabric, client: ClientModule, collator: Collator, clients: Sequence[int], *, seed: int
    ) -> None:
        """Take over the clients of this process; all start from the given client's parameters.

        Args:
            fabric: For device and precision.
            client: The built client module.
            collator: Makes batches of clients.
            clients: Indices of this process's clients, ascending.
            seed: Root of every random key.

        Raises:
            ValueError: The net or its optimiser is of a kind that clients cannot be run with.
        """
        names = dict(client.net.named_parameters()).keys()
        twins = dict(client.net.named_parameters(remove_duplicate=False)).keys() - names
        if twins:
            raise ValueError(
                f"model.net has {', '.join(sorted(twins))} as second names of parameters: a client's parameters travel "
                "once, so keep the shared layer under one name and call it where it is needed"
            )
        buffers = client.net.state_dict().keys() - names
        if buffers:
            raise ValueError(
                f"model.net keeps {', '.join(sorted(buffers))} outside its parameters, which neither checkpoints nor "
                "payloads hold: use layers without running statistics, or register constants with persistent=False"
            )
        self.fabric = fabric
        self.client = client
        self.collator = collator
        self.clients = tuple(clients)
        self.seed = seed
        self.num_flat = client.num_parameters
        self._allocate()

    @abstractmethod
    def _allocate(self) -> None:
        """Create this process's clients."""

    def received(self, payload: Payload | None, clients: Sequence[int]) -> dict[str, Tensor]:
        """What the server sent to some clients, by the names of this executor's net, (C, *shape)."""
        shapes = {name: parameter.shape for name, parameter in self.client.net.named_parameters()}
        return {} if payload is None else from_wire(payload.rows(clients).parameters, shapes)

    def sent(self, stage: Stage, trained: Mapping[str, Tensor], anchor: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What some clients answer: copies of parameters, or of how far they moved, (C, *shape)."""
        names = tuple(trained) if stage.flat else stage.upload
        answer = {name: trained[name] - anchor[name] if stage.as_update else trained[name].clone() for name in names}
        return to_wire(answer, self.num_flat) if stage.flat else answer

    @abstractmethod
    def run(self, work: Work) -> Outcome:
        """Run a stage for those of its clients that are of this process.

        A client whose parameters or answer are not finite, or that raises, is restored to how it began the stage (what
        it received included), with a fresh optimiser, and is reported in ``failures``.
        """

    @abstractmethod
    def evaluate(
        self, evaluation: Evaluation, clients: Sequence[int], round_idx: int, *, collator: Collator | None = None
    ) -> Payload:
        """Score a model of each of the given clients that are of this process.

        Args:
            evaluation: Which model.
            clients: Whose.
            round_idx: For the random keys of fine-tuning.
            collator: Makes the batches that are scored, in place of the clients' own.

        Returns:
            Payload whose signals are, for each metric, its numerator and denominator, (C, 2).
        """

    @abstractmethod
    def predict(self, evaluation: Evaluation, clients: Sequence[int]) -> dict[int, Tensor]:
        """Predictions for every example of each given client of this process, (N_i, num_outputs)."""

    @abstractmethod
    def state(self) -> Payload:
        """Everything that lives on in this process's clients: parameters, and optimiser state as signals."""

    @abstractmethod
    def load_state(self, state: Payload) -> None:
        """Restore this process's clients from a state that holds them (it may hold more)."""

    def keys(self, round_idx: int, stage: str, clients: Sequence[int], num_steps: int) -> Tensor:
        """The random key of every local step of some clients, (steps, C)."""
        return derive_keys(
            self.seed, stage, round_idx, torch.tensor(clients, dtype=torch.int64), torch.arange(num_steps)[:, None]
        ).to(self.fabric.device)

    def sum_scores(
        self, parameters: Parameters, batch: Batch, compute: Callable[[Parameters, Batch], dict[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Numerators and denominators (..., 2) of every metric, summed over the parts of a batch."""
        with torch.no_grad(), self.fabric.autocast():
            parts = [compute(parameters, part) for part in batch.parts()]
        if len(parts) == 1:
            return parts[0]
        return {name: torch.stack([part[name] for part in parts]).sum(dim=0) for name in parts[0]}


def check_optimizer(optimizer: Optimizer) -> Optimizer:
    """Refuse optimisers that cannot step a client from its gradient alone.

    Raises:
        ValueError: The optimiser needs closures.
    """
    if isinstance(optimizer, LBFGS):
        raise ValueError(
            "model.optimizer: LBFGS needs a closure; choose a first-order optimiser such as torch.optim.Adam"
        )
    return optimizer


def pack_optimizer_state(
    rows: Iterable[tuple[str, Sequence[Tensor], Sequence[Optimizer]]], device: torch.device
) -> dict[str, Tensor]:
    """Stack optimiser state over clients.

    Args:
        rows: For each parameter name, each client's parameter and the optimiser that steps it.
        device: Of the result.

    Returns:
        ``optimizer/<slot>/<name>`` (C, *shape), zero for clients that have none yet, and
        ``optimizer/started/<name>`` (C,), whether they have.
    """
    packed: dict[str, Tensor] = {}
    for name, parameters, optimizers in rows:
        states = [optimizer.state.get(p, {}) for p, optimizer in zip(parameters, optimizers, strict=True)]
        packed[f"optimizer/started/{name}"] = torch.tensor(
            [any(isinstance(value, Tensor) for value in state.values()) for state in states], device=device
        )
        slots = {slot: value for state in states for slot, value in state.items() if isinstance(value, Tensor)}
        for slot, example in slots.items():
            tensors = [state.get(slot, torch.zeros_like(example)) for state in states]
            packed[f"optimizer/{slot}/{name}"] = torch.stack(tensors)
    return packed


def unpack_optimizer_state(name: str, row: int, parameter: Tensor, optimizer: Optimizer, state: Payload) -> None:
    """Undo :func:`pack_optimizer_state` for one parameter of one client; ``row`` is the client's in ``state``."""
    optimizer.state.pop(parameter, None)
    if not state.signals[f"optimizer/started/{name}"][row]:
        return
    group = optimizer.param_groups[0]
    for key, tensor in state.signals.items():
        _, slot, of = key.split("/", 2)
        if of == name and slot != "started":
            on_host = slot == "step" and not (group.get("fused") or group.get("capturable"))
            optimizer.state[parameter][slot] = tensor[row].clone().to("cpu" if on_host else parameter.device)
