"""Records are whole or not there, whoever writes them."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from fl_lightning.files import CannotWrite
from fl_lightning.study import store as store_module
from fl_lightning.study.store import Store, _sealed


def test_the_newest_record_of_a_key_counts(tmp_path: Path) -> None:
    store = Store(tmp_path / "results")
    assert store.records() == {}
    store.add({"key": "a", "val": 1}, {"round": [0.0]})
    store.add({"key": "b", "val": 2})
    store.add({"key": "a", "val": 3})
    assert Store(tmp_path / "results").records() == {"a": {"key": "a", "val": 3}, "b": {"key": "b", "val": 2}}
    assert store.history() == {"a": {"round": [0.0]}}


def test_what_a_kill_cut_off_is_skipped_and_spoils_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add({"key": "a", "text": "ä" * 100})
    whole = store.runs.read_bytes()
    for cut in (1, len(whole) // 2, len(whole) - 1):
        store.runs.write_bytes(whole + whole[:cut])
        store.add({"key": "b"})
        assert set(store.records()) == {"a", "b"}


def test_many_writers(tmp_path: Path) -> None:
    stores = [Store(tmp_path) for _ in range(4)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda i: stores[i % 4].add({"key": str(i), "text": "x" * 5000}), range(60)))
    assert set(stores[0].records()) == {str(i) for i in range(60)}


def test_sources_are_kept_by_their_digest(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.keep_sources("one", {"a.py": "1"})
    store.keep_sources("two", {"a.py": "2"})
    store.keep_sources("one", {"a.py": "ignored"})
    assert Store(tmp_path).known_sources() == {"one": {"a.py": "1"}, "two": {"a.py": "2"}}


def test_files_of_names_that_look_alike_as_folders_are_apart(tmp_path: Path) -> None:
    names = ["C/1", "C 1", "C_1", "..", "."]
    folders = [Store(tmp_path).files({"method": "M", "case": name, "seed": 0}) for name in names]
    assert len(set(folders)) == len(names)
    assert folders[2] == tmp_path / "files" / "M" / "C_1" / "0"
    assert all(folder.resolve().parent.parent == tmp_path / "files" / "M" for folder in folders)


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with Store(tmp_path).running() as first, Store(tmp_path).running() as second:
        assert (first, second) == (True, False)
    with Store(tmp_path).running() as again:
        assert again


def test_links_in_place_of_locks_are_not_followed(tmp_path: Path) -> None:
    """The file to which one led was emptied."""
    victim, store = tmp_path / "victim", Store(tmp_path / "results")
    victim.write_text("mine")
    store.folder.mkdir()
    for name in (".run.lock", ".write.lock"):
        (store.folder / name).symlink_to(victim)
    with pytest.raises(CannotWrite, match=r"\.run\.lock cannot be written"), store.running():
        pass
    with pytest.raises(CannotWrite, match=r"\.write\.lock cannot be written"):
        store.add({"key": "a"})
    assert victim.read_text() == "mine"


def test_what_is_not_what_was_written_is_set_aside_and_named(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for key in "abc":
        store.add({"key": key, "val": 0.25, "text": "ä"}, {"round": [0.0, 1.0]})
    whole = store.runs.read_bytes()
    lines = whole.splitlines(keepends=True)
    start, end = len(lines[0]), len(lines[0]) + len(lines[1]) - 1
    for index in range(start, end):
        for bit in (0, 3, 7):
            other = bytearray(whole)
            other[index] ^= 1 << bit
            store.runs.write_bytes(other)
            actual = store.records()
            assert set(actual) == {"a", "c"}, (index, bit)
            assert actual["a"] == {"key": "a", "val": 0.25, "text": "ä"}
            assert store.damaged[0] == "runs.jsonl, line 2"
    store.runs.write_bytes(whole)
    assert set(store.records()) == {"a", "b", "c"}
    assert store.damaged == []


def test_sealed_lines_that_are_no_records_are_set_aside(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add({"key": "a"}, {"round": [0.0]})
    for path, forged in ((store.runs, {"method": "m"}), (store.rounds, {"key": "b"})):
        path.write_bytes(path.read_bytes() + _sealed(forged) + b"\n")
    assert set(store.records()) == set(store.history()) == {"a"}
    assert store.damaged == ["runs.jsonl, line 2", "history.jsonl, line 2"]
    store.sources.write_text("[1]")
    assert store.known_sources() == {}
    assert store.damaged[-1] == "sources.json as a whole"


def test_older_lines_count_once_they_are_sealed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.runs.write_text('{"key":"a","val":1}\n{"key":"b","val":2}\nno record\n')
    assert store.records() == {}
    assert store.damaged == [f"runs.jsonl, line {number}" for number in (1, 2, 3)]
    assert (store.seal(), store.seal()) == (2, 0)
    assert store.records() == {"a": {"key": "a", "val": 1}, "b": {"key": "b", "val": 2}}
    assert store.damaged == ["runs.jsonl, line 3"]
    store.add({"key": "c"})
    store.runs.write_text(store.runs.read_text().replace('"val":1', '"val":9'))
    assert set(store.records()) == {"b", "c"}


def test_the_results_of_the_repository_are_sealed() -> None:
    results = Path(__file__).parents[2] / "studies" / "results"
    for folder in sorted(path.parent for path in results.glob("*/runs.jsonl")):
        store = Store(folder)
        assert store.records()
        store.history()
        assert not store.damaged, f"{folder}: fl-train study seal"


def test_a_failure_before_a_damaged_line_counts_as_missing(tmp_path: Path) -> None:
    """The damaged line may be that of the run that was tried again and done."""
    store = Store(tmp_path)
    for key, error in (("failed", "too cold"), ("done", ""), ("failed", "")):
        store.add({"key": key, "error": error})
    assert store.records()["failed"]["error"] == ""
    store.runs.write_bytes(store.runs.read_bytes()[:-4] + b'0"}\n')
    assert set(store.records()) == {"done"}
    store.add({"key": "failed", "error": "too cold again"})
    assert store.records()["failed"]["error"] == "too cold again"


@pytest.mark.parametrize("change", ["rewrite", "seal"])
def test_what_is_added_during_a_change_of_all_lines_is_kept(change: str, tmp_path: Path, monkeypatch) -> None:
    """Another process adds a line at the moment at which the lock is asked for."""
    store, other = Store(tmp_path), Store(tmp_path)
    store.add({"key": "a"})
    with store.runs.open("a") as file:
        file.write('{"key":"b"}\n')
    if change == "rewrite":
        store.seal()
    locked, pending = store_module.locked, ["new"]

    def late(path: Path) -> AbstractContextManager[None]:
        while pending:
            line = json.dumps({"key": pending.pop()}, separators=(",", ":"))
            if change == "seal":
                with store.runs.open("a") as file:
                    file.write(f"{line}\n")
            else:
                other.add(json.loads(line))
        return locked(path)

    monkeypatch.setattr(store_module, "locked", late)
    assert (store.seal() if change == "seal" else store.rewrite(lambda record: {**record, "x": 1})) >= 2
    assert set(Store(tmp_path).records()) == {"a", "b", "new"}
