"""What a terminal shows of names, which files of anybody may have given: the text itself, and nothing that it does."""

from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from fl_lightning.arguments import printable


def plain_text(text: object, style: str = "") -> Text:
    r"""A text for rich, which takes neither brackets for markup nor colons for pictures.

    Example:
        >>> plain_text("ward [/b] 3").plain, plain_text("a" + chr(27) + "[31m").plain
        ('ward [/b] 3', 'a\\x1b[31m')
    """
    return Text(printable(str(text)), style=style)


class PlainTable(Table):
    """A table whose title, heads and cells are shown as they are."""

    def add_column(self, header: Any = "", footer: Any = "", **settings: Any) -> None:
        """As rich's."""
        super().add_column(plain_text(header), plain_text(footer), **settings)

    def add_row(self, *cells: Any, **settings: Any) -> None:
        """As rich's."""
        super().add_row(*map(plain_text, cells), **settings)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """As rich's."""
        if isinstance(self.title, str):
            self.title = plain_text(self.title, str(self.title_style or "table.title"))
        if isinstance(self.caption, str):
            self.caption = plain_text(self.caption, str(self.caption_style or "table.caption"))
        yield from super().__rich_console__(console, options)
