import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fl_lightning.strategies.decentralized import DenseMaps, ImplicitMaps, RestrictionMaps
from fl_lightning.strategies.decentralized.map_initialization import IdentityInitialization, MapInitialization

SIZES = [12, 31, 20, 17, 20]  # 31 is prime: its transform is longer
EDGES = [(0, 1), (0, 2), (1, 2), (1, 3), (3, 4)]


def adjacency(num_clients: int = len(SIZES), edges: Sequence[tuple[int, int]] = EDGES) -> Tensor:
    adjacency_CC = torch.zeros(num_clients, num_clients, dtype=torch.bool)
    for i, j in edges:
        adjacency_CC[i, j] = adjacency_CC[j, i] = True
    return adjacency_CC


def random_models(sizes: Sequence[int] = SIZES, seed: int = 0) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=random, dtype=torch.float64) for size in sizes]


def dense(fraction: float = 0.5, start: MapInitialization | None = None, seed: int = 0) -> DenseMaps:
    return DenseMaps(
        SIZES, adjacency(), projection_fraction=fraction, initialization=start, seed=seed, dtype=torch.float64
    )


def implicit(fraction: float = 0.5, max_rank: int = 32, tolerance: float = 1e-12, seed: int = 0) -> ImplicitMaps:
    return ImplicitMaps(
        SIZES,
        adjacency(),
        projection_fraction=fraction,
        max_rank=max_rank,
        tolerance=tolerance,
        seed=seed,
        dtype=torch.float64,
    )


def materialized(maps: ImplicitMaps, fraction: float = 0.5) -> DenseMaps:
    copy = dense(fraction)
    copy.load_state_dict({str(client): maps.matrix(client) for client in range(len(SIZES))})
    return copy


def both(fraction: float = 0.5) -> list[RestrictionMaps]:
    return [dense(fraction), implicit(fraction)]


def edge_maps(maps: RestrictionMaps) -> dict[tuple[int, int], Tensor]:
    """P_ij by edge, cut from the stacked matrices by the definition of their order."""
    actual = {}
    for i in range(len(maps.sizes)):
        neighbors = maps.num_rows_CC[i].nonzero().flatten().tolist()
        parts = torch.split(maps.matrix(i), maps.num_rows_CC[i][neighbors].tolist())
        actual.update({(i, j): part.clone() for j, part in zip(neighbors, parts, strict=True)})
    return actual


def step_once(maps: RestrictionMaps, models: Sequence[Tensor], step: float = 0.003) -> Tensor:
    residual_M = maps.residual(maps.project(models))
    maps.update(residual_M, models, step)
    return residual_M


def assert_same(one: RestrictionMaps, other: RestrictionMaps, tolerance: float = 1e-10) -> None:
    for client in range(len(one.sizes)):
        torch.testing.assert_close(one.matrix(client), other.matrix(client), rtol=0, atol=tolerance)


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5, 1.0])
def test_row_counts(fraction: float) -> None:
    for maps in both(fraction):
        for i, j in EDGES:
            expected = max(1, math.floor(fraction * min(SIZES[i], SIZES[j]) + 1e-9))
            assert maps.num_rows_CC[i, j] == maps.num_rows_CC[j, i] == expected
        assert maps.num_message_numbers == int(maps.num_rows_CC.sum()) == len(maps.project(random_models()))
        shapes = [maps.matrix(client).shape for client in range(len(SIZES))]
        assert shapes == list(zip(maps.num_rows_CC.sum(1).tolist(), SIZES, strict=True))
        assert [len(pulled) for pulled in maps.pull_back(maps.project(random_models()))] == SIZES


def test_floor_is_not_that_of_a_rounding() -> None:
    assert DenseMaps([100, 100], adjacency(2, [(0, 1)]), projection_fraction=0.29).num_rows_E == [29, 29]


def test_stored_numbers() -> None:
    assert dense().num_stored_numbers == sum(rows * size for rows, size in zip(dense().num_rows_C, SIZES, strict=True))
    few, many = (implicit(max_rank=rank).num_stored_numbers for rank in (4, 8))
    assert many - few == 5 * (sum(SIZES) + dense().num_message_numbers)  # capacities 5 and 10


def test_default_start_has_rows_of_length_one() -> None:
    maps = DenseMaps([1_000, 4_000], adjacency(2, [(0, 1)]), projection_fraction=0.1)
    for client in (0, 1):
        assert maps.matrix(client).norm(dim=1).mean() == pytest.approx(1.0, rel=0.01)


def test_starting_maps_hang_on_the_pair_alone() -> None:
    fewer = DenseMaps(SIZES, adjacency(edges=EDGES[1:]), projection_fraction=0.5, dtype=torch.float64)
    one, other = edge_maps(dense()), edge_maps(fewer)
    assert other.keys() == one.keys() - {(0, 1), (1, 0)}
    assert all(torch.equal(one[edge], map_RD) for edge, map_RD in other.items())
    assert not torch.equal(one[2, 0], edge_maps(dense(seed=1))[2, 0])
    twins = edge_maps(DenseMaps([9, 9], adjacency(2, [(0, 1)]), projection_fraction=0.5))
    assert not torch.equal(twins[0, 1], twins[1, 0])


def test_implicit_starts_hang_on_the_client_alone() -> None:
    fewer = ImplicitMaps(SIZES, adjacency(edges=EDGES[1:]), projection_fraction=0.5, dtype=torch.float64)
    one, other = edge_maps(implicit()), edge_maps(fewer)
    for edge in [(2, 1), (3, 1), (3, 4), (4, 3)]:  # neither end has lost an edge to a neighbor of lower index
        torch.testing.assert_close(one[edge], other[edge])
    twins = edge_maps(ImplicitMaps([9, 9], adjacency(2, [(0, 1)]), projection_fraction=0.5))
    assert not torch.equal(twins[0, 1], twins[1, 0])
    assert not torch.equal(one[2, 0], edge_maps(implicit(seed=1))[2, 0])


@pytest.mark.parametrize(
    "make",
    [
        lambda: dense(0.0),
        lambda: dense(1.5),
        lambda: DenseMaps([3, 0], adjacency(2, [(0, 1)])),
        lambda: DenseMaps([3], adjacency(2, [(0, 1)])),
        lambda: DenseMaps([3, 3], torch.tensor([[0, 1], [0, 0]])),
        lambda: DenseMaps([3, 3], torch.eye(2)),
        lambda: DenseMaps([3, 3], adjacency(2, [(0, 1)]), dtype=torch.float16),
        lambda: implicit(max_rank=0),
        lambda: implicit(tolerance=1.0),
    ],
)
def test_refused(make: object) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        make()  # type: ignore[operator]


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 24), min_size=2, max_size=5),
    fraction=st.floats(0.01, 1.0),
    probability=st.floats(0, 1),
    num_updates=st.integers(0, 12),
    seed=st.integers(0, 2**31),
)
def test_pull_back_is_the_adjoint_of_project(
    sizes: list[int], fraction: float, probability: float, num_updates: int, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    upper = (torch.rand(len(sizes), len(sizes), generator=random) < probability).triu(1)
    for maps in (
        DenseMaps(sizes, upper | upper.T, projection_fraction=fraction, seed=seed, dtype=torch.float64),
        ImplicitMaps(sizes, upper | upper.T, projection_fraction=fraction, seed=seed, dtype=torch.float64, max_rank=5),
    ):
        for update in range(num_updates):
            step_once(
                maps, random_models(sizes, update), 0.3 / max(1, maps.largest_map_curvature(random_models(sizes)))
            )
        models, other = random_models(sizes, seed), torch.randn(maps.num_message_numbers, generator=random).double()
        pulled = maps.pull_back(other)
        inner = sum(float(model @ pull) for model, pull in zip(models, pulled, strict=True))
        assert inner == pytest.approx(float(maps.project(models) @ other), rel=1e-9, abs=1e-9)


def test_one_iteration_by_hand() -> None:
    maps = DenseMaps([2, 3], adjacency(2, [(0, 1)]), projection_fraction=0.5, dtype=torch.float64)
    maps.load_state_dict({"0": torch.tensor([[1.0, -2.0]]), "1": torch.tensor([[3.0, 0.0, 1.0]])})
    models = [torch.tensor([1.0, 1.0]).double(), torch.tensor([2.0, -1.0, -1.0]).double()]
    message_M = maps.project(models)
    residual_M = maps.residual(message_M)
    assert message_M.tolist() == [-1.0, 5.0]
    assert residual_M.tolist() == [-6.0, 6.0]
    assert [pulled.tolist() for pulled in maps.pull_back(residual_M)] == [[-6.0, 12.0], [18.0, 0.0, 6.0]]
    maps.update(residual_M, models, 0.5)
    assert maps.matrix(0).tolist() == [[4.0, 1.0]]
    assert maps.matrix(1).tolist() == [[-3.0, 3.0, 4.0]]


def test_formulas_of_the_paper_edge_by_edge() -> None:
    for maps in both(0.3):
        step_once(maps, random_models(seed=7))
        models, before = random_models(), edge_maps(maps)
        message_M = maps.project(models)
        residual_M = maps.residual(message_M)
        pulled = maps.pull_back(residual_M)
        maps.update(residual_M, models, 0.01)
        after, expected = edge_maps(maps), [torch.zeros_like(model) for model in models]
        for (i, j), message in zip(before, torch.split(message_M, maps.num_rows_E), strict=True):
            difference = before[i, j] @ models[i] - before[j, i] @ models[j]
            torch.testing.assert_close(message, before[i, j] @ models[i])
            torch.testing.assert_close(after[i, j], before[i, j] - 0.01 * torch.outer(difference, models[i]))
            expected[i] += before[i, j].T @ difference
        torch.testing.assert_close(pulled, expected)


def test_maps_of_one_identity_are_those_of_dfedu() -> None:
    weight = 0.7
    maps = DenseMaps(
        [6] * 4,
        adjacency(4, [(0, 1), (1, 2), (1, 3)]),
        projection_fraction=1.0,
        initialization=IdentityInitialization(scale=math.sqrt(weight)),
        dtype=torch.float64,
    )
    models = random_models([6] * 4)
    pulled = maps.pull_back(maps.residual(maps.project(models)))
    torch.testing.assert_close(pulled[0], weight * (models[0] - models[1]))
    torch.testing.assert_close(pulled[1], weight * (3 * models[1] - models[0] - models[2] - models[3]))


def test_residuals_shrink_by_the_stated_factor() -> None:
    for maps in both():
        models = random_models()
        square_C = torch.stack([model.square().sum() for model in models])
        largest = max(float(square_C[i] + square_C[j]) for i, j in EDGES)
        assert maps.largest_map_curvature(models) == pytest.approx(largest)
        before_M = step_once(maps, models, 0.01)
        after_M = maps.residual(maps.project(models))
        for (i, j), before, after in zip(
            edge_maps(maps), *(torch.split(r, maps.num_rows_E) for r in (before_M, after_M)), strict=True
        ):
            torch.testing.assert_close(after, (1 - 0.01 * (square_C[i] + square_C[j])) * before)


def test_energy_falls_under_small_steps_and_grows_under_large_ones() -> None:
    for maps in both():
        models = random_models()
        energies = [maps.residual(maps.project(models)).square().sum()]
        for _ in range(10):
            pulled = maps.pull_back(maps.residual(maps.project(models)))
            rate = 0.3 / maps.largest_curvature()
            models = [model - rate * pull for model, pull in zip(models, pulled, strict=True)]
            energies.append(maps.residual(maps.project(models)).square().sum())
            step_once(maps, models, 0.3 / maps.largest_map_curvature(models))
            energies.append(maps.residual(maps.project(models)).square().sum())
        assert all(later < earlier for earlier, later in pairwise(energies))
        worst = random_models()
        rate = 2.3 / maps.largest_curvature()
        for _ in range(200):
            pulled = maps.pull_back(maps.residual(maps.project(worst)))
            worst = [model - rate * pull for model, pull in zip(worst, pulled, strict=True)]
        assert maps.residual(maps.project(worst)).square().sum() > energies[0]


def test_messages_after_an_update_need_no_product() -> None:
    for maps in both():
        models = random_models()
        message_M = maps.project(models)
        residual_M = maps.residual(message_M)
        predicted_M = maps.messages_after_update(message_M, residual_M, models, 0.01)
        maps.update(residual_M, models, 0.01)
        torch.testing.assert_close(predicted_M, maps.project(models))


def test_absent_clients_neither_pull_nor_learn() -> None:
    for maps in both():
        present_C = torch.tensor([True, False, True, True, False])
        models, before = random_models(), edge_maps(maps)
        residual_M = maps.residual(maps.project(models), present_C)
        pulled = maps.pull_back(residual_M)
        maps.update(residual_M, models, 0.01)
        changed = {edge for edge, map_RD in edge_maps(maps).items() if not torch.equal(map_RD, before[edge])}
        assert changed == {(0, 2), (2, 0)}
        assert [bool(pull.any()) for pull in pulled] == [True, False, True, False, False]


def test_curvature_is_the_sheaf_laplacians() -> None:
    for maps in both(0.3):
        for update in range(3):
            step_once(maps, random_models(seed=update), 0.01)
        basis = torch.eye(sum(SIZES), dtype=torch.float64)
        laplacian = torch.stack(
            [torch.cat(maps.pull_back(maps.residual(maps.project(list(torch.split(row, SIZES)))))) for row in basis]
        )
        torch.testing.assert_close(laplacian, laplacian.T)
        exact = float(torch.linalg.eigvalsh(laplacian)[-1])
        assert maps.largest_curvature(1e-3) == pytest.approx(exact, rel=1e-3)
        assert maps.largest_curvature() == pytest.approx(exact, rel=0.03)


def test_curvature_of_a_multiple_of_the_identity() -> None:
    maps = DenseMaps(
        [1, 1], adjacency(2, [(0, 1)]), projection_fraction=1.0, initialization=IdentityInitialization(scale=3.0)
    )
    assert maps.largest_curvature() == pytest.approx(18.0)


def test_norms() -> None:
    for maps in both():
        for update in range(5):
            step_once(maps, random_models(seed=update))
        norms_CC = maps.norms()
        for edge, map_RD in edge_maps(maps).items():
            assert norms_CC[edge] == pytest.approx(float(map_RD.norm()))
        assert torch.equal(norms_CC > 0, adjacency())


@pytest.mark.parametrize("kind", [DenseMaps, ImplicitMaps])
def test_a_graph_without_edges(kind: type[RestrictionMaps]) -> None:
    maps = kind([3, 4], torch.zeros(2, 2))  # type: ignore[call-arg]
    models = random_models([3, 4])
    message_M = maps.project([model.float() for model in models])
    assert message_M.shape == (0,)
    assert [pulled.tolist() for pulled in maps.pull_back(maps.residual(message_M))] == [[0.0] * 3, [0.0] * 4]
    assert maps.largest_curvature() == 0
    assert maps.largest_map_curvature(models) == 0
    assert maps.norms().tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_permuting_clients_permutes_results() -> None:
    order = [3, 0, 4, 2, 1]  # unseen client n is old client order[n]
    one = dense(0.3)
    moved_CC = adjacency()[order][:, order]
    sizes, maps = [SIZES[old] for old in order], edge_maps(one)
    other = DenseMaps(sizes, moved_CC, projection_fraction=0.3, dtype=torch.float64)
    other.load_state_dict(
        {
            str(new): torch.cat([maps[old, order[j]] for j in moved_CC[new].nonzero().flatten().tolist()])
            for new, old in enumerate(order)
        }
    )
    models = random_models()
    moved = [models[old] for old in order]
    for _ in range(3):
        pulled, moved_pulled = (
            each.pull_back(step_once(each, thetas)) for each, thetas in ((one, models), (other, moved))
        )
        torch.testing.assert_close([pulled[old] for old in order], moved_pulled)


@pytest.mark.parametrize("fraction", [0.1, 0.5, 1.0])
def test_implicit_is_dense_while_the_rank_suffices(fraction: float) -> None:
    maps = implicit(fraction, max_rank=32)
    reference = materialized(maps, fraction)
    for update in range(40):  # 32 and a quarter
        models = random_models(seed=update)
        torch.testing.assert_close(step_once(maps, models), step_once(reference, models), rtol=0, atol=1e-10)
    assert_same(maps, reference)
    assert maps.ranks == [40] * len(SIZES)
    assert not maps.truncation_errors().any()


def test_implicit_is_dense_when_models_stay_in_few_directions() -> None:
    maps = implicit(max_rank=6)
    reference = materialized(maps)
    bases = [torch.stack(basis) for basis in zip(*(random_models(seed=seed) for seed in range(3)), strict=True)]
    for update in range(60):
        weights = torch.randn(3, generator=torch.Generator().manual_seed(update), dtype=torch.float64)
        models = [weights @ basis for basis in bases]
        step_once(maps, models)
        step_once(reference, models)
    assert_same(maps, reference)
    assert max(maps.ranks) <= 7
    assert maps.truncation_errors().max() < 1e-10


def test_implicit_is_dense_when_the_rank_is_that_of_the_models() -> None:
    maps = implicit(max_rank=31)
    reference = materialized(maps)
    for update in range(200):
        models = random_models(seed=update)
        step_once(maps, models)
        step_once(reference, models)
    assert_same(maps, reference)


def test_truncation_is_reported() -> None:
    maps = implicit(max_rank=4)
    start = [maps.matrix(client) for client in range(len(SIZES))]
    exact = [matrix.clone() for matrix in start]
    for update in range(30):
        models = random_models(seed=update)
        residual_M = step_once(maps, models)
        for matrix, residual_R, model_D in zip(exact, torch.split(residual_M, maps.num_rows_C), models, strict=True):
            matrix -= 0.003 * torch.outer(residual_R, model_D)
    for client, reported in enumerate(maps.truncation_errors().tolist()):
        learned = (maps.matrix(client) - start[client]).norm()
        error = (maps.matrix(client) - exact[client]).norm() / learned
        assert 0 < float(error) <= reported < 10


def test_nothing_is_noted_without_disagreement() -> None:
    maps = implicit()
    models = random_models()
    maps.update(torch.zeros(maps.num_message_numbers, dtype=torch.float64), models, 0.1)
    maps.update(maps.residual(maps.project(models)), models, 0.0)
    assert maps.ranks == [0] * len(SIZES)


@pytest.mark.parametrize("num_updates", [0, 3, 40])
def test_state_continues_bit_for_bit(num_updates: int) -> None:
    for make in (dense, lambda: implicit(max_rank=8)):
        maps, restored = make(), make()
        for update in range(num_updates):
            step_once(maps, random_models(seed=update))
        state = {name: tensor.clone() for name, tensor in maps.state_dict().items()}
        for update in range(20):
            step_once(maps, random_models(seed=update))
        restored.load_state_dict(state)
        for update in range(20):
            step_once(restored, random_models(seed=update))
        assert all(torch.equal(tensor, restored.state_dict()[name]) for name, tensor in maps.state_dict().items())


def test_foreign_states_are_refused() -> None:
    with pytest.raises(ValueError, match="seed 1"):
        implicit().load_state_dict(implicit(seed=1).state_dict())
    larger = implicit(max_rank=16)
    for update in range(20):
        step_once(larger, random_models(seed=update))
    with pytest.raises(ValueError, match="max_rank"):
        implicit(max_rank=8).load_state_dict(larger.state_dict())
    with pytest.raises(ValueError, match="projection_fraction"):
        implicit(0.2).load_state_dict(implicit().state_dict())
    with pytest.raises(ValueError, match="projection_fraction"):
        dense(0.2).load_state_dict(dense().state_dict())
    with pytest.raises(ValueError, match="keys"):
        dense().load_state_dict(implicit().state_dict())


@pytest.mark.parametrize("kind", [DenseMaps, ImplicitMaps])
def test_a_shared_start_is_the_same_at_both_ends_of_an_edge(kind) -> None:
    adjacency_CC = torch.ones(4, 4).fill_diagonal_(0) > 0
    adjacency_CC[0, 3] = adjacency_CC[3, 0] = False
    maps = kind([10] * 4, adjacency_CC, projection_fraction=0.4, shared_initialization=True, dtype=torch.float64)

    def block(i: int, j: int) -> Tensor:
        first = 4 * [k for k in range(4) if adjacency_CC[i, k]].index(j)
        return maps.matrix(i)[first : first + 4]

    for i, j in adjacency_CC.nonzero().tolist():
        torch.testing.assert_close(block(i, j), block(j, i))
        others = [block(i, k) for k in range(4) if adjacency_CC[i, k] and k != j]
        assert all((block(i, j) - other).abs().max() > 1e-3 for other in others)
    model = torch.randn(10, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    message_M = maps.project([model] * 4)
    torch.testing.assert_close(maps.residual(message_M), torch.zeros_like(message_M))
    other_M = torch.randn(len(message_M), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for client, (pulled_D, rows_R) in enumerate(
        zip(maps.pull_back(other_M), other_M.split(maps.num_rows_C), strict=True)
    ):
        torch.testing.assert_close(pulled_D, maps.matrix(client).T @ rows_R)
    with pytest.raises(ValueError, match="shared_initialization is for models of equal sizes"):
        kind([10, 9, 10, 10], adjacency_CC, shared_initialization=True)
