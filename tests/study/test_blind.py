"""Nothing that is chosen knows the test examples: with their labels shuffled, the same is chosen."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from study_pool import HerePool
from torch_geometric.data import Data

from fl_lightning.data import PlantedCommunities
from fl_lightning.study import runs
from fl_lightning.study.definition import Study
from fl_lightning.study.progress import Progress
from fl_lightning.study.runner import Runner
from fl_lightning.study.statistics import best_baselines
from fl_lightning.study.store import Store
from fl_lightning.study.table import tidy


def write_graph(path: Path, *, shuffled: bool) -> None:
    """A graph with masks of its own, whose test labels may be shuffled."""
    data = PlantedCommunities(num_nodes=200, num_communities=4, num_classes=4, num_features=8).load(
        path.parent, path.parent
    )
    role_N = torch.arange(data.num_nodes) % 3
    masks = {name: role_N == role for role, name in enumerate(("train_mask", "val_mask", "test_mask"))}
    y_N = data.y.clone()
    if shuffled:
        test_T = masks["test_mask"].nonzero().squeeze(1)
        y_N[test_T] = y_N[test_T][torch.randperm(len(test_T), generator=torch.Generator().manual_seed(0))]
    torch.save(Data(x=data.x, edge_index=data.edge_index, y=y_N, **masks), path)


@pytest.fixture
def blind_study(make_study: Callable[..., Study], tmp_path: Path) -> Callable[[bool], Progress]:
    def run(shuffled: bool) -> Progress:
        runs._content.cache_clear()
        folder = tmp_path / f"shuffled_{shuffled}"
        folder.mkdir()
        write_graph(folder / "graph.pt", shuffled=shuffled)
        source = {"class_path": "FileSource", "init_args": {"path": str(folder / "graph.pt")}}
        data: dict[str, Any] = {
            "data.source": source,
            "data.partitioner": "RandomPartitioner",
            "data.partitioner.num_clients": 3,
            "data.splitter": "GivenSplit",
            "trainer.num_rounds": 4,
            "trainer.accelerator": "cpu",
            "model.net.hidden_channels": 8,
            "strategy.num_epochs": 1,
        }
        study = make_study(
            settings=data,
            seeds=[0],
            cases={"plain": {}},
            baselines=["Local", "FedAvg"],
            results=str(folder / "results"),
        )
        with HerePool(real=True) as pool:
            tally = Runner(study, Store(study.results), say=lambda line: None).run(pool)
        assert tally.failed == {}
        return Progress(study, Store(study.results))

    return run


def test_shuffled_test_labels_change_no_choice(blind_study: Callable[[bool], Progress]) -> None:
    true, shuffled = blind_study(False), blind_study(True)
    tables = tidy(true), tidy(shuffled)
    for method in ("Local", "FedAvg"):
        assert true.choice(method, "plain") == shuffled.choice(method, "plain")
    for name in ("method", "setting", "round", "val", "trained_val"):
        assert tables[0][name].equals(tables[1][name])
    assert best_baselines(tables[0], ("Local", "FedAvg")) == best_baselines(tables[1], ("Local", "FedAvg"))
    assert (tables[0]["test"] != tables[1]["test"]).all()
