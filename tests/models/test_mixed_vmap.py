"""Nets under vmap where some parameters, the key or the batch are the same for all clients."""

import dataclasses
import math

import pytest
import torch
from mixture_checks import (
    Mixture,
    assert_close,
    check_directly_with_common_parameters,
    check_mixtures,
    check_second_derivatives,
    value,
)
from net_checks import random

from fl_lightning.batches import ClientExamples, Collator, ExampleCollator, GraphCollator
from fl_lightning.batches.base import single
from fl_lightning.models import CNN, GCN, MLP, GraphSAGE, GRUForecaster, LinearModel, MaskedGCN, ProjectionGCN

CPU64 = {"device": torch.device("cpu"), "dtype": torch.float64}
CLIENTS, SHARED = [0, 3, 4], 1  # graphs of 30, 12 and 8 nodes, and one of 24

graph_nets = pytest.mark.parametrize(
    ("kind", "features", "settings"),
    [
        (GCN, "sparse", {"num_layers": 2, "dropout": 0.5}),
        (GCN, "dense", {"num_layers": 2, "dropout": 0.5}),
        (GCN, "sparse", {"num_layers": 1, "dropout": 0.0}),
        (GraphSAGE, "sparse", {"num_layers": 2, "dropout": 0.4}),
        (GraphSAGE, "dense", {"num_layers": 1, "dropout": 0.0}),
        (MaskedGCN, "sparse", {"num_layers": 1, "dropout": 0.4}),
        (MaskedGCN, "dense", {"num_layers": 2, "dropout": 0.4}),
        (ProjectionGCN, "sparse", {"num_layers": 1, "dropout": 0.3}),
        (ProjectionGCN, "dense", {"num_layers": 2, "dropout": 0.3, "bandwidth": 0.02, "masked": False}),
        (ProjectionGCN, "sparse", {"num_layers": 1, "dropout": 0.3, "ordering": "hard", "masked": False}),
    ],
    ids=str,
)
example_nets = pytest.mark.parametrize(
    ("net", "shape"),
    [
        (LinearModel((5,), 2), (5,)),
        (MLP((5,), 2, hidden_channels=4, dropout=0.3), (5,)),
        (CNN((2, 7, 8), 3, filters=(2,), hidden_units=4, dropout=0.3), (2, 7, 8)),
        (CNN((1, 10, 10), 3, filters=(2, 3)), (1, 10, 10)),
        (GRUForecaster((3, 2), 2, hidden_channels=3), (3, 2)),
    ],
    ids=lambda value: type(value).__name__,
)


def graph_collator(graphs, features: str) -> GraphCollator:
    if features == "sparse":  # two words in 60
        draw = torch.Generator().manual_seed(0)
        words = [torch.randint(60, (graph.num_nodes, 2), generator=draw) for graph in graphs]
        bags = [torch.zeros(len(pair), 60).scatter(1, pair, 1.5) for pair in words]
        graphs = [dataclasses.replace(graph, x_NF=bag) for graph, bag in zip(graphs, bags, strict=True)]
    collator = GraphCollator(graphs, **CPU64)
    assert collator.sparse_features == (features == "sparse")
    return collator


def example_collator(shape) -> ExampleCollator:
    clients = []
    for size in (7, 4, 3, 5, 6):
        everyone = torch.ones(size, dtype=torch.bool)
        masks = dict.fromkeys(("train_mask_N", "val_mask_N", "test_mask_N"), everyone)
        x_NX = random(size, *shape, seed=size)
        clients.append(ClientExamples(name=str(size), x_NX=x_NX, y_N=torch.arange(size) % 2, **masks))
    return ExampleCollator(clients, **CPU64)


def graph_net(kind, settings, collator: Collator):
    torch.manual_seed(0)
    net = kind(collator.graphs[0].num_features, 3, hidden_channels=4, **settings)
    for name, parameter in net.named_parameters():
        if "bias" in name:
            torch.nn.init.normal_(parameter)
    return net


@pytest.fixture(autouse=True)
def smoothing(request, monkeypatch) -> None:
    """Wide kernels by the series and narrow ones densely, whatever the number of nodes."""
    settings = getattr(request.node, "callspec", None)
    narrow = settings is not None and "bandwidth" in settings.params.get("settings", {})
    limit = math.inf if narrow else 0.0
    monkeypatch.setattr("fl_lightning.kernels.kernel_smoothing._DENSE_NODES_PER_FEATURE", limit)


@graph_nets
def test_clients_get_what_they_get_alone_on_graphs(kind, features, settings, graphs) -> None:
    collator = graph_collator(graphs, features)
    check_mixtures(graph_net(kind, settings, collator), collator, CLIENTS, SHARED)


@example_nets
def test_clients_get_what_they_get_alone_on_examples(net, shape) -> None:
    check_mixtures(net, example_collator(shape), CLIENTS, SHARED)


@example_nets
def test_a_stack_takes_common_parameters_of_examples(net, shape) -> None:
    check_directly_with_common_parameters(net, example_collator(shape), CLIENTS)


@pytest.mark.parametrize("features", ["dense", "sparse"])
def test_a_stack_takes_common_parameters_of_graphs(features, graphs) -> None:
    collator = graph_collator(graphs, features)
    net = graph_net(GCN, {"dropout": 0.5}, collator)
    check_directly_with_common_parameters(net, collator, CLIENTS)
    check_directly_with_common_parameters(net, collator, [2])


@graph_nets
def test_second_derivatives_on_graphs(kind, features, settings, graphs) -> None:
    collator = graph_collator(graphs, features)
    check_second_derivatives(graph_net(kind, settings, collator), collator, CLIENTS)


@example_nets
def test_second_derivatives_on_examples(net, shape) -> None:
    check_second_derivatives(net, example_collator(shape), CLIENTS)


def test_a_stack_has_first_derivatives_only_and_says_so(graphs) -> None:
    collator = graph_collator(graphs, "sparse")
    net = graph_net(GCN, {"dropout": 0.5}, collator).double()
    mixture = Mixture(net, collator, CLIENTS)
    for inputs in (list(mixture.parameters.values()), [mixture.parameters["convs.0.bias"]]):
        gradients = torch.autograd.grad(mixture.directly().sum(), inputs, create_graph=True)
        with pytest.raises(RuntimeError, match="first derivative only"):
            torch.autograd.grad(sum(gradient.square().sum() for gradient in gradients), inputs)
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda own: value(net, own, mixture.batch, mixture.scale).sum())(mixture.parameters)


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize("common", [False, True])
@pytest.mark.parametrize("features", ["dense", "sparse"])
def test_several_models_for_every_client_are_mapped_within_or_around_the_clients(
    features, common, outside, graphs
) -> None:
    """Two vmaps, of which one is over the clients; parameters are those of the client, or the same for all."""
    collator = graph_collator(graphs, features)
    net = graph_net(GCN, {"dropout": 0.5}, collator).double().train()
    batch = collator(CLIENTS)
    tensors = batch.tensors() | {"key": torch.tensor([3, 5, 8])}
    scale = torch.ones((), dtype=torch.float64)
    stacked = {
        name: (random(*([4] if common else [4, 3]), *p.shape, seed=number)).requires_grad_()
        for number, (name, p) in enumerate(net.named_parameters())
    }

    def one(own, tensors):
        return value(net, own, batch.replace(tensors), scale)

    if outside:
        value_KC = torch.vmap(lambda own: torch.vmap(one, in_dims=(None if common else 0, 0))(own, tensors))(stacked)
    else:
        models = torch.vmap(one, in_dims=(0, None))
        value_KC = torch.vmap(models, in_dims=(None if common else 1, 0), out_dims=1)(stacked, tensors)

    expected = []
    for model in range(4):
        for row, client in enumerate(CLIENTS):
            alone = single(collator([client])).replace({"key": tensors["key"][row]})
            own = {name: t[model] if common else t[model, row] for name, t in stacked.items()}
            expected.append(value(net, own, alone, scale))
    expected_KC = torch.stack(expected).view(4, 3)
    assert_close(value_KC, expected_KC, "values")
    leaves, weights = list(stacked.values()), random(4, 3)
    actual = torch.autograd.grad((value_KC * weights).sum(), leaves)
    assert_close(actual, torch.autograd.grad((expected_KC * weights).sum(), leaves), "gradients")
