"""Runs on sampled parts of graphs: both executors, resume, evaluation on whole graphs, and what is refused."""

import functools
from typing import Any

import pytest
from saving import SavesAfter
from torch import nn
from torch.optim import SGD

from fl_lightning import ClientModule, FederatedDataModule, SequentialExecutor, StackedExecutor
from fl_lightning.data import (
    FL60,
    ClusterSampler,
    GlobalSplit,
    InductiveSplit,
    NeighborSampler,
    PlantedCommunities,
)
from fl_lightning.models import GCN, GraphSAGE
from fl_lightning.strategies import APFL, FGSSL, AdaFGL, FedAvg, FedGCN, FedGNN, FedSagePlus, FedSpray, FedStar
from fl_lightning.testing.federations import _Slices

SAMPLERS = {"neighbors": NeighborSampler([2, 2]), "clusters": ClusterSampler(6)}
both_samplers = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)


@pytest.fixture
def make_data(tmp_path):
    """Five clients of 30 to 8 nodes, trained on parts."""

    def build(sampler: Any, splitter=None, **settings: Any) -> FederatedDataModule:
        source = PlantedCommunities(num_nodes=92, num_communities=5, num_classes=3, num_features=6)
        settings = {"batch_size": 3, "cross_edges": True, "cache_dir": str(tmp_path / "cache"), **settings}
        return FederatedDataModule(source, _Slices(), splitter or GlobalSplit(), sampler=sampler, **settings)

    return build


@pytest.fixture
def fit(make_trainer, make_model):
    """Run two rounds in double precision."""

    def run(data, strategy=None, executor=StackedExecutor, *, kind=ClientModule, ckpt_path=None, **settings):
        strategy = strategy or FedAvg()
        trainer = make_trainer(executor=executor(), **{"num_rounds": 2, "seed": 1, "precision": "64-true", **settings})
        model = make_model(kind if kind is not ClientModule else type(strategy))
        trainer.fit(model, data, strategy, ckpt_path=ckpt_path)
        return trainer

    return run


together = functools.partial(StackedExecutor, max_padding=0.9)


@both_samplers
@pytest.mark.parametrize("steps", [None, 2], ids=["passes", "sampling"])
def test_executors_agree(sampler, steps, make_data, fit, assert_same) -> None:
    runs = [
        fit(make_data(sampler, steps_per_epoch=steps), executor=executor)
        for executor in (SequentialExecutor, together, functools.partial(StackedExecutor, max_clients_per_group=2))
    ]
    first, *others = [run.state_dict()["clients"] for run in runs]

    for other in others:
        assert_same(other, first, tolerance=1e-9)


@pytest.mark.full
@both_samplers
def test_resume_is_exact(sampler, make_data, fit, tmp_path, assert_same) -> None:
    path = tmp_path / "one.ckpt"
    whole = fit(make_data(sampler), APFL(), num_rounds=3, callbacks=SavesAfter(1, path))
    resumed = fit(make_data(sampler), APFL(), num_rounds=3, ckpt_path=str(path))

    assert_same(resumed.state_dict()["clients"], whole.state_dict()["clients"])


@both_samplers
def test_models_are_scored_on_whole_graphs(sampler, make_data, make_trainer) -> None:
    scores = []
    for data in (make_data(sampler), make_data(None, batch_size=None)):
        trainer = make_trainer(num_rounds=1, seed=1)  # without a step both have the same model
        trainer.fit(ClientModule(GCN, functools.partial(SGD, lr=0.0)), data, FedAvg())
        scores.append({k: v for k, v in trainer.run.history[-1].items() if "loss" in k or "acc" in k})

    assert scores[0] == pytest.approx(scores[1], rel=1e-5, nan_ok=True)


def test_an_epoch_is_a_pass_over_each_clients_training_nodes(make_data, fit) -> None:
    executor = fit(make_data(SAMPLERS["neighbors"])).run.executor
    steps = [executor.collator.steps_per_epoch(client) for client in range(5)]

    assert steps == [-(-executor.collator.client_data(client).num_examples // 3) for client in range(5)]


def test_nodes_that_are_hidden_from_training_are_in_no_part(make_data, fit) -> None:
    executor = fit(make_data(SAMPLERS["neighbors"], InductiveSplit(GlobalSplit()))).run.executor

    for client in range(5):
        assert executor.collator.client_data(client).train_mask_N.all()
        assert executor.evaluation_collator.size(client) > executor.collator.size(client)


# ---------------------------------------------------------------- what is refused


@both_samplers
@pytest.mark.parametrize("strategy", [AdaFGL, FGSSL, FedGCN, FedGNN, FedSagePlus, FedSpray])
def test_strategies_that_need_whole_graphs_are_refused_by_name(strategy, sampler, make_data, fit) -> None:
    with pytest.raises(ValueError, match=f"{type(sampler).__name__}, but clients of {strategy.__name__} need their wh"):
        fit(make_data(sampler), strategy())


@pytest.mark.parametrize("strategy", [FedAvg(), FedStar()], ids=["layers", "whole"])
def test_nets_that_read_further_than_is_sampled_are_refused(strategy, make_data, make_trainer) -> None:
    model = ClientModule(functools.partial(GCN, num_layers=3)) if type(strategy) is FedAvg else ClientModule()

    with pytest.raises(ValueError, match=r"2 fan-outs, but (GCN|DecoupledGIN) reads nodes that are more than 2 edges"):
        make_trainer().fit(model, make_data(SAMPLERS["neighbors"]), strategy)


class OwnLayer(nn.Module):
    """A net that reads the edges itself."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.layer = nn.Linear(in_channels, out_channels)

    def forward(self, x, edge_index):
        z = self.layer(x)
        return z.index_add(0, edge_index[1], z[edge_index[0]])


@pytest.mark.filterwarnings("ignore:model.net OwnLayer")
def test_nets_that_compute_alone_get_the_sampled_edges_and_are_named(make_data, make_trainer) -> None:
    with pytest.warns(UserWarning, match="OwnLayer computes on one client's graph at a time .* NeighborLoader"):
        make_trainer(num_rounds=1).fit(ClientModule(OwnLayer), make_data(SAMPLERS["neighbors"]), FedAvg())


@pytest.mark.parametrize("net", [GraphSAGE, functools.partial(GCN, batch_norm=True)], ids=["sage", "norm"])
def test_other_nets_learn(net, make_data, make_trainer) -> None:
    trainer = make_trainer(num_rounds=3)
    trainer.fit(ClientModule(net), make_data(SAMPLERS["neighbors"], drop_last=True), FedAvg())

    history = [row["train/loss"] for row in trainer.run.history]
    assert history[-1] < history[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampler": NeighborSampler([2])}, "NeighborSampler: set data.batch_size too, the number of training nodes"),
        ({"sampler": ClusterSampler(2)}, "ClusterSampler: set data.batch_size too, the number of clusters"),
        ({"sampler": "neighbors"}, "data.sampler is 'neighbors': give NeighborSampler or ClusterSampler"),
        ({"batch_size": 2}, "trained full-batch: leave them out, or set data.sampler"),
        ({"sampler": NeighborSampler([2]), "batch_size": 2, "drop_last": True, "steps_per_epoch": 2}, "drop_last"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        FederatedDataModule(PlantedCommunities(), _Slices(), **settings)


def test_examples_have_no_neighbors() -> None:
    with pytest.raises(ValueError, match="for the nodes of graphs, but FL60 has other examples"):
        FederatedDataModule(FL60(), sampler=NeighborSampler([2]), batch_size=2)


@pytest.mark.parametrize("fan_outs", [[], [0], [-2], [2.5], [True], 3, "23"])
def test_fan_outs_that_are_none_are_refused(fan_outs) -> None:
    with pytest.raises(ValueError, match=r"data.sampler.fan_outs is .*such as \[10, 10\]"):
        NeighborSampler(fan_outs)


def test_other_settings_of_samplers_are_checked() -> None:
    with pytest.raises(ValueError, match=r"data.sampler.replace is 'no'"):
        NeighborSampler([2], replace="no")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"data.sampler.num_clusters must be at least 1, got 0"):
        ClusterSampler(0)
    with pytest.raises(ValueError, match=r"data.sampler.num_clusters must be a whole number, got 2.5"):
        ClusterSampler(2.5)  # type: ignore[arg-type]


def test_one_cluster_is_the_whole_graph(make_data, fit, assert_same) -> None:
    runs = [fit(data) for data in (make_data(ClusterSampler(1)), make_data(None, batch_size=None))]

    assert_same(*(run.state_dict()["clients"] for run in runs), tolerance=1e-9)
