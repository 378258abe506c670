"""GCFL+: clusters as in GCFL, cut by the similarity of the members' update norms over the last rounds.

Xie, Ma, Xiong, Yang: "Federated Graph Classification over Non-IID Graphs", NeurIPS 2021. With s_i the lengths ‖Δ_i‖ of
the last L rounds and D_ij = DTW(s_i, s_j), the cut's weights are max(D) - D_ij, which depend less on one round than the
updates' directions do. DTW is the square root of the least sum of (a - b)² along a monotone matching of two series.

Leaves the client: the shared parameters, nothing more.

As in released code a cut needs L lengths of every training client, and clears all series: one cluster is cut at a
time, and L rounds pass before the next. The series is of updates (the paper), not of last gradients (released code).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.federation import Federation
from fl_lightning.relations.time_warping import time_warping
from fl_lightning.round.payload import Payload
from fl_lightning.strategies.mixing.gcfl import GCFL


@dataclass(kw_only=True, eq=False)
class GCFLPlus(GCFL):
    """FedAvg in clusters that are determined by the norms of the updates over time.

    Args:
        series_length: L, at least 2.
        standardize: Divide each series by its standard deviation first.
    """

    series_length: int = 5
    standardize: bool = False

    one_at_a_time = True

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_at_least(2, "series_length")

    def setup(self, federation: Federation) -> None:
        """No lengths yet: -1."""
        super().setup(federation)
        update = self.server["update"]
        self.server["series"] = update.new_full((len(update), self.series_length), -1.0)

    def observe(self, upload: Payload) -> None:
        """Remember the clients' updates, and their lengths at the end of the series."""
        super().observe(upload)
        rows, series = list(upload.clients), self.server["series"]
        length_C1 = self.server["update"][rows].norm(dim=1, keepdim=True)
        series[rows] = torch.cat([series[rows, 1:], length_C1], dim=1)

    def cut(self) -> None:
        """Cut the first cluster whose members pull apart, if all series are complete; then clear the series."""
        before = int(self.server["cluster"].max())
        if (self.server["series"][list(self.federation.training_clients)] >= 0).all():
            super().cut()
        if int(self.server["cluster"].max()) > before:
            self.server["series"].fill_(-1.0)

    def similarity(self, members: Sequence[int]) -> Tensor:
        """The similarity of the members' series, (C, C): max(D) - D."""
        series_CL = self.server["series"][list(members)]
        if self.standardize:
            series_CL = series_CL / series_CL.std(dim=1, keepdim=True).clamp(min=1e-12)
        distance_CC = time_warping(series_CL)
        return distance_CC.max() - distance_CC
