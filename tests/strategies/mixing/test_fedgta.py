"""FedGTA: moments and confidence by hand, who is accepted, what it reduces to, and clients in groups."""

import dataclasses
from typing import Any

import pytest
import torch
from both_executors import both_executors
from grouped_clients import grouped_clients
from torch import Tensor

from fl_lightning import Participation, Payload, SequentialExecutor
from fl_lightning.batches.graphs import GraphCollator
from fl_lightning.callbacks import CommunicationLedger
from fl_lightning.data import ClientGraph
from fl_lightning.federation import Federation
from fl_lightning.models.output import NetOutput
from fl_lightning.round.context import Context
from fl_lightning.strategies import FedAvg, FedGTA, Local

BUSY = {"num_clients": 3, "dropout_probability": 0.2, "straggler_probability": 0.5}


@pytest.fixture
def fit(federation, make_model, make_trainer):
    """Run on the graphs."""

    def run(strategy, executor=SequentialExecutor, data=None, **settings):
        trainer = make_trainer(executor=executor(), seed=1, **settings)
        trainer.fit(make_model(dropout=0.5), data or federation, strategy)
        return trainer

    return run


def path(train: tuple[int, ...] = (0,)) -> ClientGraph:
    """The path 0-1-2-3 with two classes."""
    mask_N = torch.tensor([node in train for node in range(4)])
    return ClientGraph(
        name="client-0",
        x_NF=torch.eye(4),
        edge_index_2E=torch.tensor([[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]]),
        y_N=torch.zeros(4, dtype=torch.int64),
        train_mask_N=mask_N,
        val_mask_N=~mask_N,
        test_mask_N=torch.zeros_like(mask_N),
        node_idx_N=torch.arange(4),
    )


class Predicts:
    """Stands for a client whose logits are given."""

    def __init__(self, logits_NK: Tensor) -> None:
        self.logits_NK = logits_NK

    def output(self, parameters: Any, batch: Any) -> NetOutput:
        return NetOutput(self.logits_NK, self.logits_NK)


LOGITS = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 0.0], [0.0, 2.0]], dtype=torch.float64)


def described(strategy: FedGTA, graph: ClientGraph, logits: Tensor, *, padding: int = 0) -> dict[str, Tensor]:
    """What a client sends, from a batch with so many nodes of padding."""
    batch = GraphCollator([graph, wider(graph, padding)], device=torch.device("cpu"), dtype=torch.float64)([0, 1])
    logits = torch.cat([logits, torch.full((padding, 2), 5.0, dtype=torch.float64)])

    def one(tensors: Any) -> dict[str, Tensor]:
        return strategy.describe(Predicts(logits), {}, batch.replace(tensors), Context())  # type: ignore[arg-type]

    return {name: tensor[0] for name, tensor in torch.vmap(one)(batch.tensors()).items()}


def wider(graph: ClientGraph, count: int) -> ClientGraph:
    """The graph with more nodes, which nothing is known of."""
    nobody = torch.zeros(count, dtype=torch.bool)
    masks = {name: torch.cat([value, nobody]) for name, value in vars(graph).items() if "mask" in name}
    x_NF = torch.cat([graph.x_NF, torch.ones(count, 4)])
    y_N = torch.cat([graph.y_N, torch.ones(count, dtype=torch.int64)])
    return dataclasses.replace(graph, x_NF=x_NF, y_N=y_N, node_idx_N=torch.arange(4 + count), **masks)


@pytest.mark.parametrize("padding", [0, 3])
def test_moments_and_confidence_of_a_path(padding) -> None:
    actual = described(FedGTA(num_propagations=2, num_moments=2), path(), LOGITS, padding=padding)
    expected = [0.63022623, 0.36977377, 0.45379388, 0.19334142, 0, 0, 0.05660878, 0.05660878]
    torch.testing.assert_close(actual["moments"], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-7)
    assert actual["confidence"].item() == pytest.approx(0.94919852, abs=1e-7)


def test_known_labels_alone_are_certain() -> None:
    actual = described(FedGTA(), path((0, 1, 2, 3)), LOGITS)
    assert actual["confidence"].item() == pytest.approx(4.41455329, abs=1e-6)  # 2 / e · 6


@pytest.mark.parametrize("normalize", ["softmax", "rows"])
def test_moments_are_of_a_distribution(normalize) -> None:
    kinds = ("raw", "central", "hybrid")
    raw, central, hybrid = (
        described(FedGTA(num_moments=3, normalize=normalize, moments=kind), path(), LOGITS)["moments"] for kind in kinds
    )
    assert torch.equal(hybrid, torch.cat([raw, central]))
    assert raw[:2].sum().item() == pytest.approx(1)
    assert (raw.view(3, 2).diff(dim=0) < 0).all()
    torch.testing.assert_close(central[:2], torch.zeros(2).double(), rtol=0, atol=1e-12)


def test_moments_do_not_depend_on_the_order_of_the_nodes() -> None:
    graph, order = path(), torch.tensor([2, 0, 3, 1])
    index = order.argsort()
    fields = {n: v[order] for n, v in vars(graph).items() if isinstance(v, Tensor) and n != "edge_index_2E"}
    mixed = ClientGraph(name="m", edge_index_2E=index[graph.edge_index_2E], **fields)
    first, second = described(FedGTA(), graph, LOGITS), described(FedGTA(), mixed, LOGITS[order])
    for name, value in first.items():
        torch.testing.assert_close(second[name], value)


@both_executors
def test_labels_outside_the_training_nodes_are_not_used(executor, relabeled, fit, assert_same) -> None:
    sent = []
    for data in relabeled:
        sent.append(fit(FedGTA(), executor, data).run.strategy.state_dict())
    assert_same(*sent)


def server(**settings: Any) -> FedGTA:
    strategy = FedGTA(num_moments=1, moments="raw", **settings)
    known = {"num_features": 2, "seed": 0, "device": torch.device("cpu"), "num_outputs": 2}
    start = {"w": torch.zeros(1)}
    strategy.setup(Federation(num_clients=4, training_clients=(0, 1, 2), parameters=start, **known))
    return strategy


def answer(clients: tuple[int, ...] = (0, 1, 2), confidence: tuple[float, ...] = (1.0, 2.0, 3.0)) -> Payload:
    moments = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0], [0.1, 1.0]])[list(clients)]
    return Payload(
        clients=clients,
        parameters={"w": torch.tensor([[3.0], [6.0], [9.0], [0.0]])[list(clients)]},
        extras={"topology/moments": moments, "topology/confidence": torch.tensor(confidence)},
        num_examples=torch.tensor([1, 1, 2, 2])[list(clients)],
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"threshold": 0.6}, [[1 / 3, 2 / 3, 0], [1 / 6, 1 / 3, 1 / 2], [0, 0.4, 0.6]]),
        ({"threshold": 1.0}, [[1, 0, 0], [0, 1, 0], [0, 0, 1]]),
        ({"threshold": -1.0}, [[1 / 6, 1 / 3, 1 / 2]] * 3),
        ({"threshold": -1.0, "weighting": "examples"}, [[1 / 4, 1 / 4, 1 / 2]] * 3),
        ({"threshold": 0.6, "weighting": "equal"}, [[1 / 2, 1 / 2, 0], [1 / 3] * 3, [0, 1 / 2, 1 / 2]]),
    ],
)
def test_who_is_accepted(settings, expected) -> None:
    strategy = server(**settings)
    strategy.aggregate(strategy.training(0), answer())
    matrix = strategy.mixing_matrix(answer())
    expected_CC = torch.tensor(expected).float()
    torch.testing.assert_close(matrix, expected_CC)
    torch.testing.assert_close(strategy.models["w"][:3], expected_CC @ torch.tensor([[3.0], [6.0], [9.0]]))


def test_without_any_confidence_the_weights_are_equal() -> None:
    strategy = server(threshold=-1.0)
    strategy.aggregate(strategy.training(0), answer(confidence=(0.0, 0.0, 0.0)))
    torch.testing.assert_close(strategy.models["w"][:3], torch.full((3, 1), 6.0))


def test_an_unseen_client_has_the_models_of_those_like_it() -> None:
    strategy = server(threshold=0.9)
    strategy.aggregate(strategy.training(0), answer())
    torch.testing.assert_close(strategy.mixed_models((3,)).parameters["w"], torch.tensor([[7.0]]))  # of all
    strategy.onboard(strategy.training(0), answer((3,), (1.0,)))
    torch.testing.assert_close(strategy.mixed_models((1, 3)).parameters["w"], torch.tensor([[6.0], [9.0]]))
    assert strategy.metrics()["server/accepted_clients"] == 0


@both_executors
def test_accepting_all_by_examples_is_fedavg(executor, fit, assert_same) -> None:
    averaged = fit(FedAvg(), executor, precision="64-true")
    strategy = fit(FedGTA(threshold=-1.0, weighting="examples"), executor, precision="64-true")
    assert_same(strategy.run.executor.state().tensors(), averaged.run.executor.state().tensors(), tolerance=1e-10)


@both_executors
def test_accepting_nobody_is_local(executor, fit, assert_same) -> None:
    busy = Participation(**BUSY)
    alone = fit(Local(), executor, participation=busy).run.executor
    own = fit(FedGTA(threshold=1.0), executor, participation=busy).run.executor
    last = sorted(own.active)  # of the others the server keeps the models
    assert_same(*(dict(clients.state().rows(last).tensors()) for clients in (own, alone)))


@both_executors
def test_groups_that_contradict_each_other_are_reported_apart(executor, given_clients, fit) -> None:
    data = given_clients(grouped_clients(), num_classes=4)
    strategy = FedGTA(threshold=0.7)
    actual = fit(strategy, executor, data, num_rounds=15)
    averaged = fit(FedAvg(), executor, data, num_rounds=15)
    together = strategy.accepted_weights(range(6), range(6)) > 0
    assert together.tolist() == [[(i - j) % 2 == 0 for j in range(6)] for i in range(6)]
    assert actual.run.selection.result["test/acc"] > averaged.run.selection.result["test/acc"] + 0.2
    assert actual.run.history[-1]["server/accepted_clients"] == 2


def test_bytes(fit) -> None:
    history = fit(FedGTA(num_moments=4), callbacks=CommunicationLedger()).run.history
    model = 6 * 8 + 8 + 8 * 8 + 8 + 8 * 3 + 3
    for row in history:
        assert row["comm/bytes_down"] == 5 * 4 * model
        assert row["comm/bytes_up"] == 5 * 4 * (model + 2 * 3 * 4 + 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"threshold": 1.5}, r"strategy\.threshold must be in \[-1, 1\], got 1\.5"),
        ({"num_moments": 0}, r"strategy\.num_moments must be at least 1, got 0"),
        ({"propagation_share": -0.5}, r"strategy\.propagation_share must be in \[0, 1\], got -0\.5"),
        ({"temperature": 0}, r"strategy\.temperature must be positive, got 0"),
        ({"moments": "all"}, r"strategy\.moments must be 'hybrid' or 'raw' or 'central', got 'all'"),
    ],
)
def test_settings(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        FedGTA(**settings)
