"""Weights of PyG's layers, which the stacked executor stores column by column: nothing else may notice."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.nn import GCN, GraphSAGE

from fl_lightning import Callback, Participation, SequentialExecutor, StackedExecutor
from fl_lightning.executors.optimizer_state import unpack_optimizer_state
from fl_lightning.kernels.layout import is_by_columns
from fl_lightning.optimizers import TouchedAdam
from fl_lightning.round.client import ClientModule
from fl_lightning.round.payload import Payload
from fl_lightning.strategies import Ditto, FedAvg

NETS = {
    kind.__name__: functools.partial(kind, hidden_channels=8, num_layers=2, dropout=0.5) for kind in (GCN, GraphSAGE)
}
OPTIMIZERS = {
    "fused Adam": functools.partial(torch.optim.Adam, lr=0.01, weight_decay=5e-4, fused=True),
    "SGD with momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "fused SGD with momentum": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "touched": functools.partial(TouchedAdam, lr=0.01),
    "not value by value": functools.partial(torch.optim.Adafactor, lr=0.01),
}


def trained(
    make_trainer: Any,
    data: Any,
    executor: Any,
    optimizer: str,
    net: str = "GCN",
    path: str = "",
    *,
    num_clients: int = 3,
) -> Any:
    """The run of rounds with three clients of five, so that those of a round are not adjacent and differ in steps."""
    participation = Participation(num_clients=num_clients)
    trainer = make_trainer(num_rounds=4, executor=executor, participation=participation, precision="64-true")
    model = Ditto.client_class(NETS[net], OPTIMIZERS[optimizer])
    trainer.fit(model, data, Ditto(num_epochs=2), ckpt_path=path or None)
    return trainer.run


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("net", list(NETS))
def test_training_is_that_of_one_client_after_another(
    net: str, optimizer: str, federation: Any, make_trainer: Any
) -> None:
    alone, together = (
        trained(make_trainer, federation, executor, optimizer, net).executor
        for executor in (SequentialExecutor(), StackedExecutor(max_padding=0.9))
    )
    expected, state = alone.lasting_state(), together.lasting_state()

    assert any(is_by_columns(tensor) for tensor in together.stack.parameters.values())
    assert state.clients == expected.clients
    for name, tensor in expected.named().items():
        torch.testing.assert_close(state.named()[name], tensor, rtol=1e-7, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


def test_slots_of_the_optimizer_are_stored_likewise(federation: Any, make_trainer: Any) -> None:
    stack = trained(make_trainer, federation, StackedExecutor(), "fused Adam").executor.stack

    columns = [name for name, tensor in stack.parameters.items() if is_by_columns(tensor)]
    assert columns
    for name in columns:
        assert is_by_columns(stack.slots[name]["exp_avg"])
        assert stack.slots[name]["exp_avg"].shape == stack.parameters[name].shape


def test_the_users_module_is_not_rearranged(federation: Any, make_trainer: Any) -> None:
    net = GCN(federation.num_features, 8, 2, federation.num_outputs)
    trainer = make_trainer(num_rounds=1, executor=StackedExecutor())
    trainer.fit(ClientModule(net), federation, FedAvg())

    assert all(parameter.is_contiguous() for parameter in trainer.run.model.net.parameters())


@pytest.mark.parametrize("num_clients", [3, 5], ids=["some", "everybody"])
def test_it_resumes_exactly(
    num_clients: int, federation: Any, make_trainer: Any, tmp_path: Path, assert_same: Any
) -> None:
    class Save(Callback):
        def on_checkpoint_point(self, trainer: Any) -> None:
            if trainer.run.round_idx == 2:
                trainer.save_checkpoint(tmp_path / "second.ckpt")

    make = functools.partial(make_trainer, callbacks=[Save()])
    whole = trained(make, federation, StackedExecutor(), "fused Adam", num_clients=num_clients).executor
    path = str(tmp_path / "second.ckpt")
    resumed = trained(
        make_trainer, federation, StackedExecutor(), "fused Adam", path=path, num_clients=num_clients
    ).executor

    assert_same(resumed.lasting_state().named(), whole.lasting_state().named())


def test_slots_are_restored_as_their_parameter_is_stored() -> None:
    parameter = torch.nn.Parameter(torch.randn(3, 5).T)
    slots = {"exp_avg": torch.randn(1, 5, 3), "step": torch.ones(1)}
    extras = {f"optimizer/{slot}/w": value for slot, value in slots.items()} | {"optimizer/started/w": torch.ones(1)}
    optimizer = torch.optim.Adam([parameter])
    unpack_optimizer_state("w", 0, parameter, optimizer, Payload(clients=(0,), extras=extras))

    restored = optimizer.state[parameter]["exp_avg"]
    assert torch.equal(restored, slots["exp_avg"][0])
    assert restored.stride() == parameter.stride()
