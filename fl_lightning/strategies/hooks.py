"""Methods of a strategy that look like hooks, but that nothing calls: misspelled ones, and those of Flower."""

import difflib
import inspect
from collections.abc import Iterator
from types import CodeType

from fl_lightning.strategies.base import Strategy

#: What there is instead of a hook of Flower's strategies.
_FLOWERS = {
    "aggregate_evaluate": "metrics, or a callback's on_evaluate",
    "aggregate_fit": "aggregate(stage, upload), or mixing_matrix(upload) of fl_lightning.strategies.mixing.base.Mixing",
    "configure_evaluate": "evaluations(clients)",
    "configure_fit": "configure(stage, clients) and training(round_idx); clients are drawn by trainer.participation",
    "initialize_parameters": "setup(federation), or a net with its weights as model.net",
    "num_evaluation_clients": "participation.evaluation_clients",
    "num_fit_clients": "participation.num_clients",
}
#: How alike a misspelled name is.
_ALIKE = 0.8


class WrongHook(ValueError):
    """A strategy defines what looks like a hook, but is none."""


def refuse_misnamed_hooks(strategy: Strategy) -> None:
    """Refuse a strategy that defines a method which is nearly a hook, and which its own code does not call.

    Raises:
        WrongHook: It does; the message names the hook.
    """
    mro = type(strategy).__mro__
    own = [kind for kind in mro if not kind.__module__.startswith("fl_lightning.") and issubclass(kind, Strategy)]
    hooks = {name for kind in mro if kind not in own for name in vars(kind) if not name.startswith("_")}
    methods = {name: value for kind in reversed(own) for name, value in vars(kind).items() if inspect.isfunction(value)}
    called = {each for value in methods.values() for code in _codes(value.__code__) for each in code.co_names}
    for name in sorted(set(methods) - hooks - called):
        near = difflib.get_close_matches(name, sorted(hooks), n=1, cutoff=_ALIKE)
        if name.startswith("_") or not (near or name in _FLOWERS):
            continue
        advice = f"override {_FLOWERS[name]}" if name in _FLOWERS else f"did you mean {near[0]}?"
        raise WrongHook(f"strategy {type(strategy).__name__} defines {name}, which nothing calls: {advice}")


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of a function and of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
