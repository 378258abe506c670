"""The marks of a study's results: of a run, as far as its record tells; of a method on a case, by most of its seeds.

A record holds its marks from all rounds of the run. Older ones do not: where the validation curve was kept beside them,
it says as much; where the best round alone is known, only whether that was in the last tenth.
"""

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd

from fl_lightning.counts import count
from fl_lightning.run.curve import (
    AT_EDGE,
    DIVERGED,
    SIGNS,
    STILL_RISING,
    Curve,
    Marks,
    late,
    marks_of,
    reached,
    says_overflow,
)
from fl_lightning.study.definition import TOTAL_BYTES
from fl_lightning.study.store import Record, Rounds, is_less_better

#: Columns of the tidy table, in their order: what was measured for each mark (empty where there is none); whether that
#: was looked for in all rounds, or the best round alone is known; how many settings the choice was made of; and when a
#: run had 95 % of its best validation.
COLUMNS = (STILL_RISING, DIVERGED, AT_EDGE, "marks_from", "tried", "rounds_to_95", "bytes_to_95")
ALL_ROUNDS, BEST_ROUND = "all rounds", "best round"


def columns_of(record: Record, rounds: Rounds | None) -> dict[str, Any]:
    """What a record says of a run's end, by the names of :data:`COLUMNS`.

    Args:
        record: Of a reported run.
        rounds: The metrics of every round that were kept of it, if any.
    """
    marks, is_whole = _marks_of(record, rounds)
    near = record.get("near") or ({} if rounds is None or record["error"] else _near(record, rounds))
    return {
        STILL_RISING: marks.get(STILL_RISING, ""),
        DIVERGED: marks.get(DIVERGED, ""),
        "marks_from": ALL_ROUNDS if is_whole else BEST_ROUND,
        "rounds_to_95": near.get("rounds"),
        "bytes_to_95": near.get("bytes"),
    }


def _marks_of(record: Record, rounds: Rounds | None) -> tuple[Marks, bool]:
    """The marks, and whether all rounds were looked at."""
    if record["error"]:
        return ({DIVERGED: record["error"]} if record["error"].startswith("ServerDiverged") else {}), True
    if "marks" in record:
        return record["marks"], True
    overflow = next(filter(says_overflow, record.get("warnings", ())), "")
    best_round, num_rounds = record["result"]["best_round"], record["num_rounds"]
    curve = _curve(record, rounds)
    if curve is None:
        marks = late(best_round, num_rounds)
    else:
        marks = marks_of(curve, best_round=best_round, num_rounds=num_rounds)
    return marks | ({DIVERGED: overflow} if overflow else {}), curve is not None


def _curve(record: Record, rounds: Rounds | None) -> Curve | None:
    if rounds is None or record["monitor"] not in rounds:
        return None
    values = [math.nan if value is None else value for value in rounds[record["monitor"]]]
    return Curve([int(number) for number in rounds["round"]], values, "min" if is_less_better(record) else "max")


def _near(record: Record, rounds: Rounds) -> dict[str, int]:
    curve = _curve(record, rounds)
    number = None if curve is None else reached(curve)
    if curve is None or number is None:
        return {}
    sent = rounds.get(TOTAL_BYTES)
    return {"rounds": number + 1, **({} if sent is None else {"bytes": int(sent[list(curve.rounds).index(number)])})}


def marked_pairs(table: pd.DataFrame, mark: str) -> set[tuple[str, str]]:
    """Method and case of which most of the runs have a mark."""
    if mark not in table:
        return set()
    share = (table[mark].fillna("") != "").groupby([table["method"], table["case"]]).mean()
    return {(str(method), str(case)) for (method, case), value in share.items() if value > 0.5}


def with_signs(shown: pd.DataFrame, table: pd.DataFrame, *, plain: bool = False) -> pd.DataFrame:
    """A leaderboard with the signs of the marks behind the metrics.

    Args:
        shown: Methods × cases, text.
        table: The tidy table.
        plain: Whether the signs are ASCII.
    """
    shown = shown.copy()
    for name, sign in SIGNS.items():
        for method, case in marked_pairs(table, name):
            if method in shown.index and case in shown.columns and shown.loc[method, case]:
                shown.loc[method, case] += f" {sign.plain if plain else sign.sign}"
    return shown


def legend(table: pd.DataFrame, *, plain: bool = False) -> str:
    """What the signs in a leaderboard mean, and of how much they can be said; empty where there are none."""
    return " ".join(_sentences(table, plain=plain))


def _sentences(table: pd.DataFrame, *, plain: bool) -> Iterator[str]:
    pairs = len(table.groupby(["method", "case"]))
    counted = {name: len(marked_pairs(table, name)) for name in SIGNS}
    meanings = [
        f"{sign.plain if plain else sign.sign} {sign.words} ({counted[name]})"
        for name, sign in SIGNS.items()
        if counted[name]
    ]
    if meanings:
        yield f"In most seeds: {', '.join(meanings)}, of {count(pairs, 'pair')} of method and case."
    known = int((table["marks_from"] == BEST_ROUND).sum()) if "marks_from" in table else 0
    if known:
        yield (
            f"Of {known} of {len(table)} runs the best round alone is known: whether it was in the last tenth, not "
            "whether the curve rose before or fell after."
        )
