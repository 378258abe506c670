"""Library code that is run only when it is first used, for a faster start of the command line.

``import lightning`` also runs PyTorch's compiler, all of torchmetrics, SciPy's signals and Matplotlib, and ``import
torch_geometric`` its data sets and pandas; every ``torch.optim`` optimizer starts the compiler, too. That takes
longer than ``import torch``, and a run uses none of it. The libraries have no switch for it, so the modules in
:data:`KNOWN` are put into ``sys.modules`` unexecuted, as ``importlib.util.LazyLoader`` does. They run as soon as
anything but the few names below is requested of them or of one of their submodules. This changes nothing that a
library does: with versions that request other names, start-up is just slower. What was imported before
:func:`install` is left alone.

Only the command line installs it, since the process is its own; importing the package changes nothing.
"""

import functools
import importlib
import importlib.metadata
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from threading import RLock
from types import ModuleType
from typing import Any

_DYNAMO, _METRICS, _PLOTS = "torch._dynamo", "torchmetrics", "torchmetrics.utilities.plot"
_lock = RLock()


def is_deferred(name: str) -> bool:
    """Whether a module has not been used yet, and so has not run."""
    return isinstance(sys.modules.get(name), _Deferred)


class _Deferred(ModuleType):
    def __dir__(self) -> list[str]:
        return dir(_run(self.__name__))

    def __getattr__(self, name: str) -> Any:
        if value := KNOWN[self.__name__].get(name):
            try:
                return value()
            except ImportError:  # another version, whose parts cannot be imported separately
                pass
        elif name.startswith("__") and name != "__all__":  # requested of every module by the interpreter
            raise AttributeError(name)
        return getattr(_run(self.__name__), name)


def _run(name: str) -> ModuleType:
    """Execute the module and return it."""
    with _lock:
        module = sys.modules[name]
        if isinstance(module, _Deferred):
            module.__class__ = ModuleType  # type: ignore[assignment]
            try:
                module.__spec__.loader.original.exec_module(module)  # type: ignore[union-attr]
            except BaseException:
                module.__class__ = _Deferred
                raise
    return module


class _DeferringLoader(Loader):
    def __init__(self, original: Loader) -> None:
        self.original = original

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.original.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__class__ = _Deferred


class _LoadedLoader(Loader):
    """Returns a module that its package imported while it was being looked up."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package = fullname.rpartition(".")[0]
        if is_deferred(package) and package != _METRICS:  # its parts work without the whole
            _run(package)
            if fullname in sys.modules:
                return ModuleSpec(fullname, _LoadedLoader(sys.modules[fullname]))
        if fullname not in KNOWN:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _DeferringLoader(spec.loader)
        return spec


# ---------------------------------------------------------------- names that are known without running a module


class _IsOptimized(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return not is_deferred(_DYNAMO) and isinstance(instance, sys.modules[_DYNAMO].OptimizedModule)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return not is_deferred(_DYNAMO) and issubclass(subclass, sys.modules[_DYNAMO].OptimizedModule)


class _OptimizedModule(metaclass=_IsOptimized):
    """The class that ``torch.compile`` returns: it has no instances before the first call."""


def _disable(
    function: Any = None, recursive: bool = True, *, reason: str | None = None, wrapping: bool = True
) -> Callable[..., Any]:
    """``torch._dynamo.disable``: there is nothing to hide from a compiler that has not been loaded."""

    @functools.cache
    def disabled() -> Callable[..., Any]:
        selected: Callable[..., Any] = _run(_DYNAMO).disable(function, recursive, reason=reason, wrapping=wrapping)
        return selected

    if function is None:
        return disabled()

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (function if is_deferred(_DYNAMO) else disabled())(*args, **kwargs)

    return call


def _graph_break(msg: str = "") -> None:
    """``torch._dynamo.graph_break``: there is no graph before the compiler has been loaded."""
    if not is_deferred(_DYNAMO):
        sys.modules[_DYNAMO].graph_break(msg)


def _metric(module: str, name: str) -> Any:
    importlib.import_module("torchmetrics.utilities")  # the entry point of its circular imports
    return getattr(importlib.import_module(module), name)


def _plot(name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(_run(_PLOTS), name)(*args, **kwargs)

    return call


#: The modules, and for each the names that do not require running it, with functions that make their values.
KNOWN: Mapping[str, Mapping[str, Callable[[], Any]]] = {
    _DYNAMO: {
        "OptimizedModule": lambda: _OptimizedModule,  # Lightning checks whether objects are instances
        "disable": lambda: _disable,  # applied by optimizers to their methods
        "graph_break": lambda: _graph_break,  # in every step of an optimizer
    },
    _METRICS: {
        "Metric": functools.partial(_metric, "torchmetrics.metric", "Metric"),
        "MetricCollection": functools.partial(_metric, "torchmetrics.collections", "MetricCollection"),
        "__version__": functools.partial(importlib.metadata.version, "torchmetrics"),
        "_logger": functools.partial(logging.getLogger, "torchmetrics"),
    },
    _PLOTS: {
        **{name: lambda: object for name in ("_AX_TYPE", "_CMAP_TYPE", "_PLOT_OUT_TYPE")},  # for annotations
        **{
            name: functools.partial(_plot, name)
            for name in ("plot_confusion_matrix", "plot_curve", "plot_single_or_multi_val")
        },
    },
    "torch_geometric.datasets": {},
}


def install() -> None:
    """Defer the modules of :data:`KNOWN` in this process, from now on."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
