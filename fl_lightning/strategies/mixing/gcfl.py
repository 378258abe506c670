"""GCFL: FedAvg in clusters of clients, which are cut in two if their members pull apart.

Xie, Ma, Xiong, Yang: "Federated Graph Classification over Non-IID Graphs", NeurIPS 2021. All clients begin in one
cluster. With Δ_i the update of client i and n_i its training examples, in every round and cluster I of more than two:

    if ‖mean_i Δ_i‖ < ε1 and max_i ‖Δ_i‖ > ε2: the minimum cut of the weights cos(Δ_i, Δ_j) + 1 parts I in two
    θ_I <- Σ_{i in I} n_i θ_i / Σ_{i in I} n_i, by the new clusters

Leaves the client: the shared parameters, nothing more; membership tells whose data are alike.

The paper's thresholds (0.05 and 0.1) are lengths, which depend on learning rate, steps and width: a step of Adam at
0.01 on 200,000 parameters moves by up to 4.5, and nothing is ever cut. Here they are shares of the first round's mean
length unless ``thresholds: absolute`` says otherwise. Departures: mean_i is a plain mean, as in released code; the
paper weights clients by their graphs. A client that is absent takes part in the decision with its last update, and
receives its cluster's model; no decision is made until all of a cluster's members have responded in it. An unseen
client trains the mean of all models, then has the cluster whose mean update its own is most like. Released code reports
each client's best test accuracy over all clusters it was ever in; here it is the present one's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fl_lightning.federation import Federation
from fl_lightning.relations.minimum_cut import minimum_cut
from fl_lightning.relations.similarity import cosine_similarity
from fl_lightning.round.payload import Payload, flatten
from fl_lightning.round.stage import Stage
from fl_lightning.strategies.base import server_dtype
from fl_lightning.strategies.mixing.base import Mixing, example_weights


@dataclass(kw_only=True, eq=False)
class GCFL(Mixing):
    """FedAvg in clusters that are determined by the directions of the updates.

    Args:
        mean_threshold: ε1: a cluster is cut only if its mean update is shorter, at least 0; 0 is FedAvg.
        max_threshold: ε2: a cluster is cut only if its longest update is longer, at least 0.
        thresholds: Both are shares of the first round's mean update norm (``relative``), or norms (``absolute``).
        warmup_rounds: Rounds in which nothing is cut.
    """

    mean_threshold: float = 0.4
    max_threshold: float = 0.4
    thresholds: Literal["relative", "absolute"] = "relative"
    warmup_rounds: int = 20

    personalized = True
    #: Whether no more than one cluster is cut in a round. (Without a type it is not a setting.)
    one_at_a_time = False
    server_state = ("server", "first_length", "num_rounds")

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_at_least(0, "mean_threshold", "max_threshold", "warmup_rounds")

    def setup(self, federation: Federation) -> None:
        """All training clients are in cluster 0, unseen clients in none (-1)."""
        super().setup(federation)
        first = next(iter(self.models.values()))
        training = list(federation.training_clients)
        size = sum(model[0].numel() for model in self.models.values())
        self.server = {
            "cluster": torch.full((federation.num_clients,), -1, device=federation.device),
            "responded": torch.zeros(federation.num_clients, dtype=torch.bool, device=federation.device),
            "update": first.new_zeros(federation.num_clients, size, dtype=server_dtype(first.dtype)),
        }
        self.server["cluster"][training] = 0
        self.first_length = 0.0
        self.num_rounds = 0

    def clusters(self) -> list[list[int]]:
        """The training clients of each cluster."""
        result: list[list[int]] = [[] for _ in range(int(self.server["cluster"].max()) + 1)]
        for client in self.federation.training_clients:
            result[int(self.server["cluster"][client])].append(client)
        return result

    def observe(self, upload: Payload) -> None:
        """Remember the clients' updates."""
        rows, dtype, received = list(upload.clients), self.server["update"].dtype, self.mixed_models(upload.clients)
        sent = {name: tensor.to(dtype) for name, tensor in upload.parameters.items()}
        before = {name: received.parameters[name].to(dtype) for name in sent}
        self.server["update"][rows] = flatten(sent) - flatten(before)
        self.server["responded"][rows] = True

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        """Cut, then average in the clusters; members that are absent receive their cluster's model, too."""
        if not upload.clients:
            return
        self.observe(upload)
        self.num_rounds += 1
        if not self.first_length:
            self.first_length = float(self.server["update"][list(upload.clients)].norm(dim=1).mean())
        if self.num_rounds > self.warmup_rounds:
            self.cut()
        super().aggregate(stage, upload)
        for members in self.clusters():
            present = [client for client in members if client in upload.clients]
            for model in self.models.values() if present else ():
                model[members] = model[present[0]].clone()

    def lengths(self, members: Sequence[int]) -> tuple[float, float]:
        """‖mean Δ‖ and max ‖Δ‖, in the units of the thresholds."""
        update_MP = self.server["update"][list(members)]
        unit = self.first_length if self.thresholds == "relative" and self.first_length else 1.0
        return float(update_MP.mean(dim=0).norm()) / unit, float(update_MP.norm(dim=1).max()) / unit

    def cut(self) -> None:
        """Cut every cluster whose members pull apart."""
        for members in self.clusters():
            if len(members) <= 2 or not self.server["responded"][members].all():
                continue
            mean, longest = self.lengths(members)
            if mean < self.mean_threshold and longest > self.max_threshold:
                apart = minimum_cut(self.similarity(members)).tolist()
                leaving = [client for client, leaves in zip(members, apart, strict=True) if leaves]
                self.server["cluster"][leaving] = int(self.server["cluster"].max()) + 1
                self.server["responded"][members] = False
                if self.one_at_a_time:
                    return

    def similarity(self, members: Sequence[int]) -> Tensor:
        """The similarity of members of a cluster, at least 0, (C, C): cos(Δ_i, Δ_j) + 1."""
        return cosine_similarity(self.server["update"][list(members)]) + 1

    def mixing_matrix(self, upload: Payload) -> Tensor:
        """W, (C, C): training shares in each client's cluster."""
        cluster_C = self.server["cluster"][list(upload.clients)]
        together_CC = (cluster_C[:, None] == cluster_C).double()
        weight_CC = together_CC * example_weights(upload).to(together_CC)
        weight_CC = torch.where(weight_CC.sum(dim=1, keepdim=True) > 0, weight_CC, together_CC)
        return weight_CC / weight_CC.sum(dim=1, keepdim=True)

    def onboard(self, stage: Stage, upload: Payload) -> None:
        """Assign unseen clients the cluster whose mean update is most similar to theirs."""
        if not upload.clients:
            return
        self.observe(upload)
        mean_KP = torch.stack([self.server["update"][members].mean(dim=0) for members in self.clusters()])
        cosine_CK = cosine_similarity(self.server["update"][list(upload.clients)], mean_KP)
        self.server["cluster"][list(upload.clients)] = cosine_CK.argmax(dim=1)

    def mixed_models(self, clients: Sequence[int]) -> Payload:
        """Each client's cluster's model; unseen clients without a cluster have the mean of all."""
        training = list(self.federation.training_clients)
        unseen_clients = [client for client in clients if client not in training]
        cluster_N1 = self.server["cluster"][unseen_clients][:, None]
        share_NT = ((cluster_N1 == self.server["cluster"][training]) | (cluster_N1 < 0)).double()
        share_NT = share_NT / share_NT.sum(dim=1, keepdim=True)
        return self.with_unseen_clients(super().mixed_models(clients), unseen_clients, share_NT)

    def metrics(self) -> Mapping[str, float]:
        """The number of clusters, and the values compared with the thresholds for the largest one."""
        clusters = self.clusters()
        mean, longest = self.lengths(max(clusters, key=len))
        values = {"server/clusters": len(clusters), "server/mean_update": mean, "server/longest_update": longest}
        return {**super().metrics(), **values}
