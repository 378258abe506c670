"""Private training in both executors: the same gradients, the same account, and what is refused."""

import functools
import json

import pytest
import torch
from both_executors import both_executors
from private_examples import VectorData, vectors
from torch import nn
from torch.optim import SGD, Adam

from fl_lightning import ClientModule, FederatedTrainer, SequentialExecutor, StackedExecutor
from fl_lightning.batches.base import single
from fl_lightning.callbacks import FederatedCheckpoint, RunReport
from fl_lightning.executors import StageRequest, private
from fl_lightning.models import MLP, LinearModel
from fl_lightning.models.batch_norm import BatchNorm
from fl_lightning.round.privacy import KeyedNumbers, RecordPrivacy, epsilon_of
from fl_lightning.round.stage import Stage, StageAddress
from fl_lightning.run.failures import TooFewUpdates
from fl_lightning.strategies import (
    MOON,
    SCAFFOLD,
    Ditto,
    FedAvg,
    FedAvgFinetune,
    FedPer,
    FedProto,
    FedProx,
    Local,
    PFedMe,
)

#: Wide enough to clip nothing.
WIDE = 1e6
SIZES = (40, 24, 64)


def privately(noise: float = 1.0, norm: float = 1.0, **settings: float | None) -> RecordPrivacy:
    return RecordPrivacy(max_grad_norm=norm, noise_multiplier=noise, **settings)


def make_client(privacy: RecordPrivacy | None = None, *, optimizer=SGD, lr: float = 0.1, **net) -> ClientModule:
    net = {"hidden_channels": 5, "dropout": 0.25, **net}
    return ClientModule(functools.partial(MLP, **net), functools.partial(optimizer, lr=lr), privacy=privacy)


def trained(make_trainer, executor, strategy, client, sizes=SIZES, batch_size=4, **settings):
    trainer = make_trainer(executor=executor, **{"num_rounds": 2, **settings})
    trainer.fit(client, VectorData(vectors(sizes), batch_size), strategy)
    return trainer


def parameters_of(trainer: FederatedTrainer) -> dict[str, torch.Tensor]:
    return dict(trainer.run.executor.state().parameters)


STRATEGIES = {
    "FedAvg": FedAvg,
    "FedProx": functools.partial(FedProx, proximal_weight=0.5),
    "FedPer": FedPer,
    "Local": Local,
    "Ditto": Ditto,
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_both_executors_train_alike(name, make_trainer) -> None:
    actual = [
        trained(make_trainer, executor, STRATEGIES[name](num_epochs=2), make_client(privately()))
        for executor in (
            SequentialExecutor(),
            StackedExecutor(max_padding=0.9),
            StackedExecutor(max_clients_per_group=1),
        )
    ]

    for other in actual[1:]:
        for parameter, value in parameters_of(actual[0]).items():
            torch.testing.assert_close(parameters_of(other)[parameter], value, atol=2e-5, rtol=2e-5)
        assert other.run.history[-1]["epsilon"] == actual[0].run.history[-1]["epsilon"] > 0


@both_executors
def test_without_noise_and_clipping_it_is_plain_training_on_the_same_draws(executor, make_trainer, monkeypatch) -> None:
    settings = {"sizes": (40, 40, 40), "batch_size": 5}
    private_run = trained(make_trainer, executor(), FedAvg(num_epochs=2), _no_dropout(privately(0.0, WIDE)), **settings)

    def draws(batch, keys, repeat):
        return private.private_draws(batch, keys, KeyedNumbers())

    monkeypatch.setattr("fl_lightning.executors.sequential.draw_batches", draws)
    monkeypatch.setattr("fl_lightning.executors.group.draw_batches", draws)

    class Expected(ClientModule):
        """A loss over the examples that are expected, instead of those that were drawn."""

        def loss(self, output, batch):
            mean = super().loss(output, batch)
            return mean * batch.train_mask.sum(dim=-1) / getattr(batch, "expected", 1)

    client = Expected(functools.partial(MLP, hidden_channels=5, dropout=0.0), functools.partial(SGD, lr=0.1))
    plain = trained(make_trainer, executor(), FedAvg(num_epochs=2), client, **settings)

    for name, value in parameters_of(plain).items():
        torch.testing.assert_close(parameters_of(private_run)[name], value, atol=1e-5, rtol=1e-5)
    assert "epsilon" not in plain.run.history[-1]


def _no_dropout(privacy: RecordPrivacy) -> ClientModule:
    return make_client(privacy, dropout=0.0)


@both_executors
def test_no_example_moves_a_model_by_more_than_its_share(executor, make_trainer) -> None:
    clients = vectors((40, 40, 40))
    outlier = clients[0].x_NX.clone()
    outlier[0] = 1e4  # the first example trains
    changed = [clients[0].__class__(**{**vars(clients[0]), "x_NX": outlier}), *clients[1:]]

    def moved(clients) -> torch.Tensor:
        trainer = make_trainer(executor=executor(), num_rounds=1)
        client = make_client(privately(0.0, 0.5), lr=1.0, dropout=0.0)
        trainer.fit(client, VectorData(clients, None), Local(num_epochs=1))
        return torch.cat([value[0].flatten() for value in parameters_of(trainer).values()])

    distance = (moved(changed) - moved(clients)).norm().item()
    assert 0 < distance <= 2 * 0.5 / 20 * 1.001, "one of twenty gradients, each at most 0.5 long"


@both_executors
def test_the_noise_of_a_step_has_the_stated_size(executor, make_trainer) -> None:
    def weights(noise: float) -> torch.Tensor:
        client = ClientModule(functools.partial(LinearModel), functools.partial(SGD, lr=1.0), privacy=privately(noise))
        trainer = make_trainer(executor=executor(), num_rounds=1)
        trainer.fit(client, VectorData(vectors([40] * 8, num_features=400), None), Local(num_epochs=1))
        return torch.cat([value.flatten(1) for value in parameters_of(trainer).values()], dim=1)

    noise = weights(3.0) - weights(0.0)
    assert noise.std().item() == pytest.approx(3.0 / 20, rel=0.03)
    assert (torch.corrcoef(noise) - torch.eye(8)).abs().max() < 0.12, "each client has its own"


# ---------------------------------------------------------------- account


@both_executors
def test_epsilon_counts_the_steps_of_each_client(executor, make_trainer) -> None:
    trainer = trained(make_trainer, executor(), FedAvg(num_epochs=2), make_client(privately(delta=1e-4)), num_rounds=3)

    # 20, 12 and 32 training examples in batches of 4: 5, 3 and 8 steps an epoch
    for round_idx, row in enumerate(trainer.run.history):
        epochs = 2 * (round_idx + 1)
        expected = [epsilon_of({(4 / n, 1.0): epochs * n // 4}, 1e-4) for n in (20, 12, 32)]
        actual = [row[f"epsilon/client-{client}"] for client in range(3)]
        assert actual == pytest.approx(expected, rel=1e-9)
        assert row["epsilon"] == max(actual)


@pytest.mark.filterwarnings("ignore:client-")
@both_executors
def test_a_client_stops_before_its_bound(executor, make_trainer) -> None:
    # the second client has the fewest examples, so each of its steps costs most
    bound = epsilon_of({(4 / 12, 1.0): 6}, 1e-5) * 1.001
    client = make_client(privately(max_epsilon=bound))
    caught = r"client-1 failed in stage 'train' round 2: PrivacySpent: its privacy is spent: ε would be"
    with pytest.warns(UserWarning, match=caught):
        trainer = trained(make_trainer, executor(), FedAvg(num_epochs=1), client, num_rounds=4)

    rows = trainer.run.history
    assert [row["num_failures"] for row in rows[:3]] == [0, 0, 1]
    assert all(row["epsilon"] <= bound for row in rows)
    assert rows[1]["epsilon/client-1"] == rows[3]["epsilon/client-1"]
    assert rows[3]["epsilon/client-0"] >= rows[1]["epsilon/client-0"]


@pytest.mark.filterwarnings("ignore:client-", "ignore:all 3 clients")
@both_executors
def test_a_run_in_which_nobody_may_train_ends(executor, make_trainer) -> None:
    with (
        pytest.warns(UserWarning, match="failed in stage 'train' round 0"),
        pytest.raises(TooFewUpdates, match="its privacy is spent"),
    ):
        trained(make_trainer, executor(), FedAvg(num_epochs=1), make_client(privately(max_epsilon=1e-3)))


@both_executors
def test_stages_that_train_nothing_cost_nothing(executor, make_trainer) -> None:
    trainer = trained(make_trainer, executor(), FedAvg(num_epochs=0), make_client(privately()))
    assert trainer.run.history[-1]["epsilon"] == 0.0


@both_executors
def test_a_run_is_resumed_exactly(executor, make_trainer, tmp_path, assert_same) -> None:
    def fit(num_rounds: int, ckpt_path: str | None = None) -> FederatedTrainer:
        trainer = make_trainer(executor=executor(), num_rounds=num_rounds, callbacks=[FederatedCheckpoint()])
        client = make_client(privately(), optimizer=Adam, lr=0.01)
        trainer.fit(client, VectorData(vectors(SIZES), 4), FedPer(num_epochs=1), ckpt_path=ckpt_path)
        return trainer

    whole = fit(4)
    fit(2)
    rest = fit(4, ckpt_path="last")

    assert_same(dict(rest.run.executor.state().tensors()), dict(whole.run.executor.state().tensors()))
    assert [row["epsilon"] for row in rest.run.history] == [row["epsilon"] for row in whole.run.history]


def test_clients_of_different_architectures(make_trainer) -> None:
    nets = [functools.partial(MLP, hidden_channels=5), functools.partial(MLP, hidden_channels=7)]

    def fit(executor):
        client = ClientModule(nets, functools.partial(SGD, lr=0.1), privacy=privately())
        return trained(make_trainer, executor, Local(num_epochs=1), client)

    one, many = fit(SequentialExecutor()), fit(StackedExecutor())
    for name, value in parameters_of(one).items():
        torch.testing.assert_close(parameters_of(many)[name], value, atol=1e-5, rtol=1e-5)
    assert one.run.history[-1]["epsilon/client-1"] == many.run.history[-1]["epsilon/client-1"] > 0


# ---------------------------------------------------------------- what cannot be private


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (FedProto, "FedProto, whose stage 'train' sends class, made of the examples without noise"),
        (SCAFFOLD, "SCAFFOLD, whose stage 'train' sends gradients"),
        (MOON, "MOON, whose stage 'train' remembers"),
        (PFedMe, "PFedMe, whose stage 'train' takes several steps on one draw"),
        (FedAvgFinetune, "FedAvgFinetune, which trains models before they are evaluated"),
    ],
)
def test_strategies_that_tell_more_than_gradients_are_refused(strategy, message, make_trainer) -> None:
    with pytest.raises(ValueError, match=message):
        trained(make_trainer, StackedExecutor(), strategy(num_epochs=1), make_client(privately()))


def test_graphs_are_refused(make_trainer, federation, make_model) -> None:
    client = make_model()
    client.privacy = privately()
    with pytest.raises(ValueError, match="independent examples, but these have graphs: a node enters"):
        make_trainer(num_rounds=1).fit(client, federation, FedAvg())


class Normed(nn.Module):
    """A net with a layer over examples."""

    def __init__(self, in_features: int, num_outputs: int, norm) -> None:
        super().__init__()
        self.norm, self.head = norm(in_features), nn.Linear(in_features, num_outputs)

    def forward(self, batch):
        x = self.norm(batch.x, batch.example_mask) if isinstance(self.norm, BatchNorm) else self.norm(batch.x)
        return self.head(x)


@pytest.mark.parametrize("norm", [BatchNorm, nn.BatchNorm1d])
@pytest.mark.filterwarnings("ignore:.*clients are run one after another")
def test_statistics_over_examples_are_refused(norm, make_trainer) -> None:
    client = ClientModule(functools.partial(Normed, norm=norm), privacy=privately())
    with pytest.raises(ValueError, match=r"model.net has BatchNorm\w*, whose statistics are over examples"):
        trained(make_trainer, StackedExecutor(), FedAvg(), client)


def test_layers_over_the_features_of_an_example_are_not(make_trainer) -> None:
    client = ClientModule(functools.partial(Normed, norm=nn.LayerNorm), privacy=privately())
    assert trained(make_trainer, StackedExecutor(), FedAvg(num_epochs=1), client).run.history[-1]["epsilon"] > 0


class OwnStep(ClientModule):
    """A client with a step of its own."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)


class Branching(ClientModule):
    """A loss that asks for a value."""

    def loss(self, output, batch):
        return super().loss(output, batch) * (1 if output.logits.sum().item() > 0 else 2)


class OfOwnNet(ClientModule):
    """A term whose gradient is not with respect to the parameters that the loss is given."""

    def loss(self, output, batch):
        return super().loss(output, batch) + sum(p.square().sum() for p in self.parameters())


class OfParameters(ClientModule):
    """The same term, of the parameters that are given."""

    def objective(self, parameters, batch, context):
        return super().objective(parameters, batch, context) + sum(p.square().sum() for p in parameters.values())


@pytest.mark.parametrize("executor", [SequentialExecutor, StackedExecutor])
def test_a_term_of_the_given_parameters_has_its_gradient(executor, make_trainer) -> None:
    def norm(kind) -> float:
        client = kind(functools.partial(MLP, hidden_channels=5), privacy=privately(0.0, 1e3))
        run = trained(make_trainer, executor(), FedAvg(num_epochs=5), client).run
        return float(sum(each.square().sum() for each in run.executor.state().parameters.values()))

    assert norm(OfParameters) < 0.9 * norm(ClientModule)


class OfContext(ClientModule):
    """An annealed pull to where the stage began, by the context that a client has."""

    def objective(self, parameters, batch, context):
        pull = sum((p - self.context.anchor[name]).square().sum() for name, p in parameters.items())
        return super().objective(parameters, batch, context) / (1 + self.context.step) + 30 * pull


def test_a_private_loss_may_read_the_context(make_trainer, assert_same) -> None:
    """An own objective that read the anchor was refused, as it had none when it was tried."""

    def parameters(kind, executor) -> dict[str, torch.Tensor]:
        client = kind(functools.partial(MLP, hidden_channels=5), privacy=privately(0.0, 1e3))
        return parameters_of(trained(make_trainer, executor(), FedAvg(num_epochs=5), client))

    mine = parameters(OfContext, StackedExecutor)
    assert_same(mine, parameters(OfContext, SequentialExecutor), tolerance=1e-5)
    plain = parameters(ClientModule, StackedExecutor)
    assert any(not torch.allclose(each, plain[name], atol=1e-3) for name, each in mine.items())


@pytest.mark.filterwarnings("ignore:.*clients are run one after another")
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (OfOwnNet, "OfOwnNet computes .*, but its loss is computed from self.net or self.parameters"),
        (OwnStep, "OwnStep overrides training_step: override loss or objective instead"),
        (Branching, "model.privacy needs the gradient of each example, which Branching with model.net does not have"),
    ],
)
def test_code_without_a_gradient_of_each_example_is_refused(kind, message, make_trainer) -> None:
    client = kind(functools.partial(MLP, hidden_channels=5), privacy=privately())
    with pytest.raises(ValueError, match=message):
        trained(make_trainer, StackedExecutor(), FedAvg(), client)


@pytest.mark.filterwarnings("ignore:resumed with other settings")
def test_other_noise_is_no_resume(make_trainer) -> None:
    def fit(noise: float, ckpt_path: str | None = None, **settings: bool) -> FederatedTrainer:
        trainer = make_trainer(num_rounds=2 if ckpt_path is None else 3, callbacks=[FederatedCheckpoint()])
        data = VectorData(vectors(SIZES), 4)
        trainer.fit(make_client(privately(noise)), data, FedAvg(num_epochs=1), ckpt_path=ckpt_path, **settings)
        return trainer

    path = str(fit(1.0).run.folder / "checkpoints" / "last.ckpt")
    with pytest.raises(ValueError, match=r"privacy.noise_multiplier: 1.0 then, 2.0 now"):
        fit(2.0, path)
    caught = "it has taken .* steps with sampling probability .* and noise multiplier 1"
    with pytest.warns(UserWarning, match=caught):
        trainer = fit(2.0, path, resume_with_changes=True)
    assert trainer.run.history[-1]["num_failures"] == 3
    assert trainer.run.history[-1]["failed_round"]


def test_a_report_has_no_embeddings_of_single_examples(make_trainer) -> None:
    trainer = trained(
        make_trainer, StackedExecutor(), FedAvg(num_epochs=1), make_client(privately()), callbacks=[RunReport()]
    )
    caught = json.loads((trainer.run.folder / "report.json").read_text())
    assert "embeddings are of single examples, which model.privacy hides" in json.dumps(caught)


def test_a_stage_of_a_callbacks_is_refused(make_trainer) -> None:
    trainer = trained(make_trainer, StackedExecutor(), FedAvg(num_epochs=1), make_client(privately()))
    stage = Stage(name="look", client_outputs={"x": lambda client, parameters, batch, context: batch.x.sum()})
    request = StageRequest(
        stage=stage, address=StageAddress(phase="callback", round_idx=0, name="look"), work_fraction={0: 1.0}
    )
    with pytest.raises(ValueError, match="does not cover this run, whose stage 'look' sends x"):
        trainer.run.executor.run(request)


# ---------------------------------------------------------------- learning


def test_a_private_net_learns(make_trainer) -> None:
    client = ClientModule(
        functools.partial(MLP, hidden_channels=16, dropout=0.0),
        functools.partial(SGD, lr=0.5),
        privacy=privately(1.0, 1.0, delta=1e-4, max_epsilon=8.0),
    )
    trainer = make_trainer(num_rounds=12)
    trainer.fit(client, VectorData(vectors([400] * 4), 20), FedAvg(num_epochs=1))

    last = trainer.run.history[-1]
    assert last["num_failures"] == 0
    assert 4 < last["epsilon"] <= 8
    assert last["test/acc"] > 0.8, "a third is chance"


def test_a_batch_is_the_clients_alone() -> None:
    """A drawn batch holds training examples and nothing else."""
    data = VectorData(vectors([16]), 4)
    batch = single(data.collator(data.clients, device=torch.device("cpu"), dtype=torch.float32)([0]))
    for drawn in private.private_draws(batch, torch.arange(50), KeyedNumbers()):
        assert not (drawn.val_mask | drawn.test_mask).any()
        held = batch.x[batch.train_mask]
        assert (drawn.x[drawn.train_mask][:, None] == held).all(dim=-1).any(dim=1).all()
