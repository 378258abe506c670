"""The options that the guides name between their sentences are accepted."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

from fl_lightning.command_line import main

ROOT = Path(__file__).parents[2]
GUIDES = [page for page in sorted(ROOT.glob("docs/*/*.md")) if "generated" not in page.parts]
#: What an option on a page is an option of, where that is not the quickstart's.
CONTEXT = {
    "--trainer.executor.": ["--trainer.executor", "StackedExecutor"],
    "--data.source.": ["--data.source", "FileSource", "--data.source.path", "graph.pt"],
    "--strategy.maps": ["--strategy", "SheafFMTL"],
}
#: Options that are a remedy for what no test has: a second machine, a GPU, a file of the reader's.
ELSEWHERE = re.compile(r"--trainer\.accelerator gpu|mine\.")


def options_of(page: Path) -> list[list[str]]:
    """The settings that a page names between its sentences, with their values."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    spans = re.findall(r"`(--(?:trainer|strategy|model|data)(?!\.help)[\w.]*[ =][^`]+)`", text)
    return [shlex.split(span) for span in spans if not ELSEWHERE.search(span)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the configurations."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FL_CACHE_DIR", str(tmp_path / "cache"))
    shutil.copytree(ROOT / "configs", tmp_path / "configs")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "options",
    [options for page in GUIDES for options in options_of(page)],
    ids=lambda options: options[0],
)
def test_the_options_between_sentences_are_accepted(
    options: list[str], folder: None, capsys: pytest.CaptureFixture[str]
) -> None:
    context = next((given for start, given in CONTEXT.items() if options[0].startswith(start)), [])
    with pytest.raises(SystemExit) as ended:
        main(["fit", "--config", "configs/quickstart.yaml", *context, *options, "--print_config"])
    assert not ended.value.code, capsys.readouterr().err


def test_there_are_some() -> None:
    assert ["--trainer.callbacks", "FederatedCheckpoint", "--trainer.callbacks.every_n_rounds", "10"] in options_of(
        ROOT / "docs" / "how-to" / "resume.md"
    )
