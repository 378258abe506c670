"""What the package imports is declared, and all of it is installed."""

import ast
import re
import sys
import tomllib
from pathlib import Path

from test_layers import modules

ROOT = Path(__file__).parents[1]


def test_every_package_is_installed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert sorted(listed) == sorted(name for name, path in modules().items() if path.name == "__init__.py")


#: What is imported under another name than it is installed by.
DISTRIBUTIONS = {
    "Crypto": "pycryptodome",
    "sklearn": "scikit-learn",
    "sknetwork": "scikit-network",
    "yaml": "pyyaml",
    "google": "protobuf",
}


def test_every_import_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = [*project["dependencies"], *(each for name in set(extras) - {"dev", "docs"} for each in extras[name])]
    declared = {re.split(r"[\[<>=!~; ]", each)[0].lower().replace("_", "-") for each in needed}
    undeclared: dict[str, set[str]] = {}
    for name, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported = [node.module]
            else:
                continue
            for package in {each.partition(".")[0] for each in imported} - {"fl_lightning", *sys.stdlib_module_names}:
                distribution = DISTRIBUTIONS.get(package, package.replace("_", "-"))
                if distribution not in declared:
                    undeclared.setdefault(package, set()).add(name)
    assert not undeclared
