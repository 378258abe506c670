"""Counts what a campaign tried and what survived."""

import json
import os
from pathlib import Path

#: Root of every draw of the campaign.
SEED = int(os.environ.get("FL_CAMPAIGN_SEED", "0"))
#: Where the trials of all sessions are written down; none are without it.
VARIABLE = "FL_CAMPAIGN_RECORD"


class Record:
    """Trials by kind, and whether they ended as they must; a line each, so that a session that is cut off counts."""

    def count(self, kind: str, *, survived: bool) -> None:
        """One more trial."""
        if path := os.environ.get(VARIABLE):
            with Path(path).open("a") as file:
                file.write(json.dumps({"kind": kind, "tried": 1, "survived": int(survived)}) + "\n")
