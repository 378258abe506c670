"""Imports point one way: no circle in the package and its callbacks, those for type checkers included."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for folder, package in (("fl_lightning", "fl_lightning"), ("callbacks", "fl_lightning.callbacks")):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join((package, *parts)).removesuffix(".__init__")] = path
    return found


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """The modules that a module names in its imports, wherever they stand in it."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    named: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            parts = {f"{base}.{alias.name}" for alias in node.names}
            named |= {part if part in known else base for part in parts}
    return (named & known.keys()) - {name}


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of a circle, in order; empty where there is none."""
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for target in sorted(graph[name]):
            if found := walk(target, [*path, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := walk(name, []))), [])


def test_a_circle_is_found() -> None:
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert not circle({"a": {"b", "c"}, "b": {"c"}, "c": set()})


def test_no_module_imports_itself_by_way_of_others() -> None:
    known = modules()
    graph = {name: imports(name, path, known) for name, path in known.items()}
    assert len(graph) > 100
    assert graph["fl_lightning.run.state"] >= {"fl_lightning.run.assembly", "fl_lightning.callback"}
    assert " -> ".join(circle(graph)) == ""
    importers = {name for name, targets in graph.items() if "fl_lightning.trainer" in targets}
    assert importers == {"fl_lightning", "fl_lightning.cli"}
