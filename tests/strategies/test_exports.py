"""The stub by which editors know the strategies lists all that the package finds."""

import runpy
from pathlib import Path

import fl_lightning.strategies


def test_every_strategy_is_in_the_stub() -> None:
    package = Path(fl_lightning.strategies.__file__)
    exports = runpy.run_path(str(package.parents[2] / "docs" / "exports.py"))
    stub = package.with_suffix(".pyi").read_text()
    listed = {line.rpartition(" ")[2] for line in stub.splitlines() if line.startswith("from ")}

    assert set(fl_lightning.strategies.__all__) <= listed, "run `python docs/exports.py`"
    assert stub == exports["text"](), "run `python docs/exports.py`"
