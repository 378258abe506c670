"""What callbacks say of themselves."""

import inspect

import pytest

import fl_lightning.callbacks
from fl_lightning import Callback


def subclasses(base: type[Callback]) -> list[type[Callback]]:
    return [base, *(below for child in base.__subclasses__() for below in subclasses(child))]


OURS = [kind for kind in subclasses(Callback) if kind.__module__.startswith(fl_lightning.callbacks.__name__)]


def source(kind: type[Callback]) -> str:
    """What a class and its bases are made of."""
    return "".join(inspect.getsource(base) for base in kind.__mro__ if base not in (Callback, object))


@pytest.mark.parametrize("kind", OURS, ids=lambda kind: kind.__name__)
def test_who_touches_clients_data_says_so(kind) -> None:
    overrides = kind.on_clients is not Callback.on_clients
    assert kind.needs_data == (overrides or "run.datamodule" in source(kind))


def test_who_asks_clients_for_more_than_the_strategy_does_says_so() -> None:
    actual = {kind.__name__ for kind in OURS if kind.invents_stages}
    assert actual == {
        "SimilarityLogger",
        "ModelPoisoning",
        "SignFlip",
        "Backdoor",
        "SimpleTuning",
        "ProjectionAlignment",
    }


def test_the_callbacks_of_every_run_need_neither() -> None:
    for callback in fl_lightning.callbacks.default_callbacks():
        assert not callback.needs_data
        assert not callback.invents_stages
