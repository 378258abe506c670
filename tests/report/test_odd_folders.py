"""Folders of runs that are damaged, odd or planted: their pages are made, or they are refused by name."""

import json
import os
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from run_folders import record, write_run

from fl_lightning.report import compare, write
from fl_lightning.report.compare_command import main as compare_main
from fl_lightning.report.record import Snapshot
from fl_lightning.report.report_command import main as report_main

FILES = ("metrics.csv", "result.json", "report.json", "malicious_clients.json", "config.yaml")
VERSIONS: dict[str, bytes] = {
    "nothing": b"",
    "binary": bytes(range(256)),
    "a list": b"[1, 2]",
    "deep": b"[" * 100_000,
    "numbers for all": b'{"result": 7, "failures": 1, "strategy": [2], "monitor": 3, "seed": {}, "versions": 5}',
    "texts for all": b'{"result": {"val/acc": "x"}, "failures": {"a": "b"}, "best_round": "c", "versions": "d"}',
    "a round of 400 digits": b"round,val/acc\n" + b"9" * 400 + b",1\n",
    "a large field": b"round,val/acc\n1," + b"x" * 200_000 + b"\n",
}


def damaged_record(change: dict[str, Any], folder: Path) -> None:
    content = json.loads((folder / "report.json").read_text())
    (folder / "report.json").write_text(json.dumps({**content, **change}))


def is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> bool:
    """Whether both verbs end well, or in a line that names the folder."""
    for verb in (report_main, compare_main):
        code = verb([str(folder), *(["--output", str(folder / "c.html")] if verb is compare_main else [])])
        said = capsys.readouterr().err
        if code not in (0, 2) or (code == 2 and (folder.name not in said or len(said.splitlines()) != 1)):
            return False
    return True


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_damaged_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, version: str) -> None:
    folder = write_run(tmp_path / "run" / "version_0")
    (folder / name).write_bytes(VERSIONS[version])
    assert is_told(folder, capsys)


@pytest.mark.parametrize(
    "change",
    [
        {"names": 7},
        {"training": [0, 99]},
        {"sizes": [1]},
        {"best": {"round": 0}},
        {"snapshots": [{"round": 0, "name": "mixing", "size": 3, "values": "AAAA"}]},
        {"snapshots": [{"round": 0, "name": "mixing", "size": 10**9, "values": ""}]},
        {"failures": [[0, "client-00"]]},
        {"points": {"round": 0, "x": [1.0], "y": [], "client": [7], "label": [], "explained": [], "total": 1}},
        {"partition": {"columns": ["a"], "rows": [[1, 2, 3]], "labels": [[1]], "heterogeneity": None}},
        {"mode": "best"},
        {"graphs": [{"client": 0, "num_nodes": 10**9, "edges": [[0, 1]], "kinds": [0], "target": "x"}]},
        {"graphs": [{"client": 0, "num_nodes": 1, "edges": [[0, 10**9]], "kinds": [0], "target": "x"}]},
        {"more": 1},
    ],
)
def test_a_record_that_contradicts_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any) -> None:
    folder = write_run(tmp_path / "run" / "version_0")
    damaged_record(change, folder)
    assert is_told(folder, capsys)


@pytest.mark.parametrize("name", FILES)
def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path, name: str, capsys: Any) -> None:
    folder = write_run(tmp_path / "run" / "version_0")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert is_told(folder, capsys)


@pytest.mark.parametrize("config", ["../secret.yaml", "/etc/passwd", ".."])
def test_nothing_outside_of_the_folder_gets_into_the_page(tmp_path: Path, config: str) -> None:
    folder = write_run(tmp_path / "run" / "version_0")
    (folder.parent / "secret.yaml").write_text("secret_setting: 7\n")
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**result, "config": config}))
    page = write(folder).read_text()
    assert "secret_setting" not in page
    assert "root:" not in page


@pytest.mark.parametrize("name", FILES)
def test_links_to_files_outside_of_the_folder_are_not_followed(tmp_path: Path, name: str, capsys: Any) -> None:
    folder = write_run(tmp_path / "run" / "version_0")
    (folder.parent / "secret").write_text("secret_setting: 7\n")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(folder.parent / "secret")
    with pytest.raises(ValueError, match=rf"{name} is a link to a file outside the run's folder: replace it"):
        write(folder)
    assert is_told(folder, capsys)


def test_a_page_is_drawn_as_the_package_says(tmp_path: Path) -> None:
    """A file matplotlibrc in the current folder sets what pages do not follow, such as to run LaTeX."""
    folder = write_run(tmp_path / "run" / "version_0")
    expected = write(folder).read_text()
    with matplotlib.rc_context({"text.usetex": True, "lines.linewidth": 9, "figure.dpi": 30}):
        assert write(folder).read_text() == expected


def test_half_a_character_is_written_as_an_escape(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run" / "version_0")
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps({**result, "strategy": "odd\ud800"}))
    assert "odd\\ud800" in write(folder).read_text()


def test_a_dollar_in_a_name_is_a_dollar(tmp_path: Path) -> None:
    names = ["a$_{$", "$x^$", r"\\frac$", "c"]
    folder = write_run(tmp_path / "run$" / "version_0", run_record=record((0.5, 0.6, 0.7), names=names))
    assert "a$_{$" in write(folder).read_text()
    compare([folder]).write(tmp_path / "comparison.html")


def test_what_is_packed_is_unpacked() -> None:
    matrix = Snapshot(round=0, name="mixing", size=1, values="AACAPw==").matrix()
    assert matrix.tolist() == [[1.0]]
