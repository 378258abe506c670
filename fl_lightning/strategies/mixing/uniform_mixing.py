"""Warns once if the clients' signatures are so similar, round after round, that mixing is averaging."""

import warnings
from typing import Protocol

from torch import Tensor

from fl_lightning.round.payload import Payload
from fl_lightning.strategies.server_state import ServerState

#: Mixing counts as uniform if a client's model is mixed from at least this share of all clients (see mixing_breadth).
UNIFORM_BREADTH = 0.99
#: Rounds of uniform mixing in a row after which there is a warning.
UNIFORM_ROUNDS = 10


class MixesByLikeness(Protocol):
    """A strategy that mixes models of similar clients, see ``SimilarityMixing``."""

    common_share: float | None
    validate_every: int | None
    similarity_temperature: float
    personalized: bool
    breadth: float | None

    def similarity_of(self, upload: Payload) -> Tensor:
        """The similarity of the clients that responded, (C, C)."""


class UniformMixing(ServerState):
    """Counts rounds of uniform mixing.

    Attributes:
        num_rounds: How many there were in a row.
    """

    server_state = ("num_rounds",)

    def __init__(self) -> None:
        self.num_rounds = 0

    def note(self, strategy: MixesByLikeness, upload: Payload) -> None:
        """Count a round, and warn in the tenth, unless uniform mixing is set or was chosen by validation."""
        temperature = strategy.similarity_temperature
        is_meant = strategy.common_share in (None, 1.0) or strategy.validate_every is not None or temperature == 0
        if is_meant or not strategy.personalized or len(upload.clients) < 2:
            return
        uniform = strategy.breadth is not None and strategy.breadth > UNIFORM_BREADTH
        self.num_rounds = self.num_rounds + 1 if uniform else 0
        if self.num_rounds == UNIFORM_ROUNDS:
            smallest = float(strategy.similarity_of(upload).min())
            warnings.warn(
                f"{type(strategy).__name__}: for {UNIFORM_ROUNDS} rounds mixing has been uniform, as in FedAvg: all "
                f"signatures are alike (the smallest similarity is {smallest:.4f}). Raise "
                f"strategy.similarity_temperature (now {temperature:g}), or let the signatures differ",
                stacklevel=2,
            )
