import contextlib

import pytest

from fl_lightning.kernels.randomness import generator
from fl_lightning.round.client_draws import MANY_CLIENTS, some_of
from fl_lightning.round.participation import Participation, check_draw, epochs_of

CLIENTS = tuple(range(20))


def draws(participation: Participation, num_rounds: int = 200, seed: int = 0):
    return [participation.draw(CLIENTS, round_idx, seed) for round_idx in range(num_rounds)]


def test_everyone_by_default() -> None:
    assert Participation().draw((1, 4, 7), 3, 0) == ({1: 1.0, 4: 1.0, 7: 1.0}, [])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"fraction": 0.25}, 5),
        ({"fraction": 0.025}, 1),
        ({"fraction": 0.125}, 3),
        ({"fraction": 0.01}, 1),
        ({"num_clients": 7}, 7),
    ],
    ids=str,
)
def test_number_of_clients(settings, expected) -> None:
    rounds = draws(Participation(**settings), 200)

    assert all(len(work_fraction) == expected and not dropped for work_fraction, dropped in rounds)
    assert all(list(work_fraction) == sorted(work_fraction) for work_fraction, _ in rounds)
    times = [sum(client in work_fraction for work_fraction, _ in rounds) for client in CLIENTS]
    mean = 200 * expected / 20
    assert min(times) > 0
    assert max(times) < mean + 5 * mean**0.5


def test_draws_depend_on_seed_and_round_alone() -> None:
    participation = Participation(fraction=0.3, dropout_probability=0.3, straggler_probability=0.5)
    other = Participation(fraction=0.3, dropout_probability=0.3, straggler_probability=0.5)

    backwards = [other.draw(CLIENTS, round_idx, 5) for round_idx in reversed(range(10))]

    assert draws(participation, 10, seed=5) == backwards[::-1]
    assert draws(participation, 10, seed=6) != backwards[::-1]
    assert len({tuple(work_fraction) for work_fraction, _ in backwards}) > 5


def test_dropouts_and_stragglers_have_the_asked_for_rates() -> None:
    rounds = draws(Participation(num_clients=10, dropout_probability=0.2, straggler_probability=0.4), 300)

    dropped = sum(len(gone) for _, gone in rounds)
    work_fractions = [share for work_fraction, _ in rounds for share in work_fraction.values()]
    slow = [share for share in work_fractions if share < 1]

    assert all(
        len(work_fraction) + len(gone) == 10 and not set(work_fraction) & set(gone) for work_fraction, gone in rounds
    )
    assert dropped / 3000 == pytest.approx(0.2, abs=0.03)
    assert len(slow) / len(work_fractions) == pytest.approx(0.4, abs=0.04)
    assert sum(slow) / len(slow) == pytest.approx(0.5, abs=0.04)
    assert 0 <= min(slow) < 0.05


def test_dropping_out_does_not_change_who_was_chosen() -> None:
    plain = draws(Participation(num_clients=5))
    flaky = draws(Participation(num_clients=5, dropout_probability=0.5))

    for (work_fraction, _), (responded, gone) in zip(plain, flaky, strict=True):
        assert sorted([*responded, *gone]) == list(work_fraction)


@pytest.mark.parametrize(("fraction", "expected"), [(0.0, 10), (0.1, 9), (0.25, 8), (0.5, 5), (0.9, 1)])
def test_held_out_clients(fraction, expected) -> None:
    participation = Participation(held_out_fraction=fraction)

    clients = participation.training_clients(10, seed=3)

    assert len(clients) == len(set(clients)) == expected
    assert clients == tuple(sorted(clients)) == participation.training_clients(10, seed=3)
    if 1 < expected < 10:
        assert len({participation.training_clients(10, seed) for seed in range(10)}) > 1


def test_smaller_held_out_fractions_hold_out_fewer_of_the_same_clients() -> None:
    few = set(Participation(held_out_fraction=0.2).training_clients(10, 1))
    many = set(Participation(held_out_fraction=0.5).training_clients(10, 1))
    assert many < few


def test_epochs_of_a_straggler() -> None:
    assert [epochs_of(share, 3) for share in (0.0, 0.49, 0.5, 0.999, 1.0)] == [1, 1, 2, 2, 3]
    assert [epochs_of(share, 1) for share in (0.0, 1.0)] == [1, 1]
    assert [epochs_of(share, 0) for share in (0.0, 1.0)] == [0, 0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fraction": 0.0}, r"participation.fraction must be in \(0, 1\], got 0.0"),
        ({"fraction": 1.1}, r"participation.fraction must be in \(0, 1\], got 1.1"),
        ({"num_clients": 0}, "participation.num_clients must be at least 1, got 0"),
        ({"min_clients": 0}, "participation.min_clients must be at least 1, got 0"),
        ({"max_failed_rounds": 0}, "participation.max_failed_rounds must be at least 1, got 0"),
        ({"num_clients": 2, "fraction": 0.5}, "participation.fraction or participation.num_clients, not both"),
        ({"dropout_probability": 1.0}, r"participation.dropout_probability must be in \[0, 1\), got 1.0"),
        ({"straggler_probability": -0.1}, "participation.straggler_probability must be"),
        ({"held_out_fraction": 1.0}, "participation.held_out_fraction must be"),
        ({"max_update_norm": 0.0}, "participation.max_update_norm must be positive, or null for no bound, got 0.0"),
    ],
    ids=str,
)
def test_settings_out_of_range(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        Participation(**settings)


def test_settings_that_do_not_fit_the_federation() -> None:
    assert len(Participation(num_clients=4, held_out_fraction=0.2).training_clients(5, 0)) == 4
    with pytest.raises(ValueError, match="num_clients is 5, but only 4 clients train: lower it"):
        Participation(num_clients=5, held_out_fraction=0.2).training_clients(5, 0)
    with pytest.raises(ValueError, match=r"held_out_fraction=0.9 leaves no client of 3 to train"):
        Participation(held_out_fraction=0.9).training_clients(3, 0)


def test_of_very_many_clients_each_is_as_likely() -> None:
    drawn = [some_of(MANY_CLIENTS, 1000, generator(0, "draw", round_idx)) for round_idx in range(100)]
    assert all(len(set(chosen)) == 1000 for chosen in drawn)
    halves = sum(client < MANY_CLIENTS // 2 for chosen in drawn for client in chosen)
    assert abs(halves - 50_000) < 5 * 100_000**0.5 / 2
    assert some_of(MANY_CLIENTS, 1000, generator(0, "draw", 3)) == drawn[3]


@pytest.mark.parametrize(
    ("drawn", "message"),
    [
        (
            {0: 1.0},
            r"Mine.draw returned \{0: 1.0\}: return a dict from each client .*, and a list of those that dropped",
        ),
        (([0, 1], []), r"Mine.draw returned \(\[0, 1\], \[\]\): return a dict"),
        (({9: 1.0}, []), "Mine.draw returned client 9, which is not one of the training clients"),
        (({0: 1.0}, [9]), "Mine.draw returned client 9, which is not one of the training clients"),
        (({0: 1.0, 1: 2.0}, []), r"Mine.draw returned the share 2.0 for client 1: give one in \[0, 1\]"),
        (({1: 0.5, 0: 0.0}, [2]), None),
    ],
    ids=["no list", "no shares", "unknown", "unknown dropped out", "too much", "right"],
)
def test_what_an_own_draw_returns_is_checked(drawn, message) -> None:
    """A client that there is not trained nobody, and a list of clients gave each its number as its share."""
    own = type("Mine", (Participation,), {"draw": lambda self, clients, round_idx, seed: drawn})()
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        check_draw(own, own.draw((0, 1, 2), 0, 0), (0, 1, 2))
