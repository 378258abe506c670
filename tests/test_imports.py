"""The rooms of the package depend on each other one way only."""

import ast
import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

import networkx as nx

ROOT = Path(__file__).parents[1]


def modules() -> dict[str, Path]:
    """Every module of the package, callbacks included."""
    found = {}
    for folder, prefix in ((ROOT / "fl_lightning", ""), (ROOT / "callbacks", "fl_lightning.")):
        for path in folder.rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[prefix + ".".join(parts).removesuffix(".__init__")] = path
    return found


def test_no_import_circle_also_none_for_types_only() -> None:
    known = modules()
    imports = nx.DiGraph()
    for name, path in known.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("fl_lightning"):
                inner = [f"{node.module}.{alias.name}" for alias in node.names]
                targets = [target if target in known else node.module for target in inner]
                imports.add_edges_from((name, target) for target in targets if target != name)
    assert imports.number_of_edges() > 300
    assert not list(nx.simple_cycles(imports))


def test_every_package_is_installed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(name for name, path in modules().items() if path.name == "__init__.py")


def test_the_package_does_not_import_callbacks_or_the_command_line() -> None:
    # a study runs the command line; a job of NVFlare reads the settings that it was given; the others list words
    above = ("callbacks", "study", "remote.job", "completion_command", "refusals")
    for name, path in modules().items():
        if name not in ("fl_lightning.cli", "fl_lightning.trainer") and not name.startswith(
            tuple(f"fl_lightning.{room}" for room in above)
        ):
            text = path.read_text()
            assert "fl_lightning.callbacks" not in text.split('"""')[-1], name
            assert "import fl_lightning.cli" not in text, name
            assert "from fl_lightning.cli" not in text, name


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
    "study": ("fl_lightning.study.statistics", "fl_lightning.study.pictures"),
    "privacy": ("fl_lightning.round.privacy", "fl_lightning.remote.filters", "fl_lightning.remote.accounting"),
    "flare": ("fl_lightning.remote.",),
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
        declared = core.union(*(extra[each] for each, rooms in NEED.items() if name.startswith(rooms)))
        for package in imported_packages(path):
            if DISTRIBUTIONS.get(package, package.replace("_", "-")) not in declared:
                undeclared.setdefault(package, set()).add(name)
    assert not undeclared
