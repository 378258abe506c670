"""Random matrices with fast products: rows of a randomized Hartley transform in place of Gaussian ones.

Random signs, an orthogonal transform, random rows: Ailon and Chazelle, "The fast Johnson-Lindenstrauss transform and
approximate nearest neighbors", SIAM J. Computing 2009; Tropp, "Improved analysis of the subsampled randomized Hadamard
transform", Advances in Adaptive Data Analysis 2011, with another flat orthogonal matrix. The Hartley matrix,
(cos + sin)(2 pi k n / N) / sqrt(N), exists for every N, where Hadamard's needs a power of two; it is symmetric, its own
inverse, and one real FFT. The rows get random signs too: the first column would be constant without.

Shape legend: R rows, D columns, N length of the transform.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor


def hartley(x: Tensor) -> Tensor:
    """Orthonormal Hartley transform over the last axis: symmetric, and its own inverse.

    Example:
        >>> hartley(torch.tensor([1.0, 0.0, 0.0, 0.0]))
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    if x.numel() == 0:  # MKL refuses it
        return x
    length = x.shape[-1]
    spectrum = torch.fft.rfft(x, norm="ortho")
    mirrored = (spectrum.real + spectrum.imag)[..., 1 : (length + 1) // 2].flip(-1)
    return torch.cat([spectrum.real - spectrum.imag, mirrored], dim=-1)


class RandomRows:
    """Random rows of unit length of a randomized Hartley transform, as a matrix P (R, D) that is never built.

    The transform is a little longer than D where that is faster (an FFT of prime length takes five times as long as
    one of the next product of 2, 3 and 5), and its rows are cut to D numbers and brought back to length 1. Rows come
    back only when all N have been drawn, so the largest eigenvalue of P^T P is about ceil(R / N).

    Args:
        num_rows: R.
        num_columns: D.
        draw: Generators of the random draws, by name: ``columns``, ``rows`` and ``signs``.
        place_R: Which of the drawn rows these are, if matrices of one draw share some; None for the first ones.
    """

    def __init__(
        self,
        num_rows: int,
        num_columns: int,
        draw: Callable[[str], torch.Generator],
        *,
        dtype: torch.dtype,
        device: torch.device,
        place_R: Tensor | None = None,
    ) -> None:
        from scipy.fft import next_fast_len

        self.in_order = place_R is None
        place_R = torch.arange(num_rows) if place_R is None else place_R
        self.num_columns = num_columns
        self.length = int(next_fast_len(num_columns, real=True))
        self.sign_D = random_signs(num_columns, draw("columns")).to(device=device, dtype=dtype)
        row_R = torch.randperm(self.length, generator=draw("rows"))[place_R % self.length]
        self.row_R = row_R.to(device)
        sign_R = random_signs(int(place_R.max()) + 1 if num_rows else 0, draw("signs"))[place_R]
        scale_R = sign_R * row_squares(num_columns, self.length)[row_R].rsqrt()
        self.scale_R = scale_R.to(device=device, dtype=dtype)

    @property
    def num_stored_numbers(self) -> int:
        """Signs, rows and scales."""
        return self.num_columns + 2 * len(self.row_R)

    def transform(self, x: Tensor) -> Tensor:
        """All rows of the transform times x, neither signed nor scaled, shape (..., D) to (..., N)."""
        return hartley(torch.nn.functional.pad(x * self.sign_D, (0, self.length - self.num_columns)))

    def transform_back(self, y: Tensor) -> Tensor:
        """The transpose, shape (..., N) to (..., D)."""
        return hartley(y)[..., : self.num_columns] * self.sign_D

    def times(self, x: Tensor) -> Tensor:
        """P x, shape (..., D) to (..., R)."""
        rows: Tensor = self.transform(x)[..., self.row_R] * self.scale_R
        return rows

    def transposed_times(self, y: Tensor) -> Tensor:
        """P^T y, shape (..., R) to (..., D)."""
        y = y * self.scale_R
        spread = y.new_zeros(*y.shape[:-1], self.length)
        if not self.in_order:
            return self.transform_back(spread.index_add(-1, self.row_R, y))
        if y.shape[-1] > self.length:  # rows that occur more than once are added up, in a fixed order
            y = torch.nn.functional.pad(y, (0, -y.shape[-1] % self.length))
            y = y.reshape(*y.shape[:-1], -1, self.length).sum(dim=-2)
        return self.transform_back(spread.index_copy(-1, self.row_R[: y.shape[-1]], y))


@functools.lru_cache(maxsize=4)
def row_squares(num_columns: int, length: int) -> Tensor:
    """Squared length of every row of the Hartley matrix of that length, cut to so many columns, float64 (N,)."""
    # that of row k is the sum over n < D of 1 + sin(2 pi (2 k) n / N), over N
    sine_N = -torch.fft.fft(torch.ones(num_columns, dtype=torch.float64), n=length).imag
    square_N: Tensor = (num_columns + sine_N[2 * torch.arange(length) % length]) / length
    return square_N


def random_signs(count: int, random: torch.Generator) -> Tensor:
    """Independent signs, float64 (count,)."""
    return torch.randint(2, (count,), generator=random).double() * 2 - 1
