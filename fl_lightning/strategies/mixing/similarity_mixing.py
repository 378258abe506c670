"""Personalised mixing: each client's model is mixed from those of clients with similar signatures.

Shape legend: C, K clients, N newcomers, T training clients, D width of a signature.
"""

import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fl_lightning.federation import Federation
from fl_lightning.relations.kinship import strength
from fl_lightning.relations.similarity import cosine_similarity, softmax_mixing
from fl_lightning.round.payload import Payload
from fl_lightning.round.stage import Evaluation, Signal, Stage, StageAddress
from fl_lightning.strategies.base import server_dtype
from fl_lightning.strategies.mixing.base import Mixing, first_match, mean_breadth, mix, shares
from fl_lightning.strategies.trials import ON_OFF, SHARES, Choice, Trials, require_trials

#: Mixing counts as uniform where a client's model is mixed from this share of all clients or more (see mixing_breadth).
UNIFORM_BREADTH = 0.99
#: Rounds of uniform mixing in a row after which the user is told.
UNIFORM_ROUNDS = 10


@dataclass(kw_only=True, eq=False)
class SimilarityMixing(Mixing):
    """Base of strategies with W = weights(similarity(signature_i, signature_j)), row by row; softmax(τ cos) by default.

    A client held out of training begins with the average model; once its signature is known, the others' models are
    mixed for it likewise.

    Args:
        similarity_temperature: τ, at least 0; 0 is plain averaging.
        common_share: s in [0, 1] of W = (1 - s) softmax(τ S) + s w, with w the shares of the training examples: what
            all clients have in common, however unlike they are. None to estimate it for each parameter tensor in every
            round from how well the clients' updates are predicted by those of their like (``relations/kinship.py``).
        validate_every: Rounds between trials (``strategies/trials.py``), which choose, by the clients' validation
            ``common_share`` and ``mix_only_moved`` anew, for all clients; what is set is what it starts from.
        validate_personal: Shell-style patterns of mixed parameters of which they choose, too, whether each client keeps
            its own instead, as at first: ``server/personal``.
        validate_similarity_temperature: Values of ``similarity_temperature`` of which they choose, too, in order, among
            them the one that is set. The more clients there are, the larger a temperature leaves a client the same
            share of its own model; with a very large one it is like itself alone.
        predict: Which model is the result: the one each client has ``trained``, as in the papers, or the ``mixed`` one;
            the other is logged beside it.
    """

    num_epochs: int = 1
    similarity_temperature: float = 10.0
    common_share: float | None = 0.0
    validate_every: int | None = None
    validate_personal: Sequence[str] = ()
    validate_similarity_temperature: Sequence[float] = ()
    predict: Literal["trained", "mixed"] = "trained"

    personalised = True
    server_state: ClassVar[tuple[str, ...]] = (
        "signatures_CD",
        "known_C",
        "examples_C",
        "num_uniform_rounds",
        "trials",
        "common_shares",
    )
    #: Name of the signal that is the signature.
    signature: ClassVar[str]

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_at_least(0, "similarity_temperature")
        if self.common_share is not None and not 0 <= self.common_share <= 1:
            raise ValueError(f"strategy.common_share must be in [0, 1], got {self.common_share}")
        if self.common_share is None and self.aggregation is not None:
            raise ValueError(
                "strategy.common_share is null, which estimates a share for each parameter tensor, and "
                "strategy.aggregation ranks whole clients: set common_share, or leave aggregation out"
            )
        self.require_at_least(1, "validate_every")
        if self.validate_every is not None and (self.common_share is None or self.aggregation is not None):
            other = "strategy.common_share is null" if self.common_share is None else "strategy.aggregation is set"
            raise ValueError(
                f"strategy.validate_every chooses how much is mixed of whom, but {other}: give common_share a number "
                "to start from, leave aggregation out, or leave validate_every out"
            )
        require_trials("validate_personal", self.validate_personal, self.validate_every)
        require_trials("validate_similarity_temperature", self.validate_similarity_temperature, self.validate_every)
        for setting in ("validate_personal", "validate_similarity_temperature"):
            if getattr(self, setting) and not self.personalised:
                raise ValueError(
                    f"strategy.{setting} needs strategy.personalised: with one model for all there is nothing to choose"
                )
        values = list(self.validate_similarity_temperature)
        if values != sorted({max(value, 0.0) for value in values}):
            raise ValueError(f"strategy.validate_similarity_temperature must rise from 0 or above, got {values}")

    @abstractmethod
    def signature_signal(self) -> Signal:
        """What a client sends as its signature, (D,)."""

    def signals(self) -> Mapping[str, Signal]:
        """The signature."""
        return {self.signature: self.signature_signal()}

    def setup(self, federation: Federation) -> None:
        """Start every client from the common initial parameters, unknown to each other."""
        super().setup(federation)
        self.dtype = server_dtype(next(iter(federation.parameters.values())).dtype)
        self.signatures_CD = torch.zeros(federation.num_clients, 0, dtype=self.dtype, device=federation.device)
        self.known_C = torch.zeros(federation.num_clients, dtype=torch.bool, device=federation.device)
        self.examples_C = torch.ones(federation.num_clients, dtype=torch.float64, device=federation.device)
        self.num_uniform_rounds = 0
        self.newcomers: Payload | None = None  # what they trained
        start = {"common_share": self.common_share or 0.0, "mix_only_moved": float(self.mix_only_moved)}
        grids: dict[str, Sequence[float]] = {"common_share": SHARES} if self.personalised else {}
        if self.validate_similarity_temperature:
            grids["similarity_temperature"] = self.validate_similarity_temperature
            start["similarity_temperature"] = self.similarity_temperature
        self.trials = Trials({**grids, "mix_only_moved": ON_OFF}, start, self.validate_every, self.validate_personal)
        self.trials.check_client(federation.client)
        self.select(self.shared, self.validate_personal)  # or it says which pattern matches nothing
        self.common_shares: dict[str, float] = {}  # of the parameter tensors, where they are estimated

    def stages(self, round_idx: int) -> Sequence[Stage]:
        """The exchange of the models, then trials of how they are mixed."""
        return [*super().stages(round_idx), *self.trials.stages(round_idx)]

    def stage(self, address: StageAddress) -> Stage:
        """The stage at an address, a trial among them."""
        return self.trials.stage(address) or super().stage(address)

    def configure(self, stage: Stage, clients: Sequence[int]) -> Payload:
        """Each client's mixed model; in a trial beside its own, as it would be mixed."""
        choice = self.trials.of(stage)
        if choice is None:
            return super().configure(stage, clients)
        if choice == self.trials.choice:
            return Payload(clients=tuple(clients), signals=self.mixed_models(clients).parameters)
        answered = self._trained[0].clients
        rows = [answered.index(client) if self.personalised else 0 for client in clients]
        return Payload(clients=tuple(clients), signals={name: m[rows] for name, m in self._mixed_by(choice).items()})

    def mixes_only_moved(self) -> bool:
        """As it is set, or as validation chose last."""
        return bool(self.trials.choice["mix_only_moved"])

    def temperature(self) -> float:
        """τ as it is set, or as validation chose last."""
        return self.trials.choice.get("similarity_temperature", self.similarity_temperature)

    def similarity(self, signature_CD: Tensor, other_KD: Tensor) -> Tensor:
        """How alike clients are, by their signatures: cosines, (C, K)."""
        return cosine_similarity(signature_CD, other_KD)

    def weights(self, similarity_CK: Tensor) -> Tensor:
        """What share each client has of the models of those like it, (C, K): softmax(τ S); rows sum to one."""
        return softmax_mixing(similarity_CK, self.temperature())

    def kin_weights(self, similarity_CK: Tensor, examples_K: Tensor) -> Tensor:
        """The same where training examples may count, too, (C, K)."""
        return self.weights(similarity_CK)

    def mixing_of(self, similarity_CK: Tensor, examples_K: Tensor) -> Tensor:
        """What share each client has of the others' models, (C, K), on the mean over the parameter tensors."""
        common_share = self.trials.choice["common_share"]
        if self.common_share is None:
            common_share = sum(self.common_shares.values()) / len(self.common_shares) if self.common_shares else 1.0
        return with_common_share(self.kin_weights(similarity_CK, examples_K), examples_K, common_share)

    def mixing_matrix(self, upload: Payload) -> Tensor | Mapping[str, Tensor]:
        """W over the clients of the upload, (C, C); for each parameter tensor its own if the shares are estimated."""
        examples_C = self.examples_C[list(upload.clients)]
        kin_CC = self.kin_weights(self._similarity_of(upload), examples_C)
        if self.common_share is not None:
            mixing_CC = with_common_share(kin_CC, examples_C, self.trials.choice["common_share"])
            if not self.trials.choice.get("personal"):
                return mixing_CC
            own_CC = torch.eye(len(examples_C), dtype=mixing_CC.dtype, device=mixing_CC.device)
            return {**dict.fromkeys(self.validate_personal, own_CC), "*": mixing_CC}
        self.common_shares = {name: self._estimated_share(name, upload, kin_CC) for name in upload.parameters}
        return {name: with_common_share(kin_CC, examples_C, share) for name, share in self.common_shares.items()}

    def _estimated_share(self, name: str, upload: Payload, kin_CC: Tensor) -> float:
        """1 - how far the updates of one parameter tensor are predicted by those of clients alike."""
        clients, sent = list(upload.clients), upload.parameters[name].flatten(1)
        if len(clients) < 3:  # a client, its like and somebody else
            return self.common_shares.get(name, 1.0)
        update_CP = sent.to(self.dtype) - self.models[name][clients].flatten(1).to(self.dtype)
        weight_C = shares(self.examples_C[clients]).to(update_CP)
        return 1 - float(strength(kin_CC.to(update_CP), weight_C, update_CP @ update_CP.T))

    def _similarity_of(self, upload: Payload) -> Tensor:
        signature_CD = upload.signals[self.signature].to(self.dtype)
        return self.similarity(signature_CD, signature_CD)

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        """Remember the signatures, then mix."""
        if self.trials.of(stage) is not None:
            before = self.trials.choice
            if self.trials.take_in(stage, upload) and self.trials.choice != before:
                self._adopt()
        elif upload.clients:
            self.remember(upload)
            self.take_in(stage, upload)
            self._warn_of_uniform_mixing(upload)

    def take_in(self, stage: Stage, upload: Payload) -> None:
        """Mix what the clients trained, and keep it for trials of other ways to mix it."""
        if self.trials.every is not None and upload.parameters:
            rows = list(upload.clients) if self.personalised else [0]
            self._trained = upload, {name: self.models[name][rows] for name in upload.parameters}
        super().aggregate(stage, upload)

    def _mixed_by(self, choice: Choice) -> dict[str, Tensor]:
        """The models of the last round's clients, mixed by a choice, (C, *shape) by name; or the one for all."""
        upload, received = self._trained
        with self.trials.supposing(choice):
            mixing, moved = self.mixing_matrix(upload), self.mixes_only_moved()
        return {
            name: mix(first_match(mixing, name), tensor, received[name] if moved else None)
            for name, tensor in upload.parameters.items()
        }

    def _adopt(self) -> None:
        """Mix the last round's models as has just been chosen."""
        upload, _ = self._trained
        rows = list(upload.clients) if self.personalised else [0]
        for name, mixed in self._mixed_by(self.trials.choice).items():
            self.models[name][rows] = mixed
        if self.personalised:
            self.breadth = mean_breadth(self.mixing_matrix(upload), list(upload.parameters))

    def admit(self, stage: Stage, upload: Payload) -> None:
        """Remember newcomers' signatures, and what they trained."""
        if upload.clients and upload.parameters:
            self.newcomers = upload
        self.remember(upload)

    def remember(self, upload: Payload) -> None:
        """Remember the signatures, if there are any."""
        if not upload.clients or self.signature not in upload.signals:
            return
        signature_CD = upload.signals[self.signature].to(self.dtype)
        if not self.signatures_CD.shape[1]:
            self.signatures_CD = signature_CD.new_zeros(len(self.known_C), signature_CD.shape[1])
        rows = torch.tensor(upload.clients, device=self.known_C.device)
        self.signatures_CD[rows] = signature_CD
        self.known_C[rows] = True
        if upload.num_examples is not None:
            self.examples_C[rows] = upload.num_examples.to(self.examples_C)

    def mixed_models(self, clients: Sequence[int]) -> Payload:
        """Each client's mixed model; newcomers' are mixed from those of the training clients.

        What stays with the clients stays with newcomers that have trained, too.
        """
        payload = super().mixed_models(clients)
        training = set(self.federation.training_clients)
        newcomers = [client for client in clients if client not in training]
        if not newcomers or not self.personalised:
            return payload
        payload = self.with_newcomers(payload, newcomers, self._newcomers_mixing(newcomers))
        if self.trials.choice.get("personal") and self.newcomers is not None:
            rows = [payload.clients.index(client) for client in self.newcomers.clients if client in clients]
            sent = [row for row, client in enumerate(self.newcomers.clients) if client in clients]
            for name in self.select(self.shared, self.validate_personal):
                payload.parameters[name][rows] = self.newcomers.parameters[name][sent]
        return payload

    def _newcomers_mixing(self, newcomers: Sequence[int]) -> Tensor:
        """Rows of W over the training clients; uniform for a client whose signature nobody has seen."""
        new, training = list(newcomers), list(self.federation.training_clients)
        new_N, known_T = self.known_C[new], self.known_C[training]
        mixing_NT = torch.full_like(new_N[:, None] & known_T, 1 / len(training), dtype=self.dtype)
        if known_T.any():
            similarity_NT = self.similarity(self.signatures_CD[new][new_N], self.signatures_CD[training][known_T])
            weights_NT = self.mixing_of(similarity_NT, self.examples_C[training][known_T])
            mixing_NT[new_N] = torch.zeros_like(mixing_NT[new_N]).masked_scatter(known_T, weights_NT)
        return mixing_NT

    def predicts_trained(self) -> bool:
        """As is set."""
        return self.predict != "mixed"

    def model_for(self, clients: Sequence[int]) -> Payload | None:
        """None: the models as the clients trained them; or the mixed ones."""
        return super().model_for(clients) if self.predict == "mixed" else None

    def evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """The trained or the mixed models are the result; the others are logged beside them."""
        if self.predict == "mixed":
            return super().evaluations(clients)
        return {
            "": Evaluation(payload=self.model_for(clients)),
            "mixed/": Evaluation(payload=self.mixed_models(clients)),
            **self.blended(clients),
        }

    def _known_clients(self) -> Tensor:
        """Indices of the training clients that have a signature, (C,)."""
        training = torch.tensor(self.federation.training_clients, device=self.known_C.device)
        return training[self.known_C[training]]

    def _known_similarity(self) -> Tensor:
        """Of the last known signatures of the training clients that have one, (C, C)."""
        known_CD = self.signatures_CD[self._known_clients()]
        return self.similarity(known_CD, known_CD)

    def metrics(self) -> Mapping[str, float]:
        """Spread of the similarities between different clients, and how much all have in common if it is estimated."""
        similarity_CC = self._known_similarity()
        count = len(similarity_CC)
        if count < 2:
            return {**super().metrics(), **self.trials.metrics()}
        others = similarity_CC[~torch.eye(count, dtype=torch.bool, device=similarity_CC.device)]
        figures = {"min": others.min(), "mean": others.mean(), "max": others.max()}
        return {
            **super().metrics(),
            **self.trials.metrics(),
            **{f"server/similarity_{name}": float(value) for name, value in figures.items()},
            **{f"server/common_share/{name}": share for name, share in self.common_shares.items()},
        }

    def matrices(self) -> Mapping[str, Tensor]:
        """Similarities of the signatures, and W as it would be if all took part."""
        known_T = self.known_C[list(self.federation.training_clients)]
        both_TT = known_T[:, None] & known_T

        def whole(matrix_CC: Tensor) -> Tensor:
            return torch.full_like(both_TT, torch.nan, dtype=self.dtype).masked_scatter(both_TT, matrix_CC)

        similarity_CC = self._known_similarity()
        found = {self.signature.replace("_", " "): whole(similarity_CC)}
        if self.personalised:
            found["mixing"] = whole(self.mixing_of(similarity_CC, self.examples_C[self._known_clients()]))
        return found

    def _warn_of_uniform_mixing(self, upload: Payload) -> None:
        """Tell the user once if the signatures still do not differ after some rounds, unless it was found best so."""
        if self.common_share in (None, 1.0) or self.trials.every is not None:
            return
        if not self.personalised or self.similarity_temperature == 0 or len(upload.clients) < 2:
            return
        uniform = self.breadth is not None and self.breadth > UNIFORM_BREADTH
        self.num_uniform_rounds = self.num_uniform_rounds + 1 if uniform else 0
        if self.num_uniform_rounds == UNIFORM_ROUNDS:
            smallest = float(self._similarity_of(upload).min())
            warnings.warn(
                f"{type(self).__name__}: for {UNIFORM_ROUNDS} rounds mixing has been uniform, as in FedAvg: all "
                f"signatures are alike (the smallest similarity is {smallest:.4f}). Raise "
                f"strategy.similarity_temperature (now {self.similarity_temperature:g}), or let the signatures differ",
                stacklevel=2,
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; newcomers have to join anew."""
        super().load_state_dict(state)
        self.newcomers = None


def with_common_share(kin_CK: Tensor, examples_K: Tensor, common_share: float) -> Tensor:
    """(1 - s) kin + s w, (C, K), with w the shares of the training examples."""
    if not common_share:
        return kin_CK
    return (1 - common_share) * kin_CK + common_share * shares(examples_K).to(kin_CK)
