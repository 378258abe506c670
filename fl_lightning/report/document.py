"""A page: sections of pictures, tables and facts, put into one file without scripts that asks for nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fl_lightning.files import whole_file
from fl_lightning.report.figures import Picture, Table
from fl_lightning.report.theme import variables


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A metric with its name, and a line of explanation."""

    name: str
    value: str
    more: str = ""


@dataclass(frozen=True, kw_only=True)
class Group:
    """Pictures of a section that belong together.

    Attributes:
        title: What they are of.
        text: What they mean, and what good ones look like.
        pictures: Side by side where there is room.
    """

    title: str
    text: str
    pictures: Sequence[Picture]


@dataclass(frozen=True, kw_only=True)
class Section:
    """A card of the page.

    Attributes:
        anchor: Its id.
        title: Its heading.
        text: A line beneath the heading.
        pictures: Side by side where there is room; a single one stands beside the first of the folded tables.
        groups: More pictures, each group with words of its own.
        tables: Open ones.
        folded: Tables that are opened by a click.
        facts: Metrics by themselves.
        notes: Lines at its end.
        empty: What is said where there is nothing to show.
    """

    anchor: str
    title: str
    text: str = ""
    pictures: Sequence[Picture] = ()
    groups: Sequence[Group] = ()
    tables: Sequence[Table] = ()
    folded: Sequence[Table] = ()
    facts: Sequence[Fact] = ()
    notes: Sequence[str] = ()
    empty: str = ""


@dataclass(frozen=True, kw_only=True)
class Document:
    """A page.

    Attributes:
        title: Of the page.
        subtitle: A line beneath it.
        verdict: What came of it, in a sentence or two.
        status: A word about how it ended, and whether that is ``good``, ``warn`` or ``bad``.
        alerts: What has to be read before anything else.
        facts: The metrics at its head.
        sections: The cards.
        footer: Lines at its end.
    """

    title: str
    subtitle: str = ""
    verdict: str = ""
    status: tuple[str, str] | None = None
    alerts: Sequence[str] = ()
    facts: Sequence[Fact] = ()
    sections: Sequence[Section] = field(default=())
    footer: Sequence[str] = ()

    def html(self) -> str:
        """The page."""
        light, dark = (Markup(variables(scheme)) for scheme in (0, 1))
        return _environment().get_template("document.html").render(document=self, light=light, dark=dark)

    def write(self, path: Path) -> Path:
        """Write the page, whole.

        Raises:
            CannotWrite: The disk is full, the folder read-only, ...
        """
        with whole_file(path) as temporary:
            temporary.write_text(self.html(), encoding="utf-8", errors="backslashreplace")  # of half a character
        return path


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("fl_lightning.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["drawn"] = Markup
    environment.filters["spans"] = spans
    return environment


def spans(number_of: int) -> list[int]:
    """Columns of twelve for each of so many pictures: rows of two and three without a gap.

    Example:
        >>> spans(1), spans(4), spans(5)
        ([6], [6, 6, 6, 6], [6, 6, 4, 4, 4])
    """
    pairs = {0: 0, 1: 2, 2: 1}[number_of % 3]
    if number_of == 1:
        return [6]
    return [6] * (2 * pairs) + [4] * (number_of - 2 * pairs)
