"""Searches over planted curves."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from planted_choice import CONFIG, Choose, Planted
from study_pool import HerePool

from fl_lightning.choice.answer import Answer
from fl_lightning.choice.asking import answer_of
from fl_lightning.choice.preparation import Asked


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FL_DATA_ROOT", raising=False)
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(CONFIG))


@pytest.fixture
def choose(tmp_path: Path) -> Choose:
    """Chooses among planted trainings, whose seconds are the clock's."""

    def run(planted: Planted, **asked: Any) -> tuple[Answer, list[str]]:
        start = planted.seconds
        said: list[str] = []
        settings = {"config": ["mine.yaml"], "folder": tmp_path / "out", "budget": "1h", **asked}

        def pool(*given: Any) -> HerePool:
            return HerePool(train=planted.train, partition=planted.partition)

        return answer_of(Asked(**settings), said.append, pool, lambda: planted.seconds - start), said

    return run
