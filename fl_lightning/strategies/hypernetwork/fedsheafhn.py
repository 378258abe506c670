"""FedSheafHN: sheaf diffusion on a client graph feeds a hypernetwork that generates each client's backbone.

Liang, Zhao, She, Li, Tay: "Personalized Subgraph Federated Learning with Sheaf Collaboration", arXiv:2405.13056v2.
Algorithm 1; eq. 3 graph-level embedding (``signals.py``), eq. 4 collaboration graph (``client_embeddings.py``),
eqs. 5-9 sheaf diffusion (``sheaf.py``), eqs. 10-11 attention hypernetwork (``attention.py``), eqs. 12-15 server step
(``base.py``, in the descent direction: the paper's sign is a slip).

Departures: the last bias of the hypernetwork may start from the mean of the locally trained backbones
(``start_from_clients``), without which the first rounds throw the clients' initial training away.

As printed the generator collapses: every client is generated the same backbone (``server/spread``). What keeps it
alive, all within eqs. 3 to 15 and each a setting that is off by default: embeddings in a common frame
(``embedding_model``), since those of models that were trained apart lie in different bases; X_0 centred and scaled
(``normalize_embeddings``); attention that is scaled, with a residual (``scaled_attention``, ``attention_residual``);
hidden layers that do not die (``activation``, ``layer_norm``); weights sent without dropout (``clean_weights``); the
last layer in closed form (``last_layer.py``, ``closed_form.py``), which is refitted whenever the embeddings change,
with S, the attention and the MLP trained by the gradient of how well clients' updates are predicted from the others'.
Beyond the paper, validation may choose while training (``validate_every``, ``strategies/trials.py``) how far from the
mean models are generated, and whether heads are (``validate_personal``).
``permute_embeddings`` and ``embedding: one_hot`` are controls: a generator is alive if they do worse.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from fl_lightning.federation import Federation
from fl_lightning.round.payload import Payload, flatten
from fl_lightning.round.stage import Evaluation, Signal, Stage, StageAddress
from fl_lightning.strategies.hypernetwork.attention import AttentionHypernetwork
from fl_lightning.strategies.hypernetwork.base import Hypernetwork, those_of
from fl_lightning.strategies.hypernetwork.client_embeddings import ClientEmbeddings
from fl_lightning.strategies.hypernetwork.closed_form import ClosedForm
from fl_lightning.strategies.hypernetwork.last_layer import ClosedFormLayer
from fl_lightning.strategies.hypernetwork.sheaf import SheafDiffusion
from fl_lightning.strategies.signals import graph_embedding, received_embedding
from fl_lightning.strategies.trials import ON_OFF, SHARES, Trials, require_trials


@dataclass(kw_only=True, eq=False)
class FedSheafHN(Hypernetwork):
    """Personalised backbones from a sheaf over the clients; the heads stay at home.

    Args:
        init_epochs: Local epochs before round 0, after which the first embeddings are sent.
        num_neighbors: K of the collaboration graph; None for the complete graph.
        refresh_every: Rounds between refreshes of embeddings and graph (r_in); None keeps the first ones (static).
        embedding: Graph-level embeddings, or one-hot vectors (ablation "+ Hypernetwork" of Table 4). With
            ``last_layer: closed_form``, ``NoDiffusion``, no attention and no hidden layers the latter make K = I.
        embedding_model: Which model a client embeds with: its ``own`` trained one (eq. 3), the common ``initial`` one
            (sent once, before anybody trains), or the one it has ``received``, before it trains it.
        permute_embeddings: Give every client the embedding of another, the same one all along: a control.
        normalize_embeddings: Centre X_0 over the training clients and scale it to variance 1.
        diffusion: Builds the model on the collaboration graph from the embeddings' width: ``SheafDiffusion``, or
            ``GCNDiffusion``, ``GATDiffusion``, ``NoDiffusion`` (Table 5).
        attention: ``qkv`` (eq. 10), ``matrix`` (the released code's) or ``none``.
        scaled_attention: Divide the scores of ``qkv`` by the square root of the embeddings' width.
        attention_residual: Add what ``qkv`` attends to the embeddings.
        hidden_channels: Width of the hypernetwork's hidden layers.
        num_hidden_layers: Hidden layers of the hypernetwork.
        activation: Of these: ``relu`` or ``leaky_relu``.
        layer_norm: Normalise each of these before its activation.
        output_scale: Factor on the initial weights of the last layer.
        hypernetwork_dropout: Drop probability of the hidden layers.
        clean_weights: Send what is generated without dropout (gradient step; the closed form always does).
        last_layer: ``gradient``: ``num_server_steps`` of Adam's through the whole generator (eqs. 12-15);
            ``closed_form``: the last layer is fitted, the rest takes ``num_server_steps`` of Adam's.
        ridge: λ of the fit at the start; it is learnt with the rest.
        strength: How far from the mean the fit may go, in [0, 1]; None to estimate it for each parameter tensor from
            how well clients' updates are predicted by the others'.
        mix_only_moved: A client that leaves a number alone counts in the fit with what those that moved it have on
            average.
        validate_every: Rounds between trials (``strategies/trials.py``), which choose, by the clients' validation
            ``mix_only_moved`` anew, and how far from the mean a client's model is generated,
            ``server/strength_factor``: up to 1 a factor on the strengths, from 1 to 2 the share of the model that the
            client itself has trained.
        validate_personal: Shell-style patterns of generated parameters of which they choose, too, whether each client
            is given its own back instead, as at first: ``server/personal``.
        predict: Which model is the result: the one each client has ``trained``, or the ``generated`` one.
        diffusion_lr: Adam's learning rate for the diffusion model.
        diffusion_weight_decay: Adam's weight decay for the diffusion model.
        hypernetwork_lr: Adam's learning rate for the hypernetwork.
        start_from_clients: Start the hypernetwork's last bias from the mean of the initially trained backbones.
    """

    init_epochs: int = 50
    num_neighbors: int | None = 5
    refresh_every: int | None = 5
    embedding: Literal["graph", "one_hot"] = "graph"
    embedding_model: Literal["own", "initial", "received"] = "own"
    permute_embeddings: bool = False
    normalize_embeddings: bool = False
    diffusion: Callable[[int], nn.Module] = SheafDiffusion
    attention: Literal["qkv", "matrix", "none"] = "qkv"
    scaled_attention: bool = False
    attention_residual: bool = False
    hidden_channels: int = 128
    num_hidden_layers: int = 2
    activation: Literal["relu", "leaky_relu"] = "relu"
    layer_norm: bool = False
    output_scale: float = 0.1
    hypernetwork_dropout: float = 0.3
    clean_weights: bool = False
    last_layer: Literal["gradient", "closed_form"] = "gradient"
    ridge: float = 1.0
    strength: float | None = None
    mix_only_moved: bool = False
    validate_every: int | None = None
    validate_personal: Sequence[str] = ()
    predict: Literal["trained", "generated"] = "trained"
    diffusion_lr: float = 0.001
    diffusion_weight_decay: float = 5e-4
    hypernetwork_lr: float = 0.001
    start_from_clients: bool = True

    needs_graphs = True
    server_state = ("embeddings", "trials")

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_at_least(1, "refresh_every", "hidden_channels")
        self.require_at_least(0, "init_epochs", "hypernetwork_lr", "diffusion_lr", "diffusion_weight_decay")
        self.require_at_least(0, "num_hidden_layers", "output_scale")
        if self.ridge <= 0:
            raise ValueError(f"strategy.ridge must be positive, got {self.ridge}")
        if self.strength is not None and not 0 <= self.strength <= 1:
            raise ValueError(f"strategy.strength must be in [0, 1], or null for an estimate, got {self.strength}")
        self.require_at_least(1, "validate_every")
        fits = self.mix_only_moved or self.strength is not None or self.validate_every is not None
        if self.last_layer == "gradient" and fits:
            names = "strategy.mix_only_moved, strategy.strength and strategy.validate_every"
            raise ValueError(f"{names} are for strategy.last_layer closed_form")
        require_trials("validate_personal", self.validate_personal, self.validate_every)
        if self.embedding == "one_hot" and self.embedding_model != "own":
            raise ValueError(f"strategy.embedding_model is {self.embedding_model}, but one_hot embeds with no model")
        if not 0 <= self.hypernetwork_dropout < 1:
            raise ValueError(f"strategy.hypernetwork_dropout must be in [0, 1), got {self.hypernetwork_dropout}")

    def setup(self, federation: Federation) -> None:
        """Check the collaboration graph against the federation, then create the server's modules."""
        self.embeddings = ClientEmbeddings(
            federation,
            one_hot=self.embedding == "one_hot",
            num_neighbors=self.num_neighbors,
            normalize=self.normalize_embeddings,
            permute=self.permute_embeddings,
        )
        start = {"strength_factor": 1.0, "mix_only_moved": float(self.mix_only_moved)}
        grids = {"strength_factor": (*SHARES, *(1 + share for share in SHARES[1:])), "mix_only_moved": ON_OFF}
        self.trials = Trials(grids, start, self.validate_every, self.validate_personal)
        self.trials.check_client(federation.client)
        super().setup(federation)

    def build_generator(self, num_outputs: int) -> nn.ModuleDict:
        """S(·; θ) and H(·; φ)."""
        self.diffusion_model = self.diffusion(self.embeddings.num_channels)
        fitted = self.last_layer == "closed_form"
        self.hypernetwork = AttentionHypernetwork(
            self.embeddings.num_channels,
            None if fitted else num_outputs,
            hidden_channels=self.hidden_channels,
            num_hidden_layers=self.num_hidden_layers,
            dropout=self.hypernetwork_dropout,
            attention=self.attention,
            num_clients=len(self.federation.training_clients),
            output_scale=self.output_scale,
            scaled_attention=self.scaled_attention,
            attention_residual=self.attention_residual,
            activation=self.activation,
            layer_norm=self.layer_norm,
        )
        parts: dict[str, nn.Module] = {"diffusion": self.diffusion_model, "hypernetwork": self.hypernetwork}
        self.closed_form: ClosedForm | None = None
        if fitted:
            training, sizes = self.federation.training_clients, [shape.numel() for shape in self.shapes.values()]
            parts["last_layer"] = layer = ClosedFormLayer(
                sizes, len(training), ridge=self.ridge, strength=self.strength
            )
            layer.start_from(flatten({name: self.federation.parameters[name][None] for name in self.shapes})[0])
            personal = self.select(list(self.shapes), self.validate_personal)
            self.closed_form = ClosedForm(
                layer, list(self.shapes), training, personal=personal, is_tried=self.trials.every is not None
            )
        return nn.ModuleDict(parts)

    def build_optimizer(self) -> Optimizer:
        """One Adam with a group for each of the two."""
        diffusion = {
            "params": list(self.diffusion_model.parameters()),
            "lr": self.diffusion_lr,
            "weight_decay": self.diffusion_weight_decay,
        }
        others = [part for name, part in self.generator.named_children() if name != "diffusion"]
        hypernetwork = {"params": [p for part in others for p in part.parameters()], "lr": self.hypernetwork_lr}
        return Adam([group for group in (diffusion, hypernetwork) if group["params"]], fused=True)

    def initial_stages(self) -> Sequence[Stage]:
        """Embedding with the common start if asked for; local training from it, then the first embeddings."""
        backbone = tuple(self.shapes) if self.start_from_clients else ()
        initial = Stage(name="initial", num_epochs=self.init_epochs, upload=backbone, signals=self.signals(-1))
        if self.embedding == "graph" and self.embedding_model == "initial":
            return [Stage(name="embed", signals={"embedding": graph_embedding}), initial]
        return [initial]

    def signals(self, round_idx: int) -> Mapping[str, Signal]:
        """The graph-level embedding, in the rounds before a refresh only."""
        static = self.refresh_every is None and round_idx >= 0
        due = self.refresh_every is None or (round_idx + 1) % self.refresh_every == 0
        if self.embedding != "graph" or self.embedding_model == "initial" or static or not due:
            return {}
        return {"embedding": graph_embedding if self.embedding_model == "own" else received_embedding}

    def stages(self, round_idx: int) -> Sequence[Stage]:
        """The exchange of the models, then trials of how they are generated."""
        return [*super().stages(round_idx), *self.trials.stages(round_idx)]

    def stage(self, address: StageAddress) -> Stage:
        """The stage at an address, a trial among them."""
        return self.trials.stage(address) or super().stage(address)

    def configure(self, stage: Stage, clients: Sequence[int]) -> Payload | None:
        """The common start to embed with, nothing for the initial training, generated backbones after it.

        In a trial, beside the client's own, what would be generated for it.
        """
        if (choice := self.trials.of(stage)) is not None:
            with self.trials.supposing(choice):
                return Payload(clients=tuple(clients), signals=self.generate_for_evaluation(clients).parameters)
        if stage.name == "embed":
            start = self.federation.parameters
            parameters = {name: tensor.expand(len(clients), *tensor.shape) for name, tensor in start.items()}
            return Payload(clients=tuple(clients), parameters=parameters)
        if stage.name == "initial":
            return None
        if self.closed_form is not None and set(clients) <= set(self.federation.training_clients):
            payload = self.generate_for_evaluation(clients)
            self._sent_to, self._generated = tuple(clients), flatten(payload.parameters)
            return payload
        noisy = super().configure(stage, clients)
        return self.generate_for_evaluation(clients) if self.clean_weights else noisy

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        """Server step, then the new embeddings; after trials, the choice."""
        if self.trials.of(stage) is not None:
            self.trials.take_in(stage, upload)
            return
        if stage.name == "initial" and self.start_from_clients and upload.clients:
            start_P = flatten({n: upload.parameters[n] for n in self.shapes}).mean(dim=0)
            (self.closed_form.layer if self.closed_form is not None else self.hypernetwork).start_from(start_P)
            self._generated_for_evaluation = None
        if stage.name not in ("embed", "initial"):
            super().aggregate(stage, upload)
        self._place(upload)

    def admit(self, stage: Stage, upload: Payload) -> None:
        """Place newcomers in the collaboration graph; keep what they trained."""
        self._place(upload)
        if upload.clients and stage.as_update and self.closed_form is not None:
            given_CP = flatten(self.generate_for_evaluation(upload.clients).parameters)
            update_CP = flatten({name: upload.parameters[name] for name in self.shapes})
            self.closed_form.admit(upload.clients, given_CP + update_CP)
            self._generated_for_evaluation = None

    def _place(self, upload: Payload) -> None:
        """Place clients in the collaboration graph by the embeddings they sent."""
        if self.embeddings.take_in(upload):
            self._generated_for_evaluation = None

    def generate(self, clients: Sequence[int]) -> Tensor:
        """H(S(X_0)) of all training clients and the newcomers after them; the rows asked for."""
        members = self.embeddings.members(clients)
        row = {client: row for row, client in enumerate(members)}
        rows = [row[client] for client in clients]
        x_CD = self.enriched(members)
        if self.closed_form is not None:
            return self.closed_form.generate(self.hypernetwork.features(x_CD), clients, rows)
        generated_CP: Tensor = self.hypernetwork(x_CD)
        if list(clients) == members:
            return generated_CP
        # index_select: the backward of advanced indexing adds in no fixed order
        return generated_CP.index_select(0, torch.tensor(rows, device=x_CD.device))

    def enriched(self, members: Sequence[int]) -> Tensor:
        """S(X_0) of the given clients (eq. 9)."""
        enriched_CD: Tensor = self.diffusion_model(*self.embeddings.graph(members))
        return enriched_CD

    def learn(self, upload: Payload, generated_CP: Tensor, rows: Tensor, update_CP: Tensor) -> None:
        """By gradient, or in closed form: fit the last layer, and train what is before it on what it leaves out."""
        if self.closed_form is None:
            super().learn(upload, generated_CP, rows, update_CP)
            return
        self.closed_form.take_in(upload, those_of(generated_CP, rows), update_CP, self.trials.choice)
        self.generator.train()
        for loss in self.closed_form.losses(upload.clients, update_CP, self._features, self.num_server_steps):
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.num_steps += 1

    def _features(self) -> Tensor:
        """What is before the last layer, of the training clients."""
        with self.randomness("server", self.num_steps):
            return self.hypernetwork.features(self.enriched(self.federation.training_clients))

    def _fill(self) -> None:
        """Have the last layer as chosen last, or as is supposed while it is tried."""
        if self.closed_form is not None and self.closed_form.fill(self.trials.choice):
            self._generated_for_evaluation = None

    def generate_for_evaluation(self, clients: Sequence[int]) -> Payload:
        """With the last layer as chosen."""
        self._fill()
        return super().generate_for_evaluation(clients)

    def predicts_trained(self) -> bool:
        """As is set."""
        return self.predict == "trained"

    def model_for(self, clients: Sequence[int]) -> Payload | None:
        """None: the models as the clients trained them; or the generated ones."""
        return self.generate_for_evaluation(clients) if self.predict == "generated" else None

    def evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """The trained or the generated models are the result; the others are logged beside them."""
        if self.predict == "trained":
            return super().evaluations(clients)
        generated = self.model_for(clients)
        return {"": Evaluation(payload=generated), "trained/": Evaluation(payload=generated, prefer_trained=True)}

    def later_evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """The same: nothing can be generated before the clients have sent their embeddings."""
        generated = Evaluation(payload=self.any_models(clients))
        if self.predict == "trained":
            return {"": Evaluation(), "gen/": generated}
        return {"": generated, "trained/": dataclasses.replace(generated, prefer_trained=True)}

    def inspection(self) -> Mapping[str, float]:
        """Of the generator's last forward, and of what it was given."""
        found = {**super().inspection(), **self.trials.metrics()}
        found["server/generator_input_spread"] = self.embeddings.spread()
        if self.attention == "qkv":
            found["server/generator_attention_entropy"] = float(self.hypernetwork.attention_entropy)
        return found if self.closed_form is None else found | self.closed_form.metrics()

    def matrices(self) -> Mapping[str, Tensor]:
        """Cosines of the graph-level embeddings, and the collaboration graph's adjacency."""
        return self.embeddings.matrices()

    def state_dict(self) -> dict[str, Any]:
        """The state, with the last layer as chosen."""
        self._fill()
        return super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; the last layer has to be filled anew."""
        super().load_state_dict(state)
        if self.closed_form is not None:
            self.closed_form.forget()
