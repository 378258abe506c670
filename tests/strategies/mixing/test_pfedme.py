"""pFedMe: its numbers on the three quadratics, its identities, and who is evaluated with which model."""

import functools

import pytest
from both_executors import both_executors
from quadratics import CURVATURES, MINIMA, fit_quadratics, parameters
from torch.optim import SGD, Adam

from fl_lightning import Participation, Payload, SequentialExecutor
from fl_lightning.callbacks import CommunicationLedger
from fl_lightning.executors import StageRequest
from fl_lightning.strategies import FedAvg, Local, PFedMe

both_initializations = pytest.mark.parametrize("inner_start", ["previous", "anchor"])
SETTINGS = {"num_epochs": 2, "num_inner_steps": 3, "proximal_weight": 2.0, "anchor_share": 0.5, "relaxation": 1.5}
RATE = 0.2


def local_round(client: int, w: float, inner_start: str = "previous") -> tuple[float, float]:
    """x_i and w_i of a client, by hand."""
    x = anchor = w
    for _ in range(SETTINGS["num_epochs"]):
        if inner_start == "anchor":
            x = anchor
        for _ in range(SETTINGS["num_inner_steps"]):
            pull = SETTINGS["proximal_weight"] * (x - anchor)
            x -= RATE * (CURVATURES[client] * (x - MINIMA[client]) + pull)
        anchor += SETTINGS["anchor_share"] * (x - anchor)
    return x, anchor


def loss(client: int, x: float) -> float:
    return 0.5 * CURVATURES[client] * (x - MINIMA[client]) ** 2


def losses(trainer, prefix: str) -> list[float]:
    """Of every client, as evaluated last."""
    scores = trainer.run.scores[prefix].extras["val/loss"]
    return (scores[:, 0] / scores[:, 1]).tolist()


@both_executors
@pytest.mark.parametrize(
    ("inner_start", "num_rounds", "w", "w_i", "x_i"),
    [
        ("previous", 1, 0.28863725, (0.435488, -0.345625, 0.877968), (0.622976, -0.51625, 1.287936)),
        (
            "previous",
            2,
            0.4662041802,
            (0.5984271913, -0.1068678748, 1.0821338270),
            (0.7317991705, -0.3021172402, 1.4526578149),
        ),
        ("anchor", 1, 0.289104375, (0.434496, -0.3346875, 0.862992), (0.620992, -0.494375, 1.257984)),
        (
            "anchor",
            2,
            0.4689377582,
            (0.5979856805, -0.0939629353, 1.0689314541),
            (0.7305648710, -0.2767336127, 1.4258588156),
        ),
    ],
)
def test_numbers(inner_start, num_rounds, w, w_i, x_i, executor, tmp_path) -> None:
    strategy = PFedMe(inner_start=inner_start, **SETTINGS)
    trainer = fit_quadratics(
        strategy, executor(), num_rounds=num_rounds, learning_rate=RATE, default_root_dir=str(tmp_path)
    )
    assert float(strategy.models["x"]) == pytest.approx(w, rel=1e-9)
    assert strategy.anchors["x"].flatten().tolist() == pytest.approx(w_i, rel=1e-9)
    assert parameters(trainer) == pytest.approx(x_i, rel=1e-9)
    for prefix, points in (("", x_i), ("anchored/", w_i), ("global/", [w] * 3)):
        assert losses(trainer, prefix) == pytest.approx([loss(c, x) for c, x in enumerate(points)], rel=1e-6)


@both_executors
def test_the_inner_steps_go_to_the_proximal_point(executor, tmp_path) -> None:
    """x = x̂ + (1 - η_p (a + λ))^K (w - x̂) with x̂ = (a b + λ w) / (a + λ)."""
    strategy = PFedMe(num_epochs=1, num_inner_steps=4, proximal_weight=3.0)
    trainer = fit_quadratics(strategy, executor(), num_rounds=1, learning_rate=0.1, default_root_dir=str(tmp_path))
    expected = []
    for a, b in zip(CURVATURES, MINIMA, strict=True):
        proximal = a * b / (a + 3)
        expected.append(proximal * (1 - (1 - 0.1 * (a + 3)) ** 4))
    assert parameters(trainer) == pytest.approx(expected, rel=1e-9)


@both_executors
@both_initializations
def test_a_server_that_stays(inner_start, executor, tmp_path) -> None:
    fixed = {**SETTINGS, "relaxation": 0.0}
    strategy = PFedMe(inner_start=inner_start, **fixed)
    fit_quadratics(strategy, executor(), num_rounds=3, learning_rate=RATE, default_root_dir=str(tmp_path))
    assert float(strategy.models["x"]) == 0


@both_executors
@pytest.mark.parametrize("num_rounds", [1, 3])
def test_without_a_pull_clients_train_alone(num_rounds, executor, tmp_path) -> None:
    """Every round R K steps from the common start."""
    alone = PFedMe(num_epochs=2, num_inner_steps=3, proximal_weight=0.0, anchor_share=0.0)
    trainer = fit_quadratics(alone, executor(), num_rounds=num_rounds, default_root_dir=str(tmp_path))
    local = fit_quadratics(Local(num_epochs=6), executor(), num_rounds=1, default_root_dir=str(tmp_path))
    assert float(alone.models["x"]) == 0
    assert parameters(trainer) == parameters(local)


@both_executors
def test_with_one_inner_step_it_is_fedavg(executor, federation, make_model, make_trainer, assert_same) -> None:
    busy = Participation(num_clients=3, dropout_probability=0.2, straggler_probability=0.5)
    single = PFedMe(num_epochs=4, num_inner_steps=1, inner_start="anchor", anchor_share=0.4, proximal_weight=3.0)
    plain = FedAvg(num_epochs=4)
    for strategy, rate in ((single, 0.5), (plain, 0.2)):
        model = make_model(optimizer=functools.partial(SGD, lr=rate), dropout=0.5)
        make_trainer(executor=executor(), precision="64-true", participation=busy).fit(model, federation, strategy)
    assert_same(single.models, plain.models, tolerance=1e-9)


@both_executors
@both_initializations
def test_who_is_away_keeps_its_model_and_who_never_came_has_a_round_of_the_present_one(
    inner_start, executor, tmp_path
) -> None:
    w, known = 0.0, {}
    settings = {"participation": Participation(num_clients=1), "seed": 3, "default_root_dir": str(tmp_path)}
    for num_rounds in (1, 2, 3):
        strategy = PFedMe(inner_start=inner_start, **SETTINGS)
        trainer = fit_quadratics(strategy, executor(), num_rounds=num_rounds, learning_rate=RATE, **settings)
        (chosen,) = Participation(num_clients=1).draw((0, 1, 2), num_rounds - 1, 3)[0]
        known[chosen] = local_round(chosen, w, inner_start)
        w += SETTINGS["relaxation"] * (known[chosen][1] - w)
        assert float(strategy.models["x"]) == pytest.approx(w, rel=1e-9)
        now = [known.get(client, local_round(client, w, inner_start))[0] for client in range(3)]
        assert losses(trainer, "") == pytest.approx([loss(c, x) for c, x in enumerate(now)], rel=1e-6)
        anchored = [known[client][1] if client in known else w for client in range(3)]
        assert losses(trainer, "anchored/") == pytest.approx([loss(c, x) for c, x in enumerate(anchored)], rel=1e-6)
    assert len(known) < 3


class FailsLater(SequentialExecutor):
    """The last client fails in all rounds but the first."""

    def _run_client(self, client: int, request: StageRequest) -> Payload:
        if client == 2 and request.address.round_idx:
            raise RuntimeError("the disk is full")
        return super()._run_client(client, request)


@both_initializations
def test_who_fails_has_a_round_of_the_present_one(inner_start, tmp_path) -> None:
    strategy = PFedMe(inner_start=inner_start, **SETTINGS)
    with pytest.warns(UserWarning, match="client-2 failed"):
        trainer = fit_quadratics(
            strategy, FailsLater(), num_rounds=2, learning_rate=RATE, default_root_dir=str(tmp_path)
        )
    x, w_i = local_round(2, float(strategy.models["x"]), inner_start)[0], float(strategy.models["x"])
    assert losses(trainer, "")[2] == pytest.approx(loss(2, x), rel=1e-6)
    assert losses(trainer, "anchored/")[2] == pytest.approx(loss(2, w_i), rel=1e-6)


@both_executors
def test_unseen_clients_train_a_round(executor, tmp_path) -> None:
    strategy = PFedMe(**SETTINGS)
    held_out = Participation(held_out_fraction=0.34)
    trainer = fit_quadratics(
        strategy,
        executor(),
        num_rounds=2,
        learning_rate=RATE,
        participation=held_out,
        default_root_dir=str(tmp_path),
    )
    (new,) = trainer.run.unseen_clients
    x, anchor = local_round(new, float(strategy.models["x"]))
    assert losses(trainer, "unseen/") == pytest.approx([loss(new, x)], rel=1e-6)
    assert losses(trainer, "unseen/anchored/") == pytest.approx([loss(new, anchor)], rel=1e-6)


def test_it_costs_what_fedavg_costs(federation, make_model, make_trainer) -> None:
    totals = []
    for strategy in (PFedMe(), FedAvg()):
        trainer = make_trainer(callbacks=CommunicationLedger(), participation=Participation(num_clients=3))
        trainer.fit(make_model(), federation, strategy)
        totals.append(trainer.run.history[-1]["comm/bytes_total"])
    assert totals[0] == totals[1] > 0


@both_executors
@both_initializations
def test_any_optimizer(inner_start, executor, federation, make_model, make_trainer) -> None:
    trainer = make_trainer(executor=executor(), num_rounds=5)
    model = make_model(optimizer=functools.partial(Adam, lr=0.02), gradient_clip_val=1.0)
    trainer.fit(model, federation, PFedMe(inner_start=inner_start, proximal_weight=0.1))
    assert trainer.run.history[-1]["train/loss"] < 0.9 * trainer.run.history[0]["train/loss"]


def test_settings_are_checked(tmp_path) -> None:
    for settings, message in (
        ({"anchor_share": 1.5}, r"anchor_share must be in \[0, 1\], got 1.5"),
        ({"num_inner_steps": 0}, "num_inner_steps must be at least 1, got 0"),
        ({"proximal_weight": -1.0}, "proximal_weight must not be negative, got -1.0"),
        ({"relaxation": -1.0}, "relaxation must not be negative, got -1.0"),
        ({"inner_start": "w"}, "inner_start must be 'previous' or 'anchor', got 'w'"),
    ):
        with pytest.raises(ValueError, match=f"strategy.{message}"):
            PFedMe(**settings)
    with pytest.warns(UserWarning, match="learning rate times strategy.proximal_weight is 2, and from 2 on"):
        fit_quadratics(PFedMe(proximal_weight=20.0), SequentialExecutor(), num_rounds=1, default_root_dir=str(tmp_path))
