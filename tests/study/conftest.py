"""Small studies."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from fl_lightning.study.definition import Study

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
ADAM = {"model.optimizer": "torch.optim.Adam"}
#: A study of two methods and two cases: 2 x 2 tuning runs and 2 x 2 x 2 reported ones.
SMALL: dict[str, Any] = {
    "seeds": [0, 1],
    "settings": {
        "trainer.num_rounds": 2,
        "trainer.accelerator": "cpu",
        "data.source.num_nodes": 120,
        "data.source.num_communities": 4,
        "model.net.hidden_channels": 8,
        "strategy.num_epochs": 1,
    },
    "methods": {
        "Local": {"config": "quickstart.yaml", "settings": {"strategy": "Local"}},
        "FedAvg": {"config": "quickstart.yaml", "settings": {"strategy": "FedAvg"}},
    },
    "cases": {"plain": {}, "wide": {"settings": {"model.net.hidden_channels": 16}, "tuned_on": "plain"}},
    "tuning": {"seeds": [7], "budget": 2, "grid": {"model.optimizer.lr": [0.01, 0.05], "kind": {"adam": ADAM}}},
    "baselines": ["Local"],
    "history": ["val/acc"],
}


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FL_DATA_ROOT", raising=False)
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")


@pytest.fixture
def write_study(tmp_path: Path) -> Callable[..., Path]:
    """Writes the small study, with parts of it replaced, and its configuration beside it."""

    def write(**parts: Any) -> Path:
        config = yaml.safe_load(QUICKSTART.read_text())
        config["model"]["init_args"]["optimizer"] = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.02}}
        (tmp_path / "quickstart.yaml").write_text(yaml.safe_dump(config))
        path = tmp_path / "small.yaml"
        content = {name: value for name, value in {**SMALL, **parts}.items() if value is not None}
        path.write_text(yaml.safe_dump(content, sort_keys=False))
        return path

    return write


@pytest.fixture
def make_study(write_study: Callable[..., Path]) -> Callable[..., Study]:
    """Reads the small study, with parts of it replaced."""
    return lambda **parts: Study(write_study(**parts))
