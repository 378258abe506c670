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

What `make campaign` tried and what survived, written by `tests/campaign/report.py`. By kind, a trial survives if:

- **wrong command lines and files**: a small configuration with one to three wrong settings runs with the values as
  given, or ends with exit code 2 and one line that names a setting;
- **damaged files**: a file that is truncated, changed, empty or binary is refused in one line; text that is still a
  configuration does what it says; instead of a damaged `last.ckpt` an intact checkpoint beside it is used, with a
  warning. Raw data files have no checksums: a value with a flipped bit is used as it is if it is valid. Converted
  files and partitions have checksums: they are refused or regenerated;
- **faulty clients**: with 4 of 10 clients that fail in this way, under both executors and every strategy, the run ends,
  names them, and the others' accuracy is within two points of the run in which the four never take part (mean of three
  seeds if one seed falls short). "Wrong parameters" are finite, an attack and not a failure: 2 of 10 clients, five
  points, with a coordinate-wise median if the strategy supports one; the median does not protect what is learned from
  client outputs;
- **random settings** of every strategy and of participation, on graphs and on examples: both executors give the same
  results, resuming is exact, and a checkpoint is evaluated as the fit reported; or the settings are refused before the
  first round;
- **random settings at sites**: clients that are reached through bytes, with messages that are lost and repeated, give
  bit for bit the metrics, server and states of a run in one process, also when resumed from a checkpoint elsewhere;
- **malicious sites**: a site whose updates are wrong in one of 90 ways, or that changes a field, a tensor or bytes at
  random, is the only one that is named; the run ends after its rounds with accuracies in [0, 1]. It counts as lost if
  the run ends early, another client is named, or a metric is not a share;
- **malicious servers**: a site responds to each message, and afterward responds to a correct one as it did before;
- **lists of unequal graphs**: classes are matched by name, and graphs that cannot form a federation are refused in one
  line;
- **sets of odd graphs**: clients with graphs without edges, of one node, without features or with unequal ones train on
  either executor to the same metrics, or what does not fit is said, with the client, the graph or the net;
- **sites that lie in secure sums**: whatever a site sends in any step of a sum, the run ends, and every metric of a
  round that counts is the honest clients' metric, or the round fails;
- **settings under secure sums**: the run gives the same results as without them, or is refused before training;
- **disks that are full**: the run ends with exit code 1 or 2 and a line that says so;
- **terminals that show ASCII alone**: the run completes, whatever letters its names have, or is refused in one line;
- **defaults of net, optimizer and metrics**: settings that are left out or random run, or are refused in one line;
- **damaged files of sites**: the site continues without the file, or asks for it to be restored; a state, an update or
  a key with a flipped bit that is used counts as lost (any 32 bytes are a key);
- **damaged results of studies**: what is read is what was written; a changed metric that is read counts as lost;
- **damaged runs in reports**: `report` and `compare` write their page, or end with exit code 2 and one line;
- **YAML texts**: whether nested, repeated, recursive or with long numbers, they are read or refused according to YAML;
- **graphs of all kinds**: features and labels arrive unchanged, without self-loops and duplicate edges, or the graph is
  refused with the file's name;
- **kills**: killed (SIGKILL) at a random moment and resumed with `--ckpt_path last`, a run ends bit-equal to one that
  was not killed: clients, strategy, generators, history, result and metrics.csv;
- **two processes**: if two runs start at the same time in one folder, each has its own; a run that is being written is
  not resumed.

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
