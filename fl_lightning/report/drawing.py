"""What every picture shares: Matplotlib's style, ids that differ within a page, and names that fit beside axes."""

import io
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.text import Text

from fl_lightning.arguments import printable
from fl_lightning.report.theme import inline, stand_in
from fl_lightning.report.wording import short_names

#: Bars of more clients have no names.
MOST_BARS = 60

_LONGEST_NAME = 14
#: Characters of a line of a name beside an axis that is told whole.
_LONGEST_LINE = 22
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fl_lightning",
    "path.simplify": False,
    "font.size": 10,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "text.color": stand_in("ink"),
    "text.parse_math": False,  # names are names, with a $ in them too
    "lines.linewidth": 1.7,
}


@dataclass
class Drawing:
    """Makes the pictures of one page, whose ids differ.

    Attributes:
        count: Pictures so far.
    """

    count: int = field(default=0)

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        with matplotlib.rc_context():
            matplotlib.rcdefaults()  # a matplotlibrc of the current folder may be somebody else's
            matplotlib.rcParams.update(_STYLE)  # type: ignore[arg-type]
            yield

    def _finish(self, figure: Figure, alt: str) -> str:
        self.count += 1
        for each in figure.findobj(Text):
            each.set_text(printable(each.get_text()))
        text = io.StringIO()
        FigureCanvasSVG(figure).print_svg(text, metadata={"Date": None})  # type: ignore[no-untyped-call]
        return inline(text.getvalue(), f"p{self.count}", escape(alt, quote=False))


def fitting(names: Sequence[str]) -> list[str]:
    """Names as they stand beside an axis: whole where they are short, without what they share where they are not.

    Example:
        >>> fitting(["client-00", "client-01"]), fitting(["university-hospital-1", "university-hospital-2"])
        (['client-00', 'client-01'], ['1', '2'])
    """
    whole = max(map(len, names), default=0) <= _LONGEST_NAME
    short = list(names) if whole else short_names(names)
    return [name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…" for name in short]


def in_lines(names: Sequence[str]) -> tuple[list[str], float, float]:
    """Names as they stand whole beside an axis, in lines where they are long.

    Returns:
        The names, the inches that a picture of such rows takes, and the share of the width that is theirs.
    """
    lines = [textwrap.wrap(name, _LONGEST_LINE) for name in names]
    most, longest = max(map(len, lines)), max((len(line) for each in lines for line in each), default=0)
    height = 0.8 + max(0.3, 0.15 * most + 0.06) * len(names)
    return ["\n".join(each) for each in lines], height, 0.05 + 0.017 * longest


def margin(names: Sequence[str]) -> float:
    """What names take to the left of an axis, as a share of the width."""
    return 0.05 + 0.0185 * max(map(len, names), default=0)
