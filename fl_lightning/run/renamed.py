"""Arguments that have another name now."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def renamed(**names: str) -> Callable[[Callable[_Arguments, _Result]], Callable[_Arguments, _Result]]:
    """Refuse keywords that a function had, by the name that they have now.

    Args:
        names: The present name of each former one.

    Raises:
        TypeError: The function is called with a former name.

    Example:
        >>> @renamed(algorithm="strategy")
        ... def fit(strategy): ...
        >>> fit(algorithm=1)
        Traceback (most recent call last):
        TypeError: fit() got 'algorithm', which was renamed to strategy: call fit(strategy=...)
    """

    def decorate(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
        @functools.wraps(function)
        def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
            for name in kwargs.keys() & names.keys():
                verb, now = function.__name__, names[name]
                raise TypeError(f"{verb}() got {name!r}, which was renamed to {now}: call {verb}({now}=...)")
            return function(*args, **kwargs)

        return call

    return decorate
