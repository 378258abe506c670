"""Clients with features and outputs of their own: the layers for these are found, said, and never sent."""

import functools
import re
from typing import Any

import pytest
import torch
from strategies.test_contract import STRATEGIES, tiny
from task_data import graphs_of
from torch.optim import SGD
from torch_geometric.data import Data

from fl_lightning import ClientModule, FederatedDataModule, SequentialExecutor, StackedExecutor
from fl_lightning.batches.base import single
from fl_lightning.callbacks import FederatedCheckpoint
from fl_lightning.data import GraphSets
from fl_lightning.models import GIN, PooledGCN
from fl_lightning.models.output import NOT_THERE, own_outputs
from fl_lightning.relations.topology import Ring
from fl_lightning.round.context import Context
from fl_lightning.strategies import Ditto, FedAvg, FedBN, FedProto, FedProx, Oracle, Pooled, Strategy

OWN = {"features.weight", "features.bias", "head.weight", "head.bias"}
SAID = "ignore:the clients have (features|outputs|features and outputs) of their own"
NET = functools.partial(GIN, hidden_channels=6, num_layers=2, dropout=0.0)
SLOW = functools.partial(SGD, lr=0.05)


def own_sets(**settings: Any) -> FederatedDataModule:
    """Rings and stars with three features, with five, and with three classes."""
    first, second, third = graphs_of()
    wide = [Data(**{**graph.to_dict(), "x": torch.cat([graph.x, graph.x[:, :2]], dim=1)}) for graph in second]
    three = [Data(**{**graph.to_dict(), "y": graph.y + (index % 3 == 0)}) for index, graph in enumerate(third)]
    plain = [Data(**{k: v for k, v in g.to_dict().items() if k != "edge_weight"}) for g in (*first, *wide, *three)]
    sizes = [len(first), len(wide), len(three)]
    parts = [plain[: sizes[0]], plain[sizes[0] : -sizes[2]], plain[-sizes[2] :]]
    data = FederatedDataModule(GraphSets(parts), batch_size=4, relation_graph=Ring(), **settings)
    data.setup()
    return data


@pytest.fixture(scope="module")
def sets() -> FederatedDataModule:
    return own_sets()


def test_they_are_found_and_said(sets: FederatedDataModule, make_trainer: Any) -> None:
    trainer = make_trainer(num_rounds=1)
    said = "the clients have features and outputs of their own, so that these parameters are kept local: "
    with pytest.warns(UserWarning, match=re.escape(said)):
        trainer.fit(ClientModule(NET), sets, FedAvg(num_epochs=1))
    assert set(trainer.run.model.own_layers) == OWN
    assert not OWN & set(trainer.run.strategy.models)
    communicated = sum(p.numel() for n, p in trainer.run.model.net.named_parameters() if n not in OWN)
    assert trainer.run.model.num_communicated == communicated


@pytest.mark.filterwarnings(SAID)
def test_they_differ_and_live_on_while_the_others_are_common(sets: FederatedDataModule, make_trainer: Any) -> None:
    trainer = make_trainer(num_rounds=3)
    trainer.fit(ClientModule(NET, SLOW), sets, FedAvg(num_epochs=1))
    state = trainer.run.executor.state().parameters
    assert set(state) >= OWN
    first = dict(trainer.run.model.net.named_parameters())
    for name in OWN:
        assert not torch.equal(state[name][0], state[name][1])
        assert not torch.equal(state[name][1], first[name])
    assert not torch.equal(state["features.weight"][1, 3:], first["features.weight"][3:])
    assert torch.equal(state["features.weight"][0, 3:], first["features.weight"][3:])  # what it has no features for


@pytest.mark.filterwarnings(SAID)
def test_fedprox_pulls_to_what_the_server_sent_alone(sets: FederatedDataModule, make_trainer: Any) -> None:
    trainer = make_trainer(num_rounds=1)
    trainer.fit(ClientModule(NET, SLOW), sets, FedProx(num_epochs=1, proximal_weight=2.0))
    moved = {name: p.detach() + 1 for name, p in trainer.run.model.net.named_parameters()}
    context = Context(anchor=dict(trainer.run.model.net.named_parameters()))
    pull = trainer.run.strategy.penalty().gradient(moved, context)
    assert set(pull) == set(moved) - OWN
    assert all(torch.allclose(gradient, torch.tensor(2.0)) for gradient in pull.values())


def test_outputs_that_a_client_does_not_have_count_for_nothing(sets: FederatedDataModule) -> None:
    model = ClientModule(NET)
    model.take_task(sets.task)
    model.build(sets.num_features, sets.num_outputs)
    for client, count in enumerate(sets.registry.own_outputs):
        batch = single(sets.collator(sets.clients, device=torch.device("cpu"), dtype=torch.float32)([client]))
        output = model.output(model.parameter_dict(), batch)
        assert (output.logits[:, count:] == NOT_THERE).all()
        assert not model.predictions(output)[:, count:].any()
        plain = model.net(batch).logits[:, :count]
        known = batch.train_mask
        expected = torch.nn.functional.cross_entropy(plain[known], batch.y[known])
        torch.testing.assert_close(model.loss(output, batch), expected)


@pytest.mark.filterwarnings(SAID)
def test_a_resumed_run_has_them(sets: FederatedDataModule, make_trainer: Any, assert_same: Any) -> None:
    """After two rounds of three, with a learned model of the others and optimizers that remember."""
    kept = FederatedCheckpoint(every_seconds=0, every_n_rounds=1, keep=None)
    whole = make_trainer(num_rounds=3, callbacks=kept)
    expected = whole.fit(ClientModule(NET), sets, FedAvg(num_epochs=1))
    path = whole.run.folder / "checkpoints" / "round=000002.ckpt"
    resumed = make_trainer(num_rounds=3)
    result = resumed.fit(ClientModule(NET), sets, FedAvg(num_epochs=1), ckpt_path=str(path))
    assert resumed.run.history[0] == whole.run.history[0]
    assert_same(result, expected)
    assert_same(resumed.run.executor.state().parameters, whole.run.executor.state().parameters)


@pytest.mark.filterwarnings(SAID)
def test_both_executors_agree(sets: FederatedDataModule, make_trainer: Any, assert_same: Any) -> None:
    for strategy in (FedAvg(num_epochs=1), Ditto(num_epochs=1)):
        runs = []
        for executor in (StackedExecutor(max_padding=0.9), SequentialExecutor()):
            trainer = make_trainer(num_rounds=2, executor=executor, precision="64-true")
            trainer.fit(ClientModule(NET, SLOW), sets, strategy)
            runs.append((trainer.run.history, trainer.run.executor.state().parameters))
        assert_same(*runs, tolerance=1e-7)


def test_what_is_wider_for_others_changes_nothing(sets: FederatedDataModule) -> None:
    """A net as wide as the widest client needs is, on another client's graphs, the narrow one."""
    wide, narrow = NET(5, 3).double(), NET(3, 2).double()
    cut = {name: p[tuple(map(slice, narrow.get_parameter(name).shape))] for name, p in wide.named_parameters()}
    batch = single(sets.collator(sets.clients, device=torch.device("cpu"), dtype=torch.float64)([0]))
    logits, embedding = own_outputs(wide(batch), batch)
    expected = torch.func.functional_call(narrow, cut, (batch.replace({"x": batch.x[:, :3]}),))
    torch.testing.assert_close((logits[:, :2], embedding), tuple(expected))


@pytest.mark.filterwarnings(SAID)
def test_features_alone_are_their_own(make_trainer: Any) -> None:
    first, second, _ = graphs_of()
    wide = [Data(**{**graph.to_dict(), "x": graph.x.repeat(1, 2)}) for graph in second]
    data = FederatedDataModule(GraphSets([first, wide], own_outputs=False))
    trainer = make_trainer(num_rounds=1)
    trainer.fit(ClientModule(functools.partial(PooledGCN, hidden_channels=6)), data, FedAvg(num_epochs=1))
    assert trainer.run.model.own_layers == ("convs.0.weight", "convs.0.bias")
    outputs = FederatedDataModule(GraphSets([first, second], own_outputs=True))
    trainer.fit(ClientModule(functools.partial(PooledGCN, hidden_channels=6)), outputs, FedAvg(num_epochs=1))
    assert trainer.run.model.own_layers == ("head.weight", "head.bias")


@pytest.mark.filterwarnings(SAID)
def test_what_does_not_fit_is_refused(sets: FederatedDataModule, make_trainer: Any) -> None:
    with pytest.raises(ValueError, match=r"model.net is a GIN that is built already, but the clients have features"):
        make_trainer().fit(ClientModule(NET(5, 3)), sets, FedAvg(num_epochs=1))
    with pytest.raises(ValueError, match="FedProto compares classes of clients, but these have classes of their own"):
        make_trainer().fit(ClientModule(NET), sets, FedProto(num_epochs=1))
    with pytest.raises(ValueError, match="Pooled has one model for all clients, but these have features and outputs"):
        make_trainer().fit(ClientModule(NET), sets, Pooled(num_epochs=1))


#: Those that compare what clients know of the same classes, or have one model of all layers.
COMMON = [kind for kind in STRATEGIES if kind.needs_classes or kind.needs_common_layers]


@pytest.mark.full
@pytest.mark.filterwarnings(SAID)
@pytest.mark.filterwarnings("ignore:DFedAvgM is for SGD with momentum")
@pytest.mark.filterwarnings("ignore:the maps cannot make the clients agree")
@pytest.mark.parametrize(
    "kind", [k for k in STRATEGIES if not k.needs_nodes and k not in COMMON], ids=lambda kind: kind.__name__
)
def test_every_strategy_runs(
    kind: type[Strategy], sets: FederatedDataModule, make_trainer: Any, assert_same: Any
) -> None:
    own, runs = kind.default_net, []
    net = functools.partial(PooledGCN, hidden_channels=8, dropout=0.0, batch_norm=kind is FedBN)
    if getattr(own, "pools", False):
        net = functools.partial(own, hidden_channels=8, dropout=0.0)
    for executor in (StackedExecutor(max_padding=0.9), SequentialExecutor()):
        strategy = Oracle(groups=[0, 1, 0]) if kind is Oracle else tiny(kind)
        trainer = make_trainer(num_rounds=2, executor=executor, precision="64-true")
        trainer.fit(kind.client_class(net, SLOW), sets, strategy)
        assert trainer.run.model.own_layers
        runs.append(trainer.run.history)
    assert_same(*runs, tolerance=1e-6)


@pytest.mark.parametrize("kind", [k for k in COMMON if not k.needs_nodes], ids=lambda kind: kind.__name__)
def test_the_others_refuse_by_name(kind: type[Strategy], sets: FederatedDataModule, make_trainer: Any) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__} (compares classes of clients|has one model for all)"):
        make_trainer().fit(ClientModule(NET), sets, tiny(kind))
