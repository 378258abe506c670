"""Label propagation without parameters on a client's graph, of labels or predictions.

Shape legend: N nodes of one client, K classes.
"""

import torch
from torch import Tensor

from fl_lightning.batches import GraphBatch
from fl_lightning.kernels.block_sparse import block_matmul


def with_labels(value_NK: Tensor, batch: GraphBatch, mask_N: Tensor) -> Tensor:
    """The values, in the rows of the mask replaced by the one-hot labels."""
    classes_K = torch.arange(value_NK.shape[1], device=batch.y.device)
    return torch.where(mask_N[:, None], (batch.y[:, None] == classes_K).to(value_NK), value_NK)


def propagate_labels(known_NK: Tensor, batch: GraphBatch, seeds_N: Tensor, *, num_steps: int, share: float) -> Tensor:
    """Z <- α Â Z + (1 - α) Y, then Z <- Z + Y in the seeds' rows, from Z = Y; not normalized.

    Args:
        known_NK: Y.
        batch: One client's graph.
        seeds_N: Nodes whose Y is added again in every step.
        num_steps: Number of steps.
        share: α.
    """
    score_NK = known_NK
    for _ in range(num_steps):
        neighbor_NK = block_matmul(batch.adjacency, score_NK, owner=batch.example_mask)
        score_NK = share * neighbor_NK + (1 - share) * known_NK + known_NK * seeds_N[:, None]
    return score_NK
