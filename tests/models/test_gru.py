import functools

import pytest
import torch
from net_checks import (
    KEYS,
    Noise,
    assert_close,
    batch_of,
    check_both_ways,
    check_executors_agree,
    check_rows_are_independent,
    check_training_reaches_everything,
    num_parameters,
    random,
)
from torch import Tensor, nn
from torch.optim import SGD

from fl_lightning import ClientModule
from fl_lightning.models import GRUForecaster
from fl_lightning.models.gru import GRULayer

sizes = pytest.mark.parametrize(("num_steps", "num_features", "horizon"), [(5, 1, 3), (4, 3, 1), (1, 2, 4)])


def forecaster(num_steps: int, num_features: int, horizon: int) -> GRUForecaster:
    return GRUForecaster((num_steps, num_features), horizon, hidden_channels=6).double()


def torch_gru(layer: GRULayer) -> nn.GRU:
    hidden, features = layer.weight_ih_l0.shape[0] // 3, layer.weight_ih_l0.shape[1]
    gru = nn.GRU(features, hidden, batch_first=True).double()
    gru.load_state_dict(layer.state_dict())
    return gru


def by_torch(net: GRUForecaster, encoder: nn.GRU, decoder: nn.GRU, x: Tensor) -> tuple[Tensor, Tensor]:
    """The forecaster of ``torch.nn.GRU``, one step after another."""
    _, state = encoder(x)
    encoded, read, forecasts = state[0], x[:, -1:], []
    for _ in range(net.horizon):
        out, state = decoder(read, state)
        forecasts.append(nn.functional.linear(out, net.head.weight, net.head.bias))
        read = torch.cat([forecasts[-1], x[:, -1:, 1:]], dim=-1)
    return torch.cat(forecasts, dim=1).squeeze(-1), encoded


@sizes
def test_stack_and_vmap_and_one_client_are_equal(num_steps, num_features, horizon) -> None:
    check_both_ways(forecaster(num_steps, num_features, horizon), (num_steps, num_features))


@sizes
def test_it_is_built_of_torch_grus(num_steps, num_features, horizon) -> None:
    net, x = forecaster(num_steps, num_features, horizon), random(4, num_steps, num_features)
    encoder, decoder = torch_gru(net.encoder), torch_gru(net.decoder)

    output = net(batch_of(x, KEYS[0], 2))
    logits, embedding = by_torch(net, encoder, decoder, x)

    assert output.logits.shape == (4, horizon)
    assert_close(tuple(output), (logits, embedding))
    weight = random(4, horizon, seed=2)
    for ours, theirs in ((net.encoder, encoder), (net.decoder, decoder)):
        own = torch.autograd.grad((output.logits * weight).sum(), list(ours.parameters()), retain_graph=True)
        of_torch = torch.autograd.grad((logits * weight).sum(), list(theirs.parameters()), retain_graph=True)
        for actual, expected in zip(own, of_torch, strict=True):
            assert_close(actual, expected)


def test_initial_parameters_are_those_of_torch() -> None:
    torch.manual_seed(0)
    ours = GRULayer(2, 5)
    torch.manual_seed(0)
    theirs = nn.GRU(2, 5)

    assert {name: t.tolist() for name, t in ours.state_dict().items()} == {
        name: t.tolist() for name, t in theirs.state_dict().items()
    }


@sizes
def test_padding_changes_nothing(num_steps, num_features, horizon) -> None:
    check_rows_are_independent(forecaster(num_steps, num_features, horizon), (num_steps, num_features))


def test_every_parameter_is_trained() -> None:
    check_training_reaches_everything(forecaster(5, 2, 3), (5, 2))


@pytest.mark.parametrize(("num_features", "count"), [(1, 61_901), (2, 62_501)])
def test_parameters_of_the_papers_net(num_features, count) -> None:
    """Panacea: "63K parameters"; Meng et al. give speed and time of day."""
    assert num_parameters(GRUForecaster((12, num_features), 12)) == count


def test_it_runs_in_half_precision() -> None:
    net, x = GRUForecaster((4, 1), 3, hidden_channels=8), random(6, 4, 1).float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = net(batch_of(x, KEYS[0], 2))
    output.logits.square().mean().backward()

    torch.testing.assert_close(output.logits, net(batch_of(x, KEYS[0], 2)).logits, rtol=0.05, atol=0.05)
    assert all(p.grad.isfinite().all() for p in net.parameters())


def test_executors_agree(make_trainer, assert_same) -> None:
    model = ClientModule(functools.partial(GRUForecaster, hidden_channels=5), functools.partial(SGD, lr=0.05))
    check_executors_agree(model, Noise((4, 1), regression=True), make_trainer, assert_same)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (functools.partial(GRUForecaster, 5, 3), "in_features=5 is not the shape of a sequence.*give GRUForecaster"),
        (functools.partial(GRUForecaster, (1, 2, 3), 3), "is not the shape of a sequence"),
        (functools.partial(GRUForecaster, (5, 0), 3), "features=0 is impossible: set it to"),
        (functools.partial(GRUForecaster, (5, 1), 0), "num_outputs=0 is impossible: set it to"),
        (functools.partial(GRUForecaster, (5, 1), 3, hidden_channels=0), "hidden_channels=0 is impossible"),
    ],
    ids=str,
)
def test_impossible_settings_are_refused(build, message) -> None:
    with pytest.raises(ValueError, match=message):
        build()
