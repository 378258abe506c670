"""Clients whose nets have running statistics: both executors, checkpoints, what is communicated, who is refused."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from both_executors import both_executors
from saving import SavesAfter
from torch import nn
from torch.optim import SGD

from fl_lightning import Callback, ClientModule, Participation, SequentialExecutor, StackedExecutor
from fl_lightning.batches.graphs import GraphBatch
from fl_lightning.callbacks import CommunicationLedger
from fl_lightning.models import NormalizedGCN
from fl_lightning.models.batch_norm import STATISTICS
from fl_lightning.models.output import NetOutput
from fl_lightning.relations.topology import Complete
from fl_lightning.strategies import (
    APFL,
    DPSGD,
    MOON,
    SCAFFOLD,
    Ditto,
    FedAvg,
    FedAvgFinetune,
    FedBN,
    FedDyn,
    FedProto,
    FedRep,
    FedTAD,
    Local,
    PFedHN,
    PFedMe,
)

BUSY = {"num_clients": 4, "dropout_probability": 0.2, "straggler_probability": 0.5}


class TorchNet(nn.Module):
    """A linear layer and PyTorch's batch normalization."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(in_features, 8), nn.BatchNorm1d(8)
        self.head = nn.Linear(8, out_features)

    def forward(self, batch: GraphBatch) -> NetOutput:
        """Return logits and embeddings of all nodes of one client."""
        h_ND = self.norm(self.layer(batch.propagated_x))
        return NetOutput(self.head(h_ND.relu()), h_ND)


@pytest.fixture
def fit(federation, make_model, make_trainer):
    """Run on the graphs with a net that normalizes."""

    def run(strategy, executor=StackedExecutor, *, shared=False, net=None, rate=None, ckpt_path=None, **settings):
        trainer = make_trainer(executor=executor(), **{"seed": 1, "precision": "64-true", **settings})
        base = make_model()
        kind = "shared" if shared else "personal"
        net = net or functools.partial(NormalizedGCN, hidden_channels=8)
        optimizer = base.optimizer_factory if rate is None else functools.partial(SGD, lr=rate)
        model = ClientModule(net, optimizer, running_statistics=kind)
        trainer.fit(model, federation, strategy, ckpt_path=ckpt_path)
        return trainer

    return run


CASES = [
    (FedAvg, {}, True),
    (FedAvg, {}, False),
    (FedBN, {}, False),
    (FedAvgFinetune, {}, True),
    (FedRep, {"num_head_epochs": 1}, True),
    (MOON, {}, False),
    (Ditto, {}, False),
    (FedProto, {}, False),
    (PFedMe, {}, False),
    (SCAFFOLD, {}, False),
    (PFedHN, {}, False),
    (DPSGD, {"topology": Complete()}, False),
]


def called(case: Any) -> str:
    """A case's part in a test's name, the same in every process."""
    return " and ".join(case) if isinstance(case, dict) else getattr(case, "__name__", str(case))


@pytest.mark.parametrize(("kind", "settings", "shared"), CASES, ids=called)
def test_executors_agree(kind, settings, shared, fit, assert_same) -> None:
    runs = []
    for executor in (
        SequentialExecutor,
        functools.partial(StackedExecutor, max_padding=0.8),
        functools.partial(StackedExecutor, max_clients_per_group=2),
    ):
        trainer = fit(kind(**settings), executor, shared=shared, participation=Participation(**BUSY), num_rounds=4)
        runs.append((trainer.run.executor.state(), trainer.run.strategy.state_dict(), trainer.run.history))
    for other in runs[1:]:
        assert_same(other[0].parameters, runs[0][0].parameters, tolerance=1e-9)
        assert_same(other[1], runs[0][1], tolerance=1e-9)
        assert_same(other[2], runs[0][2], tolerance=1e-6)
    moved = [name for name in runs[0][0].parameters if "running" in name]
    assert moved
    for name in moved:
        table = runs[0][0].parameters[name]
        assert (table != (1 if name.endswith("var") else 0)).any()


@both_executors
@pytest.mark.parametrize("shared", [True, False])
def test_resuming_is_exact(shared, executor, fit, assert_same, tmp_path) -> None:
    settings = {"participation": Participation(**BUSY), "shared": shared, "precision": "32-true"}
    whole = fit(FedAvg(), executor, num_rounds=4, **settings)
    path = tmp_path / "v" / "two.ckpt"
    fit(FedAvg(), executor, num_rounds=2, callbacks=SavesAfter(2, path), **settings)
    resumed = fit(FedAvg(), executor, num_rounds=4, ckpt_path=str(path), **settings)
    assert_same(dict(resumed.run.executor.state().tensors()), dict(whole.run.executor.state().tensors()))
    assert_same(resumed.run.history, whole.run.history)


@both_executors
def test_shared_statistics_are_averaged_and_personal_ones_stay(executor, fit) -> None:
    shared, personal = (fit(FedAvg(weighting="equal"), executor, shared=each, num_rounds=1) for each in (True, False))
    assert set(shared.run.strategy.models) - set(personal.run.strategy.models) == {
        f"norms.{layer}.running_{kind}" for layer in (0, 1) for kind in ("mean", "var")
    }
    own = shared.run.executor.state().parameters["norms.1.running_var"]
    torch.testing.assert_close(shared.run.strategy.models["norms.1.running_var"][0], own.mean(dim=0))
    assert not torch.equal(own[0], own[1])


@both_executors
def test_a_pull_leaves_the_statistics_alone(executor, fit) -> None:
    """Both models see the same examples with the same weights, of which the pull then moves the personal ones."""
    net = functools.partial(NormalizedGCN, hidden_channels=8, dropout=0.0)
    strategy = Ditto(proximal_weight=5.0, decoupled=True, num_epochs=1)
    state = fit(strategy, executor, net=net, num_rounds=1).run.executor.state().parameters
    for name in STATISTICS:
        torch.testing.assert_close(state[f"personal.norms.0.{name}"], state[f"shared.norms.0.{name}"])


@both_executors
def test_a_return_to_the_anchor_leaves_the_statistics_alone(executor, fit) -> None:
    found = []
    for start in ("previous", "anchor"):
        strategy = PFedMe(inner_start=start, proximal_weight=0.0, num_inner_steps=1, num_epochs=4)
        net = functools.partial(NormalizedGCN, hidden_channels=8, dropout=0.0)
        found.append(fit(strategy, executor, net=net, rate=0.0, num_rounds=1).run.executor.state().parameters)
    for name in STATISTICS:
        torch.testing.assert_close(found[1][f"norms.0.{name}"], found[0][f"norms.0.{name}"])
        assert not (found[0][f"norms.0.{name}"] == float(name == "running_var")).all()


def test_bytes(fit) -> None:
    numbers = 6 * 8 + 8 * 8 + 8 * 3 + 3
    affine, statistics = 2 * 2 * 8, 2 * 2 * 8
    for strategy, shared, each in (
        (FedAvg(), True, numbers + affine + statistics),
        (FedAvg(), False, numbers + affine),
        (FedBN(), True, numbers),
        (FedBN(), False, numbers),
    ):
        row = fit(strategy, shared=shared, callbacks=CommunicationLedger(), precision="32-true").run.history[-1]
        assert row["comm/bytes_up"] == row["comm/bytes_down"] == 5 * 4 * each
    row = fit(DPSGD(topology=Complete()), callbacks=CommunicationLedger(), precision="32-true").run.history[-1]
    assert row["comm/bytes_peer"] == 5 * 4 * 4 * (numbers + affine)


@pytest.mark.filterwarnings("ignore:client-.. failed")
@both_executors
def test_a_client_that_fails_has_the_statistics_that_it_began_with(executor, fit, federation) -> None:
    class Fails(Callback):
        needs_data = True

        def on_clients(self, trainer, clients):
            broken = dataclasses.replace(clients[2], x_NF=clients[2].x_NF * float("inf"))
            return (*clients[:2], broken, *clients[3:])

    trainer = fit(Local(), executor, callbacks=Fails())
    state = trainer.run.executor.state().parameters
    for layer in (0, 1):
        assert state[f"norms.{layer}.running_mean"][2].tolist() == [0] * 8
        assert state[f"norms.{layer}.running_var"][2].tolist() == [1] * 8
        assert (state[f"norms.{layer}.running_mean"][1] != 0).all()


def test_pytorchs_layers_are_run_one_client_after_another(fit, assert_same) -> None:
    with pytest.warns(UserWarning, match=r"model\.net has torch\.nn's BatchNorm or InstanceNorm, which would count"):
        handed_over = fit(FedAvg(), StackedExecutor, net=TorchNet, shared=True)
    assert isinstance(handed_over.run.executor, SequentialExecutor)
    sequential = fit(FedAvg(), SequentialExecutor, net=TorchNet, shared=True)
    assert_same(handed_over.run.history, sequential.run.history)
    assert sequential.run.history[-1]["train/loss"] < sequential.run.history[0]["train/loss"]
    assert "norm.running_var" in sequential.run.strategy.models
    assert (sequential.run.strategy.models["norm.running_mean"] != 0).all()


@pytest.mark.parametrize(
    ("strategy", "shared", "net", "message"),
    [
        (APFL(), False, None, "APFL computes with models that have no running statistics"),
        (FedTAD(), False, None, "FedTAD computes with models that have no running statistics"),
        (
            FedDyn(),
            True,
            None,
            r"model\.running_statistics is 'shared', but FedDyn does more with models than",
        ),
        (FedAvg(), True, "plain", r"model\.running_statistics is 'shared', but model\.net has none: leave it out"),
        (FedBN(), False, "plain", "FedBN keeps normalization layers local, but GCN has none"),
    ],
)
def test_what_is_refused(strategy, shared, net, message, fit, make_model) -> None:
    net = make_model().net_factories[0] if net == "plain" else None
    with pytest.raises(ValueError, match=message):
        fit(strategy, shared=shared, net=net)


def test_an_unknown_setting() -> None:
    with pytest.raises(ValueError, match=r"model\.running_statistics must be 'personal' or 'shared', got 'both'"):
        ClientModule(running_statistics="both")  # type: ignore[arg-type]
