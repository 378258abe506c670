"""FedBABU: the classifier is never trained in the rounds, and tuned before the evaluation."""

import functools

import pytest
import torch
from both_executors import both_executors
from joined import Joined
from learning import learned, quadrants
from quadratics import Product, fit_quadratics, parameters
from torch.optim import SGD

from fl_lightning import Participation
from fl_lightning.callbacks import CommunicationLedger
from fl_lightning.strategies import FedAvg, FedAvgFinetune, FedBABU


@both_executors
def test_the_classifier_stays_as_it_was_initialized(executor, fit) -> None:
    sgd = functools.partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.1)
    participation, joined = Participation(num_clients=2, held_out_fraction=0.2), Joined()
    trainer = fit(FedBABU(num_epochs=2), executor, optimizer=sgd, participation=participation, callbacks=joined)
    joined.restore(trainer.run.strategy)
    state, start = trainer.run.executor.state().parameters, trainer.run.architectures[0]
    for name in ("head.weight", "head.bias"):
        assert torch.equal(state[name], start[name].expand_as(state[name]))
    assert all((state[name] != start[name]).any() for name in trainer.run.strategy.models)
    (unseen_client,) = trainer.run.unseen_clients
    for name, model in trainer.run.strategy.models.items():
        assert torch.equal(state[name][unseen_client], model[0])


@both_executors
def test_numbers(executor, tmp_path) -> None:
    for num_rounds, p in enumerate((1.0364322917, 1.0712203864), start=1):
        strategy = FedBABU(num_epochs=2, personal=["q"])
        trainer = fit_quadratics(
            strategy, executor(), num_rounds=num_rounds, net=Product, default_root_dir=str(tmp_path)
        )
        assert float(strategy.models["p"]) == pytest.approx(p, rel=1e-9)
        assert parameters(trainer, "q") == [0.5] * 3


@both_executors
def test_with_everything_shared_and_trained_it_is_fedavg_finetuned(executor, fit, assert_same) -> None:
    class Whole(FedBABU):
        def training(self, round_idx):
            return FedAvg.training(self, round_idx)

    whole = fit(Whole(num_epochs=2, personal=(), num_finetune_epochs=3), executor)
    plain = fit(FedAvgFinetune(num_epochs=2, num_finetune_epochs=3), executor)
    assert_same(whole.run.history, plain.run.history)


@both_executors
@pytest.mark.parametrize("finetune", ["whole", "head", "body"])
def test_what_is_tuned(finetune, executor, fit) -> None:
    trainer = fit(FedBABU(finetune=finetune), executor)
    evaluation = trainer.run.strategy.evaluations((0,))[""]
    tuned = {name for name in trainer.run.architectures[0] if evaluation.tuning.trains(name)}
    heads = {"head.weight", "head.bias"}
    bodies = set(trainer.run.strategy.models)
    assert tuned == {"whole": heads | bodies, "head": heads, "body": bodies}[finetune]
    assert trainer.run.history[-1]["train/loss"] < trainer.run.history[-1]["global/train/loss"]


def test_bytes_are_those_of_the_backbone(fit) -> None:
    history = fit(FedBABU(), callbacks=CommunicationLedger()).run.history
    numbers = 6 * 8 + 8 + 8 * 8 + 8
    assert {(row["comm/bytes_up"], row["comm/bytes_down"]) for row in history} == {(5 * 4 * numbers, 5 * 4 * numbers)}


def test_clients_that_have_two_classes_each() -> None:
    clients = quadrants(6, num_train=20, classes=lambda client: (client % 4, (client + 1) % 4))
    tuned = learned(FedBABU(num_epochs=5), clients, num_rounds=20)
    assert tuned > learned(FedAvg(num_epochs=5), clients, num_rounds=20) + 0.03


def test_settings() -> None:
    with pytest.raises(ValueError, match=r"strategy\.num_finetune_epochs must be at least 1, got 0"):
        FedBABU(num_finetune_epochs=0)
    with pytest.raises(ValueError, match=r"strategy\.finetune must be 'whole' or 'head' or 'body', got 'both'"):
        FedBABU(finetune="both")  # type: ignore[arg-type]
