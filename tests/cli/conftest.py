from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def lightning_may_call_deprecated_jsonargparse(monkeypatch: pytest.MonkeyPatch) -> None:
    """LightningCLI 2.6 calls a method that jsonargparse has renamed; the warning is theirs to mend."""
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")


@pytest.fixture
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FL_DATA_ROOT", raising=False)
