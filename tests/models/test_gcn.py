"""Sparse products of many clients, and the graph convolutions on them."""

import pytest
import torch
from torch import nn
from torch_geometric.nn import GCNConv

from fl_lightning.batches.base import single
from fl_lightning.batches.graphs import GraphCollator
from fl_lightning.data import ClientGraph
from fl_lightning.kernels.block_sparse import BlockSparse, block_matmul
from fl_lightning.kernels.randomness import dropout
from fl_lightning.models import GCN
from fl_lightning.models.gcn import convolve


def collator(graphs, dtype=torch.float64) -> GraphCollator:
    return GraphCollator(graphs, device=torch.device("cpu"), dtype=dtype)


def with_features(graph: ClientGraph, x_NF: torch.Tensor) -> ClientGraph:
    return ClientGraph(**{**vars(graph), "x_NF": x_NF})


@pytest.fixture
def operator() -> BlockSparse:
    """Three different 4 x 5 blocks; the second has an empty row, the third a single number."""
    draw = torch.Generator().manual_seed(0)
    blocks = [torch.randn(4, 5, generator=draw) * (torch.rand(4, 5, generator=draw) < 0.5) for _ in range(2)]
    blocks[1][2] = 0
    blocks.append(torch.zeros(4, 5).index_put((torch.tensor(3), torch.tensor(1)), torch.tensor(-2.0)))
    whole = torch.block_diag(*blocks).double()
    built = BlockSparse.from_coordinates(whole.nonzero().T, whole[whole != 0], (4, 5), len(blocks))
    built.dense = torch.stack(blocks).double()
    return built


def test_mapped_block_product_is_a_loop_over_dense_blocks(operator) -> None:
    x = torch.randn(3, 5, 2, dtype=torch.float64, requires_grad=True)

    product = torch.vmap(lambda x: block_matmul(operator, x))(x)

    torch.testing.assert_close(product, operator.dense @ x, rtol=1e-13, atol=1e-14)
    upstream = torch.randn_like(product)
    (gradient,) = torch.autograd.grad(product, x, upstream)
    torch.testing.assert_close(gradient, operator.dense.mT @ upstream, rtol=1e-13, atol=1e-14)


def test_gradients_of_the_block_product(operator) -> None:
    stacked = torch.randn(3, 5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: torch.vmap(lambda x: block_matmul(operator, x))(x), stacked)
    assert torch.autograd.gradgradcheck(
        lambda x: block_matmul(operator, x).sin(), stacked.detach().flatten(0, 1)[:15].requires_grad_()
    )


def test_one_matrix_for_all_blocks_is_a_loop_too(operator) -> None:
    x = torch.randn(5, 2, dtype=torch.float64)
    product = operator.multiply(x.expand(3, 5, 2))
    torch.testing.assert_close(product, operator.dense @ x, rtol=1e-13, atol=1e-14)
    assert torch.equal(product, operator.multiply(x.repeat(3, 1, 1)))


def test_one_block_for_all_clients_has_the_gradient_of_its_product() -> None:
    dense = torch.randn(4, 5, dtype=torch.float64) * torch.eye(4, 5)
    shared = BlockSparse.from_coordinates(dense.nonzero().T, dense[dense != 0], (4, 5), 1)
    x = torch.randn(3, 5, 2, dtype=torch.float64, requires_grad=True)
    for product in (block_matmul(shared, x), torch.vmap(lambda x: block_matmul(shared, x))(x)):
        torch.testing.assert_close(product, dense @ x, rtol=1e-13, atol=1e-14)
        (gradient,) = torch.autograd.grad(product.square().sum(), x)
        torch.testing.assert_close(gradient, 2 * dense.T @ (dense @ x), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("num_clients", [1, 5])
@pytest.mark.parametrize("mapped", [False, True], ids=["stack", "vmap"])
@pytest.mark.parametrize("features", ["dense", "propagated", "sparse"])
def test_gradients_of_a_convolution(features, mapped, num_clients, graphs) -> None:
    if features == "sparse":
        wide = [torch.cat([g.x_NF * (g.x_NF > 1), torch.zeros(g.num_nodes, 30)], dim=1) for g in graphs]
        graphs = [with_features(graph, x_NF) for graph, x_NF in zip(graphs, wide, strict=True)]
    batch = collator(graphs)(range(num_clients))
    num_features = graphs[0].num_features
    shapes = [(batch.y.shape[1], num_features), (num_features, 2), (2,)]
    x, weight, bias = (torch.randn(num_clients, *s, dtype=torch.float64, requires_grad=True) for s in shapes)

    def run(*inputs):
        def one(inputs, tensors):
            given = inputs if features == "dense" else (None, *inputs)
            return convolve(*given, batch.replace(tensors)).sin()

        return (torch.vmap(one) if mapped else one)(inputs, batch.tensors())

    inputs = (x, weight, bias) if features == "dense" else (weight, bias)
    assert torch.autograd.gradcheck(run, inputs, fast_mode=True)
    with torch.no_grad():
        dense = run(*inputs)
        for client in range(num_clients):
            one = single(collator(graphs)([client]))
            given = (x[client, : len(one.y)],) if features == "dense" else (None,)
            alone = convolve(*given, weight[client], bias[client], one).sin()
            torch.testing.assert_close(dense[client, : len(one.y)], alone, rtol=1e-12, atol=1e-12)
    if mapped:
        assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize(
    ("probability", "dtype"), [(0.0, torch.float64), (0.3, torch.float64), (0.5, torch.float32), (0.6, torch.bfloat16)]
)
def test_training_drops_what_dropout_drops_in_every_layer(probability, dtype, graphs) -> None:
    batch = collator(graphs, dtype)(range(5)).replace({"key": torch.arange(5) * 1_000_003 + 17})
    net = GCN(graphs[0].num_features, 3, hidden_channels=6, num_layers=3, dropout=probability).to(dtype).train()
    shapes = {name: parameter.shape for name, parameter in net.named_parameters()}
    parameters = {name: torch.randn(5, *shape, dtype=dtype) for name, shape in shapes.items()}
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in parameters.items()}
    output = torch.func.functional_call(net, leaves, (batch,))

    plain = {name: tensor.clone().requires_grad_() for name, tensor in parameters.items()}
    h = None
    for layer in range(3):
        embedding = convolve(h, plain[f"convs.{layer}.weight"], plain[f"convs.{layer}.bias"], batch)
        h = dropout(embedding.relu(), batch.key + layer, probability)
    logits = h @ plain["head.weight"].mT + plain["head.bias"][:, None]

    torch.testing.assert_close(output.logits, logits)
    torch.testing.assert_close(output.embedding, embedding)
    actual = torch.autograd.grad(output.logits.sum(), list(leaves.values()))
    expected = torch.autograd.grad(logits.sum(), list(plain.values()))
    torch.testing.assert_close(actual, expected)


def test_chosen_blocks_are_cut_out_of_both_matrices(operator) -> None:
    chosen = operator.select(torch.tensor([2, 0]), 4)
    expected = torch.block_diag(operator.dense[2], operator.dense[0])
    assert torch.equal(chosen.matrix.to_dense(), expected)
    assert torch.equal(chosen.transposed.to_dense(), expected.T)
    assert chosen.num_blocks == 2


@pytest.mark.parametrize("sparse", [False, True])
def test_chosen_clients_make_the_batch_that_they_would_make_alone(sparse, graphs, assert_same) -> None:
    if sparse:
        graphs = [with_features(g, torch.cat([g.x_NF * (g.x_NF > 1), torch.zeros(g.num_nodes, 30)], 1)) for g in graphs]
    batches = collator(graphs)
    everyone = batches(range(5))
    for clients in ([4, 2], [1, 0, 3], [3]):
        chosen, alone = everyone.select(torch.tensor(clients)), batches(clients)
        assert_same(dict(chosen.tensors()), dict(alone.tensors()))
        for own, other in ((chosen.adjacency, alone.adjacency), (chosen.sparse_x, alone.sparse_x)):
            if own is None or other is None:
                assert own is other is None
                continue
            assert own.num_blocks == other.num_blocks == len(clients)
            for one, two in ((own.matrix, other.matrix), (own.transposed, other.transposed)):
                assert torch.equal(one.crow_indices(), two.crow_indices())
                assert torch.equal(one.col_indices(), two.col_indices())
                assert torch.equal(one.values(), two.values())
                assert one.shape == two.shape
                assert one.crow_indices().dtype == one.col_indices().dtype == torch.int32


def test_features_keep_their_type_beside_another_type_of_matrix(operator) -> None:
    assert block_matmul(operator, torch.ones(15, 2)).dtype == torch.float32


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_gcn_is_a_stack_of_pyg_convolutions(sparse, num_layers, graphs) -> None:
    draw = torch.Generator().manual_seed(0)
    if sparse:  # bag of words: two words in 64
        graphs = [
            with_features(
                g, torch.zeros(g.num_nodes, 64).scatter(1, torch.randint(64, (g.num_nodes, 2), generator=draw), 1.5)
            )
            for g in graphs
        ]
    batches = collator(graphs)
    assert batches.sparse_features == sparse
    net = GCN(graphs[0].num_features, 3, hidden_channels=5, num_layers=num_layers).double().eval()
    nn.init.normal_(net.convs[0].bias)
    convs = []
    for own in net.convs:
        conv = GCNConv(*own.weight.shape).double()
        with torch.no_grad():
            conv.lin.weight.copy_(own.weight.T)
            conv.bias.copy_(own.bias)
        convs.append(conv)

    for client, graph in enumerate(graphs):
        output = net(single(batches([client])))
        h = graph.x_NF.double()
        for conv in convs:
            embedding = conv(h, graph.edge_index_2E)
            h = embedding.relu()
        torch.testing.assert_close(output.embedding, embedding, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(output.logits, net.head(h), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_client_does_not_see_the_others_of_its_batch(sparse, graphs, make_model) -> None:
    if sparse:
        graphs = [with_features(graph, graph.x_NF * (torch.arange(6) == i)) for i, graph in enumerate(graphs)]
        graphs = [with_features(g, torch.cat([g.x_NF, torch.zeros(g.num_nodes, 30)], dim=1)) for g in graphs]
    batches = collator(graphs)
    assert batches.sparse_features == sparse
    model = make_model()
    model.build(graphs[0].num_features, 3)
    model.double().train()
    parameters = dict(model.net.named_parameters())
    keys = torch.arange(5) * 1_000_003 + 17

    def loss_and_logits(batch, clients):
        def run(parameters, tensors):
            one = batch.replace(tensors)
            output = model.output(parameters, one)
            return model.loss(output, one), output.logits

        stacked = {name: parameter.expand(len(clients), *parameter.shape) for name, parameter in parameters.items()}
        return torch.vmap(run)(stacked, batch.tensors() | {"key": keys[clients]})

    everyone = loss_and_logits(batches(range(5)), list(range(5)))
    for clients in ([4, 0], [1, 4], [4]):
        loss, logits = loss_and_logits(batches(clients), clients)
        for row, client in enumerate(clients):
            size = graphs[client].num_nodes
            torch.testing.assert_close(loss[row], everyone[0][client], rtol=1e-12, atol=0)
            torch.testing.assert_close(logits[row, :size], everyone[1][client, :size], rtol=1e-11, atol=1e-13)


def test_padding_has_no_weight(graphs) -> None:
    batch = collator(graphs)([0, 4])

    padding = ~batch.example_mask
    assert padding.sum() == graphs[0].num_nodes - graphs[4].num_nodes
    for mask in (batch.train_mask, batch.val_mask, batch.test_mask):
        assert not (mask & padding).any()
    assert batch.train_mask.sum(dim=1).tolist() == [graphs[0].num_examples, graphs[4].num_examples]
    empty = batch.adjacency.matrix.to_dense().view(2, 30, 60)[1, 8:]
    assert (empty == 0).all()


def test_a_batch_of_several_clients_has_no_single_form(graphs) -> None:
    with pytest.raises(ValueError, match="this one has 2"):
        single(collator(graphs)([0, 1]))
