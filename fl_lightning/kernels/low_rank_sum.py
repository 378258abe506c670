"""A matrix that grows by outer products and is kept at a bounded rank.

Shape legend: R rows, D columns; K directions kept, Q newer ones, B rows of the basis in use.
"""

import math

import torch
from torch import Tensor


class LowRankSum:
    """A sum of outer products u v^T of shape (R, D), kept at a bounded rank.

    New terms are stored as they come. When ``max_rank`` and a quarter more are in use, all are brought to an
    orthonormal basis of the v, and the singular directions of least weight are dropped (Eckart and Young): the sum is
    exact up to then, and within ``dropped`` of the exact one, in the Frobenius norm, ever after.

    Args:
        num_rows: R.
        num_columns: D.
        max_rank: Directions kept, at least 1.
        tolerance: Directions are dropped also while the norm of all that are dropped at a time is at most this share
            of the norm of the sum: models that move slowly span few directions.
    """

    def __init__(
        self,
        num_rows: int,
        num_columns: int,
        *,
        max_rank: int,
        tolerance: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.max_rank = max_rank
        self.tolerance = tolerance
        self.capacity = max_rank + max(1, max_rank // 4)
        self.dropped = 0.0
        self.num_orthonormal = 0
        self.num_used = 0
        self._basis = torch.empty(self.capacity, num_columns, dtype=dtype, device=device)
        self._coefficient = torch.empty(self.capacity, num_rows, dtype=dtype, device=device)

    @property
    def basis_BD(self) -> Tensor:
        """Rows that span the v: orthonormal ones, then the newest v as they came."""
        return self._basis[: self.num_used]

    @property
    def coefficient_BR(self) -> Tensor:
        """Their coefficients: the sum is coefficient^T basis."""
        return self._coefficient[: self.num_used]

    @property
    def num_stored_numbers(self) -> int:
        """Basis and coefficients, with the rows not in use yet."""
        return self._basis.numel() + self._coefficient.numel()

    @property
    def dropped_share(self) -> float:
        """``dropped`` over the norm of the sum."""
        if self.dropped == 0:
            return 0.0
        norm = math.sqrt(float(self.row_squares().sum()))
        return self.dropped / norm if norm > 0 else math.inf

    def add(self, u_R: Tensor, v_D: Tensor) -> None:
        """Add u v^T."""
        if self.num_used == self.capacity:
            self._compress()
        self._basis[self.num_used] = v_D
        self._coefficient[self.num_used] = u_R
        self.num_used += 1

    def times(self, x_D: Tensor) -> Tensor:
        """The sum times x, (R,)."""
        return (self.basis_BD @ x_D) @ self.coefficient_BR

    def transposed_times(self, y_R: Tensor) -> Tensor:
        """The sum transposed times y, (D,)."""
        return (self.coefficient_BR @ y_R) @ self.basis_BD

    def row_squares(self) -> Tensor:
        """Squared lengths of the rows of the sum, (R,)."""
        gram_BB = self.basis_BD @ self.basis_BD.T
        return (self.coefficient_BR * (gram_BB @ self.coefficient_BR)).sum(dim=0)

    def load(self, basis_BD: Tensor, coefficient_BR: Tensor, *, num_orthonormal: int, dropped: float) -> None:
        """Restore a sum of the same shape and bounds."""
        self.num_used = len(basis_BD)
        self.basis_BD.copy_(basis_BD)
        self.coefficient_BR.copy_(coefficient_BR)
        self.num_orthonormal, self.dropped = num_orthonormal, dropped

    def _compress(self) -> None:
        """Keep the best approximation of at most ``max_rank``, with an orthonormal basis."""
        num_old = self.num_orthonormal
        old_KD, new_QD = self.basis_BD[:num_old], self.basis_BD[num_old:]
        old_KR, new_QR = self.coefficient_BR[:num_old], self.coefficient_BR[num_old:]
        for _ in range(2 if num_old else 1):  # orthogonal to the old ones at the second pass
            overlap_QK = new_QD @ old_KD.T
            columns_DQ, triangle_QQ = torch.linalg.qr((new_QD - overlap_QK @ old_KD).T)
            old_KR += overlap_QK.T @ new_QR
            new_QD, new_QR = columns_DQ.T, triangle_QQ @ new_QR
        self.num_used = num_old + len(new_QD)  # fewer where there are more v than columns
        self.basis_BD[num_old:] = new_QD
        self.coefficient_BR[num_old:] = new_QR
        # the right singular vectors of coefficient^T are those of its triangular factor
        triangle = torch.linalg.qr(self.coefficient_BR.T, mode="r").R
        _, weight_B, direction_BB = torch.linalg.svd(triangle, full_matrices=False)
        tail_B = weight_B.double().square().flip(0).cumsum(0).flip(0).sqrt()  # norm of this and all later directions
        needed = int((tail_B > self.tolerance * tail_B[0]).sum())
        rank = min(needed, self.max_rank)
        if rank < len(tail_B):
            self.dropped += float(tail_B[rank])
        basis_KD, coefficient_KR = direction_BB[:rank] @ self.basis_BD, direction_BB[:rank] @ self.coefficient_BR
        self.num_used = self.num_orthonormal = rank
        self.basis_BD.copy_(basis_KD)
        self.coefficient_BR.copy_(coefficient_KR)
