"""The command lines and options of the README and the guides run as printed, in order, in one folder.

Rounds are few and graphs are generated, in copies of the configurations; everything else is as on the page.
"""

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from example_files import write_graph_sets

from fl_lightning.arguments import TRAINER_VERBS
from fl_lightning.command_line import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "how-to").glob("*.md"))]
GUIDES = [page for page in sorted(ROOT.glob("docs/*/*.md")) if "generated" not in page.parts]
#: What an option on a page is an option of, where that is not the quickstart's.
CONTEXT = {
    "--data.source.": ["--data.source", "FileSource", "--data.source.path", "graph.pt"],
    "--strategy.maps": ["--strategy", "SheafFMTL"],
}
#: Options that are a remedy for what no test has: a second machine, a GPU, a file of the reader's.
ELSEWHERE = re.compile(r"--trainer\.accelerator gpu|mine\.")
#: Sources of which there are tiny files.
GRAPH_SETS = ("AqSolDB", "TUSource")
GENERATED = {"class_path": "PlantedCommunities", "init_args": {"num_nodes": 240, "num_communities": 10, "noise": 0.2}}


def lines_of(page: Path) -> list[list[str]]:
    """The command lines of a page that train, use or export models, in order."""
    blocks = re.findall(r"^```(?:console|bash|sh|shell)\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    lines = [line.removeprefix("$ ") for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    words = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("fl-train ")]
    return [each for each in words if each[0] in (*TRAINER_VERBS, "export") and not ELSEWHERE.search(" ".join(each))]


def options_of(page: Path) -> list[list[str]]:
    """The settings that a page names between its sentences, with their values."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    spans = re.findall(r"`(--(?:trainer|strategy|model|data)(?!\.help)[\w.]*[ =][^`]+)`", text)
    return [shlex.split(span) for span in spans if not ELSEWHERE.search(span)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the configurations, smaller."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("FL_DATA_ROOT", str(write_graph_sets(tmp_path / "data")))
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    for path in tmp_path.glob("configs/**/*.yaml"):
        settings: dict[str, Any] = yaml.safe_load(path.read_text())
        if "data" in settings:
            settings["trainer"] = {**settings.get("trainer", {}), "num_rounds": 2}
            if not any(name in str(settings["data"]["source"]) for name in GRAPH_SETS):
                settings["data"] |= {"source": GENERATED}
                if "num_clients" not in str(settings["data"].get("partitioner")):
                    settings["data"]["partitioner"] = "GivenPartitioner"
            path.write_text(yaml.safe_dump(settings, sort_keys=False))
    return tmp_path


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", [page for page in PAGES if lines_of(page)], ids=lambda page: page.stem)
def test_the_commands_of_a_page_run_in_order(page: Path, folder: Path) -> None:
    for words in lines_of(page):
        line = re.sub(r"--trainer.num_rounds \d+", "--trainer.num_rounds 3", shlex.join(words))
        assert main(shlex.split(line)) == 0, line


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options",
    [options for page in GUIDES for options in options_of(page)],
    ids=lambda options: options[0],
)
def test_the_options_between_sentences_are_accepted(
    options: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    context = next((given for start, given in CONTEXT.items() if options[0].startswith(start)), [])
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--config", "configs/quickstart.yaml", *context, *options, "--print_config"])
    assert not ended.value.code, capsys.readouterr().err


def test_there_are_some() -> None:
    assert len(lines_of(ROOT / "README.md")) == 7
    assert ["--trainer.callbacks", "FederatedCheckpoint", "--trainer.callbacks.every_n_rounds", "10"] in options_of(
        ROOT / "docs" / "how-to" / "resume.md"
    )
