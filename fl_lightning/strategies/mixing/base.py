"""The mixing family: θ <- W θ with a row-stochastic W over the clients of a round.

The members differ in how W is computed, which parameters are mixed, and what the clients add to their objective.
"""

import dataclasses
import fnmatch
import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fl_lightning.batches.base import Batch
from fl_lightning.federation import Federation
from fl_lightning.kernels.layout import (
    by_columns,
    from_memory_order,
    in_memory_order,
    is_by_columns,
    rows_at,
    rows_of,
)
from fl_lightning.kernels.masked_averaging import masked_average
from fl_lightning.models.output import NetOutput
from fl_lightning.relations.similarity import mixing_breadth
from fl_lightning.round.client import ClientModule
from fl_lightning.round.context import Context, Parameters
from fl_lightning.round.payload import Payload, flatten, unflatten
from fl_lightning.round.stage import ClientOutput, Evaluation, Persistence, Stage
from fl_lightning.strategies.base import Strategy, server_dtype
from fl_lightning.strategies.mixing.aggregation import Aggregation


@dataclass(kw_only=True, eq=False)
class Mixing(Strategy):
    """Base class of the family.

    Args:
        personal: Shell-style patterns of parameters that are kept local, for example ``["head.*"]``.
        aggregation: A robust rule instead of θ <- W θ, from ``strategies.mixing``; None for W θ itself. It withstands
            wrong parameters; a strategy that also trusts client outputs (controls, moments, ...) causes a warning.
        masked_averaging: Mix each coordinate over the clients that updated it (``kernels/masked_averaging.py``). The
            clients' weight decay must not move untouched coordinates: use 0, or an optimizer of
            ``fl_lightning.optimizers``.
        blend: Also evaluate the mean of each client's mixed and trained models, as ``blend/...``.
    """

    personal: Sequence[str] = ()
    aggregation: Aggregation | None = None
    masked_averaging: bool = False
    blend: bool = False

    #: Whether W has a row for every client of the round, not one common row. (Without a type it is not a setting.)
    personalized = False
    #: Whether every row of W must sum to one; a method of which W is no average says otherwise.
    rows_sum_to_one = True
    server_state: ClassVar[tuple[str, ...]] = ("models", "breadth")

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        if self.masked_averaging and self.aggregation is not None:
            raise ValueError(
                "strategy.masked_averaging chooses the clients of each number and strategy.aggregation ranks whole "
                "clients: set one of them"
            )

    @abstractmethod
    def mixing_matrix(self, upload: Payload) -> Tensor | Mapping[str, Tensor]:
        """W over the clients of the upload: (1, C) for one common model, or (C, C) if ``personalized``.

        Its entries are finite, and its rows sum to one (unless ``rows_sum_to_one`` is False), or the round ends with a
        ``WrongMixing``. A mapping from shell-style patterns gives each group of parameters its own W; the first
        matching pattern counts.
        """

    def update(self, name: str, before: Tensor, mixed: Tensor) -> Tensor:
        """The new value of a parameter on the server: the mixed one, unless a server optimizer steps toward it.

        Args:
            name: Name of the parameter.
            before: The server's previous values for the clients that responded, (1 or C, *shape).
            mixed: W θ for these clients, (1 or C, *shape).
        """
        return mixed

    def received(self, name: str, rows: slice | Tensor) -> Tensor:
        """The parameter from which clients began to train, by rows of the server's models, (1 or C, *shape)."""
        return rows_at(self.models[name], rows)

    def uses_masked_averaging(self) -> bool:
        """Whether each coordinate is currently mixed over the clients that updated it."""
        return self.masked_averaging

    def kept_patterns(self, federation: Federation) -> Sequence[str]:
        """Shell-style patterns of all parameters that are kept local: those of the setting, and of the method."""
        return self.personal

    def settings_against_sums(self) -> list[str]:
        """Robust aggregation and masked averaging, which need every client's own update."""
        names = ["aggregation"] if self.aggregation is not None else []
        return [*names, "masked_averaging"] if self.masked_averaging else names

    def persistence(self) -> Persistence:
        """The parameters that are kept local, since a client receives the others when a round begins.

        If clients are evaluated with models that were not sent to them, these live on as well.
        """
        selected = ("*",) if self.predicts_trained() else tuple(self.kept_local)
        return dataclasses.replace(super().persistence(), parameters=selected)

    def predicts_trained(self) -> bool:
        """Whether the result is that of the models as the clients have trained them, which then live on."""
        return False

    def client_outputs(self) -> Mapping[str, ClientOutput]:
        """What the clients send in addition to their parameters."""
        return {}

    def setup(self, federation: Federation) -> None:
        """Start every client from the common initial parameters."""
        super().setup(federation)
        every = [*federation.parameters, *federation.own_names]
        personal = self.kept_local = self.select(every, self.kept_patterns(federation))
        self.shared = tuple(name for name in federation.parameters if name not in personal)
        self.body = tuple(name for name in every if name not in personal)  # also what is each client's own
        self.breadth: float | None = None
        copies = federation.num_clients if self.personalized else 1
        self.models = {
            name: federation.parameters[name].expand(copies, *federation.parameters[name].shape).clone()
            for name in self.shared
        }

    @property
    def min_updates(self) -> int:
        """As many as robust aggregation needs."""
        return 1 if self.aggregation is None else self.aggregation.fewest_clients

    def check_round(self, num_clients: int) -> None:
        """Refuse fewer clients than robust aggregation needs."""
        if self.aggregation is not None:
            self.aggregation.check(num_clients)

    def stages(self, round_idx: int) -> Sequence[Stage]:
        """One exchange: receive the mixed model, train, send the shared parameters."""
        return [dataclasses.replace(self.training(round_idx), upload=self.shared, client_outputs=self.client_outputs())]

    def mixed_models(self, clients: Sequence[int]) -> Payload:
        """Each client's mixed model."""
        if not self.personalized:
            return one_model(self.models, clients)
        rows = torch.tensor(clients, dtype=torch.int64, device=self.federation.device)
        mixed = {name: rows_at(model, rows) for name, model in self.models.items()}  # copies, which others may change
        return Payload(clients=tuple(clients), parameters=mixed)

    def with_unseen_clients(
        self, payload: Payload, unseen_clients: Sequence[int], mixing: Tensor | Mapping[str, Tensor]
    ) -> Payload:
        """The mixed models, with those of unseen clients mixed from the training clients' by rows of W."""
        rows = [payload.clients.index(client) for client in unseen_clients]
        for name, tensor in payload.parameters.items():
            models_TP = self.models[name][list(self.federation.training_clients)].flatten(1)
            mixing_NT = first_match(mixing, name)
            tensor[rows] = (mixing_NT.to(tensor) @ models_TP).view(len(rows), *tensor.shape[1:])
        return payload

    def configure(self, stage: Stage, clients: Sequence[int]) -> Payload:
        """Each client's mixed model."""
        return self.mixed_models(clients)

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        """θ <- W θ for the clients that responded; the others keep what they had.

        Raises:
            WrongMixing: ``mixing_matrix`` returned a W of a wrong shape, or one that is no average.
        """
        if not upload.clients or not upload.parameters:
            return
        mixing = self.mixing_matrix(upload)
        check_mixing(self, mixing, len(upload.clients))
        if self.personalized:
            self.breadth = mean_breadth(mixing, list(upload.parameters))
        rows = rows_of(upload.clients if self.personalized else [0], self.federation.device)
        if self.aggregation is not None:
            if not isinstance(mixing, Tensor):
                raise ValueError(f"strategy.aggregation: {type(self).__name__} has a W for each group of parameters")
            if extras := sorted({name.partition("/")[0] for name in upload.extras}):
                warnings.warn(
                    f"strategy.aggregation withstands wrong parameters, but {type(self).__name__} also trusts the "
                    f"client outputs that clients send: {', '.join(extras)}",
                    stacklevel=2,
                )
            self._aggregate_robustly(self.aggregation, mixing, upload, rows)
            return
        for name, tensor in upload.parameters.items():
            received = self.received(name, rows) if self.uses_masked_averaging() else None
            mixed = mix(first_match(mixing, name), tensor, received)
            if self.personalized:
                self.models[name][rows] = self.update(name, rows_at(self.models[name], rows), mixed)
            else:
                self.models[name] = self.update(name, self.models[name], mixed)

    def _aggregate_robustly(
        self, aggregation: Aggregation, mixing: Tensor, upload: Payload, rows: slice | Tensor
    ) -> None:
        """Aggregate all parameters of a client as one row, on which distances and norms are defined."""
        sent = flatten(upload.parameters)
        dtype = server_dtype(sent.dtype)
        received = flatten({name: self.received(name, rows) for name in upload.parameters}).to(dtype)
        mixed = aggregation(mixing, sent.to(dtype), received.expand(sent.shape))
        shapes = {name: tensor.shape[1:] for name, tensor in upload.parameters.items()}
        for name, tensor in unflatten(mixed, shapes).items():
            model = self.models[name].clone()  # strategies keep earlier ones
            model[rows] = self.update(name, rows_at(model, rows), tensor.to(model))
            self.models[name] = model

    def model_for(self, clients: Sequence[int]) -> Payload | None:
        """The mixed models; clients keep their personal parameters."""
        return self.mixed_models(clients)

    def evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """The mixed models are the result; ``trained/...`` is before mixing, for clients that have trained."""
        result = super().evaluations(clients)
        trained = Evaluation(payload=result[""].payload, prefer_trained=True)
        return {**result, "trained/": trained, **self.blended(clients)}

    def blended(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """The mean of each client's mixed and trained models, if requested; the client computes it."""
        if not self.blend:
            return {}
        model = self.model_for(clients) or self.mixed_models(clients)
        mixed = dataclasses.replace(model, extras=model.parameters)  # the mixed model itself if they have not trained
        return {"blend/": Evaluation(payload=mixed, output=blended_output, prefer_trained=True)}

    def metrics(self) -> Mapping[str, float]:
        """The breadth of the last mixing, if each client has a row of its own (``relations/similarity.py``)."""
        result = super().metrics()
        return result if self.breadth is None else {**result, "server/mixing_breadth": self.breadth}


class WrongMixing(ValueError):
    """What a strategy's ``mixing_matrix`` returned is not what it has to be."""


#: By how much a row of W may miss one: the rounding of float32 over many clients.
_MOST_ROUNDING = 1e-3


def check_mixing(strategy: Mixing, mixing: Tensor | Mapping[str, Tensor], num_clients: int) -> None:
    """Refuse a W that is not (1, C) or (C, C), not finite, or no average.

    Args:
        strategy: Whose W it is.
        mixing: W, or several by pattern.
        num_clients: C.

    Raises:
        WrongMixing: It is refused.
    """
    name = f"{type(strategy).__name__}.mixing_matrix"
    for pattern, matrix in (mixing if isinstance(mixing, Mapping) else {"": mixing}).items():
        of = f"{name} (of {pattern})" if pattern else name
        shape = (num_clients if strategy.personalized else 1, num_clients)
        if not isinstance(matrix, Tensor) or tuple(matrix.shape) != shape:
            found = f"shape {tuple(matrix.shape)}" if isinstance(matrix, Tensor) else f"a {type(matrix).__name__}"
            raise WrongMixing(
                f"{of} returned {found} for {num_clients} clients: return a tensor of shape {shape}, since "
                f"personalized is {strategy.personalized}; (1, C) is one model for all, (C, C) with personalized = "
                "True in the class has a row for each client"
            )
        sums = matrix.detach().double().sum(dim=1)
        far = (sums - 1).abs().max() if strategy.rows_sum_to_one else 0 * sums.sum()  # nan where W is not finite
        if not far <= _MOST_ROUNDING:
            listed = ", ".join(f"{value:.4g}" for value in sums[:5].tolist()) + ", ..." * (len(sums) > 5)
            remedy = (
                "divide each row by its sum (fl_lightning.strategies.mixing.base.shares), or set rows_sum_to_one = "
                "False in the class if W is no average"
            )
            what = "values that are not finite" if not sums.isfinite().all() else f"rows that sum to {listed}"
            raise WrongMixing(
                f"{of} returned {what}: {remedy if sums.isfinite().all() else 'look for a division by 0'}"
            )


def mix(mixing_RC: Tensor, sent: Tensor, received: Tensor | None) -> Tensor:
    """W θ for one parameter, (R, *shape); with masked averaging if ``received`` is given.

    Args:
        mixing_RC: W.
        sent: What the clients sent, (C, *shape).
        received: What they had received, (C, *shape), or (1, *shape) if it was the same for all.
    """
    sent_CP = in_memory_order(sent)
    if received is None:
        mixed_RP = mixing_RC.to(sent_CP) @ sent_CP
    else:
        received = by_columns(received) if is_by_columns(sent) else received.contiguous()
        mixed_RP = masked_average(mixing_RC, sent_CP, in_memory_order(received))
    return from_memory_order(mixed_RP, sent)


def blended_output(client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> NetOutput:
    """The output of the mean of a client's own parameters and those that it received."""
    mean = {
        name: (local + context.received[name]) / 2 if name in context.received else local
        for name, local in parameters.items()
    }
    return client.output(mean, batch)


blended_output.takes_stacks = True  # type: ignore[attr-defined]


def one_model(model: Mapping[str, Tensor], clients: Sequence[int]) -> Payload:
    """The same model for all given clients, from tensors with a leading dimension of 1."""
    parameters = {name: tensor.expand(len(clients), *tensor.shape[1:]) for name, tensor in model.items()}
    return Payload(clients=tuple(clients), parameters=parameters)


def first_match(mixing: Tensor | Mapping[str, Tensor], name: str) -> Tensor:
    """The W of a parameter: the only one, or that of the first pattern that matches.

    Raises:
        ValueError: No pattern matches it.
    """
    return mixing if isinstance(mixing, Tensor) else mixing[matching(mixing, name)]


def matching(mixing: Mapping[str, Tensor], name: str) -> str:
    """The first pattern that matches a parameter.

    Raises:
        ValueError: None does.
    """
    for pattern in mixing:
        if fnmatch.fnmatch(name, pattern):
            return pattern
    raise ValueError(f"mixing_matrix: none of {', '.join(mixing)} matches the parameter {name!r}")


def mean_breadth(mixing: Tensor | Mapping[str, Tensor], names: Sequence[str]) -> float:
    """Mean of ``mixing_breadth`` over the parameters."""
    if isinstance(mixing, Tensor):
        return mixing_breadth(mixing)
    breadth = {pattern: mixing_breadth(matrix) for pattern, matrix in mixing.items()}
    return sum(breadth[matching(mixing, name)] for name in names) / len(names)


def equal_weights(upload: Payload) -> Tensor:
    """Equal shares, (C,)."""
    return torch.full((len(upload.clients),), 1 / len(upload.clients), dtype=torch.float64)


def example_weights(upload: Payload) -> Tensor:
    """Each client's share w of the labeled training examples, (C,); equal shares if no client has any."""
    assert upload.num_examples is not None
    return shares(upload.num_examples)


def shares(examples_C: Tensor) -> Tensor:
    """Each client's share of the examples, float64 (C,); equal shares if no client has any."""
    examples_C = examples_C.double()
    total = examples_C.sum()
    return examples_C / total if total > 0 else torch.full_like(examples_C, 1 / len(examples_C))
