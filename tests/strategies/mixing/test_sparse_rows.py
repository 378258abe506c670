"""Rows of very many clients are those of a whole table."""

import functools
from typing import Any

import pytest
import torch
from torch.optim import SGD

from fl_lightning.round.participation import Participation
from fl_lightning.strategies import SCAFFOLD
from fl_lightning.strategies.mixing import scaffold
from fl_lightning.strategies.mixing.sparse_rows import SparseRows


def test_rows_and_their_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_lightning.strategies.mixing.sparse_rows._FIRST_ROWS", 2)
    rows, table, draw = SparseRows(torch.zeros(3)), torch.zeros(40, 3), torch.Generator().manual_seed(0)
    for _ in range(20):
        clients = torch.randperm(40, generator=draw)[:5].tolist()
        values = torch.randn(5, 3, generator=draw)
        rows[clients] = table[clients] = values
    torch.testing.assert_close(rows.sum(dim=0), table.sum(dim=0))
    assert torch.equal(rows[list(range(40))], table)
    other = SparseRows(torch.zeros(3))
    other.load_state_dict(rows.state_dict())
    assert torch.equal(other.total, rows.total)
    assert torch.equal(other[list(range(40))], table)
    rows[[0]] = torch.ones(1, 3)
    assert torch.equal(other[[0]], table[:1])  # a state is a copy


def test_scaffold_with_many_clients_is_that_with_few(
    federation: Any, make_model: Any, make_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, corrections = [], []
    for many in (100_000, 1):
        monkeypatch.setattr(scaffold, "MANY_CLIENTS", many)
        strategy = SCAFFOLD()
        participation = Participation(num_clients=3)
        trainer = make_trainer(num_rounds=6, precision="64-true", participation=participation)
        results.append(trainer.fit(make_model(optimizer=functools.partial(SGD, lr=0.1)), federation, strategy))
        corrections.append(torch.cat([strategy.correction(name, [0, 2, 4]).flatten() for name in strategy.shared]))
    assert results[0] == pytest.approx(results[1])
    torch.testing.assert_close(*corrections)
