"""The entry of the command line: what it responds by itself, and what it hands on."""

import contextlib
import inspect
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fl_lightning import FederatedTrainer, __version__, command_line
from fl_lightning.arguments import TRAINER_VERBS, VERBS, with_home_folder, with_shipped_configs
from fl_lightning.command_line import main

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.yaml"


def answered(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What a mistake is told, in one line."""
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_help_lists_every_verb(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VERBS, "color", "fl_lightning.run.result")
    assert main(["--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "fl-train fit --config fl://quickstart" in text
    for verb, purpose in TRAINER_VERBS.items():
        assert f"{verb} {purpose}" in text
        assert (inspect.getdoc(getattr(FederatedTrainer, verb)) or "").partition("\n")[0] == purpose
    assert "color " in text
    for verb in VERBS:
        assert f" {verb} " in text


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["predict", "runs/none", "--global", "--data", "new.pt", "--to", "./new.pt"], "--to ./new.pt"),
        (["export", "runs/none", "--onboard", "new.pt", "--to", "new.pt"], "--to new.pt"),
        (["data", "--config", "own.yaml", "--csv", "own.yaml"], "--csv own.yaml"),
        (["data", "--config", "own.yaml", "--picture=new.pt"], "--picture new.pt"),
    ],
)
def test_what_is_read_is_not_replaced(words: list[str], option: str, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("new.pt").write_bytes(b"data")
    Path("own.yaml").write_text("data: {source: {class_path: FileSource, init_args: {path: new.pt}}}")
    with contextlib.suppress(SystemExit):
        assert main(words) == 2
    assert f"error: {option} would replace what is read: give " in capsys.readouterr().err
    assert Path("new.pt").read_bytes() == b"data"


def test_an_interruption_of_the_start_is_one_line(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line.importlib, "import_module", interrupted)
    with pytest.raises(SystemExit) as stop:
        main(["fit"])
    assert stop.value.code == 130
    assert capsys.readouterr().err == "fl-train: error: interrupted\n"


def test_a_reader_that_has_seen_enough_is_no_mistake(tmp_path: Path) -> None:
    (tmp_path / "study.yaml").write_text(f"seeds: [0]\ncases: {{a: {{}}}}\nmethods: {{b: {{config: {QUICKSTART}}}}}\n")
    command = [sys.executable, "-m", "fl_lightning.command_line", "study", "status", "study.yaml"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as status:
        assert status.stdout is not None
        assert status.stderr is not None
        status.stdout.close()
        assert status.stderr.read() == ""
        assert status.wait(timeout=120) in (1, 141)  # as rich ends, or by the client output's number


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"fl-train {__version__}\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["fitt"], "there is no verb 'fitt': did you mean fit?"),
        (["quickstart.yaml"], "there is no verb 'quickstart.yaml': give one of fit"),
        (["fit", "--config", "missing.yaml"], "--config missing.yaml cannot be read (No such file or directory)"),
        (["fit", "-c=missing.yaml"], "--config missing.yaml cannot be read"),
        (
            ["fit", "--config", "fl://quikstart"],
            "did you mean fl://quickstart? There are adafgl_chameleon, ",
        ),
        (["test", "--ckpt_path=missing.ckpt"], "--ckpt_path missing.ckpt does not exist"),
    ],
)
def test_mistakes(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert expected in answered(capsys, *words)


def test_without_arguments_there_are_five_examples_that_fit_a_narrow_terminal(capsys) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    assert text.count("\n  fl-train ") == 5
    assert text.isascii()
    assert max(map(len, text.splitlines())) <= 65


@pytest.mark.parametrize(
    "words", [["--config", "fl://quickstart"], ["--config=fl://quickstart"], ["-c", "fl://quickstart"]]
)
def test_configurations_of_the_package_are_named_from_anywhere(words: list[str], tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = with_shipped_configs(["fit", *words])[-1]
    assert Path(path.removeprefix("--config=")) == QUICKSTART.resolve()
    assert with_shipped_configs(["fit", "", "--trainer.run_name=fl://quickstart"]) == [
        "fit",
        "",
        "--trainer.run_name=fl://quickstart",
    ]


def test_the_other_verbs_are_handed_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "painting.py").write_text("def main(words):\n    return len(words)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(VERBS, "paint", "painting")
    assert main(["paint", "it", "black"]) == 2


def test_torch_is_not_imported_for_an_answer() -> None:
    code = "import sys; from fl_lightning.command_line import main; main(['--help']); assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_the_package_is_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["fl_lightning", "--version"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("fl_lightning", run_name="__main__")
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"fl-train {__version__}\n"


def test_the_home_folder_of_an_option() -> None:
    home = str(Path.home())
    words = ["export", "--to=~/model.pt", "~/run", "--name=~x"]
    assert with_home_folder(words) == ["export", f"--to={home}/model.pt", "~/run", "--name=~x"]


def hostile_folder(path: Path) -> Path:
    """A folder with an entry point that `import torch` loads, which leaves a trace."""
    (path / "evil-1.0.dist-info").mkdir(parents=True)
    (path / "evil-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    entry_points = "[torch.backends]\nevil = evil:load\n[networkx.backend_info]\nevil = evil:load\n"
    (path / "evil-1.0.dist-info" / "entry_points.txt").write_text(entry_points)
    trace = f"open({str(path / 'trace')!r}, 'a').write(__name__ + ' ')\n"
    (path / "evil.py").write_text(f"{trace}def load():\n    return {{}}\n")
    for optional in ("bottleneck", "numexpr", "triton", "argparse"):
        (path / f"{optional}.py").write_text(f"{trace}raise ImportError('gone')\n")
    return path


@pytest.mark.parametrize(
    "words",
    [["--help"], ["report", "."], ["compare", "."], ["site", "explain", "--job", "job.json", "--site", "site.yaml"]],
    ids=lambda words: words[0],
)
def test_nothing_of_the_current_folder_runs_where_files_are_only_read(words: list[str], tmp_path: Path) -> None:
    folder = hostile_folder(tmp_path / "downloads")
    for name in ("job.json", "site.yaml"):
        (folder / name).write_text("{}")
    subprocess.run([sys.executable, "-m", "fl_lightning", *words], cwd=folder, capture_output=True, timeout=120)
    assert not (folder / "trace").exists()


@pytest.mark.parametrize("verb", [*VERBS, "fit", "predict"])
def test_the_current_folder_is_searched_for_the_classes_of_settings_only(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    seen: list[bool] = []

    def handed_on(name: str) -> SimpleNamespace:
        seen.append(str(tmp_path) in sys.path)
        return SimpleNamespace(main=lambda words: 0)

    monkeypatch.setattr(command_line.importlib, "import_module", handed_on)
    assert main([verb]) == 0
    assert seen == [verb in ("choose", "export", "sites", "study", "submit", "fit", "predict")]
