"""The faults that ``run.py`` builds in are faults of the code as it is."""

from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FAULTS = yaml.safe_load((ROOT / "tests/mutations/faults.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault["what"])
def test_a_fault_names_what_stands_in_its_file(fault: dict[str, Any]) -> None:
    assert (ROOT / fault["file"]).read_text(encoding="utf-8").count(fault["old"]) == 1
    assert all((ROOT / file.partition("::")[0]).exists() for file in fault["tests"])
