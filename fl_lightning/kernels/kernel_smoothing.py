"""Kernel smoothing of node embeddings along one score, in linear time.

FedAux (the paper's eq. 6): node v with score s_v in [-1, 1] gets the kernel-weighted mean of all embeddings,

    z_v = sum_u kappa(s_v, s_u) h_u / sum_u kappa(s_v, s_u),    kappa(s, t) = exp(-(s - t)^2 / sigma^2).

The paper computes it densely, O(N^2 D) time and O(N^2) memory. Here a cosine series with features phi and weights w
(:mod:`fl_lightning.kernels.cosine_series`) gives M = diag(w) sum_u phi(s_u) [h_u || 1] once and then
[numerator || denominator] = phi(s_v)^T M for every node: O(N P D) time. Nodes are processed in blocks whose features
are recomputed in the backward, so beyond z and the gradients of h and s the memory is O(P D) and a few MiB.

Error. Let every kernel value be off by at most e, and D_v = sum_u kappa(s_v, s_u). The computed z~_v satisfies
z~_v - z_v = sum_u (kappa~ - kappa)(s_v, s_u) (h_u - z_v) / D~_v, hence |z~_v - z_v| <= 2 N e max|h| / (D_v - N e).
A node's own kernel value is 1 and any other is at least exp(-4 / sigma^2), so N / D_v is largest for one far node:
N / (1 + (N - 1) exp(-4 / sigma^2)). The series is chosen for the e that makes the whole at most the tolerance.

Shape legend: N nodes, B nodes of a block, D channels, A = D + 1 channels with the constant one, P features of the
series.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fl_lightning.kernels.cosine_series import CosineSeries

_BLOCK_NUMBERS = 2**18  # float64 numbers in one temporary of a block: 2 MiB
_MIN_NODES = 2**20  # the series for fewer nodes is the one for so many: padding does not change it
_DENSE_NODES_PER_FEATURE = 2.0  # below, the dense form is faster


def smoothing_series(bandwidth: float, num_nodes: int, tolerance: float = 1e-6) -> CosineSeries | None:
    """Return the series :func:`kernel_smooth` uses for that many nodes, or None where the dense form costs less.

    Args:
        bandwidth: sigma, above 0.
        num_nodes: N, padding included.
        tolerance: permitted error as in :func:`kernel_smooth`.

    Example:
        >>> smoothing_series(1.0, 17_000).num_features
        20
        >>> smoothing_series(0.01, 250) is None
        True
    """
    counted = max(num_nodes, _MIN_NODES)
    farthest = 2 / bandwidth
    largest_ratio = counted / (1 + (counted - 1) * math.exp(-farthest * farthest))
    series = CosineSeries.approximating(bandwidth, tolerance / ((2 + tolerance) * largest_ratio))
    return series if num_nodes > _DENSE_NODES_PER_FEATURE * series.num_features else None


def kernel_smooth(
    h_ND: Tensor, score_N: Tensor, *, bandwidth: float, mask_N: Tensor | None = None, tolerance: float = 1e-6
) -> Tensor:
    """Replace each node's embedding by the mean of all, weighted by exp(-(s_v - s_u)^2 / bandwidth^2).

    The error of z is at most ``tolerance * max|h|`` per channel, for every bandwidth and every placement of the scores.
    The gradient in h is off by at most ``tolerance * (1 + c) / 2`` times the largest gradient of z, c the sum of a
    node's weights over all the means it enters (1 on average); dz_v / ds_v by ``tolerance * (g + 2 R) * max|h|``, g the
    largest slope of the kernel (0.86 / bandwidth where that is below 2.8) and R the mean of 2 |s_v - s_u| / bandwidth^2
    over v's neighborhood, about 1 / bandwidth.

    All arithmetic is float64, whatever the inputs and the autocast state (so the device must have float64), and the
    result is rounded to the type of h once: 2^-24 |z| (float32) or 2^-9 |z| (bfloat16) come on top, and for float64
    about 1e-16 N / D_v. A tolerance below an eighth of that type's epsilon is raised to it.

    The number of features follows from bandwidth, tolerance and N alone. With few nodes or a very small bandwidth
    there would be at least half as many features as nodes; the exact dense form is then computed, in blocks of rows,
    in O(N^2 D) time and without ever holding N^2 numbers. As the bandwidth tends to 0, z tends to h where scores
    are distinct; as it grows, to the mean of h.

    Works under ``torch.vmap`` and ``torch.func`` reverse mode, and can be differentiated more than once.

    Args:
        h_ND: node embeddings.
        score_N: scores, in [-1, 1]; outside of it the error bound does not hold.
        bandwidth: sigma, in units of the score; above 0 and finite.
        mask_N: true for real nodes; all are real if None. Padding nodes contribute nothing, get zeros and have zero
            gradients, whatever they hold.
        tolerance: permitted error relative to max|h|, in (0, 0.1].

    Shapes:
        h_ND ``(N, D)``; score_N and mask_N ``(N,)``; result ``(N, D)``.

    Returns:
        z, of the type of h.

    Raises:
        ValueError: ``bandwidth`` or ``tolerance`` is out of range.

    Example:
        >>> kernel_smooth(torch.tensor([[0.0], [2.0], [9.0]]), torch.tensor([0.5, 0.5, -1.0]), bandwidth=0.1)
        tensor([[1.],
                [1.],
                [9.]])
    """
    if not 0 < bandwidth < math.inf:
        raise ValueError(
            f"bandwidth={bandwidth} is not a kernel width: it must be above 0 and finite. Scores are in [-1, 1]: "
            "1 is the paper's choice, 0.01 keeps nearly every node to itself, 10 nearly gives the mean of all."
        )
    if not 0 < tolerance <= 0.1:
        raise ValueError(f"tolerance={tolerance} must be in (0, 0.1]; 1e-6 suits float32 embeddings.")
    num_nodes, width = h_ND.shape
    if mask_N is None:
        mask_N = torch.ones_like(score_N, dtype=torch.bool)
    mask_N1 = mask_N[:, None]
    score_N = torch.where(mask_N, score_N.double(), 0.0)
    series = smoothing_series(bandwidth, num_nodes, max(tolerance, torch.finfo(h_ND.dtype).eps / 8))
    if series is None:
        num_rows = max(1, _BLOCK_NUMBERS // max(num_nodes, width))
        z_ND: Tensor = _DenseSmoothing.apply(h_ND, score_N, mask_N1, bandwidth, num_rows)  # type: ignore[no-untyped-call]
    else:
        num_rows = max(1, _BLOCK_NUMBERS // max(series.num_features, width))
        z_ND, _ = _SeriesSmoothing.apply(h_ND, score_N, mask_N1, series, num_rows)  # type: ignore[no-untyped-call]
    return z_ND


def _blocks(num_rows: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(torch.split(tensor, num_rows) for tensor in tensors), strict=True)


def _real(x_BD: Tensor, mask_B1: Tensor) -> Tensor:
    """The rows of real nodes in float64, zeros elsewhere (a product would let a padding node's NaN through)."""
    return torch.where(mask_B1, x_BD.double(), 0.0)


class _SeriesSmoothing(torch.autograd.Function):
    """z and the moments M, which are an output so that differentiating twice sees them."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        h_ND: Tensor, score_N: Tensor, mask_N1: Tensor, series: CosineSeries, num_rows: int
    ) -> tuple[Tensor, Tensor]:
        weights_P1 = series.weights(h_ND.device)[:, None]
        moments_PA = weights_P1.new_zeros(series.num_features, h_ND.shape[1] + 1)
        for h_BD, score_B, mask_B1 in _blocks(num_rows, h_ND, score_N, mask_N1):
            moments_PA = moments_PA + series.features(score_B).mT @ _with_one(h_BD, mask_B1)
        moments_PA = weights_P1 * moments_PA
        z = []
        for score_B, mask_B1 in _blocks(num_rows, score_N, mask_N1):
            sums_BA = series.features(score_B) @ moments_PA
            z.append((_real(sums_BA[:, :-1], mask_B1) / _denominator(sums_BA, mask_B1)).to(h_ND.dtype))
        return torch.cat(z), moments_PA

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        h_ND, score_N, mask_N1, ctx.series, ctx.num_rows = inputs
        ctx.save_for_backward(h_ND, score_N, mask_N1, output[1])

    @staticmethod
    def backward(ctx: Any, grad_z_ND: Tensor, grad_moments_PA: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        h_ND, score_N, mask_N1, moments_PA = ctx.saved_tensors
        series, num_rows = ctx.series, ctx.num_rows
        denominators, grad_denominators = [], []
        for grad_z_BD, score_B, mask_B1 in _blocks(num_rows, grad_z_ND, score_N, mask_N1):
            features_BP = series.features(score_B)
            sums_BA = features_BP @ moments_PA
            denominator_B1 = _denominator(sums_BA, mask_B1)
            grad_BD = _real(grad_z_BD, mask_B1) / denominator_B1
            grad_denominator_B1 = -(grad_BD * sums_BA[:, :-1]).sum(1, keepdim=True) / denominator_B1
            grad_sums_BA = torch.cat([grad_BD, grad_denominator_B1], dim=1)
            grad_moments_PA = grad_moments_PA + features_BP.mT @ grad_sums_BA
            denominators.append(denominator_B1)
            grad_denominators.append(grad_denominator_B1)
        grad_moments_PA = series.weights(h_ND.device)[:, None] * grad_moments_PA
        grad_h, grad_score = [], []
        blocks = _blocks(num_rows, h_ND, score_N, mask_N1, grad_z_ND)
        for (h_BD, score_B, mask_B1, grad_z_BD), denominator_B1, grad_denominator_B1 in zip(
            blocks, denominators, grad_denominators, strict=True
        ):
            features_BP = series.features(score_B)
            grad_sums_BA = torch.cat([_real(grad_z_BD, mask_B1) / denominator_B1, grad_denominator_B1], dim=1)
            grad_features_BP = grad_sums_BA @ moments_PA.mT + _with_one(h_BD, mask_B1) @ grad_moments_PA.mT
            grad_score.append((grad_features_BP * series.derivative(features_BP)).sum(1))
            grad_h.append(_real(features_BP @ grad_moments_PA[:, :-1], mask_B1).to(h_ND.dtype))
        return torch.cat(grad_h), torch.cat(grad_score), None, None, None


def _with_one(h_BD: Tensor, mask_B1: Tensor) -> Tensor:
    """[h || 1] of real nodes, zeros of padding nodes."""
    return torch.cat([_real(h_BD, mask_B1), mask_B1.double()], dim=1)


def _denominator(sums_BA: Tensor, mask_B1: Tensor) -> Tensor:
    """The sum of the kernel; 1 for padding nodes, which may be far from every real node."""
    return torch.where(mask_B1, sums_BA[:, -1:], 1.0)


class _DenseSmoothing(torch.autograd.Function):
    """z by the definition, one block of rows of the kernel at a time."""

    generate_vmap_rule = True

    @staticmethod
    def forward(h_ND: Tensor, score_N: Tensor, mask_N1: Tensor, bandwidth: float, num_rows: int) -> Tensor:
        real_h_ND = _real(h_ND, mask_N1)
        z = []
        for score_B, mask_B1 in _blocks(num_rows, score_N, mask_N1):
            weights_BN = _weights(score_B[:, None] - score_N, mask_B1, mask_N1, bandwidth)
            z.append((weights_BN @ real_h_ND).to(h_ND.dtype))
        return torch.cat(z)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        h_ND, score_N, mask_N1, ctx.bandwidth, ctx.num_rows = inputs
        ctx.save_for_backward(h_ND, score_N, mask_N1)

    @staticmethod
    def backward(ctx: Any, grad_z_ND: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        h_ND, score_N, mask_N1 = ctx.saved_tensors
        real_h_ND = _real(h_ND, mask_N1)
        grad_h_ND = torch.zeros_like(real_h_ND)
        grad_column_N = torch.zeros_like(score_N)
        grad_row = []
        for grad_z_BD, score_B, mask_B1 in _blocks(ctx.num_rows, grad_z_ND, score_N, mask_N1):
            difference_BN = score_B[:, None] - score_N
            weights_BN = _weights(difference_BN, mask_B1, mask_N1, ctx.bandwidth)
            grad_BD = _real(grad_z_BD, mask_B1)
            grad_h_ND = grad_h_ND + weights_BN.mT @ grad_BD
            # The weights are the softmax of -(difference / bandwidth)^2 over the real nodes.
            moved_BN = weights_BN * (grad_BD @ real_h_ND.mT)
            grad_logit_BN = moved_BN - weights_BN * moved_BN.sum(1, keepdim=True)
            grad_difference_BN = grad_logit_BN * (difference_BN / ctx.bandwidth) * (-2 / ctx.bandwidth)
            grad_row.append(grad_difference_BN.sum(1))
            grad_column_N = grad_column_N - grad_difference_BN.sum(0)
        return grad_h_ND.to(h_ND.dtype), torch.cat(grad_row) + grad_column_N, None, None, None


def _weights(difference_BN: Tensor, mask_B1: Tensor, mask_N1: Tensor, bandwidth: float) -> Tensor:
    """Rows of normalized kernel values; zeros in the rows and columns of padding nodes."""
    kernel_BN = torch.where(mask_B1 & mask_N1.mT, (-((difference_BN / bandwidth) ** 2)).exp(), 0.0)
    return kernel_BN / torch.where(mask_B1, kernel_BN.sum(1, keepdim=True), 1.0)
