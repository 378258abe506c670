"""Settings without a fixed best value, which are chosen during training on the clients' validation examples.

For example, the share of a client's model that should come from all clients is small in the first rounds, grows as
updates become noise, and differs between data sets. A strategy defines a grid for each such setting. In some rounds,
after training, the clients also receive the models of the current choice and of each neighbor on the grid, one step of
one setting away, in a separate exchange; they respond with the metric that also chooses the best round
(``ClientModule.monitor``), and the best candidate is the choice from then on. Test examples play no part in it.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fl_lightning.batches.base import Batch
from fl_lightning.direction import direction_of
from fl_lightning.federation import Federation
from fl_lightning.round.client import ClientModule, OutputRule
from fl_lightning.round.context import Context, Parameters
from fl_lightning.round.payload import Payload
from fl_lightning.round.stage import Rows, Stage, StageAddress

#: Grids of a share and of a setting that is on or off.
SHARES, ON_OFF = (0.0, 0.25, 0.5, 0.75, 1.0), (0.0, 1.0)

Choice = Mapping[str, float]


def validation_score(client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
    """Numerator and denominator of the client's validation metric with the model that it was sent, (2,)."""
    sent = {name: context.received.get(name, local) for name, local in parameters.items()}
    return score_of(client, sent, batch, context)


def score_of(
    client: ClientModule, parameters: Parameters, batch: Batch, context: Context, rule: OutputRule | None = None
) -> Tensor:
    """Numerator and denominator of a client's validation metric, of which more is better, (2,).

    Args:
        client: The client.
        parameters: The model.
        batch: The client's examples.
        context: What else the client knows.
        rule: The predictions that are scored instead of the model's own.
    """
    scores = client.scores_of_parts([batch], [client.score_table(parameters, batch, context, rule)])
    total, count = scores[client.monitor].unbind(-1)
    is_less_better = direction_of(client.monitor, client.directions()) == "min"
    return torch.stack([-total if is_less_better else total, count], dim=-1)


class Trials:
    """The current choice, and the exchanges that try its neighbors.

    Args:
        grids: The values of each setting, in order.
        start: The first choice, which is on the grids; a setting without a grid stays as it is.
        every: Rounds between trials; None for no trials.
        personal: Patterns of parameters for which one more setting, ``personal``, is whether they are kept local; at
            first they are.

    Raises:
        ValueError: The first choice is not on its grid.
    """

    def __init__(
        self, grids: Mapping[str, Sequence[float]], start: Choice, every: int | None, personal: Sequence[str] = ()
    ) -> None:
        self.grids, self.choice, self.every = dict(grids), dict(start), every
        if personal:
            self.grids["personal"], self.choice["personal"] = ON_OFF, 1.0
        for name, value in start.items():
            if every is not None and value not in grids.get(name, (value,)):
                allowed = ", ".join(map(str, grids[name]))
                raise ValueError(f"strategy.{name} is {value}, but if validation chooses it, it must be {allowed}")
        self._scores: dict[str, tuple[tuple[int, ...], Tensor]] = {}
        self._everyone: set[int] = set()
        self._without: set[int] = set()  # validation examples

    def setup(self, federation: Federation) -> None:
        """Take the clients that may be asked, and refuse those whose metric has no known direction.

        Raises:
            ValueError: There are trials, and it is unknown whether more or less of ``client.monitor`` is better.
        """
        self._everyone = set(federation.training_clients)
        if self.every is not None:
            setting, remedy = f"strategy.validate_every is {self.every}", "set strategy.validate_every to null"
            require_direction(federation.client, setting, remedy)

    def candidates(self) -> dict[str, Choice]:
        """The choice and its neighbors, by the names of their stages."""
        result: dict[str, Choice] = {_name_of(self.choice): dict(self.choice)}
        for setting, grid in self.grids.items():
            index = grid.index(self.choice[setting])
            for value in grid[max(index - 1, 0) : index + 2]:
                neighbor = {**self.choice, setting: value}
                result[_name_of(neighbor)] = neighbor
        return result

    def are_due(self, round_idx: int) -> bool:
        """Whether this round ends with trials; the first one never does."""
        return self.every is not None and round_idx > 0 and (round_idx + 1) % self.every == 0

    def stages(self, round_idx: int) -> list[Stage]:
        """One exchange for each candidate, in a round that ends with trials."""
        return [_trial(name) for name in self.candidates()] if self.are_due(round_idx) else []

    def stage(self, address: StageAddress) -> Stage | None:
        """The trial at an address, or None; it may be of any candidate, as a client does not know the choice."""
        return _trial(address.name) if self.every is not None and address.name.startswith("try ") else None

    def of(self, stage: Stage) -> Choice | None:
        """What a stage tries; None if it is not a trial."""
        return self.candidates().get(stage.name) if self.every is not None else None

    def ingest(self, stage: Stage, upload: Payload) -> bool:
        """Record the scores of one trial; after the last one, choose. Returns whether a choice was made.

        It stays as it is if none of the clients that were asked has validation examples.

        Raises:
            ValueError: No client of the federation has validation examples.
        """
        candidates = self.candidates()
        first, *_, last = candidates
        if stage.name == first:
            self._scores = {}  # left from trials that were not completed
        self._scores[stage.name] = upload.clients, upload.extras["validation_score"]
        if stage.name != last:
            return False
        scores, self._scores = self._scores, {}
        means = {name: _mean_score(*scores[name], upload.clients) for name in candidates}
        mean = {name: score for name, score in means.items() if score is not None}
        if len(mean) < len(means):
            self._without |= set(upload.clients)
            if self._without >= self._everyone:
                raise ValueError(
                    "strategy.validate_every chooses on the clients' validation examples, but no client has any: let "
                    "data.splitter leave some, or set strategy.validate_every to null"
                )
            return False
        self.choice = dict(candidates[max(mean, key=mean.__getitem__)])  # the current one in a tie, as it comes first
        return True

    @contextmanager
    def supposing(self, choice: Choice) -> Iterator[None]:
        """A context in which this is the choice."""
        present, self.choice = self.choice, dict(choice)
        try:
            yield
        finally:
            self.choice = present

    def metrics(self) -> dict[str, float]:
        """The choice, if there is one to make."""
        return {} if self.every is None else {f"server/{name}": value for name, value in self.choice.items()}

    def state_dict(self) -> dict[str, Any]:
        """The choice."""
        return dict(self.choice)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the choice."""
        self.choice = {**self.choice, **state}


def require_direction(client: ClientModule | None, setting: str, remedy: str) -> None:
    """Refuse a client whose validation metric has no known direction.

    Args:
        client: The client, if it is known.
        setting: The setting that needs the direction, and its value, in words.
        remedy: What to do instead of declaring the direction.

    Raises:
        ValueError: It is unknown whether more or less of ``client.monitor`` is better.
    """
    if client is not None and direction_of(client.monitor, client.directions()) is None:
        raise ValueError(
            f"{setting}, but it is unknown whether more or less of {client.monitor!r} is better: declare it in "
            f"metric_directions of {type(client).__name__}, or {remedy}"
        )


def require_trials(setting: str, tried: Sequence[object], validate_every: int | None) -> None:
    """Refuse values to be tried if there are no trials.

    Raises:
        ValueError: There are values to be tried, but no trials.
    """
    if tried and validate_every is None:
        raise ValueError(
            f"strategy.{setting} is {', '.join(map(str, tried))}, but there are no trials to choose from them: set "
            f"strategy.validate_every, or fix it by strategy.{setting.removeprefix('validate_')}"
        )


def _trial(name: str) -> Stage:
    """The exchange of a candidate."""
    return Stage(
        name=name, client_outputs={"validation_score": validation_score}, rows={"validation_score": Rows(of="score")}
    )


def _name_of(choice: Choice) -> str:
    return "try " + " ".join(f"{name}={value:g}" for name, value in choice.items())


def _mean_score(clients: tuple[int, ...], score_C2: Tensor, asked: Sequence[int]) -> float | None:
    """Mean over the validation examples of the clients that responded in every trial, if they have any."""
    rows = [clients.index(client) for client in asked]
    total, count = score_C2[rows].double().sum(dim=0).tolist()
    return float(total / count) if count else None
