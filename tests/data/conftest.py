"""Fixtures of the data tests: a private cache, a small generated graph, and real data where FL_DATA_ROOT has it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch_geometric.data import Data

from fl_lightning.data import PlantedCommunities, prepare_graph


@pytest.fixture(scope="session")
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def _private_cache(session_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FL_CACHE_DIR", str(session_cache))


@pytest.fixture(scope="session")
def planted() -> Data:
    """A prepared graph of 300 nodes in 6 communities."""
    source = PlantedCommunities(num_nodes=300, num_communities=6, num_classes=3, num_features=8)
    return prepare_graph(source.load(Path()), source.preparation)


@pytest.fixture
def path_graph() -> Data:
    """0 - 1 - 2 - 3 - 4 - 5, with a public split in which node 5 has no label."""
    edges = torch.tensor([[0, 1, 2, 3, 4], [1, 2, 3, 4, 5]])
    return Data(
        x=torch.arange(12.0).view(6, 2),
        edge_index=torch.cat([edges, edges.flip(0)], dim=1),
        y=torch.tensor([0, 1, 0, 1, 0, -1]),
        train_mask=torch.tensor([1, 0, 0, 1, 0, 1]).bool(),
        val_mask=torch.tensor([0, 1, 0, 0, 1, 0]).bool(),
        test_mask=torch.tensor([0, 0, 1, 0, 0, 0]).bool(),
    )


@pytest.fixture(scope="session")
def require_dataset() -> Callable[[str], Path]:
    """Return the root of the real data sets, or skip the test and say what is missing."""

    def require(name: str) -> Path:
        root = os.environ.get("FL_DATA_ROOT")
        if not root:
            pytest.skip("FL_DATA_ROOT is not set")
        if not Path(root, name).exists():
            pytest.skip(f"FL_DATA_ROOT has no {name}")
        return Path(root)

    return require
