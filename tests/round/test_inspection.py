"""What is kept of an upload, and what of the server's models is not sent."""

import pytest
import torch

from fl_lightning import Payload, Stage
from fl_lightning.round.inspection import ServerDiverged, check_models, inspect_upload
from fl_lightning.round.stage import Rows

STAGE = Stage(name="train", num_epochs=1, upload=("a", "b"))
NETS = [{"a": torch.zeros(3), "b": torch.zeros(2, 2)}]
TOO_LARGE = "it sent numbers too large to mix in float32 (of length"


def upload(value: float, dtype: torch.dtype = torch.float32) -> Payload:
    """Ones of three clients; the one in the middle has the given value somewhere."""
    a, b = torch.ones(3, 3, dtype=dtype), torch.ones(3, 2, 2, dtype=dtype)
    b[1, 0, 1] = value
    return Payload(clients=(2, 5, 7), parameters={"a": a, "b": b})


@pytest.mark.parametrize(
    ("value", "dtype", "why"),
    [
        (1e15, torch.float32, None),
        (1e17, torch.float32, TOO_LARGE),
        (-3e38, torch.float32, TOO_LARGE),  # whose square is infinite
        (1e30, torch.bfloat16, TOO_LARGE),
        (1e200, torch.float64, TOO_LARGE),
        (torch.inf, torch.float32, "it sent numbers that are not finite"),
        (torch.nan, torch.float64, "it sent numbers that are not finite"),
    ],
)
def test_what_could_not_be_summed_or_squared_is_left_out(value: float, dtype: torch.dtype, why: str | None) -> None:
    kept, refused, _ = inspect_upload(upload(value, dtype), STAGE, NETS)
    assert kept.clients == ((2, 7) if why else (2, 5, 7))
    assert refused.keys() == ({5} if why else set())
    assert refused.get(5, "").startswith(why or "")


def test_outputs_are_looked_at_also_where_they_are_counts() -> None:
    stage = Stage(
        name="train", num_epochs=1, client_outputs={"count": lambda *_: torch.zeros(2), "x": lambda *_: torch.zeros(1)}
    )
    sent = Payload(clients=(0, 1), extras={"count": torch.ones(2, 2, dtype=torch.long), "x": torch.tensor([1.0, 1e30])})
    kept, refused, _ = inspect_upload(sent, stage, NETS)
    assert kept.clients == (0,)
    assert "too large" in refused[1]


@pytest.mark.parametrize("as_update", [True, False])
def test_an_update_longer_than_the_bound_is_left_out_and_named(as_update: bool) -> None:
    stage = Stage(name="train", num_epochs=1, upload=("a", "b"), as_update=as_update)
    start = Payload(clients=(2, 5, 7), parameters={"a": torch.full((3, 3), 10.0), "b": torch.full((3, 2, 2), 10.0)})
    moved = upload(4.0)
    update = (
        moved
        if as_update
        else Payload(
            clients=moved.clients, parameters={n: t + start.parameters[n] for n, t in moved.parameters.items()}
        )
    )
    kept, refused, _ = inspect_upload(update, stage, NETS, sent=start, max_update_norm=4.0)
    assert kept.clients == (2, 7)  # sqrt(7) and sqrt(22)
    assert refused == {5: "its update is 4.69 long, participation.max_update_norm is 4"}
    assert inspect_upload(update, stage, NETS, sent=start, max_update_norm=4.7)[1] == {}


@pytest.mark.parametrize(("value", "is_unusual"), [(1e5, True), (1e3, False)])
def test_an_update_a_thousand_times_as_long_as_the_median_is_reported(value: float, is_unusual: bool) -> None:
    start = Payload(clients=(2, 5, 7), parameters={"a": torch.zeros(3, 3), "b": torch.zeros(3, 2, 2)})
    kept, refused, unusual = inspect_upload(upload(value), STAGE, NETS, sent=start)
    assert kept.clients == (2, 5, 7)
    assert not refused
    said = "its update is 1e+05 long, the median of this exchange is 2.65"
    assert unusual == ({5: said} if is_unusual else {})


@pytest.mark.parametrize("beside", ["parameters", "nothing"])
def test_a_client_output_a_thousand_times_as_long_as_the_median_is_reported(beside: str) -> None:
    """The controls of SCAFFOLD travel beside parameters, and one client's decided their average unseen."""
    outputs = {"controls/a": torch.tensor([[3.0], [3e4], [3.0]]), "controls/b": torch.full((3, 1), 4.0)}
    parameters = upload(1.0).parameters if beside == "parameters" else {}
    sent = Payload(clients=(2, 5, 7), parameters=parameters, extras=outputs)
    stage = Stage(
        name="train",
        num_epochs=1,
        upload=STAGE.upload if parameters else (),
        client_outputs={"controls": lambda *_: torch.zeros(1)},
    )
    kept, refused, unusual = inspect_upload(sent, stage, NETS)
    assert (kept.clients, refused) == ((2, 5, 7), {})
    assert unusual == {5: "its controls is 3e+04 long, the median of this exchange is 5"}


def test_updates_are_compared_and_not_the_models_that_they_change() -> None:
    start = Payload(clients=(2, 5, 7), parameters={"a": torch.full((3, 3), 50.0), "b": torch.full((3, 2, 2), 50.0)})
    a, b = (tensor + 1e-3 for tensor in start.parameters.values())
    b[1, 0, 1] = 2e3  # 15 times as long as the models, 10^6 times as long as the updates
    upload = Payload(clients=(2, 5, 7), parameters={"a": a, "b": b})
    assert list(inspect_upload(upload, STAGE, NETS, sent=start)[2]) == [5]


def test_without_a_start_the_answer_itself_is_bounded() -> None:
    kept, refused, _ = inspect_upload(upload(4.0), STAGE, NETS, max_update_norm=4.0)
    assert (kept.clients, list(refused)) == ((2, 7), [5])


@pytest.mark.parametrize(("value", "is_long"), [(2e4, True), (1e3, False)])
def test_a_bound_on_updates_leaves_out_client_outputs_far_longer_than_the_median(value: float, is_long: bool) -> None:
    """What goes into averages beside parameters, such as the controls of SCAFFOLD, was not bounded by anything."""
    none = lambda *_: torch.zeros(1)  # noqa: E731
    rows = {"class/means": Rows(of="class", counted_by="class/counts")}
    stage = Stage(name="train", num_epochs=1, client_outputs={"gradients": none, "class": none}, rows=rows)
    outputs = {
        "gradients/a": torch.tensor([[3.0], [0.0], [3.0]]),
        "gradients/b": torch.tensor([[4.0], [value], [4.0]]),  # of norm 5 together
        "class/means": torch.ones(3, 2),
        "class/counts": torch.tensor([[1.0, 1.0], [1.0, 1.0], [1e6, 1.0]]),  # a client may have many examples
    }
    sent = Payload(clients=(2, 5, 7), extras=outputs)
    assert not inspect_upload(sent, stage, NETS)[1]
    kept, refused, _ = inspect_upload(sent, stage, NETS, max_update_norm=1.0)
    assert kept.clients == ((2, 7) if is_long else (2, 5, 7))
    why = "its gradients is 2e+04 long, the median of this exchange is 5, and participation.max_update_norm leaves out"
    assert [each.startswith(why) for each in refused.values()] == [True] * is_long


def test_models_that_are_not_finite_are_named() -> None:
    names = [f"client-{client:02d}" for client in range(8)]
    check_models(upload(3e38), names)  # finite, though its sum is not
    check_models(None, names)
    with pytest.raises(ServerDiverged, match=r"models of client-05 are not finite: lower the learning rates"):
        check_models(upload(torch.nan), names)
    common = Payload(clients=tuple(range(5)), parameters={"a": torch.tensor([torch.inf]).expand(5, 1)})
    with pytest.raises(ServerDiverged, match=r"client-00, client-01, client-02, \.\.\. are not finite"):
        check_models(common, names)
