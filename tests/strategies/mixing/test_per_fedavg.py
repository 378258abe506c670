"""Per-FedAvg: its numbers on the three quadratics, its identities, and gradients on stacks and under vmap."""

import dataclasses
import functools

import pytest
import torch
from both_executors import both_executors
from quadratics import CURVATURES, MINIMA, fit_quadratics, parameters
from torch.optim import SGD

from fl_lightning import ClientModule, Participation, SequentialExecutor, StackedExecutor
from fl_lightning.callbacks import CommunicationLedger
from fl_lightning.strategies import FedAvg, PerFedAvg

both_hessians = pytest.mark.parametrize("hessian", ["none", "finite_difference"])
SAME = {"num_epochs": 2, "inner_lr": 0.2, "batches": "same"}


def losses(trainer, prefix: str) -> list[float]:
    """Of every client, as evaluated last."""
    scores = trainer.run.scores[prefix].extras["val/loss"]
    return (scores[:, 0] / scores[:, 1]).tolist()


@both_executors
@pytest.mark.parametrize(
    ("hessian", "num_rounds", "w", "adapted"),
    [
        ("none", 1, 0.17015, (0.50209, -0.046865, 0.73612)),
        ("none", 2, 0.3138033913, (0.5882820347, 0.0824230521, 0.8510427130)),
        ("finite_difference", 1, 0.1172695, (0.4703617, -0.09445745, 0.6938156)),
        ("finite_difference", 2, 0.2211671596, (0.5327002958, -0.0009495564, 0.7769337277)),
    ],
)
def test_numbers(hessian, num_rounds, w, adapted, executor, tmp_path) -> None:
    strategy = PerFedAvg(hessian=hessian, **SAME)
    trainer = fit_quadratics(strategy, executor(), num_rounds=num_rounds, default_root_dir=str(tmp_path))
    assert float(strategy.models["x"]) == pytest.approx(w, rel=1e-8)
    for prefix, points in (("", adapted), ("global/", [w] * 3)):
        expected = [0.5 * a * (x - b) ** 2 for a, b, x in zip(CURVATURES, MINIMA, points, strict=True)]
        assert losses(trainer, prefix) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("hessian_step", [1e-3, 0.1, 1.0])
def test_the_finite_difference_is_exact_on_quadratics(hessian_step, tmp_path) -> None:
    """d = a (1 - α a)² (x - b), whatever δ."""
    strategy = PerFedAvg(hessian_step=hessian_step, **{**SAME, "num_epochs": 1})
    trainer = fit_quadratics(strategy, StackedExecutor(), num_rounds=1, default_root_dir=str(tmp_path))
    expected = [0.1 * a * (1 - 0.2 * a) ** 2 * b for a, b in zip(CURVATURES, MINIMA, strict=True)]
    assert parameters(trainer) == pytest.approx(expected, rel=1e-9)


@both_executors
@both_hessians
def test_nothing_is_left_to_do_where_one_step_is_enough(hessian, executor, tmp_path) -> None:
    """α = 1 / a of the third client: y is its minimum."""
    strategy = PerFedAvg(hessian=hessian, **{**SAME, "inner_lr": 1.0})
    trainer = fit_quadratics(strategy, executor(), num_rounds=1, default_root_dir=str(tmp_path))
    first, _, third = parameters(trainer)
    assert abs(third) < 1e-9
    assert abs(first) > 0.1
    assert losses(trainer, "")[2] == pytest.approx(0, abs=1e-12)


class OnPart(FedAvg):
    """FedAvg, each of whose steps is on the second part of so many."""

    parts = 2

    def training(self, round_idx):
        def objective(client, parameters, batch, context):
            return client.objective(parameters, batch.split(self.parts)[1], context)

        return dataclasses.replace(super().training(round_idx), objective=objective)


@both_executors
@both_hessians
@pytest.mark.parametrize("batches", ["same", "split"])
def test_without_a_first_step_it_is_fedavg(
    hessian, batches, executor, federation, make_model, make_trainer, assert_same
) -> None:
    plain = FedAvg(weighting="equal") if batches == "same" else OnPart(weighting="equal")
    plain.parts = 2 if hessian == "none" else 3
    runs = []
    for strategy in (PerFedAvg(inner_lr=0.0, hessian=hessian, batches=batches), plain):
        busy = Participation(num_clients=3, dropout_probability=0.2, straggler_probability=0.5)
        trainer = make_trainer(executor=executor(), participation=busy)
        trainer.fit(make_model(dropout=0.5), federation, strategy)
        runs.append((trainer, strategy.models, trainer.run.executor.state().parameters))
    assert_same(runs[0][1:], runs[1][1:], tolerance=0.0 if batches == "same" else 1e-6)
    last = runs[0][0].run.history[-1]
    assert last["val/loss"] == last["global/val/loss"] == runs[1][0].run.history[-1]["val/loss"]


class Weighted(ClientModule):
    """Its own loss keeps it off the stacked executor's fast path."""

    def loss(self, output, batch):
        weight_N = batch.train_mask.to(output.logits.dtype)
        return super().loss(output, batch) + 1e-2 * (output.embedding[..., 0].square() * weight_N).sum(dim=-1)


@both_hessians
def test_gradients_under_vmap_are_those_of_one_client(hessian, federation, make_model, make_trainer, assert_same):
    states = []
    for executor in (SequentialExecutor(), StackedExecutor(max_padding=0.8)):
        trainer = make_trainer(executor=executor, precision="64-true")
        trainer.fit(make_model(Weighted, dropout=0.5), federation, PerFedAvg(hessian=hessian, inner_lr=0.1))
        states.append((trainer.run.executor.state().parameters, trainer.run.history[-1]["val/loss"]))
    assert_same(states[0][0], states[1][0], tolerance=1e-7)
    assert states[0][1] == pytest.approx(states[1][1], rel=1e-5)


@pytest.mark.parametrize("inner_lr", [0.0, 0.5])
def test_the_hessian_has_a_share_in_the_step(inner_lr, federation, make_model, make_trainer) -> None:
    models = []
    for hessian in ("none", "finite_difference"):
        strategy = PerFedAvg(hessian=hessian, inner_lr=inner_lr, batches="same", num_epochs=1)
        model = make_model(optimizer=functools.partial(SGD, lr=1.0), dropout=0.5)
        make_trainer(num_rounds=1, precision="64-true").fit(model, federation, strategy)
        models.append(torch.cat([tensor.flatten() for tensor in strategy.models.values()]))
    apart = (models[0] - models[1]).norm()
    assert apart > 1e-3 if inner_lr else apart == 0


def test_it_costs_what_fedavg_costs(federation, make_model, make_trainer) -> None:
    totals = []
    for strategy in (PerFedAvg(), FedAvg()):
        trainer = make_trainer(callbacks=CommunicationLedger(), participation=Participation(num_clients=3))
        trainer.fit(make_model(), federation, strategy)
        totals.append(trainer.run.history[-1]["comm/bytes_total"])
    assert totals[0] == totals[1] > 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"inner_lr": -0.1}, "inner_lr must not be negative, got -0.1"),
        ({"hessian": "exact"}, "hessian must be 'finite_difference' or 'none', got 'exact'"),
        ({"hessian_step": 0.0}, "hessian_step must be positive, got 0.0"),
        ({"batches": "halves"}, "batches must be 'split' or 'same', got 'halves'"),
        ({"num_adaptation_steps": 0}, "num_adaptation_steps must be at least 1, got 0"),
    ],
    ids=str,
)
def test_settings_are_checked(settings, message) -> None:
    with pytest.raises(ValueError, match=f"strategy.{message}"):
        PerFedAvg(**settings)
