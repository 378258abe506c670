"""A leaderboard as a table of LaTeX, with booktabs."""

from collections.abc import Sequence

import pandas as pd

from fl_lightning.run.curve import AT_EDGE, DIVERGED, STILL_RISING
from fl_lightning.study.column import has_best, scale_in, sign_of, unit_of
from fl_lightning.study.marks import marked_pairs
from fl_lightning.study.table import units

#: Superscripts of the marks, and what they mean.
_MARKS = {
    STILL_RISING: (r"\uparrow", "was still rising"),
    DIVERGED: (r"\dagger", "diverged"),
    AT_EDGE: (r"\ddagger", "chosen at an edge of the grid"),
}
_SPECIAL = str.maketrans(
    {each: f"\\{each}" for each in "&%$#_{}"} | {"~": r"\textasciitilde{}", "^": r"\^{}", "\\": "/"}
)


def latex(shown: pd.DataFrame, table: pd.DataFrame, metric: str, *, ceilings: Sequence[str], num_seeds: int) -> str:
    r"""Mean and standard deviation of each method and case, the best of each case in bold.

    Args:
        shown: Methods × cases that were run; only its labels are read.
        table: The tidy table.
        metric: A column of it.
        ceilings: Methods that do not compete, below a line.
        num_seeds: How many seeds a method has; fewer are given in parentheses.

    Returns:
        A ``tabular`` that needs ``\usepackage{booktabs}``.
    """
    pairs = {mark: marked_pairs(table, mark) for mark in _MARKS}
    rows = {pair: group for pair, group in table.dropna(subset=metric).groupby(["method", "case"], sort=False)}
    best = {case: _best(rows, metric, case, [name for name in shown.index if name not in ceilings]) for case in shown}
    lines = [rf"\begin{{tabular}}{{l{'c' * len(shown.columns)}}}", r"\toprule"]
    lines += [" & ".join(["method", *map(_plain, shown.columns)]) + r" \\", r"\midrule"]
    for names in ([name for name in shown.index if name not in ceilings], [n for n in shown.index if n in ceilings]):
        if names and lines[-1] != r"\midrule":
            lines.append(r"\midrule")
        for name in names:
            cells = []
            for case in shown.columns:
                sign = "".join(each for mark, (each, _) in _MARKS.items() if (name, case) in pairs[mark])
                is_best = name in best[case]
                cells.append(_cell(rows.get((name, case)), metric, sign, is_best=is_best, num_seeds=num_seeds))
            lines.append(" & ".join([_plain(name), *cells]) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}"]
    used = [f"${sign}$ {words}" for mark, (sign, words) in _MARKS.items() if pairs[mark]]
    notes = [_unit(table, metric), *([f"in most seeds: {', '.join(used)}"] if used else [])]
    return "\n".join([*lines, *(f"% {note}" for note in notes)])


def _best(rows: dict[tuple[str, str], pd.DataFrame], metric: str, case: str, names: Sequence[str]) -> set[str]:
    """The methods with the best mean of a case, as it is printed."""
    means = {name: _rounded(rows[name, case], metric) for name in names if (name, case) in rows}
    if not means or not has_best(metric):
        return set()
    sign = sign_of(rows[next(iter(means)), case], metric)
    wanted = sign * max(sign * value for value in means.values())
    return {name for name, value in means.items() if value == wanted}


def _rounded(rows: pd.DataFrame, metric: str) -> float:
    return round(scale_in(rows, metric) * float(rows[metric].mean()), 1)


def _cell(rows: pd.DataFrame | None, metric: str, sign: str, *, is_best: bool, num_seeds: int) -> str:
    if rows is None:
        return ""
    mean, scale = f"{_rounded(rows, metric):.1f}", scale_in(rows, metric)
    parts = [r"\mathbf{" + mean + "}" if is_best else mean]
    parts += [rf" \pm {scale * rows[metric].std():.1f}"] if len(rows) > 1 else []
    parts += [rf"\,({len(rows)})"] if len(rows) < num_seeds else []
    parts += ["^{" + sign + "}"] if sign else []
    return f"${''.join(parts)}$"


def _unit(table: pd.DataFrame, metric: str) -> str:
    """A metric and its unit; of the monitored one, which may differ from case to case, with all its names."""
    kinds = {unit_of(rows, metric) for _, rows in table.dropna(subset=metric).groupby("case")}
    return f"{metric} {kinds.pop()}" if metric != "test" and len(kinds) == 1 else units(table)


def _plain(text: object) -> str:
    return str(text).translate(_SPECIAL)
