"""Robust aggregation: rules that replace θ <- W θ if some clients may be malicious.

Yin, Chen, Ramchandran, Bartlett: "Byzantine-Robust Distributed Learning: Toward Optimal Statistical Rates", ICML 2018
(median and trimmed mean of each coordinate). Blanchard, El Mhamdi, Guerraoui, Stainer: "Machine Learning with
Adversaries: Byzantine Tolerant Gradient Descent", NeurIPS 2017 (Krum, multi-Krum). Sun, Kairouz, Suresh, McMahan: "Can
You Really Backdoor Federated Learning?", 2019 (norm clipping).

They were published for clients of equal weight. Here every row of W has weights of its own: with equal weights each
rule is the published one, and clients with weight 0 in a row of W do not count in that row.

Shape legend: R rows of W (1 for one common model, else C), C clients that responded, P parameters of one client.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from fl_lightning.counts import Counted

#: How many values are sorted at a time (which needs some ten times as many bytes in addition to the parameters).
CHUNK_NUMBERS = 4 * 2**20
#: Tolerance in comparisons of sums of weights.
TOLERANCE = 1e-9


class Aggregation(Counted, ABC):
    """Computes new models from the clients' parameters, as a pure function without state."""

    @abstractmethod
    def __call__(self, mixing_RC: Tensor, parameters_CP: Tensor, received_CP: Tensor) -> Tensor:
        """Aggregate.

        Args:
            mixing_RC: W; its rows sum to one and have no negative entry.
            parameters_CP: What the clients sent, finite.
            received_CP: What they had received.

        Returns:
            The new models (R, P), in the type of the parameters.
        """

    @property
    def fewest_clients(self) -> int:
        """The number of clients that the rule needs."""
        return 1

    def check(self, num_clients: int) -> None:
        """Check the number of clients.

        Raises:
            ValueError: There are too few clients for the rule.
        """
        return


class CoordinateMedian(Aggregation):
    """The W-weighted median of each coordinate.

    Clients with less than half of the weight cannot move it outside the range of the others.

    Example:
        >>> median = CoordinateMedian()
        >>> parameters = torch.tensor([[1.0], [2.0], [900.0]])
        >>> median(torch.tensor([[0.4, 0.3, 0.3]]), parameters, torch.zeros(3, 1))
        tensor([[2.]])
    """

    def __call__(self, mixing_RC: Tensor, parameters_CP: Tensor, received_CP: Tensor) -> Tensor:
        """The value with half of the weight below and half above; the mean of the middle values if there are two."""
        weights_RC = mixing_RC.to(parameters_CP.device, torch.float64)
        return torch.cat([weighted_median(weights_RC, part_CP) for part_CP in _in_columns(parameters_CP)], dim=1)


class TrimmedMean(Aggregation):
    """The W-weighted mean of each coordinate without its largest and its smallest values.

    Of the m clients with a positive weight in a row of W, ceil(``trim_fraction`` m) are removed at either end: a share
    of malicious clients up to ``trim_fraction`` is removed entirely; at least one or two middle ones stay. The weights
    of those that stay are scaled to sum to one. Equal values are ranked by weight, so that the order of the clients
    does not matter.

    Args:
        trim_fraction: Share of the clients that is removed at each end, in [0, 0.5); 0 is the plain mean.

    Example:
        >>> mean = TrimmedMean(trim_fraction=0.25)
        >>> parameters = torch.tensor([[-900.0], [1.0], [3.0], [900.0]])
        >>> mean(torch.full((1, 4), 0.25), parameters, torch.zeros(4, 1))
        tensor([[2.]])
    """

    def __init__(self, *, trim_fraction: float = 0.1) -> None:
        if not 0 <= trim_fraction < 0.5:
            raise ValueError(
                f"TrimmedMean.trim_fraction is the share removed at each end and must be in [0, 0.5), got "
                f"{trim_fraction}"
            )
        self.trim_fraction = trim_fraction

    def __call__(self, mixing_RC: Tensor, parameters_CP: Tensor, received_CP: Tensor) -> Tensor:
        """Rank, trim, average."""
        weights_RC = mixing_RC.to(parameters_CP.device, torch.float64)
        parts = [trimmed_mean(weights_RC, part_CP, self.trim_fraction) for part_CP in _in_columns(parameters_CP)]
        return torch.cat(parts, dim=1)


class Krum(Aggregation):
    """W restricted to the clients whose parameters are nearest to those of their C - ``num_malicious`` - 2 neighbors.

    A row of W without weight on the chosen clients averages them. The first of equally near clients is chosen.

    Args:
        num_malicious: f, the malicious clients to withstand; a round needs at least 2 f + 3 clients.
        num_selected: How many clients are chosen; more than one is multi-Krum.
    """

    def __init__(self, *, num_malicious: int = 1, num_selected: int = 1) -> None:
        if num_malicious < 0:
            raise ValueError(f"Krum.num_malicious must not be negative, got {num_malicious}")
        if num_selected < 1:
            raise ValueError(f"Krum.num_selected must be at least 1, got {num_selected}")
        self.num_malicious = num_malicious
        self.num_selected = num_selected

    @property
    def fewest_clients(self) -> int:
        """2 f + 3, or f more than the chosen ones."""
        return self.num_malicious + max(self.num_malicious + 3, self.num_selected)

    def check(self, num_clients: int) -> None:
        """Refuse fewer than 2 f + 3 clients, and choosing more clients than are benign."""
        if num_clients < 2 * self.num_malicious + 3:
            most = (num_clients - 3) // 2
            remedy = f"lower it to at most {most}, or let" if most >= 0 else "let"
            raise ValueError(
                f"Krum.num_malicious={self.num_malicious} needs at least {2 * self.num_malicious + 3} clients in every "
                f"round, but there are {num_clients}: {remedy} more clients take part (trainer.participation)"
            )
        if self.num_selected > num_clients - self.num_malicious:
            raise ValueError(
                f"Krum.num_selected={self.num_selected} of {num_clients} clients would choose malicious ones: lower it "
                f"to at most {num_clients - self.num_malicious}"
            )

    def __call__(self, mixing_RC: Tensor, parameters_CP: Tensor, received_CP: Tensor) -> Tensor:
        """Choose, then mix those chosen."""
        self.check(len(parameters_CP))
        scores_C = krum_scores(parameters_CP, self.num_malicious)
        chosen = scores_C.argsort(stable=True)[: self.num_selected].sort().values
        weights_RS = mixing_RC.to(parameters_CP)[:, chosen]
        mass_R1 = weights_RS.sum(dim=1, keepdim=True)
        weights_RS = torch.where(mass_R1 > 0, weights_RS / mass_R1, 1 / len(chosen))
        return weights_RS @ parameters_CP[chosen]


class NormClipping(Aggregation):
    """θ <- W θ, after the norm of each client's update (all parameters together) was clipped.

    Args:
        max_norm: The largest Euclidean norm, positive; None for the median of the round.
    """

    def __init__(self, *, max_norm: float | None = None) -> None:
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"NormClipping.max_norm must be positive, or null for the round's median, got {max_norm}")
        self.max_norm = max_norm

    def __call__(self, mixing_RC: Tensor, parameters_CP: Tensor, received_CP: Tensor) -> Tensor:
        """Clip, then mix."""
        update_CP = parameters_CP - received_CP
        norm_C = torch.linalg.vector_norm(update_CP, dim=1, dtype=torch.float64)
        limit = norm_C.quantile(0.5) if self.max_norm is None else norm_C.new_tensor(self.max_norm)
        is_long_C = norm_C > limit
        factor_C = torch.where(is_long_C, limit / norm_C, 1.0).to(parameters_CP)
        clipped_CP = received_CP + factor_C[:, None] * update_CP
        # the parameters of a client that is not clipped stay equal to the last bit
        return mixing_RC.to(parameters_CP) @ torch.where(is_long_C[:, None], clipped_CP, parameters_CP)


def weighted_median(weights_RC: Tensor, values_CP: Tensor) -> Tensor:
    """The median of each column under each row of weights, (R, P); the plain one where weights are equal."""
    sorted_CP, order_CP = values_CP.sort(dim=0)
    rows = []
    for weights_C in weights_RC:
        share_CP = weights_C[order_CP].cumsum(dim=0)
        half = weights_C.sum() / 2
        lower_P = (share_CP < half - TOLERANCE).sum(dim=0)
        upper_P = (share_CP <= half + TOLERANCE).sum(dim=0)
        rows.append(sorted_CP.gather(0, torch.stack([lower_P, upper_P])).mean(dim=0))
    return torch.stack(rows)


def trimmed_mean(weights_RC: Tensor, values_CP: Tensor, trim_fraction: float) -> Tensor:
    """The mean of each column under each row of weights without the values of lowest and highest rank, (R, P)."""
    by_weight_C = weights_RC.sum(dim=0).argsort(stable=True)
    sorted_CP, order_CP = values_CP[by_weight_C].sort(dim=0, stable=True)
    rows = []
    for weights_C in weights_RC[:, by_weight_C]:
        count = int((weights_C > 0).sum())
        num_trimmed = min(math.ceil(trim_fraction * count - TOLERANCE), (count - 1) // 2)
        weights_CP = weights_C[order_CP]
        rank_CP = (weights_CP > 0).cumsum(dim=0)
        weights_CP *= (rank_CP > num_trimmed) & (rank_CP <= count - num_trimmed)
        rows.append(((weights_CP * sorted_CP).sum(dim=0) / weights_CP.sum(dim=0)).to(values_CP))
    return torch.stack(rows)


def krum_scores(parameters_CP: Tensor, num_malicious: int) -> Tensor:
    """Each client's sum of squared distances to its C - f - 2 nearest others, (C,)."""
    # the differences themselves: products of rows would lose distances that are small compared with the parameters
    distance_CC = torch.cdist(parameters_CP, parameters_CP, compute_mode="donot_use_mm_for_euclid_dist").double()
    nearest_CC = distance_CC.square().sort(dim=1).values
    return nearest_CC[:, 1 : len(parameters_CP) - num_malicious - 1].sum(dim=1)


def _in_columns(parameters_CP: Tensor) -> Iterator[Tensor]:
    """Parts of the columns, with at most ``CHUNK_NUMBERS`` values."""
    yield from torch.split(parameters_CP, max(1, CHUNK_NUMBERS // len(parameters_CP)), dim=1)
