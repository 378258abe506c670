"""Sites with features and outputs of their own: the layers for these stay there, and all else is as in one process."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from run.test_own_layers import NET, OWN, SAID, SLOW, own_sets
from sites import assert_same_clients, make_sites
from task_data import graph_data

from fl_lightning import ClientModule, FederatedDataModule, SequentialExecutor
from fl_lightning.batches.graph_sets import ClientGraphs
from fl_lightning.data import ClientGraph, Examples, ExampleSource
from fl_lightning.models import CNN
from fl_lightning.relations.topology import Ring
from fl_lightning.remote import LoopbackChannel, Message, Site, SitePolicy, federate
from fl_lightning.remote.guard import Guard
from fl_lightning.remote.ledger import SumLedger
from fl_lightning.remote.policy import Refused
from fl_lightning.strategies import FedAvg, FedProto, Strategy
from fl_lightning.tasks import Drawing

BOTH = ("features", "outputs")

pytestmark = pytest.mark.filterwarnings(SAID)


@pytest.fixture(scope="module")
def sets() -> FederatedDataModule:
    return own_sets()


def as_at_home(sets: FederatedDataModule) -> list[ClientGraphs]:
    """What each client holds where nobody knows of the others: no wider than its own, no number of classes."""
    clients = []
    for client, width in zip(sets.clients, (3, 5, 3), strict=True):
        union = client.union.with_inputs(client.union.x_NF[:, :width])
        clients.append(dataclasses.replace(client, union=union, num_outputs=None))
    return clients


def sites_of(
    clients: Sequence[Any], task: Any, folder: Path, strategy: type[Strategy] = FedAvg, net: Any = NET, **settings: Any
) -> list[Site]:
    def make() -> tuple[ClientModule, Strategy]:
        model = ClientModule(net, SLOW)
        model.take_task(task)
        return model, strategy(num_epochs=1)

    return make_sites(clients, folder, make, drawing=Drawing(batch_size=4), **settings)


class Recorded(LoopbackChannel):
    """Keeps all messages."""

    def __init__(self, sites: Sequence[Site]) -> None:
        super().__init__(sites)
        self.seen: list[Message] = []

    def ask(self, messages: Mapping[int, Message]) -> Iterator[tuple[int, Message | str]]:
        self.seen.extend(messages.values())
        for client, response in super().ask(messages):
            assert isinstance(response, Message)
            self.seen.append(response)
            yield client, response


def test_they_come_to_the_same_and_stay_there(sets, make_trainer, tmp_path) -> None:
    """Each site knows its own data alone, and is told how wide the widest is."""
    local = make_trainer(num_rounds=2, executor=SequentialExecutor())
    expected = local.fit(ClientModule(NET, SLOW), sets, FedAvg(num_epochs=1))
    sites = sites_of(as_at_home(sets), sets.task, tmp_path / "sites", own=BOTH)
    channel, remote, strategy = Recorded(sites), make_trainer(num_rounds=2), FedAvg(num_epochs=1)
    elsewhere = federate(remote, channel, strategy, relation_graph=Ring())
    assert (elsewhere.registry.own_inputs, elsewhere.registry.own_outputs) == (True, sets.registry.own_outputs)
    assert remote.fit(ClientModule(NET, SLOW), elsewhere, strategy) == expected
    assert_same_clients(local, sites)
    sent = {name.removeprefix("p/") for message in channel.seen for name in message.tensors}
    assert any(name.startswith("convs.") for name in sent)
    assert not {name for name in sent if name.startswith(("features.", "head."))}
    remote.run.executor.predict(strategy.evaluations([0, 1, 2])[""], [0, 1, 2], 1)
    assert all((site.folder / "predictions.csv").exists() for site in sites)


def test_own_layers_that_arrive_are_refused(sets, make_trainer, tmp_path) -> None:
    sites = sites_of(as_at_home(sets), sets.task, tmp_path / "sites", own=BOTH)
    channel, remote, strategy = Recorded(sites), make_trainer(num_rounds=1), FedAvg(num_epochs=1)
    remote.fit(ClientModule(NET, SLOW), federate(remote, channel, strategy), strategy)
    asked = next(message for message in channel.seen if message.kind == "run")
    for name in OWN:
        tensor = dict(sites[0].model.net.named_parameters())[name].detach()[None]
        wrong = dataclasses.replace(asked, tensors={**asked.tensors, f"p/{name}": tensor})
        response = Message.read(sites[0].respond(dataclasses.replace(wrong, about={**asked.about}).wire))
        assert f"the server sends 'p/{name}'" in response.about["why"]


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"own": []}, "its own cannot be this site's"),
        ({"own": ["features"]}, "its own cannot be this site's"),
        ({"own": ["labels"]}, "own has an item that must be one of"),
        ({"num_features": 4}, "the federation's inputs are not as wide as this site's"),
        ({"num_features": [5]}, "the federation's inputs are not as wide as this site's"),
        ({"num_features": 5000}, "inputs of width 5000 are asked for, policy.max_parameters is 4000 here"),
        ({"num_features": 3999}, "parameters, policy.max_parameters is 4000 here"),
        ({"num_outputs": 1}, "its num_outputs cannot be this site's"),
    ],
    ids=str,
)
def test_a_site_refuses_widths_that_do_not_fit(changed, why, sets, make_trainer, tmp_path) -> None:
    policy = SitePolicy(min_examples=1, max_parameters=4000)
    sites = sites_of(as_at_home(sets), sets.task, tmp_path / "sites", policy=policy, own=BOTH)
    channel, remote, strategy = Recorded(sites), make_trainer(num_rounds=1), FedAvg(num_epochs=1)
    remote.fit(ClientModule(NET, SLOW), federate(remote, channel, strategy), strategy)
    starts = [message for message in channel.seen if message.kind == "start"]
    wide = next(message for message in starts if message.about["index"] == 1)  # with five features
    response = Message.read(sites[1].respond(dataclasses.replace(wide, about={**wide.about, **changed}).wire))
    assert response.kind == "failure"
    assert why in response.about["why"]


@pytest.mark.full
def test_padding_is_bounded_by_its_size(sets, make_trainer, tmp_path) -> None:
    """A server cannot make a site allocate what its nets alone would allow; the reason says nothing of its data."""
    policy = SitePolicy(min_examples=1, max_padding_mib=1)
    sites = sites_of(as_at_home(sets), sets.task, tmp_path / "sites", policy=policy, own=BOTH)
    channel, remote, strategy = Recorded(sites), make_trainer(num_rounds=1), FedAvg(num_epochs=1)
    remote.fit(ClientModule(NET, SLOW), federate(remote, channel, strategy), strategy)
    start = next(message for message in channel.seen if message.kind == "start")
    wide = dataclasses.replace(start, about={**start.about, "num_features": 10**5})
    why = Message.read(sites[0].respond(wide.wire)).about["why"]
    assert why == (
        "to pad this site's data to 100000 features and 3 outputs takes more than policy.max_padding_mib, 1 MiB: raise "
        "it here, or leave the widest site out of the federation"
    )


def test_padding_of_targets_is_bounded_too(tmp_path) -> None:
    client = graph_data(kind="labels").clients[0]
    guard = Guard(SitePolicy(max_padding_mib=1), client, SumLedger(tmp_path))
    guard.admit_widths(3, 1000, ["outputs"])
    with pytest.raises(Refused, match=r"3 features and 99999 outputs takes more than policy.max_padding_mib"):
        guard.admit_widths(3, 99_999, ["outputs"])


def test_classes_of_images_may_be_their_own(make_trainer, tmp_path) -> None:
    """Whose shape is no width that could be padded."""
    data = FederatedDataModule(Images(), batch_size=8)
    data.setup()
    sites = sites_of(data.clients, data.task, tmp_path, own=["outputs"], net=functools.partial(CNN, filters=(2,)))
    trainer, strategy = make_trainer(num_rounds=1), FedAvg(num_epochs=1)
    trainer.fit(sites[0].model, federate(trainer, LoopbackChannel(sites), strategy), strategy)
    assert trainer.run.registry.own_outputs == (2, 3)


class Images(ExampleSource):
    """Two clients with small images of two and three classes."""

    def load(self, root: Any, seed: int) -> Examples:
        draw = torch.Generator().manual_seed(5)
        x = tuple(torch.randn(12, 1, 8, 8, generator=draw) for _ in "ab")
        return Examples(names=("a", "b"), x=x, y=(torch.arange(12) % 2, torch.arange(12) % 3), num_outputs=3)


def test_sites_that_do_not_say_the_same_are_refused(sets, make_trainer, tmp_path) -> None:
    clients = as_at_home(sets)
    sites = [
        *sites_of(clients[:1], sets.task, tmp_path, own=BOTH),
        *sites_of(clients[1:], sets.task, tmp_path, own=["outputs"]),
    ]
    with pytest.raises(ValueError, match=r"the sites' own must be the same: {.*\['features', 'outputs'\].*Set own in"):
        federate(make_trainer(), LoopbackChannel(sites), FedAvg()).prepare_data()
    with pytest.raises(ValueError, match="own is 'features': give a list of features and outputs, or leave it out"):
        sites_of(clients, sets.task, tmp_path, own="features")


def test_classes_of_their_own_are_not_compared(sets, make_trainer, tmp_path) -> None:
    sites = sites_of(as_at_home(sets), sets.task, tmp_path, FedProto, own=BOTH)
    trainer, strategy = make_trainer(), FedProto()
    with pytest.raises(ValueError, match="FedProto compares classes of clients, but these have classes of their own"):
        trainer.fit(ClientModule(NET), federate(trainer, LoopbackChannel(sites), strategy), strategy)


def test_labels_that_a_client_lacks_are_missing() -> None:
    client = graph_data(kind="labels").clients[0]
    wide = client.widened(7, 5)
    assert (wide.num_features, wide.y_N.shape[1]) == (7, 5)
    assert not wide.inputs[:, 3:].any()
    assert wide.y_N[:, 3:].isnan().all()
    assert torch.equal(wide.inputs[:, :3], client.inputs)
    assert isinstance(wide.union, ClientGraph)
