"""Gaussian kernel as a short cosine series, which separates it into features: kappa(s, t) = phi(s)^T diag(w) phi(t).

Let kappa(x) = exp(-x^2 / sigma^2) and |x| <= 2, the largest difference of two scores in [-1, 1]. Repeating the kernel
with period L and alternating sign gives, by Poisson's summation, a series of cosines at half-integer frequencies:

    sum_m (-1)^m kappa(x + m L) = sum_{k >= 0} w_k cos(omega_k x),
    omega_k = 2 pi (k + 1/2) / L,    w_k = 2 sigma sqrt(pi) / L * exp(-(omega_k sigma / 2)^2),

and cos(omega (s - t)) = cos(omega s) cos(omega t) + sin(omega s) sin(omega t) separates it. Two things are left out:

* the repetitions, at a distance of at least m (L - 2) =: m sigma b: below 2.2 exp(-b^2) in the kernel and
  4.4 b exp(-b^2) / sigma in its derivative, once b^2 >= 2.4;
* the frequencies from k = K on. Midpoints underestimate the integral of a convex function, so with a = pi K sigma / L
  they are below erfc(a) in the kernel and 2 exp(-a^2) / (sigma sqrt(pi)) in its derivative, once a^2 >= 1.5.

Half of the permitted error goes to each, which gives L and K in closed form. Both bounds on the derivative are larger,
relative to the largest derivative, than those on the kernel, so they alone decide. The number of features 2K is near
(4 / pi) ln(1 / error) for a wide kernel and grows as 1 / sigma for a narrow one, the least any expansion of this
accuracy can do there (frequencies up to 2a / sigma on an interval of length 2 need 4a / (pi sigma) functions).

Shape legend: B scores, K frequencies, P = 2K features.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

_RANGE = 2.0  # largest difference of two scores


class CosineSeries(NamedTuple):
    """Truncated cosine series of exp(-x^2 / bandwidth^2) on [-2, 2].

    Attributes:
        bandwidth: sigma.
        period: L.
        num_frequencies: K.
    """

    bandwidth: float
    period: float
    num_frequencies: int

    @classmethod
    def approximating(cls, bandwidth: float, error: float) -> "CosineSeries":
        """Return the series whose kernel is off by at most ``error`` and its derivative by ``error`` of its largest.

        Args:
            bandwidth: sigma, above 0.
            error: permitted error, in (0, 1e-1].

        Example:
            >>> CosineSeries.approximating(1.0, 1e-8).num_features
            20
            >>> CosineSeries.approximating(0.01, 1e-8).num_features
            574
        """
        peak = min(_RANGE, bandwidth / math.sqrt(2))  # where the derivative is largest
        slope = 2 * peak / bandwidth * math.exp(-((peak / bandwidth) ** 2))  # times sigma
        log_frequencies = math.log(4 / (math.sqrt(math.pi) * slope * error))
        log_repetitions = math.log(8.8 / (slope * error))  # b^2 - ln b must reach it
        period = _RANGE + bandwidth * math.sqrt(log_repetitions + math.log(2 * log_repetitions) / 2)
        return cls(bandwidth, period, math.ceil(math.sqrt(log_frequencies) * period / (math.pi * bandwidth)))

    @property
    def num_features(self) -> int:
        """P, a cosine and a sine per frequency."""
        return 2 * self.num_frequencies

    def weights(self, device: torch.device) -> Tensor:
        """Return w of every feature, float64 ``(P,)``."""
        scale = 2 * self.bandwidth * math.sqrt(math.pi) / self.period
        return (scale * (-((self._frequencies(device) * (self.bandwidth / 2)) ** 2)).exp()).repeat(2)

    def features(self, score_B: Tensor) -> Tensor:
        """Return phi of float64 scores: cosines, then sines, ``(B, P)``."""
        phase_BK = score_B[:, None] * self._frequencies(score_B.device)
        return torch.cat([phase_BK.cos(), phase_BK.sin()], dim=1)

    def derivative(self, features_BP: Tensor) -> Tensor:
        """Return the derivative of the features in the score, from the features."""
        frequency_K = self._frequencies(features_BP.device)
        cos_BK, sin_BK = features_BP.chunk(2, dim=1)
        return torch.cat([-frequency_K * sin_BK, frequency_K * cos_BK], dim=1)

    def _frequencies(self, device: torch.device) -> Tensor:
        index_K = torch.arange(self.num_frequencies, dtype=torch.float64, device=device)
        return (index_K + 0.5) * (2 * math.pi / self.period)
