"""Settings stay as they were given, and counts are whole numbers, in everything that can be constructed."""

import dataclasses
import inspect
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args, get_origin

import pytest
import torch

import fl_lightning as fl
from fl_lightning.cli import known_classes
from fl_lightning.counts import Counted
from fl_lightning.round.client import ClientModule
from fl_lightning.run.callback import Callback
from fl_lightning.strategies import Oracle, Strategy

KNOWN = {name: kind for name, kind in known_classes().items() if kind.__module__.startswith("fl_lightning.")}
STRATEGIES = [kind for kind in KNOWN.values() if issubclass(kind, Strategy) and not inspect.isabstract(kind)]
every_strategy = pytest.mark.parametrize("kind", STRATEGIES, ids=lambda kind: kind.__name__)


def other_values(setting: Any, value: Any) -> Iterator[Any]:
    """Values that a setting of this type may have beside the present one."""
    kinds = (setting.type,) if get_origin(setting.type) in (tuple, Sequence) else get_args(setting.type)
    kinds = kinds or (setting.type,)
    if get_origin(setting.type) is Literal:
        yield from (each for each in kinds if each != value)
    elif bool in kinds:
        yield not value
    elif int in kinds or float in kinds:
        yield (value or 1) + 1
        yield (value or 1) if int in kinds else 0.5 * (value or 1)
    if type(None) in kinds:
        yield None


def outcome(make: Any) -> tuple[str, Any]:
    """What a constructor makes, or why it refuses."""
    try:
        made = make()
    except ValueError as error:
        return "refused", str(error)
    return "made", {setting.name: getattr(made, setting.name) for setting in dataclasses.fields(made)}


@every_strategy
def test_a_replaced_setting_gives_what_a_new_object_gives(kind: type[Strategy]) -> None:
    first = kind()
    tried = 0
    for setting in dataclasses.fields(kind):
        if not setting.init:
            continue
        for value in other_values(setting, getattr(first, setting.name)):
            new = outcome(lambda: kind(**{setting.name: value}))  # noqa: B023
            assert outcome(lambda: dataclasses.replace(first, **{setting.name: value})) == new  # noqa: B023
            if new[0] == "made":
                assert new[1][setting.name] == value
                tried += 1
    assert tried >= 2


@every_strategy
def test_settings_are_what_was_given(kind: type[Strategy], federation: Any, make_model: Any, make_trainer: Any) -> None:
    strategy = kind(groups=(0, 1, 1, 0, 1)) if kind is Oracle else kind()
    for setting in dataclasses.fields(kind):
        if setting.init and setting.default is not dataclasses.MISSING and setting.name != "groups":
            assert getattr(strategy, setting.name) == setting.default
    if "personal" not in {setting.name for setting in dataclasses.fields(kind)} or kind.__name__ == "FedTAD":
        return
    before = outcome(lambda: strategy)
    sized = {"num_neighbors": 2} if kind.__name__ in ("FedSheafHN", "SheafRidge") else {}
    strategy = dataclasses.replace(strategy, num_epochs=1, **sized)
    make_trainer(num_rounds=1).fit(make_model(kind), federation, strategy)
    assert outcome(lambda: strategy)[1] == before[1] | {"num_epochs": 1} | sized


def counts() -> dict[type, list[str]]:
    """The parameters of every public class that are whole numbers; nets check their widths when they are built."""
    sections = (fl, fl.strategies, fl.callbacks, fl.data, fl.models, fl.relations)
    public = {getattr(package, name) for package in sections for name in package.__all__}
    kinds = {kind for kind in {*public, *KNOWN.values()} if inspect.isclass(kind) and not inspect.isabstract(kind)}
    kinds = {kind for kind in kinds if issubclass(kind, Counted | Strategy)}
    actual = {
        kind: [
            name for name, each in inspect.signature(kind).parameters.items() if each.annotation in (int, int | None)
        ]
        for kind in sorted(kinds, key=lambda kind: kind.__name__)
    }
    return {kind: names for kind, names in actual.items() if names}


COUNTS = counts()


def fill(parameter: inspect.Parameter) -> Any:
    """Some value for a parameter that has no default."""
    return {int: 4, float: 0.5, str: "x"}.get(parameter.annotation, torch.nn.Identity)


def test_what_takes_counts_is_found() -> None:
    actual = {kind.__name__ for kind in COUNTS}
    few = {"FederatedTrainer", "FederatedDataModule", "Participation", "FedAvg", "MetisPartitioner", "ErdosRenyi"}
    assert actual > few | {"FederatedCheckpoint", "PlantedCommunities", "StackedExecutor", "Krum", "BarabasiAlbert"}


@pytest.mark.parametrize("kind", COUNTS, ids=lambda kind: kind.__name__)
def test_counts_are_whole_numbers(kind: type) -> None:
    parameters = inspect.signature(kind).parameters.values()
    needed = {p.name: fill(p) for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD}
    for name in COUNTS[kind]:
        for value in (2.5, True):
            with pytest.raises(ValueError, match=rf"{name}\b.*(whole number|impossible)"):
                pytest.fail(f"{name}={value} is taken: {kind(**{**needed, name: value})}")


def test_a_users_own_classes_are_checked_too() -> None:
    class Mine(Callback):
        def __init__(self, every: int | None = 1, *rounds: int, share: float = 1.0) -> None:
            self.every, self.rounds, self.share = every, rounds, share

    assert Mine(None, share=0.5).every is None
    assert Mine(3, 4, 5).rounds == (4, 5)
    with pytest.raises(ValueError, match=r"Mine: every must be a whole number, got 1\.5: give 2"):
        Mine(1.5)
    with pytest.raises(TypeError, match="unexpected keyword argument 'no'"):
        Mine(no=1)


CLIENTS = [kind for kind in KNOWN.values() if issubclass(kind, ClientModule)]


@pytest.mark.parametrize("kind", CLIENTS, ids=lambda kind: kind.__name__)
def test_clients_take_the_settings_of_their_base(kind: type[ClientModule]) -> None:
    base = inspect.signature(ClientModule).parameters
    own = inspect.signature(kind).parameters
    assert {name: own[name].default for name in base} == {name: each.default for name, each in base.items()}
    metrics = ["f1"]
    client = kind(gradient_clip_val=3.0, running_statistics="shared", metrics=metrics)
    assert (client.gradient_clip_val, client.running_statistics) == (3.0, "shared")
    assert list(client.metrics) == metrics
