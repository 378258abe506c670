"""Files that are whole or as they were, and secrets."""

from pathlib import Path

import pytest

from fl_lightning.files import secret_file, whole_file


def test_a_file_is_whole_or_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.txt"
    with whole_file(path) as temporary:
        temporary.write_text("first")
        assert not path.exists()

    def write_half() -> None:
        with whole_file(path) as temporary:
            temporary.write_text("sec")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        write_half()
    assert path.read_text() == "first"
    assert list(path.parent.iterdir()) == [path]


def test_a_secret_is_made_once_and_whole(tmp_path) -> None:
    path = tmp_path / "site" / "key"

    def interrupted() -> bytes:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        secret_file(path, interrupted)
    assert not path.exists()

    assert secret_file(path, lambda: b"first") == b"first"
    assert secret_file(path, lambda: b"second") == b"first"
    assert path.stat().st_mode & 0o077 == 0
