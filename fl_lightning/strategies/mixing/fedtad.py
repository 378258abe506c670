"""FedTAD: after averaging, a server distills into the global model what each client's model knows best.

Zhu, Li, Wu, Wu, Hu, Li: "FedTAD: Topology-aware Data-free Knowledge Distillation for Subgraph Federated Learning",
IJCAI 2024. Once, client i sends how reliable it is in class c. With x_v its features, t_v the probabilities that a
random walk from node v is back at it after 1..p steps, q_v = [x_v, t_v], T_i its training nodes and d_v neighbors:

    R_ic = Σ_{v in T_i, y_v = c} (1 + Σ_{u in N(v)} cos(q_v, q_u)) / (d_v + 1),     κ_ic = R_ic / Σ_j R_jc

Each round θ <- Σ_i w_i θ_i; then, ``num_iterations`` times, z ~ N(0, I), x_j = G(c_j, z_j) for M pseudo nodes of
balanced classes, linked to those nearest in direction; with f_i the clients' and f the global model's logits,

    D(f) = Σ_ic κ_ic mean_{j of class c} mean_k |f(x)_jk - f_i(x)_jk|
    G minimizes once  λ1 Σ_ic κ_ic mean_{j of c} CE(f_i(x)_j, c) - D(f) + λ2 N e^(-S),
                      S = mean_jl ‖z_j - z_l‖² / Z · ‖x_j - x_l‖_1 / F
    θ minimizes ``num_student_steps`` times  D(f)

In D, gradients reach G only through f, and not through the links. Both optimizers are Adam, and their state lives on.

Leaves the client: the model; once, a number for each class, which shows what classes it has and how alike neighbors
are in them.

Departures: t is as the paper means it (in released code it is the node numbers of a random walk, which outweigh the
features); w are shares of the training nodes (released code: of all nodes); κ is over the clients that respond, and of
R below 0 it is 0 (neighbors that are unlike each other give one, whose student would flee from the teachers). Models
are in eval mode, but the student in its steps. Time and memory of t are quadratic in a client's nodes, once; in every
round the server takes ``num_iterations`` passes through all clients' models, twice, and trains generator and student.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Adam

from fl_lightning.batches import Batch, GraphBatch, GraphCollator
from fl_lightning.batches.base import single
from fl_lightning.federation import Federation
from fl_lightning.kernels.block_sparse import block_matmul
from fl_lightning.kernels.randomness import derive_key, generator
from fl_lightning.models.plain import plain_alone
from fl_lightning.models.pseudo_node_generator import PseudoNodeGenerator, nearest_neighbor_graph
from fl_lightning.round.client import ClientModule
from fl_lightning.round.context import Context, Parameters
from fl_lightning.round.payload import Payload
from fl_lightning.round.stage import Evaluation, Rows, Stage
from fl_lightning.strategies.base import RecordsMetrics, server_dtype
from fl_lightning.strategies.label_propagation import with_labels
from fl_lightning.strategies.mixing.base import one_model
from fl_lightning.strategies.mixing.fedavg import FedAvg


@dataclass(kw_only=True, eq=False)
class FedTAD(FedAvg, RecordsMetrics):
    """FedAvg, and distillation of the clients' models by their reliability.

    Args:
        num_iterations: Iterations of generator and student in a round, at least 0; 0 is FedAvg.
        num_student_steps: Steps of the global model in an iteration, at least 0.
        num_pseudo_nodes: M, at least one for each class.
        num_neighbors: Number of pseudo nodes that each is linked to, at least 1.
        noise_channels: Z, width of the noise, at least 1.
        walk_length: p, at least 0; 0 leaves t out.
        class_weight: λ1, at least 0.
        diversity_weight: λ2, at least 0.
        generator_lr: Learning rate of the generator, at least 0.
        student_lr: Learning rate of the global model, at least 0.
        weight_decay: Weight decay of both, at least 0.
    """

    num_iterations: int = 5
    num_student_steps: int = 5
    num_pseudo_nodes: int = 100
    num_neighbors: int = 4
    noise_channels: int = 32
    walk_length: int = 5
    class_weight: float = 1.0
    diversity_weight: float = 1.0
    generator_lr: float = 1e-3
    student_lr: float = 1e-3
    weight_decay: float = 5e-4
    personal: Sequence[str] = field(default=(), init=False)

    needs_graphs = needs_nodes = needs_classes = True
    needs_undirected = True  # its random walks go along edges and back
    takes_edge_weight = False
    takes_statistics = False  # the server runs the clients' models, and their statistics are kept local
    server_state = ("averaged", "generator", "optimizers", "reliability_CK", "num_rounds")

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_at_least(0, "num_iterations", "num_student_steps", "walk_length", "class_weight")
        self.require_at_least(0, "diversity_weight", "generator_lr", "student_lr", "weight_decay")
        self.require_at_least(1, "num_pseudo_nodes", "num_neighbors", "noise_channels")

    def setup(self, federation: Federation) -> None:
        """Create generator, student and their optimizers, with reliability 0 for all clients."""
        super().setup(federation)
        num_classes, device = federation.num_outputs, federation.device
        if self.num_pseudo_nodes < num_classes:
            raise ValueError(
                f"strategy.num_pseudo_nodes must be at least {num_classes}, one for each class, got "
                f"{self.num_pseudo_nodes}"
            )
        assert isinstance(federation.num_features, int)
        self.dtype = server_dtype(next(iter(federation.parameters.values())).dtype)
        with torch.random.fork_rng([]):
            torch.manual_seed(derive_key(federation.seed, "pseudo nodes"))
            net = PseudoNodeGenerator(num_classes, self.noise_channels, federation.num_features)
        self.generator = net.to(device, self.dtype)
        self._student = {
            n: p.detach().to(self.dtype, copy=True).requires_grad_() for n, p in federation.parameters.items()
        }
        self.optimizers = {
            "generator": Adam(self.generator.parameters(), self.generator_lr, weight_decay=self.weight_decay),
            "student": Adam(self._student.values(), self.student_lr, weight_decay=self.weight_decay),
        }
        self.reliability_CK = torch.zeros(federation.num_clients, num_classes, dtype=self.dtype, device=device)
        self.averaged, self.num_rounds = dict(self.models), 0

    def initial_stages(self) -> Sequence[Stage]:
        """The clients send their reliability."""
        by_class = {"reliability": Rows(of="class")}
        stage = Stage(name="reliability", client_outputs={"reliability": self.reliability}, rows=by_class)
        return [stage] if self.num_iterations else []

    def onboarding_stages(self) -> Sequence[Stage]:
        """Unseen clients receive the global model, nothing else."""
        return self.stages(0)

    def reliability(self, client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
        """R of one client, (K,)."""
        assert isinstance(batch, GraphBatch)
        every_N = torch.arange(len(batch.y), device=batch.y.device)
        x_NF, t_NP = batch.features_of(every_N).to(self.dtype), return_probabilities(batch, self.walk_length)
        unit_NQ = F.normalize(torch.cat([x_NF, t_NP.to(x_NF)], dim=1), dim=1)
        alike_N = (1 + (unit_NQ * batch.sum_neighbors(unit_NQ)).sum(dim=1)) / (batch.degree + 1)
        nobody_NK = alike_N.new_zeros(len(alike_N), self.reliability_CK.shape[1])
        return alike_N @ with_labels(nobody_NK, batch, batch.train_mask)

    def configure(self, stage: Stage, clients: Sequence[int]) -> Payload:
        """The global model, if the clients are to train."""
        return Payload(clients=tuple(clients)) if stage.name == "reliability" else super().configure(stage, clients)

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        """Average and distill; before round 0, record the reliability of the clients."""
        if stage.name == "reliability":
            if upload.clients:
                self.reliability_CK[list(upload.clients)] = upload.extras["reliability"].to(self.dtype)
            return
        super().aggregate(stage, upload)
        self.averaged = dict(self.models)
        if upload.clients and self.num_iterations:
            self.distil(upload)

    def weights(self, clients: Sequence[int]) -> Tensor:
        """κ among some clients, (C, K); 0 for a class that none of them has."""
        return F.normalize(self.reliability_CK[list(clients)].clamp(min=0), p=1, dim=0)

    def distil(self, upload: Payload) -> None:
        """Train the generator and the global model in turn."""
        client = self.federation.client
        assert client is not None
        num_classes, device, num_nodes = self.federation.num_outputs, self.federation.device, self.num_pseudo_nodes
        y_M = (torch.arange(num_nodes, device=device) // (num_nodes // num_classes)).clamp(max=num_classes - 1)
        weight_CM = (self.weights(upload.clients) / y_M.bincount(minlength=num_classes))[:, y_M]
        teachers = {name: tensor.to(self.dtype) for name, tensor in upload.parameters.items()}
        with torch.no_grad():
            for name, tensor in self._student.items():
                tensor.copy_(self.models[name][0])
        mode = client.training
        for iteration in range(self.num_iterations):
            draw = generator(self.federation.seed, "pseudo nodes", self.num_rounds, iteration)
            noise_MZ = torch.randn(num_nodes, self.noise_channels, generator=draw).to(device, self.dtype)
            client.eval()
            batch = self.pseudo_graph(y_M, noise_MZ)
            taught_CMK = taught(client, teachers, batch)
            wrong_CM = F.cross_entropy(taught_CMK.mT, y_M.expand(len(taught_CMK), -1), reduction="none")
            apart_CM = (client.output(self._student, batch).logits - taught_CMK.detach()).abs().mean(dim=-1)
            assert batch.x is not None
            spread = (torch.cdist(noise_MZ, noise_MZ).square() * torch.cdist(batch.x, batch.x, p=1)).mean()
            alike = len(weight_CM) * (-spread / noise_MZ.shape[1] / batch.x.shape[1]).exp()
            wrong, apart = ((weight_CM * each_CM).sum() for each_CM in (wrong_CM, apart_CM))
            self.step("generator", self.class_weight * wrong - apart + self.diversity_weight * alike)
            with torch.no_grad():
                batch = self.pseudo_graph(y_M, noise_MZ)
                taught_CMK = taught(client, teachers, batch)
            client.train()
            for step in range(self.num_student_steps):
                key = derive_key(self.federation.seed, "student", self.num_rounds, iteration, step)
                drawn = batch.replace({"key": torch.full_like(batch.key, key)})
                apart_CM = (client.output(self._student, drawn).logits - taught_CMK).abs().mean(dim=-1)
                self.step("student", (weight_CM * apart_CM).sum())
            self.recorded_metrics = {"server/pseudo_loss": wrong.item(), "server/disagreement": apart.item()}
        client.train(mode)
        self.num_rounds += 1
        for name, tensor in self._student.items():
            self.models[name] = tensor.detach()[None].to(self.models[name], copy=True)

    def pseudo_graph(self, y_M: Tensor, noise_MZ: Tensor) -> GraphBatch:
        """The generator's graph for classes and noise; the features have a gradient, the links have none."""
        x_MF = self.generator(y_M, noise_MZ)
        graph = nearest_neighbor_graph(x_MF, y_M, self.num_neighbors)
        collator = GraphCollator(
            [graph], layout={"sparse_features": False}, device=self.federation.device, dtype=self.dtype
        )
        batch = single(collator([0]))
        assert batch.plain is not None
        propagated_x = block_matmul(batch.adjacency, x_MF)
        return dataclasses.replace(batch, x=x_MF, propagated_x=propagated_x, plain=batch.plain.view(x_MF))

    def step(self, name: str, loss: Tensor) -> None:
        """A step of one of the optimizers."""
        optimizer = self.optimizers[name]
        optimizer.zero_grad()
        torch.autograd.backward(loss, inputs=[leaf for group in optimizer.param_groups for leaf in group["params"]])
        optimizer.step()

    def evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """The distilled model is the result; ``averaged/...`` is before distillation, ``trained/...`` before that."""
        averaged = Evaluation(payload=one_model(self.averaged, clients))
        return {**super().evaluations(clients), "averaged/": averaged}


def return_probabilities(batch: GraphBatch, num_steps: int) -> Tensor:
    """Probabilities that a random walk from each node of one client is back at it after 1..p steps, (N, p)."""
    walk_NN = torch.eye(len(batch.y), dtype=batch.adjacency.matrix.dtype, device=batch.y.device)
    back = [walk_NN[:, :0]]
    for _ in range(num_steps):
        walk_NN = batch.sum_neighbors(walk_NN / batch.degree.clamp(min=1)[:, None])
        back.append(walk_NN.diagonal()[:, None])
    return torch.cat(back, dim=1)


def taught(client: ClientModule, teachers: Parameters, batch: GraphBatch) -> Tensor:
    """Logits of every client's model on one graph, (C, M, K)."""

    def logits_of(parameters: dict[str, Tensor]) -> Tensor:
        return client.output(parameters, batch).logits

    if plain_alone(client.net):
        count = len(next(iter(teachers.values())))
        return torch.stack(
            [logits_of({name: tensor[row] for name, tensor in teachers.items()}) for row in range(count)]
        )
    logits: Tensor = torch.vmap(logits_of)(dict(teachers))
    return logits
