"""Private gradients and their account, by hand and by the library."""

import math

import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant
from private_examples import VectorData, vectors

from fl_lightning.batches.base import single
from fl_lightning.batches.poisson import poisson_draws, sampling_rate
from fl_lightning.executors.keys import derive_keys
from fl_lightning.round.privacy import (
    KeyedNumbers,
    PrivacySpent,
    RecordPrivacy,
    SecretNumbers,
    clipped_sum,
    draw_noise,
    epsilon_of,
    epsilon_spent,
    private_gradient,
    spend,
)

NUMBERS = pytest.mark.parametrize("numbers", [KeyedNumbers(), SecretNumbers()], ids=["keyed", "secret"])


def batch_of(*sizes: int, batch_size: int | None = 4):
    data = VectorData(vectors(sizes), batch_size)
    return data.collator(data.clients, device=torch.device("cpu"), dtype=torch.float32)(range(len(sizes)))


# ---------------------------------------------------------------- clipping


def test_gradients_are_shortened_over_all_parameters_together() -> None:
    gradients = {
        "weight": torch.tensor([[3.0, 0.0], [0.3, 0.0], [9.0, 9.0], [float("nan"), 0.0]]),
        "scale": torch.tensor([4.0, 0.4, 9.0, 1.0]),
    }
    actual = clipped_sum(gradients, torch.tensor([True, True, False, True]), 1.0)

    # norms 5, 0.5; the third was not drawn, the fourth is not finite: 3/5 + 0.3 and 4/5 + 0.4
    assert actual["weight"].tolist() == pytest.approx([0.9, 0.0])
    assert actual["scale"].item() == pytest.approx(1.2)


def test_half_precision_is_clipped_and_summed_in_single() -> None:
    gradients = {"w": torch.full((100, 64), 0.125, dtype=torch.bfloat16)}  # norm 1 each, exactly

    actual = clipped_sum(gradients, torch.ones(100, dtype=torch.bool), 0.5)["w"]

    assert actual.dtype == torch.float32
    assert actual.norm().item() == pytest.approx(50.0, rel=1e-5)


@pytest.mark.parametrize("most_examples", [1, 2, 100])
def test_the_gradient_of_a_client_by_hand(most_examples) -> None:
    batch = single(batch_of(12, batch_size=None))
    drawn = next(poisson_draws(batch, batch.key[None], KeyedNumbers()))
    assert drawn.train_mask.tolist() == [True] * 6
    assert drawn.expected.item() == 6

    def loss(parameters, one):
        assert (one.x.shape, one.train_mask.shape) == ((1, 4), (1,))
        return (one.x @ parameters["w"]).sum()  # its gradient is the example itself

    noise = {"w": torch.tensor([1.0, 0.0, 0.0, -1.0])}
    actual = private_gradient(loss, {"w": torch.zeros(4)}, drawn, noise, 2.0, most_examples)

    x_NF = batch.x[batch.train_mask]
    expected = (x_NF * (2.0 / x_NF.norm(dim=1)).clamp(max=1)[:, None]).sum(dim=0) + 2.0 * noise["w"]
    torch.testing.assert_close(actual["w"], expected / 6)


def test_each_example_has_a_dropout_of_its_own() -> None:
    batch = single(batch_of(40, batch_size=None))
    drawn = next(poisson_draws(batch, torch.tensor([77]), KeyedNumbers()))

    def loss(parameters, one):
        index = (drawn.x == one.x).all(dim=-1).float().argmax()
        return ((one.key % 1000).float() * parameters["w"]).index_select(0, index[None]).sum()

    actual = private_gradient(loss, {"w": torch.zeros(20)}, drawn, {"w": torch.zeros(20)}, 1e9, 100)["w"] * 20

    assert len(actual.round().unique()) > 15, "twenty keys, one for each example"


# ---------------------------------------------------------------- noise and draws


@NUMBERS
def test_noise_has_the_stated_deviation_and_differs_everywhere(numbers) -> None:
    parameters = {"a": torch.zeros(3, 200, 100), "b": torch.zeros(3, 10_000)}
    keys = derive_keys(0, torch.arange(3))

    noise = draw_noise(numbers, keys, parameters, 1.5)

    whole = torch.cat([noise["a"].flatten(1), noise["b"]], dim=1)
    assert whole.std().item() == pytest.approx(1.5, rel=0.02)
    assert abs(whole.mean().item()) < 0.03
    assert (whole.abs() > 3).double().mean().item() == pytest.approx(0.0455, rel=0.1)  # beyond two deviations
    correlations = torch.corrcoef(torch.cat([whole[:, :10_000], whole[:, -10_000:]]))
    assert (correlations - torch.eye(6)).abs().max() < 0.05


def test_secret_numbers_do_not_come_again_and_keyed_ones_do() -> None:
    key = torch.tensor(5)
    assert KeyedNumbers().normal(key, 9).equal(KeyedNumbers().normal(key, 9))
    assert not SecretNumbers().normal(key, 9).equal(SecretNumbers().normal(key, 9))
    assert KeyedNumbers().uniform(key, 9)[:4].equal(KeyedNumbers().uniform(key, 4))
    assert not torch.isin(KeyedNumbers().normal(key, 9), torch.special.ndtri(KeyedNumbers().uniform(key, 9))).any()


@NUMBERS
def test_each_training_example_is_drawn_by_itself_with_the_same_probability(numbers) -> None:
    batch = batch_of(80, 24, batch_size=10)  # of which 40 and 12 train
    keys = derive_keys(0, torch.arange(2), torch.arange(2000)[:, None])

    draws = list(poisson_draws(batch, keys, numbers))

    sizes = torch.stack([drawn.train_mask.sum(dim=1) for drawn in draws]).double()
    q = torch.tensor([10 / 40, 10 / 12]).double()
    torch.testing.assert_close(sizes.mean(dim=0), torch.tensor([10.0, 10.0]).double(), atol=0.25, rtol=0)
    torch.testing.assert_close(sizes.var(dim=0), torch.tensor([40.0, 12.0]).double() * q * (1 - q), atol=0.0, rtol=0.12)
    assert draws[0].expected.tolist() == pytest.approx([10, 10])
    seen = torch.zeros(40)
    for drawn in draws:
        real = drawn.x[0][drawn.train_mask[0]]
        seen += (real[:, None] == batch.x[0][batch.train_mask[0]]).all(dim=-1).any(dim=0)
        assert len(real.unique(dim=0)) == len(real)
    assert (seen / len(draws) - 0.25).abs().max() < 0.05


def test_a_draw_may_be_empty() -> None:
    batch = batch_of(400, 400, batch_size=1)
    draws = list(poisson_draws(batch, derive_keys(0, torch.arange(2), torch.arange(50)[:, None]), KeyedNumbers()))

    empty = [drawn for drawn in draws if not drawn.train_mask[0].any()]
    assert empty
    chosen = empty[0].select(torch.tensor([0]))
    actual = private_gradient(
        lambda p, one: (one.x @ p["w"]).sum(), {"w": torch.zeros(4)}, single(chosen), {"w": torch.ones(4)}, 2.0, 9
    )
    assert actual["w"].tolist() == [2.0] * 4, "noise alone, over the one example that was expected"


def test_sampling_rates() -> None:
    assert sampling_rate(100, 25) == 0.25
    assert sampling_rate(25, 100) == sampling_rate(25, None) == sampling_rate(0, 5) == 1.0


# ---------------------------------------------------------------- account


@pytest.mark.parametrize(("rate", "multiplier", "count"), [(0.05, 1.0, 300), (0.25, 0.7, 40), (1.0, 3.0, 20)])
def test_epsilon_is_that_of_the_library(rate, multiplier, count) -> None:
    accountant = RdpAccountant()
    gaussian = GaussianDpEvent(multiplier)
    accountant.compose(PoissonSampledDpEvent(rate, gaussian) if rate < 1 else gaussian, count)

    assert epsilon_of({(rate, multiplier): count}, 1e-5) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-9)


def test_different_steps_and_other_mechanisms_are_composed() -> None:
    accountant = RdpAccountant()
    accountant.compose(PoissonSampledDpEvent(0.1, GaussianDpEvent(1.0)), 30)
    accountant.compose(PoissonSampledDpEvent(0.2, GaussianDpEvent(2.0)), 7)
    accountant.compose(GaussianDpEvent(5.0), 2)

    actual = epsilon_of({(0.1, 1.0): 30, (0.2, 2.0): 7}, 1e-6, precision=2 / 25)
    assert actual == pytest.approx(accountant.get_epsilon(1e-6), rel=1e-9)
    assert epsilon_of({}, 1e-5) == epsilon_of({(0.1, 1.0): 0}, 1e-5) == 0.0
    assert epsilon_of({(0.1, 0.0): 1}, 1e-5) == math.inf


def test_spending_ends_at_the_bound() -> None:
    bound = epsilon_of({(0.1, 1.0): 20}, 1e-5)
    privacy = RecordPrivacy(max_grad_norm=1.0, noise_multiplier=1.0, max_epsilon=bound * 1.0001)
    nothing = torch.zeros(3, dtype=torch.float64)

    half = spend(privacy, nothing, 0.1, 10)
    whole = spend(privacy, half, 0.1, 10)

    assert epsilon_spent(privacy, nothing) == 0.0
    assert epsilon_spent(privacy, whole) == pytest.approx(bound)
    with pytest.raises(PrivacySpent, match=r"its privacy is spent: ε would be .*, model.privacy.max_epsilon is"):
        spend(privacy, whole, 0.1, 1)
    assert spend(privacy, whole, 0.1, 0).equal(whole)
    with pytest.raises(PrivacySpent, match=r"probability 0\.1 and noise multiplier 1, now they are 0\.2 and 1"):
        spend(privacy, half, 0.2, 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_grad_norm": 0.0}, r"model.privacy.max_grad_norm must be positive and finite, got 0.0"),
        ({"max_grad_norm": math.inf}, r"model.privacy.max_grad_norm must be positive and finite, got inf"),
        ({"noise_multiplier": -1.0}, r"model.privacy.noise_multiplier must be at least 0 and finite, got -1.0"),
        ({"noise_multiplier": math.nan}, r"model.privacy.noise_multiplier must be at least 0 and finite, got nan"),
        ({"delta": 1.0}, r"model.privacy.delta must be in \(0, 1\), got 1.0"),
        ({"max_epsilon": 0.0}, r"model.privacy.max_epsilon must be positive and finite, got 0.0"),
    ],
)
def test_settings_out_of_range(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        RecordPrivacy(**{"max_grad_norm": 1.0, "noise_multiplier": 1.0, **settings})
