"""Whole numbers in words, and checks of them: no constructor accepts 2.5 or ``True`` for a count.

Otherwise a loop of 2.5 rounds would run three, and ``True`` epochs would be one. Base classes of configurable classes
derive from :class:`Counted`; dataclasses call :func:`check_counts` in ``__post_init__``.
"""

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any

#: Annotations of parameters that accept only whole numbers.
_WHOLE = (int, int | None)


def count(value: int, noun: str) -> str:
    """A number and its noun.

    Example:
        >>> count(1, "client"), count(1200, "client")
        ('1 client', '1,200 clients')
    """
    return f"{value:,} {noun}{'' if value == 1 else 's'}"


def check_counts(types: Mapping[str, Any], values: Mapping[str, Any], prefix: str) -> None:
    """Refuse values that are not whole if the type is ``int`` or ``int | None``.

    Args:
        types: The type of each setting, by its name.
        values: The value of each setting, by its name; settings without a value are skipped.
        prefix: Prefix of the names in the message, for example ``strategy.``.

    Raises:
        ValueError: A value is a fraction, a boolean or not a number.

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
    """A base class whose subclasses' constructors refuse fractions and booleans for parameters of type ``int``."""

    #: Prefix of the names of settings in messages; None for the name of the class.
    settings_prefix: str | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = _checked(cls.__init__)  # type: ignore[method-assign]


def _checked(init: Callable[..., None]) -> Callable[..., None]:
    """The constructor, checking its counts first."""
    signature = inspect.signature(init)
    types = {
        name: parameter.annotation
        for name, parameter in signature.parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)  # whose values are a tuple or a dict
    }

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            given = signature.bind(self, *args, **kwargs).arguments
        except TypeError:  # the constructor itself raises a better error
            given = {}
        prefix = f"{type(self).__name__}: " if self.settings_prefix is None else self.settings_prefix
        check_counts(types, given, prefix)
        init(self, *args, **kwargs)

    return checked
