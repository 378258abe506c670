"""The hashed lock has the versions of constraints.txt, each with hashes, and nothing of one machine."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def pins(text: str) -> dict[str, str]:
    actual = re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", text, flags=re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in actual}


def test_the_lock_is_of_the_constraints() -> None:
    lock = pins((ROOT / "requirements.lock").read_text())
    constraints = pins((ROOT / "constraints.txt").read_text())
    assert len(lock) > 100
    assert {name: version for name, version in lock.items() if name in constraints} == {
        name: version for name, version in constraints.items() if name in lock
    }
    assert "torch" not in lock  # whose builds differ by machine
    assert set(lock) - set(constraints) <= {"setuptools", "pip"}
    assert set(constraints) - set(lock) <= {"torch"}


def test_every_pin_of_the_lock_has_hashes_and_no_place_of_a_machine() -> None:
    text = (ROOT / "requirements.lock").read_text()
    entries = re.split(r"^(?=[A-Za-z0-9])", text, flags=re.MULTILINE)[1:]
    assert len(entries) == len(pins(text))
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", entry) for entry in entries)
    assert "://" not in text
    assert " @ " not in text
