"""FedRep: its numbers on two parameters, what it is equal to, whose turn it is, what is communicated."""

import dataclasses
import functools
import itertools

import pytest
import torch
from both_executors import both_executors
from learning import learned, quadrants
from quadratics import Product, fit_quadratics, parameters
from torch.optim import SGD

from fl_lightning import Callback, Participation
from fl_lightning.callbacks import CommunicationLedger
from fl_lightning.strategies import FedAvg, FedBABU, FedPer, FedRep


@pytest.fixture
def products(tmp_path):
    """Run on the quadratics of p q."""
    return functools.partial(fit_quadratics, net=Product, default_root_dir=str(tmp_path))


@both_executors
def test_numbers(executor, products) -> None:
    expected = [
        (1.0419843750, [0.6, 0.375, 0.75]),
        (1.0991404251, [0.6781091025, 0.2504440980, 0.9811654547]),
    ]
    for num_rounds, (p, q) in enumerate(expected, start=1):
        strategy = FedRep(num_head_epochs=1, num_epochs=1, personal=["q"])
        trainer = products(strategy, executor(), num_rounds=num_rounds)
        assert float(strategy.models["p"]) == pytest.approx(p, rel=1e-9)
        assert parameters(trainer, "q") == pytest.approx(q, rel=1e-9)


@both_executors
def test_without_head_epochs_the_backbone_is_that_of_fedbabu(executor, fit, assert_same) -> None:
    busy = Participation(num_clients=3, straggler_probability=0.5)
    runs = [
        fit(strategy, executor, participation=busy).run.strategy.models
        for strategy in (FedRep(num_head_epochs=0, num_epochs=3), FedBABU(num_epochs=3))
    ]
    assert_same(dict(runs[0]), dict(runs[1]))


@both_executors
def test_with_one_joint_stage_it_is_fedper(executor, fit, assert_same) -> None:
    class Joint(FedRep):
        def stages(self, round_idx):
            (stage,) = super().stages(round_idx)
            return [dataclasses.replace(stage, trained=("*",))]

    joint, plain = (fit(s, executor) for s in (Joint(num_head_epochs=0, num_epochs=3), FedPer(num_epochs=3)))
    assert_same(dict(joint.run.executor.state().parameters), dict(plain.run.executor.state().parameters))
    assert_same(joint.run.strategy.state_dict(), plain.run.strategy.state_dict())


class Watch(Callback):
    """Keeps the clients' parameters after each stage."""

    def __init__(self) -> None:
        self.seen = []

    def on_stage_end(self, trainer, stage, payload) -> None:
        state = trainer.run.executor.state().parameters
        self.seen.append((stage.name, {name: tensor.clone() for name, tensor in state.items()}))


@both_executors
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_each_half_rests_in_the_turn_of_the_other(decay, executor, fit) -> None:
    watch = Watch()
    sgd = functools.partial(SGD, lr=0.1, momentum=0.9, weight_decay=decay)
    trainer = fit(FedRep(num_head_epochs=2), executor, optimizer=sgd, callbacks=watch)
    names = [name for name, _ in watch.seen]
    assert names == ["head", "train"] * 3
    heads = [name for name in trainer.run.architectures[0] if name.startswith("head.")]
    for (_, before), (turn, after) in itertools.pairwise(watch.seen):
        if turn == "train":  # the backbone's
            assert all(torch.equal(before[name], after[name]) for name in heads)
            assert not torch.equal(before["convs.0.weight"], after["convs.0.weight"])
    sent = [seen for turn, seen in watch.seen if turn == "head"]
    for seen in sent:  # all clients still have the backbone that was sent
        assert torch.equal(seen["convs.0.weight"], seen["convs.0.weight"][:1].expand_as(seen["convs.0.weight"]))
        assert not torch.equal(seen["head.weight"][0], seen["head.weight"][1])


@both_executors
def test_without_backbone_epochs_the_backbone_stays(executor, fit) -> None:
    trainer = fit(FedRep(num_epochs=0, num_head_epochs=2), executor)
    for name, model in trainer.run.strategy.models.items():
        torch.testing.assert_close(model[0], trainer.run.architectures[0][name])


@both_executors
def test_unseen_clients_train_a_classifier_on_the_backbone_they_are_sent(executor, fit) -> None:
    trainer = fit(FedRep(num_head_epochs=2), executor, participation=Participation(held_out_fraction=0.2))
    (unseen_client,) = trainer.run.unseen_clients
    state = trainer.run.executor.state().parameters
    for name, model in trainer.run.strategy.models.items():
        assert torch.equal(state[name][unseen_client], model[0])
    assert not torch.equal(state["head.weight"][unseen_client], trainer.run.architectures[0]["head.weight"])


def test_bytes_are_those_of_the_backbone(fit) -> None:
    history = fit(FedRep(), callbacks=CommunicationLedger(), participation=Participation(num_clients=3)).run.history
    numbers = 6 * 8 + 8 + 8 * 8 + 8
    assert {(row["comm/bytes_up"], row["comm/bytes_down"]) for row in history} == {(3 * 4 * numbers, 3 * 4 * numbers)}


@pytest.mark.filterwarnings("ignore:.*its update is")
def test_the_bound_on_updates_is_of_the_change_since_the_backbone_was_sent(fit) -> None:
    free = fit(FedRep(num_head_epochs=1), participation=Participation(max_update_norm=1e4))
    bound = fit(FedRep(num_head_epochs=1), participation=Participation(max_update_norm=2.5))
    norms = [float(model.norm()) for model in free.run.strategy.models.values()]
    assert sum(norm**2 for norm in norms) ** 0.5 > 2.5  # of the models themselves
    assert sum(row["num_failures"] for row in bound.run.history) == 0


@both_executors
def test_tuning_before_the_evaluation(executor, fit) -> None:
    plain = fit(FedRep(num_head_epochs=1), executor)
    tuned = fit(FedRep(num_head_epochs=1, num_finetune_epochs=5), executor)
    assert tuned.run.history[-1]["trained/test/loss"] == plain.run.history[-1]["trained/test/loss"]
    assert tuned.run.history[-1]["train/loss"] < plain.run.history[-1]["train/loss"]


def test_clients_that_name_classes_differently() -> None:
    clients = quadrants(6, num_train=20, labels=lambda client, y_N: (y_N + client) % 4)
    apart = learned(FedRep(num_head_epochs=5, num_epochs=5), clients, num_rounds=20)
    together = learned(FedAvg(num_epochs=5), clients, num_rounds=20)
    assert apart > together + 0.3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_head_epochs": -1}, r"strategy\.num_head_epochs must not be negative, got -1"),
        ({"personal": ()}, r"strategy\.personal is empty: FedRep needs the classifier's parameters"),
    ],
)
def test_settings(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        FedRep(**settings)
