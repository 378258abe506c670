"""Links predicted without learning, from the edges along which messages are sent.

Common neighbors and Katz as in Liben-Nowell, Kleinberg, "The Link-Prediction Problem for Social Networks", 2007; the
other as in Adamic, Adar, "Friends and Neighbors on the Web", 2003.

Shape legend: P pairs, N nodes.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_matrix, diags_array
from torch import Tensor

from fl_lightning.batches.pairs import ClientPairs
from fl_lightning.tasks.link_target import LINKS

#: Weight of a walk of Katz for each further step, and the longest walk that counts.
KATZ_DECAY, KATZ_STEPS = 0.05, 4


def common_neighbors(adjacency_NN: csr_matrix, pair_P2: Tensor) -> Tensor:
    """Number of common neighbors of each pair, float64 (P,)."""
    return _ends_product(adjacency_NN, adjacency_NN, pair_P2)


def adamic_adar(adjacency_NN: csr_matrix, pair_P2: Tensor) -> Tensor:
    """Sum over the common neighbors of each pair of 1 / log(degree), float64 (P,)."""
    degree_N = np.asarray(adjacency_NN.sum(axis=1)).ravel()
    weight_N = 1 / np.log(np.maximum(degree_N, 2))
    return _ends_product((adjacency_NN @ diags_array(weight_N)).tocsr(), adjacency_NN, pair_P2)


def katz(adjacency_NN: csr_matrix, pair_P2: Tensor) -> Tensor:
    """Sum over the lengths l up to ``KATZ_STEPS`` of ``KATZ_DECAY``^l times the walks of length l, float64 (P,)."""
    source_S, place_P = np.unique(pair_P2[:, 0].numpy(), return_inverse=True)
    target_P = pair_P2[:, 1].numpy().copy()  # scipy wants to own it
    walks_SN = adjacency_NN[source_S] * KATZ_DECAY
    total_P = np.zeros(len(pair_P2))
    for _ in range(KATZ_STEPS):
        total_P += np.asarray(walks_SN[place_P, target_P]).ravel()
        walks_SN = (walks_SN @ adjacency_NN).tocsr() * KATZ_DECAY
    return torch.from_numpy(total_P)


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
        adjacency_NN = adjacency_of(client)
        masks_SP = torch.stack([client.val_mask_N, client.test_mask_N])
        for heuristic, score in HEURISTICS.items():
            scored_P1 = score(adjacency_NN, client.pair_P2)[:, None]
            for name, (total_S, count_S) in LINKS.whole_scores(names, scored_P1, client.y_N, masks_SP).items():
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


def _ends_product(left_NN: Any, right_NN: Any, pair_P2: Tensor) -> Tensor:
    """Inner product of a row of one matrix and a row of the other for each pair."""
    first_P, second_P = pair_P2.numpy().T
    return torch.from_numpy(np.asarray(left_NN[first_P].multiply(right_NN[second_P]).sum(axis=1)).ravel())
