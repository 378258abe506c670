"""Edges by codes: equal to PyG's functions, which need several copies of them."""

import pytest
import torch
from torch_geometric.utils import coalesce, remove_self_loops, to_undirected

from fl_lightning.kernels import csr
from fl_lightning.kernels.edge_codes import distinct_codes, edges_of, reversed_codes, with_reverses


@pytest.mark.parametrize("num_edges", [0, 1, 40])
def test_equal_to_pyg(num_edges: int) -> None:
    draw = torch.Generator().manual_seed(num_edges)
    given_2E = torch.randint(9, (2, num_edges), generator=draw)
    once_2E = coalesce(remove_self_loops(given_2E)[0], num_nodes=9)
    code_E = distinct_codes(given_2E, 9)
    assert torch.equal(edges_of(code_E, 9, given_2E), once_2E)
    assert torch.equal(edges_of(with_reverses(code_E, 9), 9), to_undirected(once_2E, num_nodes=9))
    assert torch.equal(edges_of(reversed_codes(code_E, 9), 9), coalesce(once_2E.flip(0), num_nodes=9))


def test_edges_as_they_should_be_are_not_copied() -> None:
    edges_2E = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    code_E = distinct_codes(edges_2E, 3)
    assert with_reverses(code_E, 3) is code_E
    assert edges_of(code_E, 3, edges_2E) is edges_2E


def test_a_csr_matrix_does_not_keep_the_indices_that_it_was_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = []
    make = torch.sparse_csr_tensor
    monkeypatch.setattr(
        torch, "sparse_csr_tensor", lambda *args, **kwargs: parts.extend(args[:3]) or make(*args, **kwargs)
    )
    csr.csr_from_coo(torch.eye(3).to_sparse())
    assert [part._base for part in parts] == [None, None, None]
