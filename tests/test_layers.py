"""The packages stand in layers: each imports what is below it, and nothing beside or above it.

An import counts wherever it stands, also in a function or under ``TYPE_CHECKING``; none of them is allowed to point up.
What is imported by a name that is only known as the program runs cannot be read here: where that is done is listed.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest

ROOT = Path(__file__).parents[1]

#: From the ground up. Packages of one layer do not know each other.
LAYERS = (
    (
        "arguments",
        "counts",
        "deferred",
        "direction",
        "extras",
        "files",
        "kernels",
        "kit_guard",
        "memory",
        "optimizers",
        "renamed",
        "saved_tensors",
        "terminal",
        "yaml_input",
    ),
    ("batches",),
    ("models", "relations"),
    ("tasks",),
    ("round",),
    ("federation",),
    ("data",),
    ("datasets", "executors", "strategies"),
    ("run",),
    ("report",),
    ("callbacks",),  # the report is one of them
    ("trainer",),  # some callbacks are there by default
    ("refusals",),
    ("cli",),  # the settings of a run, which studies and jobs read too
    ("remote", "study", "testing", "trained"),
    ("choice",),
    ("completion_command",),
    ("command_line",),  # the entry, which hands each verb on
    ("__main__",),
)
#: The face of the package: it hands names on, when they are asked for, and only the entry asks for its version.
FACE = "fl_lightning"
#: Arrows inside the first layer.
GROUND = {("arguments", "yaml_input"), ("kernels", "memory"), ("terminal", "arguments")}
#: Modules that import by name: what a user or a table of theirs names, or a package's own modules.
BY_NAME = {
    "fl_lightning",  # what is asked for
    "fl_lightning.cli",  # the class that --strategy names
    "fl_lightning.command_line",  # the module of a verb, which only it may know
    "fl_lightning.data.sources.pyg",  # PyG's data sets
    "fl_lightning.deferred",  # libraries
    "fl_lightning.models.plain",  # users' nets
    "fl_lightning.refusals",  # whether a path is of anything
    "fl_lightning.remote.references",  # what its own list allows
    "fl_lightning.remote.registry",
    "fl_lightning.strategies",  # all of its modules
}


def modules() -> dict[str, Path]:
    """Every module of the package, callbacks included."""
    actual = {}
    for folder, prefix in ((ROOT / "fl_lightning", ""), (ROOT / "callbacks", "fl_lightning.")):
        for path in folder.rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            actual[prefix + ".".join(parts).removesuffix(".__init__")] = path
    return actual


def imported(name: str, text: str, known: frozenset[str], *, is_package: bool = False) -> Iterator[str]:
    """The modules of this package that a module's text imports."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = name.split(".")
                above = parts[: len(parts) - node.level + is_package]
                base = ".".join([*above, *([base] if base else [])])
            named = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for each in named:
            while each and each not in known:
                each = each.rpartition(".")[0]
            if each and each != name:
                yield each


@pytest.fixture(scope="module")
def arrows() -> nx.DiGraph:
    """Which module imports which."""
    known, actual = modules(), nx.DiGraph()
    for name, path in known.items():
        text, is_package = path.read_text(), path.name == "__init__.py"
        actual.add_edges_from(
            (name, target) for target in imported(name, text, frozenset(known), is_package=is_package)
        )
    assert actual.number_of_edges() > 1000
    return actual


def part_of(module: str) -> str:
    """The package or file right in the package that a module is of; the face of the package itself."""
    return module.split(".")[1] if "." in module else FACE


def test_every_package_has_its_layer() -> None:
    placed = [each for layer in LAYERS for each in layer]
    assert len(placed) == len(set(placed))
    assert {part_of(name) for name in modules()} - {FACE} <= set(placed)


def test_no_module_imports_itself_in_the_end(arrows: nx.DiGraph) -> None:
    assert not list(nx.simple_cycles(arrows))


def test_every_arrow_points_down(arrows: nx.DiGraph) -> None:
    height = {each: number for number, layer in enumerate(LAYERS) for each in layer}
    wrong = []
    for above, below in arrows.edges:
        own, other = part_of(above), part_of(below)
        if FACE in (own, other) or own == other or (own, other) in GROUND:
            continue
        if height[own] <= height[other]:
            wrong.append(f"{above} -> {below}")
    assert not wrong


def test_nobody_but_the_entry_imports_the_face_of_the_package(arrows: nx.DiGraph) -> None:
    assert set(arrows.predecessors(FACE)) == {"fl_lightning.command_line"}


def test_the_command_line_alone_puts_libraries_off(arrows: nx.DiGraph) -> None:
    assert set(arrows.predecessors("fl_lightning.deferred")) == {"fl_lightning.command_line"}


def test_imports_by_name_are_those_that_are_known() -> None:
    words = ("import_module", "resolve_name", "__import__")
    assert {name for name, path in modules().items() if any(word in path.read_text() for word in words)} == BY_NAME


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f():\n    from fl_lightning.run import state", ["fl_lightning.run.state"]),
        ("if TYPE_CHECKING:\n    import fl_lightning.trainer", ["fl_lightning.trainer"]),
        ("from fl_lightning.round.stage import Stage", ["fl_lightning.round.stage"]),
        ("from .ledger import Ledger", ["fl_lightning.callbacks.ledger"]),
        ("from . import ledger", ["fl_lightning.callbacks.ledger"]),
        ("import torch", []),
    ],
)
def test_what_is_read_of_imports(text: str, expected: list[str]) -> None:
    known = frozenset(modules())
    assert list(imported("fl_lightning.callbacks.report", text, known)) == expected
