"""Flow: limits of its policy, who trains what, halves, what is communicated."""

import dataclasses
import functools

import pytest
import torch
from both_executors import both_executors
from learning import learned, quadrants
from torch import nn

from fl_lightning import Callback, ClientModule, Participation
from fl_lightning.batches.graphs import GraphCollator
from fl_lightning.callbacks import CommunicationLedger
from fl_lightning.kernels.randomness import derive_key
from fl_lightning.models import CNN, GCN, MLP
from fl_lightning.models.routed import Routed, policy_shares, run_route
from fl_lightning.round.context import Context
from fl_lightning.strategies import FedAvg, Flow
from fl_lightning.strategies.mixing.routing import copy_once, half, local_loss, shared_routes


@pytest.fixture
def one(graphs):
    """One client's batch, and a routed net with copies that differ."""
    batch = GraphCollator(graphs[:1], device=torch.device("cpu"), dtype=torch.float64)([0])
    batch = batch.replace({name: tensor[0] for name, tensor in batch.tensors().items()})
    torch.manual_seed(0)
    net = Routed(GCN(6, 3, hidden_channels=8), hidden_channels=4).double().eval()
    for name, parameter in net.named_parameters():
        if ".local." in name:
            parameter.data.add_(torch.randn_like(parameter))
    return net, dict(net.named_parameters()), batch


def with_bias(parameters, bias: float):
    """A policy that is sure of itself."""
    fixed = {"policy.last.weight": torch.zeros_like(parameters["policy.last.weight"])}
    fixed["policy.last.bias"] = torch.full_like(parameters["policy.last.bias"], bias)
    return {**parameters, **fixed}


def test_limits_of_the_policy(one) -> None:
    net, parameters, batch = one
    for bias, only in ((50.0, "shared"), (-50.0, "local")):
        expected = run_route(net, parameters, batch, only).logits
        for route in ("soft", "hard"):
            actual = run_route(net, with_bias(parameters, bias), batch, route).logits
            torch.testing.assert_close(actual, expected)
    assert not torch.allclose(run_route(net, parameters, batch, "shared").logits, expected)


def test_each_node_goes_its_way_in_each_layer(one) -> None:
    net, parameters, batch = one
    share_NL = policy_shares(net, parameters, batch)
    h = None
    layers = [net.net.convs[0], net.net.convs[1]]
    for index, layer in enumerate(layers):
        own = [copy(h, batch) for copy in (layer.shared, layer.local)]
        share_N1 = share_NL[:, index, None]
        h = (share_N1 * own[0] + (1 - share_N1) * own[1]).relu()
    own = [copy(h) for copy in (net.net.head.shared, net.net.head.local)]
    expected = share_NL[:, 2, None] * own[0] + (1 - share_NL[:, 2, None]) * own[1]
    torch.testing.assert_close(run_route(net, parameters, batch, "soft").logits, expected)


def gradients(client, strategy, parameters, batch, context):
    leaves = {name: p.detach().clone().requires_grad_() for name, p in parameters.items()}
    loss = strategy.routed_loss(client, leaves, batch, context)
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()), allow_unused=True), strict=True))


def test_gradients(one) -> None:
    """The local copy has none; where both copies are alike, the policy has none but R's, to the global one."""
    net, parameters, batch = one
    client = ClientModule()
    client.net = net
    context = Context(received={"half": torch.tensor(7)})
    actual = gradients(client, Flow(route_weight=0.0), parameters, batch, context)
    assert all((actual[name] is None) == (".local." in name) for name in parameters)
    assert actual["policy.last.bias"].abs().max() > 1e-6
    same = {n: parameters[n.replace(".local.", ".shared.")] if ".local." in n else p for n, p in parameters.items()}
    actual = gradients(client, Flow(route_weight=0.0), same, batch, context)
    assert actual["policy.last.bias"].abs().max() < 1e-12
    actual = gradients(client, Flow(route_weight=1.0), same, batch, context)
    assert (actual["policy.last.bias"] < 0).all()


def test_halves(one) -> None:
    _, _, batch = one
    context = Context(received={"half": torch.tensor(7)})
    parts = [
        half(batch.replace({"key": torch.tensor(key)}), context, part).train_mask for key in (1, 2) for part in (0, 1)
    ]
    assert torch.equal(parts[0], parts[2])
    assert torch.equal(parts[1], parts[3])
    assert torch.equal(parts[0] | parts[1], batch.train_mask)
    assert not (parts[0] & parts[1]).any()
    assert abs(int(parts[0].sum()) - int(parts[1].sum())) <= 1


def test_the_local_copy_starts_from_the_global_model(one) -> None:
    _, parameters, _ = one
    copied = copy_once(parameters, Context(step=0)).parameters
    assert set(copied) == {name for name in parameters if ".local." in name}
    assert all(torch.equal(tensor, parameters[name.replace("local", "shared")]) for name, tensor in copied.items())
    assert copy_once(parameters, Context(step=1)).parameters == {}


def test_the_local_copy_is_trained_on_the_first_half(one) -> None:
    net, parameters, batch = one
    client = ClientModule()
    client.net = net
    context = Context(received={"half": torch.tensor(7)})
    first_N = half(batch, context, 0).train_mask
    logits_NK = run_route(net, parameters, batch, "local").logits
    expected = torch.nn.functional.cross_entropy(logits_NK[first_N], batch.y[first_N])
    torch.testing.assert_close(local_loss(client, parameters, batch, context), expected)


def test_the_share_of_the_global_model_is_of_training_examples_and_layers(one) -> None:
    net, parameters, batch = one
    client = ClientModule()
    client.net = net
    chosen_NL = policy_shares(net, parameters, batch)[batch.train_mask] >= 0.5
    actual = shared_routes(client, parameters, batch, Context())
    assert 0 < float(actual) < 1
    torch.testing.assert_close(actual, chosen_NL.double().mean())


class Watch(Callback):
    """Keeps the clients' parameters after each stage."""

    def __init__(self) -> None:
        self.seen = []

    def on_stage_end(self, trainer, stage, payload) -> None:
        state = trainer.run.executor.state().parameters
        self.seen.append((stage.name, {name: tensor.clone() for name, tensor in state.items()}))


@both_executors
def test_whose_turn_it_is(executor, fit) -> None:
    watch = Watch()
    fit(Flow(), executor, callbacks=watch)
    assert [name for name, _ in watch.seen] == ["local", "train"] * 3
    for (_, local), (_, routed) in zip(watch.seen[::2], watch.seen[1::2], strict=True):
        for name in local:
            shared = local[name.replace(".local.", ".shared.")]
            if ".local." in name:
                assert torch.equal(local[name], routed[name])
                assert not torch.equal(local[name], shared)
            else:
                assert torch.equal(local[name], local[name][:1].expand_as(local[name]))  # as the server sent it
                assert not torch.equal(local[name], routed[name])


@both_executors
def test_without_its_half_the_global_model_is_fedavg_on_the_second(executor, fit, federation, assert_same) -> None:
    class OnHalf(FedAvg):
        def training(self, round_idx):
            return dataclasses.replace(super().training(round_idx), objective=self.second)

        def second(self, client, parameters, batch, context):
            part = half(batch, context, 1)
            return client.loss(client.output(parameters, part), part)

        def configure(self, stage, clients):
            names = [self.federation.client_names[client] for client in clients]
            key_C = torch.tensor([derive_key(self.federation.seed, "halves", name) for name in names])
            return dataclasses.replace(super().configure(stage, clients), extras={"half": key_C})

    flow = fit(Flow(), executor).run.strategy.models
    plain = fit(OnHalf(reset_optimizer=True), executor).run.strategy.models
    shared = {name.removeprefix("net.").replace(".shared.", "."): t for name, t in flow.items() if ".shared." in name}
    assert_same(shared, dict(plain), tolerance=1e-5)


@both_executors
def test_those_who_did_not_answer_are_evaluated_afresh(executor, fit) -> None:
    trainer = fit(Flow(), executor, participation=Participation(num_clients=2))
    own, fresh = (trainer.run.scores[kind].extras["train/loss"] for kind in ("", "fresh/"))
    responded = trainer.run.strategy.responded
    assert len(responded) == 2
    for client in range(5):
        assert torch.equal(own[client], fresh[client]) == (client not in responded)
    assert 0 <= trainer.run.history[-1]["server/shared_routes"] <= 1


def test_bytes(fit) -> None:
    row = fit(Flow(policy_channels=4), callbacks=CommunicationLedger()).run.history[-1]
    numbers = 6 * 8 + 8 + 8 * 8 + 8 + 8 * 3 + 3
    policy = 6 * 4 + 4 + 4 * 3 + 3
    assert row["comm/bytes_up"] == 5 * 4 * (numbers + policy + 1)  # and the share of routes
    assert row["comm/bytes_down"] == 5 * (4 * (numbers + policy) + 2 * 8)  # and the key of the halves, twice


def test_clients_that_name_some_classes_differently() -> None:
    """Two clients in three agree; a client's own examples show whether the global model is right for it."""
    clients = quadrants(6, num_train=40, labels=lambda client, y_N: (y_N + 2 * (client % 3 == 0)) % 4)
    net = functools.partial(MLP, hidden_channels=32)
    routed = learned(Flow(num_epochs=20, policy_channels=16), clients, num_rounds=10, net=net)
    assert routed > learned(FedAvg(num_epochs=20), clients, num_rounds=10, net=net) + 0.03


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="Flow routes linear layers and graph convolutions, but CNN has"):
        Routed(CNN((1, 8, 8), 3, filters=[4]), hidden_channels=4)
    with pytest.raises(ValueError, match="Flow routes linear layers and graph convolutions, but ReLU has none"):
        Routed(nn.ReLU(), hidden_channels=4)
    with pytest.raises(ValueError, match=r"but ModuleDict has a layer local: give .* other names than local"):
        Routed(nn.ModuleDict({"local": nn.Linear(2, 3)}), hidden_channels=4)
    with pytest.raises(ValueError, match=r"strategy\.route_weight must not be negative, got -1"):
        Flow(route_weight=-1)
