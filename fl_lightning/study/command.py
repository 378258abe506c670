"""Studies of methods × cases × seeds: ``fl-train study run | status | table | report | check | sweep | train FILE``."""

import argparse
import math
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import pandas as pd
from rich.console import Console

from fl_lightning.arguments import fail, say
from fl_lightning.counts import count
from fl_lightning.extras import require
from fl_lightning.study.cluster import KINDS, Cluster
from fl_lightning.study.definition import Study
from fl_lightning.study.marks import legend, with_signs
from fl_lightning.study.messages import changed_own_files, changed_sources, damaged, warned
from fl_lightning.study.pool import Pool
from fl_lightning.study.progress import Progress
from fl_lightning.study.runner import Runner, duration
from fl_lightning.study.runs import StudyRun
from fl_lightning.study.schema import WrongStudy
from fl_lightning.study.single import check, sweep, train_run
from fl_lightning.study.store import Store
from fl_lightning.study.table import (
    for_terminal,
    leaderboard,
    markdown,
    metrics_in,
    on_current_data,
    tidy,
    what_it_lacks,
    what_was_run,
    write_csv,
)
from fl_lightning.terminal import PlainTable, plain_text

_DESCRIPTION = """Run methods × cases × seeds with equal tuning, in parallel; nothing is trained twice.

  fl-train study run studies/leaderboard_a.yaml       train the missing runs
  fl-train study report studies/leaderboard_a.yaml    write tables, tests and pictures

Let W&B agents execute the runs:

  fl-train study sweep studies/leaderboard_a.yaml > sweep.yaml && wandb sweep sweep.yaml
"""


class _Parser(argparse.ArgumentParser):
    """Takes whole names of options alone, and reports a mistake in one line."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str) -> NoReturn:
        fail(f"study: {message}")


def main(arguments: Sequence[str]) -> int:
    """Run a verb of ``fl-train study``; returns the exit code."""
    options = _parser().parse_args(list(arguments))
    try:
        study = Study(Path(options.file))
        if options.results:
            study.results = Path(options.results)
        for name, known in {"methods": list(study.methods), "cases": list(study.cases)}.items():
            if given := getattr(options, name, None):
                setattr(options, name, _selected(study, name, given, known))
        return int(options.verb(study, options))
    except BrokenPipeError:
        raise
    except (WrongStudy, OSError) as error:
        fail(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="fl-train study", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    common = _Parser(add_help=False)
    common.add_argument("file", metavar="FILE", help="the study's YAML file")
    common.add_argument("--results", help="folder of the results, instead of the study's own")

    run = verbs.add_parser("run", parents=[common], help="train the missing runs")
    run.add_argument("--processes", type=_count, help="worker processes, instead of the study's number")
    run.add_argument("--methods", nargs="+", help="only these; patterns such as 'Cora*' are allowed")
    run.add_argument("--cases", nargs="+", help="only these; patterns such as 'Cora*' are allowed")
    run.add_argument("--minutes", type=_time, help="start no run after this many minutes")
    run.add_argument("--retry", action="store_true", help="retry failed runs")
    run.add_argument(
        "--state_seconds", type=_time, default=60.0, help="how often, at most, a run's state is written (60)"
    )
    run.add_argument("--workers", choices=KINDS, help="where worker processes run, if not in this process's machine")
    run.add_argument("--nodes", type=_count, default=1, help="how many jobs are submitted with --workers")
    run.add_argument("--hours", type=float, default=24.0, help="time limit of a job; it is queued again")
    run.add_argument("--slurm", nargs="+", type=_pair, default=[], metavar="NAME=VALUE", help="options of sbatch")
    run.set_defaults(verb=_run)

    status = verbs.add_parser("status", parents=[common], help="what is done, failed, stale, missing")
    status.set_defaults(verb=_status)

    table = verbs.add_parser("table", parents=[common], help="the leaderboard")
    table.add_argument("--metric", default="test", help="metric of results.csv to show (test)")
    form = table.add_mutually_exclusive_group()
    form.add_argument("--markdown", action="store_true", help="as Markdown")
    form.add_argument("--latex", action="store_true", help="as a tabular of LaTeX, the best of each case in bold")
    table.set_defaults(verb=_table)

    checked = verbs.add_parser("check", parents=[common], help="train one run of every method again and compare")
    checked.add_argument("--processes", type=_count, help="worker processes, instead of the study's number")
    checked.add_argument("--methods", nargs="+", help="only these; patterns such as 'Cora*' are allowed")
    checked.set_defaults(verb=_check)

    swept = verbs.add_parser("sweep", parents=[common], help="print a W&B sweep over the runs that can be trained now")
    swept.set_defaults(verb=_sweep)

    train = verbs.add_parser("train", parents=[common], help="train one run and send it to W&B, as a W&B agent does")
    train.add_argument("--run", required=True, help="its key in the sweep")
    train.set_defaults(verb=_train)

    sealed = verbs.add_parser("seal", parents=[common], help="accept result lines that have no checksum")
    sealed.set_defaults(verb=_seal)

    report = verbs.add_parser("report", parents=[common], help="write report.md and its pictures beside the results")
    report.set_defaults(verb=_report)
    return parser


def _selected(study: Study, name: str, given: Sequence[str], known: Sequence[str]) -> list[str]:
    """The methods or cases that are meant: names, or patterns as a study's file has them."""
    for each in given:
        if each not in known and not any(fnmatch(one, each) for one in known):
            fail(f"--{name} {each!r} is not in {study.path}: there are {', '.join(known)}")
    return [one for one in known if one in given or any(fnmatch(one, each) for each in given)]


def _count(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes: give at least 1")
    return int(text)


def _time(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time: give a number of at least 0")
    return value


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not an option of sbatch: give NAME=VALUE, such as partition=gpu")
    return name, value


# ---------------------------------------------------------------- the verbs


def _run(study: Study, options: argparse.Namespace) -> int:
    study.processes = options.processes or study.processes
    given = {
        "methods": options.methods or (),
        "cases": options.cases or (),
        "retry": options.retry,
        "minutes": options.minutes,
        "state_seconds": options.state_seconds,
    }
    cluster = _cluster(options)
    runner = Runner(study, Store(study.results), say=say, **given)
    signal.signal(signal.SIGTERM, _stop)
    try:
        with Pool(study.processes) as pool:
            runner.prepare(pool)
            if cluster is None:
                tally = runner.work(pool)
        if cluster is not None:
            tally = cluster.run(runner, study.processes, given)
    except KeyboardInterrupt:
        _write(study)
        fail("stopped; the same command resumes it", code=130)
    _write(study)
    for title, error in tally.failed.items():
        say(f"failed: {title}: {error}")
    for name in tally.waiting:
        say(f"no setting could be chosen for {name}")
    before = f" ({tally.failed_before} failed before: --retry)" if tally.failed_before else ""
    say(
        f"{count(tally.trained, 'run')} trained, {len(tally.failed)} failed{before}, {tally.missing} missing: "
        f"{study.results}"
    )
    has_lost_jobs = cluster is not None and tally.missing and options.minutes is None
    return 1 if tally.failed or has_lost_jobs else 0


def _cluster(options: argparse.Namespace) -> Cluster | None:
    if options.workers is None:
        for name, default in {"nodes": 1, "hours": 24.0, "slurm": []}.items():
            if getattr(options, name) != default:
                fail(f"study: --{name} needs --workers: give one of {', '.join(KINDS)}")
        return None
    if not 0 < options.hours < math.inf:
        fail(f"study: --hours {options.hours} is no time limit: give a positive number")
    return Cluster(kind=options.workers, nodes=options.nodes, hours=options.hours, slurm=dict(options.slurm))


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _write(study: Study) -> pd.DataFrame:
    store = Store(study.results)
    table = tidy(Progress(study, store))
    for sentence in damaged(study, store):
        say(sentence)
    if len(table):
        write_csv(table, study.results / "results.csv")
    return table


def _status(study: Study, options: argparse.Namespace) -> int:
    store = Store(study.results)
    progress = Progress(study, store)
    shown = PlainTable("method", "done", "failed", "stale", "missing", "of", title=f"{study.title} ({study.results})")
    runner = Runner(study, store, say=say)
    present: list[StudyRun] = []
    for method in study.methods:
        counts: Counter[str] = Counter()
        total = 0
        seen: set[str] = set()
        for case in study.cases_of(method):
            tuning, report = progress.tuning(method, case), progress.report(method, case)
            runs = [run for run in (*tuning, *report) if run.key not in seen]
            seen |= {run.key for run in runs}
            counts.update(progress.state(run) for run in runs)
            present += [run for run in runs if run.key in progress.records]
            counts["missing"] += 0 if report else len(study.seeds)
            total += len(runs) + (0 if report else len(study.seeds))
        shown.add_row(
            method, *(str(counts[state] or "") for state in ("done", "failed", "stale", "missing")), str(total)
        )
    Console().print(shown)
    left = list(runner.todo())
    seconds = runner.estimate(left) / study.processes
    say(
        f"{count(len(left), 'run')} to do"
        + (f", about {duration(seconds)} with {count(study.processes, 'worker')}" if seconds else "")
    )
    for sentence in (*changed_sources(progress), *changed_own_files(progress, present), *damaged(study, store)):
        say(sentence)
    records = [progress.records[run.key] for run in present]
    for record in records:
        if record["error"]:
            say(f"failed: {record['method']} on {record['case']}, seed {record['seed']}: {record['error']}")
    for sentence in warned(message for record in records for message in record.get("warnings", ())):
        say(sentence)
    return 0


def _check(study: Study, options: argparse.Namespace) -> int:
    with Pool(options.processes or study.processes) as pool:
        changed = check(study, Store(study.results), pool, say, options.methods or ())
    progress = Progress(study, Store(study.results))
    stale = [run.method for run in changed if progress.state(run) == "stale"]
    others = [run.method for run in changed if run.method not in stale]
    if stale:
        say(f"stale: {', '.join(stale)}; fl-train study run {study.path} trains what is stale again")
    if others:
        say(
            f"not reproduced, although nothing that makes a run stale has changed: {', '.join(others)}. If code of "
            "fl_lightning was edited, raise MATHEMATICS in fl_lightning/run/version.py; otherwise look for another "
            "machine, or for a file that code of your own reads"
        )
    return 1 if changed else 0


def _sweep(study: Study, options: argparse.Namespace) -> int:
    if (text := sweep(study, Store(study.results), options.results)) is None:
        sys.stderr.write(f"{study.path}: no run is left that can be trained now\n")
        return 0
    sys.stdout.write(text)
    return 0


def _train(study: Study, options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="fl-study-") as scratch:
        record = train_run(study, Store(study.results), options.run, Path(scratch))
    if record is None:
        fail(f"--run {options.run} is not to do in {study.path}: take one of fl-train study sweep {study.path}")
    if record["error"]:
        fail(record["error"], code=1)
    say(f"{record['method']} on {record['case']}, seed {record['seed']}: {record['monitor']} {record['val']:.4g}")
    return 0


def _seal(study: Study, options: argparse.Namespace) -> int:
    say(f"{count(Store(study.results).seal(), 'new checksum')} in {study.results / 'checksums.txt'}")
    return 0


def _check_results(study: Study, table: pd.DataFrame) -> None:
    """Refuse a table without any result."""
    if not len(table):
        fail(f"{study.results} has no reported runs yet: fl-train study run {study.path}")
    if "test" not in table:
        fail(f"all reported runs in {study.results} have failed so far: fl-train study status {study.path} says why")


def _report(study: Study, options: argparse.Namespace) -> int:
    require("study", "fl-train study report")
    from fl_lightning.study.report import write_report

    table = _write(study)
    _check_results(study, table)
    say(str(write_report(Progress(study, Store(study.results)), table)))
    return 0


def _table(study: Study, options: argparse.Namespace) -> int:
    progress = Progress(study, Store(study.results))
    everything = tidy(progress)
    _check_results(study, everything)
    lacking, table = list(what_it_lacks(everything)), on_current_data(everything)
    if options.metric == "test" and not table["test"].notna().any():
        fail(f"{' '.join(lacking)} fl-train study table {study.path} --metric val shows the validation")
    if options.metric not in (known := metrics_in(table)):
        fail(f"--metric {options.metric!r} is not a metric of the results: there are {', '.join(known)}")
    shown, not_run = what_was_run(leaderboard(progress, table, options.metric))
    if options.latex:
        from fl_lightning.study.latex import latex

        num_seeds = len(study.seeds)
        say(latex(shown, table, options.metric, ceilings=progress.ceilings, num_seeds=num_seeds))
        for sentence in lacking:
            say(f"% {sentence}")
        return 0
    console = Console()
    plain = not options.markdown and not console.encoding.lower().startswith("utf")
    shown = with_signs(shown, table, plain=plain)
    if options.metric == "test" and progress.ceilings:
        from fl_lightning.study.room import with_shares

        shown = with_shares(shown, table, progress.ceilings)
    if options.markdown:
        say("\n\n".join(filter(None, (markdown(shown, "method"), legend(table), *lacking))))
        return 0
    for part in for_terminal(shown, "method", title=study.title, width=console.width):
        console.print(part)
    if meaning := legend(table, plain=plain):
        console.print(plain_text(meaning))
    if not_run:
        say(f"nothing was run yet of {'; '.join(not_run)}")
    for sentence in lacking:
        say(sentence)
    return 0
