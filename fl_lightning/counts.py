"""Whole numbers stay whole: no constructor takes 2.5 or ``True`` for a count.

A round loop of 2.5 rounds runs three, and ``True`` epochs are one. Bases whose subclasses are settings derive from
:class:`Counted`, dataclasses call :func:`check_counts` in ``__post_init__``.
"""

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any

#: What parameters are annotated with that take whole numbers alone.
_WHOLE = (int, int | None)


def check_counts(types: Mapping[str, Any], values: Mapping[str, Any], prefix: str) -> None:
    """Refuse values that are not whole where the type is ``int``, or ``int | None``.

    Args:
        types: The type of each setting, by its name.
        values: Its value; settings without one are left alone.
        prefix: Of the names in the message, for example ``strategy.``.

    Raises:
        ValueError: A value is a fraction, a boolean or no number.

    Example:
        >>> check_counts({"num_rounds": int}, {"num_rounds": 2.5}, "trainer.")
        Traceback (most recent call last):
        ValueError: trainer.num_rounds must be a whole number, got 2.5: give 2
    """
    for name, value in values.items():
        if types.get(name) not in _WHOLE or (value is None and types[name] is not int):
            continue
        if isinstance(value, bool) or not isinstance(value, Integral):
            near = f"give {value:.0f}" if isinstance(value, float) and math.isfinite(value) else "give a whole number"
            raise ValueError(f"{prefix}{name} must be a whole number, got {value!r:.60}: {near}")


class Counted:
    """A base whose subclasses' constructors refuse what is not whole for parameters of the type ``int``."""

    #: What stands before the names of settings in messages; the class's own name where it is None.
    settings_prefix: str | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = _checked(cls.__init__)  # type: ignore[method-assign]


def _checked(init: Callable[..., None]) -> Callable[..., None]:
    """A constructor that checks its counts first."""
    signature = inspect.signature(init)
    types = {name: parameter.annotation for name, parameter in signature.parameters.items()}

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            given = signature.bind(self, *args, **kwargs).arguments
        except TypeError:  # which the constructor itself says better
            given = {}
        prefix = f"{type(self).__name__}: " if self.settings_prefix is None else self.settings_prefix
        check_counts(types, given, prefix)
        init(self, *args, **kwargs)

    return checked
