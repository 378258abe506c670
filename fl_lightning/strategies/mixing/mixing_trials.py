"""Trials of how models are mixed (``strategies/trials.py``): the last round's models, mixed in other ways."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from fl_lightning.round.payload import Payload
from fl_lightning.round.stage import Stage
from fl_lightning.strategies.mixing.aggregation import Aggregation
from fl_lightning.strategies.mixing.base import first_match, mean_breadth, mix
from fl_lightning.strategies.trials import ON_OFF, SHARES, Choice, Trials, require_trials


class Tried(Protocol):
    """A strategy some of whose settings are chosen by trials, see ``SimilarityMixing``."""

    common_share: float | None
    masked_averaging: bool
    similarity_temperature: float
    validate_every: int | None
    validate_personal: Sequence[str]
    validate_similarity_temperature: Sequence[float]
    personalized: bool
    aggregation: Aggregation | None
    models: dict[str, Tensor]
    breadth: float | None

    def mixing_matrix(self, upload: Payload) -> Tensor | Mapping[str, Tensor]:
        """W over the clients of the upload, by the current choice."""

    def uses_masked_averaging(self) -> bool:
        """Whether each coordinate is mixed over the clients that updated it, by the current choice."""

    def mixed_models(self, clients: Sequence[int]) -> Payload:
        """Each client's mixed model."""


class MixingTrials(Trials):
    """The current choice of how models are mixed, and the last round's models.

    Args:
        strategy: The strategy that mixes them; its settings are the first choice.
    """

    def __init__(self, strategy: Tried) -> None:
        start = {"common_share": strategy.common_share or 0.0, "masked_averaging": float(strategy.masked_averaging)}
        grids: dict[str, Sequence[float]] = {"common_share": SHARES} if strategy.personalized else {}
        if strategy.validate_similarity_temperature:
            grids["similarity_temperature"] = strategy.validate_similarity_temperature
            start["similarity_temperature"] = strategy.similarity_temperature
        grids["masked_averaging"] = ON_OFF
        super().__init__(grids, start, strategy.validate_every, strategy.validate_personal)
        self.strategy = strategy
        self._upload = Payload(clients=())
        self._received: Mapping[str, Tensor] = {}

    def keep(self, upload: Payload) -> None:
        """Keep what clients sent, and what they had received, to mix it in other ways later."""
        if self.every is not None and upload.parameters:
            self._upload, rows = upload, self._rows(upload)
            self._received = {name: self.strategy.models[name][rows] for name in upload.parameters}

    def payload(self, choice: Choice, clients: Sequence[int]) -> Payload:
        """What clients are sent in a trial: their own model, and the one that would be mixed for them."""
        if choice == self.choice:
            return Payload(clients=tuple(clients), extras=self.strategy.mixed_models(clients).parameters)
        rows = [self._upload.clients.index(client) if self.strategy.personalized else 0 for client in clients]
        models = self._mixed_by(choice)
        return Payload(clients=tuple(clients), extras={name: model[rows] for name, model in models.items()})

    def choose(self, stage: Stage, upload: Payload) -> None:
        """Record the scores of a trial; after the last one, mix the models in the best way."""
        before, strategy = self.choice, self.strategy
        if not self.ingest(stage, upload) or self.choice == before:
            return
        for name, mixed in self._mixed_by(self.choice).items():
            strategy.models[name][self._rows(self._upload)] = mixed
        if strategy.personalized:
            strategy.breadth = mean_breadth(strategy.mixing_matrix(self._upload), list(self._upload.parameters))

    def _rows(self, upload: Payload) -> list[int]:
        """Rows of the server's models that belong to an upload's clients."""
        return list(upload.clients) if self.strategy.personalized else [0]

    def _mixed_by(self, choice: Choice) -> dict[str, Tensor]:
        """The models of the last round's clients, mixed by a choice, (C, *shape) by name; or the one for all."""
        with self.supposing(choice):
            mixing, moved = self.strategy.mixing_matrix(self._upload), self.strategy.uses_masked_averaging()
        return {
            name: mix(first_match(mixing, name), tensor, self._received[name] if moved else None)
            for name, tensor in self._upload.parameters.items()
        }


def check_tried(strategy: Tried) -> None:
    """Check the settings of mixing and of its trials.

    Raises:
        ValueError: Two of them contradict each other, or one is out of range.
    """
    share, every = strategy.common_share, strategy.validate_every
    if share is not None and not 0 <= share <= 1:
        raise ValueError(f"strategy.common_share must be in [0, 1], got {share}")
    if share is None and strategy.aggregation is not None:
        raise ValueError(
            "strategy.common_share is null, which estimates a share for each parameter tensor, and "
            "strategy.aggregation ranks whole clients: set common_share, or leave aggregation out"
        )
    if every is not None and (share is None or strategy.aggregation is not None):
        other = "strategy.common_share is null" if share is None else "strategy.aggregation is set"
        raise ValueError(
            f"strategy.validate_every chooses how models are mixed, but {other}: give common_share a number "
            "to start from, leave aggregation out, or leave validate_every out"
        )
    lists = ("validate_personal", "validate_similarity_temperature")
    for name in lists:
        require_trials(name, getattr(strategy, name), every)
    for name in lists:
        if getattr(strategy, name) and not strategy.personalized:
            raise ValueError(
                f"strategy.{name} needs strategy.personalized: with one model for all there is nothing to choose"
            )
    values = list(strategy.validate_similarity_temperature)
    if values != sorted({max(value, 0.0) for value in values}):
        raise ValueError(f"strategy.validate_similarity_temperature must rise from 0 or above, got {values}")
