"""What the metrics of a run depend on besides its settings and its data: the version of the code's mathematics.

Two things make a run stale. ``MATHEMATICS`` is raised by hand with every change after which a run comes to other
metrics: under the empty name where it concerns all strategies, under the strategy's, or under the name of a kind of
data (``DATA``), which the settings of a run's data tell. (A digest of the sources would make thousands of runs stale
with every change of speed or of a message.) And the versions of the packages that compute. Beside them each run keeps
a digest of the sources, so that ``fl-train study status`` tells which files have changed since, and ``fl-train study
check`` computes a run of every method again and compares. Of a user's own classes nobody raises a number: a digest of
their files is a part of the version (:mod:`fl_lightning.run.own_code`).
"""

import ast
import functools
import hashlib
import importlib.metadata
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

#: Raised by hand, see above.
MATHEMATICS: dict[str, int] = {"": 1, "passes": 1, "links": 1}
#: Kinds of data that have a version of their own, recognized by the settings of a run's data by dotted name.
DATA: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    # epochs of mini-batches are passes over the examples; before version 1 every batch was drawn independently
    "passes": lambda data: data.get("data.batch_size") is not None and data.get("data.steps_per_epoch") is None,
    # before version 1 a step without a batch size drew negatives for the pairs of validation and test, too
    "links": lambda data: str(data.get("data.source")).rpartition(".")[2] == "Links",
}

_PACKAGES = ("torch", "torch-geometric")
_ROOT = Path(__file__).parents[1]
#: Packages whose code computes, or decides what is computed.
_COMPUTING = ("batches", "data", "executors", "kernels", "models", "relations", "round", "strategies", "tasks")


def version_of(strategy: str, data: Mapping[str, Any], own: str = "") -> str:
    """The version of a run's computation, for example ``1; torch 2.13.0; torch-geometric 2.8.1``.

    Args:
        strategy: Bare name of the strategy's class.
        data: The settings of the data by dotted name, such as ``data.batch_size``.
        own: Digest of the files of the user's own classes; empty where there are none.
    """
    numbers = [str(MATHEMATICS[name]) for name in ("", strategy) if name in MATHEMATICS]
    kinds = [f"{name} {MATHEMATICS[name]}" for name, is_of in DATA.items() if is_of(data)]
    mine = [f"own {own}"] if own else []
    return "; ".join([".".join(numbers), *kinds, *(f"{name} {_installed(name)}" for name in _PACKAGES), *mine])


def own_digest(version: str) -> str:
    """The digest of the user's own classes in a version; empty where there are none."""
    return version.partition("; own ")[2]


@functools.cache
def sources() -> dict[str, str]:
    """A digest of each source file that computes: of its syntax, without comments and docstrings."""
    files = sorted(path for width in _COMPUTING for path in (_ROOT / width).rglob("*.py"))
    return {
        str(path.relative_to(_ROOT)): hashlib.sha256(_syntax(path).encode()).hexdigest()[:12]
        for path in (*files, _ROOT / "trainer.py", _ROOT / "federation.py")
    }


@functools.cache
def digest_of_sources() -> str:
    """A digest of all of them."""
    return hashlib.sha256(repr(sorted(sources().items())).encode()).hexdigest()[:12]


@functools.cache
def _installed(package: str) -> str:
    return importlib.metadata.version(package).partition("+")[0]


def _syntax(path: Path) -> str:
    return ast.dump(without_docstrings(ast.parse(path.read_text())))


def without_docstrings(tree: ast.Module) -> ast.Module:
    """The tree itself, without the docstrings in it."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr) and _is_text(body[0].value):
            node.body = body[1:]  # type: ignore[attr-defined]
    return tree


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
