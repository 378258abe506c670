"""What the shape of a graph says of its nodes: by hand, in mini-batches, on a stack and under vmap."""

import pytest
import torch
from task_data import graph_data

from fl_lightning.batches.base import single
from fl_lightning.batches.graph_sets import GraphSetCollator
from fl_lightning.kernels.csr import csr_from_coo
from fl_lightning.kernels.node_facts import components, node_facts, spectrum, walk_returns


def matrix_of(edges: list[tuple[int, int]], num_nodes: int, *, both: bool = True) -> torch.Tensor:
    dense = torch.zeros(num_nodes, num_nodes)
    for source, target in edges:
        dense[target, source] = 1
        if both:
            dense[source, target] = 1
    return csr_from_coo(dense.to_sparse())


#: A triangle, a path of three, a node alone; the nodes are mixed.
TRIANGLE, PATH, ALONE = (0, 2, 5), (1, 3, 6), 4
MIXED = matrix_of([(0, 2), (2, 5), (0, 5), (1, 3), (3, 6)], 7)


def test_walks_return_as_by_hand() -> None:
    found = walk_returns(MIXED, 4)
    for node in TRIANGLE:
        torch.testing.assert_close(found[node], torch.tensor([0, 1 / 2, 1 / 4, 3 / 8]).double())
    torch.testing.assert_close(found[3], torch.tensor([0.0, 1, 0, 1]).double())
    for end in (1, 6):
        torch.testing.assert_close(found[end], torch.tensor([0, 1 / 2, 0, 1 / 2]).double())
    assert not found[ALONE].any()  # and is finite


def test_a_walk_along_directed_edges_comes_back_around() -> None:
    found = walk_returns(matrix_of([(0, 1), (1, 2), (2, 0)], 3, both=False), 3)
    assert found.tolist() == [[0, 0, 1]] * 3


def test_components_of_one_size_come_together() -> None:
    parts = [node_BN.tolist() for node_BN, _ in components(MIXED)]
    assert [sorted(each) for each in parts] == [[list(TRIANGLE), list(PATH)]]


def test_the_spectrum_makes_the_laplacian() -> None:
    found = spectrum(MIXED)
    width = (found.shape[1] - 1) // 2
    torch.testing.assert_close(found[list(TRIANGLE), 0], torch.tensor([0.0, 3, 3]).double(), atol=1e-12, rtol=0)
    torch.testing.assert_close(found[list(PATH), 0], torch.tensor([0.0, 1, 3]).double(), atol=1e-12, rtol=0)
    vector, holder = found[:, 1 : 1 + width], found[:, 1 + width :].long() + torch.arange(7)[:, None]
    edges = MIXED.to_dense().double()
    laplacian = torch.diag(edges.sum(dim=1)) - edges
    for members in (TRIANGLE, PATH):
        rows = list(members)
        made = (vector[rows] * found[holder[rows[0]], 0]) @ vector[rows].T
        torch.testing.assert_close(made, laplacian[rows][:, rows])


def test_one_way_edges_have_no_spectrum() -> None:
    with pytest.raises(ValueError, match="edges that go one way only"):
        spectrum(matrix_of([(0, 1)], 2, both=False))


@pytest.mark.parametrize(("find", "settings"), [(walk_returns, (5,)), (spectrum, ())])
def test_they_are_found_once_and_follow_the_nodes(find, settings) -> None:
    """Of a stack, of some of its clients, under vmap, and of mini-batches, against each drawn graph alone."""
    calls = []

    def counted(matrix, *given):
        calls.append(len(matrix))
        return find(matrix, *given)

    collator = GraphSetCollator(graph_data().clients, batch_size=4, device=torch.device("cpu"), dtype=torch.float64)
    whole = collator([0, 1, 2])
    found = node_facts(whole.adjacency, counted, *settings, owner=whole.node_mask)
    mapped = torch.vmap(lambda mask: node_facts(whole.adjacency, counted, *settings, owner=mask))(whole.node_mask)
    assert torch.equal(mapped, found)
    some = whole.select(torch.tensor([2, 0]))
    chosen = node_facts(some.adjacency, counted, *settings, owner=some.node_mask)
    assert torch.equal(chosen, found[[2, 0], : chosen.shape[1]])
    for drawn in whole.draws(torch.arange(9).view(3, 3)):
        facts = node_facts(drawn.adjacency, counted, *settings, owner=drawn.node_mask)
        assert not facts[~drawn.node_mask].any()
        anew = find(drawn.adjacency.matrix, *settings).view(*drawn.node_mask.shape, -1)
        width = 1 if find is spectrum else facts.shape[-1]  # the eigenvalues: other widths, other bases
        torch.testing.assert_close(facts[..., :width], anew[..., :width])
    assert len(calls) == 1


def test_one_client_has_its_rows_of_the_stack() -> None:
    collator = GraphSetCollator(graph_data().clients, device=torch.device("cpu"), dtype=torch.float64)
    whole = collator([0, 1, 2])
    stacked = node_facts(whole.adjacency, walk_returns, 3, owner=whole.node_mask)
    for client in range(3):
        own = single(collator([client]))
        found = node_facts(own.adjacency, walk_returns, 3, owner=own.node_mask)
        assert torch.equal(found, stacked[client, : len(found)])


@pytest.mark.parametrize(
    ("free", "message"),
    [
        (70, "the dense matrix of a graph with 3 connected nodes would take 72 bytes"),
        (390, "the eigenvectors of 7 nodes, of which up to 3 are connected, would take 392 bytes"),
    ],
)
def test_what_does_not_fit_into_memory_is_refused(free: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_lightning.memory.available", lambda device: free)
    with pytest.raises(ValueError, match=rf"{message} .*: leave the large graphs out"):
        spectrum(MIXED)


def test_what_fits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fl_lightning.memory.available", lambda device: 392)
    assert spectrum(MIXED).shape == (7, 7)
