"""What classes of the user's compute, so that nothing that is cached outlives a change of their code."""

import functools
import hashlib
import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

from fl_lightning.counts import Counted

_NOT_THE_USERS = {__name__.partition(".")[0], *sys.stdlib_module_names}
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def own_code(*objects: Any) -> str | None:
    """A digest of the code of the user's classes; None if all classes are of this package.

    It covers what runs, not the files, which may have changed since: methods and constants of the classes of the
    objects, of their bases and of the partitioners and splitters that they hold, and what these name in the user's
    modules. Installed packages are left out.

    Args:
        objects: Partitioners and splitters.
    """
    lines = list(_of_objects(objects, set()))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest() if lines else None


def _of_objects(objects: Iterable[Any], seen: set[int]) -> Iterator[str]:
    for each in objects:
        if isinstance(each, Counted):
            yield from _of(type(each), seen)
            yield from _of_objects(vars(each).values(), seen)


def _of(value: Any, seen: set[int]) -> Iterator[str]:
    """Lines that change with what a class, a function or a constant is; none of other things, or a second time."""
    if isinstance(value, type | FunctionType | list | dict | set):
        if id(value) in seen:
            return
        seen.add(id(value))
    if isinstance(value, _PLAIN):
        yield repr(value)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _of(each, seen)
    elif isinstance(value, frozenset | set):
        yield from _of(tuple(sorted(value, key=repr)), seen)
    elif isinstance(value, dict):
        yield from _of(tuple((key, value[key]) for key in sorted(value, key=repr)), seen)
    elif isinstance(value, property):
        yield from _of((value.fget, value.fset), seen)
    elif isinstance(value, functools.cached_property):
        yield from _of(value.func, seen)
    elif isinstance(value, staticmethod | classmethod):
        yield from _of(value.__func__, seen)
    elif isinstance(value, CodeType):
        yield f"{value.co_code.hex()} {value.co_names} {value.co_varnames}"
        yield from _of(value.co_consts, seen)
    elif isinstance(value, FunctionType) and _is_users(value.__module__):
        wrapped = getattr(value, "__wrapped__", None)
        yield from _of((value.__code__, value.__defaults__, value.__kwdefaults__, wrapped), seen)
        yield from _of(tuple(_named(value)), seen)
    elif isinstance(value, type):
        for base in filter(lambda base: _is_users(base.__module__), value.__mro__):
            for name, part in sorted(vars(base).items()):
                if name == "__init__" or not name.startswith(("__", "_abc_")):
                    yield name
                    yield from _of(part, seen)


def _named(function: FunctionType) -> Iterator[Any]:
    """What a function names of its module, and of the user's modules that it imports."""
    names = sorted(_names_in(function.__code__))
    for value in (function.__globals__.get(name) for name in names):
        if not isinstance(value, ModuleType):
            yield value
        elif _is_users(value.__name__):
            yield from (vars(value).get(name) for name in names)


def _names_in(code: CodeType) -> set[str]:
    return {*code.co_names}.union(*(_names_in(each) for each in code.co_consts if isinstance(each, CodeType)))


def _is_users(module: str) -> bool:
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    is_installed = any(folder in file for folder in ("site-packages", "dist-packages"))
    return module.partition(".")[0] not in _NOT_THE_USERS and not is_installed
