"""Similarities of clients, and the mixing weights that follow from them.

Shape legend: C, K clients, D width of a signature.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def cosine_similarity(signature_CD: Tensor, other_KD: Tensor | None = None) -> Tensor:
    """Cosines between the rows and other rows (themselves if None), (C, K); a zero row is orthogonal to all."""
    unit_CD = F.normalize(signature_CD, dim=1)
    unit_KD = unit_CD if other_KD is None else F.normalize(other_KD, dim=1)
    return (unit_CD @ unit_KD.T).clamp(-1, 1)


def softmax_mixing(similarity_CK: Tensor, temperature: float) -> Tensor:
    """W_ij = exp(τ S_ij) / Σ_k exp(τ S_ik): rows sum to one, and τ = 0 is plain averaging.

    Example:
        >>> softmax_mixing(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), 0.0)
        tensor([[0.5000, 0.5000],
                [0.5000, 0.5000]])
    """
    return (temperature * similarity_CK).softmax(dim=1)


def mixing_breadth(mixing_CC: Tensor) -> float:
    """Mean over the rows of exp(entropy) / C: 1 if mixing is uniform, 1/C if every client keeps its own model."""
    entropy_C = torch.special.entr(mixing_CC).sum(dim=1)
    return float(entropy_C.exp().mean() / mixing_CC.shape[1])
