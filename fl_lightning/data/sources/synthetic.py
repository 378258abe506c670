"""Synthetic federations whose relation graph shows which clients are similar: on a circle, or in hidden groups.

Those on the circle go back to the toy data of Xu, He, Lee, Wang, Wang, "Graph-Relational Domain Adaptation", ICLR 2022
(GRDA).
Shape legend: C clients, N examples of one client.
"""

import math
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from fl_lightning.data.settings import check_count, check_number, check_size
from fl_lightning.data.sources.array_file import read_arrays
from fl_lightning.data.sources.examples import Examples, ExampleSource, client_names, split_by_client
from fl_lightning.kernels.randomness import generator


class FL60(ExampleSource):
    """Two Gaussian classes on each client's axis, and a relation graph that joins near axes; generated.

    Client t draws a unit vector u_t = (a_t, b_t) uniformly on the circle, with the angle omega_t. Its classes are
    N(omega_t/pi u_t, noise^2 I) for class 1 and N(-omega_t/pi u_t, noise^2 I) for class 0, in equal numbers; clients
    u and v are related with probability (1 + a_u a_v + b_u b_v) / 2, one draw a pair.

    The paper prints omega = arcsin(b/a), which is undefined where abs(b) > abs(a). Here omega is the vector's angle in
    [0, 2 pi), as in GRDA's published data: the side of class 1 turns with the vector, so that near clients have near
    boundaries and sides, and only the distance of the classes jumps, at angle 0. With angles in (-pi, pi] near clients
    above and below the first axis would have opposite labels. Under the paper's unit noise no classifier exceeds
    about 80 % on average over clients, so its 100 % are not of this formula; probably they are of
    ``GRDAToy("DG-60")``: it has the same sizes, and a line through the origin separates every client's classes.

    Args:
        num_clients: Clients.
        num_examples: Examples of each client.
        noise: Standard deviation of a class in every direction; the paper has 1.

    Source: Lin, Lan, He, Li, "Graph-Relational Federated Learning: Enhanced Personalization and Robustness" (Panacea),
    section IV.
    """

    def __init__(self, num_clients: int = 60, num_examples: int = 100, noise: float = 1.0) -> None:
        check_count("num_clients", num_clients)
        check_count("num_examples", num_examples)
        check_number("noise", noise)
        check_size(num_clients * max(num_clients, 2 * num_examples), "num_clients", "num_examples")
        self.num_clients = num_clients
        self.num_examples = num_examples
        self.noise = noise

    def load(self, root: Path, seed: int) -> Examples:  # noqa: D102
        draw = generator(seed, "FL-60")
        angle_C = torch.rand(self.num_clients, generator=draw) * 2 * math.pi
        unit_C2 = torch.stack([angle_C.cos(), angle_C.sin()], dim=1)
        y_N = torch.arange(self.num_examples) % 2
        mean_C2 = unit_C2 * (angle_C / math.pi)[:, None]
        noise_CN2 = torch.randn(self.num_clients, self.num_examples, 2, generator=draw) * self.noise
        x_CN2 = mean_C2[:, None] * (2 * y_N - 1)[None, :, None] + noise_CN2

        probability_CC = (1 + unit_C2 @ unit_C2.T) / 2
        above_CC = (torch.rand(self.num_clients, self.num_clients, generator=draw) < probability_CC).float().triu(1)
        return Examples(
            names=client_names("client", self.num_clients),
            x=tuple(x_CN2),
            y=tuple(y_N.expand(self.num_clients, -1)),
            num_outputs=2,
            relation_CC=above_CC + above_CC.T,
        )


class PlantedRelations(ExampleSource):
    """Clients in hidden groups whose relation graph shows the groups, and whose tasks follow them to a given degree.

    A client's label is the side of a plane through the origin on which an example lies. The plane's normal is
    w_t = strength^(1/2) g + (1 - strength)^(1/2) o with the group's unit normal g and one of the client's own, o: at
    strength 0 the relations carry no information about the tasks, at 1 related clients have the same one. Two clients
    of a group are related with probability ``within``, two of different groups with probability ``between``.

    Args:
        strength: Share of a task that the group decides, in [0, 1].
        num_clients: Clients, given to the groups in turn.
        num_groups: Groups.
        num_examples: Examples of each client.
        num_features: Width of an example, standard normal numbers.
        within: Probability of a relation inside a group.
        between: Probability of one between groups.
        noise: Share of the labels that are the wrong ones, in [0, 1].
    """

    def __init__(
        self,
        strength: float = 0.5,
        num_clients: int = 60,
        num_groups: int = 6,
        num_examples: int = 60,
        num_features: int = 20,
        within: float = 0.6,
        between: float = 0.02,
        noise: float = 0.05,
    ) -> None:
        shares = {"strength": strength, "within": within, "between": between, "noise": noise}
        for name, share in shares.items():
            check_number(name, share, most=1)
        for name, count in {
            "num_groups": num_groups,
            "num_examples": num_examples,
            "num_features": num_features,
        }.items():
            check_count(name, count)
        check_count("num_clients", num_clients, least=num_groups)
        check_size(num_clients * max(num_clients, num_features * num_examples), "num_clients", "num_examples")
        self.strength = strength
        self.num_clients = num_clients
        self.num_groups = num_groups
        self.num_examples = num_examples
        self.num_features = num_features
        self.within = within
        self.between = between
        self.noise = noise

    def load(self, root: Path, seed: int) -> Examples:  # noqa: D102
        draw = generator(seed, "planted relations")
        group_C = torch.arange(self.num_clients) % self.num_groups
        shared_GF, own_CF = (
            torch.nn.functional.normalize(torch.randn(count, self.num_features, generator=draw), dim=1)
            for count in (self.num_groups, self.num_clients)
        )
        normal_CF = math.sqrt(self.strength) * shared_GF[group_C] + math.sqrt(1 - self.strength) * own_CF
        x_CNF = torch.randn(self.num_clients, self.num_examples, self.num_features, generator=draw)
        wrong_CN = torch.rand(self.num_clients, self.num_examples, generator=draw) < self.noise
        y_CN = ((x_CNF @ normal_CF[:, :, None]).squeeze(2) > 0) ^ wrong_CN

        chance_CC = torch.where(group_C[:, None] == group_C, self.within, self.between)
        above_CC = (torch.rand(self.num_clients, self.num_clients, generator=draw) < chance_CC).float().triu(1)
        return Examples(
            names=client_names("client", self.num_clients),
            x=tuple(x_CNF),
            y=tuple(y_CN.long()),
            num_outputs=2,
            relation_CC=above_CC + above_CC.T,
        )


class GRDAToy(ExampleSource):
    """The published toy data of GRDA: two classes in the plane, 100 examples a client, and the graph of the clients.

    Class means lie on the client's axis at a distance that grows with its angle in [0, 2 pi); the classes have a
    standard deviation of about 0.47. The graph has 56 (DG-15) or 545 (DG-60) edges.

    File: ``grda_toy/<name>.npz`` with ``data`` (M, 2), ``label`` (M,) in {0, 1}, ``domain`` (M,) the client of each
    example, ``A`` (C, C) the graph.

    Args:
        name: DG-15 or DG-60, of 15 or 60 clients.
    """

    def __init__(self, name: Literal["DG-15", "DG-60"] = "DG-60") -> None:
        if name not in ("DG-15", "DG-60"):
            raise ValueError(f"name={name!r} is not a data set of GRDAToy; use 'DG-15' or 'DG-60'.")
        self.name = name

    def load(self, root: Path, seed: int) -> Examples:  # noqa: D102
        layout = {
            "data": "(M, 2) points",
            "label": "(M,) classes 0 and 1",
            "domain": "(M,) client of each point",
            "A": "(C, C) graph of the clients",
        }
        arrays = read_arrays(root, [f"grda_toy/{self.name}.npz"], layout, whole=("label", "domain"))
        clients = split_by_client(torch.from_numpy(arrays["domain"]))
        x = torch.from_numpy(arrays["data"].astype(np.float32))
        y = torch.from_numpy(arrays["label"])
        return Examples(
            names=client_names("domain", len(clients)),
            x=tuple(x[idx_N] for idx_N in clients),
            y=tuple(y[idx_N] for idx_N in clients),
            num_outputs=2,
            relation_CC=torch.from_numpy(arrays["A"].astype(np.float32)),
        )
