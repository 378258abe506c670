"""The importance of nodes in S2FGL, and the frequencies of a graph of similar embeddings.

Shape legend: N nodes of a client, M important ones, D width, Q frequencies.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_lightning.batches import GraphBatch
from fl_lightning.strategies.base import server_dtype

#: Terms of the series for Π, after which the remainder is less than 1e-9.
NUM_TERMS = 12
#: Number of nodes that a row of S keeps, including the node itself.
NUM_NEAREST = 4


def importance(batch: GraphBatch, restart: float) -> Tensor:
    """The scores of one client's nodes, (N,)."""
    walk_NN = torch.diag_embed(batch.train_mask.to(batch.adjacency.matrix.dtype))
    total_NN = walk_NN
    for _ in range(NUM_TERMS):
        walk_NN = (1 - restart) * batch.sum_neighbors(walk_NN) / batch.degree.clamp(min=1)[:, None]
        total_NN = total_NN + walk_NN
    return total_NN.amax(dim=1) + restart * total_NN.sum(dim=1)


def spectrum(z_MD: Tensor, chosen_M: Tensor, number: int) -> Tensor:
    """Eigenvectors of the smallest eigenvalues of a similarity graph, then those of the largest, as columns.

    Args:
        z_MD: Rows whose similarity is their cosine.
        chosen_M: Which of them count; the others' entries are 0.
        number: Q, the number of each kind; if there are fewer rows, the remaining columns are 0.

    Returns:
        (M, 2 Q), orthonormal within each half except for columns that are 0.
    """
    size, place_M = len(z_MD), torch.arange(len(z_MD), device=z_MD.device)
    itself_MM = place_M[:, None] == place_M
    unit_MD = F.normalize(z_MD, dim=1)
    both_MM = chosen_M[:, None] & chosen_M
    cosine_MM = torch.where(both_MM, unit_MD @ unit_MD.T, -2.0)
    rank_MM = torch.where(itself_MM, 2.0, cosine_MM)
    rank_MM = (rank_MM * 1e6).round().sort(dim=1, descending=True, stable=True).indices.argsort(dim=1)
    kept_MM = both_MM & (rank_MM < NUM_NEAREST) & ~itself_MM  # a loop is on the diagonal of both terms of L
    likeness_MM = torch.where(kept_MM, cosine_MM, 0.0)
    likeness_MM = (likeness_MM + likeness_MM.mT) / 2
    laplacian_MM = torch.diag_embed(likeness_MM.sum(dim=1)) - likeness_MM
    beyond = 2 * likeness_MM.abs().sum(dim=1).amax() + 1  # above all eigenvalues, for rows that do not count
    laplacian_MM = laplacian_MM + torch.diag_embed(torch.where(chosen_M, 0.0, beyond).to(laplacian_MM))
    exact = server_dtype(laplacian_MM.dtype)
    vector_MM = torch.linalg.eigh(laplacian_MM.to(exact)).eigenvectors
    count = chosen_M.sum()
    place_Q = torch.arange(number, device=z_MD.device)
    place_2Q = torch.cat([place_Q, count - 1 - place_Q])
    there_2Q = (place_2Q >= 0) & (place_2Q < count)
    vector_M2Q: Tensor = vector_MM.index_select(1, place_2Q.clamp(0, size - 1)) * there_2Q
    return vector_M2Q
