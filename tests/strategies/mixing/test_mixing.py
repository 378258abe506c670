"""Rounds of the mixing family computed by hand: f_i(b, h) = mean of (b h x - y)^2 / 2 over a client's examples."""

import functools

import numpy as np
import pytest
import torch
from both_executors import both_executors
from torch import Tensor, nn
from torch.optim import SGD

from fl_lightning import ClientModule, FederatedTrainer, Participation, Payload, SequentialExecutor, StackedExecutor
from fl_lightning.data import ClientGraph
from fl_lightning.models import NetOutput
from fl_lightning.round.context import Context
from fl_lightning.strategies import FedAvg, FedAvgFinetune, FedPer, FedProx, Local
from fl_lightning.strategies.mixing.base import Mixing, WrongMixing, check_mixing, example_weights, mean_breadth
from fl_lightning.strategies.objectives import Proximal

RATE = 0.1
#: Training examples (x, y) of three clients: 1, 2 and 4 of them, both signs.
EXAMPLES = [[(2.0, 3)], [(-1.0, 2), (1.5, 1)], [(1.0, 0), (-2.0, 1), (0.5, 4), (3.0, 2)]]
TEST_EXAMPLES = [(1.0, 1), (-1.0, 3)]
SHARES = [1 / 7, 2 / 7, 4 / 7]
START = (1.0, 0.5)


class Product(nn.Module):
    """Logit b h x: one number of backbone, one of head."""

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.convs = nn.ParameterList([torch.tensor(START[0])])
        self.head = nn.ParameterList([torch.tensor(START[1])])

    def forward(self, batch) -> NetOutput:
        hidden_N1 = batch.propagated_x * self.convs[0]
        return NetOutput(hidden_N1 * self.head[0], hidden_N1)


class Regression(ClientModule):
    def _squares(self, output, batch) -> Tensor:
        return 0.5 * (output.logits[:, 0] - batch.y) ** 2

    def loss(self, output, batch) -> Tensor:
        return (self._squares(output, batch) * batch.train_mask).sum() / batch.train_mask.sum()

    def scores(self, output, batch) -> dict[str, tuple[Tensor, Tensor]]:
        squares_N = self._squares(output, batch)
        masks = {"val": batch.val_mask, "test": batch.test_mask}
        return {f"{split}/loss": ((squares_N * mask).sum(), mask.sum()) for split, mask in masks.items()}


def local_epochs(weights, examples, num_epochs, *, weight=0.0, anchor=(0.0, 0.0)) -> tuple[float, float]:
    """Gradient descent by hand; ``weight`` and ``anchor`` are those of FedProx."""
    b, h = weights
    for _ in range(num_epochs):
        residuals = [(b * h * x - y, x) for x, y in examples]
        gradient_b = sum(r * h * x for r, x in residuals) / len(examples) + weight * (b - anchor[0])
        gradient_h = sum(r * b * x for r, x in residuals) / len(examples) + weight * (h - anchor[1])
        b, h = b - RATE * gradient_b, h - RATE * gradient_h
    return b, h


def held_out_loss(b: float, h: float) -> float:
    return sum(0.5 * (b * h * x - y) ** 2 for x, y in TEST_EXAMPLES) / len(TEST_EXAMPLES)


@pytest.fixture
def regression(given_clients):
    graphs = []
    for name, examples in enumerate(EXAMPLES):
        rows = [*examples, *TEST_EXAMPLES, *TEST_EXAMPLES]
        split = torch.tensor([0] * len(examples) + [1, 1, 2, 2])
        graphs.append(
            ClientGraph(
                name=f"client-{name}",
                x_NF=torch.tensor([[x] for x, _ in rows]),
                edge_index_2E=torch.empty(2, 0, dtype=torch.int64),
                y_N=torch.tensor([y for _, y in rows]),
                train_mask_N=split == 0,
                val_mask_N=split == 1,
                test_mask_N=split == 2,
                node_idx_N=torch.arange(len(rows)),
            )
        )
    return given_clients(graphs, num_classes=1)


@pytest.fixture
def run(regression, make_trainer):
    """Runs a strategy; returns the trainer, each client's own (b, h) and the metrics."""

    def run(algorithm, executor=StackedExecutor, **settings) -> tuple[FederatedTrainer, Tensor, dict[str, float]]:
        model = Regression(Product, functools.partial(SGD, lr=RATE))
        trainer = make_trainer(
            **{"num_rounds": 2, "executor": executor(), "precision": "64-true", "monitor_mode": "min", **settings},
            monitor="val/loss",
        )
        trainer.fit(model, regression, algorithm)
        state = trainer.run.executor.state().parameters
        return trainer, torch.stack([state["convs.0"], state["head.0"]], dim=1), trainer.run.history[-1]

    return run


def mean(clients: list[tuple[float, float]]) -> tuple[float, float]:
    return tuple(sum(share * client[i] for share, client in zip(SHARES, clients, strict=True)) for i in range(2))


def global_model(trainer: FederatedTrainer) -> tuple[float, float]:
    models = trainer.run.strategy.models
    return float(models["convs.0"]), float(models["head.0"])


@both_executors
def test_fedavg_averages_by_training_examples(run, executor) -> None:
    expected = START
    for _ in range(2):
        clients = [local_epochs(expected, examples, 3) for examples in EXAMPLES]
        expected = mean(clients)

    trainer, own, metrics = run(FedAvg(num_epochs=3), executor)

    assert global_model(trainer) == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(own, torch.tensor(clients, dtype=torch.float64), rtol=1e-12, atol=0)
    assert metrics["test/loss"] == pytest.approx(held_out_loss(*expected), rel=1e-6)
    assert metrics["test/loss_std"] == pytest.approx(0, abs=1e-9)


@both_executors
def test_fedavg_finetune_evaluates_adapted_copies(run, executor) -> None:
    expected = START
    for _ in range(2):
        clients = [local_epochs(expected, examples, 1) for examples in EXAMPLES]
        expected = mean(clients)
    tuned = [local_epochs(expected, examples, 2) for examples in EXAMPLES]
    losses = [held_out_loss(*client) for client in tuned]

    trainer, own, metrics = run(FedAvgFinetune(num_epochs=1, num_finetune_epochs=2), executor)

    assert global_model(trainer) == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(own, torch.tensor(clients, dtype=torch.float64), rtol=1e-12, atol=0)
    assert metrics["test/loss"] == pytest.approx(sum(losses) / 3, rel=1e-6)
    assert metrics["test/loss_worst"] == pytest.approx(max(losses), rel=1e-6)
    assert metrics["global/test/loss"] == pytest.approx(held_out_loss(*expected), rel=1e-6)


@both_executors
def test_fedprox_pulls_toward_the_global_model(run, executor) -> None:
    expected = START
    for _ in range(2):
        clients = [local_epochs(expected, examples, 3, weight=0.7, anchor=expected) for examples in EXAMPLES]
        expected = mean(clients)

    trainer, own, _ = run(FedProx(num_epochs=3, proximal_weight=0.7), executor)
    _, unbound, _ = run(FedAvg(num_epochs=3), executor)

    assert global_model(trainer) == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(own, torch.tensor(clients, dtype=torch.float64), rtol=1e-12, atol=0)
    assert (own - unbound).abs().min() > 1e-3


def test_gradient_of_the_proximal_term() -> None:
    parameters = {"a": torch.tensor([1.0, -2.0], requires_grad=True), "b": torch.tensor([[3.0]], requires_grad=True)}
    anchor = {"a": torch.tensor([0.5, 1.0]), "b": torch.tensor([[-1.0]])}

    penalty = Proximal(0.3)(parameters, Context(anchor=anchor))
    penalty.backward()

    assert penalty.item() == pytest.approx(0.15 * (0.25 + 9 + 16))
    torch.testing.assert_close(parameters["a"].grad, 0.3 * torch.tensor([0.5, -3.0]))
    torch.testing.assert_close(parameters["b"].grad, 0.3 * torch.tensor([[4.0]]))


@both_executors
def test_fedper_keeps_the_heads_local(run, executor) -> None:
    b, heads = START[0], [START[1]] * 3
    for _ in range(2):
        clients = [local_epochs((b, h), examples, 2) for h, examples in zip(heads, EXAMPLES, strict=True)]
        b, heads = mean(clients)[0], [h for _, h in clients]
    losses = [held_out_loss(b, h) for h in heads]

    trainer, own, metrics = run(FedPer(num_epochs=2), executor)

    assert set(trainer.run.strategy.models) == {"convs.0"}
    assert float(trainer.run.strategy.models["convs.0"]) == pytest.approx(b, rel=1e-12)
    torch.testing.assert_close(own, torch.tensor(clients, dtype=torch.float64), rtol=1e-12, atol=0)
    assert own[:, 1].std() > 0.01
    assert metrics["test/loss"] == pytest.approx(sum(losses) / 3, rel=1e-6)
    assert metrics["test/loss_worst"] == pytest.approx(max(losses), rel=1e-6)


@both_executors
def test_local_clients_train_alone(run, executor) -> None:
    clients = [local_epochs(START, examples, 2 * 3) for examples in EXAMPLES]

    _, own, metrics = run(Local(num_epochs=3), executor)

    torch.testing.assert_close(own, torch.tensor(clients, dtype=torch.float64), rtol=1e-12, atol=0)
    assert metrics["test/loss"] == pytest.approx(sum(held_out_loss(*client) for client in clients) / 3, rel=1e-6)


def test_who_does_not_answer_does_not_count(run) -> None:
    participation = Participation(num_clients=2)
    chosen, dropped = participation.draw((0, 1, 2), 0, 0)
    trained = {client: local_epochs(START, EXAMPLES[client], 3) for client in chosen}
    total = sum(len(EXAMPLES[client]) for client in chosen)

    trainer, own, _ = run(FedAvg(num_epochs=3), participation=participation, num_rounds=1)

    assert (len(trained), dropped) == (2, [])
    for i in range(2):
        expected = sum(trained[client][i] * len(EXAMPLES[client]) for client in trained) / total
        assert global_model(trainer)[i] == pytest.approx(expected, rel=1e-12)
    (absent,) = {0, 1, 2} - set(trained)
    assert own[absent].tolist() == list(START)


class Circle(Mixing):
    """A personalized mixing: half of the own model, half of the next client's; ``identity`` keeps the own."""

    personalized = True

    def __init__(self, *, identity: bool) -> None:
        super().__init__(num_epochs=2)
        self.identity = identity

    def mixing_matrix(self, upload: Payload) -> Tensor:
        own = torch.eye(len(upload.clients))
        return own if self.identity else 0.5 * (own + own.roll(1, dims=1))


@both_executors
def test_personalized_mixing_gives_each_client_its_row(run, executor) -> None:
    models = [START] * 3
    for _ in range(2):
        own = [local_epochs(model, examples, 2) for model, examples in zip(models, EXAMPLES, strict=True)]
        models = [tuple(0.5 * (own[i][k] + own[(i + 1) % 3][k]) for k in range(2)) for i in range(3)]

    trainer, _, metrics = run(Circle(identity=False), executor)

    actual = torch.stack([trainer.run.strategy.models["convs.0"], trainer.run.strategy.models["head.0"]], dim=1)
    torch.testing.assert_close(actual, torch.tensor(models, dtype=torch.float64), rtol=1e-12, atol=0)
    assert metrics["test/loss"] == pytest.approx(sum(held_out_loss(*model) for model in models) / 3, rel=1e-6)
    # Each row has two halves: as broad as a uniform one over two of the three clients.
    assert [row["server/mixing_breadth"] for row in trainer.run.history] == pytest.approx([2 / 3] * 2)


def test_breadth_is_the_mean_over_parameters() -> None:
    alone, even = torch.eye(4), torch.full((4, 4), 0.25)
    uneven = torch.tensor([[0.5, 0.25, 0.25, 0.0]] * 4)

    assert mean_breadth(alone, ["a"]) == pytest.approx(1 / 4)
    assert mean_breadth(uneven, ["a"]) == pytest.approx(2**1.5 / 4)  # 1.5 bits
    assert mean_breadth({"convs.*": alone, "*": even}, ["convs.0", "convs.1", "head"]) == pytest.approx(1.5 / 3)
    with pytest.raises(ValueError, match="none of convs"):
        mean_breadth({"convs.*": alone}, ["head"])


def test_a_common_model_has_no_breadth(run) -> None:
    trainer, _, _ = run(FedAvg(num_epochs=1), SequentialExecutor)
    assert not any("server/mixing_breadth" in row for row in trainer.run.history)


@both_executors
@pytest.mark.parametrize(
    ("reduced", "plain"),
    [
        (functools.partial(FedProx, proximal_weight=0.0), FedAvg),
        (functools.partial(FedPer, personal=()), FedAvg),
        (functools.partial(Circle, identity=True), functools.partial(Local, num_epochs=2)),
    ],
    ids=["mu=0 is FedAvg", "nothing personal is FedAvg", "identity mixing is Local"],
)
def test_reductions(reduced, plain, executor, federation, make_model, make_trainer, assert_same) -> None:
    runs = []
    for build in (reduced, plain):
        trainer = make_trainer(
            executor=executor(), participation=Participation(fraction=0.6, straggler_probability=0.5)
        )
        trainer.fit(make_model(), federation, build())
        own = ("trained/", "server/")
        history = [{name: row[name] for name in row if not name.startswith(own)} for row in trainer.run.history]
        executor_now = trainer.run.executor
        last = executor_now.state().rows(sorted(executor_now.active))  # of others the server may keep the models
        runs.append((dict(last.tensors()), history))

    assert_same(runs[0], runs[1])


def test_shares_without_any_example_are_equal() -> None:
    def weights(*examples: int) -> list[float]:
        return example_weights(Payload(clients=(0, 1), num_examples=torch.tensor(examples))).tolist()

    assert weights(1, 3) == [0.25, 0.75]
    assert weights(0, 0) == [0.5, 0.5]


def test_unknown_parameter_pattern_names_the_parameters(run) -> None:
    with pytest.raises(ValueError, match=r"'classifier\.\*' matches none of the model's parameters: convs\.0, head\.0"):
        run(FedPer(personal=["classifier.*"]))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: FedAvg(num_epochs=-1), "strategy.num_epochs must not be negative, got -1"),
        (lambda: FedProx(proximal_weight=-0.1), "strategy.proximal_weight must not be negative"),
        (lambda: FedAvgFinetune(num_finetune_epochs=0), "strategy.num_finetune_epochs must be at least 1"),
    ],
)
def test_settings_out_of_range(build, message) -> None:
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize("returned", [None, np.ones((1, 3)) / 3], ids=["nothing", "an array"])
def test_a_mixing_matrix_of_another_type_is_refused(returned) -> None:
    kind = type(returned).__name__
    with pytest.raises(WrongMixing, match=rf"FedAvg.mixing_matrix returned a {kind} for 3 clients: return a tensor"):
        check_mixing(FedAvg(), returned, 3)
