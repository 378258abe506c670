"""Counts what a campaign tried and what survived."""

import json
import os
from collections import Counter
from pathlib import Path

#: Root of every draw of the campaign.
SEED = int(os.environ.get("FL_CAMPAIGN_SEED", "0"))
#: Where the counts of all sessions are added up; none are kept without it.
VARIABLE = "FL_CAMPAIGN_RECORD"


class Record:
    """Trials by kind, and how many of them ended as they must."""

    def __init__(self) -> None:
        self.tried: Counter[str] = Counter()
        self.survived: Counter[str] = Counter()

    def count(self, kind: str, *, survived: bool) -> None:
        """One more trial."""
        self.tried[kind] += 1
        self.survived[kind] += survived

    def write(self) -> None:
        """Add a line to the record's file for each kind."""
        if path := os.environ.get(VARIABLE):
            with Path(path).open("a") as file:
                for kind, tried in self.tried.items():
                    file.write(json.dumps({"kind": kind, "tried": tried, "survived": self.survived[kind]}) + "\n")
