"""Small hypernetwork strategies, what they hear, and what they are set up from."""

import functools

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from fl_lightning import Callback, Payload
from fl_lightning.federation import Federation
from fl_lightning.round.payload import unflatten
from fl_lightning.strategies import FedSheafHN, SheafRidge
from fl_lightning.strategies.hypernetwork import SheafDiffusion
from fl_lightning.strategies.hypernetwork.base import Hypernetwork

CPU = torch.device("cpu")
#: Of both strategies of the sheaf.
SMALL = {"num_epochs": 2, "init_epochs": 2, "num_neighbors": 2, "hidden_channels": 8, "refresh_every": 2}
SHAPES = {"convs.0.weight": (2, 3), "convs.0.bias": (3,), "head.weight": (4, 3)}


class Linear(Hypernetwork):
    """θ_i = row i of E W with fixed embeddings E: the server step can be written down."""

    def __init__(self, *, server_lr: float = 0.1, num_server_steps: int = 1) -> None:
        super().__init__(num_epochs=2, num_server_steps=num_server_steps)
        self.server_lr = server_lr

    def build_generator(self, num_outputs: int) -> nn.Module:
        self.embeddings = torch.randn(self.federation.num_clients, 4)
        return nn.Linear(4, num_outputs, bias=False)

    def build_optimizer(self) -> Optimizer:
        return SGD(self.generator.parameters(), lr=self.server_lr)

    def generate(self, clients) -> Tensor:
        return self.generator(self.embeddings.to(self.dtype)[list(clients)])


def federation_of(num_clients: int, training=None, dtype=torch.float64) -> Federation:
    draw = torch.Generator().manual_seed(0)
    return Federation(
        num_clients=num_clients,
        num_features=2,
        training_clients=tuple(range(num_clients)) if training is None else training,
        parameters={n: torch.randn(shape, generator=draw, dtype=dtype) for n, shape in SHAPES.items()},
        seed=3,
        device=CPU,
    )


def updates(clients, strategy: Hypernetwork, seed: int = 1) -> Payload:
    draw = torch.Generator().manual_seed(seed)
    matrix = torch.randn(len(clients), 9, generator=draw, dtype=strategy.dtype)
    return Payload(clients=tuple(clients), parameters=unflatten(matrix, strategy.shapes))


def sheafhn(**settings) -> FedSheafHN:
    return FedSheafHN(**{**SMALL, "diffusion": functools.partial(SheafDiffusion, hidden_channels=4), **settings})


def ridge(**settings) -> SheafRidge:
    """With attention and an MLP, the heads local, and embeddings of the clients' own models."""
    diffusion = functools.partial(SheafDiffusion, hidden_channels=4, skip=True)
    deep = {"personal": ["head.*"], "embedding_model": "own", "attention": "qkv", "num_hidden_layers": 2}
    return SheafRidge(**{**SMALL, **deep, "masked_averaging": False, "diffusion": diffusion, **settings})


def heard(strategy: FedSheafHN, clients, seed: int = 5) -> FedSheafHN:
    """Let the given clients send their first update."""
    draw = torch.Generator().manual_seed(seed)
    embedding = torch.randn(len(clients), 3, generator=draw, dtype=strategy.dtype)
    first = updates(clients, strategy, seed)
    strategy.aggregate(
        strategy.initial_stages()[0],
        Payload(clients=tuple(clients), parameters=first.parameters, extras={"embedding": embedding}),
    )
    return strategy


class WatchEmbeddings(Callback):
    def __init__(self) -> None:
        self.sent: list[tuple[str, int, bool]] = []
        self.known: list[Tensor] = []

    def on_upload(self, trainer, stage, payload):
        self.sent.append((stage.name, trainer.run.round_idx, "embedding" in payload.extras))
        return payload

    def on_stage_end(self, trainer, stage, payload) -> None:
        self.known.append(trainer.run.strategy.embeddings.rows_CD.clone())
