"""Which tests `make test` leaves to `make test-full`."""

from types import SimpleNamespace

import pytest
from tiers import ALWAYS, DURATIONS, REPRESENTATIVES, TESTS, Durations, is_of_the_second_tier, long_tests

from fl_lightning import SequentialExecutor, StackedExecutor, strategies
from fl_lightning.strategies import FedAvg, FedProx
from fl_lightning.testing import CHECKS


def test_representatives_are_strategies() -> None:
    assert set(strategies.__all__) >= REPRESENTATIVES
    assert len(REPRESENTATIVES) == 9


@pytest.mark.parametrize("check", ["executors_agree", "resume_is_exact", "server_state_is_complete"])
@pytest.mark.parametrize("kind", [FedAvg, FedProx])
def test_executors_agree_and_runs_resume_for_every_strategy_in_the_first_tier(check: str, kind: type) -> None:
    assert f"check_{check}" in {each.__name__ for each in CHECKS}
    name = f"test_contract[{kind.__name__}-{check}]"
    assert not is_of_the_second_tier("strategies", "test_contract.py", name, {"runs": kind})


def test_the_rest_of_the_contract_is_for_representatives_in_the_first_tier() -> None:
    name = "test_permuting_clients_permutes_results"
    assert not is_of_the_second_tier("strategies", "test_contract.py", name, {"kind": FedAvg})
    assert is_of_the_second_tier("strategies", "test_contract.py", name, {"kind": FedProx})


def test_what_runs_under_both_executors_runs_under_one_in_the_first_tier() -> None:
    assert is_of_the_second_tier("strategies", "test_ditto.py", "test_x", {"executor": SequentialExecutor})
    assert not is_of_the_second_tier("strategies", "test_ditto.py", "test_x", {"executor": StackedExecutor})
    assert is_of_the_second_tier("callbacks", "test_report.py", "test_x", {"executor": SequentialExecutor})
    both = {"kind": FedAvg, "executor": SequentialExecutor}
    assert not is_of_the_second_tier("strategies", "test_contract.py", "test_x", both)
    assert not is_of_the_second_tier("executors", "test_executors.py", "test_x", {"executor": SequentialExecutor})


def test_the_campaign_is_of_the_second_tier() -> None:
    assert is_of_the_second_tier("campaign", "test_hostile.py", "test_hostile_sites", {})


def test_what_takes_long_is_of_the_second_tier_but_for_what_every_change_needs() -> None:
    long = long_tests()
    assert len(long) > 100
    assert not any(test.startswith(ALWAYS) for test in long)
    names = {each.partition("::")[0] for each in long | set(ALWAYS)}
    assert all((TESTS.parent / name).exists() for name in names), f"measure {DURATIONS.name} again: --write-durations"


def test_durations_are_means_over_parameters(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tiers.DURATIONS", tmp_path / "durations.csv")
    written = Durations()
    for name, seconds in (("a.py::test[1]", 0.2), ("a.py::test[1]", 0.3), ("a.py::test[2]", 0.7), ("b.py::test", 0.4)):
        written.pytest_runtest_logreport(SimpleNamespace(nodeid=name, duration=seconds))
    written.pytest_sessionfinish()
    assert (tmp_path / "durations.csv").read_text() == "test,seconds\na.py::test,0.6\n"


def test_nothing_imports_a_conftest() -> None:
    """Python would run it a second time: its folders and hooks are those of the module that pytest loaded."""
    for path in TESTS.rglob("*.py"):
        lines = path.read_text().splitlines()
        assert not [line for line in lines if line.startswith(("import conftest", "from conftest "))], path
