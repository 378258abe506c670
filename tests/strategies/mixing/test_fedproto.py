"""FedProto: prototypes by hand, the pull and its gradient, what is predicted, who hears what."""

import functools
from typing import Any

import pytest
import torch
from both_executors import both_executors
from joined import Joined
from line_clients import lines
from torch import Tensor

from fl_lightning import ClientModule, Participation, Payload, SequentialExecutor, StackedExecutor
from fl_lightning.batches.graphs import GraphCollator
from fl_lightning.callbacks import CommunicationLedger
from fl_lightning.federation import Federation
from fl_lightning.models import GCN
from fl_lightning.models.output import NetOutput
from fl_lightning.round.context import Context
from fl_lightning.strategies import FedProto, Local
from fl_lightning.strategies.mixing.fedproto import distance


@pytest.fixture
def fit(federation, make_model, make_trainer):
    """Run on the graphs, with dropout and Adam."""

    def run(strategy, executor=StackedExecutor, model=None, data=None, **settings):
        trainer = make_trainer(executor=executor(), seed=1, **settings)
        trainer.fit(model or make_model(dropout=0.5), data or federation, strategy)
        return trainer

    return run


def server(num_clients: int = 2, num_classes: int = 3, **settings: Any) -> FedProto:
    """A strategy that is set up, without clients."""
    strategy = FedProto(**settings)
    start = {"w": torch.zeros(1)}
    known = {"num_features": 2, "seed": 0, "device": torch.device("cpu"), "num_outputs": num_classes}
    clients = tuple(range(num_clients))
    strategy.setup(Federation(num_clients=num_clients, training_clients=clients, parameters=start, **known))
    return strategy


def answer(strategy: FedProto, clients: tuple[int, ...], prototypes: Any, counts: Any) -> None:
    extras = {"class/prototypes": torch.tensor(prototypes), "class/counts": torch.tensor(counts)}
    strategy.aggregate(strategy.training(0), Payload(clients=clients, extras=extras))


FIRST = [[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
SECOND = [[0.0, 2.0], [5.0, 7.0], [0.0, 0.0]]
COUNTS = [[3.0, 0.0, 0.0], [1.0, 4.0, 0.0]]


@pytest.mark.parametrize(("weighting", "shared"), [("examples", [0.75, 0.5]), ("clients", [0.5, 1.0])])
def test_the_mean_of_prototypes(weighting, shared) -> None:
    strategy = server(weighting=weighting)
    answer(strategy, (0, 1), [FIRST, SECOND], COUNTS)
    assert strategy.prototypes_KD.tolist() == [shared, [5.0, 7.0], [0.0, 0.0]]
    assert strategy.known_K.tolist() == [True, True, False]
    other = server(weighting=weighting)
    answer(other, (0, 1), [SECOND, FIRST], COUNTS[::-1])
    assert torch.equal(other.prototypes_KD, strategy.prototypes_KD)


def test_a_class_that_nobody_sends_keeps_its_prototype() -> None:
    strategy = server()
    answer(strategy, (0, 1), [FIRST, SECOND], COUNTS)
    answer(strategy, (0,), [[[-1.0, 3.0], [0.0, 0.0], [0.0, 0.0]]], [[2.0, 0.0, 0.0]])
    assert strategy.prototypes_KD.tolist() == [[-1.0, 3.0], [5.0, 7.0], [0.0, 0.0]]
    before = strategy.state_dict()
    strategy.aggregate(strategy.training(0), Payload(clients=()))
    assert all(torch.equal(strategy.state_dict()[name], tensor) for name, tensor in before.items())
    assert strategy.held_CK.tolist() == [[True, False, False], [True, True, False]]


@both_executors
def test_one_client_has_its_own_prototypes(executor, graphs, given_clients, fit) -> None:
    trainer = fit(FedProto(), executor, data=given_clients(graphs[:1]))
    client, parameters = trainer.run.model.eval(), trainer.run.executor.state().parameters
    batch = GraphCollator(graphs[:1], device=torch.device("cpu"), dtype=torch.float32)([0])
    own = {name: tensor[0] for name, tensor in parameters.items()}
    with torch.no_grad():
        embedding_ND = client.output(own, batch.replace({n: t[0] for n, t in batch.tensors().items()})).embedding
    for k in range(3):
        member_N = (graphs[0].y_N == k) & graphs[0].train_mask_N
        assert bool(member_N.any()) == bool(trainer.run.strategy.known_K[k])
        if member_N.any():
            actual = trainer.run.strategy.prototypes_KD[k]
            torch.testing.assert_close(actual, embedding_ND[member_N].mean(dim=0), rtol=1e-5, atol=1e-6)


# ------------------------------------------------------------------ the pull


def one_batch(graphs: Any) -> Any:
    batch = GraphCollator(graphs[:1], device=torch.device("cpu"), dtype=torch.float64)([0])
    return batch.replace({name: tensor[0] for name, tensor in batch.tensors().items()})


def test_gradient_of_the_pull(graphs) -> None:
    batch = one_batch(graphs)
    z_ND = torch.randn(len(batch.y), 4, dtype=torch.float64, requires_grad=True)
    prototypes_KD = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    known_K = torch.tensor([True, False, True])
    received = {"prototypes": prototypes_KD.detach(), "known": known_K}

    pull = distance(z_ND, batch, Context(received=received))
    pull.backward()

    pulled_N = batch.train_mask & known_K[batch.y]
    assert 0 < int(pulled_N.sum()) < int(batch.train_mask.sum())
    apart_ND = (z_ND - prototypes_KD[batch.y]).detach() * pulled_N[:, None]
    torch.testing.assert_close(z_ND.grad, 2 * apart_ND / (batch.train_mask.sum() * 4))
    scaled = {"prototypes": 3 * prototypes_KD.detach(), "known": known_K}
    torch.testing.assert_close(distance(3 * z_ND, batch, Context(received=scaled)), 9 * pull)
    assert pull.item() == pytest.approx(float(apart_ND.square().mean(dim=1).sum() / batch.train_mask.sum()))


@both_executors
def test_the_pull_is_felt_from_the_second_round_on(executor, fit, assert_same) -> None:
    first, second = (
        [fit(strategy(), executor, num_rounds=rounds).run.executor.state().parameters for strategy in (Local, FedProto)]
        for rounds in (1, 2)
    )
    assert_same(dict(first[1]), dict(first[0]))
    assert (second[1]["convs.0.weight"] - second[0]["convs.0.weight"]).abs().max() > 1e-4


@both_executors
def test_without_pull_it_is_local(executor, fit, assert_same) -> None:
    busy = Participation(num_clients=3, dropout_probability=0.2, straggler_probability=0.5)
    alone = fit(Local(), executor, participation=busy)
    proto = fit(FedProto(prototype_weight=0.0), executor, participation=busy)
    assert_same(dict(proto.run.executor.state().tensors()), dict(alone.run.executor.state().tensors()))
    assert [row["head/test/acc"] for row in proto.run.history] == [row["test/acc"] for row in alone.run.history]


# ------------------------------------------------------------------ predictions


class Embeds:
    """Stands for a client whose embeddings are given."""

    def __init__(self, embedding_ND: Tensor) -> None:
        self.embedding_ND = embedding_ND

    def output(self, parameters: Any, batch: Any) -> NetOutput:
        return NetOutput(torch.zeros(len(self.embedding_ND), 3), self.embedding_ND)


def nearest(strategy: FedProto, client: int, embedding_ND: Tensor) -> Tensor:
    payload = strategy.evaluations((0, 1, 2))[""].payload
    context = Context(received={name: tensor[client] for name, tensor in payload.extras.items()})
    return strategy.nearest(Embeds(embedding_ND), {}, None, context).logits  # type: ignore[arg-type]


def test_the_nearest_prototype_is_predicted() -> None:
    z_ND = torch.tensor([[0.8, 0.4], [6.0, 6.0], [0.0, 0.0], [-1.0, -1.0]])
    strategy = server(num_clients=3)
    answer(strategy, (0, 1), [FIRST, SECOND], COUNTS)
    logits_NK = nearest(strategy, 0, z_ND)
    assert logits_NK.argmax(dim=1).tolist() == [0, 1, 0, 0]  # never the class at the origin that has no prototype
    assert logits_NK.isfinite().all()
    expected_N = torch.cdist(z_ND, strategy.prototypes_KD)[:, :2].square().diff(dim=1)[:, 0]
    torch.testing.assert_close(logits_NK[:, 0] - logits_NK[:, 1], expected_N)


def test_only_own_classes_are_predicted_if_asked_for() -> None:
    z_ND = torch.tensor([[6.0, 6.0], [0.8, 0.4]])
    strategy = server(num_clients=3, own_classes_only=True)
    answer(strategy, (0, 1), [FIRST, SECOND], COUNTS)
    actual = [nearest(strategy, client, z_ND).argmax(dim=1).tolist() for client in range(3)]
    assert actual == [[0, 0], [1, 0], [1, 0]]  # the last has not been heard of


@both_executors
def test_either_rule_is_the_result(executor, fit) -> None:
    proto = fit(FedProto(), executor).run.history
    head = fit(FedProto(predict="head"), executor).run.history
    for one, other in zip(proto, head, strict=True):
        assert one["test/loss"] == other["proto/test/loss"] != one["head/test/loss"]
        assert one["head/test/acc"] == other["test/acc"]


@pytest.mark.parametrize("own_classes_only", [False, True])
@pytest.mark.parametrize("weighting", ["examples", "clients"])
def test_executors_agree(own_classes_only, weighting, fit, assert_same) -> None:
    runs = []
    for executor in (SequentialExecutor, StackedExecutor, functools.partial(StackedExecutor, max_padding=0.8)):
        busy = Participation(num_clients=2, straggler_probability=0.5, held_out_fraction=0.2)
        strategy = FedProto(own_classes_only=own_classes_only, weighting=weighting)
        trainer = fit(strategy, executor, participation=busy, precision="64-true", num_rounds=4)
        runs.append((strategy.state_dict(), trainer.run.history, trainer.run.selection.result))
    for other in runs[1:]:
        assert_same(list(other), list(runs[0]), tolerance=1e-6)


def test_before_there_are_prototypes_the_head_predicts() -> None:
    evaluations = server().evaluations((0, 1))
    assert evaluations.keys() == {"", "head/"}
    assert all(each.payload is None and each.output is None for each in evaluations.values())


# ------------------------------------------------------------------ who hears what


def test_bytes_are_those_of_prototypes(fit) -> None:
    history = fit(FedProto(), callbacks=CommunicationLedger(), participation=Participation(num_clients=4)).run.history
    for number, row in enumerate(history):
        assert row["comm/bytes_up"] == 4 * 4 * (3 * 8 + 3)  # four clients, three classes, width 8
        assert row["comm/bytes_down"] == (4 * (4 * 3 * 8 + 3) if number else 0)


@both_executors
def test_unseen_clients_hear_prototypes(executor, fit) -> None:
    participation, joined = Participation(held_out_fraction=0.2), Joined()
    trainer = fit(FedProto(), executor, participation=participation, callbacks=joined)
    joined.restore(trainer.run.strategy)
    (unseen_client,) = trainer.run.unseen_clients
    alone = fit(Local(), executor, participation=participation)
    state, other = trainer.run.executor.state().parameters, alone.run.executor.state().parameters
    assert (state["convs.0.weight"][unseen_client] != other["convs.0.weight"][unseen_client]).any()
    assert trainer.run.strategy.held_CK[unseen_client].any()
    assert {"unseen/test/acc", "unseen/head/test/acc"} <= trainer.run.selection.result.keys()


@both_executors
def test_different_nets_of_one_embedding_width(executor, fit) -> None:
    nets = [functools.partial(GCN, hidden_channels=8, num_layers=layers) for layers in (1, 2)]
    trainer = fit(FedProto(), executor, model=ClientModule(nets), num_rounds=4)
    assert trainer.run.strategy.prototypes_KD.shape == (3, 8)
    assert trainer.run.history[-1]["num_failures"] == 0
    assert trainer.run.history[-1]["train/loss"] < trainer.run.history[0]["train/loss"]


@both_executors
def test_embeddings_of_different_widths_are_refused(executor, fit) -> None:
    nets = [functools.partial(GCN, hidden_channels=width) for width in (8, 16)]
    with pytest.raises(
        ValueError, match=r"clients sent 'class/prototypes' in different shapes, \(3, 8\), \(3, 16\): the"
    ):
        fit(FedProto(), executor, model=ClientModule(nets))


def test_numbers_have_no_prototypes(make_trainer) -> None:
    with pytest.raises(ValueError, match="FedProto is for classes, but the targets are numbers: choose a source of cl"):
        make_trainer().fit(data=lines(), strategy=FedProto())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prototype_weight": -1}, r"strategy\.prototype_weight must not be negative, got -1"),
        ({"weighting": "equal"}, r"strategy\.weighting must be 'examples' or 'clients', got 'equal'"),
        ({"predict": "both"}, r"strategy\.predict must be 'prototypes' or 'head', got 'both'"),
    ],
)
def test_settings(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        FedProto(**settings)
