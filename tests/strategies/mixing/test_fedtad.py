"""FedTAD: reliability by hand, what it reduces to, what distillation follows, and clients of unequal reliability."""

import math
from typing import Any

import pytest
import torch
from both_executors import both_executors
from path_graph import computed, path_graph
from torch import Tensor

from fl_lightning import Callback, SequentialExecutor
from fl_lightning.callbacks import CommunicationLedger
from fl_lightning.data import ClientGraph
from fl_lightning.kernels.randomness import generator
from fl_lightning.models.pseudo_node_generator import PseudoNodeGenerator, nearest_neighbor_graph
from fl_lightning.round.context import Context
from fl_lightning.strategies import FedAvg, FedTAD
from fl_lightning.strategies.mixing.fedtad import return_probabilities

PATH_X = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0], [0.0, 2.0]])
MODEL = 6 * 8 + 8 + 8 * 8 + 8 + 8 * 3 + 3


@pytest.fixture
def fit(federation, make_model, make_trainer):
    """Run on the graphs."""

    def run(strategy, executor=SequentialExecutor, data=None, dropout=0.5, num_layers=2, **settings):
        trainer = make_trainer(executor=executor(), **{"seed": 1, **settings})
        trainer.fit(make_model(dropout=dropout, num_layers=num_layers), data or federation, strategy)
        return trainer

    return run


def reliability(graph: ClientGraph, *, num_classes: int = 2, padding: int = 0, sparse: bool = False) -> Tensor:
    """What a client sends before round 0."""
    strategy = FedTAD(walk_length=0)
    strategy.dtype, strategy.reliability_CK = torch.float64, torch.zeros(1, num_classes)
    actual = computed(
        lambda batch: {"": strategy.reliability(None, {}, batch, Context())},  # type: ignore[arg-type]
        graph,
        padding=padding,
        sparse=sparse,
    )
    return actual[""]


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("padding", [0, 3])
def test_reliability_on_a_path(padding, sparse) -> None:
    graph = path_graph(PATH_X, train=(0, 1), y=(0, 1, 0, 0))
    actual = reliability(graph, padding=padding, sparse=sparse)
    torch.testing.assert_close(actual, torch.tensor([0.85355339, 0.80473785], dtype=torch.float64), rtol=0, atol=1e-8)
    graph = path_graph(PATH_X, train=(0, 1), y=(0, 0, 1, 1))
    actual = reliability(graph, num_classes=3, padding=padding, sparse=sparse)  # other labels are not looked at
    torch.testing.assert_close(actual, torch.tensor([1.65829124, 0, 0], dtype=torch.float64), rtol=0, atol=1e-8)


def test_return_probabilities_of_a_path() -> None:
    actual = computed(lambda batch: {"": return_probabilities(batch, 4)}, path_graph(), padding=2)[""]
    ends, middle = [0, 0.5, 0, 0.375], [0, 0.75, 0, 0.6875]
    torch.testing.assert_close(actual[:4], torch.tensor([ends, middle, middle, ends]).double())


def test_pseudo_nodes_and_their_links() -> None:
    net = PseudoNodeGenerator(3, 4, 5)
    assert [tuple(layer.weight.shape) for layer in net.layers] == [(64, 7), (128, 64), (256, 128), (5, 256)]
    x_MF = torch.tensor([[1.0, 0.0], [2.0, 0.1], [0.0, 3.0], [-0.1, 1.0]], requires_grad=True)
    graph = nearest_neighbor_graph(x_MF, torch.tensor([0, 0, 1, 1]), 1)
    assert graph.edge_index_2E.tolist() == [[0, 1, 2, 3], [1, 0, 3, 2]]
    assert not graph.x_NF.requires_grad
    graph = nearest_neighbor_graph(torch.tensor([[1.0, 0.0], [1.0, 0.1], [1.0, 0.3]]), torch.zeros(3).long(), 1)
    assert graph.edge_index_2E.tolist() == [[0, 1, 1, 2], [1, 0, 2, 1]]  # linked if either is near the other


@both_executors
@pytest.mark.parametrize("settings", [{"num_iterations": 0}, {"num_student_steps": 0}, {"student_lr": 0.0}])
def test_without_distillation_it_is_fedavg(settings, executor, fit, assert_same) -> None:
    averaged = fit(FedAvg(), executor)
    distilled = fit(FedTAD(**settings), executor)
    assert_same(dict(distilled.run.executor.state().tensors()), dict(averaged.run.executor.state().tensors()))
    assert [row["test/acc"] for row in distilled.run.history] == [row["test/acc"] for row in averaged.run.history]


def test_alike_models_have_nothing_to_teach(fit) -> None:
    strategy = FedTAD(num_epochs=0, num_iterations=1)
    trainer = fit(strategy, dropout=0.0, precision="64-true", num_rounds=1)
    assert trainer.run.history[0]["server/disagreement"] < 1e-12
    assert fit(FedTAD(), dropout=0.0, num_rounds=1).run.history[0]["server/disagreement"] > 1e-3


@pytest.mark.parametrize(("class_weight", "diversity_weight"), [(1.0, 1.0), (0.5, 0.0), (0.0, 3.0)])
def test_what_generator_and_student_minimize(class_weight, diversity_weight, fit) -> None:
    """By a loop over clients, classes and pairs; the steps are not taken, so that all is known afterward."""

    class Stands(FedTAD):
        def step(self, name: str, loss: Tensor) -> None:
            losses.append((name, loss.item()))

    class Note(Callback):
        def on_stage_end(self, trainer: Any, stage: Any, payload: Any) -> None:
            if stage.name == "train":
                trainer.sent = payload.parameters

    losses: list[tuple[str, float]] = []
    weights = {"class_weight": class_weight, "diversity_weight": diversity_weight}
    strategy = Stands(num_iterations=1, num_student_steps=1, num_pseudo_nodes=7, num_neighbors=2, **weights)
    trainer = fit(strategy, dropout=0.0, precision="64-true", num_rounds=1, callbacks=Note())
    y_M = torch.tensor([0, 0, 1, 1, 2, 2, 2])
    noise_MZ = torch.randn(7, 32, generator=generator(1, "pseudo nodes", 0, 0)).double()
    with torch.no_grad():
        batch, client = strategy.pseudo_graph(y_M, noise_MZ), strategy.federation.client
    student_MK = client.frozen_output({name: tensor[0] for name, tensor in strategy.averaged.items()}, batch).logits
    wrong = apart = 0.0
    for c in range(5):
        taught_MK = client.frozen_output({name: tensor[c] for name, tensor in trainer.sent.items()}, batch).logits
        for k in range(3):
            share, members = float(strategy.weights(range(5))[c, k]), y_M == k
            wrong += share * float(torch.nn.functional.cross_entropy(taught_MK[members], y_M[members]))
            apart += share * float((student_MK - taught_MK)[members].abs().mean())
    spread = sum(
        float((noise_MZ[m] - noise_MZ[n]).square().mean() * (batch.x[m] - batch.x[n]).abs().mean())
        for m in range(7)
        for n in range(7)
    )
    alike = 5 * math.exp(-spread / 49)
    assert losses[0] == ("generator", pytest.approx(class_weight * wrong - apart + diversity_weight * alike))
    assert losses[1] == ("student", pytest.approx(apart))
    assert trainer.run.history[0]["server/pseudo_loss"] == pytest.approx(wrong)
    assert trainer.run.history[0]["server/disagreement"] == pytest.approx(apart)


def test_weights_of_the_clients(fit) -> None:
    strategy = FedTAD(num_iterations=1)
    fit(strategy, num_rounds=1)
    weight_CK = strategy.weights(range(5))
    torch.testing.assert_close(weight_CK.sum(dim=0), torch.ones(3))
    torch.testing.assert_close(weight_CK, strategy.reliability_CK / strategy.reliability_CK.sum(dim=0))
    assert strategy.weights((2,)).tolist() == [[float(r > 0) for r in strategy.reliability_CK[2]]]
    strategy.reliability_CK[1, 2] = -100.0  # of a client whose neighbors are unlike each other
    weight_C = strategy.weights(range(5))[:, 2]
    assert weight_C[1] == 0
    others = strategy.reliability_CK[[0, 2, 3, 4], 2]
    torch.testing.assert_close(weight_C[[0, 2, 3, 4]], others / others.sum())
    strategy.reliability_CK[:, 1] = 0  # a class that nobody trains on
    assert strategy.weights(range(5))[:, 1].tolist() == [0] * 5


@pytest.mark.parametrize(
    "settings",
    [
        {"class_weight": 0.0, "diversity_weight": 0.0},
        {"class_weight": 0.0},
        {"diversity_weight": 0.0},
        {"num_student_steps": 1},
        {"num_neighbors": 1},
    ],
)
def test_every_term_counts(settings, fit) -> None:
    runs = []
    for own in ({}, settings):
        strategy = FedTAD(num_iterations=2, num_pseudo_nodes=12, weight_decay=0.0, generator_lr=0.01, **own)
        fit(strategy, num_rounds=1)
        runs.append((strategy.generator.state_dict(), strategy.models))
    assert (runs[0][0]["layers.0.weight"] != runs[1][0]["layers.0.weight"]).any()
    assert (runs[0][1]["convs.0.weight"] != runs[1][1]["convs.0.weight"]).any()


def test_the_student_comes_nearer_to_the_reliable(fit) -> None:
    """One client is the only reliable one: the global model moves toward it."""

    class Believes(FedTAD):
        def weights(self, clients: Any) -> Tensor:
            return torch.eye(5)[2][list(clients)][:, None].expand(-1, 3)

    apart = []
    for steps in (0, 200):
        strategy = Believes(num_iterations=1, num_student_steps=steps, weight_decay=0.0, student_lr=3e-3)
        trainer = fit(strategy, dropout=0.0, num_rounds=1)
        state = trainer.run.executor.state().parameters
        batch = strategy.pseudo_graph(torch.arange(3).repeat(20), torch.randn(60, 32))
        client = trainer.run.strategy.federation.client.eval()
        one = {name: tensor[2] for name, tensor in state.items()}
        two = {name: tensor[0] for name, tensor in strategy.models.items()}
        with torch.no_grad():
            logits = [client.output(model, batch).logits for model in (one, two)]
        apart.append(float((logits[0] - logits[1]).abs().mean()))
    assert apart[1] < 0.5 * apart[0]


@both_executors
def test_labels_outside_the_training_nodes_are_not_used(executor, relabeled, fit, assert_same) -> None:
    sent = []
    for data in relabeled:
        sent.append(fit(FedTAD(num_iterations=1), executor, data).run.strategy.state_dict())
    assert_same(*sent)


def test_bytes(fit) -> None:
    strategy = FedTAD(num_iterations=1)
    history = fit(strategy, callbacks=CommunicationLedger()).run.history
    for number, row in enumerate(history):
        assert row["comm/bytes_down"] == 5 * 4 * MODEL
        assert row["comm/bytes_up"] == 5 * 4 * (MODEL + (0 if number else 3))  # the classes once


def unequal_clients() -> list[ClientGraph]:
    """Few training nodes are linked with their like, in client 0; the many of the others with the opposite class.

    What is validated and tested on is linked with its like everywhere, apart from the training nodes.
    """
    clients = []
    for client, num_train in enumerate((20, 60, 60)):
        draw = torch.Generator().manual_seed(client)
        num_nodes = num_train + 60
        place_N = torch.arange(num_nodes)
        y_N, trains_N = place_N % 2, place_N < num_train
        x_NF = 1.5 * torch.eye(6)[y_N] + 0.3 * torch.randn(num_nodes, 6, generator=draw)
        alike_NN = y_N[:, None] == y_N
        meant_NN = torch.where(trains_N & torch.tensor(client > 0), ~alike_NN, alike_NN)
        linked_NN = (torch.rand(num_nodes, num_nodes, generator=draw) < 0.5) & (trains_N[:, None] == trains_N)
        linked_NN = (linked_NN & meant_NN).triu(1)
        clients.append(
            ClientGraph(
                name=f"client-{client}",
                x_NF=x_NF,
                edge_index_2E=(linked_NN | linked_NN.T).nonzero().T,
                y_N=y_N,
                train_mask_N=trains_N,
                val_mask_N=~trains_N & (place_N % 4 < 2),
                test_mask_N=~trains_N & (place_N % 4 >= 2),
                node_idx_N=place_N,
            )
        )
    return clients


@both_executors
def test_who_is_reliable_is_believed(executor, given_clients, fit) -> None:
    data = given_clients(unequal_clients(), num_classes=2)
    strategy = FedTAD(student_lr=0.02, num_student_steps=20)
    actual = fit(strategy, executor, data, num_rounds=4, num_layers=1)
    averaged = fit(FedAvg(), executor, data, num_rounds=4, num_layers=1)
    assert (strategy.weights(range(3))[0] > 0.5).all()
    assert actual.run.selection.result["test/acc"] > averaged.run.selection.result["test/acc"] + 0.3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_iterations": -1}, r"strategy\.num_iterations must not be negative, got -1"),
        ({"num_neighbors": 0}, r"strategy\.num_neighbors must be at least 1, got 0"),
        ({"student_lr": -1.0}, r"strategy\.student_lr must not be negative, got -1\.0"),
    ],
)
def test_settings(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        FedTAD(**settings)


def test_a_class_without_pseudo_nodes_is_refused(fit) -> None:
    with pytest.raises(ValueError, match=r"strategy\.num_pseudo_nodes must be at least 3, one for each class, got 2"):
        fit(FedTAD(num_pseudo_nodes=2))
