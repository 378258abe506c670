"""How far a net reads in a graph."""

import torch
from torch import nn

from fl_lightning.batches.base import single
from fl_lightning.batches.client_graph import ClientGraph
from fl_lightning.batches.graphs import GraphCollator

#: Nodes beyond the given distance.
_BEYOND = 4


def reads_beyond(
    net: nn.Module, num_hops: int, num_features: int, *, has_edge_weights: bool = False, num_edge_attributes: int = 0
) -> bool:
    """Whether a net's output for a node depends on nodes more than some edges away.

    It is tried on a path with random features, of which those of the distant nodes are changed. A net that cannot
    compute on it is not judged.

    Args:
        net: Maps a batch of graphs to a ``NetOutput``; its mode is restored afterward.
        num_hops: The number of edges.
        num_features: Width of the features.
        has_edge_weights: Whether edges have weights.
        num_edge_attributes: Number of attributes of an edge.

    Example:
        >>> from fl_lightning.models import GCN
        >>> reads_beyond(GCN(3, 2), 2, 3), reads_beyond(GCN(3, 2), 1, 3)
        (False, True)
    """
    size = num_hops + 1 + _BEYOND
    device = next((parameter.device for parameter in net.parameters()), torch.device("cpu"))
    draw = torch.Generator().manual_seed(0)
    node_E = torch.arange(size - 1)
    edges_2E = torch.stack([torch.cat([node_E, node_E + 1]), torch.cat([node_E + 1, node_E])])
    edges_2E = edges_2E[:, (edges_2E[0] * size + edges_2E[1]).argsort()]
    num_edges = edges_2E.shape[1]
    nobody_N = torch.zeros(size, dtype=torch.bool)
    x_NF = torch.rand(size, num_features, generator=draw)
    changed_NF = x_NF + 10 * torch.rand(size, num_features, generator=draw)
    changed_NF[: num_hops + 1] = x_NF[: num_hops + 1]
    was_training = net.training
    net.eval()
    try:
        outputs = []
        for inputs in (x_NF, changed_NF):
            graph = ClientGraph(
                name="path",
                x_NF=inputs,
                y_N=torch.zeros(size, dtype=torch.int64),
                train_mask_N=nobody_N,
                val_mask_N=nobody_N,
                test_mask_N=nobody_N,
                edge_index_2E=edges_2E,
                node_idx_N=torch.arange(size),
                edge_weight_E=torch.ones(num_edges) if has_edge_weights else None,
                edge_attr_EK=torch.ones(num_edges, num_edge_attributes) if num_edge_attributes else None,
            )
            layout = {"sparse_features": False}
            batch = GraphCollator([graph], layout=layout, device=device, dtype=torch.float32)([0])
            with torch.no_grad():
                outputs.append(net(single(batch)).logits[0])
    except Exception:  # a user's net may raise anything, and is tried on the clients' data too
        return False
    finally:
        net.train(was_training)
    return not torch.equal(*outputs)
