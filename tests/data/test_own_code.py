"""What is cached is made again where a partitioner or a splitter of the user's computes something else than before."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch_geometric.data import Data

from fl_lightning import FederatedDataModule
from fl_lightning.data import ClientSplit, MetisPartitioner, ScarceSplit
from fl_lightning.data.own_code import own_code

CODE = """
import helpers

from fl_lightning.data import Partitioner, Splitter

STEP = 2
NAMES = {"b", "a", "c"}

def order(number, *, last=1):
    return sorted(range(number), key=lambda place: (place % STEP, place * last, sorted(NAMES)))

class Base(Partitioner):
    flip = False

class Mine(Base):
    def assign(self, data, seed):
        import torch
        nodes = torch.tensor(order(data.num_nodes))
        return list(helpers.turned(nodes, self.flip).tensor_split(self.num_clients))

class Split(Splitter):
    def __init__(self):
        pass
    def assign(self, data, clients, seed):
        import torch
        return [(torch.arange(len(nodes)) % 3 + 1).to(torch.int8) for nodes in clients]
"""
HELPERS = """
def turned(nodes, flip):
    return nodes.flip(0) if flip else nodes
"""


def made(code: str = CODE, helpers: str = HELPERS) -> dict[str, Any]:
    """What the user's modules define."""
    module = ModuleType("helpers")
    exec(helpers, vars(module))
    sys.modules["helpers"] = module
    names: dict[str, Any] = {"__name__": "mine"}
    exec(code, names)
    return names


@pytest.fixture(autouse=True)
def _no_helpers_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "helpers", None)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("STEP = 2", "STEP = 3"),
        ('"c"}', '"d"}'),
        ("last=1", "last=2"),
        ("place * last", "place + last"),
        ("flip = False", "flip = True"),
        ("tensor_split", "chunk"),
        ("% 3 + 1", "% 2 + 1"),
        ("nodes.flip(0) if flip", "nodes.flip(0) if not flip"),
    ],
)
def test_the_digest_changes_with_the_code(old: str, new: str) -> None:
    digests = []
    for change in (False, True, False):
        code, helpers = (text.replace(old, new) if change else text for text in (CODE, HELPERS))
        names = made(f"# {change}\n" * change + code, helpers)
        digests.append(own_code(names["Mine"](2), ScarceSplit(names["Split"]())))
    assert digests[0] == digests[2] != digests[1]


def test_classes_of_the_package_have_none() -> None:
    assert own_code(MetisPartitioner(2), ScarceSplit(ClientSplit()), None) is None


def test_a_changed_partitioner_makes_a_new_partition(tmp_path: Path) -> None:
    ring = torch.stack([torch.arange(12), (torch.arange(12) + 1) % 12])
    graph = Data(x=torch.ones(12, 1), edge_index=ring, y=torch.arange(12) % 2)
    held = []
    for code in (CODE, CODE.replace("STEP = 2", "STEP = 1"), CODE):
        names = made(code)
        data = FederatedDataModule(graph, names["Mine"](2), names["Split"](), cache_dir=str(tmp_path))
        data.setup()
        held.append(data.clients[0].node_idx_N.tolist())
    assert held == [[0, 2, 4, 6, 8, 10], [0, 1, 2, 3, 4, 5], [0, 2, 4, 6, 8, 10]]
    assert len(list((tmp_path / "partitions").iterdir())) == 2
