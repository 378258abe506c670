"""Personalized mixing: each client's model is mixed from those of clients with similar signatures.

Shape legend: C, K clients, D width of a signature.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from fl_lightning.federation import Federation
from fl_lightning.relations.similarity import cosine_similarity, softmax_mixing
from fl_lightning.round.payload import Payload
from fl_lightning.round.stage import ClientOutput, Evaluation, Stage, StageAddress
from fl_lightning.strategies.base import server_dtype
from fl_lightning.strategies.mixing.base import Mixing
from fl_lightning.strategies.mixing.common_share import EstimatedShares, keeping_own, with_common_share
from fl_lightning.strategies.mixing.mixing_trials import MixingTrials, check_tried
from fl_lightning.strategies.mixing.signature_table import SignatureTable
from fl_lightning.strategies.mixing.uniform_mixing import UniformMixing


@dataclass(kw_only=True, eq=False)
class SimilarityMixing(Mixing):
    """Base class of strategies with W = weights(similarity(signature_i, signature_j)); softmax(τ cos) by default.

    A client held out of training begins with the average model; once its signature is known, the others' models are
    mixed for it in the same way.

    Args:
        similarity_temperature: τ, at least 0; 0 is plain averaging.
        common_share: s in [0, 1] of W = (1 - s) softmax(τ S) + s w, with w the shares of the training examples: the
            share of all clients, however dissimilar they are. None to estimate it for each parameter tensor in every
            round from how well the clients' updates are predicted by those of similar clients
            (``relations/client_similarity.py``).
        validate_every: Rounds between trials (``strategies/trials.py``), which choose new values of ``common_share``
            and ``masked_averaging`` for all clients on their validation examples, starting from the values that are
            set. None for no trials.
        validate_personal: Shell-style patterns of mixed parameters for which the trials also choose whether each client
            keeps its own, as it does at first.
        validate_similarity_temperature: Values of ``similarity_temperature`` among which the trials also choose, in
            ascending order, including the one that is set. The more clients there are, the larger the temperature must
            be to give a client the same share of its own model; with a very large one its model is all its own.
        predict: Which model is the result: the client's ``trained`` one, as in the papers, or the ``mixed`` one.
    """

    num_epochs: int = 1
    similarity_temperature: float = 10.0
    common_share: float | None = 0.0
    validate_every: int | None = None
    validate_personal: Sequence[str] = ()
    validate_similarity_temperature: Sequence[float] = ()
    predict: Literal["trained", "mixed"] = "trained"

    personalized = True
    server_state: ClassVar[tuple[str, ...]] = ("signatures", "trials", "estimated_shares", "uniform_mixing")
    #: Name of the client output that is the signature.
    signature: ClassVar[str]

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_at_least(0, "similarity_temperature")
        self.require_at_least(1, "validate_every")
        check_tried(self)

    @abstractmethod
    def signature_output(self) -> ClientOutput:
        """What a client sends as its signature, (D,)."""

    def similarity(self, signature_CD: Tensor, other_KD: Tensor) -> Tensor:
        """The similarity of clients by their signatures: cosines, (C, K)."""
        return cosine_similarity(signature_CD, other_KD)

    def similarity_of(self, upload: Payload) -> Tensor:
        """The similarity of the clients that responded, (C, C)."""
        signature_CD = upload.extras[self.signature].to(self.dtype)
        return self.similarity(signature_CD, signature_CD)

    def weights(self, similarity_CK: Tensor) -> Tensor:
        """The weights of similar clients' models for each client, (C, K): softmax(τ S); rows sum to one."""
        return softmax_mixing(similarity_CK, self.temperature())

    def similarity_weights(self, similarity_CK: Tensor, examples_K: Tensor) -> Tensor:
        """The same weights, which may also depend on the numbers of training examples, (C, K)."""
        return self.weights(similarity_CK)

    def temperature(self) -> float:
        """τ as set, or as chosen last by validation."""
        return self.trials.choice.get("similarity_temperature", self.similarity_temperature)

    def setup(self, federation: Federation) -> None:
        """Start every client from the common initial parameters, with an empty signature table."""
        super().setup(federation)
        self.dtype = server_dtype(next(iter(federation.parameters.values())).dtype)
        self.signatures = SignatureTable(federation, self.signature)
        self.estimated_shares = EstimatedShares()
        self.uniform_mixing = UniformMixing()
        self.trials = MixingTrials(self)
        self.trials.setup(federation)
        self.tried_personal = self.select(self.shared, self.validate_personal)

    def uses_masked_averaging(self) -> bool:
        """As set, or as chosen last by validation."""
        return bool(self.trials.choice["masked_averaging"])

    def mixing_of(self, similarity_CK: Tensor, examples_K: Tensor) -> Tensor:
        """The weights of the others' models for each client, (C, K), averaged over the parameter tensors."""
        estimated = self.common_share is None
        common_share = self.estimated_shares.mean if estimated else self.trials.choice["common_share"]
        return with_common_share(self.similarity_weights(similarity_CK, examples_K), examples_K, common_share)

    def mixing_matrix(self, upload: Payload) -> Tensor | Mapping[str, Tensor]:
        """W over the clients of the upload, (C, C); one for each parameter tensor if the shares are estimated."""
        examples_C = self.signatures.examples_C[list(upload.clients)]
        similar_CC = self.similarity_weights(self.similarity_of(upload), examples_C)
        if self.common_share is None:
            return self.estimated_shares.mixing(upload, self.models, similar_CC, examples_C)
        mixing_CC = with_common_share(similar_CC, examples_C, self.trials.choice["common_share"])
        return keeping_own(mixing_CC, self.validate_personal) if self.trials.choice.get("personal") else mixing_CC

    def client_outputs(self) -> Mapping[str, ClientOutput]:
        """The signature."""
        return {self.signature: self.signature_output()}

    def stages(self, round_idx: int) -> Sequence[Stage]:
        """The exchange of the models, then trials of how to mix them."""
        return [*super().stages(round_idx), *self.trials.stages(round_idx)]

    def stage(self, address: StageAddress) -> Stage:
        """The stage at an address, which may be a trial."""
        return self.trials.stage(address) or super().stage(address)

    def configure(self, stage: Stage, clients: Sequence[int]) -> Payload:
        """Each client's mixed model; in a trial its own model and the one that would be mixed for it."""
        if (choice := self.trials.of(stage)) is not None:
            return self.trials.payload(choice, clients)
        return super().configure(stage, clients)

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        """Remember the signatures, then mix; after trials, mix again by the new choice."""
        if self.trials.of(stage) is not None:
            self.trials.choose(stage, upload)
        elif upload.clients:
            self.signatures.remember(upload)
            self.ingest(stage, upload)
            self.uniform_mixing.note(self, upload)

    def ingest(self, stage: Stage, upload: Payload) -> None:
        """Mix what the clients trained, and keep it for trials of other ways to mix it."""
        self.trials.keep(upload)
        super().aggregate(stage, upload)

    def onboard(self, stage: Stage, upload: Payload) -> None:
        """Remember unseen clients' signatures, and what they trained."""
        self.signatures.onboard(upload)

    def mixed_models(self, clients: Sequence[int]) -> Payload:
        """Each client's mixed model; unseen clients' are mixed from those of the training clients.

        Parameters that are kept local are also kept local by unseen clients that have trained.
        """
        payload = super().mixed_models(clients)
        training = set(self.signatures.training)
        unseen_clients = [client for client in clients if client not in training]
        if not unseen_clients or not self.personalized:
            return payload
        mixing_NT = self.signatures.mixing_of_unseen(unseen_clients, self.similarity, self.mixing_of)
        payload = self.with_unseen_clients(payload, unseen_clients, mixing_NT)
        if self.trials.choice.get("personal"):
            self.signatures.give_back_(payload, self.tried_personal)
        return payload

    def predicts_trained(self) -> bool:
        """As is set."""
        return self.predict != "mixed"

    def model_for(self, clients: Sequence[int]) -> Payload | None:
        """None: the models as the clients trained them; or the mixed ones."""
        return super().model_for(clients) if self.predict == "mixed" else None

    def evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """The trained or the mixed models are the result; the others are logged as well."""
        if self.predict == "mixed":
            return super().evaluations(clients)
        mixed = Evaluation(payload=self.mixed_models(clients))
        return {"": Evaluation(payload=self.model_for(clients)), "mixed/": mixed, **self.blended(clients)}

    def metrics(self) -> Mapping[str, float]:
        """Spread of the similarities between different clients, and the common share if it is estimated."""
        spread = self.signatures.metrics(self.similarity)
        shares = self.estimated_shares.metrics() if spread else {}
        return {**super().metrics(), **self.trials.metrics(), **spread, **shares}

    def matrices(self) -> Mapping[str, Tensor]:
        """Similarities of the signatures, and W as if all clients took part."""
        return self.signatures.matrices(self.similarity, self.mixing_of if self.personalized else None)
