"""What the package imports is declared, and all of it is installed."""

import ast
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from test_layers import modules

ROOT = Path(__file__).parents[1]


def test_every_package_is_installed() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    listed -= {"fl_lightning.configs", "fl_lightning.report.templates"}  # files alone
    assert sorted(listed) == sorted(name for name, path in modules().items() if path.name == "__init__.py")


#: What is imported under another name than it is installed by.
DISTRIBUTIONS = {
    "Crypto": "pycryptodome",
    "sklearn": "scikit-learn",
    "sknetwork": "scikit-network",
    "yaml": "pyyaml",
    "google": "protobuf",
}


#: The modules that may import what is in an extra; nothing else is imported outside the core.
NEED = {
    "cluster": ("fl_lightning.study.cluster",),
    "study": ("fl_lightning.study.statistics", "fl_lightning.study.pictures"),
    "privacy": ("fl_lightning.round.privacy", "fl_lightning.remote.filters", "fl_lightning.remote.accounting"),
    "flare": ("fl_lightning.remote.", "fl_lightning.kit_guard"),
    "choose": ("fl_lightning.choice.ranges",),
    "export": ("fl_lightning.trained.export", "fl_lightning.models.pretrained"),
    "molecules": ("fl_lightning.data.sources.smiles",),
}


def distributions(requirements: Sequence[str]) -> set[str]:
    return {re.split(r"[\[<>=!~; ]", each)[0].lower().replace("_", "-") for each in requirements}


def imported_packages(path: Path) -> set[str]:
    """The packages of others that a module imports anywhere."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names - {"fl_lightning", *sys.stdlib_module_names}


def test_every_import_is_declared_in_the_core_or_in_the_extra_that_its_module_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    core, extras = distributions(project["dependencies"]), project["optional-dependencies"]
    extra = {name: distributions(extras[name]) for name in NEED}
    extra["flare"] |= distributions(extras["remote"])
    undeclared: dict[str, set[str]] = {}
    for name, path in modules().items():
        declared = core.union(*(extra[each] for each, sections in NEED.items() if name.startswith(sections)))
        for package in imported_packages(path):
            if DISTRIBUTIONS.get(package, package.replace("_", "-")) not in declared:
                undeclared.setdefault(package, set()).add(name)
    assert not undeclared
