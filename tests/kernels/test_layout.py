"""Tensors stored column by column."""

import pytest
import torch

from fl_lightning.executors.storage import in_memory
from fl_lightning.kernels.layout import (
    by_columns,
    from_memory_order,
    in_memory_order,
    is_by_columns,
    make_like,
    rows_at,
    stored_as,
)
from fl_lightning.round.payload import finite_rows, row_norms
from fl_lightning.strategies.mixing.base import mix

STACK = torch.arange(24.0).view(2, 3, 4)
COLUMNS = by_columns(STACK)


def test_the_values_stay_where_they_are() -> None:
    assert torch.equal(COLUMNS, STACK)
    assert is_by_columns(COLUMNS)
    assert COLUMNS.stride() == (12, 1, 3)


@pytest.mark.parametrize("shape", [(2, 3), (2, 1, 4), (2, 3, 1), (0, 3, 4), (2, 2, 3, 4)])
def test_others_are_not_by_columns(shape: tuple[int, ...]) -> None:
    assert not is_by_columns(torch.zeros(shape))
    assert not is_by_columns(by_columns(torch.zeros(shape)))


def test_memory_is_made_as_another_tensor_is_stored() -> None:
    more = make_like(in_memory, (5, 3, 4), COLUMNS.double())

    assert more.shape == (5, 3, 4)
    assert more.dtype == torch.float64
    assert is_by_columns(more)
    assert is_by_columns(make_like(in_memory, (5, 3, 4), COLUMNS[0]))
    assert make_like(in_memory, (5, 4), STACK).is_contiguous()


@pytest.mark.parametrize("rows", [slice(1, 2), torch.tensor([1, 0, 1])], ids=["slice", "numbers"])
def test_rows_are_stored_as_before(rows: slice | torch.Tensor) -> None:
    assert torch.equal(rows_at(COLUMNS, rows), STACK[rows])
    assert is_by_columns(rows_at(COLUMNS, rows))
    assert rows_at(STACK, rows).is_contiguous()


def test_rows_of_numbers_come_as_they_are_stored_and_go_back() -> None:
    assert in_memory_order(STACK)[0].tolist() == list(range(12))
    assert in_memory_order(COLUMNS)[0].tolist() == [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]
    assert in_memory_order(COLUMNS).data_ptr() == COLUMNS.data_ptr()
    for stack in (STACK, COLUMNS):
        back = from_memory_order(2 * in_memory_order(stack), stack)
        assert torch.equal(back, 2 * STACK)
        assert back.stride() == stack.stride()


def test_a_tensor_is_copied_only_to_be_stored_otherwise() -> None:
    assert stored_as(STACK, STACK) is STACK
    assert stored_as(STACK, COLUMNS).stride() == COLUMNS.stride()
    assert torch.equal(stored_as(STACK, COLUMNS), STACK)


@pytest.mark.parametrize("sent", [STACK, COLUMNS], ids=["by rows", "by columns"])
@pytest.mark.parametrize("received", [STACK[:1], by_columns(STACK[:1])], ids=["from rows", "from columns"])
def test_sums_over_clients_do_not_depend_on_it(sent: torch.Tensor, received: torch.Tensor) -> None:
    mixing = torch.tensor([[0.25, 0.75], [1.0, 0.0]])

    assert torch.equal(mix(mixing, sent, None), torch.einsum("rc,cdf->rdf", mixing, STACK))
    masked = mix(mixing, sent, received)
    assert torch.equal(masked[0], STACK[1])  # the first client has moved nothing
    assert row_norms([sent]).tolist() == row_norms([STACK]).tolist()
    wrong = sent.clone()
    wrong[1, 2, 0] = torch.nan
    assert finite_rows([sent, wrong]).tolist() == [True, False]
