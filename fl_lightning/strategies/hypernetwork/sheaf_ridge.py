"""SheafRidge: every client's model is the common one plus a deviation that is predicted from similar clients' models.

A method of this project, made of FedSheafHN (``fedsheafhn.py``), whose generator collapses: S(X_0) is as there, but the
generator's last layer is fitted in closed form. With m the average of the clients' models θ̃ and G the Gram matrix of
features of the clients, centered,

    θ_i = m + s Σ_j K_ij (θ̃_j - m),    K = G (G + λ I)^-1    (``last_layer.py``).

The features are the clients' embeddings in a common frame, that of the initial model (``framed_embeddings.py``),
diffused along a sheaf; with attention and an MLP behind it (``kernel_features.py``) the kernel is a deep one. What is
before the fit, and λ, is trained on how well clients' updates are predicted by the others' alone
(``relations/client_similarity.py``), and the strength s of each parameter tensor is estimated likewise, by empirical
Bayes: K by itself would give a client with no similar clients its own model back, whatever λ, because no other client
tells how much of it is noise. Validation may choose while training (``strategies/trials.py``) how far from the mean
models are generated, and whether heads are.

``permute_embeddings`` and ``embedding: one_hot`` are controls: a generator has not collapsed if they do worse.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from fl_lightning.federation import Federation
from fl_lightning.round.payload import Payload, flatten
from fl_lightning.round.stage import ClientOutput, Evaluation, Stage, StageAddress
from fl_lightning.strategies.client_outputs import graph_embedding, received_embedding
from fl_lightning.strategies.former_settings import former_settings
from fl_lightning.strategies.hypernetwork.base import those_of
from fl_lightning.strategies.hypernetwork.client_embeddings import ClientEmbeddings
from fl_lightning.strategies.hypernetwork.closed_form import ClosedForm
from fl_lightning.strategies.hypernetwork.fedsheafhn import FedSheafHN, rows_of
from fl_lightning.strategies.hypernetwork.framed_embeddings import FramedEmbeddings
from fl_lightning.strategies.hypernetwork.kernel_features import KernelFeatures
from fl_lightning.strategies.hypernetwork.last_layer import ClosedFormLayer
from fl_lightning.strategies.hypernetwork.sheaf import SheafDiffusion
from fl_lightning.strategies.trials import ON_OFF, SHARES, Trials, require_trials


def sheaf_beside(in_channels: int) -> nn.Module:
    """A sheaf diffusion whose output is added to the embeddings."""
    return SheafDiffusion(in_channels, skip=True)


@former_settings
@dataclass(kw_only=True, eq=False)
class SheafRidge(FedSheafHN):
    """Kernel ridge regression of the clients' models on sheaf-diffused embeddings.

    Args:
        personal: Shell-style patterns of parameters that are not generated and are kept local.
        num_server_steps: Adam's steps per round on what precedes the fit.
        diffusion: Builds S on the collaboration graph from the embeddings' width.
        attention: Before the fit: ``qkv``, ``matrix`` or ``none``.
        num_hidden_layers: Hidden layers of the MLP before the fit; 0 for none.
        hypernetwork_dropout: Drop probability of these; models are generated without it.
        hypernetwork_lr: Adam's learning rate for λ, attention and MLP.
        embedding: Graph-level embeddings, or one-hot vectors. With ``NoDiffusion``, no attention and no hidden layers
            the latter make K = I.
        embedding_model: Which model a client embeds with: its ``own`` trained one (eq. 3), the common ``initial`` one
            (sent once, before any training), or the one it has ``received``, before training it.
        permute_embeddings: Give every client the embedding of another client, always the same one, as a control.
        ridge: Initial λ of the fit; it is learned with the rest.
        strength: How far from the mean the fit may go, in [0, 1]; None to estimate it for each parameter tensor from
            how well clients' updates are predicted by the others'.
        masked_averaging: In the fit, a client that did not update a coordinate counts with the mean of those that did.
        validate_every: Rounds between trials (``strategies/trials.py``), which choose, on the clients' validation
            examples, ``masked_averaging`` and how far from the mean a client's model is generated,
            ``server/strength_factor``: up to 1 a factor on the strengths, from 1 to 2 the share of the model that the
            client itself has trained. None for no trials.
        validate_personal: Shell-style patterns of generated parameters for which the trials also choose whether each
            client gets its own back instead, as it does at first: ``server/personal``.
        predict: Which model is the result: the one each client has ``trained``, or the ``generated`` one.
    """

    personal: Sequence[str] = ()
    init_epochs: int = 0
    diffusion: Callable[[int], nn.Module] = sheaf_beside
    attention: Literal["qkv", "matrix", "none"] = "none"
    num_hidden_layers: int = 0
    hypernetwork_dropout: float = 0.0
    diffusion_weight_decay: float = 0.0
    embedding: Literal["graph", "one_hot"] = "graph"
    embedding_model: Literal["own", "initial", "received"] = "initial"
    permute_embeddings: bool = False
    ridge: float = 1.0
    strength: float | None = None
    masked_averaging: bool = True
    validate_every: int | None = None
    validate_personal: Sequence[str] = ()
    predict: Literal["trained", "generated"] = "generated"

    starts_from_net = True
    server_state = ("trials",)

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_positive("ridge")
        if self.strength is not None and not 0 <= self.strength <= 1:
            raise ValueError(f"strategy.strength must be in [0, 1], or null for an estimate, got {self.strength}")
        self.require_at_least(1, "validate_every")
        require_trials("validate_personal", self.validate_personal, self.validate_every)
        if self.embedding == "one_hot" and self.embedding_model != "own":
            raise ValueError(f"strategy.embedding_model is {self.embedding_model}, but one_hot embeds with no model")

    # ------------------------------------------------------------------ the features and the fit

    def setup(self, federation: Federation) -> None:
        """Check the settings against the federation, then create the server's modules."""
        start = {"strength_factor": 1.0, "masked_averaging": float(self.masked_averaging)}
        grids = {"strength_factor": (*SHARES, *(1 + share for share in SHARES[1:])), "masked_averaging": ON_OFF}
        self.trials = Trials(grids, start, self.validate_every, self.validate_personal)
        self.trials.setup(federation)
        super().setup(federation)

    def build_embeddings(self, federation: Federation) -> ClientEmbeddings:
        """The store of X_0."""
        one_hot, permute = self.embedding == "one_hot", self.permute_embeddings
        return FramedEmbeddings(federation, num_neighbors=self.num_neighbors, one_hot=one_hot, permute=permute)

    def build_generator(self, num_outputs: int) -> nn.ModuleDict:
        """S, the features and the last layer."""
        training, sizes = self.federation.training_clients, [shape.numel() for shape in self.shapes.values()]
        self.diffusion_model = self.diffusion(self.embeddings.num_channels)
        self.hypernetwork = KernelFeatures(
            self.embeddings.num_channels,
            hidden_channels=self.hidden_channels,
            num_hidden_layers=self.num_hidden_layers,
            dropout=self.hypernetwork_dropout,
            attention=self.attention,
            num_clients=len(training),
        )
        layer = ClosedFormLayer(sizes, len(training), ridge=self.ridge, strength=self.strength)
        layer.start_from(flatten({name: self.federation.parameters[name][None] for name in self.shapes})[0])
        personal, is_tried = self.select(list(self.shapes), self.validate_personal), self.trials.every is not None
        self.closed_form = ClosedForm(layer, list(self.shapes), training, personal=personal, is_tried=is_tried)
        parts = {"diffusion": self.diffusion_model, "hypernetwork": self.hypernetwork, "last_layer": layer}
        return nn.ModuleDict(parts)

    def generate(self, clients: Sequence[int]) -> Tensor:
        """The given clients' rows of the fit at the features of all training clients, and unseen clients after them."""
        members = self.embeddings.members(clients)
        feature_MH: Tensor = self.hypernetwork(self.enriched(members))
        return self.closed_form.generate(feature_MH, clients, rows_of(clients, members))

    def learn(self, upload: Payload, generated_CP: Tensor, rows: Tensor, update_CP: Tensor) -> None:
        """Fit the last layer, and train what precedes it on its prediction error."""
        self.closed_form.ingest(upload, those_of(generated_CP, rows), update_CP, self.trials.choice)
        self.generator.train()
        for loss in self.closed_form.losses(upload.clients, update_CP, self._features, self.num_server_steps):
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.num_steps += 1

    def _features(self) -> Tensor:
        """The training clients' features, the input of the last layer."""
        with self.randomness("server", self.num_steps):
            feature_CH: Tensor = self.hypernetwork(self.enriched(self.federation.training_clients))
        return feature_CH

    # ------------------------------------------------------------------ the round

    def initial_stages(self) -> Sequence[Stage]:
        """Embedding with the common initial model if set; local training from it, which starts the fit's mean."""
        (initial,) = super().initial_stages()
        initial = dataclasses.replace(initial, upload=tuple(self.shapes))
        if self.embedding == "graph" and self.embedding_model == "initial":
            return [Stage(name="embed", client_outputs={"embedding": graph_embedding}), initial]
        return [initial]

    def client_outputs(self, round_idx: int) -> Mapping[str, ClientOutput]:
        """The embedding, in the rounds before a refresh only."""
        if self.embedding != "graph" or self.embedding_model == "initial" or not self.is_due(round_idx):
            return {}
        return {"embedding": graph_embedding if self.embedding_model == "own" else received_embedding}

    def stages(self, round_idx: int) -> Sequence[Stage]:
        """The exchange of the models, then trials of how to generate them."""
        return [*super().stages(round_idx), *self.trials.stages(round_idx)]

    def stage(self, address: StageAddress) -> Stage:
        """The stage at an address, which may be a trial."""
        return self.trials.stage(address) or super().stage(address)

    def configure(self, stage: Stage, clients: Sequence[int]) -> Payload | None:
        """The common initial model to embed with, nothing for the initial training, generated models after it.

        In a trial, the client's own model and the one that would be generated for it.
        """
        if (choice := self.trials.of(stage)) is not None:
            with self.trials.supposing(choice):
                return Payload(clients=tuple(clients), extras=self.generate_for_evaluation(clients).parameters)
        if stage.name == "embed":
            start = self.federation.parameters
            parameters = {name: tensor.expand(len(clients), *tensor.shape) for name, tensor in start.items()}
            return Payload(clients=tuple(clients), parameters=parameters)
        if stage.name == "initial":
            return None
        payload = self.generate_for_evaluation(clients)
        if set(clients) <= set(self.federation.training_clients):
            self._sent_to, self._generated = tuple(clients), flatten(payload.parameters)
        return payload

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        """Fit and learn, then ingest the new embeddings; after trials, apply the choice."""
        if self.trials.of(stage) is not None:
            self.trials.ingest(stage, upload)
        elif stage.name == "embed":
            self.update_graph(upload)
        else:
            if stage.name == "initial" and upload.clients:
                self.closed_form.layer.start_from(flatten({n: upload.parameters[n] for n in self.shapes}).mean(dim=0))
                self._generated_for_evaluation = None
            super().aggregate(stage, upload)

    def onboard(self, stage: Stage, upload: Payload) -> None:
        """Place unseen clients in the collaboration graph, and store what they trained."""
        super().onboard(stage, upload)
        if upload.clients and stage.as_update:
            given_CP = flatten(self.generate_for_evaluation(upload.clients).parameters)
            update_CP = flatten({name: upload.parameters[name] for name in self.shapes})
            self.closed_form.onboard(upload.clients, given_CP + update_CP)
            self._generated_for_evaluation = None

    # ------------------------------------------------------------------ the result, and the layer as chosen

    def _fill(self) -> None:
        """Fill the last layer by the last choice, or by the one that is being tried."""
        if self.closed_form.fill(self.trials.choice):
            self._generated_for_evaluation = None

    def generate_for_evaluation(self, clients: Sequence[int]) -> Payload:
        """Generate with the last layer as chosen."""
        self._fill()
        return super().generate_for_evaluation(clients)

    def predicts_trained(self) -> bool:
        """As is set."""
        return self.predict == "trained"

    def model_for(self, clients: Sequence[int]) -> Payload | None:
        """None: the models as the clients trained them; or the generated ones."""
        return self.generate_for_evaluation(clients) if self.predict == "generated" else None

    def evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """The trained or the generated models are the result; the others are logged as well."""
        if self.predict == "trained":
            return super().evaluations(clients)
        return self._beside_trained(Evaluation(payload=self.model_for(clients)))

    def later_evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """The same: nothing can be generated before the clients have sent their embeddings."""
        if self.predict == "trained":
            return super().later_evaluations(clients)
        return self._beside_trained(Evaluation(payload=self.any_models(clients)))

    @staticmethod
    def _beside_trained(generated: Evaluation) -> Mapping[str, Evaluation]:
        return {"": generated, "trained/": dataclasses.replace(generated, prefer_trained=True)}

    def inspection(self) -> Mapping[str, float]:
        """Metrics of the generator's internals, and the choice of validation."""
        return {**super().inspection(), **self.trials.metrics(), **self.closed_form.metrics()}

    def state_dict(self) -> dict[str, Any]:
        """The state, with the last layer as chosen."""
        self._fill()
        return super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; the last layer has to be filled again."""
        super().load_state_dict(state)
        self.closed_form.forget()
