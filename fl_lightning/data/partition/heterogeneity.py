"""Heterogeneity of the clients: of their labels and of their neighborhoods.

Shape legend: C clients, K classes, N nodes of all clients, P pairs of clients.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fl_lightning.batches.client_data import ClientData
from fl_lightning.batches.client_graph import ClientGraph
from fl_lightning.data.adjacency import adjacency_matrix
from fl_lightning.kernels.randomness import generator


def label_histograms(
    clients: Sequence[ClientData], num_classes: int
) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Count the labeled examples of every class in every client, shape (C, K)."""
    return np.stack([np.bincount(client.y_N[client.y_N >= 0], minlength=num_classes) for client in clients])


def label_heterogeneity(histogram_CK: np.ndarray[tuple[int, int], np.dtype[np.int64]]) -> float:
    """Return the median over client pairs of the Jensen-Shannon distance of their label histograms.

    The distance is the square root of the divergence, with the natural logarithm: at most sqrt(ln 2) = 0.833.

    Args:
        histogram_CK: Label counts, at least one in each row.

    Example:
        >>> round(label_heterogeneity(np.array([[4, 0], [0, 4]])), 3)
        0.833
    """
    from scipy.spatial.distance import jensenshannon

    first_P, second_P = np.triu_indices(len(histogram_CK), k=1)
    if not len(first_P):
        return 0.0
    return float(np.median(jensenshannon(histogram_CK[first_P], histogram_CK[second_P], axis=1)))


def label_divergence(histogram_CK: np.ndarray[tuple[int, int], np.dtype[np.int64]]) -> float:
    """Return the mean over clients of the Jensen-Shannon divergence of their label prior from that of all clients."""
    from scipy.spatial.distance import jensenshannon

    pooled_CK = np.broadcast_to(histogram_CK.sum(axis=0), histogram_CK.shape)
    return float(np.mean(jensenshannon(histogram_CK, pooled_CK, axis=1) ** 2))


def neighborhood_discrepancy(clients: Sequence[ClientGraph], *, seed: int = 0, max_nodes: int = 4000) -> float:
    r"""Return the mean over client pairs of the squared maximum mean discrepancy of their neighborhoods.

    A node is embedded as the mean of the features of its neighbors (in a directed graph the sources of its edges) and
    itself. The kernel is
    :math:`\exp(-d^2 / 2\sigma^2)` with :math:`\sigma` the median distance between the nodes of all clients.

    Args:
        clients: The clients.
        seed: Of the subsample.
        max_nodes: Every client contributes at most ``max_nodes / num_clients`` nodes, drawn by seed. Below this size
            the value is exact; time and memory grow with the square (0.4 GB at 4,000).

    Source: FedAux, section D.3, equation 63. Squared: that is how its Table 4 comes out.
    """
    quota = max(1, max_nodes // len(clients))
    sample = [_neighborhood_means(client, quota, seed, idx) for idx, client in enumerate(clients)]
    size_C = torch.tensor([len(part) for part in sample])
    z = torch.cat(sample)
    square_N = z.square().sum(dim=1)
    distance_NN = (square_N[:, None] + square_N[None, :]).addmm_(z, z.T, alpha=-2).clamp_(min=0).sqrt_()
    bandwidth = distance_NN[tuple(torch.triu_indices(len(z), len(z), 1))].median().clamp(min=1e-6)
    kernel_NN = distance_NN.div_(bandwidth).square_().mul_(-0.5).exp_()
    mean_CN = torch.repeat_interleave(torch.diag(1 / size_C.double()), size_C, dim=1)
    inner_CC = mean_CN @ kernel_NN @ mean_CN.T
    first_P, second_P = torch.triu_indices(len(clients), len(clients), 1)
    discrepancy_P = inner_CC[first_P, first_P] + inner_CC[second_P, second_P] - 2 * inner_CC[first_P, second_P]
    return float(discrepancy_P.clamp(min=0).mean()) if len(clients) > 1 else 0.0


def _neighborhood_means(client: ClientGraph, quota: int, seed: int, idx: int) -> Tensor:
    """Embed at most ``quota`` nodes of a client, float64."""
    draw = generator(seed, "non-IIDness", idx)
    chosen = torch.randperm(client.num_nodes, generator=draw)[:quota].sort().values
    rows = adjacency_matrix(client.edge_index_2E.flip(0), client.num_nodes)[chosen.numpy()]
    total = torch.from_numpy(rows @ client.x_NF.numpy()).double() + client.x_NF[chosen].double()
    return total / (torch.from_numpy(np.diff(rows.indptr)) + 1)[:, None]
