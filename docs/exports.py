"""Write ``fl_lightning/strategies/__init__.pyi``, by which editors and type checkers know the strategies.

The package finds its strategies by itself when it is imported, which they do not run. After a strategy was added:
``python docs/exports.py``.
"""

import inspect
from pathlib import Path

import fl_lightning.strategies

STUB = Path(fl_lightning.strategies.__file__).with_suffix(".pyi")


def text() -> str:
    """The stub: every strategy, every family's base and what else the package exports, imported from where it is."""
    classes = {cls for cls in vars(fl_lightning.strategies).values() if inspect.isclass(cls)}
    lines = sorted(f"from {cls.__module__} import {cls.__name__} as {cls.__name__}" for cls in classes)
    return "\n".join(["# Written by docs/exports.py.", *lines, ""])


if __name__ == "__main__":
    STUB.write_text(text())
