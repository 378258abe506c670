"""Every setting of every strategy under secure aggregation: done as in the open run, or refused before the start.

The arithmetic of the server alone: clients' responses are drawn at random, some of their numbers as they were received,
and the server is given the rows, or what a secure sum leaves of them. Runs over sites are in ``test_secure.py``.
"""

import dataclasses
import functools
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

import pytest
import torch
from lightning.fabric import Fabric
from strategies.test_contract import STRATEGIES, tiny
from torch.optim import SGD

from fl_lightning import FederatedDataModule, Payload
from fl_lightning.data import GivenPartitioner, PlantedCommunities
from fl_lightning.models import GCN
from fl_lightning.relations.topology import Ring
from fl_lightning.remote import masking
from fl_lightning.remote.secure import check_stages, mean_of, summand, weighting_of
from fl_lightning.round.client import ClientModule
from fl_lightning.run.assembly import build_nets, describe_federation
from fl_lightning.strategies import FedAvg, FedOpt
from fl_lightning.strategies.mixing import CoordinateMedian
from fl_lightning.testing.federations import GROUPS

pytestmark = pytest.mark.filterwarnings("ignore")
NUM_CLIENTS, NUM_ROUNDS = 4, 2


def values_of(setting: dataclasses.Field) -> list[Any]:
    """A few values of a setting, some of which it may refuse."""
    kind, choices = setting.type, get_args(setting.type)
    if get_origin(kind) is Literal:
        return list(choices)
    members = choices if isinstance(kind, types.UnionType) or get_origin(kind) is Union else (kind,)
    actual: list[Any] = []
    for member in members:
        if get_origin(member) is Literal:
            actual += get_args(member)
        elif member is bool:
            actual += [False, True]
        elif member is int:
            actual += [0, 1, 2, 5]
        elif member is float:
            actual += [0.0, 0.1, 0.5, 1.0, 2.0]
        elif member is type(None):
            actual += [None]
        elif "Sequence[str]" in str(member):
            actual += [["head.*"], ["convs.0.*"], []]
        elif "Aggregation" in str(member):
            actual += [CoordinateMedian()]
    return actual


def variants(kind) -> Iterator[tuple[str, Any]]:
    """The strategy with one setting after another at each of a few values, as far as it takes them."""
    yield "", tiny(kind)
    for setting in dataclasses.fields(kind):
        for value in values_of(setting) if setting.init else ():
            plain = {f.name: getattr(tiny(kind), f.name) for f in dataclasses.fields(kind) if f.init}
            try:
                yield f"{setting.name}={value}", kind(**plain | {setting.name: value})
            except (TypeError, ValueError):
                continue


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> FederatedDataModule:
    folder = tmp_path_factory.mktemp("settings")
    source = PlantedCommunities(num_nodes=80, num_communities=NUM_CLIENTS, num_features=6, num_classes=3)
    actual = FederatedDataModule(source, GivenPartitioner(), relation_graph=Ring(), cache_dir=folder, root=folder)
    actual.setup()
    return actual


def set_up(strategy, data) -> None:
    kind = type(strategy)
    net = kind.default_net or functools.partial(GCN, hidden_channels=4)
    own = {} if kind.client_class is not ClientModule and kind.default_net is None else {"net": net}
    model, fabric = (
        kind.client_class(**own, optimizer=functools.partial(SGD, lr=0.05)),
        Fabric(accelerator="cpu", devices=1),
    )
    nets = build_nets(fabric, model, strategy, data.registry, 0)
    strategy.setup(describe_federation(fabric, model, data.registry, tuple(range(NUM_CLIENTS)), nets, 0))


def answers(strategy, stage, sent, round_idx: int) -> Payload:
    """What clients might send: of each number about half of them have moved it."""
    draw = torch.Generator().manual_seed(round_idx)
    clients = tuple(range(NUM_CLIENTS))
    parameters = {}
    for name in stage.upload:
        like = strategy.federation.parameters[name]
        start = sent.parameters[name] if sent is not None and name in sent.parameters else like[None]
        moved = torch.rand(NUM_CLIENTS, *like.shape, generator=draw) < 0.5
        parameters[name] = start + moved * torch.randn(NUM_CLIENTS, *like.shape, generator=draw)
    counts = torch.tensor([3, 10, 1, 7])
    return Payload(clients=clients, parameters=parameters, num_examples=counts, num_steps=torch.tensor([1, 2, 3, 4]))


def summed(upload: Payload, weighting, stage, like) -> Payload:
    """What secure aggregation leaves of it."""
    total = sum(masking.to_whole(*summand(upload.rows([c]), weighting), NUM_CLIENTS) for c in upload.clients)
    return mean_of(masking.from_whole(total), upload.clients, stage, like)


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors and numbers of a state."""
    if isinstance(value, torch.Tensor):
        yield path, value.double()
    elif isinstance(value, int | float):
        yield path, torch.tensor(float(value))
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from numbers(each, f"{path}/{name}")
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from numbers(each, f"{path}/{index}")


def difference(make, data) -> str:
    """By what the server's state and its models differ after two rounds; empty for nothing.

    Raises:
        ValueError: It is refused.
    """
    both = [make(), make()]
    for strategy in both:
        if hasattr(strategy, "groups"):
            strategy.groups = list(GROUPS[:NUM_CLIENTS])
    weighting = weighting_of(both[0])
    for strategy in both:
        set_up(strategy, data)
    check_stages(both[0])
    clients = tuple(range(NUM_CLIENTS))
    for round_idx in range(NUM_ROUNDS):
        rows = None
        for strategy in both:
            for stage in strategy.stages(round_idx):
                sent = strategy.configure(stage, clients)
                if strategy is both[0]:
                    rows = answers(strategy, stage, sent, round_idx)
                    strategy.aggregate(stage, rows)
                else:
                    strategy.aggregate(
                        stage,
                        summed(
                            answers(both[1], stage, sent, round_idx), weighting, stage, strategy.federation.parameters
                        ),
                    )
        states = [dict(numbers(strategy.state_dict())) for strategy in both]
        for strategy, state in zip(both, states, strict=True):
            for kind, evaluation in strategy.evaluations(clients).items():
                if evaluation.payload is not None:
                    state |= dict(numbers(evaluation.payload.tensors(), kind))
        if states[0].keys() != states[1].keys():
            return f"{states[0].keys() ^ states[1].keys()}"
        for name, value in states[0].items():
            if not torch.allclose(value, states[1][name], atol=1e-4, rtol=1e-4, equal_nan=True):
                return f"{name} by {float((value - states[1][name]).abs().max()):.2g}"
    return ""


@pytest.mark.parametrize("kind", STRATEGIES, ids=lambda kind: kind.__name__)
def test_every_setting_is_carried_out_or_refused(kind, data) -> None:
    wrong, done = [], 0
    for name, built in variants(kind):
        try:
            actual = difference(lambda built=built: dataclasses.replace(built), data)
        except ValueError:
            continue
        done += 1
        if actual:
            wrong.append(f"{name}: {actual}")
    assert not wrong
    try:
        weighting_of(tiny(kind))
    except ValueError:
        assert not done  # no single setting makes a strategy that needs rows content with sums
    else:
        assert done > 3


def test_a_setting_that_changes_the_sum_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match=r"strategy\.masked_averaging of FedAvg needs the response of each client"):
        weighting_of(FedAvg(masked_averaging=True))
    with pytest.raises(ValueError, match=r"strategy\.masked_averaging of FedOpt"):
        weighting_of(FedOpt(masked_averaging=True))


def test_the_crossing_notices_what_is_plain_averaging_without_a_word(data, monkeypatch) -> None:
    """As it was: masked_averaging under a sum was the plain average."""
    monkeypatch.setattr(FedAvg, "settings_against_sums", lambda self: [])
    assert difference(lambda: FedAvg(masked_averaging=True), data).startswith("/models/")
    assert not difference(lambda: FedAvg(), data)
