"""Every command and block of code of a page runs as printed, in order, in one folder; tutorials print what they show.

Pages other than the tutorials run with few rounds on generated graphs, in copies of the configurations.
"""

import json
import os
import re
import shutil
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from doc_blocks import assert_shown, blocks, command_lines, run_command, run_page
from example_files import write_graph_sets, write_laboratories

import fl_lightning as fl

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("[!i]*.md"))
COMPARED = [*TUTORIALS, ROOT / "docs" / "index.md"]
WITH_BLOCKS = ("python", "console", "yaml")
OTHERS = [
    page
    for page in sorted([ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("docs/*/*.md")])
    if "generated" not in page.parts and page not in COMPARED
    if any(language in WITH_BLOCKS for language, _ in blocks(page))
]
#: Commands before the first of a page that goes on from them.
BEFORE = {
    "use-a-trained-model": ["fl-train fit --config configs/quickstart.yaml"],
    "reports": [
        f"fl-train fit --config configs/{name}.yaml" for name in ("quickstart", "fedavg_cora", "papers/fedsheafhn_cora")
    ],
}
#: Sources of which there are tiny files.
GRAPH_SETS = ("AqSolDB", "TUSource")
GENERATED = {"class_path": "PlantedCommunities", "init_args": {"num_nodes": 240, "num_communities": 10, "noise": 0.2}}
#: In place of the study that the pages name, which trains for hours.
SMALL_STUDY: dict[str, Any] = {
    "seeds": [0],
    "settings": {"trainer.num_rounds": 2},
    "methods": {name: {"settings": {"strategy": name}} for name in ("Local", "FedAvg")},
    "cases": {name: {"config": "../configs/quickstart.yaml"} for name in ("Cora-10", "CiteSeer-10")},
    "tuning": {"seeds": [100], "budget": 1, "grid": {"model.optimizer.lr": [0.01]}},
    "baselines": ["Local"],
    "processes": 1,
}


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("COLUMNS", "120")
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    return tmp_path


@pytest.fixture
def smaller(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with smaller configurations, a small study and a graph to predict."""
    for path in own_folder.glob("configs/**/*.yaml"):
        settings: dict[str, Any] = yaml.safe_load(path.read_text())
        if "data" in settings:
            settings["trainer"] = {**settings.get("trainer", {}), "num_rounds": 2}
            if not any(name in str(settings["data"]["source"]) for name in GRAPH_SETS):
                settings["data"] |= {"source": GENERATED}
                if "num_clients" not in str(settings["data"].get("partitioner")):
                    settings["data"]["partitioner"] = "GivenPartitioner"
            path.write_text(yaml.safe_dump(settings, sort_keys=False))
    (own_folder / "studies").mkdir()
    (own_folder / "studies" / "leaderboard_a.yaml").write_text(yaml.safe_dump(SMALL_STUDY, sort_keys=False))
    torch.save(fl.data.PlantedCommunities(num_nodes=60, num_communities=1).load(own_folder), "mine.pt")
    return own_folder


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:.*clients are run one after another")
@pytest.mark.parametrize("page", COMPARED, ids=lambda page: page.stem)
def test_pages_print_what_they_show(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if page.stem == "nine-laboratories":  # on few molecules, whatever the machine has
        pytest.importorskip("rdkit", reason="needs the extra molecules")
        write_laboratories(tmp_path / "data")
        monkeypatch.setenv("FL_DATA_ROOT", str(tmp_path / "data"))
        run_page(page, most_rounds=3)
    else:
        run_page(page)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", OTHERS, ids=lambda page: page.stem)
def test_other_pages_run_in_order(page: Path, smaller: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "datasets.cora" not in page.read_text():
        monkeypatch.setenv("FL_DATA_ROOT", str(write_graph_sets(smaller / "data")))
    elif not (Path(os.environ.get("FL_DATA_ROOT", "data")) / "Cora").exists():
        pytest.skip("needs Cora in FL_DATA_ROOT")
    for line in BEFORE.get(page.stem, ()):
        run_command(line)
    run_page(page, most_rounds=3)


@pytest.mark.full
def test_the_readme_prints_what_it_shows() -> None:
    if not (Path(os.environ.get("FL_DATA_ROOT", "data")) / "Cora").exists():
        pytest.skip("needs Cora in FL_DATA_ROOT")
    page = Path("code.md")
    code, output = re.findall(r"^```(?:python|output)\n.*?^```\n", (ROOT / "README.md").read_text(), re.M | re.S)
    page.write_text(code + output)
    run_page(page)


def test_every_tutorial_shows_a_result() -> None:
    for page in TUTORIALS:
        shown = [text for language, text in blocks(page) if language == "output"]
        assert page.stem == "nine-laboratories" or any("Local" in text for text in shown), page.name


def test_the_table_of_the_nine_laboratories_is_of_the_committed_runs() -> None:
    """Its commands take minutes: ``fl-train study run studies/nine_laboratories.yaml``."""
    page = next(page for page in TUTORIALS if page.stem == "nine-laboratories").read_text()
    runs = [
        json.loads(line) for line in (ROOT / "studies/results/nine_laboratories/runs.jsonl").read_text().splitlines()
    ]
    for method in ("FedAvg", "Local", "Ditto"):
        found = [run["result"] for run in runs if run["method"] == method]
        assert len(found) == 5
        cells = [method]
        for name in ("rmse", "mae", "r2", "rmse_weighted"):
            values = [result[f"test/{name}"] for result in found]
            cells.append(f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}")
        assert f"| {' | '.join(cells)} |" in page


def test_commands_of_pages_are_in_console_blocks() -> None:
    for page in [*TUTORIALS, *OTHERS]:
        for language, text in blocks(page):
            assert language == "console" or not re.search(r"^(\$ )?fl-train ", text, re.M), (page.name, text)
    assert len([line for _, text in blocks(ROOT / "README.md") for line in command_lines(text)]) == 10


def test_what_a_page_shows_is_compared() -> None:
    printed = "Local   0.830, worst 0.561\nnoise\nFedAvg  0.851, worst 0.700\n"
    assert_shown("Local 0.835, worst 0.56\n...\nFedAvg 0.85, worst 0.69\n", printed)
    for wrong in (
        "Local 0.93, worst 0.56",
        "FedPer 0.83, worst 0.56",
        "FedAvg 0.85, worst 0.7\nLocal 0.83, worst 0.56",
    ):
        with pytest.raises(AssertionError, match="the page shows"):
            assert_shown(wrong, printed)
