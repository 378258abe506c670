"""Links predicted without learning, from the edges along which messages are sent.

Common neighbors and Katz as in Liben-Nowell, Kleinberg, "The Link-Prediction Problem for Social Networks", 2007; the
other as in Adamic, Adar, "Friends and Neighbors on the Web", 2003.

Shape legend: P pairs, N nodes.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, diags_array
from torch import Tensor

from fl_lightning.batches.pairs import ClientPairs
from fl_lightning.tasks.link_target import LINKS

#: Weight of a walk of Katz for each further step.
KATZ_DECAY = 0.05
#: Pairs that are scored at once: the nodes that two steps from them reach may be all of a graph.
_BLOCK = 512


def common_neighbors(adjacency_NN: csr_matrix, pair_P2: Tensor) -> Tensor:
    """Number of common neighbors of each pair, float64 (P,)."""
    first_P, second_P = pair_P2.numpy().T
    return torch.from_numpy(_inner(adjacency_NN[first_P], adjacency_NN[second_P]))


def adamic_adar(adjacency_NN: csr_matrix, pair_P2: Tensor) -> Tensor:
    """Sum over the common neighbors of each pair of 1 / log(degree), float64 (P,)."""
    degree_N = np.asarray(adjacency_NN.sum(axis=1)).ravel()
    weight_N = 1 / np.log(np.maximum(degree_N, 2))
    first_P, second_P = pair_P2.numpy().T
    return torch.from_numpy(_inner(adjacency_NN[first_P] @ diags_array(weight_N), adjacency_NN[second_P]))


def katz(adjacency_NN: csr_matrix, pair_P2: Tensor) -> Tensor:
    """Sum over the lengths l from 1 to 4 of ``KATZ_DECAY``^l times the walks of length l, float64 (P,).

    The two halves of a walk, of at most two steps each, begin at the two nodes of the pair and meet.
    """
    first_P, second_P = pair_P2.numpy().T
    near_PN, other_near_PN = adjacency_NN[first_P], adjacency_NN[second_P]
    far_PN, other_far_PN = near_PN @ adjacency_NN, other_near_PN @ adjacency_NN
    walks = [
        np.asarray(adjacency_NN[first_P, second_P]).ravel(),
        _inner(near_PN, other_near_PN),
        _inner(far_PN, other_near_PN),
        _inner(far_PN, other_far_PN),
    ]
    return torch.from_numpy(sum(KATZ_DECAY**length * walks_P for length, walks_P in enumerate(walks, start=1)))


#: The heuristics by name.
HEURISTICS: dict[str, Callable[[csr_matrix, Tensor], Tensor]] = {
    "common neighbors": common_neighbors,
    "Adamic-Adar": adamic_adar,
    "Katz": katz,
}


def heuristic_metrics(clients: Sequence[ClientPairs]) -> dict[str, dict[str, float]]:
    """The clients' mean metrics of each heuristic, by names such as ``test/auroc``, on the clients' fixed pools."""
    names = LINKS.always
    values: dict[str, dict[str, list[float]]] = {name: {} for name in HEURISTICS}
    for client in clients:
        adjacency_NN, scored_N = adjacency_of(client), client.val_mask_N | client.test_mask_N
        pair_P2, y_P1 = client.pair_P2[scored_N], client.y_N[scored_N]
        masks_SP = torch.stack([client.val_mask_N, client.test_mask_N])[:, scored_N]
        for heuristic, score in HEURISTICS.items():
            score_P = torch.cat([score(adjacency_NN, block_P2) for block_P2 in torch.split(pair_P2, _BLOCK)])
            for name, (total_S, count_S) in LINKS.whole_scores(names, score_P[:, None], y_P1, masks_SP).items():
                for split, total, count in zip(("val", "test"), total_S.tolist(), count_S.tolist(), strict=True):
                    if count:
                        values[heuristic].setdefault(f"{split}/{name}", []).append(total / count)
    return {heuristic: _means(each) for heuristic, each in values.items()}


def adjacency_of(client: ClientPairs) -> csr_matrix:
    """The edges of a client's graph as ones, (N, N)."""
    row, column = client.graph.edge_index_2E.numpy()
    number = client.graph.num_nodes
    return csr_matrix((np.ones(len(row)), (row, column)), shape=(number, number))


def _means(values: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: sum(each) / len(each) for name, each in values.items()}


def _inner(left_PN: csr_matrix, right_PN: csr_matrix) -> NDArray[np.float64]:
    """The inner product of each row of one matrix and that of the other, (P,)."""
    return np.asarray(left_PN.multiply(right_PN).sum(axis=1)).ravel()
