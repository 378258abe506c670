"""What a message may contain: a table of fields for each kind of request and response.

The reader of a message does not trust its writer. A message with fields that are not in the table, or that do not pass
its checks, is wrong: a site refuses it, and on the server that client fails.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fl_lightning.tasks import TASKS

#: Takes a field and returns what is wrong with it; empty if nothing is.
Check = Callable[[Any], str]

#: Maxima of clients, characters of a name and of a reason, and counts.
MOST_CLIENTS, LONGEST_NAME, LONGEST_REASON, MOST = 1_000_000, 100, 20_000, 10**9
#: Maximum number of models that are evaluated at once.
MOST_EVALUATIONS = 64
#: Maxima of outputs and of input features of a net that one side of a federation builds for the other.
MOST_OUTPUTS, MOST_FEATURES = 100_000, 2_000_000


class WrongMessage(ValueError):
    """A message that does not fit its table."""


def whole(least: int, most: int) -> Check:
    """An integer between two others; ``True`` is not one."""

    def check(fact: Any) -> str:
        is_whole = isinstance(fact, int) and not isinstance(fact, bool)
        return "" if is_whole and least <= fact <= most else f"must be an integer in [{least}, {most}]"

    return check


def real(least: float, most: float) -> Check:
    """A number between two others."""

    def check(fact: Any) -> str:
        is_real = isinstance(fact, int | float) and not isinstance(fact, bool)  # of any size, so it is only compared
        return "" if is_real and least <= fact <= most else f"must be a number in [{least:g}, {most:g}]"

    return check


def text(longest: int = LONGEST_NAME, shortest: int = 1) -> Check:
    """Printable characters on one line."""

    def check(fact: Any) -> str:
        fits = isinstance(fact, str) and shortest <= len(fact) <= longest and fact.isprintable()
        return "" if fits else f"must be {shortest} to {longest} printable characters"

    return check


def reason(fact: Any) -> str:
    """Any characters; to be displayed with :func:`shown`."""
    return "" if isinstance(fact, str) and len(fact) <= LONGEST_REASON else f"must be at most {LONGEST_REASON} letters"


def hexadecimal(digits: int = 64, *, or_empty: bool = False) -> Check:
    """A given number of hexadecimal digits."""
    pattern = re.compile(f"[0-9a-f]{{{digits}}}")

    def check(fact: Any) -> str:
        fits = isinstance(fact, str) and (pattern.fullmatch(fact) or (or_empty and not fact))
        return "" if fits else f"must be {digits} hexadecimal digits"

    return check


def flag(fact: Any) -> str:
    """True or false."""
    return "" if isinstance(fact, bool) else "must be true or false"


def digits(most: int) -> Check:
    """At most a given number of hexadecimal digits, two for each byte; possibly none."""

    def check(fact: Any) -> str:
        fits = isinstance(fact, str) and len(fact) <= most and re.fullmatch(r"([0-9a-f]{2})*", fact)
        return "" if fits else f"must be at most {most} hexadecimal digits"

    return check


def one_of(*allowed: Any) -> Check:
    """One of several strings."""

    def check(fact: Any) -> str:
        return "" if isinstance(fact, str) and fact in allowed else f"must be one of {', '.join(map(str, allowed))}"

    return check


def either(*checks: Check) -> Check:
    """A value that passes one of several checks."""

    def check(fact: Any) -> str:
        problem = [each(fact) for each in checks]
        return "" if "" in problem else " or ".join(problem)

    return check


def nothing(fact: Any) -> str:
    """Null."""
    return "" if fact is None else "must be null"


def anything(fact: Any) -> str:
    """Any JSON value; its depth is bounded when it is read."""
    return ""


def list_of(each: Check, most: int, least: int = 0, *, distinct: bool = False) -> Check:
    """A list of values of one kind."""

    def check(fact: Any) -> str:
        if not isinstance(fact, list) or not least <= len(fact) <= most:
            return f"must be a list of {least} to {most} items"
        if problem := next((problem for item in fact if (problem := each(item))), ""):
            return f"has an item that {problem}"
        return "has an item twice" if distinct and len(set(fact)) < len(fact) else ""

    return check


def mapping(name: Check, value: Check, most: int) -> Check:
    """Names and values of one kind each."""

    def check(fact: Any) -> str:
        if not isinstance(fact, Mapping) or len(fact) > most:
            return f"must be at most {most} names with values"
        for key, item in fact.items():
            if problem := name(key) or value(item):
                return f"has an item that {problem}"
        return ""

    return check


def pair(*checks: Check) -> Check:
    """A list of fixed length, each item of its own kind."""

    def check(fact: Any) -> str:
        if not isinstance(fact, list) or len(fact) != len(checks):
            return f"must be a list of {len(checks)} items"
        return next((problem for each, item in zip(checks, fact, strict=True) if (problem := each(item))), "")

    return check


def record(**facts: Check) -> Check:
    """A mapping with certain names and no others, each with a value of its own kind."""

    def check(fact: Any) -> str:
        if not isinstance(fact, Mapping) or fact.keys() != facts.keys():
            return f"must have {', '.join(facts)} and nothing else"
        return next((f"{name} {problem}" for name, each in facts.items() if (problem := each(fact[name]))), "")

    return check


def _index(fact: Any) -> str:
    """A client's index as a name in JSON."""
    return "" if isinstance(fact, str) and re.fullmatch(r"0|[1-9][0-9]{0,8}", fact) else "must be a client's index"


def _task(fact: Any) -> str:
    """The name of a task, with its settings."""
    name = fact.get("name") if isinstance(fact, Mapping) else None
    if not isinstance(name, str) or name not in TASKS:
        return f"must be one of {', '.join(TASKS)}"
    settings = {each.name: each.default for each in dataclasses.fields(TASKS[name])}
    counted = {setting: flag if isinstance(value, bool) else _WIDTH for setting, value in settings.items()}
    return record(name=text(), **counted)(fact)


_CLIENT = whole(0, MOST_CLIENTS - 1)
_WIDTH = whole(1, 10**7)
_FEATURES = either(whole(1, MOST_FEATURES), list_of(whole(1, MOST_FEATURES), 8, 1))
_OWN = list_of(one_of("features", "outputs"), 2, distinct=True)
_STATE = hexadecimal()
_SETTINGS = mapping(text(), anything, 10_000)
_ADDRESS = record(phase=one_of("initial", "round", "onboarding"), round_idx=whole(0, MOST), name=text())
_EVALUATION = record(tuning=anything, output=anything)
_GRAPH = record(is_directed=flag, has_edge_weights=flag, num_edge_attributes=whole(0, 10**6), has_cross_edges=flag)
_EDGES = either(record(), _GRAPH)

_CERTIFICATE = either(one_of(""), reason)
_SIGNATURE = digits(2048)
_KEYS = {"sealing": _STATE, "masking": _STATE, "certificate": _CERTIFICATE, "signature": _SIGNATURE}
_SHARES = mapping(_index, digits(1024), MOST_CLIENTS)
_PLACE = list_of(either(text(), whole(0, MOST)), 3, 1)
_SURVIVORS = list_of(_CLIENT, MOST_CLIENTS, 1, distinct=True)

#: What a server sends.
QUESTIONS: dict[str, dict[str, Check]] = {
    "enroll": {"strategy": text()},
    "start": {
        "strategy": text(),
        "settings": _SETTINGS,
        "names": list_of(text(), MOST_CLIENTS, 1, distinct=True),
        "task": _task,
        "num_features": _FEATURES,
        "num_outputs": whole(1, MOST_OUTPUTS),
        "own": _OWN,
        "layout": mapping(text(), anything, 100),
        "training_clients": list_of(_CLIENT, MOST_CLIENTS, 1, distinct=True),
        "seed": whole(0, 2**32 - 1),
        "precision": text(),
        "dtype": one_of("float32", "float64", "bfloat16", "float16"),
        "secure": flag,
        "secure_share": real(0, 1),
        "federation": _STATE,
        "index": _CLIENT,
    },
    "sum_keys": {
        "purpose": one_of("run", "evaluate"),
        "place": _PLACE,
        "state": _STATE,
        "nonce": hexadecimal(32),
    },
    "sum_shares": {"keys": mapping(_index, record(**_KEYS), MOST_CLIENTS)},
    "sum_confirm": {"survivors": _SURVIVORS},
    "sum_reveal": {"survivors": _SURVIVORS, "confirmed": mapping(_index, _SIGNATURE, MOST_CLIENTS)},
    "run": {"address": _ADDRESS, "work_fraction": real(0, 1), "state": _STATE, "shares": _SHARES},
    "evaluate": {
        "evaluations": list_of(pair(text(shortest=0), _EVALUATION), MOST_EVALUATIONS),
        "round_idx": whole(0, MOST),
        "state": _STATE,
        "forget": list_of(_STATE, 100_000),
        "shares": _SHARES,
    },
    "predict": {"evaluation": _EVALUATION, "round_idx": whole(0, MOST), "state": _STATE},
    "load": {"state": _STATE},
    "forget": {"forget": list_of(_STATE, 100_000)},
}

#: What a site responds to each of them, in addition to ``to``, the name of the request.
RESPONSES: dict[str, dict[str, Check]] = {
    "enroll": {
        "state": hexadecimal(or_empty=True),
        "name": text(),
        "task": _task,
        "num_features": _FEATURES,
        "num_outputs": whole(1, MOST_OUTPUTS),
        "own": _OWN,
        "class_names": hexadecimal(or_empty=True),
        "has_validation": flag,
        "density": real(0, 1),
        "edges": _EDGES,
        "data": _STATE,
    },
    "start": {
        "state": _STATE,
        "parameters": _STATE,
        "metrics": flag,
        "scored": either(text(1000), list_of(text(), 1000, 1, distinct=True)),
        "noisy": flag,
    },
    "sum_keys": {
        "state": _STATE,
        **_KEYS,
        "name": text(),
        "bound": either(nothing, list_of(text(), MOST_CLIENTS, 1, distinct=True)),
    },
    "sum_shares": {"shares": _SHARES, "seed_digest": _STATE},
    "sum_confirm": {"signature": _SIGNATURE},
    "sum_reveal": {
        "seeds": mapping(_index, hexadecimal(32), MOST_CLIENTS),
        "keys": mapping(_index, hexadecimal(64), MOST_CLIENTS),
        "label": _STATE,
    },
    "run": {"state": _STATE, "from": _STATE, "place": _PLACE},
    "evaluate": {
        "state": _STATE,
        "failures": mapping(text(shortest=0), reason, MOST_EVALUATIONS),
    },
    "predict": {"state": _STATE},
    "load": {"state": _STATE},
    "forget": {"state": hexadecimal(or_empty=True)},
}
#: Fields that exist only under secure aggregation.
OF_SUMS = ("shares", "place")
#: Fields of responses that may be missing: those of sums, and whether a site's metrics have noise.
OPTIONAL = {"start": ("noisy",), "run": OF_SUMS, "evaluate": OF_SUMS}
#: The response of a site that refuses or fails: why, its state if it has one, and the state that the request named.
FAILURE: dict[str, Check] = {"why": reason, "state": hexadecimal(or_empty=True), "from": _STATE, "place": _PLACE}


def check_facts(facts: Any, table: Mapping[str, Check], optional: Sequence[str] = ()) -> None:
    """Compare a message's fields with its table.

    Args:
        facts: The fields of the message.
        table: The allowed fields.
        optional: Fields that may be missing.

    Raises:
        WrongMessage: A field is missing, not in the table, or does not pass its check.
    """
    if not isinstance(facts, Mapping):
        raise WrongMessage("it holds no fields by name")
    if missing := [name for name in table if name not in facts and name not in optional]:
        raise WrongMessage(f"it does not say {', '.join(missing)}")
    if other := [shown(name) for name in facts if name not in table]:
        raise WrongMessage(f"it has fields that nobody asked for: {', '.join(sorted(other)[:3])}")
    for name, fact in facts.items():
        if problem := table[name](fact):
            raise WrongMessage(f"{name} {problem}")


def shown(problem: Any, longest: int = LONGEST_NAME) -> str:
    """A text from elsewhere, made safe to display: one line of printable characters, truncated."""
    plain = "".join(letter if letter.isprintable() else "?" for letter in str(problem)[: longest + 1])
    return plain if len(plain) <= longest else f"{plain[:longest]}..."
