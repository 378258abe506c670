import json
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import Data

from fl_lightning.data import (
    ChronologicalSplit,
    ClientSplit,
    GivenSplit,
    GlobalSplit,
    MetisPartitioner,
    OverlappingMetisPartitioner,
    RandomPartitioner,
    Role,
    ScarceSplit,
    Splitter,
)


def counts(role_N: torch.Tensor) -> list[int]:
    return torch.bincount(role_N.int(), minlength=4).tolist()


def test_global_split_of_the_whole_graph(planted: Data):
    clients = MetisPartitioner(5)(planted)
    roles = GlobalSplit(train=0.4, val=0.3)(planted, clients)
    assert counts(torch.cat(roles)) == [0, 120, 90, 90]
    assert [len(role_N) for role_N in roles] == [len(nodes) for nodes in clients]


def test_a_node_has_one_role_in_all_overlapping_clients(planted: Data):
    clients = OverlappingMetisPartitioner(20)(planted)
    role_of: dict[int, int] = {}
    for nodes, role_N in zip(clients, GlobalSplit()(planted, clients), strict=True):
        for node, role in zip(nodes.tolist(), role_N.tolist(), strict=True):
            assert role_of.setdefault(node, role) == role


def test_client_split_gives_every_client_the_same_shares(planted: Data):
    clients = RandomPartitioner(6)(planted)
    for role_N in ClientSplit(train=0.2, val=0.4)(planted, clients):
        assert counts(role_N) == [0, 10, 20, 20]


@pytest.mark.parametrize("splitter", [GlobalSplit(), ClientSplit()], ids=lambda splitter: type(splitter).__name__)
def test_the_seed_decides(splitter: Splitter, planted: Data):
    clients = MetisPartitioner(5)(planted)
    first, again, other = (torch.cat(splitter(planted, clients, seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_split_and_random_partition_are_independent(planted: Data):
    """With one permutation for both, the first clients would hold nothing but training nodes."""
    for role_N in GlobalSplit()(planted, RandomPartitioner(3)(planted)):
        assert 25 < counts(role_N)[Role.TRAIN] < 55


def test_given_split_leaves_unlabeled_nodes_out(path_graph: Data):
    roles = GivenSplit()(path_graph, [torch.arange(6)])
    assert roles[0].tolist() == [Role.TRAIN, Role.VAL, Role.TEST, Role.TRAIN, Role.VAL, Role.UNUSED]


def test_given_split_chooses_a_column(path_graph: Data):
    data = path_graph.clone()
    for name in ("train_mask", "val_mask", "test_mask"):
        data[name] = torch.stack([torch.zeros(6).bool(), data[name]], dim=1)
    expected = GivenSplit()(path_graph, [torch.arange(6)])[0]
    assert torch.equal(GivenSplit(column=1)(data, [torch.arange(6)])[0], expected)
    with pytest.raises(ValueError, match="column=2: the graph has splits 0 to 1 only"):
        GivenSplit(column=2)(data, [torch.arange(6)])


def test_given_split_refuses_overlapping_or_missing_masks(path_graph: Data):
    data = path_graph.clone()
    data.val_mask = data.train_mask
    with pytest.raises(ValueError, match="val_mask overlaps another mask"):
        GivenSplit()(data, [torch.arange(6)])
    del data.val_mask
    with pytest.raises(ValueError, match="needs the graph's val_mask, which it lacks"):
        GivenSplit()(data, [torch.arange(6)])


@settings(max_examples=50, deadline=None)
@given(
    train=st.floats(0.01, 1.0), rest=st.floats(0.0, 1.0), labels=st.lists(st.integers(-1, 2), min_size=1, max_size=60)
)
def test_shares_are_rounded_and_roles_go_to_labeled_nodes_only(train: float, rest: float, labels: list[int]):
    val = (1 - train) * rest
    y_N = torch.tensor(labels)
    role_N = GlobalSplit(train, val).assign(Data(y=y_N), [torch.arange(len(labels))], seed=0)[0]
    num_labeled = int((y_N >= 0).sum())
    unused, num_train, num_val, _ = counts(role_N)
    assert unused == len(labels) - num_labeled
    assert abs(num_train - train * num_labeled) <= 0.5
    assert abs(num_val - val * num_labeled) <= 1
    assert bool(((role_N == Role.UNUSED) == (y_N < 0)).all())


@pytest.mark.parametrize("shares", [(0.0, 0.5), (0.8, 0.3), (0.5, -0.1), (1.5, 0.0)])
@pytest.mark.parametrize("build", [GlobalSplit, ClientSplit])
def test_senseless_shares(build: Callable[[float, float], Splitter], shares: tuple[float, float]):
    with pytest.raises(
        ValueError,
        match=rf"(must be a number in .*, got ({shares[0]}|{shares[1]})|val={shares[1]} are together more than 1)",
    ):
        build(*shares)


def test_a_client_without_a_training_node(path_graph: Data):
    with pytest.raises(ValueError, match=r"GivenSplit leaves clients \[1\] without a training example.*has 2 in all"):
        GivenSplit()(path_graph, [torch.tensor([0, 3, 4, 5]), torch.tensor([1, 2])])


def test_a_client_without_test_nodes_is_a_warning(path_graph: Data):
    with pytest.warns(UserWarning, match=r"leaves clients \[1\] without a test example"):
        GivenSplit()(path_graph, [torch.tensor([0, 1, 2]), torch.tensor([3, 4, 5])])


def test_client_split_refuses_overlapping_clients(path_graph: Data):
    with pytest.raises(ValueError, match=r"these clients overlap.*Use GlobalSplit"):
        ClientSplit()(path_graph, [torch.tensor([0, 1]), torch.tensor([1, 2])])


def examples(*sizes: int) -> tuple[Data, list[torch.Tensor]]:
    """Clients with so many labeled examples, one after another."""
    return Data(y=torch.zeros(sum(sizes), dtype=torch.int64)), list(torch.arange(sum(sizes)).split(list(sizes)))


def test_chronological_split_goes_by_place():
    roles = ChronologicalSplit(train=0.5, val=0.2)(*examples(10, 4))
    assert roles[0].tolist() == [Role.TRAIN] * 5 + [Role.VAL] * 2 + [Role.TEST] * 3
    assert roles[1].tolist() == [Role.TRAIN] * 2 + [Role.VAL] + [Role.TEST]


@pytest.mark.parametrize(("val", "num_gaps"), [(0.2, 2), (0.0, 1), (0.5, 1)])
def test_gaps_lie_between_the_roles_only(val: float, num_gaps: int):
    roles = ChronologicalSplit(train=0.5, val=val, gap=3).assign(*examples(10 + 3 * num_gaps), seed=0)[0]
    plain = ChronologicalSplit(train=0.5, val=val).assign(*examples(10), seed=0)[0]
    assert roles[roles != Role.UNUSED].tolist() == plain.tolist()
    runs = roles.unique_consecutive(return_counts=True)
    assert runs[1][runs[0] == Role.UNUSED].tolist() == [3] * num_gaps
    assert runs[0][0] == Role.TRAIN
    assert runs[0][-1] != Role.UNUSED


@settings(max_examples=50, deadline=None)
@given(size=st.integers(1, 60), gap=st.integers(0, 8), train=st.floats(0.01, 1.0), rest=st.floats(0.0, 1.0))
def test_chronological_roles_are_in_order(size: int, gap: int, train: float, rest: float):
    try:
        role_N = ChronologicalSplit(train, (1 - train) * rest, gap).assign(*examples(size), seed=0)[0]
    except ValueError as error:
        assert size <= 2 * gap and "too large" in str(error)  # noqa: PT017, PT018
        return
    used = (role_N != Role.UNUSED).nonzero().squeeze(1)
    assert bool((role_N[used].diff() >= 0).all())
    changes = role_N[used].diff() > 0
    assert bool((used.diff()[changes] > gap).all())
    assert bool((used.diff()[~changes] == 1).all())


def test_chronological_split_leaves_unlabeled_examples_in_their_place():
    data, clients = examples(6)
    data.y[1] = -1
    role_N = ChronologicalSplit(train=0.5, val=0.0).assign(data, clients, seed=0)[0]
    assert role_N.tolist() == [Role.TRAIN, Role.UNUSED, Role.TRAIN, Role.TEST, Role.TEST, Role.TEST]


def test_chronological_split_refuses_large_gaps_and_overlapping_clients():
    with pytest.raises(ValueError, match="gap must be at least 0, got -1"):
        ChronologicalSplit(gap=-1)
    with pytest.raises(ValueError, match="gap=4 is too large: client 1 has 8 examples, too few for 2 gaps"):
        ChronologicalSplit(gap=4)(*examples(20, 8))
    with pytest.raises(ValueError, match=r"ChronologicalSplit splits inside each client.*Use GlobalSplit"):
        ChronologicalSplit()(Data(y=torch.zeros(3).long()), [torch.tensor([0, 1]), torch.tensor([1, 2])])


def test_scarce_split_reduces_some_clients_in_each_role():
    inner = ClientSplit(train=0.5, val=0.25)
    whole = inner(*examples(*[40] * 6))
    scarce = ScarceSplit(inner, clients=0.5, keep=0.2)(*examples(*[40] * 6))
    kept = [counts(role_N) for role_N in scarce]
    assert sorted(kept) == [[0, 20, 10, 10]] * 3 + [[32, 4, 2, 2]] * 3
    for before, after in zip(whole, scarce, strict=True):
        assert bool(((after == before) | (after == Role.UNUSED)).all())


def test_scarce_split_keeps_an_example_of_each_role_that_there_is():
    inner = ClientSplit(train=0.5, val=0.0)
    roles = ScarceSplit(inner, clients=1.0, keep=0.01).assign(*examples(6), seed=0)
    assert counts(roles[0]) == [4, 1, 0, 1]


def test_scarce_split_is_drawn_by_the_seed_and_known_by_its_parts():
    split = ScarceSplit(ClientSplit(), clients=0.5, keep=0.2)
    first, again, other = (torch.cat(split(*examples(*[40] * 6), seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    identity = split.identity()
    assert json.loads(json.dumps(identity)) == identity
    assert identity["splitter"] == "ScarceSplit"
    assert identity["of"] == ClientSplit().identity()
    assert ScarceSplit(ClientSplit(train=0.3)).identity() != ScarceSplit(ClientSplit()).identity()


@pytest.mark.parametrize("shares", [(-0.1, 0.2), (1.1, 0.2), (0.5, 0.0), (0.5, 1.2)])
def test_scarce_split_refuses_senseless_shares(shares: tuple[float, float]):
    with pytest.raises(ValueError, match=rf"(clients|keep) must be a number in .*, got ({shares[0]}|{shares[1]})"):
        ScarceSplit(ClientSplit(), *shares)
