"""The seed of the campaign, and its record."""

import pytest
from campaign.record import SEED, Record


def pytest_report_header() -> str:
    return f"campaign: FL_CAMPAIGN_SEED={SEED}"


@pytest.fixture(scope="session")
def seed() -> int:
    """Root of every draw of the campaign."""
    return SEED


@pytest.fixture(scope="session")
def record() -> Record:
    """What was tried and what survived."""
    return Record()


@pytest.fixture(autouse=True)
def lightning_may_call_deprecated_jsonargparse(monkeypatch: pytest.MonkeyPatch) -> None:
    """LightningCLI 2.6 calls a method that jsonargparse has renamed; the warning is theirs to mend."""
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
