"""A small directed graph with weights, as a client holds it, and what PyG makes of its edges."""

import torch
from torch import Tensor
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from fl_lightning.batches import ClientGraph, GraphBatch, GraphCollator
from fl_lightning.batches.base import single

NUM_FEATURES, NUM_CLASSES = 4, 3


def directed_graph(num_nodes: int = 9, *, weighted: bool = False, attributes: int = 0, seed: int = 0) -> ClientGraph:
    """Random edges, few of which have their reverse; some weights are 0, some above 1."""
    draw = torch.Generator().manual_seed(seed)
    linked_NN = (torch.rand(num_nodes, num_nodes, generator=draw) < 0.3).fill_diagonal_(False)
    edges_2E = linked_NN.nonzero().T
    role_N = torch.arange(num_nodes) % 3
    weight_E = (2 * torch.rand(edges_2E.shape[1], generator=draw)).index_fill(0, torch.tensor([0]), 0.0)
    return ClientGraph(
        name=f"client-{seed}",
        x_NF=torch.randn(num_nodes, NUM_FEATURES, generator=draw),
        edge_index_2E=edges_2E,
        y_N=torch.randint(NUM_CLASSES, (num_nodes,), generator=draw),
        train_mask_N=role_N == 0,
        val_mask_N=role_N == 1,
        test_mask_N=role_N == 2,
        node_idx_N=torch.arange(num_nodes),
        edge_weight_E=weight_E if weighted else None,
        edge_attr_EK=torch.randn(edges_2E.shape[1], attributes, generator=draw) if attributes else None,
    )


def batch_of(*graphs: ClientGraph, sparse: bool = False) -> GraphBatch:
    """Their batch in float64, with a client dimension."""
    layout = {"sparse_features": sparse}
    collator = GraphCollator(graphs, layout=layout, device=torch.device("cpu"), dtype=torch.float64)
    return collator(range(len(graphs)))


def one_batch(graph: ClientGraph, *, sparse: bool = False) -> GraphBatch:
    """The batch of one client without that dimension."""
    return single(batch_of(graph, sparse=sparse))


def normalized(graph: ClientGraph, edges_2E: Tensor | None = None, weight_E: Tensor | None = None) -> Tensor:
    """PyG's Â as it is applied from the left: row t sums what t receives, (N, N)."""
    if edges_2E is None:
        edges_2E, weight_E = graph.edge_index_2E, graph.edge_weight_E
    weight_E = None if weight_E is None else weight_E.double()
    (source_E, target_E), value_E = gcn_norm(edges_2E, weight_E, graph.num_nodes, dtype=torch.float64)
    dense_NN = torch.zeros(graph.num_nodes, graph.num_nodes, dtype=torch.float64)
    return dense_NN.index_put((target_E, source_E), value_E, accumulate=True)
