"""GraphSAGE against the formula, on sparse and dense features."""

import pytest
import torch

from fl_lightning.batches.base import single
from fl_lightning.batches.graphs import GraphCollator
from fl_lightning.models import GraphSAGE


@pytest.mark.parametrize("sparse", [True, False])
def test_a_convolution_is_the_mean_of_the_neighbors(sparse, graphs) -> None:
    layout = {"sparse_features": sparse}
    batch = single(GraphCollator(graphs, layout=layout, device=torch.device("cpu"), dtype=torch.float64)([0]))
    torch.manual_seed(0)
    net = GraphSAGE(6, 3, hidden_channels=4, num_layers=1, dropout=0.0).double()
    conv, x_NF, edge_2E = net.convs[0], graphs[0].x_NF.double(), graphs[0].edge_index_2E
    expected = []
    for node in range(len(x_NF)):
        near = edge_2E[1, edge_2E[0] == node]
        mean = x_NF[near].mean(dim=0) if len(near) else torch.zeros(6).double()
        expected.append(x_NF[node] @ conv.weight + mean @ conv.neighbor_weight + conv.bias)
    torch.testing.assert_close(net(batch).embedding, torch.stack(expected))


@pytest.mark.parametrize("sparse", [True, False])
def test_features_of_nodes_and_their_maps(sparse, graphs) -> None:
    layout = {"sparse_features": sparse}
    batch = single(GraphCollator(graphs, layout=layout, device=torch.device("cpu"), dtype=torch.float64)([1]))
    node_I = torch.tensor([3, 0, 3, 7])
    torch.testing.assert_close(batch.features_of(node_I), graphs[1].x_NF[node_I].double())
    weight_FD = torch.randn(6, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(batch.transform(weight_FD), graphs[1].x_NF.double() @ weight_FD)
