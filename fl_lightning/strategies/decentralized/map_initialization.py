"""Initializations of restriction maps that are stored element by element (``dense_maps.py``).

Ben Issaid, Vepakomma, Bennis: "Tackling Feature and Sample Heterogeneity in Decentralized Multi-Task Learning: A
Sheaf-Theoretic Approach" (Sheaf-FMTL), Table 6. Departure: its standard normal initialization is scaled by 1/sqrt(d_i),
since with variance 1 the eigenvalues of the sheaf Laplacian grow with the models, and steps in theta diverge.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


class MapInitialization(ABC):
    """Draws one initial map; never zero, since eq. (19) would keep it at zero."""

    @abstractmethod
    def fill(self, map_: Tensor, random: torch.Generator) -> None:
        """Draw a map of shape (d_ij, d_i), on the CPU, in place."""


@dataclass(frozen=True, kw_only=True)
class GaussianInitialization(MapInitialization):
    """Independent normal elements.

    Args:
        deviation: Their standard deviation, above 0; None for 1/sqrt(d_i), which gives rows a norm of about 1. The
            paper uses 1, and 0.01 and 0.1 in its Table 6.
    """

    deviation: float | None = None

    def __post_init__(self) -> None:
        if self.deviation is not None:
            _require_positive("deviation", self.deviation)

    def fill(self, map_: Tensor, random: torch.Generator) -> None:
        """Draw the map."""
        deviation = 1 / math.sqrt(map_.shape[1]) if self.deviation is None else self.deviation
        map_.normal_(generator=random).mul_(deviation)


@dataclass(frozen=True, kw_only=True)
class UniformInitialization(MapInitialization):
    """Independent elements, uniform in [-bound, bound].

    Args:
        bound: Above 0. The paper's Table 6 has 0.01, 0.1 and 1.
    """

    bound: float = 0.01

    def __post_init__(self) -> None:
        _require_positive("bound", self.bound)

    def fill(self, map_: Tensor, random: torch.Generator) -> None:
        """Draw the map."""
        map_.uniform_(generator=random).mul_(2 * self.bound).sub_(self.bound)


@dataclass(frozen=True, kw_only=True)
class OrthogonalInitialization(MapInitialization):
    """Orthonormal rows, P P^T = I, uniform among such maps."""

    def fill(self, map_: Tensor, random: torch.Generator) -> None:
        """Draw the map."""
        num_rows, size = map_.shape
        columns, triangle = torch.linalg.qr(torch.randn(size, num_rows, generator=random, dtype=map_.dtype))
        map_.copy_((columns * triangle.diagonal().sign()).T)


@dataclass(frozen=True, kw_only=True)
class IdentityInitialization(MapInitialization):
    """The first rows of the identity, scaled, with or without noise.

    With ``scale = sqrt(a)``, no noise and a projection fraction of 1 the residuals are those of dFedU with weight a;
    with ``noise = 0.01`` it is the paper's "Identity + Noise".

    Args:
        scale: Above 0.
        noise: Standard deviation of normal noise on every element, at least 0.
    """

    scale: float = 1.0
    noise: float = 0.0

    def __post_init__(self) -> None:
        _require_positive("scale", self.scale)
        if not 0 <= self.noise < math.inf:
            raise ValueError(f"noise must be a number of at least 0, got {self.noise}")

    def fill(self, map_: Tensor, random: torch.Generator) -> None:
        """Draw the map."""
        map_.normal_(generator=random).mul_(self.noise)
        map_.diagonal().add_(self.scale)


def _require_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be above 0, got {value}: maps that start from zero never learn")
