"""Processes of a try-out, and what they say when they do not start."""

from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="needs the extra flare")

from fl_lightning.remote.kits import Processes, wait_until_connected


def processes(folder: Path, **said: str) -> Processes:
    """Participants that have said something."""
    made = Processes(folder, "server")
    for name, words in said.items():
        (folder / name).mkdir()
        (folder / name / "process.log").write_text(words)
    return made


class NobodyIsThere:
    def get_connected_client_list(self) -> list[object]:
        return []


def test_sites_that_do_not_come_are_named_with_their_own_last_lines(tmp_path) -> None:
    both = processes(tmp_path, berlin="one\ntwo\nthree\nfour: no such file\n", rome="")
    with pytest.raises(TimeoutError) as error:
        wait_until_connected(NobodyIsThere(), ["berlin", "rome"], both, seconds=0)
    assert f"berlin logged: two | three | four: no such file ({tmp_path / 'berlin' / 'process.log'})" in str(
        error.value
    )
    assert f"rome logged: it has logged nothing ({tmp_path / 'rome'})" in str(error.value)


def test_the_log_of_a_jobs_errors_goes_before_the_others(tmp_path) -> None:
    one = processes(tmp_path, berlin="started\n")
    one.running = {"berlin": None}  # type: ignore[dict-item]
    assert one.last_words() == ""
    (tmp_path / "berlin" / "0a1b").mkdir()
    log = tmp_path / "berlin" / "0a1b" / "error_log.txt"
    log.write_text("ValueError: /data/ward.pt is no file\n")
    assert one.last_words() == f"; berlin logged: ValueError: /data/ward.pt is no file ({log})"


def test_a_process_that_ends_at_once_says_why(tmp_path) -> None:
    (tmp_path / "berlin").mkdir()
    with Processes(tmp_path, "server") as started:
        started.start("berlin")
        started.running["berlin"].wait(timeout=60)
        with pytest.raises(RuntimeError, match=r"berlin has ended with code \d+: .*process\.log"):
            started.check()
    log = tmp_path / "berlin" / "process.log"
    assert log.read_text()
    assert log.stat().st_mode & 0o777 == 0o600
