"""FedIIH: the divergence by hand, what it reduces to, who mixes which factor, and clients that agree in one view."""

import functools
from typing import Any

import pytest
import torch
from both_executors import both_executors
from one_client import one_client
from path_graph import computed, path_graph
from torch import Tensor

from fl_lightning import Payload, SequentialExecutor
from fl_lightning.callbacks import CommunicationLedger
from fl_lightning.data import ClientGraph
from fl_lightning.federation import Federation
from fl_lightning.models import DisentangledGCN
from fl_lightning.models.disentangled_gcn import route
from fl_lightning.round.context import Context
from fl_lightning.strategies import FedAvg, FedIIH
from fl_lightning.strategies.mixing.fediih import divergence, mean_latents


@pytest.fixture
def fit(federation, make_model, make_trainer):
    """Run on the graphs."""

    def run(strategy, executor=SequentialExecutor, data=None, **settings):
        trainer = make_trainer(executor=executor(), seed=1, **settings)
        trainer.fit(make_model(FedIIH, dropout=0.5), data or federation, strategy)
        return trainer

    return run


def test_divergence_of_two_distributions() -> None:
    mean, log_variance = torch.zeros(2).double(), torch.zeros(2).double()
    other_mean, other_log_variance = torch.tensor([1.0, 0.0]).double(), torch.tensor([0.0, 4.0]).log().double()
    other_log_variance[0] = 0.0
    actual = divergence(mean, log_variance, other_mean, other_log_variance)
    assert actual.item() == pytest.approx(0.23657178, abs=1e-8)
    assert divergence(other_mean, other_log_variance, mean, log_variance).item() == pytest.approx(actual.item())
    assert divergence(other_mean, other_log_variance, other_mean, other_log_variance).item() == 0
    alike = 1 - actual / torch.tensor(2.0).double().log()
    assert alike.item() == pytest.approx(0.65869907, abs=1e-8)
    row = (10 * torch.stack([torch.ones_like(alike), alike])).softmax(dim=0)
    torch.testing.assert_close(row, torch.tensor([0.96810864, 0.03189136], dtype=torch.float64), rtol=0, atol=1e-8)


@pytest.mark.parametrize("latent", [-1000.0, 1000.0, -1e15, 1e15])
def test_finite_latents_of_any_size_leave_the_mixing_finite(latent) -> None:
    """The variance of one client was 0 or infinite in floating point, and the run ended: the strategy was blamed."""
    for temperature in (0.0, 10.0, 1e4):
        strategy = server(temperature)
        upload = answer(strategy, [(0.0, 0.0), (0.0, 0.5), (latent, -latent)])
        strategy.aggregate(strategy.training(0), upload)
        mixing = strategy.mixing_matrix(upload)["factors.0.*"]
        expected = torch.tensor([[0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0, 1]]) if temperature else torch.full((3, 3), 1 / 3)
        torch.testing.assert_close(mixing, expected)
        assert all(model.isfinite().all() for model in strategy.models.values())
    apart = divergence(*torch.tensor([[-1000.0], [-1000.0], [-1001.0], [-1000.0]]))
    assert apart.isfinite().all()


def server(temperature: float = 10.0) -> FedIIH:
    """Three training clients and an unseen client, two factors of width one."""
    start = {"factors.0.weight": torch.zeros(1, 1), "factors.0.bias": torch.zeros(1)}
    start |= {"factors.1.weight": torch.zeros(1, 1), "factors.1.bias": torch.zeros(1)}
    start |= {"heads.0": torch.zeros(1, 1), "heads.1": torch.zeros(1, 1), "bias": torch.zeros(1)}
    known = {"num_features": 1, "seed": 0, "device": torch.device("cpu"), "num_outputs": 1}
    strategy = FedIIH(similarity_temperature=temperature)
    strategy.setup(Federation(num_clients=4, training_clients=(0, 1, 2), parameters=start, **known))
    return strategy


def answer(strategy: FedIIH, latents: list[tuple[float, float]], clients: tuple[int, ...] = (0, 1, 2)) -> Payload:
    models = {name: torch.tensor([1.0, 2.0, 4.0, 8.0])[list(clients)] for name in strategy.shared}
    return Payload(
        clients=clients,
        parameters={name: value.view(-1, *strategy.models[name].shape[1:]) for name, value in models.items()},
        extras={"latents": torch.tensor(latents)[..., None]},
        num_examples=torch.tensor([1, 2, 3, 4])[list(clients)],
    )


def test_each_factor_is_mixed_among_those_alike_in_it() -> None:
    strategy = server(temperature=1e4)
    upload = answer(strategy, [(0.0, 0.0), (0.0, 1.0), (1.0, 1.0)])
    strategy.aggregate(strategy.training(0), upload)
    first, second = [[0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0, 1]], [[1, 0, 0], [0, 0.5, 0.5], [0, 0.5, 0.5]]
    mixing = strategy.mixing_matrix(upload)
    torch.testing.assert_close(mixing["factors.0.*"], torch.tensor(first, dtype=torch.float32))
    torch.testing.assert_close(mixing["heads.1"], torch.tensor(second, dtype=torch.float32))
    for name, expected in {
        "factors.0.weight": [1.5, 1.5, 4],
        "heads.0": [1.5, 1.5, 4],
        "factors.1.bias": [1, 3, 3],
        "bias": [7 / 3] * 3,
    }.items():
        torch.testing.assert_close(strategy.models[name][:3].flatten(), torch.tensor(expected).float())
    assert strategy.metrics()["server/factors_apart"] == pytest.approx(0.5)
    assert list(strategy.matrices()) == ["mixing of factor 0", "mixing of factor 1"]


def test_equal_latents_are_mixed_evenly() -> None:
    strategy = server()
    strategy.aggregate(strategy.training(0), answer(strategy, [(0.3, 0.2)] * 3))
    torch.testing.assert_close(strategy.models["heads.1"][:3].flatten(), torch.full((3,), 7 / 3))
    assert strategy.metrics() == pytest.approx({"server/mixing_breadth": 1.0, "server/factors_apart": 0.0})


def test_an_unseen_client_has_factors_of_those_like_it() -> None:
    strategy = server(temperature=1e4)
    strategy.aggregate(strategy.training(0), answer(strategy, [(0.0, 0.0), (1.0, 1.0), (2.0, 2.0)]))
    assert strategy.mixed_models((3,)).parameters["heads.0"].item() == pytest.approx(7 / 3)
    strategy.onboard(strategy.training(0), answer(strategy, [(2.0, 0.0)], (3,)))
    actual = {name: tensor.item() for name, tensor in strategy.mixed_models((3,)).parameters.items()}
    assert [actual[name] for name in ("heads.0", "heads.1", "bias")] == pytest.approx([4, 1, 7 / 3])


@both_executors
def test_without_temperature_it_averages_plainly(executor, fit, assert_same) -> None:
    averaged = fit(FedAvg(num_epochs=1, weighting="equal"), executor, precision="64-true").run.executor.state()
    actual = fit(FedIIH(similarity_temperature=0.0), executor, precision="64-true").run.executor.state()
    assert_same(dict(actual.tensors()), dict(averaged.tensors()), tolerance=1e-10)


@both_executors
def test_with_much_temperature_only_the_bias_is_mixed(executor, fit, assert_same) -> None:
    strategy = FedIIH(similarity_temperature=1e12)
    state = fit(strategy, executor, precision="64-true").run.executor.state().parameters
    for name, model in strategy.models.items():
        expected = state[name].mean(dim=0).expand_as(state[name]) if name == "bias" else state[name]
        torch.testing.assert_close(model, expected)


def test_routing_on_a_path() -> None:
    linked = torch.tensor([[0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1], [0, 0, 1, 0]])
    wide = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0)).double()

    def by_hand(linked: Tensor) -> Tensor:
        z = wide / wide.norm(dim=2, keepdim=True)
        c = z.clone()
        for _ in range(2):
            new = torch.empty_like(c)
            for v in range(4):
                total = [z[k, v].clone() for k in range(2)]
                for u in range(4):
                    if linked[u, v]:
                        share = torch.stack([z[k, u] @ c[k, v] for k in range(2)]).softmax(0)
                        total = [total[k] + share[k] * z[k, u] for k in range(2)]
                for k in range(2):
                    new[k, v] = total[k] / total[k].norm()
            c = new
        return c

    expected = by_hand(linked)
    torch.testing.assert_close(computed(lambda b: {"": route(wide, b, 2)}, path_graph())[""], expected)


@pytest.mark.parametrize("sparse", [False, True])
def test_mean_latents_do_not_see_padding(sparse) -> None:
    net = functools.partial(DisentangledGCN, hidden_channels=3, num_factors=2)
    client, _, (parameters,) = one_client(path_graph(), net, num_classes=2)

    def sent(batch: Any) -> dict[str, Tensor]:
        return {"": mean_latents(client, parameters, batch, Context())}

    alone, padded = (computed(sent, path_graph(), padding=padding, sparse=sparse)[""] for padding in (0, 3))
    assert alone.shape == (2, 3)
    torch.testing.assert_close(padded, alone)


def viewed_clients(num_nodes: int = 60) -> list[ClientGraph]:
    """A class is two bits, each seen in a view of its own; clients differ in how each view shows its bit."""
    clients = []
    for client in range(8):
        draw = torch.Generator().manual_seed(client)
        bit_2N = torch.stack([torch.arange(num_nodes) % 2, torch.arange(num_nodes) // 2 % 2])
        shown_2N = bit_2N ^ torch.tensor([client % 2, client // 2 % 2])[:, None]
        x_NF = torch.cat([1.5 * torch.eye(2)[shown_N] for shown_N in shown_2N], dim=1)
        x_NF = x_NF + 0.8 * torch.randn(num_nodes, 4, generator=draw)
        y_N = bit_2N[0] + 2 * bit_2N[1]
        linked_NN = (torch.rand(num_nodes, num_nodes, generator=draw) < 0.1) & (y_N[:, None] == y_N)
        linked_NN = linked_NN.triu(1)
        role_N = torch.randperm(num_nodes, generator=draw) % 6
        clients.append(
            ClientGraph(
                name=f"client-{client}",
                x_NF=x_NF,
                edge_index_2E=(linked_NN | linked_NN.T).nonzero().T,
                y_N=y_N,
                train_mask_N=role_N == 0,
                val_mask_N=role_N == 1,
                test_mask_N=role_N >= 2,
                node_idx_N=torch.arange(num_nodes),
            )
        )
    return clients


@both_executors
def test_views_that_mean_different_things(executor, given_clients, fit) -> None:
    data = given_clients(viewed_clients(), num_classes=4)
    strategy = FedIIH(num_epochs=3, similarity_temperature=100.0)
    actual = fit(strategy, executor, data, num_rounds=10)
    averaged = fit(FedAvg(), executor, data, num_rounds=10)
    assert actual.run.selection.result["test/acc"] > averaged.run.selection.result["test/acc"] + 0.1
    assert actual.run.history[-1]["server/factors_apart"] > 0.01


def test_bytes(fit) -> None:
    history = fit(FedIIH(), callbacks=CommunicationLedger()).run.history
    model = 2 * (6 * 8 + 8 + 8 * 3) + 3
    for row in history:
        assert row["comm/bytes_down"] == 5 * 4 * model
        assert row["comm/bytes_up"] == 5 * 4 * (model + 2 * 8)


def test_a_net_without_factors_is_refused(federation, make_model, make_trainer) -> None:
    with pytest.raises(ValueError, match=r"FedIIH needs a net of factors: set model\.net to .*DisentangledGCN"):
        make_trainer().fit(make_model(), federation, FedIIH())


def test_settings() -> None:
    with pytest.raises(ValueError, match=r"strategy\.similarity_temperature must not be negative, got -1"):
        FedIIH(similarity_temperature=-1)
