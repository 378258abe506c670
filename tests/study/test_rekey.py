"""A default that a study comes to name leaves what is done in its place."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fl_lightning.study.definition import Study
from fl_lightning.study.progress import Progress
from fl_lightning.study.store import Store

SCRIPT = Path(__file__).parents[2] / "studies" / "rekey.py"


def script() -> Any:
    spec = importlib.util.spec_from_file_location("rekey", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cells_of(study: Study, method: str) -> list[Any]:
    progress = Progress(study, Store(study.results))
    return [c for case in study.cases for c in (*progress.tuning(method, case), *progress.report(method, case))]


def fill(study: Study) -> None:
    """Records of all cells, as of runs; the last two lines of the files without a checksum of their own."""
    store = Store(study.results)
    for _ in range(2):  # what is tuned, then what is reported
        for method in study.methods:
            for cell in cells_of(study, method):
                record = {"key": cell.key, "version": cell.version, "error": "", "val": 0.5, "monitor": "val/acc"}
                store.add(record | {"partition": "", "command": f"fl-train fit {cell.key}"}, {"val/acc": [0.5]})
    lines = store.cells.read_text().splitlines()
    plain = [json.dumps({k: v for k, v in json.loads(line).items() if k != "sum"}) for line in lines[-2:]]
    store.cells.write_text("\n".join([*lines[:-2], *plain]) + "\n")
    store.seal()


def named(write_study: Callable[..., Path]) -> Path:
    local = {"config": "quickstart.yaml", "settings": {"strategy": "Local"}}
    averaged = {"config": "quickstart.yaml", "settings": {"strategy": "FedAvg", "strategy.mix_only_moved": False}}
    return write_study(methods={"Local": local, "FedAvg": averaged})


def test_done_cells_stay_done_under_their_new_keys(write_study: Callable[..., Path]) -> None:
    fill(Study(write_study()))
    study = Study(named(write_study))
    store = Store(study.results)
    before = store.records()
    (study.results / "results.csv").write_text("".join(f"FedAvg,{record['command']}\n" for record in before.values()))
    progress = Progress(study, store)
    assert {progress.state(cell) for cell in cells_of(study, "FedAvg")} == {"missing"}

    count = script().rekey(study.path, "FedAvg", "strategy.mix_only_moved")

    progress = Progress(study, store)
    for method in study.methods:
        cells = cells_of(study, method)
        assert len(cells) > 4
        assert {progress.state(cell) for cell in cells} == {"done"}
    assert not store.damaged
    after, changed = store.records(), {cell.key for cell in cells_of(study, "FedAvg")}
    assert len(after) == len(before)
    assert set(store.history()) == set(after)
    assert all("--strategy.mix_only_moved=false" in after[key]["command"] for key in changed)
    assert all(after[key] == before[key] for key in set(after) - changed)
    assert count >= 2 * len(changed)
    text = (study.results / "results.csv").read_text().splitlines()
    assert sorted(text) == sorted(f"FedAvg,{record['command']}" for record in after.values())


def test_a_setting_that_is_not_there_and_a_damaged_line_are_refused(write_study: Callable[..., Path]) -> None:
    fill(Study(write_study()))
    with pytest.raises(ValueError, match=r"has no strategy\.mix_only_moved in the settings of FedAvg"):
        script().rekey(Study(write_study()).path, "FedAvg", "strategy.mix_only_moved")
    study = Study(named(write_study))
    store = Store(study.results)
    store.cells.write_text(store.cells.read_text().replace("0.5", "0.6", 1))
    text = store.cells.read_text()
    with pytest.raises(ValueError, match=r"cells\.jsonl has a damaged line"):
        script().rekey(study.path, "FedAvg", "strategy.mix_only_moved")
    assert store.cells.read_text() == text
