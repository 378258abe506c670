"""What training must not see: nodes of an inductive split, missing classes, clients that are held out."""

import copy
import dataclasses
import functools
from typing import Any

import pytest
import torch
from both_executors import both_executors
from sites import OPEN, make_sites
from strategies.test_contract import every_strategy, tiny
from task_data import graph_data, link_data, ring
from torch.optim import SGD
from torch_geometric.data import Data

from fl_lightning import ClientModule, FederatedDataModule, Participation, SequentialExecutor
from fl_lightning.callbacks import RunReport
from fl_lightning.data import (
    ClientSplit,
    GlobalSplit,
    InductiveSplit,
    MissingClasses,
    RandomPartitioner,
    Role,
    ScarceSplit,
)
from fl_lightning.models import GCN
from fl_lightning.relations.topology import Ring
from fl_lightning.remote import LoopbackChannel, federate
from fl_lightning.report.record import RunRecord
from fl_lightning.run.callback import Callback
from fl_lightning.strategies import (
    AdaFGL,
    Ditto,
    FedAvg,
    FedAvgFinetune,
    FedBN,
    FedGCN,
    FedGNN,
    FedGTA,
    FedPer,
    FedProto,
    FedSagePlus,
    FedStruct,
    Oracle,
    PFedHN,
    Pooled,
    TwinScaffold,
)

RATE = functools.partial(SGD, lr=0.05)
#: Methods that cannot do without the nodes or edges, and what they say.
REFUSING = dict.fromkeys((AdaFGL, FedGNN, FedSagePlus), "computes with the very nodes that it has trained on") | {
    FedGCN: "FedGCN needs the edges between the clients",
    FedStruct: "FedStruct needs the edges between the clients",
    TwinScaffold: "chooses on validation nodes",
}


def client() -> ClientModule:
    return ClientModule(functools.partial(GCN, hidden_channels=8), RATE)


def data_of(tmp_path, splitter, *, weights: bool = False, num_nodes: int = 120, **settings: Any) -> FederatedDataModule:
    draw = torch.Generator().manual_seed(3)
    edges = ring(num_nodes)
    graph = Data(x=torch.rand(num_nodes, 5, generator=draw), edge_index=edges, y=torch.arange(num_nodes) % 4)
    if weights:
        graph.edge_weight = torch.rand(edges.shape[1], generator=draw)
    folders = {"cache_dir": str(tmp_path), "root": str(tmp_path)}
    data = FederatedDataModule(graph, RandomPartitioner(4), splitter, **folders, **settings)
    data.setup()
    return data


class Poison(Callback):
    """Makes what must not be seen unusable: nan features, other labels and no edges of some nodes.

    Args:
        nodes: Which nodes of a client, from its data and its index.
    """

    needs_data = changes_training = True

    def __init__(self, nodes: Any) -> None:
        self.nodes = nodes

    def on_clients(self, trainer: Any, clients: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(self.poisoned(each, self.nodes(each, index)) for index, each in enumerate(clients))

    def poisoned(self, each: Any, gone_N: torch.Tensor) -> Any:
        kept_E = ~gone_N[each.edge_index_2E].any(dim=0)
        x_NF, y_N = each.x_NF.clone(), each.y_N.clone()
        x_NF[gone_N], y_N[gone_N] = torch.nan, 3 - y_N[gone_N]
        weight_E = None if each.edge_weight_E is None else each.edge_weight_E[kept_E]
        return dataclasses.replace(
            each, x_NF=x_NF, y_N=y_N, edge_index_2E=each.edge_index_2E[:, kept_E], edge_weight_E=weight_E
        )


def held_out(each: Any, index: int) -> torch.Tensor:
    return each.val_mask_N | each.test_mask_N


def models(trainer: Any) -> dict[str, torch.Tensor]:
    return dict(trainer.run.executor.state().parameters)


@both_executors
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize(
    "strategy", [FedAvg, FedAvgFinetune, FedProto, FedGTA, Pooled], ids=lambda strategy: strategy.__name__
)
def test_training_sees_nothing_of_unseen_nodes(executor, strategy, weights, make_trainer, assert_same, tmp_path):
    """With nan in the place of unseen nodes the models are the same to the bit; those of other splits are others."""
    if weights and strategy is not FedAvg:
        pytest.skip("one method is enough for what graphs carry")
    runs, inside = [], ClientSplit(0.5, 0.25)
    for splitter, callbacks in (
        (InductiveSplit(inside), []),
        (InductiveSplit(inside), [Poison(held_out)]),
        (inside, []),
    ):
        trainer = make_trainer(num_rounds=2, executor=executor(), callbacks=callbacks)
        trainer.fit(client(), data_of(tmp_path, splitter, weights=weights), strategy())
        runs.append(models(trainer))
    clean, poisoned, transductive = runs
    assert all(bool(value.isfinite().all()) for value in clean.values())
    assert_same(clean, poisoned)
    assert any(not torch.equal(clean[name], transductive[name]) for name in clean)


@pytest.mark.full
@every_strategy
@pytest.mark.filterwarnings("ignore:DFedAvgM is for SGD with momentum")
@pytest.mark.filterwarnings("ignore:the maps cannot make the clients agree")
def test_no_method_sees_unseen_nodes(kind, make_trainer, assert_same, tmp_path) -> None:
    """What clients and server have in the end is the same to the bit, or the method refuses."""
    runs = []
    for callbacks in ([], [Poison(held_out)]):
        data = data_of(tmp_path, InductiveSplit(ClientSplit(0.5, 0.25)), relation_graph=Ring())
        strategy = Oracle(groups=[0, 1, 0, 1]) if kind is Oracle else tiny(kind)
        net = functools.partial(GCN, hidden_channels=8, batch_norm=kind is FedBN)
        trainer = make_trainer(num_rounds=2, callbacks=callbacks)
        client = kind.client_class(None if kind.own_net else net, RATE)
        if kind in REFUSING:
            with pytest.raises(ValueError, match=REFUSING[kind]):
                trainer.fit(client, data, strategy)
            return
        trainer.fit(client, data, strategy)
        state = trainer.run.executor.state()
        runs.append((dict(state.parameters), dict(state.extras), trainer.run.strategy.state_dict()))
    assert_same(*runs)


@both_executors
def test_models_are_scored_and_predict_on_the_whole_graphs(executor, make_trainer, tmp_path):
    data = data_of(tmp_path, InductiveSplit(ClientSplit(0.5, 0.25)))
    trainer = make_trainer(num_rounds=2, executor=executor(), evaluate_union=True, callbacks=[RunReport()])
    result = trainer.fit(client(), data, FedAvg())
    whole = data.collator(data.clients, device=torch.device("cpu"), dtype=torch.float32)
    assert whole.evaluation is not None
    predicted = trainer.run.executor.predict(trainer.run.strategy.evaluations(range(4))[""], range(4), 1)
    correct = []
    for index, each in enumerate(data.clients):
        assert len(predicted[index]) == each.num_nodes
        right_N = predicted[index].argmax(dim=1) == each.y_N
        correct.append(float(right_N[each.test_mask_N].float().mean()))
        assert whole.size(index) == each.num_examples
    assert trainer.run.history[-1]["test/acc"] == pytest.approx(sum(correct) / 4)
    assert 0 <= result["union/test/acc"] <= 1
    record = RunRecord.read(trainer.run.folder)
    assert record is not None
    assert not record.unkept
    assert record.points is not None


def test_an_inductive_graph_is_that_of_its_training_nodes(tmp_path):
    data = data_of(tmp_path, ScarceSplit(InductiveSplit(ClientSplit(0.5, 0.25)), clients=0.5, keep=0.5), weights=True)
    for each in data.clients:
        seen = each.seen()
        kept_N = ~(each.val_mask_N | each.test_mask_N)
        assert torch.equal(seen.node_idx_N, each.node_idx_N[kept_N])
        assert torch.equal(seen.train_mask_N, each.train_mask_N[kept_N])
        inside = kept_N[each.edge_index_2E].all(dim=0)
        assert torch.equal(seen.node_idx_N[seen.edge_index_2E], each.node_idx_N[each.edge_index_2E[:, inside]])
        assert torch.equal(seen.edge_weight_E, each.edge_weight_E[inside])
        assert seen.seen() is seen
    other = data_of(tmp_path, ScarceSplit(ClientSplit(0.5, 0.25), clients=0.5, keep=0.5), weights=True)
    assert data.partition_hash != other.partition_hash
    assert not other.clients[0].is_inductive


def test_sites_hide_them_as_a_simulation_does(make_trainer, tmp_path):
    data = data_of(tmp_path, InductiveSplit(ClientSplit(0.5, 0.25)))

    def parts() -> tuple[ClientModule, FedAvg]:
        model = client()
        model.take_task(data.task)
        return model, FedAvg()

    sites = make_sites(data.clients, tmp_path / "sites", parts, OPEN)
    expected = make_trainer(num_rounds=1, executor=SequentialExecutor()).fit(client(), data, FedAvg())
    remote, strategy = make_trainer(num_rounds=1), FedAvg()
    assert remote.fit(client(), federate(remote, LoopbackChannel(sites), strategy), strategy) == expected


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (AdaFGL(), "AdaFGL computes with the very nodes .* choose another splitter or another strategy"),
        (FedSagePlus(), "FedSagePlus computes with the very nodes that it has trained on, or adds some"),
        (Pooled(graph="whole"), "Pooled computes with the very nodes"),
        (TwinScaffold(), "strategy.validate_every chooses on validation nodes, .* set it to null"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_methods_that_need_the_nodes_are_refused(strategy, message, make_trainer, tmp_path):
    with pytest.raises(ValueError, match=message):
        make_trainer(num_rounds=1).fit(None, data_of(tmp_path, InductiveSplit(ClientSplit())), strategy)


def test_examples_that_are_no_nodes_are_refused(tmp_path):
    message = "data.splitter is inductive, which is for nodes, but the task is of"
    with pytest.raises(ValueError, match=f"{message} graphs"):
        graph_data(splitter=InductiveSplit(ClientSplit(0.4, 0.3)))
    with pytest.raises(ValueError, match=f"{message} pairs"):
        link_data(tmp_path, splitter=InductiveSplit(GlobalSplit()))
    with pytest.raises(ValueError, match="splitter=None is not a splitter"):
        InductiveSplit(None)  # type: ignore[arg-type]


@both_executors
@pytest.mark.filterwarnings("ignore:.*while unseen clients joined")
@pytest.mark.parametrize("strategy", [FedAvg, PFedHN], ids=lambda strategy: strategy.__name__)
def test_training_sees_nothing_of_unseen_clients(executor, strategy, make_trainer, assert_same, tmp_path):
    data, runs = data_of(tmp_path, ClientSplit(0.5, 0.25)), []
    participation = Participation(held_out_fraction=0.25)
    (gone,) = set(range(4)) - set(participation.training_clients(4, 0))

    def all_of_one(each: Any, index: int) -> torch.Tensor:
        return torch.full_like(each.train_mask_N, index == gone)

    for callbacks in ([], [Poison(all_of_one)]):
        trainer = make_trainer(num_rounds=2, executor=executor(), participation=participation, callbacks=callbacks)
        result = trainer.fit(client(), data, strategy())
        seen = {name: value for name, value in result.items() if not name.startswith("unseen/")}
        runs.append((seen, trainer.run.history))
    for run in runs:
        for row in run[1]:
            row.pop("seconds")
    assert_same(*runs)


@both_executors
@pytest.mark.filterwarnings("ignore:no checkpoint was written")
@pytest.mark.parametrize("kind", [FedPer, Ditto, FedProto, FedGCN, PFedHN], ids=lambda kind: kind.__name__)
def test_unseen_clients_join_anew_each_time(kind, executor, federation, make_model, make_trainer, assert_same):
    participation = Participation(held_out_fraction=0.4)
    trainer = make_trainer(num_rounds=1, executor=executor(), participation=participation)
    first = trainer.fit(make_model(kind), federation, kind())
    server = copy.deepcopy(trainer.run.strategy.state_dict())
    unseen = {name: value for name, value in first.items() if name.startswith("unseen/test/")}
    assert unseen
    trainer.validate()
    for _ in range(2):
        again = trainer.test()
        assert {name: again[name] for name in unseen} == unseen
        assert not trainer.run.failures
    assert_same(trainer.run.strategy.state_dict(), server)


@pytest.mark.filterwarnings("ignore:no checkpoint was written")
@pytest.mark.parametrize("kind", [FedPer, FedGCN], ids=lambda kind: kind.__name__)
def test_unseen_clients_at_sites_join_anew_each_time(kind, federation, make_model, make_trainer, tmp_path):
    trainer = make_trainer(num_rounds=1, participation=Participation(held_out_fraction=0.4))
    strategy = kind()

    def parts() -> tuple[ClientModule, Any]:
        model = make_model(kind)
        model.take_task(federation.task)
        return model, kind()

    sites = make_sites(federation.clients, tmp_path / "sites", parts, OPEN)
    first = trainer.fit(make_model(kind), federate(trainer, LoopbackChannel(sites), strategy), strategy)
    unseen = {name: value for name, value in first.items() if name.startswith("unseen/test/")}
    assert unseen
    for _ in range(2):
        again = trainer.test()
        assert {name: again[name] for name in unseen} == unseen


@pytest.mark.parametrize(("number", "share"), [(1, 1.0), (2, 0.5), (9, 1.0)])
def test_clients_miss_classes_in_training_alone(number, share, tmp_path):
    plain, missed = ClientSplit(0.5, 0.25), MissingClasses(ClientSplit(0.5, 0.25), number, share)
    untouched, lacking = 0, []
    for before, after in zip(data_of(tmp_path, plain).clients, data_of(tmp_path, missed).clients, strict=True):
        assert torch.equal(before.val_mask_N, after.val_mask_N)
        assert torch.equal(before.test_mask_N, after.test_mask_N)
        assert torch.equal(before.y_N, after.y_N)
        had, has = before.y_N[before.train_mask_N], after.y_N[after.train_mask_N]
        gone = set(had.tolist()) - set(has.tolist())
        untouched += not gone
        lacking.append(tuple(sorted(gone)))
        assert len(gone) in (0, min(number, len(had.unique()) - 1))
        kept_N = before.train_mask_N & ~torch.isin(before.y_N, torch.tensor(sorted(gone), dtype=torch.int64))
        assert torch.equal(after.train_mask_N, kept_N)
    assert untouched == round(4 * (1 - share))
    assert len(set(lacking)) > 1


def test_one_class_cannot_miss():
    data = Data(y=torch.zeros(6, dtype=torch.int64), num_nodes=6)
    with pytest.raises(ValueError, match="MissingClasses is for examples of two classes or more"):
        MissingClasses(ClientSplit()).assign(data, [torch.arange(6)], 0)
    assert Role.UNUSED == 0
