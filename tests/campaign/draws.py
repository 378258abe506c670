"""Random settings of every strategy, and models and data that go with them."""

import copy
import dataclasses
import functools
import inspect
import random
import typing
from pathlib import Path
from typing import Any, Literal

import torch
from strategies.test_contract import STRATEGIES, TINY
from torch.optim import SGD, Adam, AdamW

from fl_lightning import ClientModule, FederatedDataModule, Participation
from fl_lightning.data import (
    EdgeInsertion,
    EdgeRemoval,
    Examples,
    ExampleSource,
    FeatureNoise,
    LabelNoise,
    LabelScarcity,
    MissingFeatures,
    UnlabeledClients,
)
from fl_lightning.data.heterogeneity.base import Heterogeneity, with_heterogeneity
from fl_lightning.models import GCN, MLP, GraphSAGE, NormalizedGCN
from fl_lightning.relations import Complete, Ring
from fl_lightning.strategies import FedTAD, Oracle, Pooled, Strategy
from fl_lightning.strategies.mixing import aggregation
from fl_lightning.testing.federations import GROUPS

#: Nets that have running statistics.
NORMALIZED: tuple[list[Any], ...] = [NormalizedGCN], [functools.partial(MLP, batch_norm=True)]
#: A client's nets, by what it holds; several are given to the clients in turn.
NETS: dict[str, tuple[list[Any], ...]] = {
    "graphs": ([GCN], [GCN], NORMALIZED[0], [GraphSAGE], [GCN, functools.partial(GCN, num_layers=3)]),
    "examples": ([MLP], [MLP], NORMALIZED[1], [MLP, functools.partial(MLP, num_layers=3)]),
}
SIZES = (40, 9, 23, 6, 12, 17)
#: Values of settings whose type does not list them.
VALUES: dict[str, tuple[Any, ...]] = {
    # no trimmed mean: of two values that differ by rounding alone either may go, and with it its weight
    "aggregation": (None, aggregation.CoordinateMedian(), aggregation.NormClipping(), aggregation.Krum()),
    "common_share": (None, 0.0, 0.25, 1.0),
    "exchange_every": (1, 2),
    "mixture_lr": (None, 0.1),
    "num_epochs": (1, 2, 3),
    "num_finetune_epochs": (0, 1, 2),
    "num_head_epochs": (1, 2),
    "num_neighbors": (None, 1, 2),
    "num_pairs": (None, 2),
    "num_server_steps": (1, 3),
    "personal": ((), ("head.*",), ("*.0.*",)),
    "projection_fraction": (0.3, 1.0),
    "proximal_weight": (0.0, 0.1),
    "refresh_every": (None, 1, 2),
    "snap": (None, 0.9),
    "strength": (None, 0.5),
    "topology": (None, Complete(), Ring()),
    "validate_every": (None, 1, 2),
    "validate_personal": ((), ("head.*",), ("*.0.*", "head.*")),
}
OPTIMIZERS = (
    functools.partial(Adam, lr=0.05, weight_decay=5e-4),
    functools.partial(AdamW, lr=0.02),
    functools.partial(SGD, lr=0.05, momentum=0.9),
)
CASES = [(kind, on) for kind in STRATEGIES for on in ("graphs", "examples") if on == "graphs" or not kind.needs_graphs]


class Clouds(ExampleSource):
    """Six clients with points of two classes, one client with a single class; or with sums of their coordinates."""

    def __init__(self, *, regression: bool) -> None:
        self.regression = regression

    def load(self, root: Any, seed: int) -> Examples:
        draw = torch.Generator().manual_seed(seed)
        labels = [torch.arange(size) % (1 if client == 3 else 2) for client, size in enumerate(SIZES)]
        x = tuple(torch.randn(len(label_N), 3, generator=draw) + label_N[:, None] for label_N in labels)
        y = tuple(x_N3.sum(dim=1, keepdim=True) for x_N3 in x) if self.regression else tuple(labels)
        names = tuple(f"cloud-{client}" for client in range(len(SIZES)))
        relation_CC = torch.ones(len(SIZES), len(SIZES)).fill_diagonal_(0)
        return Examples(names=names, x=x, y=y, num_outputs=1 if self.regression else 2, relation_CC=relation_CC)


def drawn_settings(kind: type[Strategy], draw: random.Random) -> dict[str, Any]:
    """About half of a strategy's settings drawn, the others as for tiny federations or left out; it takes them all."""
    hints, settings = typing.get_type_hints(kind), dict[str, Any]()
    for name in (field.name for field in dataclasses.fields(kind) if field.init):
        choices: tuple[Any, ...] = VALUES.get(name, ())
        if hints[name] is bool:
            choices = (False, True)
        elif typing.get_origin(hints[name]) is Literal:
            choices = typing.get_args(hints[name])
        if choices and draw.random() < 0.55:
            settings[name] = draw.choice(choices)
        elif name in TINY:
            settings[name] = TINY[name]
    try:
        kind(**settings)
    except ValueError:
        return drawn_settings(kind, draw)
    if kind is Pooled:  # examples have no whole graph
        settings.pop("graph", None)
    if kind is FedTAD and isinstance(settings.get("aggregation"), aggregation.Krum):
        del settings["aggregation"]  # the student would begin as one of the teachers, at the kink of its distance to it
    return settings


def drawn_participation(draw: random.Random, num_rounds: int) -> dict[str, Any]:
    """Something of what participation can do to a round."""
    every = {
        "num_clients": draw.choice((2, 3)),
        "dropout_probability": 0.3,
        "straggler_probability": 0.5,
        "held_out_fraction": draw.choice((0.2, 0.4)),
        "max_failed_rounds": num_rounds,
    }
    return {name: value for name, value in every.items() if name == "max_failed_rounds" or draw.random() < 0.45}


def drawn_heterogeneity(
    draw: random.Random, *, on: str, regression: bool, unlabeled: bool = True
) -> list[Heterogeneity]:
    """Nothing in half of the cases, else one or two kinds that apply to what clients hold."""
    clients = draw.choice((0.3, 0.6, 1.0))
    kinds: list[Heterogeneity] = [
        FeatureNoise(draw.choice((0.5, 3.0)), clients),
        MissingFeatures(draw.choice((0.3, 1.0)), clients, draw.choice(("entries", "columns"))),
        LabelScarcity(draw.choice((0.5, 1.0)), clients),
    ]
    if unlabeled:
        kinds.append(UnlabeledClients(0.4))
    if not regression:
        kinds.append(LabelNoise(draw.choice((0.3, 1.0)), clients, draw.choice(("uniform", "pair"))))
    if on == "graphs":
        kinds.append(EdgeRemoval(draw.choice((0.4, 1.0)), clients))
        kinds.append(EdgeInsertion(0.2, clients, draw.choice(("random", "heterophilic"))))
    return draw.sample(kinds, draw.choice((0, 0, 1, 2)))


@dataclasses.dataclass(kw_only=True)
class Drawn:
    """All that a run is made of, drawn; models, strategies and participation are made anew for every run.

    Args:
        kind: The strategy's class.
        on: What clients hold, ``graphs`` or ``examples``.
        num_rounds: Length of the run.
        at_sites: Whether clients are at sites, which respond only if they have training labels.
        draw: Where the rest comes from.
    """

    kind: type[Strategy]
    on: str
    num_rounds: int
    at_sites: bool = False
    draw: dataclasses.InitVar[random.Random]

    def __post_init__(self, draw: random.Random) -> None:
        self.settings = drawn_settings(self.kind, draw)
        self.participates = drawn_participation(draw, self.num_rounds)
        self.regression = self.on == "examples" and not self.kind.needs_classes and draw.random() < 0.4
        self.optimizer, self.clip = draw.choice(OPTIMIZERS), draw.choice((None, None, 0.5))
        self.nets = draw.choice([nets for nets in NETS[self.on] if self.kind.takes_architectures or len(nets) == 1])
        self.running_statistics = draw.choice(("personal", "shared")) if self.nets in NORMALIZED else "personal"
        self.metrics = draw.choice(((), ("f1", "auroc"))) if not self.regression else ()
        batches = {"batch_size": draw.choice((None, 4, 7)), "steps_per_epoch": draw.choice((None, 1, 3))}
        passes = batches["batch_size"] is not None and batches["steps_per_epoch"] is None
        batches["drop_last"] = passes and (self.nets in NORMALIZED or draw.random() < 0.5)
        self.batches = batches if self.on == "examples" else {}
        seed, evaluate_every = draw.randrange(9), draw.choice((1, 1, 2, 3))
        self.given = {"num_rounds": self.num_rounds, "seed": seed, "evaluate_every": evaluate_every}
        self.heterogeneity = drawn_heterogeneity(
            draw, on=self.on, regression=self.regression, unlabeled=not self.at_sites
        )
        print(vars(self), [vars(kind) for kind in self.heterogeneity])  # shown where a test fails

    def participation(self) -> Participation:
        return Participation(**self.participates)

    def strategy(self) -> Strategy:
        if self.kind is Oracle:  # the groups, which no site tells of
            return Oracle(**self.settings, groups=GROUPS if self.on == "graphs" else (*GROUPS, 1))
        return self.kind(**copy.deepcopy(self.settings))

    def model(self) -> ClientModule:
        client_class = self.kind.client_class
        takes = inspect.signature(client_class).parameters
        own = self.kind.default_net or GCN
        dropout = 0.5 if self.on == "graphs" else 0.3
        nets = [functools.partial(net, hidden_channels=8, dropout=dropout) for net in self.nets]
        if self.on == "graphs" and own is not GCN:
            nets = [functools.partial(own, hidden_channels=8, dropout=dropout)]
        more = {"running_statistics": self.running_statistics, "metrics": list(self.metrics)}
        more = {name: value for name, value in more.items() if name in takes}
        return client_class(nets, self.optimizer, gradient_clip_val=self.clip, **more)

    def data(self, federation: FederatedDataModule, folder: Path) -> FederatedDataModule:
        """The graphs of the given federation, or examples, which are kept in the folder; some clients are changed."""
        if self.on == "graphs":
            data = copy.copy(federation)
            data._allocation = with_heterogeneity(self.heterogeneity, federation.allocation, seed=0)
            return data
        settings: dict[str, Any] = {"root": str(folder), "cache_dir": str(folder / "cache"), **self.batches}
        source = Clouds(regression=self.regression)
        data = FederatedDataModule(source, relation_graph=Ring(), heterogeneity=self.heterogeneity, **settings)
        data.setup()
        return data
