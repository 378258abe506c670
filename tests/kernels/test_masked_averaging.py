"""Mixing over the clients that moved a number."""

import pytest
import torch

from fl_lightning.kernels.masked_averaging import masked_average

W = torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.0, 1.0]], dtype=torch.float64)
RECEIVED = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0], [9.0, 10.0, 11.0, 12.0]], dtype=torch.float64)
#: The first number is moved by all, the second by 0 and 1, the third by 2, the fourth by nobody.
SENT = torch.tensor([[0.0, 1.0, 3.0, 4.0], [2.0, 4.0, 7.0, 8.0], [4.0, 10.0, 5.0, 12.0]], dtype=torch.float64)


def test_by_hand() -> None:
    expected = [
        [0.5 * 0 + 0.25 * 2 + 0.25 * 4, (0.5 * 1 + 0.25 * 4) / 0.75, 5.0, 0.5 * 4 + 0.25 * 8 + 0.25 * 12],
        [4.0, 10.0, 5.0, 12.0],  # takes of client 2 alone, whether it moved the number or not
    ]

    assert masked_average(W, SENT, RECEIVED).tolist() == expected


def test_one_row_received_by_all() -> None:
    received = torch.tensor([[0.0, 1.0]])
    sent = torch.tensor([[0.0, 3.0], [0.0, 1.0], [6.0, 1.0]])

    assert masked_average(torch.tensor([[0.5, 0.25, 0.25]]), sent, received).tolist() == [[6.0, 3.0]]


def test_it_is_plain_mixing_where_everyone_moved_everything() -> None:
    mixed = masked_average(W, SENT, SENT + 1)

    torch.testing.assert_close(mixed, W @ SENT, rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_neither_input_is_changed(dtype) -> None:
    sent, received, mixing = SENT.to(dtype), RECEIVED.to(dtype), W.clone()

    mixed = masked_average(mixing, sent, received)

    assert mixed.dtype == dtype
    assert torch.equal(sent, SENT.to(dtype))
    assert torch.equal(received, RECEIVED.to(dtype))
    assert torch.equal(mixing, W)
