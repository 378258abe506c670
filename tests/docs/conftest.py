import pytest


@pytest.fixture(autouse=True)
def lightning_may_call_deprecated_jsonargparse(monkeypatch: pytest.MonkeyPatch) -> None:
    """LightningCLI 2.6 calls a method that jsonargparse has renamed; the warning is theirs to mend."""
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
