import pytest
import torch

from fl_lightning.relations.node_matching import common_neighbors

#: Node 0 of client 0 and node 1 of client 1 have the same neighbors; node 1 of client 2 has one of them; node 0 of
#: client 1 has one in common with node 1 of its own client and with node 0 of client 0.
IDS = torch.tensor([[[5, 7, 0], [0, 0, 0]], [[7, 9, 0], [5, 7, 0]], [[3, 0, 0], [5, 8, 0]]])


@pytest.mark.parametrize(("same", "expected"), [(True, {(0, 3)}), (False, {(0, 3), (0, 2), (0, 5), (3, 5)})])
def test_who_is_matched(same, expected) -> None:
    pairs = list(zip(*(numbers.tolist() for numbers in common_neighbors(IDS, same=same)), strict=True))
    assert set(pairs) == expected | {(second, first) for first, second in expected}
    assert len(pairs) == len(set(pairs))


@pytest.mark.parametrize("shape", [(3, 0, 2), (3, 4, 0), (3, 4, 2)])
def test_nobody_is_known(shape) -> None:
    assert [len(numbers) for numbers in common_neighbors(torch.zeros(shape, dtype=torch.int64), same=False)] == [0, 0]
