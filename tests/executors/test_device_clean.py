"""What clients compute names the device of the tensors that it makes, which lie on the CPU otherwise, also on a GPU."""

import functools
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from strategies import test_contract
from strategies.test_contract import every_strategy, tiny
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from fl_lightning import StackedExecutor
from fl_lightning.executors.group import GroupTraining
from fl_lightning.round.client import ClientModule
from fl_lightning.testing import StrategyRuns

pytestmark = test_contract.pytestmark
#: Those of sparse tensors are made where their values are.
MAKES_TENSORS = _device_constructors() - {torch.sparse_csr_tensor, torch.sparse_coo_tensor}


class Unnamed(TorchFunctionMode):
    """Where tensors are made without a device."""

    def __init__(self) -> None:
        super().__init__()
        self.places: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in MAKES_TENSORS and (kwargs or {}).get("device") is None:
            frames = traceback.extract_stack()[:-1]
            place = next((frame for frame in reversed(frames) if "/fl_lightning/" in frame.filename), frames[-1])
            self.places.add(f"{func.__name__} in {place.filename}:{place.lineno}")
        return func(*args, **(kwargs or {}))

    def watched(self, function: Any) -> Any:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return call


@pytest.mark.full
@every_strategy
def test_what_clients_compute_names_its_device(
    kind: Any, federation: Any, make_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unnamed = Unnamed()
    for owner, name in ((GroupTraining, "run"), (ClientModule, "output"), (ClientModule, "predictions")):
        monkeypatch.setattr(owner, name, unnamed.watched(getattr(owner, name)))
    runs = StrategyRuns(tiny(kind), federation, tmp_path, make_model(kind, dropout=0.5))
    assert runs.run(StackedExecutor(), num_rounds=2).result
    assert not unnamed.places


def test_what_has_no_device_is_found() -> None:
    unnamed = Unnamed()
    unnamed.watched(lambda: torch.arange(3, device="cpu"))()
    assert not unnamed.places
    unnamed.watched(lambda: torch.arange(3))()
    assert [place.partition(":")[0] for place in unnamed.places] == [f"arange in {__file__}"]
