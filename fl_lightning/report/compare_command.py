"""Runs side by side, in the terminal and on a page: ``fl-train compare RUN RUN...``."""

import argparse
from collections.abc import Sequence

import fl_lightning.report
from fl_lightning.arguments import mistake


def main(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code, 2 for a mistake of the user's."""
    parser = argparse.ArgumentParser(
        prog="fl-train compare",
        allow_abbrev=False,
        description="Set runs side by side: what differs in their settings, how they learn, paired differences.",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="folder of a run, of several runs, a pattern of folders, or wandb:entity/project/run",
    )
    parser.add_argument("--reference", metavar="LABEL", help="the configuration to compare with; the first by default")
    parser.add_argument("--output", default="comparison.html", metavar="FILE", help="the page (default: %(default)s)")
    given = parser.parse_args(arguments)
    from rich.console import Console

    from fl_lightning.terminal import plain_text

    try:
        comparison = fl_lightning.report.compare(given.runs, reference=given.reference)
        page = comparison.write(given.output)
    except (ValueError, OSError) as error:
        return mistake("compare", error)
    console = Console()
    console.print(comparison)
    console.print(plain_text(page), soft_wrap=True)
    return 0
