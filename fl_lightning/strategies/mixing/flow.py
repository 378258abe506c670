"""Flow: every example is routed, layer by layer, through the global model or a local copy of it.

Panchal, Choudhary, Parikh, Zhang, Guan: "Flow: Per-Instance Personalized Federated Learning Through Dynamic Routing",
NeurIPS 2023, Algorithm 1. With w the global model, ψ a policy that gives each example x and layer l the probability
q_l(x) of the global layer, and B_1, B_2 halves of a client's training examples, in each round

    l <- w;  then steps on f(l; B_1)
    steps on f(w; B_2), and for ψ alone on f(mixed; B_2) + γ R,   R = mean of -log(q_l(x)² + ε)
    server   w <- Σ_i ω_i w_i,  ψ <- Σ_i ω_i ψ_i

``mixed`` sends q_l g + (1 - q_l) h on, g and h the two layers' outputs before the activation; predictions take the more
probable one. Both terms of the second line are one step, for neither sends gradient into what the other trains. For
nodes the policy reads a convolution of the features (the paper has no graphs).

R pulls toward the global model, as in the paper; in the released code the direction depends on the data set. Halves of
mini-batches are drawn again in every step. A round has twice FedAvg's steps, half of them through both models and the
policy. Clients that did not respond in the last round, and unseen clients, are evaluated ``fresh``: l and ψ are trained
on a copy of the current w, at once.

Leaves the client: its global model, its policy, and how many of its examples go which way.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import SGD

from fl_lightning.batches.base import Batch
from fl_lightning.federation import Federation
from fl_lightning.kernels.randomness import derive_key
from fl_lightning.models.routed import Routed, policy_shares, run_route, training_mean
from fl_lightning.round.client import ClientModule
from fl_lightning.round.context import Context, Parameters
from fl_lightning.round.payload import Payload
from fl_lightning.round.program import LocalProgram
from fl_lightning.round.stage import ClientOutput, Evaluation, Stage
from fl_lightning.strategies.mixing.fedavg import FedAvg
from fl_lightning.strategies.mixing.routing import copy_once, half, local_loss, shared_output, shared_routes
from fl_lightning.tasks import Task

#: ε in R.
SMALLEST = 1e-6


@dataclass(kw_only=True, eq=False)
class Flow(FedAvg):
    """A global model, local copies of it, and a policy that chooses between them.

    Args:
        num_epochs: Local epochs on the local copy, and as many on the global model and the policy.
        reset_optimizer: Reset the clients' optimizers every round, like the local copy.
        route_weight: γ, at least 0.
        policy_channels: Width of the policy's hidden layer, at least 1.
    """

    reset_optimizer: bool = True
    route_weight: float = 0.001
    policy_channels: int = 64
    personal: Sequence[str] = field(default=("*.local.*",), init=False)
    blend: bool = field(default=False, init=False)

    #: SGD, as in the paper's experiments: with Adam, a local copy soon memorizes its few examples.
    examples_optimizer = functools.partial(SGD, lr=0.01)
    takes_statistics = False
    own_net = True
    server_state = ("responded", "share")

    def check_task(self, task: Task) -> None:
        """Also refuse examples that have nodes in common, as each example's nodes go the example's way."""
        super().check_task(task)
        if task.shares_nodes:
            raise ValueError(
                f"Flow is for examples with nodes of their own, but here the examples are {task.examples}, which have "
                "nodes in common: choose a source of nodes, graphs or rows, or another strategy"
            )

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_at_least(0, "route_weight")
        self.require_at_least(1, "policy_channels")

    def build_net(self, net: nn.Module) -> nn.Module:
        """Two copies of each layer, and the policy."""
        return Routed(net, hidden_channels=self.policy_channels)

    def setup(self, federation: Federation) -> None:
        """Start from the common model, with halves of its own for every client."""
        super().setup(federation)
        names = federation.client_names or tuple(map(str, range(federation.num_clients)))
        keys = [derive_key(federation.seed, "halves", name) for name in names]
        self.half_C = torch.tensor(keys, device=federation.device)
        self.responded: list[int] = []
        self.share = float("nan")

    def predicts_trained(self) -> bool:
        """True: models that were trained together are evaluated together."""
        return True

    def stages(self, round_idx: int) -> Sequence[Stage]:
        """The local copy's turn, then that of the global model and the policy."""
        (whole,) = super().stages(round_idx)
        local = dataclasses.replace(whole, name="local", trained=tuple(self.personal), upload=(), client_outputs={})
        local = dataclasses.replace(local, objective=local_loss, program=LocalProgram(init=copy_once))
        route = dataclasses.replace(whole, trained=self.body, objective=self.routed_loss, reset_optimizer=False)
        return [local, route]

    def onboarding_stages(self) -> Sequence[Stage]:
        """Unseen clients receive the model and make a local copy."""
        return self.stages(0)[:1]

    def client_outputs(self) -> Mapping[str, ClientOutput]:
        """How many examples go which way."""
        return {"shared_routes": shared_routes}

    def configure(self, stage: Stage, clients: Sequence[int]) -> Payload:
        """The model and the policy as a round begins; the key of each client's halves in both stages."""
        extras = {"half": self.half_C[list(clients)]}
        if stage.name != "local":
            return Payload(clients=tuple(clients), extras=extras)
        return dataclasses.replace(self.mixed_models(clients), extras=extras)

    def routed_loss(self, client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
        """f(w) + f(mixed) + γ R on the second half, the mixed model's layers held constant."""
        second = half(batch, context, 1)
        fixed = {name: p if name.startswith("policy.") else p.detach() for name, p in parameters.items()}
        mixed, shared = (
            run_route(client.net, *each) for each in ((fixed, second, "soft"), (parameters, second, "shared"))
        )
        away_N = -(policy_shares(client.net, parameters, second).square() + SMALLEST).log().mean(dim=-1)
        losses = client.loss(shared, second) + client.loss(mixed, second)
        return losses + self.route_weight * training_mean(away_N, second)

    def fresh_loss(self, client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
        """Both stages' losses, of which the tuning trains the local copy and the policy."""
        return local_loss(client, parameters, batch, context) + self.routed_loss(client, parameters, batch, context)

    routed_loss.takes_stacks = fresh_loss.takes_stacks = True  # type: ignore[attr-defined]

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        """Average, and record which clients have responded."""
        if stage.name == "local" or not upload.clients:
            return
        super().aggregate(stage, upload)
        self.responded = list(upload.clients)
        self.share = float(upload.extras["shared_routes"].mean())

    def model_for(self, clients: Sequence[int]) -> None:
        """None: models that were trained together are evaluated together."""
        return

    def evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """Each client's routed model is the result.

        ``global/...`` is w, ``fresh/...`` what an unseen client makes of it.
        """
        local = self.stages(0)[0]
        sent = self.configure(local, clients)
        tuning = dataclasses.replace(local, trained=("*.local.*", "policy.*"), objective=self.fresh_loss)
        fresh = Evaluation(payload=sent, tuning=tuning)
        others = {client: fresh for client in clients if client not in self.responded}
        return {
            "": Evaluation(others=others),
            "global/": Evaluation(payload=sent, output=shared_output),
            "fresh/": fresh,
        }

    def metrics(self) -> Mapping[str, float]:
        """The share of the last round's training examples and layers that use the global model.

        A share of 0 or 1 means that the policy is stuck.
        """
        return {} if self.share != self.share else {"server/shared_routes": self.share}
