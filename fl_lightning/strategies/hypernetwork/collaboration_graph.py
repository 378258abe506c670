"""Collaboration graph of the server: clients joined to their nearest neighbors in embedding space.

FedSheafHN (Liang et al., "Personalized Subgraph Federated Learning with Sheaf Collaboration", ECAI 2025), eq. (4).
The paper uses K nearest neighbors without saying how the directed relation becomes undirected; here two clients are
joined if either is among the K nearest of the other.

Shape legend: C clients, D embedding channels, E directed edges, B clients of one block of rows.
"""

import torch
from torch import Tensor
from torch.nn import functional

_BLOCK_ROWS = 1024  # bounds the similarities held at once to 1024 x C
_SIMILARITY_DECIMALS = 12  # rounding of a matrix product must not decide a tie


def knn_graph(embedding_CD: Tensor, num_neighbors: int) -> Tensor:
    """Join every client to its nearest neighbors by cosine similarity, in both directions.

    Similarities are computed in float64 and compared to twelve decimals; of equally similar clients the one with the
    lower index is the nearer. A zero vector has no direction: its similarity to every client is 0.

    Args:
        embedding_CD: One embedding per client, finite.
        num_neighbors: Neighbors per client before symmetrization, from 1 to C - 1; C - 1 gives the complete graph.

    Shapes:
        embedding_CD ``(C, D)``; result ``(2, E)`` with ``C * num_neighbors <= E <= 2 * C * num_neighbors``.

    Returns:
        The int64 edge index: symmetric, without self loops or repeats, sorted by source and then by target.

    Raises:
        ValueError: ``num_neighbors`` is out of range, or an embedding is not finite.

    Example:
        >>> knn_graph(torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]]), num_neighbors=1)
        tensor([[0, 1, 1, 2],
                [1, 0, 2, 1]])
    """
    num_clients = embedding_CD.shape[0]
    if not 1 <= num_neighbors < num_clients:
        raise ValueError(
            f"num_neighbors={num_neighbors} is impossible with {num_clients} clients: each client has "
            f"{num_clients - 1} others. Set num_neighbors between 1 and the number of clients minus one."
        )
    finite_C = embedding_CD.isfinite().all(dim=1)
    if not finite_C.all():
        bad = (~finite_C).nonzero().flatten().tolist()
        raise ValueError(
            f"The embeddings of clients {bad} contain NaN or infinity, so they have no nearest neighbors. "
            "Lower the clients' learning rate or look at their data."
        )
    direction_CD = functional.normalize(embedding_CD.detach().double(), dim=1, eps=torch.finfo(torch.float64).tiny)
    blocks = [_nearest(direction_CD, start, num_neighbors) for start in range(0, num_clients, _BLOCK_ROWS)]
    source_E, target_E = torch.cat(blocks, dim=1)
    both_ways = torch.cat([source_E * num_clients + target_E, target_E * num_clients + source_E])
    key_E: Tensor = both_ways.unique()  # type: ignore[no-untyped-call]
    return torch.stack([key_E // num_clients, key_E % num_clients])


def _nearest(direction_CD: Tensor, start: int, num_neighbors: int) -> Tensor:
    """Directed edges from the clients of the block that begins at ``start`` to their nearest neighbors."""
    block_BD = direction_CD[start : start + _BLOCK_ROWS]
    similarity_BC = (block_BD @ direction_CD.T).round(decimals=_SIMILARITY_DECIMALS)
    similarity_BC.diagonal(offset=start).fill_(-torch.inf)
    # topk may return tied clients in any order, but the value of the last one is unambiguous.
    last_B1 = similarity_BC.topk(num_neighbors, dim=1).values[:, -1:]
    nearer_BC = similarity_BC > last_B1
    tied_BC = similarity_BC == last_B1
    places_B1 = num_neighbors - nearer_BC.sum(dim=1, keepdim=True)
    source_E, target_E = (nearer_BC | (tied_BC & (tied_BC.cumsum(dim=1) <= places_B1))).nonzero(as_tuple=True)
    return torch.stack([source_E + start, target_E])
