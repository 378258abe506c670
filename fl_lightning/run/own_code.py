"""The source files of a user's own classes that a configuration names, and of the modules that these import.

What belongs to Python, or is installed and not named itself, is not the user's own, nor is what this package computes
with; a package that is installed in place (``pip install --editable``) is. Nothing is imported.
"""

import ast
import hashlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from fl_lightning.run.version import without_docstrings

_DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
#: Their versions are a part of every run's, as far as they matter.
_KNOWN = {"fl_lightning", "torch", "torch_geometric", "lightning", "torchmetrics", "numpy", *sys.stdlib_module_names}
_INSTALLED = {"site-packages", "dist-packages"}


def own_names(settings: Any) -> tuple[str, ...]:
    """The dotted names in settings, such as ``mine.MyNet``, that lead to a source file of the user's own, in order.

    After them come the files with the weights that a net starts from (``Pretrained``).
    """
    names = {each for each in _texts(settings) if _DOTTED.fullmatch(each) and each.partition(".")[0] not in _KNOWN}
    return (*(name for name in sorted(names) if _files_of(name, _locate)), *sorted(_weights(settings)))


def own_files(names: Sequence[str]) -> dict[str, str]:
    """A digest of each source file that dotted names lead to: of its code, without comments and docstrings.

    Args:
        names: As :func:`own_names` finds them, each once.

    Returns:
        By path from the folder that is searched for modules, such as ``mine.py``.
    """
    weights = {name: hashlib.sha256(Path(name).read_bytes()).hexdigest()[:12] for name in names if Path(name).is_file()}
    names = [name for name in names if name not in weights]
    named, known = {name.partition(".")[0] for name in names}, dict[str, ModuleSpec | None]()

    def find(top: str) -> ModuleSpec | None:
        if top not in known:
            known[top] = None if top in _KNOWN else _locate(top)
            if known[top] is not None and top not in named and _INSTALLED & set(_folder(known[top]).parts):
                known[top] = None
        return known[top]

    result: dict[str, str] = {}
    todo = [found for name in names for found in _files_of(name, find).items()]
    while todo:
        path, module = todo.pop()
        shown = f"{module.replace('.', '/')}{'/__init__' if path.stem == '__init__' else ''}{path.suffix}"
        if shown not in result:
            result[shown], imported = _read(path, module)
            todo += [found for name in imported for found in _files_of(name, find).items()]
    return dict(sorted({**result, **weights}.items()))


def digest_of_files(files: Mapping[str, str]) -> str:
    """A digest of all of them; empty for none."""
    return hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:12] if files else ""


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


def _weights(value: Any) -> Iterator[str]:
    """The files that a setting ``file`` names."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            if isinstance(each, str) and str(key).rpartition(".")[2] == "file" and Path(each).is_file():
                yield each
            yield from _weights(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _weights(each)


def _locate(top: str) -> ModuleSpec | None:
    """Where a top-level module would be imported from now, whatever was imported before."""
    for finder in sys.meta_path:
        try:
            spec = finder.find_spec(top, None)
        except (ImportError, AttributeError, ValueError):
            continue
        if spec is not None:
            return spec
    return None


def _folder(spec: ModuleSpec | None) -> Path:
    assert spec is not None
    places = list(spec.submodule_search_locations or ())
    return Path(places[0] if places else spec.origin or "")


def _files_of(name: str, find: Callable[[str], ModuleSpec | None]) -> dict[Path, str]:
    """The files that importing a dotted name runs, each with the name of its module; what follows is in the last."""
    top, *rest = name.split(".")
    if (spec := find(top)) is None:
        return {}
    result: dict[Path, str] = {}
    if spec.has_location and spec.origin:
        result[Path(spec.origin)] = top
    folders = [Path(each) for each in spec.submodule_search_locations or ()]
    module = top
    for part in rest:
        module = f"{module}.{part}"
        file = next((each / f"{part}.py" for each in folders if (each / f"{part}.py").is_file()), None)
        folders = [each / part for each in folders if (each / part).is_dir()]
        initial = next((each / "__init__.py" for each in folders if (each / "__init__.py").is_file()), None)
        if (found := initial or file) is not None:
            result[found] = module
        elif not folders:
            break
    return result


def _read(path: Path, module: str) -> tuple[str, list[str]]:
    """The digest of a file, and the dotted names that it imports."""
    content = path.read_bytes()
    try:
        tree = without_docstrings(ast.parse(content)) if path.suffix == ".py" else None
    except (SyntaxError, ValueError):
        tree = None
    if tree is None:
        return hashlib.sha256(content).hexdigest()[:12], []
    package = module.split(".") if path.stem == "__init__" else module.split(".")[:-1]
    imported: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported += [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            imported += [f"{base}.{each.name}" for each in node.names] if base else []
    return hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:12], imported
