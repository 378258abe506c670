"""FedSage+: clients complete their graphs with generated neighbors, then train FedSage.

Zhang, Yang, Li, Sun, Yiu: "Subgraph Federated Learning with Missing Neighbor Generation", NeurIPS 2021. Before round 0
every client hides a share of its validation nodes and trains a generator (``models/neighbor_generator.py``) to say how
many neighbors the other nodes lost, n, and with which features, x. With T the training nodes (``generator_nodes``: all
that stay, as neither n nor x is a label; CE is of training nodes then, too) and S slots,

    L_A = a mean_T smoothL1(ñ, n) + b L_feat + c CE(classifier on the completed graph),
    L_feat = 1/(|T| S) Σ_{v in T} Σ_{p <= [ñ_v]} min_k ‖x̃_{v,p} - x_{v,k}‖² / F,   [ñ] whole (``model.rounding``);

then what makes the features is trained on 1/C (L_A + b Σ_{j != i} L_ij), L_ij being L_feat with neighbors of client
j's nodes in place of x. At last [ñ_v] generated neighbors are added to each node, and FedAvg trains the classifier.

Leaves the client: in an exchange generated features, numbers of hidden neighbors, and for every other client's
generated features the gradient of L_ij, from which whoever sees a single one, as the server does, can compute real
features of j (client i sees their sum; ``noise_std`` blurs them); the classifier; three metrics on the generator.

Departures: x̃ is exchanged, not the generator, whose gradient follows from that in x̃ by the chain rule: the same
mathematics with fewer numbers. Of each client ``num_shown`` nodes of T are in an exchange, drawn anew (the paper
trains on batches as large), with as many slots as any of them uses. The nearest neighbor counts (released code takes
the last that is nearer by a factor F), new nodes are linked both ways, labels of training nodes alone are used, and
clients weigh by training examples.
"""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.batches import Batch, GraphBatch
from fl_lightning.federation import Federation
from fl_lightning.kernels.randomness import subkey
from fl_lightning.round.client import ClientModule
from fl_lightning.round.context import Context, Parameters
from fl_lightning.round.payload import Payload
from fl_lightning.round.program import LocalProgram
from fl_lightning.round.stage import Rows, Stage, StateSpec
from fl_lightning.strategies.base import RecordsMetrics
from fl_lightning.strategies.mixing import neighbor_exchange as exchange
from fl_lightning.strategies.mixing import neighbor_generation as client_side
from fl_lightning.strategies.mixing.fedsage import FedSage
from fl_lightning.strategies.mixing.neighbor_generation_client import NeighborGenerationClient


@dataclass(kw_only=True, eq=False)
class FedSagePlus(FedSage, RecordsMetrics):
    """FedSage on completed graphs.

    Args:
        personal: Shell-style patterns of parameters that are kept local: the generator's.
        hidden_fraction: Share of the validation nodes that is hidden, in [0, 1]; with 0 the generator has no real
            neighbors to learn from.
        generator_nodes: T, the nodes whose lost neighbors train the generator: the ``training`` nodes, as in released
            code, or ``all``, which are many more if there are few labels.
        pretrain_epochs: Epochs on L_A.
        refine_epochs: Epochs with the other clients' neighbors, with one exchange each.
        loss_weights: a, b and c, not negative. As L_feat is a mean over all features, with the published weights c
            decides what is generated; a greater b, or c = 0, keeps it near real features.
        num_shown: Number of a client's nodes in T whose generated neighbors the others see in an exchange.
        noise_std: Standard deviation of normal noise on the gradients that are sent.
    """

    personal: Sequence[str] = ("generator.*",)
    hidden_fraction: float = 0.5
    generator_nodes: Literal["training", "all"] = "training"
    pretrain_epochs: int = 20
    refine_epochs: int = 20
    loss_weights: tuple[float, float, float] = (1.0, 1.0, 1.0)
    num_shown: int = 32
    noise_std: float = 0.0

    client_class = NeighborGenerationClient
    needs_undirected = True  # generated neighbors are joined both ways
    adds_edges = True

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_at_least(0, "pretrain_epochs", "refine_epochs", "noise_std")
        self.require_at_least(1, "num_shown")
        if not 0 <= self.hidden_fraction <= 1:
            raise ValueError(f"strategy.hidden_fraction must be in [0, 1], got {self.hidden_fraction}")
        if len(self.loss_weights) != 3 or min(self.loss_weights) < 0:
            raise ValueError(f"strategy.loss_weights must be three numbers from 0 on, got {self.loss_weights}")

    def setup(self, federation: Federation) -> None:
        """Start without metrics and exchanged features."""
        super().setup(federation)
        self.num_slots = federation.parameters["generator.features.2.bias"].numel() // int(
            torch.tensor(federation.num_features)
        )
        self.exchanged = Payload(clients=())

    def client_state(self) -> Mapping[str, StateSpec]:
        """Which nodes are hidden, which hidden neighbors each node has lost, and which nodes train the generator."""
        return {
            "impaired/hidden": StateSpec(initial=torch.tensor(False), per_example=True),
            "impaired/lost": StateSpec(initial=torch.full((self.num_slots,), -1), per_example=True),
            "impaired/taught": StateSpec(initial=torch.tensor(False), per_example=True),
        }

    def initial_stages(self) -> Sequence[Stage]:
        """Hide nodes, train the generators alone and then with each other's neighbors, and complete the graphs."""
        refining = []
        for epoch in range(self.refine_epochs):
            refining += [
                Stage(name=f"compare-{epoch}", client_outputs={"gradient": self.compare}),
                Stage(
                    name=f"refine-{epoch}",
                    num_epochs=1,
                    trained=("generator.features.*",),
                    objective=self.refine,
                    client_outputs={"shown": self.show},
                    rows={"shown": Rows(of="single")},
                ),
            ]
        first, *others = self.alone()
        return [first, *others[:-1], *refining, others[-1]]

    def alone(self) -> list[Stage]:
        """What a client does alone before it trains the classifier."""
        assert isinstance(self.federation.client, NeighborGenerationClient)
        return [
            Stage(name="impair", client_state={"impaired": self.impair}),
            Stage(
                name="pretrain",
                num_epochs=self.pretrain_epochs,
                trained=("generator.*",),
                optimizer=self.federation.client.generator_optimizer,
                objective=self.pretrain,
                client_outputs={"shown": self.show},
                rows={"shown": Rows(of="single")},
            ),
            Stage(
                name="mend",
                client_outputs={"server": client_side.generation_metrics},
                program=LocalProgram(rewrite=client_side.generate_neighbors),
            ),
        ]

    def onboarding_stages(self) -> Sequence[Stage]:
        """An unseen client generates missing neighbors on its own, then trains the common classifier."""
        return [*self.alone(), *self.stages(0)]

    def training(self, round_idx: int) -> Stage:
        """The classifier alone."""
        return dataclasses.replace(super().training(round_idx), trained=("net.*",))

    # ------------------------------------------------------------------ the clients

    def impair(self, client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> dict[str, Tensor]:
        """Hide nodes."""
        key = context.received["key"]
        return client_side.hide(batch, key, self.hidden_fraction, self.num_slots, self.generator_nodes)

    def pretrain(self, client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
        """L_A."""
        assert isinstance(batch, GraphBatch)
        key = subkey(context.received["key"], "step", context.step)
        made = client_side.generate(client, parameters, batch, context, key, drops=True)
        return client_side.local_loss(client, made, batch, context, self.loss_weights)

    def show(self, client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> dict[str, Tensor]:
        """The features generated for some nodes with the noise and dropout of the next exchange."""
        assert isinstance(batch, GraphBatch)
        key = context.received["next_key"]
        made = client_side.generate(client, parameters, batch, context, key, drops=True)
        return exchange.shown(made, batch, context, key, self.num_shown)

    def compare(self, client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
        """The gradients of b L_ij / C for all i."""
        weight = self.loss_weights[1] / len(context.received["keys"])
        return exchange.foreign_gradient(batch, context, slots=self.num_slots, weight=weight, noise_std=self.noise_std)

    def refine(self, client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
        """L_A / C, plus a term with the gradient of b Σ_j L_ij / C."""
        assert isinstance(batch, GraphBatch)
        key = context.received["key"]
        made = client_side.generate(client, parameters, batch, context, key, drops=True)
        place_M, is_one_M = exchange.shown_nodes(batch, context, key, self.num_shown)
        gradient = context.received["gradient"]
        foreign = gradient * is_one_M[:, None, None] * made.features[place_M, : gradient.shape[1]]
        loss = client_side.local_loss(client, made, batch, context, self.loss_weights)
        return context.received["share"] * loss + foreign.sum()

    # ------------------------------------------------------------------ the server

    def configure(self, stage: Stage, clients: Sequence[int]) -> Payload:
        """The classifier; before it, random keys, what the others show, or the gradient for what was shown."""
        kind, _, epoch = stage.name.partition("-")
        if kind == "train":
            return super().configure(stage, clients)
        extras = {"key": self.federation.keys(clients, kind), "next_key": self.federation.keys(clients, "refine", 0)}
        if kind in ("compare", "refine"):
            sent, rows, number = self.exchanged.rows(clients), len(clients), int(epoch)
            self.exchanged = sent
            extras = {
                "key": self.federation.keys(clients, "refine", number),
                "next_key": self.federation.keys(clients, "refine", number + 1),
            }
            if kind == "refine":
                extras |= dict(sent.extras) | {"share": torch.full((rows,), 1 / rows, device=self.federation.device)}
            else:
                extras["keys"] = extras["key"].expand(rows, rows)
                extras["other"] = ~torch.eye(rows, dtype=torch.bool, device=self.federation.device)
                extras |= {n.removeprefix("shown/"): t.expand(rows, *t.shape) for n, t in sent.extras.items()}
        return Payload(clients=tuple(clients), extras=extras)

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        """Average the classifiers; before round 0, forward generated features, sum gradients and record metrics."""
        if stage.name == "train":
            super().aggregate(stage, upload)
        elif stage.name == "mend":
            self.recorded_metrics = {name: float(tensor.double().mean()) for name, tensor in upload.extras.items()}
            if not self.recorded_metrics["server/generated_neighbors"]:
                warnings.warn(
                    "FedSagePlus: no client generates a neighbor, so this is FedSage; more strategy."
                    "pretrain_epochs, a greater strategy.hidden_fraction, or model.rounding: nearest may help.",
                    stacklevel=2,
                )
        elif stage.name.startswith("compare"):
            summed = upload.extras["gradient"].sum(dim=0)
            rows = [self.exchanged.clients.index(client) for client in upload.clients]
            self.exchanged = Payload(clients=upload.clients, extras={"gradient": summed[rows]})
        elif "shown/used" in upload.extras:
            num_used = max(1, int(upload.extras["shown/used"].max()))  # the other slots are zero
            shown = {**upload.extras, "shown/features": upload.extras["shown/features"][:, :, :num_used]}
            self.exchanged = dataclasses.replace(upload, extras=shown, num_examples=None, num_steps=None)
