"""The hypernetwork family: a server network generates each client's parameters and learns from their training.

Shamsian, Navon, Fetaya, Chechik: "Personalized Federated Learning using Hypernetworks", ICML 2021. With θ_i generated
and θ̃_i trained from it, the server minimises ½ Σ_i ‖stopgrad(θ̃_i) - θ_i‖², whose gradient at θ_i is -(θ̃_i - θ_i):
the descent direction. (FedSheafHN's eqs. 12 and 13 print the opposite sign, which would move away from the trained.)

Shape legend: C clients, P generated parameters of one client.
"""

import dataclasses
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.federation import Federation
from fl_lightning.kernels.randomness import derive_key
from fl_lightning.round.payload import Payload, flatten, unflatten
from fl_lightning.round.stage import Evaluation, Signal, Stage
from fl_lightning.run.memory import require, state_copies
from fl_lightning.strategies.base import Strategy, select_names, server_dtype


@dataclass(kw_only=True, eq=False)
class Hypernetwork(Strategy):
    """Base of the family.

    Args:
        personal: Shell-style patterns of parameters that are not generated and never leave their client.
        num_server_steps: Optimiser steps on the generator a round, at least 1.
    """

    personal: Sequence[str] = ("head.*",)
    num_server_steps: int = 1

    #: Whether the squared distances are averaged over the clients that answered instead of summed.
    mean_distance: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_at_least(1, "num_server_steps")

    @abstractmethod
    def build_generator(self, num_outputs: int) -> nn.Module:
        """Create the server's modules; P = ``num_outputs``."""

    @abstractmethod
    def build_optimizer(self) -> Optimizer:
        """Create the server's optimiser over ``self.generator``."""

    @abstractmethod
    def generate(self, clients: Sequence[int]) -> Tensor:
        """Generated parameters of the given clients (C, P), differentiable."""

    def extra_losses(self) -> Sequence[Tensor]:
        """Scalars that the server minimises beside the distance, of what :meth:`generate` computed last in training."""
        return ()

    def signals(self, round_idx: int) -> Mapping[str, Signal]:
        """What the clients send beside their update in this round."""
        return {}

    def setup(self, federation: Federation) -> None:
        """Create generator and optimiser, in the same way on every process."""
        super().setup(federation)
        personal = set(select_names(list(federation.parameters), self.personal))
        self.shapes = {name: p.shape for name, p in federation.parameters.items() if name not in personal}
        self.num_steps = 0
        self.update_norm = 0.0
        with self.randomness("initialisation"):
            self.generator = self.build_generator(sum(shape.numel() for shape in self.shapes.values()))
        self.dtype = server_dtype(next(iter(federation.parameters.values())).dtype)
        self.generator.to(federation.device, self.dtype)
        try:
            self.optimizer = self.build_optimizer()
        except (TypeError, ValueError) as error:
            raise ValueError(f"strategy: the server's optimiser cannot be built: {error}") from error
        num_bytes = sum(parameter.nbytes for parameter in self.generator.parameters())
        require(
            (1 + state_copies(self.optimizer)) * num_bytes,
            f"the gradients and the optimiser's state of {type(self).__name__}'s generator",
            "set strategy.head to FactoredHead or ChunkedHead (PFedHN, Panacea), or generate fewer parameters "
            "(strategy.personal)",
            federation.device,
        )

    def stages(self, round_idx: int) -> Sequence[Stage]:
        """One exchange: receive generated parameters, train, send how far they moved."""
        training, signals = self.training(round_idx), self.signals(round_idx)
        return [dataclasses.replace(training, upload=tuple(self.shapes), as_update=True, signals=signals)]

    def configure(self, stage: Stage, clients: Sequence[int]) -> Payload | None:
        """Generate in training mode; the graph is kept for the server step that follows. Newcomers train nobody."""
        if not set(clients) <= set(self.federation.training_clients):
            return self.generate_for_evaluation(clients)
        self.generator.train()
        with self.randomness("server", self.num_steps):
            self._generated = tuple(clients), self.generate(clients)
        return self._as_payload(clients, self._generated[1].detach())

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        """Move the generator so that it generates what the clients trained."""
        if upload.clients:
            self.server_step(upload)

    def server_step(self, upload: Payload) -> None:
        """``num_server_steps`` steps on ½ Σ ‖stopgrad(generated + update) - generated‖², and the extra losses.

        The target stays that of the first step, so that further steps approach it without passing it.
        """
        sent_to, generated_CP = self._generated
        row = {client: row for row, client in enumerate(sent_to)}
        rows = torch.tensor([row[client] for client in upload.clients], device=generated_CP.device)
        update_CP = flatten({name: upload.parameters[name] for name in self.shapes}).to(generated_CP)
        self.update_norm = float(update_CP.norm(dim=1).mean())
        whole = len(rows) == len(generated_CP)
        start_CP = generated_CP.detach() if whole else generated_CP.detach()[rows]
        first_gradient_CP = update_CP.neg_()
        for step in range(self.num_server_steps):
            if step:
                with self.randomness("server", self.num_steps):
                    generated_CP = self.generate(sent_to)
            current_CP = generated_CP if whole else generated_CP.index_select(0, rows)
            gradient_CP = (current_CP.detach() - start_CP).add_(first_gradient_CP) if step else first_gradient_CP
            if self.mean_distance:
                gradient_CP = gradient_CP / len(rows)
            extra = self.extra_losses()
            self.optimizer.zero_grad()
            torch.autograd.backward([current_CP, *extra], [gradient_CP, *(None for _ in extra)])
            self.optimizer.step()
            self.num_steps += 1
        del self._generated

    def generate_for_evaluation(self, clients: Sequence[int]) -> Payload:
        """Generated parameters without dropout and without a graph."""
        self.generator.eval()
        with torch.no_grad():
            return self._as_payload(clients, self.generate(clients))

    def evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """The locally trained models are the result; the generated ones are logged as ``gen/...``."""
        return {**super().evaluations(clients), "gen/": Evaluation(payload=self.generate_for_evaluation(clients))}

    def metrics(self) -> Mapping[str, float]:
        """Mean length of the clients' updates."""
        return {"server/update_norm": self.update_norm}

    def _as_payload(self, clients: Sequence[int], generated_CP: Tensor) -> Payload:
        return Payload(clients=tuple(clients), parameters=unflatten(generated_CP, self.shapes))

    @contextmanager
    def randomness(self, *key: int | str) -> Iterator[None]:
        """Seed torch's generator for the server's own draws, and put it back afterwards."""
        devices = [self.federation.device] if self.federation.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(derive_key(self.federation.seed, *key))
            yield

    def state_dict(self) -> dict[str, Any]:
        """Generator, optimiser, step count and the last round's figure."""
        return {
            "generator": self.generator.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "num_steps": self.num_steps,
            "update_norm": self.update_norm,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore generator, optimiser, step count and the last round's figure."""
        self.generator.load_state_dict(state["generator"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.num_steps = state["num_steps"]
        self.update_norm = state["update_norm"]
