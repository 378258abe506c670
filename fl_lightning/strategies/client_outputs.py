"""Client outputs that are shared by strategies and callbacks.

Liang, Zhao, She, Li, Tay: "Personalized Subgraph Federated Learning with Sheaf Collaboration", arXiv:2405.13056v2,
eq. 3: the graph-level embedding. Baek, Jeong, Jin, Yoon, Hwang: "Personalized Subgraph Federated Learning", ICML 2023,
section 4.1: the functional embedding, that of a random graph which is the same for all clients.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.batches.base import Batch, single
from fl_lightning.batches.client_graph import ClientGraph
from fl_lightning.batches.graphs import GraphBatch, GraphCollator
from fl_lightning.round.client import ClientModule
from fl_lightning.round.context import Context, Parameters
from fl_lightning.strategies.base import server_dtype


def graph_embedding(client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
    """Mean of the node embeddings of one graph, (D,).

    Of whole graphs and of pairs of nodes it is the mean over those that train; 0 if there are none.
    """
    embedding_ND = client.output(parameters, batch).embedding
    embedding_ND = embedding_ND.to(server_dtype(embedding_ND.dtype))
    weight_N = batch.summary_mask.to(embedding_ND.dtype)
    return weight_N @ embedding_ND / weight_N.sum().clamp(min=1)


def received_embedding(client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
    """Mean of the node embeddings of one graph with the parameters that the client began the stage with, (D,)."""
    return graph_embedding(client, context.anchor, batch, context)


def means_by_class(row_ND: Tensor, batch: Batch, chosen_N: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """One client's mean row over each class's chosen examples (0 if there are none), (K, D), and their number, (K,)."""
    classes_K = torch.arange(num_classes, device=batch.y.device)
    member_NK = ((batch.y[:, None] == classes_K) & chosen_N[:, None]).to(row_ND)
    counts_K = member_NK.sum(dim=0)
    return member_NK.T @ row_ND / counts_K.clamp(min=1)[:, None], counts_K


def proxy_graph(
    num_features: int | tuple[int, ...],
    draw: torch.Generator,
    *,
    num_blocks: int = 5,
    nodes_per_block: int = 100,
    intra_edge_probability: float = 0.1,
    inter_edge_probability: float = 0.0,
) -> ClientGraph:
    """A random partition graph with standard normal features and without labels.

    Args:
        num_features: Width of the features.
        draw: Source of randomness.
        num_blocks: Number of blocks.
        nodes_per_block: Nodes in each block.
        intra_edge_probability: Probability of an edge between two nodes of the same block.
        inter_edge_probability: Probability of an edge between two nodes of different blocks.

    Raises:
        ValueError: The clients' inputs are not vectors, so they are not those of nodes.
    """
    if isinstance(num_features, tuple):
        raise ValueError(f"a proxy graph needs clients with graphs; these have examples of shape {num_features}")
    num_nodes = num_blocks * nodes_per_block
    block_N = torch.arange(num_nodes) // nodes_per_block
    same_NN = block_N[:, None] == block_N
    drawn_NN = torch.rand(num_nodes, num_nodes, generator=draw)
    linked_NN = (drawn_NN < torch.where(same_NN, intra_edge_probability, inter_edge_probability)).triu(1)
    nobody_N = torch.zeros(num_nodes, dtype=torch.bool)
    return ClientGraph(
        name="proxy",
        x_NF=torch.randn(num_nodes, num_features, generator=draw),
        edge_index_2E=(linked_NN | linked_NN.T).nonzero().T,
        y_N=torch.full((num_nodes,), -1),
        train_mask_N=nobody_N,
        val_mask_N=nobody_N,
        test_mask_N=nobody_N,
        node_idx_N=torch.arange(num_nodes),
    )


@dataclass(frozen=True)
class FunctionalEmbedding:
    """The mean embedding of the proxy graph by a client's model; the client's own graph is not used."""

    proxy: GraphBatch

    def __call__(self, client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
        """Mean output of the last graph convolution, (D,)."""
        return graph_embedding(client, parameters, self.proxy, context)

    @classmethod
    def on(cls, graph: ClientGraph, parameter: Tensor) -> "FunctionalEmbedding":
        """Create it for a proxy graph, with the device and type of a client's parameters."""
        return cls(single(GraphCollator([graph], device=parameter.device, dtype=parameter.dtype)([0])))
