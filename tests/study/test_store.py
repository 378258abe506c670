"""Records are whole or not there, whoever writes them."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from fl_lightning.study.store import Store


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
    whole = store.cells.read_bytes()
    for cut in (1, len(whole) // 2, len(whole) - 1):
        store.cells.write_bytes(whole + whole[:cut])
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


def test_one_run_at_a_time(tmp_path: Path) -> None:
    with Store(tmp_path).running() as first, Store(tmp_path).running() as second:
        assert (first, second) == (True, False)
    with Store(tmp_path).running() as again:
        assert again
