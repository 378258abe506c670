"""The examples in the docstrings of callbacks; collected as files, their modules would be imported twice."""

import doctest
import importlib
import pkgutil

import fl_lightning.callbacks


def test_examples_in_docstrings() -> None:
    package = fl_lightning.callbacks
    names = [module.name for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    actual = [doctest.testmod(importlib.import_module(name)) for name in names]
    assert sum(result.attempted for result in actual) >= 2
    assert not any(result.failed for result in actual)
