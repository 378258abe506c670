"""The hypernetwork family: a server network generates each client's parameters and learns from their training.

Shamsian, Navon, Fetaya, Chechik: "Personalized Federated Learning using Hypernetworks", ICML 2021. With θ_i generated
and θ̃_i trained from it, the server minimizes ½ Σ_i ‖stopgrad(θ̃_i) - θ_i‖², whose gradient at θ_i is -(θ̃_i - θ_i):
the descent direction. (FedSheafHN's eqs. 12 and 13 print the opposite sign, which would move away from the trained.)

Shape legend: C clients, P generated parameters of one client.
"""

import dataclasses
import warnings
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.federation import Federation
from fl_lightning.kernels.randomness import derive_key
from fl_lightning.memory import require, state_copies
from fl_lightning.relations.client_similarity import transfer
from fl_lightning.relations.similarity import softmax_mixing
from fl_lightning.round.payload import Payload, flatten, unflatten
from fl_lightning.round.stage import ClientOutput, Evaluation, Persistence, Stage
from fl_lightning.strategies.base import Strategy, server_dtype

#: The generator counts as collapsed if the distance of the generated models from their mean is below this share of the
#: distance of the trained models from theirs.
COLLAPSED_SPREAD = 0.01
#: Rounds of collapse in a row after which there is a warning.
COLLAPSED_ROUNDS = 10
#: Temperature of the softmax of embeddings' cosines that defines similar clients for ``server/transfer``.
KIN_TEMPERATURE = 10.0


@dataclass(kw_only=True, eq=False)
class Hypernetwork(Strategy):
    """Base class of the family.

    Args:
        personal: Shell-style patterns of parameters that are not generated and are kept local.
        num_server_steps: Optimizer steps on the generator per round, at least 1.
    """

    personal: Sequence[str] = ("head.*",)
    num_server_steps: int = 1

    #: Whether the squared distances are averaged over the clients that responded instead of summed.
    mean_distance: ClassVar[bool] = False
    server_state: ClassVar[tuple[str, ...]] = (
        "generator",
        "optimizer",
        "num_steps",
        "num_collapsed_rounds",
        "recorded_metrics",
    )

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_at_least(1, "num_server_steps")

    @abstractmethod
    def build_generator(self, num_outputs: int) -> nn.Module:
        """Create the server's modules; P = ``num_outputs``."""

    @abstractmethod
    def build_optimizer(self) -> Optimizer:
        """Create the server's optimizer over ``self.generator``."""

    @abstractmethod
    def generate(self, clients: Sequence[int]) -> Tensor:
        """Generated parameters of the given clients (C, P), differentiable."""

    def extra_losses(self) -> Sequence[Tensor]:
        """Scalars that the server also minimizes, from what :meth:`generate` computed last in training."""
        return ()

    def client_outputs(self, round_idx: int) -> Mapping[str, ClientOutput]:
        """What the clients send in addition to their update in this round."""
        return {}

    def setup(self, federation: Federation) -> None:
        """Create generator and optimizer, in the same way on every process."""
        super().setup(federation)
        personal = self.select(list(federation.parameters), self.personal)
        self.shapes = {name: p.shape for name, p in federation.parameters.items() if name not in personal}
        if not self.shapes:
            raise ValueError(
                f"{type(self).__name__} has nothing to generate: strategy.personal {list(self.personal)} keeps all "
                f"parameters local ({', '.join(personal)}). Give a net with more layers, or set strategy.personal to []"
            )
        self.num_steps = 0
        self.num_collapsed_rounds = 0
        self.recorded_metrics: dict[str, float] = {"server/update_norm": 0.0}
        self._generated_for_evaluation: tuple[tuple[int, ...], Tensor] | None = None
        with self.randomness("initialisation"):  # codespell:ignore initialisation
            self.generator = self.build_generator(sum(shape.numel() for shape in self.shapes.values()))
        self.dtype = server_dtype(next(iter(federation.parameters.values())).dtype)
        self.generator.to(federation.device, self.dtype)
        self._active = watch_activity(self.generator)
        try:
            self.optimizer = self.build_optimizer()
        except (TypeError, ValueError) as error:
            raise ValueError(f"strategy: the server's optimizer cannot be built: {error}") from error
        num_bytes = sum(parameter.nbytes for parameter in self.generator.parameters())
        require(
            (1 + state_copies(self.optimizer)) * num_bytes,
            f"the gradients and the optimizer's state of {type(self).__name__}'s generator",
            "set strategy.head to FactoredHead or ChunkedHead (PFedHN, Panacea), or generate fewer parameters "
            "(strategy.personal)",
            federation.device,
        )

    def persistence(self) -> Persistence:
        """The parameters that are not generated; all parameters if the trained models are the result."""
        names = tuple(name for name in self.federation.parameters if name not in self.shapes)
        return dataclasses.replace(super().persistence(), parameters=("*",) if self.predicts_trained() else names)

    def predicts_trained(self) -> bool:
        """Whether the result is that of the models as the clients have trained them, which then live on."""
        return True

    def stages(self, round_idx: int) -> Sequence[Stage]:
        """One exchange: receive generated parameters, train, send how far they moved."""
        training, client_outputs = self.training(round_idx), self.client_outputs(round_idx)
        return [dataclasses.replace(training, upload=tuple(self.shapes), as_update=True, client_outputs=client_outputs)]

    def configure(self, stage: Stage, clients: Sequence[int]) -> Payload | None:
        """Generate in training mode; the graph is kept for the server step that follows.

        The generator does not learn from unseen clients.
        """
        if not set(clients) <= set(self.federation.training_clients):
            return self.generate_for_evaluation(clients)
        self.generator.train()
        with self.randomness("server", self.num_steps):
            generated_CP = self.generate(clients)
        self._sent_to, self._generated = tuple(clients), generated_CP
        return self._as_payload(clients, generated_CP.detach())

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        """Move the generator so that it generates what the clients trained."""
        if upload.clients:
            self.server_step(upload)

    def server_step(self, upload: Payload) -> None:
        """Learn from the clients' updates, and record how well generated models fit the trained ones."""
        generated_CP = self._generated
        del self._generated
        row = {client: row for row, client in enumerate(self._sent_to)}
        rows = torch.tensor([row[client] for client in upload.clients], device=generated_CP.device)
        update_CP = flatten({name: upload.parameters[name] for name in self.shapes}).to(generated_CP.dtype)
        self.learn(upload, generated_CP, rows, update_CP)
        self._generated_for_evaluation = None
        self._observe(upload.clients, those_of(generated_CP.detach(), rows), update_CP)

    def learn(self, upload: Payload, generated_CP: Tensor, rows: Tensor, update_CP: Tensor) -> None:
        """``num_server_steps`` steps on ½ Σ ‖stopgrad(generated + update) - generated‖², and the extra losses.

        The target stays that of the first step, so that further steps approach it without passing it.

        Args:
            upload: The upload of the clients that responded.
            generated_CP: What was generated in this round, for all clients to which it was sent.
            rows: Its rows that belong to the clients that responded.
            update_CP: The updates of these clients.
        """
        whole = len(rows) == len(generated_CP)
        start_CP = those_of(generated_CP.detach(), rows)
        first_gradient_CP = -update_CP
        for step in range(self.num_server_steps):
            if step:
                with self.randomness("server", self.num_steps):
                    generated_CP = self.generate(self._sent_to)
            current_CP = generated_CP if whole else generated_CP.index_select(0, rows)
            gradient_CP = (current_CP.detach() - start_CP).add_(first_gradient_CP) if step else first_gradient_CP
            if self.mean_distance:
                gradient_CP = gradient_CP / len(rows)
            extra = self.extra_losses()
            self.optimizer.zero_grad()
            torch.autograd.backward([current_CP, *extra], [gradient_CP, *(None for _ in extra)])
            self.optimizer.step()
            self.num_steps += 1

    @torch.no_grad()
    def _observe(self, clients: Sequence[int], start_CP: Tensor, update_CP: Tensor) -> None:
        """Record the round's metrics; warn if all clients get the same model, round after round."""
        self.recorded_metrics = {"server/update_norm": float(update_CP.norm(dim=1).mean())}
        if len(clients) > 1:
            after_CP = flatten(self.generate_for_evaluation(clients).parameters).to(update_CP)
            self.recorded_metrics |= fit(start_CP, update_CP, after_CP)
            if (similarity_CC := self.client_similarity(clients)) is not None:
                similar_CC, weight_C = softmax_mixing(similarity_CC, KIN_TEMPERATURE), update_CP.new_ones(len(clients))
                gram_CC = update_CP @ update_CP.T
                transferred = transfer(similar_CC.to(gram_CC), weight_C / len(clients), gram_CC)
                self.recorded_metrics["server/transfer"] = float(transferred)
            self.recorded_metrics |= self.inspection()
            is_collapsed = self.recorded_metrics["server/spread"] < COLLAPSED_SPREAD
            self.num_collapsed_rounds = self.num_collapsed_rounds + 1 if is_collapsed else 0
        if self.num_collapsed_rounds == COLLAPSED_ROUNDS:
            self.num_collapsed_rounds += 1  # once
            warnings.warn(
                f"{type(self).__name__}: for {COLLAPSED_ROUNDS} rounds every client has been generated the same model "
                f"(server/spread {self.recorded_metrics['server/spread']:.1e}), so nothing is personal "
                f"except what clients train: "
                "lower the server's learning rate, or compare the embeddings that the generator is given "
                f"({self.metrics_in_words()})",
                stacklevel=2,
            )

    def metrics_in_words(self) -> str:
        """The metrics that may explain why a generator has collapsed."""
        transferred = {
            name: value for name, value in self.recorded_metrics.items() if name.startswith("server/generator_")
        }
        return ", ".join(f"{name} {value:.2g}" for name, value in transferred.items()) or "server/..."

    def client_similarity(self, clients: Sequence[int]) -> Tensor | None:
        """The generator's similarities of clients, cosines (C, C); None if it has no embeddings of them."""
        similarity_TT = self.matrices().get("embedding")
        if similarity_TT is None:
            return None
        index = {client: row for row, client in enumerate(self.federation.training_clients)}
        rows = [index[client] for client in clients]
        return similarity_TT[rows][:, rows]

    def inspection(self) -> Mapping[str, float]:
        """Metrics of the generator's last forward: the share of active ReLU units."""
        shares = [float(share) for share in self._active.values()]
        return {"server/generator_active_units": sum(shares) / len(shares)} if shares else {}

    def generate_for_evaluation(self, clients: Sequence[int]) -> Payload:
        """Generated parameters without dropout and without a graph; kept until the generator changes."""
        known = self._generated_for_evaluation
        if known is None or known[0] != tuple(clients):
            self.generator.eval()
            with torch.no_grad():
                known = self._generated_for_evaluation = tuple(clients), self.generate(clients)
        return self._as_payload(clients, known[1])

    def evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """The locally trained models are the result; the generated ones are logged as ``gen/...``."""
        return {**super().evaluations(clients), "gen/": Evaluation(payload=self.generate_for_evaluation(clients))}

    def any_models(self, clients: Sequence[int]) -> Payload:
        """Names and shapes of generated models, even if none can be generated yet; all zero."""
        num_parameters = sum(shape.numel() for shape in self.shapes.values())
        return self._as_payload(clients, torch.zeros(len(clients), num_parameters))

    def metrics(self) -> Mapping[str, float]:
        """Metrics of the last round, over the clients that responded.

        ``update_norm``: mean norm of their updates; ``spread``: distance of the models now generated for them from
        their mean, as a share of that of the trained models (root mean square; 0: all the same, 1: as far apart as
        trained); ``captured_share``: 1 - Σ ‖trained - generated‖² / Σ ‖update‖²; ``explained``:
        1 - Σ ‖trained - generated‖² / Σ ‖trained - mean‖²; ``transfer``: how much better a client's update is predicted
        from clients with similar embeddings in the generator than from all others
        (``relations/client_similarity.py``); ``generator_...``: the generator's internals.
        """
        return self.recorded_metrics

    def _as_payload(self, clients: Sequence[int], generated_CP: Tensor) -> Payload:
        return Payload(clients=tuple(clients), parameters=unflatten(generated_CP, self.shapes))

    @contextmanager
    def randomness(self, *key: int | str) -> Iterator[None]:
        """Seed torch's generator for the server's own draws, and restore it afterward."""
        devices = [self.federation.device] if self.federation.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            torch.manual_seed(derive_key(self.federation.seed, *key))
            yield

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state, and discard what was generated from another state."""
        super().load_state_dict(state)
        self._generated_for_evaluation = None


def those_of(sent_CP: Tensor, rows: Tensor) -> Tensor:
    """The rows of the clients that responded, in order, without a copy if all did."""
    return sent_CP if len(rows) == len(sent_CP) else sent_CP[rows]


def fit(start_CP: Tensor, update_CP: Tensor, after_CP: Tensor) -> dict[str, float]:
    """How well models generated after the server step fit the trained models, of two clients or more."""
    trained_CP = start_CP + update_CP
    trained_spread = _square(trained_CP - trained_CP.mean(dim=0))
    spread = _square(after_CP - after_CP.mean(dim=0))
    error = _square(trained_CP.sub_(after_CP))
    tiny = torch.finfo(update_CP.dtype).tiny
    return {
        "server/spread": (spread / max(trained_spread, tiny)) ** 0.5,
        "server/captured_share": 1 - error / max(_square(update_CP), tiny),
        "server/explained": 1 - error / max(trained_spread, tiny),
    }


def _square(x_CP: Tensor) -> float:
    """Sum of the squares, in one pass."""
    return float(torch.linalg.vector_norm(x_CP, dim=1).double().square().sum())


def watch_activity(generator: nn.Module) -> dict[str, Tensor]:
    """The share of active units of each ReLU in the last forward, by name; a dictionary that forwards fill in."""
    active: dict[str, Tensor] = {}
    for name, module in generator.named_modules():
        if isinstance(module, nn.ReLU | nn.LeakyReLU):

            def note(_: nn.Module, __: Any, output: Tensor, name: str = name) -> None:
                active[name] = (output.detach() > 0).double().mean()

            module.register_forward_hook(note)
    return active
