"""FedDyn: its numbers on the quadratics, its invariant, where it converges to."""

import pytest
import torch
from both_executors import both_executors
from quadratics import CURVATURES, MINIMA, parameters

from fl_lightning import Callback, Participation, Payload, SequentialExecutor
from fl_lightning.callbacks import CommunicationLedger
from fl_lightning.round.context import Context
from fl_lightning.strategies import FedAvg, FedDyn, FedProx

MINIMUM = sum(a * b for a, b in zip(CURVATURES, MINIMA, strict=True)) / sum(CURVATURES)  # of the sum


class Loses(Callback):
    """Loses the updates of some clients in some rounds."""

    def __init__(self, lost) -> None:
        self.lost = lost

    def on_upload(self, trainer, stage, payload: Payload) -> Payload:
        lost = self.lost(trainer.run.round_idx)
        return payload.rows([client for client in payload.clients if client not in lost])


@pytest.mark.filterwarnings("ignore:.*its update was lost")
@both_executors
@pytest.mark.parametrize(
    ("num_rounds", "sent", "mean", "h", "duals"),
    [
        (1, 0.4766666667, 0.2383333333, -0.1191666667, (-0.175, 0.095, -0.2775)),
        (2, 0.9488583333, 0.5935958333, -0.17763125, (-0.2512708333, 0.2036166667, -0.4852395833)),
        (3, 1.5238033941, 1.0806678698, -0.2215677622, (-0.2382344271, 0.2036166667, -0.6300855260)),
    ],
)
def test_numbers(num_rounds, sent, mean, h, duals, executor, quadratics) -> None:
    strategy = FedDyn(num_epochs=2, regularization=0.5)
    loses = Loses(lambda round_idx: (1,) if round_idx == 2 else ())
    quadratics(strategy, executor(), num_rounds=num_rounds, callbacks=loses)
    assert float(strategy.sent["x"]) == pytest.approx(sent, rel=1e-9)
    assert float(strategy.models["x"]) == pytest.approx(mean, rel=1e-9)
    assert float(strategy.h["x"]) == pytest.approx(h, rel=1e-9)
    assert strategy.duals["x"].flatten().tolist() == pytest.approx(duals, rel=1e-9)


@pytest.mark.filterwarnings("ignore:.*its update was lost")
@both_executors
def test_h_is_the_mean_of_the_duals(executor, fit) -> None:
    class Checks(Callback):
        rounds = 0

        def on_round_end(self, trainer, metrics) -> None:
            strategy, members = trainer.run.strategy, list(trainer.run.training_clients)
            for name, h in strategy.h.items():
                torch.testing.assert_close(h, strategy.duals[name][members].mean(dim=0), rtol=1e-4, atol=1e-6)
            self.rounds += metrics["server/dual_norm"] > 0

    checks = Checks()
    busy = Participation(num_clients=3, straggler_probability=0.5, held_out_fraction=0.2)
    lost = Loses(lambda round_idx: (round_idx,))
    fit(FedDyn(regularization=0.1), executor, num_rounds=4, callbacks=[lost, checks], participation=busy)
    assert checks.rounds == 4


@pytest.mark.full
@both_executors
def test_it_comes_to_the_minimum_of_the_sum(executor, quadratics) -> None:
    """With clients that come and go; FedAvg stops elsewhere."""
    busy = Participation(num_clients=2)
    settings = {"num_rounds": 100, "evaluate_every": 100, "participation": busy}
    strategy = FedDyn(num_epochs=25, regularization=1.0)
    quadratics(strategy, executor(), **settings)
    assert float(strategy.sent["x"]) == pytest.approx(MINIMUM, rel=1e-5)
    assert float(strategy.h["x"]) == pytest.approx(0, abs=1e-5)
    gradients = [a * (MINIMUM - b) for a, b in zip(CURVATURES, MINIMA, strict=True)]
    assert strategy.duals["x"].flatten().tolist() == pytest.approx(gradients, abs=1e-3)
    plain = FedAvg(num_epochs=25, weighting="equal")
    quadratics(plain, executor(), num_rounds=30, evaluate_every=30)
    assert abs(float(plain.models["x"]) - MINIMUM) > 0.1


@both_executors
def test_exact_clients_have_the_duals_of_their_gradients(executor, quadratics) -> None:
    trainer = quadratics(FedDyn(num_epochs=400, regularization=0.3), executor(), num_rounds=2)
    gradients = [a * (x - b) for a, b, x in zip(CURVATURES, MINIMA, parameters(trainer), strict=True)]
    assert trainer.run.strategy.duals["x"].flatten().tolist() == pytest.approx(gradients, abs=1e-6)


@both_executors
def test_its_first_round_is_fedprox_extrapolated(executor, fit, assert_same) -> None:
    dynamic = fit(FedDyn(regularization=0.2), executor, num_rounds=1)
    near = fit(FedProx(proximal_weight=0.2, weighting="equal"), executor, num_rounds=1)
    states = [dict(trainer.run.executor.state().parameters) for trainer in (dynamic, near)]
    assert_same(*states, tolerance=1e-6)
    for name, mean in dynamic.run.strategy.models.items():
        expected = 2 * mean[0] - dynamic.run.architectures[0][name]
        torch.testing.assert_close(dynamic.run.strategy.sent[name][0], expected, rtol=1e-4, atol=1e-5)


def test_masked_averaging_compares_with_what_was_sent(quadratics) -> None:
    """Not with the mean: a client that sends θ back has not updated it."""
    strategy = FedDyn(regularization=0.5, masked_averaging=True)
    quadratics(strategy, SequentialExecutor(), num_rounds=1)
    (sent,) = strategy.sent["x"].flatten().tolist()
    x = torch.tensor([[sent], [sent], [sent + 1]], dtype=torch.float64)
    strategy.aggregate(strategy.stages(1)[0], Payload(clients=(0, 1, 2), parameters={"x": x}))
    assert float(strategy.models["x"]) == pytest.approx(sent + 1)


def test_gradient() -> None:
    strategy = FedDyn(regularization=0.3)
    strategy.shared = ("a",)
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    context = Context(anchor={"a": torch.tensor([0.5, 1.0])}, received={"dual/a": torch.tensor([0.7, -0.2])})
    strategy.dynamic({"a": x}, context).backward()
    torch.testing.assert_close(x.grad, 0.3 * torch.tensor([0.5, -3.0]) - torch.tensor([0.7, -0.2]))


@both_executors
def test_unseen_clients_receive_the_mean(executor, fit) -> None:
    participation = Participation(held_out_fraction=0.2)
    trainer = fit(FedDyn(num_epochs=0), executor, participation=participation)
    state, (unseen_client,) = trainer.run.executor.state().parameters, trainer.run.unseen_clients
    for name, mean in trainer.run.strategy.models.items():
        assert torch.equal(state[name][unseen_client], mean[0])


def test_bytes(fit) -> None:
    """As many up as FedAvg, and down twice as many: the duals travel with the model."""
    plain, dynamic = (fit(s, callbacks=CommunicationLedger()).run.history[-1] for s in (FedAvg(), FedDyn()))
    assert dynamic["comm/bytes_up"] == plain["comm/bytes_up"]
    assert dynamic["comm/bytes_down"] == 2 * plain["comm/bytes_down"]


def test_settings() -> None:
    with pytest.raises(ValueError, match=r"strategy\.regularization must be positive \(0 is not FedAvg\), got 0"):
        FedDyn(regularization=0.0)
