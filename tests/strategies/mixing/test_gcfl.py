"""GCFL and GCFL+: when a cluster is cut, and who is in which."""

import functools
from typing import Any

import pytest
import torch
from both_executors import both_executors
from grouped_clients import grouped_clients
from saving import SavesAfter
from task_data import graphs_of
from torch.optim import SGD

from fl_lightning import (
    ClientModule,
    FederatedDataModule,
    Participation,
    Payload,
    SequentialExecutor,
    StackedExecutor,
)
from fl_lightning.callbacks import CommunicationLedger
from fl_lightning.federation import Federation
from fl_lightning.models import PooledGCN
from fl_lightning.relations.minimum_cut import minimum_cut
from fl_lightning.strategies import GCFL, FedAvg, FedPer, GCFLPlus

OPEN = {"mean_threshold": 1e9, "max_threshold": 0.0, "warmup_rounds": 0}
both_kinds = pytest.mark.parametrize("kind", [GCFL, GCFLPlus])


@pytest.fixture
def fit(federation, make_model, make_trainer):
    """Run on the graphs."""

    def run(strategy, executor=SequentialExecutor, data=None, model=None, **settings):
        trainer = make_trainer(executor=executor(), seed=1, **settings)
        trainer.fit(model or make_model(dropout=0.5), data or federation, strategy)
        return trainer

    return run


# ------------------------------------------------------------------ cut and warping


def test_opposed_updates_are_cut_apart() -> None:
    strategy = server()
    strategy.server["update"][:4, 0] = torch.tensor([1.0, -1.0, 1.0, -1.0])
    similarity_CC = strategy.similarity(range(4))
    assert similarity_CC[0].tolist() == [2, 0, 2, 0]
    assert minimum_cut(similarity_CC).tolist() == [False, True, False, True]
    strategy.server["update"] *= 7
    torch.testing.assert_close(strategy.similarity(range(4)), similarity_CC)


@pytest.mark.parametrize("standardize", [False, True])
def test_plus_compares_the_lengths_of_updates_over_rounds(standardize) -> None:
    """Warped in time: the second begins later, the third is as long again; standardized it is the first."""
    strategy = server(GCFLPlus, series_length=4, standardize=standardize)
    series = torch.tensor([[1.0, 1, 2, 4], [1.0, 2, 4, 4], [2.0, 2, 4, 8], [5.0, 0, 5, 0]])
    strategy.server["series"][:4] = series.to(strategy.server["series"])
    similarity_CC = strategy.similarity(range(4))
    assert similarity_CC.min() == 0  # of those furthest apart
    assert similarity_CC[0, 1] == similarity_CC.max() if not standardize else similarity_CC[0, 1] < similarity_CC.max()
    assert (similarity_CC[0, 2] == similarity_CC.max()) == standardize


def test_random_updates_are_peeled_off_one_by_one() -> None:
    """Why GCFL finds groups only where their updates oppose each other."""
    draw = torch.Generator().manual_seed(0)
    for _ in range(20):
        update_CP = torch.randn(10, 200, generator=draw)
        cosine_CC = torch.corrcoef(update_CP) + 1
        assert int(minimum_cut(cosine_CC).sum()) in (1, 9)


# ------------------------------------------------------------------ clusters


def server(kind: type[GCFL] = GCFL, num_clients: int = 4, **settings: Any) -> GCFL:
    """A strategy that is set up, with as many training clients and one more."""
    strategy = kind(**{**OPEN, **settings})
    known = {"num_features": 2, "seed": 0, "device": torch.device("cpu"), "num_outputs": 2}
    start = {"w": torch.zeros(2)}
    clients = tuple(range(num_clients))
    strategy.setup(Federation(num_clients=num_clients + 1, training_clients=clients, parameters=start, **known))
    return strategy


def answer(strategy: GCFL, updates: dict[int, tuple[float, float]], examples: tuple[int, ...] | None = None) -> Payload:
    clients = tuple(updates)
    before = strategy.mixed_models(clients).parameters["w"]
    num_examples = torch.tensor(examples or (1,) * len(clients))
    return Payload(
        clients=clients, parameters={"w": before + torch.tensor(list(updates.values()))}, num_examples=num_examples
    )


APART = {0: (1.0, 0.0), 1: (-1.0, 0.0), 2: (1.0, 0.1), 3: (-1.0, 0.1)}


def test_a_round_is_averaged_by_the_new_clusters() -> None:
    strategy = server()
    strategy.aggregate(strategy.training(0), answer(strategy, APART, (1, 1, 3, 1)))
    assert strategy.server["cluster"].tolist() == [0, 1, 0, 1, -1]
    torch.testing.assert_close(strategy.models["w"][[0, 2]], torch.tensor([[1.0, 0.075]]).expand(2, 2))
    torch.testing.assert_close(strategy.models["w"][[1, 3]], torch.tensor([[-1.0, 0.05]]).expand(2, 2))
    strategy.aggregate(strategy.training(1), answer(strategy, APART))
    assert strategy.metrics()["server/clusters"] == 2  # pairs are not cut


@pytest.mark.parametrize(
    ("settings", "cut"),
    [
        ({"thresholds": "absolute", "mean_threshold": 0.06, "max_threshold": 1.0}, True),
        ({"thresholds": "absolute", "mean_threshold": 0.04, "max_threshold": 1.0}, False),
        ({"thresholds": "absolute", "mean_threshold": 0.06, "max_threshold": 1.01}, False),
        ({"thresholds": "relative", "mean_threshold": 0.06, "max_threshold": 1.01}, False),
        ({"thresholds": "relative", "mean_threshold": 0.06, "max_threshold": 1.0}, True),
        ({"warmup_rounds": 1}, False),
    ],
)
def test_when_a_cluster_is_cut(settings, cut) -> None:
    strategy = server(**settings)
    strategy.aggregate(strategy.training(0), answer(strategy, APART))
    assert strategy.metrics()["server/clusters"] == (2 if cut else 1)


def test_the_absent_are_decided_on_and_receive_their_clusters_model() -> None:
    strategy = server()
    strategy.aggregate(strategy.training(0), answer(strategy, {c: APART[c] for c in (0, 1, 2)}))
    assert strategy.metrics()["server/clusters"] == 1  # the last has not responded yet
    torch.testing.assert_close(strategy.models["w"][:4], torch.tensor([[1 / 3, 0.1 / 3]]).expand(4, 2))
    strategy.aggregate(strategy.training(1), answer(strategy, {3: APART[3]}))
    assert strategy.server["cluster"].tolist() == [0, 1, 0, 1, -1]
    assert torch.equal(strategy.models["w"][1], strategy.models["w"][3])


def test_after_a_cut_all_members_must_answer_anew() -> None:
    strategy = server(num_clients=6)
    apart = {client: ((-1.0) ** client, 0.1 * client) for client in range(6)}
    strategy.aggregate(strategy.training(0), answer(strategy, apart))
    assert strategy.server["cluster"].tolist() == [0, 1, 0, 1, 0, 1, -1]
    strategy.aggregate(strategy.training(1), answer(strategy, {0: (0.0, 5.0)}))
    assert strategy.metrics()["server/clusters"] == 2
    strategy.aggregate(strategy.training(2), answer(strategy, {2: (0.0, 5.0), 4: (0.0, -5.0)}))
    assert strategy.metrics()["server/clusters"] == 3


def test_a_cluster_without_training_examples_counts_its_members_alike() -> None:
    strategy = server()
    strategy.server["cluster"][:4] = torch.tensor([0, 0, 1, 1])
    upload = answer(strategy, APART, (0, 0, 3, 1))
    half, share = [0.5, 0.5, 0.0, 0.0], [0.0, 0.0, 0.75, 0.25]
    assert strategy.mixing_matrix(upload).tolist() == [half, half, share, share]


def test_an_unseen_client_joins_the_cluster_that_moves_as_it_does() -> None:
    strategy = server()
    strategy.aggregate(strategy.training(0), answer(strategy, APART))
    torch.testing.assert_close(strategy.mixed_models((4,)).parameters["w"], torch.tensor([[0.0, 0.05]]))
    strategy.onboard(strategy.training(0), answer(strategy, {4: (-2.0, 0.3)}))
    assert int(strategy.server["cluster"][4]) == 1
    assert torch.equal(strategy.mixed_models((4,)).parameters["w"][0], strategy.models["w"][1])


def test_plus_cuts_one_cluster_and_begins_its_series_anew() -> None:
    strategy = server(GCFLPlus, num_clients=6, series_length=2)
    lengths = {0: (1, 1), 1: (1, 1.1), 2: (1, 1), 3: (5, 3), 4: (5, 3.1), 5: (5, 3)}
    for number in range(2):
        assert strategy.metrics()["server/clusters"] == 1
        update = {client: (float(each[number]), 0.0) for client, each in lengths.items()}
        strategy.aggregate(strategy.training(number), answer(strategy, update))
    assert strategy.server["cluster"].tolist() == [0, 0, 0, 1, 1, 1, -1]
    assert (strategy.server["series"] < 0).all()
    strategy.aggregate(strategy.training(2), answer(strategy, update))
    assert strategy.metrics()["server/clusters"] == 2
    strategy.aggregate(strategy.training(3), answer(strategy, update))
    assert strategy.metrics()["server/clusters"] == 3  # of two that could be cut one is


# ------------------------------------------------------------------ whole runs


@both_executors
@both_kinds
@pytest.mark.parametrize("personal", [(), ("head.*",)])
def test_with_no_cut_it_is_fedavg_or_fedper(personal, kind, executor, fit, assert_same) -> None:
    settings = {**OPEN, "mean_threshold": 0.0, "personal": personal}
    averaged = fit(FedPer(personal=personal), executor, precision="64-true").run.executor.state()
    actual = fit(kind(**settings), executor, precision="64-true").run.executor.state()
    assert_same(actual.tensors(), averaged.tensors(), tolerance=1e-12)


@both_executors
@both_kinds
def test_cuts_are_the_same_after_resuming(
    kind, executor, fit, federation, make_model, make_trainer, assert_same, tmp_path
) -> None:
    extra = {"series_length": 2} if kind is GCFLPlus else {}
    busy = Participation(num_clients=4)
    whole = fit(
        kind(**OPEN, **extra),
        executor,
        num_rounds=6,
        callbacks=[SavesAfter(2, tmp_path / "v" / "two.ckpt")],
        participation=busy,
    )
    resumed = make_trainer(executor=executor(), num_rounds=6, seed=1, participation=busy)
    resumed.fit(make_model(dropout=0.5), federation, kind(**OPEN, **extra), ckpt_path=str(tmp_path / "v" / "two.ckpt"))
    assert whole.run.history[-1]["server/clusters"] > 1
    assert_same(resumed.run.strategy.state_dict(), whole.run.strategy.state_dict())


@both_executors
@pytest.mark.parametrize(
    ("strategy", "scales"),
    [
        (GCFL(warmup_rounds=5, mean_threshold=0.5, max_threshold=0.0), (1.0, 1.0)),
        (GCFLPlus(warmup_rounds=5, mean_threshold=0.5, max_threshold=0.0), (1.0, 3.0)),
    ],
    ids=["GCFL", "GCFLPlus"],
)
def test_groups_that_contradict_each_other_are_reported_apart(strategy, scales, executor, given_clients, fit) -> None:
    data = given_clients(grouped_clients(shift=1, modulus=2, scales=scales), num_classes=2)
    actual, averaged = (fit(each, executor, data, num_rounds=20) for each in (strategy, FedAvg()))
    cluster_C = strategy.server["cluster"]
    assert not set(cluster_C[::2].tolist()) & set(cluster_C[1::2].tolist())
    assert actual.run.selection.result["test/acc"] > averaged.run.selection.result["test/acc"] + 0.2


def test_bytes_are_fedavgs(fit) -> None:
    runs = [fit(strategy, callbacks=CommunicationLedger()) for strategy in (GCFL(**OPEN), FedAvg())]
    first, second = ([row["comm/bytes_total"] for row in run.run.history] for run in runs)
    assert first == second


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (GCFL, {"mean_threshold": -1}, r"strategy\.mean_threshold must not be negative, got -1"),
        (GCFL, {"thresholds": "both"}, r"strategy\.thresholds must be 'relative' or 'absolute', got 'both'"),
        (GCFLPlus, {"series_length": 1}, r"strategy\.series_length must be at least 2, got 1"),
    ],
)
def test_settings(kind, settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        kind(**settings)


# ------------------------------------------------------------------ its own setting: many graphs for each client

#: The paper's settings: 0.05 and 0.1 are lengths of updates there, of an epoch of Adam at 0.001.
PAPER = {"thresholds": "absolute", "mean_threshold": 0.05, "max_threshold": 0.1, "num_epochs": 1}


@pytest.fixture(scope="module")
def opposed_sets() -> FederatedDataModule:
    """Six clients with rings and stars, half of whom call the rings stars."""
    clients = graphs_of(6)
    for own in clients[1::2]:
        for graph in own:
            graph.y = 1 - graph.y
    data = FederatedDataModule(clients, batch_size=4)
    data.setup()
    return data


@pytest.mark.full
def test_clients_that_name_graphs_otherwise_are_parted(opposed_sets, make_trainer) -> None:
    strategy, accuracy = GCFL(warmup_rounds=3, mean_threshold=0.9, max_threshold=0.0), []
    for each in (strategy, FedAvg()):
        trainer = make_trainer(num_rounds=20, executor=StackedExecutor(max_padding=0.9), seed=1)
        model = functools.partial(PooledGCN, hidden_channels=8, num_layers=2, dropout=0.0)
        client = ClientModule(model, functools.partial(SGD, lr=0.1))
        accuracy.append(trainer.fit(client, opposed_sets, each)["test/acc"])
    cluster_C = strategy.server["cluster"]
    assert not set(cluster_C[::2].tolist()) & set(cluster_C[1::2].tolist())
    assert accuracy[0] > accuracy[1] + 0.2


@pytest.mark.parametrize("kind", [GCFL, GCFLPlus])
def test_the_papers_thresholds_are_lengths(kind) -> None:
    """A cluster is cut where updates cancel out, and one of them is long enough."""
    strategy = server(kind, num_clients=4, **PAPER, **({"series_length": 2} if kind is GCFLPlus else {}))
    for scale, clusters in ((0.09, 1), (0.09, 1), (0.11, 2), (0.11, 2)):
        lengths = (1.0, -1.0, 1.0, -1.0) if kind is GCFL else (1.0, -1.0, 0.9, -0.9)
        updates = {client: (scale * length, 0.0) for client, length in enumerate(lengths)}
        strategy.aggregate(strategy.training(0), answer(strategy, updates))
        assert strategy.metrics()["server/clusters"] == clusters
