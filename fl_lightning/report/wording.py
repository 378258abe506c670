"""Numbers as the pages write them, with their units."""

import math
from collections.abc import Iterable, Sequence


def number(value: float | None) -> str:
    """Four decimals, or four digits of what is small or large; a dash for what is unknown.

    Example:
        >>> number(0.81234), number(0.0021234), number(1234.5), number(float("nan")), number(7)
        ('0.8123', '0.002123', '1,234', '–', '7')
    """
    if value is None or not math.isfinite(value):
        return "–"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4f}" if abs(value) >= 0.01 else f"{value:.4g}"


def signed(value: float | None) -> str:
    """A difference, with its sign.

    Example:
        >>> signed(0.0123), signed(-0.5), signed(None)
        ('+0.0123', '−0.5000', '–')
    """
    if value is None or not math.isfinite(value):
        return "–"
    return f"{'−' if value < 0 else '+'}{number(abs(value))}"


def size(num_bytes: float) -> str:
    """Bytes, in powers of a thousand.

    Example:
        >>> size(999), size(80_400_000), size(999_600)
        ('999 B', '80.4 MB', '1 MB')
    """
    factor, unit = size_unit(num_bytes)
    shown = f"{num_bytes / factor:.0f}" if factor == 1 else f"{num_bytes / factor:.3g}"
    if float(shown) >= 1000:  # rounded, it is one of the next unit
        factor, unit = size_unit(1000 * factor)
        shown = f"{num_bytes / factor:.3g}" if num_bytes < 999.5 * factor else f"{num_bytes / factor:,.0f}"
    return f"{shown} {unit}"


def size_unit(largest: float) -> tuple[float, str]:
    """The bytes of a unit in which the largest value is readable, and the unit's name."""
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if largest >= 1000**power:
            return 1000.0**power, unit
    return 1.0, "B"


def duration(seconds: float) -> str:
    """Seconds, minutes or hours.

    Example:
        >>> duration(0.0123), duration(75), duration(7260), duration(59.97)
        ('12.3 ms', '1 min 15 s', '2 h 1 min', '1 min 0 s')
    """
    if float(milliseconds := f"{1000 * seconds:.3g}") < 1000:
        return f"{milliseconds} ms"
    if float(whole := f"{seconds:.3g}") < 60:
        return f"{whole} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def listed(words: Sequence[str]) -> str:
    """Words as a sentence lists them.

    Example:
        >>> listed(["FedAvg"]), listed(["FedAvg", "Local"]), listed(["FedAvg", "FedPer", "Local"])
        ('FedAvg', 'FedAvg and Local', 'FedAvg, FedPer and Local')
    """
    return " and ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part)


def short_names(names: Iterable[str]) -> list[str]:
    """Leave out the part before the last hyphen, if it is the same in all names.

    Example:
        >>> short_names(["client-00", "client-01"]), short_names(["front-2009", "rear-2009"])
        (['00', '01'], ['front-2009', 'rear-2009'])
    """
    listed = list(names)
    heads = {name.rpartition("-")[0] for name in listed}
    return [name.rpartition("-")[2] for name in listed] if len(heads) == 1 and len(listed) > 1 else listed


def setting(value: object) -> str:
    """A setting's value as YAML writes it.

    Example:
        >>> setting(None), setting(True), setting(0.1)
        ('null', 'true', '0.1')
    """
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
