import math
from typing import Literal

import pytest
import torch

from fl_lightning import Payload
from fl_lightning.round.selection import Selection


def scores(val: list[float], test: list[float], clients: tuple[int, ...] = (0, 1)) -> Payload:
    """Shares of ten examples each."""

    def totals(values: list[float]) -> torch.Tensor:
        return torch.tensor([[10 * value, 10] for value in values])

    return Payload(clients=clients, extras={"val/acc": totals(val), "test/acc": totals(test)})


def metrics(val: float, test: float, **others: float) -> dict[str, float]:
    return {"val/acc": val, "test/acc": test} | {name.replace("_", "/"): value for name, value in others.items()}


def test_every_model_and_every_client_has_the_round_of_its_own_validation() -> None:
    selection = Selection()
    selection.update(0, metrics(0.5, 0.9, gen_val_acc=0.7, gen_test_acc=0.3), scores([0.9, 0.1], [0.8, 1.0]))
    selection.update(1, metrics(0.6, 0.4, gen_val_acc=0.2, gen_test_acc=0.8), scores([0.6, 0.6], [0.2, 0.6]))
    assert selection.best_round == 1
    assert selection.result["test/acc"] == 0.4  # not the 0.9 of round 0, which only test would have chosen
    assert selection.result["test/max_over_rounds"] == 0.9
    assert selection.result["gen/test/acc"] == 0.8
    assert selection.result["gen/test/acc_at_own_best_round"] == 0.3
    assert selection.result["test/acc_per_client_selection"] == pytest.approx((0.8 + 0.6) / 2)


def test_of_rounds_alike_the_first_is_reported() -> None:
    selection = Selection()
    for round_idx, test in enumerate((0.1, 0.2)):
        selection.update(
            round_idx, metrics(0.5, test, gen_val_acc=0.5, gen_test_acc=test), scores([0.5] * 2, [test] * 2)
        )
    assert selection.best_round == 0
    assert selection.result["test/acc"] == 0.1
    assert selection.result["gen/test/acc_at_own_best_round"] == 0.1
    assert selection.result["test/acc_per_client_selection"] == pytest.approx(0.1)


@pytest.mark.parametrize(("monitor", "mode"), [("val/loss", None), ("val/mse", None), ("val/roughness", "min")])
def test_less_of_an_error_is_better(monitor: str, mode: Literal["min"] | None) -> None:
    selection = Selection(monitor, mode)
    test = monitor.replace("val/", "test/")
    for round_idx, (of_val, of_test) in enumerate([(3.0, 1.0), (1.0, 2.0), (2.0, 0.5)]):
        extras = {name: torch.tensor([[10 * v, 10]] * 2) for name, v in ((monitor, of_val), (test, of_test))}
        selection.update(round_idx, {monitor: of_val, test: of_test}, Payload(clients=(0, 1), extras=extras))
    assert selection.best_round == 1
    assert selection.result[test] == 2.0
    assert selection.result["test/min_over_rounds"] == 0.5
    assert selection.result[f"{test}_per_client_selection"] == 2.0


def test_without_test_examples_validation_still_chooses() -> None:
    selection = Selection()
    selection.update(0, {"val/acc": 0.5}, Payload(clients=(0,), extras={"val/acc": torch.tensor([[5.0, 10.0]])}))
    assert selection.result == {"val/acc": 0.5, "best_round": 0}
    with pytest.raises(ValueError, match=r"trainer\.monitor is 'val/acc', which is not among test/acc"):
        Selection().update(0, {"test/acc": 0.5}, scores([0.5] * 2, [0.5] * 2))


def test_a_later_round_without_the_metric_is_not_chosen() -> None:
    selection = Selection("benign/val/acc")
    selection.update(0, {"benign/val/acc": 0.5}, Payload(clients=()))
    selection.update(1, {"val/acc": 0.9}, Payload(clients=()))
    assert (selection.best_round, selection.best_value) == (0, 0.5)
    with pytest.raises(ValueError, match=r"'benign/val/acc', which is not among val/acc"):
        Selection("benign/val/acc").update(0, {"val/acc": 0.9}, Payload(clients=()))


def test_a_client_that_is_missing_from_an_evaluation_keeps_its_round_and_shifts_nobody(tmp_path) -> None:
    selection = Selection()
    selection.update(0, metrics(0.5, 0.5), scores([0.9, 0.5], [0.8, 0.5], (3, 7)))
    selection.update(1, metrics(0.5, 0.5), scores([0.7], [0.1], (7,)))
    torch.save(selection.state_dict(), tmp_path / "selection.pt")
    resumed = Selection()
    resumed.load_state_dict(torch.load(tmp_path / "selection.pt", weights_only=True))
    resumed.update(2, metrics(0.5, 0.5), scores([0.3, 0.6, 1.0], [0.2, 0.2, 0.9], (1, 3, 7)))

    chosen = {client: test for client, (_, test) in resumed.best_of_clients.items()}
    assert chosen == pytest.approx({1: 0.2, 3: 0.8, 7: 0.9})
    assert resumed.result["test/acc_per_client_selection"] == pytest.approx((0.2 + 0.8 + 0.9) / 3)


@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e12])
def test_what_is_a_tie_does_not_depend_on_the_scale(scale: float) -> None:
    selection = Selection("val/mse")
    for round_idx, value in enumerate((math.inf, 3.0, 2.0, 2.0 * (1 - 1e-12), 2.5)):
        selection.update(round_idx, {"val/mse": scale * value}, Payload(clients=()))
    assert selection.best_round == 2


def test_a_state_of_another_metric_is_chosen_from_anew() -> None:
    def row(round_idx: int, acc: float, loss: float) -> dict[str, float]:
        return {"round": round_idx, "val/acc": acc, "test/acc": acc, "val/loss": loss, "test/loss": 2 * loss, "n": 5}

    history = [row(0, 0.9, 3.0), {"round": 1, "n": 5}, row(2, 0.5, 1.0), row(3, 0.6, 2.0)]
    before = Selection("val/acc")
    for each in history[:1] + history[2:]:
        values = {name: value for name, value in each.items() if "/" in name}
        before.update(int(each["round"]), values, scores([each["val/acc"]] * 2, [0.3, 0.4]))
    assert (before.best_round, before.best_value) == (0, 0.9)
    for monitor, mode, best in (("val/loss", None, 2), ("val/acc", "min", 2), ("val/acc", None, 0)):
        after = Selection(monitor, mode)
        after.load_state_dict(before.state_dict(), history)
        assert (after.best_round, after.best_value) == (best, history[best][monitor])
        assert after.result["test/loss"] == history[best]["test/loss"]
        assert "n" not in after.result
        assert bool(after.best_of_clients) == (best == 0)
    older = {name: value for name, value in before.state_dict().items() if name not in ("monitor", "mode")}
    after = Selection("val/loss")
    after.load_state_dict(older, history)
    assert after.best_round == 0
