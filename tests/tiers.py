"""Which tests are of the second tier, and the file of those that take long."""

import csv
import inspect
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from fl_lightning import SequentialExecutor
from fl_lightning.strategies import Strategy

TESTS = Path(__file__).parent

#: The strategies that stand for their kinds: one model, corrected steps, two models, no model sent, masks, generators
#: of data, two generators of models, and maps between neighbors. The first tier tests them in full.
REPRESENTATIVES = {
    "FedAvg",
    "SCAFFOLD",
    "APFL",
    "FedProto",
    "FedAux",
    "FedSagePlus",
    "FedSheafHN",
    "Panacea",
    "SheafFMTL",
}
#: What of the contract the first tier tests for every strategy, by parts of the names of the tests and checks.
FOR_EVERY_STRATEGY = ("executors_agree", "resume_is_exact", "server_state_is_complete")
#: The tests that take ``LONG_SECONDS`` or more on the average over their parameters (``--write-durations``).
DURATIONS, LONG_SECONDS = TESTS / "durations.csv", 0.5
#: What the first tier has though it takes long, by the beginnings of the names.
ALWAYS = (
    "tests/strategies/test_contract.py::test_contract",
    "tests/cli/test_readme.py",
    "tests/tasks/test_seam.py",
    "tests/test_imports.py",
    "tests/test_layers.py",
)


def is_of_the_second_tier(folder: str, file: str, name: str, parameters: Mapping[str, Any]) -> bool:
    """Whether ``make test-full`` alone runs a test, because ``make test`` runs one that would fail with it."""
    kinds = [each for each in parameters.values() if inspect.isclass(each) and issubclass(each, Strategy)]
    if file in ("test_contract.py", "test_loopback.py", "test_secure_settings.py") and kinds:
        return kinds[0].__name__ not in REPRESENTATIVES and not any(part in name for part in FOR_EVERY_STRATEGY)
    if folder != "executors" and parameters.get("executor") is SequentialExecutor:
        return True  # the contract says that the stacked one comes to the same
    return folder == "campaign"


def function_of(nodeid: str) -> str:
    """The test without its parameters."""
    return nodeid.partition("[")[0]


def long_tests() -> set[str]:
    """Tests that take long on the average over their parameters, but for those that the first tier has all the same."""
    with DURATIONS.open(newline="") as file:
        return {row["test"] for row in csv.DictReader(file) if not row["test"].startswith(ALWAYS)}


class Durations:
    """Writes which tests take long."""

    def __init__(self) -> None:
        self.seconds: dict[str, Counter[str]] = defaultdict(Counter)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[function_of(report.nodeid)][report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        means = {test: each.total() / len(each) for test, each in self.seconds.items()}
        with DURATIONS.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("test", "seconds"))
            writer.writerows((test, f"{mean:.1f}") for test, mean in sorted(means.items()) if mean >= LONG_SECONDS)
