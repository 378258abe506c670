"""FedOpt: the mean change of the clients' models is the step of a server optimizer.

Reddi, Charles, Zaheer, Garrett, Rush, Konečný, Kumar, McMahan: "Adaptive Federated Optimization", ICLR 2021,
Algorithm 2; avgm: Hsu, Qi, Brown: "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", arXiv:1909.06335. With Δ = Σ_i w_i (θ_i - θ) over the clients that responded, element by element:

    avgm      m <- ρ m + Δ             θ <- θ + η m
    the rest  m <- β1 m + (1 - β1) Δ   θ <- θ + η m / (√v + τ)
    adagrad   v <- v + Δ²
    adam      v <- β2 v + (1 - β2) Δ²
    yogi      v <- v - (1 - β2) Δ² sign(v - Δ²)

m starts at 0, v at τ², and no bias is corrected, as in the paper. Its algorithm has equal w, its experiments the shares
of the training examples, which are the default here. A round in which nobody responds changes nothing.
"""

import functools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.optim import SGD

from fl_lightning.federation import Federation
from fl_lightning.strategies.base import server_dtype
from fl_lightning.strategies.mixing.fedavg import FedAvg


@dataclass(kw_only=True, eq=False)
class FedOpt(FedAvg):
    """FedAvg with a server optimizer: FedAvgM, FedAdagrad, FedAdam or FedYogi.

    Args:
        server_optimizer: ``avgm``, ``adagrad``, ``adam`` or ``yogi``.
        server_lr: η, positive.
        momentum: ρ of avgm, β1 of the others, in [0, 1).
        second_momentum: β2 of adam and yogi, in [0, 1].
        adaptivity: τ of all but avgm, positive: the larger, the less the learning rates of two coordinates differ.
    """

    server_optimizer: Literal["avgm", "adagrad", "adam", "yogi"] = "adam"
    server_lr: float = 0.01
    momentum: float = 0.9
    second_momentum: float = 0.99
    adaptivity: float = 1e-4

    shares_statistics = False
    #: SGD, as in the paper: Adam is for the server; with Adam at both ends nothing is learned.
    default_optimizer = functools.partial(SGD, lr=0.3, fused=True)
    server_state = ("m", "v")

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_positive("server_lr", "adaptivity")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"strategy.momentum must be in [0, 1), got {self.momentum}")
        self.require_within(0, 1, "second_momentum")

    def setup(self, federation: Federation) -> None:
        """Start the optimizer with m = 0 and v = τ²."""
        super().setup(federation)
        self.m = {name: torch.zeros_like(t, dtype=server_dtype(t.dtype)) for name, t in self.models.items()}
        self.v = {name: torch.full_like(m, self.adaptivity**2) for name, m in self.m.items()}

    def update(self, name: str, before: Tensor, mixed: Tensor) -> Tensor:
        """One step of the server optimizer."""
        change = mixed - before
        old = self.momentum * self.m[name]
        if self.server_optimizer == "avgm":
            self.m[name] = old + change
            step = self.server_lr * self.m[name]
        else:
            self.m[name] = old + (1 - self.momentum) * change
            self.v[name] = self.second_moment(self.v[name], change.square())
            step = self.server_lr * self.m[name] / (self.v[name].sqrt() + self.adaptivity)
        return mixed + (step - change).to(mixed)  # θ + step, to the last bit FedAvg where the step is the change

    def second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        """The new v, given Δ²."""
        if self.server_optimizer == "adagrad":
            return v + square
        if self.server_optimizer == "adam":
            return self.second_momentum * v + (1 - self.second_momentum) * square
        return v - (1 - self.second_momentum) * square * (v - square).sign()
