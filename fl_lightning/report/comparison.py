"""Runs side by side, to look at: in a terminal, in a notebook and on a page."""

import html
from pathlib import Path

from rich.console import Group
from rich.text import Text

from fl_lightning.counts import count
from fl_lightning.report.compared import Compared
from fl_lightning.report.comparison_page import document
from fl_lightning.report.comparison_tables import gaps_table, rich_table, settings_table, summary_table
from fl_lightning.report.configurations import UNSET
from fl_lightning.report.document import Document
from fl_lightning.terminal import PlainTable, plain_text


class Comparison(Compared):
    """Runs side by side; the arguments and tables are those of :class:`~fl_lightning.report.compared.Compared`."""

    def __rich__(self) -> Group:
        """Tables for a terminal."""
        tables: list[PlainTable | Text] = []
        if len(self.settings):
            tables.append(rich_table("Settings that differ", settings_table(self.settings, self.labels, shared=True)))
        if lone := sum((self.settings == UNSET).any(axis=1)):
            tables.append(
                plain_text(
                    f"(and {count(int(lone), 'setting')} that not every configuration has: they are on the page)\n"
                )
            )
        tables.append(
            rich_table(
                f"{count(len(self.recorded), 'run')}, {self.metric} at the best round",
                summary_table(self.configurations, self.metric),
            )
        )
        if self.others:
            paired = gaps_table(self.over_seeds)
            tables.append(rich_table(f"Differences from {self.reference}, paired over seeds", paired))
            if len(self.clients):
                paired = gaps_table(self.over_clients)
                tables.append(rich_table(f"Differences from {self.reference}, paired over clients", paired))
        said = [*([self.verdict] if self.others else []), self.unended, *self.notes]
        return Group(*tables, *map(plain_text, filter(None, said)))

    def _repr_html_(self) -> str:
        """The page in a frame, for notebooks."""
        page = html.escape(document(self).html(), quote=True)
        return f'<iframe title="Comparison of runs" srcdoc="{page}" style="width:100%;height:45rem;border:0"></iframe>'

    def write(self, path: str | Path) -> Path:
        """Write the page.

        Raises:
            CannotWrite: The disk is full, the folder read-only, ...
        """
        return document(self).write(Path(path))

    def document(self) -> Document:
        """The page."""
        return document(self)
