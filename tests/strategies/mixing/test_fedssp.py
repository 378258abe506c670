"""FedSSP: filters, loss, preference and means by hand, and what it reduces to."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from both_executors import both_executors
from task_data import graph_data, graphs_of
from torch.optim import SGD

from fl_lightning import ClientModule, FederatedDataModule, Payload
from fl_lightning.batches.base import single
from fl_lightning.batches.graph_sets import GraphSetBatch, GraphSetCollator
from fl_lightning.callbacks import CommunicationLedger
from fl_lightning.federation import Federation
from fl_lightning.kernels.node_facts import node_facts, spectrum
from fl_lightning.models import PooledGCN, SpectralGNN
from fl_lightning.models.spectral_gnn import filters_at_edges
from fl_lightning.round.context import Context
from fl_lightning.strategies import FedPer, FedSSP
from fl_lightning.testing import check_strategy

KEPT = ("features.*", "attention.*", "convs.*", "preference", "head.*")
pytestmark = pytest.mark.filterwarnings("ignore:.*not use the graph's edge_weight")


@pytest.fixture(scope="module")
def graph_sets() -> FederatedDataModule:
    return graph_data(batch_size=4)


@pytest.fixture
def batch(graph_sets) -> GraphSetBatch:
    return single(GraphSetCollator(graph_sets.clients, device=torch.device("cpu"), dtype=torch.float64)([1]))


@pytest.fixture
def client(graph_sets) -> ClientModule:
    torch.manual_seed(0)
    client = ClientModule(functools.partial(SpectralGNN, hidden_channels=8, dropout=0.0))
    client.take_task(graph_sets.task)
    client.build(3, 2)
    return client.double().eval()


def set_up(client: ClientModule, **settings: Any) -> FedSSP:
    strategy = FedSSP(**settings)
    parameters = {name: tensor.detach() for name, tensor in client.parameter_dict().items()}
    known = {"num_features": 3, "seed": 0, "device": torch.device("cpu"), "num_outputs": 2}
    strategy.setup(Federation(num_clients=2, training_clients=(0, 1), parameters=parameters, **known))
    return strategy


def dense(batch: GraphSetBatch) -> torch.Tensor:
    edges = (batch.edge_operator.matrix.to_dense() != 0).double()
    return edges - torch.diag(edges.diagonal())


def test_filters_are_functions_of_the_laplacian(batch) -> None:
    """λ makes L, λ² makes L², and the same for all eigenvalues makes nothing at any edge."""
    facts = node_facts(batch.edge_operator, spectrum, owner=batch.node_mask)
    value = facts[:, 0]
    basis, mask = filters_at_edges(torch.stack([value, value.square(), torch.ones_like(value)], dim=1), facts, batch)
    edges = dense(batch)
    laplacian = torch.diag(edges.sum(dim=1)) - edges
    target, source = edges.nonzero().T  # edges are ordered by the node that they lead to
    assert int(mask.sum()) == len(target)
    expected = [(laplacian @ laplacian)[target, source] if power == 2 else -torch.ones(len(target)) for power in (1, 2)]
    torch.testing.assert_close(basis[mask][:, 0], expected[0].double())
    torch.testing.assert_close(basis[mask][:, 1], expected[1])
    torch.testing.assert_close(basis[mask][:, 2], torch.zeros(len(target)).double(), atol=1e-12, rtol=0)


def test_the_weights_of_the_edges_to_a_node_sum_to_one(client, batch) -> None:
    """So that the same message along all edges comes through as it is."""
    weight_ED = client.net.edge_weights(batch, 0.0)
    _, mask = filters_at_edges(
        torch.ones(len(batch.node_mask), 1).double(),
        node_facts(batch.edge_operator, spectrum, owner=batch.node_mask),
        batch,
    )
    target = dense(batch).nonzero()[:, 0]
    totals = torch.zeros(len(batch.node_mask), 8).double().index_add(0, target, weight_ED[mask])
    assert (totals > 0).all()
    shares = weight_ED[mask] / totals[target]
    sums = torch.zeros_like(totals).index_add(0, target, shares)
    torch.testing.assert_close(sums, torch.ones_like(sums))


def test_a_graph_does_not_depend_on_the_others(client, graph_sets) -> None:
    """In eval mode, also where the widths of the spectra and the padding differ."""
    collator = GraphSetCollator(graph_sets.clients, batch_size=2, device=torch.device("cpu"), dtype=torch.float64)
    whole = single(collator([1]))
    logits = client.output(client.parameter_dict(), whole).logits
    for drawn in whole.draws(torch.arange(4)):
        found = client.output(client.parameter_dict(), drawn).logits
        for row, count in zip(found, drawn.num_nodes, strict=True):
            near = (logits - row).abs().amax(dim=1) < 1e-9
            assert whole.num_nodes[near].tolist().count(int(count)) >= 1


def test_the_loss_by_hand(client, batch) -> None:
    strategy = set_up(client, mean_weight=3.0)
    parameters = client.parameter_dict()
    output = client.output(parameters, batch)
    labeled = torch.nn.functional.cross_entropy(output.logits[batch.train_mask], batch.y[batch.train_mask])
    first = strategy.objective(client, parameters, batch, Context())
    torch.testing.assert_close(first, labeled)
    mean = torch.arange(8).double()
    apart = output.embedding[batch.train_mask].mean(dim=0) - mean
    later = strategy.objective(client, parameters, batch, Context(received={"mean": mean}))
    torch.testing.assert_close(later, labeled + 3 / 2 * (apart**2).sum() / 8)


def test_the_preference_shifts_what_the_head_reads_and_takes_plain_steps(client, batch) -> None:
    strategy = set_up(client, preference_lr=0.1)
    parameters = {**client.parameter_dict(), "preference": torch.ones(8).double().requires_grad_()}
    output = client.output(parameters, batch)
    expected = (output.embedding + 1) @ parameters["head.weight"].T + parameters["head.bias"]
    torch.testing.assert_close(output.logits, expected)
    (gradient,) = torch.autograd.grad(
        strategy.objective(client, parameters, batch, Context()), parameters["preference"]
    )
    change = strategy.step_preference(
        client, parameters, {"preference": gradient, "head.bias": torch.ones(2)}, batch, Context()
    )
    torch.testing.assert_close(change.parameters["preference"], 1 - 0.1 * gradient)
    assert set(change.gradients or ()) == {"head.bias"}
    assert gradient.any()


def test_the_server_averages_encoders_and_means_alike(client) -> None:
    strategy = set_up(client)
    stage = strategy.stages(0)[0]
    assert all(name.startswith(("eigenvalue_encoder.", "filter_encoder.")) for name in strategy.shared)
    assert "mean" not in strategy.configure(stage, (0, 1)).extras
    upload = Payload(
        clients=(0, 1),
        parameters={n: torch.stack([m[0] * 0, m[0] * 0 + 4]) for n, m in strategy.models.items()},
        extras={"mean": torch.tensor([[0.0] * 8, [6.0] * 8]).double()},
        num_examples=torch.tensor([1, 99]),
    )
    strategy.aggregate(stage, upload)
    assert all(bool((model == 2).all()) for model in strategy.models.values())
    assert strategy.configure(stage, (1,)).extras["mean"].tolist() == [[3.0] * 8]
    for num_examples in ([0, 99], [0, 0]):  # a client without labels has no mean; without any, the last one stays
        strategy.aggregate(stage, dataclasses.replace(upload, num_examples=torch.tensor(num_examples)))
        assert strategy.configure(stage, (1,)).extras["mean"].tolist() == [[6.0] * 8]


@both_executors
def test_without_the_mean_it_is_fedper_whose_steps_are_plain(executor, graph_sets, make_trainer, assert_same) -> None:
    states = []
    for strategy in (
        FedSSP(mean_weight=0.0, preference_lr=0.01),
        FedPer(personal=KEPT, num_epochs=1, weighting="equal"),
    ):
        trainer = make_trainer(executor=executor(), num_rounds=2, precision="64-true")
        model = functools.partial(SpectralGNN, hidden_channels=8)
        trainer.fit(ClientModule(model, functools.partial(SGD, lr=0.01)), graph_sets, strategy)
        states.append(dict(trainer.run.executor.state().parameters))
    assert states[0]["preference"].any()
    assert_same(*states, tolerance=1e-12)


def test_what_leaves_a_client(graph_sets, make_trainer) -> None:
    trainer = make_trainer(num_rounds=2, callbacks=CommunicationLedger())
    trainer.fit(ClientModule(functools.partial(SpectralGNN, hidden_channels=8)), graph_sets, FedSSP())
    numbers = 9 * 8 + 8 + 4 * 8 + 8 * 8 + 2 * 2 * 8  # both encoders, without running statistics
    first, last = (row["comm/bytes_total"] for row in trainer.run.history)
    assert first == 3 * 4 * (2 * numbers + 8)  # the mean goes up
    assert last - first == 3 * 4 * (2 * numbers + 2 * 8)  # and down


def test_clients_means_come_closer(graph_sets, make_trainer) -> None:
    apart: dict[float, list[float]] = {}

    class Noting(FedSSP):
        def aggregate(self, stage, upload) -> None:
            super().aggregate(stage, upload)
            apart.setdefault(self.mean_weight, []).append(float(upload.extras["mean"].std(dim=0).mean()))

    for weight in (1e-9, 3.0):
        model = functools.partial(SpectralGNN, hidden_channels=8, dropout=0.0)
        client = ClientModule(model, functools.partial(SGD, lr=0.02))
        make_trainer(num_rounds=12).fit(client, graph_sets, Noting(mean_weight=weight))
    without, with_term = (torch.tensor(values[-6:]).mean() for values in apart.values())
    assert with_term < 0.7 * without


@pytest.mark.parametrize("setting", ["mean_weight", "preference_lr"])
def test_settings(setting) -> None:
    with pytest.raises(ValueError, match=rf"strategy\.{setting} must not be negative, got -1"):
        FedSSP(**{setting: -1})


@pytest.mark.parametrize(("width", "heads"), [(9, 3), (10, 4)])
def test_widths(width, heads) -> None:
    with pytest.raises(
        ValueError, match=f"hidden_channels={width} is impossible: set it to an even multiple of num_he"
    ):
        SpectralGNN(3, 2, hidden_channels=width, num_heads=heads)


def test_another_net_is_refused(graph_sets, make_trainer) -> None:
    with pytest.raises(ValueError, match="FedSSP needs a net with a preference: set"):
        make_trainer().fit(ClientModule(PooledGCN), graph_sets, FedSSP())


@pytest.mark.full
def test_the_contract_on_sets_of_graphs() -> None:
    data = FederatedDataModule(graphs_of(5), batch_size=6)
    data.setup()
    client = ClientModule(functools.partial(SpectralGNN, hidden_channels=8), functools.partial(SGD, lr=0.02))
    check_strategy(FedSSP(), client=client, data=data)
