import math

import pytest
import torch

from fl_lightning.round.metrics import OverClients, client_values, over_clients, summarize
from fl_lightning.round.payload import Payload
from fl_lightning.round.selection import Selection

#: Correct and all test nodes of four clients, the third has none: 1/2, 3/4, -, 9/10.
TOTALS = torch.tensor([[1.0, 2.0], [3.0, 4.0], [0.0, 0.0], [9.0, 10.0]])
VALUES = torch.tensor([0.5, 0.75, 0.9], dtype=torch.float64)


def test_metrics_over_clients_by_hand() -> None:
    metric = OverClients()
    metric.update(TOTALS)
    actual = metric.compute()

    assert actual["mean"] == pytest.approx(2.15 / 3)
    assert actual["std"] == pytest.approx(math.sqrt(((VALUES - 2.15 / 3) ** 2).mean()))
    assert actual["worst"] == 0.5
    assert actual["weighted"] == pytest.approx(13 / 16)


def test_the_worst_of_a_loss_is_the_largest() -> None:
    metric = OverClients(higher_is_better=False)
    metric.update(TOTALS)
    assert metric.compute()["worst"] == pytest.approx(0.9)


def test_updates_accumulate_and_reset_forgets() -> None:
    metric = OverClients()
    metric.update(TOTALS[:2])
    metric.update(TOTALS[2:])
    together = metric.compute()["mean"]
    metric.reset()
    metric.update(TOTALS[:1])

    assert together == pytest.approx(2.15 / 3)
    assert metric.compute()["mean"] == 0.5


def test_no_client_with_examples_gives_nan() -> None:
    metric = OverClients()
    metric.update(torch.zeros(3, 2))
    assert all(value.isnan() for value in metric.compute().values())


def test_metrics_without_clients_and_of_numbers_that_are_not_finite() -> None:
    assert all(value.isnan() for value in over_clients(torch.zeros(0, 2)).values())
    totals = torch.tensor([[math.nan, 2.0], [3.0, 4.0], [math.inf, 0.0]])  # the last has no examples
    assert all(value.isnan() for value in over_clients(totals).values())
    totals[0, 0] = math.inf
    actual = over_clients(totals, higher_is_better=False)
    assert [float(actual[kind]) for kind in ("mean", "worst", "weighted")] == [math.inf] * 3
    assert summarize(Payload(clients=())) == {}


def test_metrics_of_a_summary_do_not_mix() -> None:
    extras = {"val/loss": TOTALS, "test/acc": TOTALS.flip(0) * torch.tensor([0.5, 1.0]), "test/mse": TOTALS[[0] * 4]}
    metrics = summarize(Payload(clients=(0, 1, 2, 3), extras=extras))
    for name, totals in extras.items():
        alone = over_clients(totals, higher_is_better=name == "test/acc")
        for kind, value in alone.items():
            assert metrics[name if kind == "mean" else f"{name}_{kind}"] == pytest.approx(float(value))


def test_summary_names() -> None:
    scores = Payload(clients=(0, 1, 2, 3), extras={"test/acc": TOTALS, "test/loss": TOTALS})

    metrics = summarize(scores, "gen/")

    assert set(metrics) == {
        f"gen/test/{name}{kind}" for name in ("acc", "loss") for kind in ("", "_std", "_worst", "_weighted")
    }
    assert metrics["gen/test/acc"] == pytest.approx(2.15 / 3)
    assert (metrics["gen/test/acc_worst"], metrics["gen/test/loss_worst"]) == (0.5, pytest.approx(0.9))


def test_values_of_single_clients() -> None:
    scores = Payload(clients=(0, 2, 5, 6), extras={"val/acc": TOTALS})

    assert client_values(scores, "val/acc", [6, 0]).tolist() == pytest.approx([0.9, 0.5])
    assert client_values(scores, "val/acc").isnan().tolist() == [False, False, True, False]


def scores(val: list[float], test: list[float]) -> Payload:
    rows = {"val/acc": val, "test/acc": test}
    return Payload(
        clients=tuple(range(len(val))),
        extras={name: torch.tensor([[value * 8, 8] for value in values]) for name, values in rows.items()},
    )


def follow(selection: Selection, rounds: list[tuple[list[float], list[float]]], start: int = 0) -> None:
    for round_idx, (val, test) in enumerate(rounds, start):
        payload = scores(val, test)
        selection.update(round_idx, summarize(payload), payload)


ROUNDS = [
    ([0.25, 0.5], [1.0, 0.5]),
    ([0.5, 0.5], [0.5, 0.25]),  # best mean on validation; the test accuracy was better before
    ([0.125, 0.75], [0.0, 0.75]),
    ([0.5, 0.5], [1.0, 1.0]),  # a tie does not replace the first
]


def test_the_round_is_chosen_on_validation_never_on_test() -> None:
    selection = Selection()
    follow(selection, ROUNDS)

    assert selection.result["best_round"] == selection.best_round == 1
    assert selection.result["test/acc"] == pytest.approx(0.375)
    assert selection.result["val/acc"] == pytest.approx(0.5)
    assert selection.result["test/max_over_rounds"] == pytest.approx(1.0)
    # Each client on its own validation: client 0 chooses round 1 (0.5), client 1 round 2 (0.75).
    assert selection.result["test/acc_per_client_selection"] == pytest.approx((0.5 + 0.75) / 2)


def test_the_smallest_loss_wins() -> None:
    selection = Selection("val/acc", "min")
    follow(selection, ROUNDS)
    assert selection.best_round == 0


def test_selection_continues_from_its_state() -> None:
    whole, first, second = Selection(), Selection(), Selection()
    follow(whole, ROUNDS)
    follow(first, ROUNDS[:2])
    second.load_state_dict(first.state_dict())
    follow(second, ROUNDS[2:], start=2)

    assert second.state_dict() == whole.state_dict()


def test_a_first_round_that_is_not_a_number_does_not_stay() -> None:
    selection = Selection()
    nothing = scores([0.0, 0.0], [0.5, 0.5])
    nothing.extras["val/acc"].zero_()
    selection.update(0, summarize(nothing), nothing)
    follow(selection, ROUNDS[:1], start=1)
    selection.update(2, summarize(nothing), nothing)

    assert selection.best_round == 1
    assert selection.result["val/acc"] == pytest.approx(0.375)


def test_unknown_monitor_names_what_there_is() -> None:
    with pytest.raises(ValueError, match=r"trainer\.monitor is 'val/f1', which is not among test/acc, .*val/acc"):
        follow(Selection("val/f1"), ROUNDS[:1])
