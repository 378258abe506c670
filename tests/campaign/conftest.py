"""The seed of the campaign, and its record."""

import os
from pathlib import Path

import pytest
from campaign.record import SEED, Record

#: Which part of the campaign a process runs, such as ``1/2``.
SHARE = "FL_CAMPAIGN_SHARE"


def pytest_report_header() -> str:
    return f"campaign: FL_CAMPAIGN_SEED={SEED}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep this process's share of the campaign's tests: every n-th of them."""
    number, _, total = os.environ.get(SHARE, "1/1").partition("/")
    own = [item for item in items if item.path.parent == Path(__file__).parent]
    others = {item for index, item in enumerate(own) if index % int(total) != int(number) - 1}
    config.hook.pytest_deselected(items=[item for item in items if item in others])
    items[:] = [item for item in items if item not in others]


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
