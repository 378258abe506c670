"""Leave-one-out predictions of clients from each other, on planted client similarity."""

import pytest
import torch
from torch import Tensor

from fl_lightning.relations.client_similarity import leave_one_out, mean_smoother, ridge_smoother, strength, transfer

GROUPS = torch.arange(6).repeat_interleave(5)
EQUAL = torch.full((30,), 1 / 30, dtype=torch.float64)
SAME = (GROUPS[:, None] == GROUPS).double()


def planted(share: float, length: int = 20_000, seed: int = 0) -> Tensor:
    """Numbers of 30 clients of which the given share of the variance is common to each group of five."""
    draw = torch.Generator().manual_seed(seed)
    group = torch.randn(6, length, generator=draw, dtype=torch.float64)[GROUPS]
    return share**0.5 * group + (1 - share) ** 0.5 * torch.randn(30, length, generator=draw, dtype=torch.float64)


def test_left_one_out_is_the_refit_without_the_client() -> None:
    draw = torch.Generator().manual_seed(0)
    feature = torch.randn(7, 3, generator=draw, dtype=torch.float64)
    kernel = feature @ feature.T
    identity = torch.eye(7, dtype=torch.float64)
    smoother = kernel @ torch.linalg.inv(kernel + 0.3 * identity)  # without a mean
    others = [0, 1, 2, 4, 5, 6]
    refit = kernel[3, others] @ torch.linalg.inv(kernel[others][:, others] + 0.3 * identity[:6, :6])

    actual = leave_one_out(smoother)

    # the ridge has no mean, so its rows need not sum to one: the identity holds for any smoother of that kind
    torch.testing.assert_close(actual[3, others], refit, rtol=1e-10, atol=1e-12)
    assert actual[3, 3] == 0


def test_a_ridge_tends_to_the_mean_and_to_the_clients_own() -> None:
    kernel = torch.eye(4, dtype=torch.float64)
    weight = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)

    torch.testing.assert_close(ridge_smoother(kernel, kernel, weight, 1e12), mean_smoother(weight))
    torch.testing.assert_close(ridge_smoother(kernel, kernel, weight, 1e-12), kernel)
    rows = ridge_smoother(kernel, kernel, weight, 0.7).sum(dim=1)
    torch.testing.assert_close(rows, torch.ones(4, dtype=torch.float64))


@pytest.mark.parametrize("share", [0.1, 0.4, 0.8])
def test_the_strength_is_that_of_the_best_linear_predictor(share) -> None:
    numbers = planted(share)

    actual = strength(SAME / 5, EQUAL, numbers @ numbers.T)

    # four others of the group: n h / (n h + 1 - h)
    assert float(actual) == pytest.approx(4 * share / (4 * share + 1 - share), abs=0.03)


@pytest.mark.parametrize("smoother", [SAME / 5, 0.9 * torch.eye(30, dtype=torch.float64) + 0.1 * SAME / 5])
def test_unrelated_clients_are_given_the_mean(smoother) -> None:
    numbers = planted(0.0)

    assert float(strength(smoother, EQUAL, numbers @ numbers.T)) < 0.05
    assert float(strength(torch.eye(30, dtype=torch.float64) * 0.5 + 0.5 / 30, EQUAL, numbers @ numbers.T)) == 0


def test_transfer_tells_similar_clients_from_strangers() -> None:
    numbers = planted(0.6)
    gram = numbers @ numbers.T
    strangers = SAME[torch.randperm(30, generator=torch.Generator().manual_seed(1))] / 5

    assert float(transfer(SAME / 5, EQUAL, gram)) > 0.4
    assert abs(float(transfer(mean_smoother(EQUAL), EQUAL, gram))) < 1e-12
    mixed = (strangers + strangers.T) / 2
    assert float(transfer(mixed / mixed.sum(dim=1, keepdim=True), EQUAL, gram)) < 0.1
