"""Splits that keep groups together."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import Data

import fl_lightning as fl
from fl_lightning.data import GivenPartitioner, GroupSplit, OverlappingMetisPartitioner, RandomPartitioner, Role


def examples(*sizes: int) -> Data:
    """Groups of these sizes, one after another."""
    patient_N = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    return Data(y=torch.zeros(len(patient_N), dtype=torch.int64), num_nodes=len(patient_N), patient=patient_N)


def roles_of(data: Data, seed: int = 0, **changed: Any) -> list[int]:
    """The role of each group, which all of its examples have."""
    [role_N] = GroupSplit("patient", **changed)(data, [torch.arange(data.num_nodes)], seed)
    found = [role_N[data.patient == patient].unique().tolist() for patient in data.patient.unique()]
    assert all(len(each) == 1 for each in found)
    return [each[0] for each in found]


def test_largest_first_by_hand() -> None:
    """Of 100, 50 and 20 train, 15 validates as 85 is at most 90, 10 makes it 80, and the last 5 would make it 100."""
    expected = [Role.TEST, Role.TRAIN, Role.TRAIN, Role.TRAIN, Role.VAL]
    for seed in (0, 1):
        assert roles_of(examples(5, 50, 10, 20, 15), seed, largest_first=True) == expected


@settings(max_examples=60, deadline=None)
@given(groups=st.lists(st.integers(0, 30), min_size=40, max_size=90))
def test_largest_first_is_the_split_by_scaffold_of_moleculenet(groups: list[int]) -> None:
    """DeepChem's ``ScaffoldSplitter.split``, whose code the Open Graph Benchmark took its splits from."""
    groups, indices = [0, 1, 2, *groups], dict[int, list[int]]()
    for index, group in enumerate(groups):
        indices.setdefault(group, []).append(index)
    expected: dict[Role, list[int]] = {Role.TRAIN: [], Role.VAL: [], Role.TEST: []}
    for of_group in sorted(indices.values(), key=lambda each: (len(each), each[0]), reverse=True):
        if len(expected[Role.TRAIN]) + len(of_group) <= 0.8 * len(groups):
            expected[Role.TRAIN] += of_group
        elif len(expected[Role.TRAIN]) + len(expected[Role.VAL]) + len(of_group) <= (0.8 + 0.1) * len(groups):
            expected[Role.VAL] += of_group
        else:
            expected[Role.TEST] += of_group
    data = Data(y=torch.zeros(len(groups)), num_nodes=len(groups), patient=torch.tensor(groups))
    [role_N] = GroupSplit("patient", largest_first=True).assign(data, [torch.arange(len(groups))], 0)
    if all(expected.values()):
        assert {role: (role_N == role).nonzero().flatten().tolist() for role in expected} == {
            role: sorted(each) for role, each in expected.items()
        }


def test_large_groups_train() -> None:
    """Those of 30 and 20 are more than half of the 10 that validate: they come first in every order."""
    drawn = {tuple(roles_of(examples(30, 20, *[1] * 50), seed)) for seed in range(5)}
    assert len(drawn) == 5
    assert {each[:2] for each in drawn} == {(Role.TRAIN, Role.TRAIN)}
    for each in drawn:
        assert [each.count(role) for role in (Role.TRAIN, Role.VAL, Role.TEST)] == [2 + 30, 10, 10]


@pytest.mark.filterwarnings("ignore:GroupSplit leaves clients")
def test_every_role_gets_a_group_if_there_are_as_many() -> None:
    """Three of 10, of which 18, 6 and 6 were wanted."""
    assert sorted(roles_of(examples(10, 10, 10), train=0.6, val=0.2)) == [Role.TRAIN, Role.VAL, Role.TEST]
    assert sorted(roles_of(examples(10, 10), train=0.8, val=0.0)) == [Role.TRAIN, Role.TEST]
    assert roles_of(examples(10, 10), train=1.0, val=0.0) == [Role.TRAIN, Role.TRAIN]
    with pytest.raises(ValueError, match="by='patient' has 2 groups for 3 roles, one for each is needed"):
        roles_of(examples(10, 10))


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=3, max_size=60),
    seed=st.integers(0, 99),
    largest_first=st.booleans(),
)
def test_shares_are_kept_to_within_a_group(sizes: list[int], seed: int, largest_first: bool) -> None:
    roles = roles_of(examples(*sizes), seed, train=0.6, val=0.2, largest_first=largest_first)
    total = sum(sizes)
    for role, share in ((Role.TRAIN, 0.6), (Role.VAL, 0.2), (Role.TEST, 0.2)):
        got = sum(size for size, each in zip(sizes, roles, strict=True) if each == role)
        assert got > 0
        assert abs(got - share * total) <= 2 * max(sizes) + 1


def test_the_seed_decides() -> None:
    data = examples(*[2] * 30)
    assert roles_of(data, 3) == roles_of(data, 3) != roles_of(data, 4)


def test_examples_without_a_label_have_no_role_and_do_not_count() -> None:
    data = examples(10, 10, 10, 10)
    data.y[data.patient == 0] = -1
    [role_N] = GroupSplit("patient", 0.34, 0.33)(data, [torch.arange(40)])
    assert role_N[:10].tolist() == [Role.UNUSED] * 10
    assert sorted(role_N[10:].unique().tolist()) == [Role.TRAIN, Role.VAL, Role.TEST]


@pytest.mark.filterwarnings("ignore:GroupSplit leaves clients")
def test_a_group_of_a_graph_has_one_role_in_all_clients(planted: Data) -> None:
    planted.family = torch.arange(planted.num_nodes) // 5
    clients = OverlappingMetisPartitioner(20)(planted)
    role_of: dict[int, int] = {}
    for nodes, role_N in zip(clients, GroupSplit("family", 0.6, 0.2)(planted, clients), strict=True):
        for family, role in zip(planted.family[nodes].tolist(), role_N.tolist(), strict=True):
            assert role_of.setdefault(family, role) == role
    assert set(role_of.values()) == {Role.TRAIN, Role.VAL, Role.TEST}


@pytest.mark.filterwarnings("ignore:GroupSplit leaves clients")
def test_patients_of_hospitals() -> None:
    """From a table with texts, where one patient is in two hospitals."""
    patients = [f"p{number % 12}" for number in range(48)]
    columns = {"patient": patients, "hospital": ["north", "south", "east"] * 16}
    source = fl.data.InMemoryExampleSet((torch.rand(48, 3), torch.arange(48) % 2), columns)
    data = fl.FederatedDataModule(source, GivenPartitioner("hospital"), GroupSplit("patient", 0.6, 0.2))
    data.setup()
    roles: dict[str, set[str]] = {}
    for number, client in enumerate(data.clients):
        for role in ("train", "val", "test"):
            for row in data.source_idx_N(number)[getattr(client, f"{role}_mask_N")].tolist():
                roles.setdefault(patients[row], set()).add(role)
    assert len(roles) == 12
    assert all(len(each) == 1 for each in roles.values())


def test_what_there_is_no_column_of_is_said() -> None:
    source = fl.data.InMemoryExampleSet((torch.rand(20, 3), torch.arange(20) % 2), {"age": [*range(20)]})
    data = fl.FederatedDataModule(source, RandomPartitioner(2), GroupSplit("patient"))
    with pytest.raises(ValueError, match="by='patient' is not a number of each example, as age, features, y are"):
        data.setup()


def test_a_client_without_training_examples_is_refused() -> None:
    data = examples(10, 10, 10)
    with pytest.raises(ValueError, match="or split by smaller groups than those of 'patient'"):
        GroupSplit("patient", 0.34, 0.33)(data, [torch.arange(0, 20), torch.arange(20, 30)], 1)
