"""Draws of clients by weights and by availability: their chances, by hand and by Monte Carlo, and what is refused."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from fl_lightning.kernels.randomness import generator
from fl_lightning.round import client_draws
from fl_lightning.round.availability import trace_of
from fl_lightning.round.client_draws import WeightedDraw, chances
from fl_lightning.round.participation import Participation
from fl_lightning.run.failures import TooFewUpdates
from fl_lightning.strategies import FedAvg

NAMES = tuple("abcdef")
EVERYONE = range(6)
WEIGHTS = (1.0, 2.0, 3.0, 4.0, 5.0, 0.0)
DRAWS = 2000


def prepared(names=NAMES, clients=None, num_examples: Any = None, **settings: Any) -> Participation:
    participation = Participation(**settings)
    participation.prepare(names, range(len(names)) if clients is None else clients, num_examples)
    return participation


def drawn(participation: Participation, round_idx: int, clients=EVERYONE, seed: int = 0) -> list[int]:
    return list(participation.draw(clients, round_idx, seed)[0])


def test_chances_by_hand() -> None:
    weights = torch.tensor([1.0, 1.0, 2.0, 8.0, 0.0], dtype=torch.float64)
    assert chances(weights, 1).tolist() == pytest.approx([1 / 12, 1 / 12, 1 / 6, 2 / 3, 0])
    assert chances(weights, 2).tolist() == pytest.approx([0.25, 0.25, 0.5, 1, 0])
    assert chances(weights, 3).tolist() == pytest.approx([0.5, 0.5, 1, 1, 0])
    assert chances(weights, 4).tolist() == chances(weights, 5).tolist() == [1, 1, 1, 1, 0]


@pytest.mark.parametrize("many", [False, True], ids=["systematic", "rejective"])
@pytest.mark.parametrize("wanted", [1, 2, 3])
def test_clients_are_drawn_as_often_as_their_weights_say(wanted, many, monkeypatch) -> None:
    """Within 4.5 standard errors, and never twice in a draw."""
    weights = torch.tensor([*WEIGHTS, *[1.5] * 24], dtype=torch.float64)
    if many:
        monkeypatch.setattr(client_draws, "MANY_CLIENTS", 10)
    draw = WeightedDraw(weights, wanted)
    found = [draw(generator(1, "draw", number)) for number in range(DRAWS)]
    assert all(len(set(each)) == wanted for each in found)
    times = torch.bincount(torch.tensor(found).flatten(), minlength=len(weights)) / DRAWS
    expected = wanted * weights / weights.sum()
    error = (expected * (1 - expected) / DRAWS).sqrt()
    assert bool(((times - expected).abs() <= 4.5 * error).all())
    assert times[5] == 0


def test_the_plain_mean_over_clients_drawn_by_examples_is_unbiased() -> None:
    """It is the mean that FedAvg over all clients has; of clients drawn with equal chances it is not."""
    counts, models = [10, 20, 30, 40, 50, 30], torch.tensor([9.0, -3.0, 4.0, 1.0, -6.0, 2.0], dtype=torch.float64)
    whole = float((models * torch.tensor(counts)).sum() / sum(counts))
    by_examples = prepared(num_clients=2, sampling_weights="examples", num_examples=counts.__getitem__)
    for participation, is_unbiased in ((by_examples, True), (prepared(num_clients=2), False)):
        means = torch.stack([models[drawn(participation, round_idx)].mean() for round_idx in range(DRAWS)])
        off = abs(float(means.mean()) - whole) / float(means.std() / DRAWS**0.5)
        assert (off < 4) is is_unbiased


def test_weights_by_name_are_those_by_order_and_held_out_clients_have_none() -> None:
    named = dict(zip(reversed(NAMES), reversed(WEIGHTS), strict=True))
    by_order, by_name = (prepared(num_clients=2, sampling_weights=each) for each in (list(WEIGHTS), named))
    assert [drawn(by_order, r) for r in range(20)] == [drawn(by_name, r) for r in range(20)]
    some = (0, 2, 4)
    few = prepared(clients=some, num_clients=1, sampling_weights=[0, 9, 0, 9, 1, 9])
    assert {client for r in range(20) for client in drawn(few, r, clients=some)} == {4}


def trace_file(folder: Path, *rows: str) -> str:
    path = folder / "trace.csv"
    path.write_text("\n".join(["client,first,last", *rows]) + "\n")
    return str(path)


def test_only_reachable_clients_are_drawn(tmp_path) -> None:
    """b in rounds 0 and 3, a in 1 to 3, d in 2; after round 3 it begins again."""
    path = trace_file(tmp_path, "b,3,3", "a,1,3", "b,0,0", "d,2,2")
    table = [[0, 1, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0], [1, 0, 0, 1, 0, 0], [1, 1, 0, 0, 0, 0]]
    for given in (path, table, torch.tensor(table), torch.tensor(table).bool()):
        everyone = prepared(availability=given)
        assert [drawn(everyone, r) for r in range(8)] == [[1], [0], [0, 3], [0, 1]] * 2
        assert [everyone.num_reachable(6, r) for r in range(4)] == [1, 1, 2, 2]
        one = prepared(availability=given, num_clients=1, sampling_weights=[1, 0, 1, 1, 1, 1])
        assert [drawn(one, r) for r in (0, 1, 3)] == [[], [0], [0]]
        few = prepared(clients=(1, 3), availability=given)
        assert [drawn(few, r, clients=(1, 3)) for r in range(4)] == [[1], [], [3], [1]]


def test_draws_depend_on_seed_and_round_alone() -> None:
    table = (torch.rand(7, 6, generator=torch.Generator().manual_seed(0)) < 0.7).int()
    one, other = (prepared(availability=table, num_clients=2, sampling_weights=list(WEIGHTS)) for _ in range(2))
    backwards = [drawn(other, round_idx, seed=5) for round_idx in reversed(range(20))]
    assert [drawn(one, round_idx, seed=5) for round_idx in range(20)] == backwards[::-1]
    assert [drawn(one, round_idx, seed=6) for round_idx in range(20)] != backwards[::-1]


def test_a_million_clients_are_drawn_without_a_permutation(monkeypatch) -> None:
    count = 10**6
    names = [str(number) for number in range(count)]
    participation = prepared(names, num_clients=100, sampling_weights=[1.0] * (count // 2) + [3.0] * (count // 2))
    monkeypatch.setattr(torch, "randperm", None)
    halves = [sum(client >= count // 2 for client in drawn(participation, r, range(count))) for r in range(20)]
    assert sum(halves) / 2000 == pytest.approx(0.75, abs=0.04)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["z,0,1"], "trace.csv, line 2 has the client 'z', but the 6 clients are a, b, c, ..."),
        (["a,0,1", "b,-1,1"], "line 3 has first '-1': give the number of a round, from 0"),
        (["a,0,x"], "line 2 has last 'x': give the number of a round, from 0"),
        (["a,4,3"], "line 2 is from round 4 to 3: let last be at least first"),
        (["a,4"], "line 2 has 2 values: give client,first,last"),
        (["b,0,1", "a,0,4", "b,1,2"], "has client 'b' twice in round 1: let its rows not overlap"),
        ([], "participation.availability has no client that is ever reachable"),
    ],
)
def test_files_that_are_no_traces(rows, message, tmp_path) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        trace_of(trace_file(tmp_path, *rows), NAMES)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([[1, 0]], "has the shape (1, 2): give a row for each round and a column for each of the 6 clients"),
        ([[1, 0, 0, 2, 0, 0]], "has 2 for round 0 and client 3: give 1 where a client is reachable, else 0"),
        ([[0] * 6], "has no client that is ever reachable"),
        ([["a"]], "is [['a']], which is neither a path nor a table"),
        ("nowhere.csv", "is 'nowhere.csv', which cannot be read: "),
    ],
)
def test_tables_that_are_no_traces(given, message) -> None:
    with pytest.raises(ValueError, match=re.escape(f"participation.availability {message}")):
        trace_of(given, NAMES)


def test_a_file_with_other_columns(tmp_path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("name,from,to\na,0,1\n")
    with pytest.raises(ValueError, match="begins with 'name,from,to': its columns must be client,first,last"):
        trace_of(str(path), NAMES)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("size", "participation.sampling_weights is 'size': give examples, or a number for each client"),
        ([1.0], "participation.sampling_weights has 1 numbers for 6 clients: give one for each"),
        ({"a": 1.0, "z": 2.0}, "participation.sampling_weights has 'z', which is no client: leave it out"),
        ({"a": 1.0}, "participation.sampling_weights has none for client 'b': give one for each"),
        ([1, 1, -1, 1, 1, 1], "participation.sampling_weights of client 'c' is -1: give a finite number"),
        ([1, 1, float("nan"), 1, 1, 1], "participation.sampling_weights of client 'c' is nan"),
        ([1, 0, 0, 0, 0, 0], "has 1 positive numbers, but a round has 2 clients: give more of them, or lower"),
    ],
    ids=str,
)
def test_weights_that_do_not_fit(weights, message) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        prepared(num_clients=2, sampling_weights=weights)


def test_a_weight_of_more_than_a_client_can_have_is_told() -> None:
    with pytest.warns(UserWarning, match=r"client 'f' has 50% of the weights, .* at most 2 clients in a round"):
        participation = prepared(num_clients=3, sampling_weights=[1, 1, 1, 1, 1, 5])
    assert all(5 in drawn(participation, round_idx) for round_idx in range(20))


def test_a_resume_draws_the_same_clients_and_refuses_another_trace(
    tmp_path, federation, make_model, make_trainer, assert_same
) -> None:
    """Round 1 has two clients, of whom one is drawn; nobody is reachable in round 2, which fails."""
    names, checkpoint = [client.name for client in federation.clients], tmp_path / "one.ckpt"
    rows = [f"{name},0,{1 if number < 2 else 0}" for number, name in enumerate(names)] + [f"{names[4]},3,3"]
    path = trace_file(tmp_path, *rows)

    def trainer(num_rounds: int) -> Any:
        part = Participation(num_clients=1, availability=path, sampling_weights="examples")
        return make_trainer(num_rounds=num_rounds, participation=part, precision="64-true")

    def strategy() -> FedAvg:
        return FedAvg(num_epochs=1, weighting="equal")

    whole, first = trainer(4), trainer(2)
    expected = whole.fit(make_model(), federation, strategy())
    assert [row["num_participants"] for row in whole.run.history] == [1, 1, 0, 1]
    assert [row["failed_round"] for row in whole.run.history] == [0, 0, 1, 0]
    first.fit(make_model(), federation, strategy())
    first.save_checkpoint(checkpoint)
    resumed = trainer(4)
    assert_same(resumed.fit(make_model(), federation, strategy(), ckpt_path=str(checkpoint)), expected)
    assert_same(resumed.state_dict()["clients"], whole.state_dict()["clients"])
    trace_file(tmp_path, *rows[1:])
    with pytest.raises(ValueError, match="availability: "):
        trainer(4).fit(make_model(), federation, strategy(), ckpt_path=str(checkpoint))


def test_a_run_without_reachable_clients_says_so(federation, make_model, make_trainer) -> None:
    part = Participation(availability=torch.tensor([[1] * 5, [0] * 5]), max_failed_rounds=1)
    with pytest.raises(TooFewUpdates, match=r"participation\.availability has 0 clients in the last round"):
        make_trainer(participation=part).fit(make_model(), federation, FedAvg(num_epochs=1))


def test_examples_are_not_counted_twice_without_a_word(federation, make_model, make_trainer) -> None:
    part = Participation(num_clients=1, sampling_weights="examples")
    with pytest.warns(UserWarning, match="strategy.weighting counts the examples once more: set strategy.weighting to"):
        make_trainer(num_rounds=1, participation=part).fit(make_model(), federation, FedAvg(num_epochs=1))
