"""Regenerate the pages of runs from their folders: ``fl-train report RUN...``."""

import argparse
from collections.abc import Sequence

import fl_lightning.report
from fl_lightning.arguments import mistake, printable


def main(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code, 2 for a mistake of the user's."""
    parser = argparse.ArgumentParser(
        prog="fl-train report",
        allow_abbrev=False,
        description="Write the page of each run (report.html) from the files in its folder.",
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="folder of a run, of several runs, or a pattern of folders"
    )
    parser.add_argument("--against", metavar="RUN", help="compare each client with this run, of Local for example")
    given = parser.parse_args(arguments)
    try:
        for folder in fl_lightning.report.folders(given.runs):
            print(printable(str(fl_lightning.report.write(folder, against=given.against))))
    except (ValueError, OSError) as error:
        return mistake("report", error)
    return 0
