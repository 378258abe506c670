"""The theorems of the papers, as far as they can be computed, and where they fail (docs/explanation/*-theory.md)."""

import itertools
import math
from typing import Any

import pytest
import torch
from scripts import script


@pytest.fixture(scope="module")
def theory() -> Any:
    return script("benchmarks/theory.py")


# ---------------------------------------------------------------- Panacea


@pytest.mark.parametrize("edge_probability", [0.0, 0.2, 0.4])
def test_panacea_iii_1_with_an_invertible_graph_the_optimum_is_that_of_pfedhn(
    theory: Any, edge_probability: float
) -> None:
    g = theory.aggregation(theory.client_graph(20, edge_probability), 1)
    assert torch.linalg.matrix_rank(g) == 20
    models = theory.normal(10, 20, generator=theory.random_generator(3))
    truncation = theory.truncation_risk(models, 4)
    assert 0.1 < truncation < 0.9
    assert theory.least_risk(models, g, 4) == pytest.approx(truncation, rel=1e-6)


def test_panacea_iii_1_needs_its_condition(theory: Any) -> None:
    """Two clients with the same neighbors have one model, so that the optimum is out of reach."""
    graph = theory.client_graph(20, 0.4)
    graph[1] = graph[0]
    graph[:, 1] = graph[:, 0]
    graph[0, 1] = graph[1, 0] = 1
    graph.fill_diagonal_(0)
    g = theory.aggregation(graph, 1)
    torch.testing.assert_close(g[:, 0], g[:, 1])
    models = theory.normal(10, 20, generator=theory.random_generator(3))
    projected = models @ torch.linalg.pinv(g) @ g
    best = (models - projected).square().sum() + theory.truncation_risk(projected, 4) * projected.square().sum()
    assert theory.least_risk(models, g, 4) == pytest.approx(float(best / models.square().sum()), rel=1e-6)
    assert theory.least_risk(models, g, 4) > 1.01 * theory.truncation_risk(models, 4)


def test_panacea_iii_2_without_a_graph_the_risk_is_that_of_the_lost_clients(theory: Any) -> None:
    nobody = torch.zeros(20, 20)
    g = theory.aggregation(nobody, 3)
    assert torch.equal(g, torch.eye(20, dtype=torch.float64))
    assert theory.printed_risk(g, 4, 10, 5) == pytest.approx(2 * 10 * 5 * 4 / 20)
    assert theory.attacked_risk(g, 4, 10, 5, draws=400) == pytest.approx(2 * 10 * 5 * 4 / 20, rel=0.05)


def test_panacea_iii_3_holds_for_independent_embeddings(theory: Any) -> None:
    g = theory.aggregation(theory.client_graph(20, 0.1), 1)
    printed = theory.printed_risk(g, 4, 10, 5)
    assert 0 < printed < 2 * 10 * 5 * 4 / 20
    assert theory.attacked_risk(g, 4, 10, 5, draws=400) == pytest.approx(printed, rel=0.08)


def test_panacea_iii_3_in_a_clique_nothing_is_lost(theory: Any) -> None:
    g = theory.aggregation(torch.ones(20, 20) - torch.eye(20), 1)
    assert theory.printed_risk(g, 4, 10, 5) == pytest.approx(0, abs=1e-20)
    assert theory.attacked_risk(g, 4, 10, 5, draws=5) == pytest.approx(0, abs=1e-20)


def test_panacea_iii_3_is_a_bound_under_the_papers_own_assumption(theory: Any) -> None:
    """With V* G = V* the embeddings are alike in every component, and less is lost."""
    graph = theory.client_graph(20, 0.1)
    g, component = theory.aggregation(graph, 1), theory.components(graph)
    true = torch.randn(5, 20, dtype=torch.float64)[:, component]
    torch.testing.assert_close(true @ g, true)
    printed = theory.printed_risk(g, 4, 10, 5)
    assert theory.attacked_risk(g, 4, 10, 5, draws=400, component_N=component) < 1.05 * printed


# ---------------------------------------------------------------- Sheaf-FMTL


def test_sheaf_fmtl_1_the_mean_squared_gradient_falls_as_one_over_k(theory: Any) -> None:
    descent = theory.small_sheaf(1000)
    assert all(after <= before for before, after in itertools.pairwise(descent.objective))
    sums = list(itertools.accumulate(descent.squared_gradients))
    assert math.isfinite(descent.bound)
    assert sums[-1] <= descent.bound
    assert sums[-1] < 1.05 * sums[499]  # K times the mean no longer grows


def test_sheaf_fmtl_1_lacks_a_condition(theory: Any) -> None:
    """α < 2 / (N L) and η < 2 / (λ D²) hold over four iterations, α (L + λ ‖L_F‖) < 2 does not, and Ψ grows."""
    descent = theory.counter_example(4)
    assert 1e-9 < 2 / (4 * 2 * 7.1**8)  # both models are ± 7.1^k after k iterations, so that D² = 2 · 7.1⁸
    assert descent.objective == pytest.approx([9 * 7.1 ** (2 * k) for k in range(4)], rel=3e-3)  # the maps hardly move
    assert descent.bound == math.inf


def test_sheaf_fmtl_1_the_condition_on_the_step_of_the_maps_suffices(theory: Any) -> None:
    """η just below 2 / (λ D²), D the norm of all models together: maps that move alone always lower Ψ."""
    random = torch.Generator().manual_seed(0)
    edges = [(0, 1), (0, 2), (0, 3), (1, 2)]
    theta = torch.randn(4, 5, generator=random, dtype=torch.float64)
    maps = torch.randn(2, len(edges), 3, 5, generator=random, dtype=torch.float64)
    map_step = 1.99 / (0.7 * theta.square().sum().item())
    descent = theory.sheaf_descent(theta, maps, edges, theta, coupling=0.7, step=0.0, map_step=map_step, num_steps=20)
    assert all(after < before for before, after in itertools.pairwise(descent.objective))


# ---------------------------------------------------------------- FedAux


@pytest.mark.parametrize("bandwidth", [1.0, 0.1])
def test_fedaux_3_1_fails_under_cross_entropy(theory: Any, bandwidth: float) -> None:
    """Were the gradient -Σ a to first order, every cosine would be near 1."""
    cosines = theory.gradient_cosines(bandwidth, 30)
    assert abs(sum(cosines) / len(cosines)) < 0.3
    assert 7 <= sum(value > 0 for value in cosines) <= 23


def test_fedaux_3_2_a_narrow_kernel_is_sorting(theory: Any) -> None:
    errors = [theory.sorting_error(bandwidth) for bandwidth in (1.0, 0.1, 1e-2, 1e-3, 1e-5)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 0.5
    assert errors[-1] < 1e-6
