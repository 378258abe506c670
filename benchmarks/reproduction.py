"""Which tables and figures of the four papers are reproduced: the tables of docs/results/reproduction.md.

    .venv/bin/python benchmarks/reproduction.py

``reproduction.csv`` lists what the papers print. Where it names a study, a method and a case, our result is the mean of
the committed runs in studies/results, and the verdict follows from it: *reproduced* if it is no more than a standard
deviation over seeds, or one percent of the printed number, worse than what is printed; else *not reproduced*, as if
all runs fail; *not run* without runs. All other verdicts stand in the list, with the file that shows it. Writes
benchmarks/results/reproduction.md.
"""

import csv
import statistics
from pathlib import Path

from fl_lightning.direction import direction_of
from fl_lightning.study.store import Store

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_name("reproduction.csv")
PAGE = LIST.parent / "results" / "reproduction.md"
VERDICTS = ("reproduced", "level", "not reproduced", "not run", "impossible from the text")


def entries() -> list[dict[str, str]]:
    """What the papers print, one entry each."""
    with LIST.open(newline="") as file:
        return list(csv.DictReader(file))


def results(study: str, method: str, case: str, metric: str) -> tuple[list[float], int]:
    """The metric of each reported seed, in the unit that is printed, and how many seeds failed."""
    factor = 100 if metric.endswith("acc") else 1000
    records = Store(ROOT / "studies" / "results" / study).records().values()
    those = [each for each in records if (each["method"], each["case"], each["purpose"]) == (method, case, "report")]
    values = [factor * each["result"][metric] for each in those if metric in (each.get("result") or {})]
    return values, sum(bool(each["error"]) for each in those)


def verdict(metric: str, printed: float, ours: list[float], failed: int = 0) -> str:
    """Whether a printed number is reproduced.

    Example:
        >>> verdict("test/acc", 83.0, [82.0, 84.0]), verdict("test/acc", 83.0, [80.0, 80.4])
        ('reproduced', 'not reproduced')
        >>> verdict("test/mse", 2.6, [])
        'not run'
        >>> verdict("test/acc", 83.0, [], failed=5)
        'not reproduced'
    """
    if not ours:
        return "not reproduced" if failed else "not run"
    spread = statistics.stdev(ours) if len(ours) > 1 else 0.0
    sign = 1 if direction_of(metric) == "min" else -1
    worse = sign * (statistics.mean(ours) - printed)
    return "reproduced" if worse <= max(spread, 0.01 * printed) else "not reproduced"


def judged(entry: dict[str, str]) -> tuple[str, str]:
    """Our result, empty without runs, and the verdict."""
    found, ours = entry["verdict"], ""
    if entry["study"]:
        values, failed = results(entry["study"], entry["method"], entry["case"], entry["metric"])
        found = found or verdict(entry["metric"], float(entry["printed"]), values, failed)
        if values:
            spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
            ours = f"{statistics.mean(values):.1f}{spread}"
    if found not in VERDICTS:
        raise ValueError(f"{LIST}: {found!r} is no verdict: give one of {', '.join(VERDICTS)}")
    return ours, found


def text() -> str:
    """A table of the verdicts, and one of each paper."""
    papers: dict[str, list[dict[str, str]]] = {}
    for entry in entries():
        papers.setdefault(entry["paper"], []).append(entry)
    lines, counts = [], [f"| paper | {' | '.join(VERDICTS)} |", f"|---|{'---|' * len(VERDICTS)}"]
    for paper, of_paper in papers.items():
        lines += ["", f"**{paper}**", "", "| item | what | printed | ours | verdict | reason, or where |"]
        lines += ["|---|---|---|---|---|---|"]
        verdicts = []
        for entry in of_paper:
            ours, found = judged(entry)
            reason = entry["reason"] or f"studies/{entry['study']}.yaml"
            lines.append(f"| {' | '.join((entry['item'], entry['case'], entry['printed'], ours, found, reason))} |")
            verdicts.append(found)
        counts.append(f"| {paper} | {' | '.join(str(verdicts.count(each)) for each in VERDICTS)} |")
    return "\n".join([*counts, *lines, ""])


if __name__ == "__main__":
    PAGE.write_text(text())
