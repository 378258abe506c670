"""pFedHN: a hypernetwork generates each client's model from a learned embedding of the client.

Shamsian, Navon, Fetaya, Chechik: "Personalized Federated Learning using Hypernetworks", ICML 2021, Algorithm 1. The
server learns the embeddings v_i and the weights of h from θ_i = h(v_i) and the θ̃_i that client i trains from it.

Departures: the layers of h are those of its comparison with Panacea (an encoder, then an MLP; the paper's own net is
``num_encoder_layers: 0, num_layers: 4``); they start from He's initialization, because torch's default shrinks the
differences between clients by 1/√6 in each layer; models start near the clients' common initial parameters
(``heads.py``); the squared distances are averaged over the clients of a round, where the released
code draws one client a round; and the server takes ``num_server_steps`` steps toward what was trained, the released
code one.

Shape legend: C clients asked for, T training clients, D channels.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from fl_lightning.federation import Federation
from fl_lightning.kernels.randomness import generator
from fl_lightning.relations.similarity import cosine_similarity
from fl_lightning.round.client import OptimizerFactory
from fl_lightning.round.payload import Payload, flatten
from fl_lightning.round.stage import Evaluation, Stage, tune
from fl_lightning.strategies.hypernetwork.base import Hypernetwork
from fl_lightning.strategies.hypernetwork.heads import FullHead, GeneratorHead


def default_server_optimizer(parameters: Iterable[Any]) -> Optimizer:
    """Adam with learning rate 0.001."""
    return Adam(parameters, lr=0.001, fused=True)


def hidden_layer(in_channels: int, out_channels: int) -> nn.Linear:
    """A linear layer before a ReLU that preserves the scale of its input."""
    layer = nn.Linear(in_channels, out_channels)
    nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    nn.init.zeros_(layer.bias)
    return layer


@dataclass(kw_only=True, eq=False)
class PFedHN(Hypernetwork):
    """Personalized models from learned client embeddings.

    Args:
        embedding_channels: Width of the clients' embeddings.
        embedding_scale: Standard deviation of the initial embeddings. The smaller it is, the more is learned for all
            clients in common, and the nearer unseen clients are to that (which does not change their accuracy).
        hidden_channels: Width of all layers between embedding and head.
        num_encoder_layers: Layers of the encoder, each linear and ReLU; 0 for none.
        num_layers: Layers of the MLP after it, including the head; at least 1.
        head: Builds the last layer from (its width, number of generated parameters): ``FullHead``, ``FactoredHead``
            or ``ChunkedHead``.
        server_optimizer: Builds the server's optimizer from the generator's parameters.
        unseen_embedding: For clients held out of training: ``initial``, their own untrained draw (as in the papers), or
            ``mean``, that of their neighbors in the relation graph (of all training clients if there are none).
    """

    personal: Sequence[str] = ()
    num_server_steps: int = 10
    embedding_channels: int = 100
    embedding_scale: float = 1.0
    hidden_channels: int = 100
    num_encoder_layers: int = 3
    num_layers: int = 3
    head: Callable[[int, int], GeneratorHead] = FullHead
    server_optimizer: OptimizerFactory = default_server_optimizer
    unseen_embedding: Literal["initial", "mean"] = "initial"

    mean_distance: ClassVar[bool] = True
    server_state: ClassVar[tuple[str, ...]] = ("has_trained",)

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_at_least(1, "embedding_channels", "hidden_channels", "num_layers")
        self.require_at_least(0, "num_encoder_layers")
        if self.embedding_scale <= 0:
            raise ValueError(f"strategy.embedding_scale must be positive, got {self.embedding_scale}")

    def setup(self, federation: Federation) -> None:
        """Create embeddings and generator, and start all models from the common initial parameters."""
        super().setup(federation)
        self.has_trained: set[int] = set()
        start = {name: federation.parameters[name][None] for name in self.shapes}
        self.last_layer.start_from(flatten(start)[0])

    def build_generator(self, num_outputs: int) -> nn.ModuleDict:
        """Embeddings, encoder, MLP and head."""
        widths = [self.embedding_channels] + [self.hidden_channels] * (self.num_encoder_layers + self.num_layers - 1)
        layers = [hidden_layer(*pair) for pair in itertools.pairwise(widths)]
        initial_TD = self.initial_embeddings(self.federation.training_clients)
        self.embedding = nn.Embedding(len(initial_TD), self.embedding_channels, _weight=initial_TD)
        self.encoder_layers = nn.ModuleList(layers[: self.num_encoder_layers])
        self.mlp = nn.Sequential(*(part for layer in layers[self.num_encoder_layers :] for part in (layer, nn.ReLU())))
        self.last_layer = self.head(widths[-1], num_outputs)
        parts = {"embedding": self.embedding, "encoder": self.encoder_layers, "mlp": self.mlp, "head": self.last_layer}
        return nn.ModuleDict(parts)

    def build_optimizer(self) -> Optimizer:
        """One optimizer over embeddings and generator."""
        return self.server_optimizer(self.generator.parameters())

    def generate(self, clients: Sequence[int]) -> Tensor:
        """θ_i = h(v_i) of the given clients."""
        generated_CP: Tensor = self.last_layer(self.mlp(self.encode(clients)))
        return generated_CP

    def encode(self, clients: Sequence[int]) -> Tensor:
        """The encoder's output for the given clients' embeddings, (C, D)."""
        x_CD = self.client_embeddings(clients)
        for layer in self.encoder_layers:
            x_CD = layer(x_CD).relu()
        return x_CD

    def client_embeddings(self, clients: Sequence[int]) -> Tensor:
        """Trained embeddings of training clients, and of others as set by ``unseen_embedding``, (C, D)."""
        known = self.federation.training_clients
        unseen_clients = [client for client in clients if client not in set(known)]
        x_CD = self.embedding.weight
        if unseen_clients:
            x_CD = torch.cat([x_CD, self.embeddings_with_unseen_clients(unseen_clients)])
        return pick_rows(x_CD, [*known, *unseen_clients], clients)

    def embeddings_with_unseen_clients(self, unseen_clients: Sequence[int]) -> Tensor:
        """Embeddings of clients that took no part in training, one row each."""
        trained_TD = self.embedding.weight
        if self.unseen_embedding == "initial":
            return self.initial_embeddings(unseen_clients).to(trained_TD)
        weight_CT = trained_TD.new_zeros(len(unseen_clients), len(trained_TD))
        if self.federation.relation_CC is not None:
            relation_CC = self.federation.relation_CC.to(trained_TD)
            weight_CT = relation_CC[list(unseen_clients)][:, list(self.federation.training_clients)]
        weight_CT = torch.where(weight_CT.any(dim=1, keepdim=True), weight_CT, 1.0)
        mean_CT: Tensor = weight_CT / weight_CT.sum(dim=1, keepdim=True)
        return mean_CT @ trained_TD

    def initial_embeddings(self, clients: Sequence[int]) -> Tensor:
        """Normal draws keyed by each client's name, so that the order of the clients does not matter."""
        names = self.federation.client_names or range(self.federation.num_clients)
        draws = [generator(self.federation.seed, "embedding", names[client]) for client in clients]
        drawn = torch.stack([torch.randn(self.embedding_channels, generator=draw) for draw in draws])
        return self.embedding_scale * drawn

    def predicts_trained(self) -> bool:
        """False: the generated models are the result."""
        return False

    def model_for(self, clients: Sequence[int]) -> Payload | None:
        """The generated models."""
        return self.generate_for_evaluation(clients)

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        """Take the step of the family, and record which clients have trained."""
        super().aggregate(stage, upload)
        self.has_trained |= set(upload.clients)

    def evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """The generated models are the result; the locally trained ones are logged as ``trained/...``.

        For training clients that have not taken part in a round yet, a copy of the generated model is trained first.
        """
        untrained = [client for client in self.federation.training_clients if client in {*clients} - self.has_trained]
        first = Evaluation(payload=self.model_for(untrained), tuning=tune(self.num_epochs)) if untrained else None
        generated = self.model_for(clients)
        others = {client: first for client in untrained} if first else {}
        trained = Evaluation(payload=generated, prefer_trained=True, others=others)
        return {"": Evaluation(payload=generated), "trained/": trained}

    def matrices(self) -> Mapping[str, Tensor]:
        """Cosines of the encoded embeddings."""
        with torch.no_grad():
            return {"embedding": cosine_similarity(self.encode(self.federation.training_clients))}


def pick_rows(x_XD: Tensor, owners: Sequence[int], clients: Sequence[int]) -> Tensor:
    """Rows of the given clients, in their order; row r of ``x_XD`` belongs to ``owners[r]``."""
    if list(owners) == list(clients):
        return x_XD
    position = {client: row for row, client in enumerate(owners)}
    # index_select: the backward of advanced indexing adds in no fixed order
    return x_XD.index_select(0, torch.tensor([position[client] for client in clients], device=x_XD.device))
