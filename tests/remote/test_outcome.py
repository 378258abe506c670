"""What a server says of a job that has ended, and where the run's folder is put."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvflare", reason="needs the extra flare")

from nvflare.fuel.flare_api.api_spec import AuthorizationError

from fl_lightning.remote import verbs
from fl_lightning.remote.job_schema import Job
from fl_lightning.remote.submit import Submission, run_job

SUBMISSION = Submission(job=Job(name="quickstart", sites=["a"], strategy={"class": "FedAvg"}), config="x: 1\n")
FACTS = {
    "status": "finished",
    "message": "",
    "bytes": {"down": 1, "up": 2},
    "seconds": 1.5,
    "started": 2e9,
    "folder": "version_0",
    "run": "a" * 32,
    "result": {"test/acc": 0.5, "val/loss": float("nan")},
}


class Session:
    """A server that ends every job at once, with what a test makes of its result."""

    def __init__(self, tmp_path: Path, text: str, files: dict[str, str] | None = None) -> None:
        self.folder, self.text, self.files = tmp_path / "result", text, files or {"metrics.csv": "remote\n"}

    def submit_job(self, job: str, submit_token: str) -> str:
        return "job"

    def get_job_status(self, job_id: str) -> str:
        return "FINISHED:COMPLETED\x1b[2J"

    def download_job_result(self, job_id: str, destination: str) -> str:
        result = Path(destination) / "result"
        (result / "run" / "version_0").mkdir(parents=True)
        for name, content in self.files.items():
            (result / "run" / "version_0" / name).write_text(content)
        if self.text:
            (result / "outcome.json").write_text(self.text)
        return str(result)


def fetch(tmp_path: Path, files: dict[str, str] | None = None, **facts: Any) -> Any:
    session = Session(tmp_path, json.dumps({**FACTS, **facts}), files)
    return run_job(session, SUBMISSION, tmp_path / "runs", lambda: None)


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in FACTS.items() if key != name}


WRONG = [
    ("[]", "holds no fields"),
    ("null", "holds no fields"),
    ("{", "not valid JSON"),
    ("[" * 100_000, "not valid JSON"),
    (" " * 2**21, "at most 1048576 are read"),
    *[({**FACTS, "bytes": wrong}, "bytes must have down, up") for wrong in (1, {}, {"down": 1})],
    *[(without(name), f"does not say {name}") for name in ("status", "message", "bytes", "seconds", "started")],
    *[(without(name), "which run it is about") for name in ("folder", "run")],
    *[({**FACTS, "folder": wrong}, "folder must be the name of a folder") for wrong in (5, "../../x", None, "\x1b")],
    ({**FACTS, "folder": "version_9"}, "its folder version_9 is missing"),
    *[({**FACTS, "run": wrong}, "run must be 32") for wrong in (7, "../x")],
    *[({**FACTS, "started": wrong}, "started must be a number") for wrong in ("x", float("nan"), 1e300)],
    ({**FACTS, "status": "ended"}, "status must be one of"),
    ({**FACTS, "message": 5}, "message must be"),
    *[
        ({**FACTS, "result": wrong}, "result ")
        for wrong in ([], {"test/acc": "x"}, {"test/acc": None}, {"\x1b[31m": 1})
    ],
    ({**FACTS, "\x1b[2J": 1}, "fields that nobody asked for"),
]


@pytest.mark.parametrize(("content", "why"), WRONG)
def test_a_wrong_outcome_is_refused_in_one_line_and_nothing_is_fetched(content, why, tmp_path, capsys) -> None:
    session = Session(tmp_path, content if isinstance(content, str) else json.dumps(content))
    parser = verbs.Parser("submit", "")
    with pytest.raises(SystemExit) as ended:
        verbs.run_verb(
            lambda *_: verbs.follow_to_the_end(session, SUBMISSION, tmp_path / "runs", attempts=3), parser, []
        )
    said = capsys.readouterr().err
    assert ended.value.code == 1
    assert why in said
    assert "the server's outcome.json of this job is wrong" in said
    assert said.rstrip("\n").isprintable()
    assert not (tmp_path / "runs").exists()


def test_what_a_server_says_is_displayed_as_plain_text(tmp_path, capsys) -> None:
    outcome = fetch(tmp_path, status="failed", message="\x1b[31mred\x1b]0;title\x07\nand\tmore")
    assert outcome.message == "?[31mred?]0;title? and more"
    session = Session(tmp_path, "")
    outcome = run_job(session, SUBMISSION, tmp_path, lambda: None)
    assert outcome.message == "the job ended as FINISHED:COMPLETED?[2J, before its result was written"

    def refuse(*_: Any, **others: Any) -> str:
        raise AuthorizationError("no\x1b[2J")

    session.submit_job = refuse  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=r"^the server refuses, .*: AuthorizationError: no\?\[2J$"):
        run_job(session, SUBMISSION, tmp_path, lambda: None)


def test_a_fetched_run_replaces_its_earlier_copy_alone(tmp_path) -> None:
    first = fetch(tmp_path, {"metrics.csv": "1", "old.ckpt": "x"})
    assert first.folder == tmp_path / "runs" / "quickstart" / "version_0"
    assert contents(first.folder) == {"metrics.csv": "1", "old.ckpt": "x", "run_id": "a" * 32, "config.yaml": "x: 1\n"}
    assert first.facts["result"]["test/acc"] == 0.5

    again = fetch(tmp_path, {"metrics.csv": "2"})
    assert again.folder == first.folder
    assert contents(again.folder) == {"metrics.csv": "2", "run_id": "a" * 32, "config.yaml": "x: 1\n"}

    other = fetch(tmp_path, {"metrics.csv": "3"}, run="b" * 32)  # of another server, or one that was begun anew
    assert other.folder == tmp_path / "runs" / "quickstart" / "version_1"
    assert contents(first.folder)["metrics.csv"] == "2"
    assert {path.name for path in other.folder.parent.iterdir()} == {"version_0", "version_1"}


def test_a_run_of_this_machine_is_not_touched(tmp_path) -> None:
    here = tmp_path / "runs" / "quickstart" / "version_0"
    here.mkdir(parents=True)
    kept = {"metrics.csv": "local", "config.yaml": "local", "best.ckpt": "local", "predictions.csv": "local"}
    for name, content in kept.items():
        (here / name).write_text(content)
    for _ in range(2):
        assert fetch(tmp_path).folder == here.with_name("version_1")
    assert contents(here) == kept


def test_a_copy_that_fails_leaves_the_earlier_one(tmp_path, monkeypatch) -> None:
    first = fetch(tmp_path)

    def full(source: Path, target: Path, **_: Any) -> None:
        target.mkdir()
        raise OSError("No space left on device")

    monkeypatch.setattr("fl_lightning.remote.outcome.copy_files", full)
    with pytest.raises(OSError, match="No space left"):
        fetch(tmp_path)
    assert contents(first.folder)["metrics.csv"] == "remote\n"
    assert [path.name for path in first.folder.parent.iterdir()] == ["version_0"]
