import pickle

import pytest
import torch

from fl_lightning import Payload
from fl_lightning.remote import Message
from fl_lightning.remote.message import packed


def test_types_shapes_values_and_order_survive() -> None:
    base = torch.arange(12, dtype=torch.float32)
    tensors = {
        "z": base.view(3, 4).T,
        "half": torch.tensor([1.5, -0.0, float("inf")], dtype=torch.bfloat16),
        "a": base.double(),
        "shared": base,
        "whole": torch.tensor([2**62, -1]),
        "flags": torch.tensor([True, False]),
        "number": torch.tensor(3.0),
        "nothing": torch.zeros(0, 3),
        "spread": torch.ones(1).expand(5, 1),
    }
    message = Message(kind="run", about={"work_fraction": 0.1 + 0.2, "list": [1, None, "é"]}, tensors=tensors)

    actual = Message.read(message.wire)

    assert (actual.kind, actual.about) == ("run", message.about)
    assert list(actual.tensors) == list(tensors)
    for name, tensor in tensors.items():
        assert actual.tensors[name].dtype == tensor.dtype
        assert torch.equal(actual.tensors[name], tensor)
    assert actual.name == message.name == Message(kind="run", about=message.about, tensors=tensors).name
    assert Message(kind="run", about={**message.about, "work_fraction": 0.3}, tensors=tensors).name != message.name


@pytest.mark.parametrize("wire", [b"", b"123", pickle.dumps({"kind": "run"}), b"\xff" * 40], ids=len)
def test_other_bytes_are_refused(wire: bytes) -> None:
    with pytest.raises(ValueError, match="that are not a message"):
        Message.read(wire)


def test_one_clients_row_is_communicated_without_padding() -> None:
    payload = Payload(
        clients=(2, 5),
        parameters={"w": torch.tensor([[1.0], [2.0]])},
        extras={"rows": torch.arange(12.0).view(2, 3, 2)},
        num_examples=torch.tensor([7, 9]),
        lengths={"rows": torch.tensor([1, 3])},
    )

    first, second = (
        Message(kind="run", tensors=packed(payload, client, "0/")).payload((client,), "0/") for client in (2, 5)
    )

    assert first.extras["rows"].shape == (1, 1, 2)
    assert second.extras["rows"].shape == (1, 3, 2)
    assert first.num_examples.tolist() == [7]
    assert torch.equal(second.parameters["w"], torch.tensor([[2.0]]))
    assert packed(None, 2) == {}
    assert Message(kind="run").payload((0,)) is None
