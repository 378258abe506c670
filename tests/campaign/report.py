"""Writes what a campaign found: ``python report.py RECORD docs/reliability.md``."""

import importlib.metadata
import json
import platform
import sys
import time
from collections import Counter
from pathlib import Path

from fl_lightning.run.state import versions

_HEAD = """# Reliability

What `make campaign` tried and what survived, written by `tests/campaign/report.py`. What survives, by kind:

- **wrong command lines and files**: a small configuration with one to three wrong settings runs and took the value, or
  ends with exit code 2 and one line that names a setting;
- **damaged files**: cut, changed, empty or binary, they are refused in one line; text that is still a configuration
  does what it says; a damaged `last.ckpt` gives way to a sound checkpoint beside it, with a warning. Raw data files
  have no checksums: where a flipped bit is in a value, the value is taken as it stands if it can be one. Converted
  files and partitions have them: they are refused or made anew;
- **faulty clients**: with 4 of 10 clients that fail in this way, under both executors and every strategy, the run ends,
  names them, and the others' accuracy is within two points of the run in which the four never take part (mean of
  three seeds where one is short). "Wrong parameters" are finite, an attack and no failure: 2 of 10 clients, five
  points, with a coordinate-wise median where a strategy takes one, which does not protect what it learns from signals;
- **random settings** of every strategy and of who takes part, on graphs and on examples: both executors come to the
  same, a resume is exact, and a checkpoint scores as the fit reported; or they are refused before the first round;
- **random settings at sites**: clients that are reached through bytes, with messages that are lost and repeated,
  come bit for bit to the metrics, server and states of a run in one process, also from a checkpoint elsewhere;
- **hostile sites**: a site whose updates are wrong in one of 90 ways, or have a fact, a tensor or bytes changed at
  random, is the only one that is named; the run ends after its rounds with accuracies in [0, 1]. It counts as lost
  where the run ends early, another client is named, or a metric is no share;
- **hostile servers**: a site responds to each message, and then to a right one as it did before;
- **damaged files of sites**: the site goes on without the file, or says that it is to be brought back; a state, an
  update or a key with a flipped bit that is used counts as lost (any 32 bytes are a key);
- **damaged results of studies**: what is read is what was written; a changed metric that is read counts as lost;
- **damaged runs in reports**: `report` and `compare` write their page, or end with exit code 2 and one line;
- **YAML texts**: nested, repeated, recursive and of long numbers, they are read or refused as YAML;
- **graphs of all kinds**: features and labels come through as they are, without loops and double edges, or the graph
  is refused with the file's name;
- **lists of unequal graphs**: classes go by their names, and what cannot be one federation is refused with a line;
- **sites that lie in secure sums**: whatever a site says in any step of a sum, the run ends, and every metric of a
  round that counts is what the honest clients make it, or the round fails;
- **settings under secure sums**: the run comes to what it comes to without them, or is refused before training;
- **disks that are full**: the run ends with exit code 1 or 2 and a line that says so;
- **terminals that show ASCII alone**: the run comes to its end, whatever letters its names have, or is
  refused in one line;
- **defaults of net, optimizer and metrics**: what is left out or set at random runs, or is refused in one line;
- **kills**: killed (SIGKILL) at a random moment and resumed with `--ckpt_path last`, a run ends bit-equal to one that
  nobody killed: clients, strategy, generators, history, result and metrics.csv;
- **two processes**: begun at once in one folder, each run has its own; a run that is being written is not resumed.

A command that takes too long before it trains counts as lost.

Clients that hang do so under `participation.time_limit_seconds`, in the first two rounds or so, and raise an error in
the later ones, so that the campaign ends.

"""


def report(record: Path) -> str:
    """The document."""
    tried: Counter[str] = Counter()
    survived: Counter[str] = Counter()
    for line in record.read_text().splitlines():
        entry = json.loads(line)
        tried[entry["kind"]] += entry["tried"]
        survived[entry["kind"]] += entry["survived"]
    rows = [f"| {kind} | {tried[kind]} | {survived[kind]} | {tried[kind] - survived[kind]} |" for kind in sorted(tried)]
    rows.append(f"| **all** | {tried.total()} | {survived.total()} | {tried.total() - survived.total()} |")
    packages = {**versions(), "jsonargparse": importlib.metadata.version("jsonargparse")}
    made = ", ".join(
        [f"Python {platform.python_version()}", *(f"{name} {number}" for name, number in packages.items())]
    )
    table = "\n".join(["| kind | tried | survived | lost |", "|---|---|---|---|", *rows])
    return f"{_HEAD}{time.strftime('%Y-%m-%d')}; {made}; {platform.system()} {platform.machine()}, CPU.\n\n{table}\n"


if __name__ == "__main__":
    target = Path(sys.argv[2])
    target.parent.mkdir(exist_ok=True)
    target.write_text(report(Path(sys.argv[1])))
