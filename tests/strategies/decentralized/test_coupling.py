"""Whether neighbors couple: what is said before training, rare exchanges, and the maps that are not learned."""

import functools
import warnings
from typing import Any

import pytest
import torch
from line_clients import PATH, Affine, Edges, Lines, affine_client, lines, small_federation, upload_of

from fl_lightning.callbacks import CommunicationLedger
from fl_lightning.relations.topology import Complete, Ring
from fl_lightning.strategies import DPSGD, DFedU, SheafFMTL
from fl_lightning.strategies.decentralized import PrincipalMaps, RedrawnMaps

NO_ROWS = pytest.mark.filterwarnings("ignore:the maps cannot make")


def setup(strategy: Any, *sizes: int, **settings: Any) -> Any:
    strategy.setup(small_federation(*sizes, **settings))
    return strategy


# ------------------------------------------------------------------------------------------- said before training


@pytest.mark.parametrize(
    ("topology", "sizes", "fraction", "message"),
    [
        # 4 edges with 2 rows each; 3 models of 5 numbers follow from the fourth
        (Ring(), (5, 5, 5, 5), 0.4, r"4 edges with strategy\.projection_fraction 0\.4 compare 8 .* takes 15; .* 0\.75"),
        (Complete(), (5, 5, 5, 5), 0.4, r"6 edges .* compare 12 numbers, and agreement of 4 clients takes 15"),
        # edges compare at most what the smaller end has: 2 + 3 + 3
        (
            Edges(*PATH),
            (2, 6, 3, 3),
            0.7,
            r"3 edges .* compare 5 numbers, and agreement of 4 clients takes 8; .* to 1,",
        ),
    ],
)
def test_too_few_rows_are_reported(topology, sizes, fraction, message) -> None:
    with pytest.warns(UserWarning, match=message):
        setup(SheafFMTL(topology=topology, regularization=0.5, projection_fraction=fraction), *sizes)


@pytest.mark.parametrize(
    ("topology", "sizes", "fraction"),
    [(Ring(), (4, 4, 4, 4), 0.75), (Complete(), (4, 4, 4, 4), 0.5), (Edges(*PATH), (2, 6, 3, 3), 1.0)],
)
def test_enough_rows_are_not(topology, sizes, fraction) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        setup(SheafFMTL(topology=topology, regularization=0.3, projection_fraction=fraction), *sizes)


def test_rows_are_counted_among_the_training_clients() -> None:
    """Without one of the complete graph's four, three edges are left, of two rows each, for two models of five."""
    strategy = SheafFMTL(topology=Complete(), regularization=0.5, projection_fraction=0.4)
    with pytest.warns(UserWarning, match="3 edges .* compare 6 numbers, and agreement of 3 clients takes 10"):
        setup(strategy, 5, 5, 5, 5, training_clients=(0, 1, 3))


@pytest.mark.parametrize(
    ("strategy", "factors"),
    [
        (DFedU(topology=Ring(), regularization=0.001), r"the Laplacian's largest eigenvalue 4"),
        (SheafFMTL(topology=Ring(), regularization=0.001, projection_fraction=1.0), "the sheaf Laplacian's"),
    ],
)
def test_a_weak_pull_is_reported(strategy, factors) -> None:
    message = rf"too weak to matter: learning rate 0\.01 x strategy\.regularization 0\.001 x {factors}.*raise strategy"
    with pytest.warns(UserWarning, match=message):
        setup(strategy, 3, 3, 3, 3, architectures=(), learning_rate=0.01)


def test_a_pull_is_weak_by_what_it_takes_away_in_a_hundred_rounds() -> None:
    """On two clients the eigenvalue is 2: shares of 1 - (1 - 2 α λ)^100 on either side of a tenth."""
    for regularization, every, is_weak in ((0.052, 1, True), (0.053, 1, False), (0.053, 2, True)):
        strategy = DFedU(topology=Ring(), regularization=regularization, exchange_every=every)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            setup(strategy, 2, 2, architectures=(), learning_rate=0.01)
        assert bool(heard) == is_weak, (regularization, every)


# ---------------------------------------------------------------------------------------------------- rare exchanges


@pytest.mark.parametrize(
    "strategy",
    [DPSGD(topology=Ring(), exchange_every=3), DFedU(topology=Ring(), regularization=0.3, exchange_every=3)],
)
def test_between_exchanges_clients_are_alone(strategy) -> None:
    setup(strategy, 1, 1, 1, 1, architectures=())
    upload = upload_of([[1.0], [2.0], [3.0], [6.0]])
    for round_idx in range(3):
        (stage,) = strategy.stages(round_idx)
        exchanges = round_idx == 2
        assert strategy.peer_bytes(stage, upload) == [16 * exchanges] * 4
        strategy.aggregate(stage, upload)
        assert torch.equal(strategy.models_CP, upload.parameters["flat"]) == (not exchanges)


def test_rare_exchanges_are_counted_in_a_run(make_trainer) -> None:
    trainer = make_trainer(num_rounds=6, callbacks=CommunicationLedger())
    trainer.fit(affine_client(Affine), lines(Lines(labels=True)), DPSGD(topology=Edges(*PATH), exchange_every=3))
    sent = [row["comm/bytes_peer"] for row in trainer.run.history]
    assert sent == [0, 0, 6 * 6 * 4, 0, 0, 6 * 6 * 4]
    assert trainer.run.history[-1]["comm/bytes_busiest"] == 2 * 2 * 6 * 4  # a client in the middle


def test_nothing_can_be_derived_after_training_alone() -> None:
    strategy = SheafFMTL(topology=Complete(), regularization=0.3, projection_fraction=1.0, exchange_every=2)
    setup(strategy, 2, 2, 2)
    upload = upload_of([[1.0, 2.0], [0.0, 1.0], [3.0, 1.0]])
    for round_idx, is_known in ((1, True), (2, False), (3, True)):
        strategy.aggregate(strategy.stages(round_idx)[0], upload)
        assert bool(strategy.up_to_date_CC.any()) == is_known


# ----------------------------------------------------------------------------------------------------- redrawn maps

RING_CC = torch.eye(6).roll(1, 0) + torch.eye(6).roll(-1, 0)


def ring_maps(kind: Any = RedrawnMaps, fraction: float = 0.3, **settings: Any) -> Any:
    return kind([10] * 6, RING_CC, projection_fraction=fraction, dtype=torch.float64, **settings)


def models(seed: int = 0) -> list[torch.Tensor]:
    return list(torch.randn(6, 10, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))


def test_products_of_redrawn_maps_are_those_of_their_matrices() -> None:
    maps, models_CD = ring_maps(), models()
    for _ in range(3):
        matrices = [maps.matrix(client) for client in range(6)]
        message_M = maps.project(models_CD)
        torch.testing.assert_close(message_M, torch.cat([m @ v for m, v in zip(matrices, models_CD, strict=True)]))
        residual_M = maps.residual(message_M)
        for pulled_D, map_RD, residual_R in zip(
            maps.pull_back(residual_M), matrices, torch.split(residual_M, maps.num_rows_C), strict=True
        ):
            torch.testing.assert_close(pulled_D, residual_R @ map_RD)
        torch.testing.assert_close(maps.norms(), 3**0.5 * RING_CC.double())
        torch.testing.assert_close(matrices[0][:3], matrices[1][:3])  # the edge between 0 and 1, from both ends
        maps.advance(models_CD, torch.ones(6, dtype=torch.bool))
        assert not torch.equal(maps.matrix(0), matrices[0])


def test_redrawn_maps_of_unequal_models_compare_what_they_have_in_common() -> None:
    sizes, path_CC = (6, 9, 20), torch.tensor([[0, 1, 0], [1, 0, 1], [0, 1, 0]])
    maps = RedrawnMaps(sizes, path_CC, projection_fraction=0.5, num_compared=5, dtype=torch.float64)
    models_CD = [torch.randn(size, dtype=torch.float64) for size in sizes]
    matrices = [maps.matrix(client) for client in range(3)]
    assert [map_RD.shape for map_RD in matrices] == [(2, 6), (4, 9), (2, 20)]  # half of 5
    assert not any(map_RD[:, 5:].any() for map_RD in matrices)
    torch.testing.assert_close(matrices[1][:2, :5], matrices[0][:, :5])
    torch.testing.assert_close(matrices[1][2:, :5], matrices[2][:, :5])
    message_M = maps.project(models_CD)
    torch.testing.assert_close(message_M, torch.cat([m @ v for m, v in zip(matrices, models_CD, strict=True)]))
    residual_M = maps.residual(message_M)
    parts = zip(maps.pull_back(residual_M), matrices, torch.split(residual_M, maps.num_rows_C), strict=True)
    for pulled_D, map_RD, residual_R in parts:
        torch.testing.assert_close(pulled_D, residual_R @ map_RD)
    with pytest.raises(ValueError, match="num_compared is 7: give at least 1 and at most 6"):
        RedrawnMaps(sizes, path_CC, num_compared=7)


def test_redrawn_maps_see_everything_alike_on_average() -> None:
    """The mean of P^T P over exchanges is γ times the identity, so that this is dFedU with γ times its pull."""
    maps, mean_DD, count = ring_maps(), torch.zeros(10, 10, dtype=torch.float64), 3000
    for _ in range(count):
        rows = maps.matrix(0)[:3]
        mean_DD += rows.T @ rows / count
        maps.advance([], torch.ones(6, dtype=torch.bool))
    torch.testing.assert_close(mean_DD, 0.3 * torch.eye(10, dtype=torch.float64), atol=0.03, rtol=0)


def test_redrawn_maps_make_clients_agree_where_fixed_ones_of_as_many_rows_cannot() -> None:
    models_CD = torch.stack(models())
    maps = ring_maps(fraction=0.1)
    for _ in range(1500):
        pulls = maps.pull_back(maps.residual(maps.project(list(models_CD))))
        models_CD = models_CD - 0.5 * torch.stack(pulls)
        maps.advance(list(models_CD), torch.ones(6, dtype=torch.bool))
    torch.testing.assert_close(models_CD, models_CD.mean(dim=0).expand(6, 10), atol=1e-3, rtol=0)
    torch.testing.assert_close(models_CD.mean(dim=0), torch.stack(models()).mean(dim=0))


def test_nets_of_unequal_widths_agree_in_what_they_share() -> None:
    """A wide layer's first unit agrees with the narrow one's only; its other units hear nobody."""
    nets = tuple({"w": torch.zeros(2, width), "b": torch.zeros(width)} for width in (1, 3))
    maps = functools.partial(RedrawnMaps, num_compared=3)
    strategy = SheafFMTL(topology=Ring(), map_step_size=0, projection_fraction=0.4, maps=maps)
    setup(strategy, 3, 9, 3, 9, architectures=nets)
    start_CP = torch.randn(4, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    start_CP[::2, 3:] = 0
    strategy.models_CP = start_CP.clone()
    for round_idx in range(300):
        strategy.aggregate(strategy.stages(round_idx)[0], upload_of(strategy.models_CP.tolist()))

    def shared(models_CP: torch.Tensor) -> torch.Tensor:
        return torch.stack([models_CP[client, [0, 3, 6] if client % 2 else [0, 1, 2]] for client in range(4)])

    expected_CD = shared(start_CP).mean(dim=0).expand(4, 3)
    torch.testing.assert_close(shared(strategy.models_CP), expected_CD, atol=1e-6, rtol=0)
    alone = [1, 2, 4, 5, 7, 8]
    assert torch.equal(strategy.models_CP[1::2, alone], start_CP[1::2, alone])
    assert not strategy.models_CP[::2, 3:].any()


# --------------------------------------------------------------------------------------------------- principal maps


def test_principal_maps_are_silent_then_look_where_models_differ() -> None:
    maps = ring_maps(PrincipalMaps, fraction=0.2, num_alone=2)
    directions, _ = torch.linalg.qr(torch.randn(10, 2, dtype=torch.float64))
    models_CD = list(7.0 + torch.randn(6, 2, dtype=torch.float64) @ directions.T)
    everyone = torch.ones(6, dtype=torch.bool)

    assert maps.is_silent
    assert not maps.extra_numbers_C.any()
    maps.advance(models_CD, everyone)
    assert maps.is_silent
    # on the ring the tree from 0 is 1 - 2 - 3 on one side and 5 - 4 on the other: models go up it, two rows down
    assert maps.extra_numbers_C.tolist() == [2 * 20, 30 + 20, 20 + 20, 10, 10, 20 + 20]
    maps.advance(models_CD, everyone)
    assert not maps.is_silent
    assert not maps.extra_numbers_C.any()
    torch.testing.assert_close(maps.map_RD.T @ maps.map_RD, directions @ directions.T)
    matrices = [maps.matrix(client) for client in range(6)]
    message_M = maps.project(models_CD)
    torch.testing.assert_close(message_M, torch.cat([m @ v for m, v in zip(matrices, models_CD, strict=True)]))
    residual_M = maps.residual(message_M)
    parts = zip(maps.pull_back(residual_M), matrices, residual_M.split(4), strict=True)
    for pulled_D, map_RD, residual_R in parts:
        torch.testing.assert_close(pulled_D, residual_R @ map_RD)
    assert maps.largest_curvature() == pytest.approx(4.0)


def test_principal_maps_leave_clients_out_that_do_not_train() -> None:
    maps, models_CD = ring_maps(PrincipalMaps, fraction=0.1, num_alone=1), models()
    models_CD[5] = 100 * models_CD[5]
    maps.advance(models_CD, torch.tensor([True] * 5 + [False]))
    rest_CD = torch.stack(models_CD[:5])
    _, _, expected = torch.linalg.svd(rest_CD - rest_CD.mean(dim=0))
    torch.testing.assert_close(maps.map_RD[0].abs(), expected[0].abs())


@pytest.mark.parametrize(("fraction", "num_alone"), [(0.7, 1), (0.1, 0)])
def test_principal_maps_have_fewer_rows_than_clients(fraction, num_alone) -> None:
    with pytest.raises(
        ValueError, match=r"num_alone .* at least 1, and strategy\.projection_fraction .* set it to 0\.55"
    ):
        ring_maps(PrincipalMaps, fraction=fraction, num_alone=num_alone)


# -------------------------------------------------------------------------------------------------------- in a run

KINDS = [RedrawnMaps, functools.partial(PrincipalMaps, num_alone=2)]


@pytest.mark.parametrize("maps", KINDS, ids=["redrawn", "principal"])
def test_resuming_is_exact(maps, make_trainer, assert_same, tmp_path) -> None:
    def run(num_rounds: int, ckpt_path: str | None = None):
        strategy = SheafFMTL(
            topology=Ring(), regularization=0.5, map_step_size=0, projection_fraction=0.5, maps=maps, exchange_every=2
        )
        trainer = make_trainer(num_rounds=num_rounds, callbacks=CommunicationLedger())
        trainer.fit(affine_client(Affine), lines(Lines(labels=True)), strategy, ckpt_path)
        return trainer

    whole, first = run(9), run(5)
    first.save_checkpoint(tmp_path / "v" / "five.ckpt")
    resumed = run(9, str(tmp_path / "v" / "five.ckpt"))
    assert_same(resumed.run.strategy.state_dict(), whole.run.strategy.state_dict())
    assert_same(resumed.run.history, whole.run.history)


@NO_ROWS
@pytest.mark.parametrize("maps", KINDS, ids=["redrawn", "principal"])
def test_maps_that_do_not_learn_are_not_asked_to(maps) -> None:
    with pytest.raises(ValueError, match=r"map_step_size is 0\.1, but \w+Maps do not learn by eq\. 19: set it to 0"):
        setup(SheafFMTL(topology=Complete(), map_step_size=0.1, projection_fraction=0.25, maps=maps), 4, 4, 4)


@pytest.mark.parametrize("maps", KINDS, ids=["redrawn", "principal"])
def test_unequal_models_are_refused(maps) -> None:
    with pytest.raises(ValueError, match="models of equal sizes"):
        setup(SheafFMTL(topology=Complete(), map_step_size=0, projection_fraction=0.25, maps=maps), 4, 8, 4)
