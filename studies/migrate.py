"""Keep the results of studies where nothing but names has changed: of settings, classes, methods, cases or studies.

    python studies/migrate.py --since 78c8e8d
    python studies/migrate.py --since 78c8e8d --method "FedSheafHN=SheafHN" --method "similar:Kin, old=Kin, new"
    python studies/migrate.py --since 78c8e8d --study similar=similar_clients similar_clients ten_seeds
    python studies/migrate.py @studies/names/local_aux.txt convergence_a

A run's key is a digest of its settings, so that another name gives another key to the same numbers. This lists all runs
that the studies and configurations of a commit stand for (with the code of that commit), and those of today, pairs them
by study, method, case, purpose, seed and the values of the grid, and writes today's keys, commands and labels into the
results of these studies, or of all. Where a record would be lost or two would become one, it writes nothing and says
so; what was done before is not done again. Nothing is trained, and nothing here can tell whether the numbers are still
the same: `fl-train study check` can.

A file with an argument a line may stand for arguments (``@FILE``): those in ``studies/names`` are what was renamed, for
results that are brought in later under the names of before.

A method's grid is drawn by its name: a study that renames one gives it `drawn_as: <old name>`.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fl_lightning.study.definition import Point, Study
from fl_lightning.study.progress import Progress
from fl_lightning.study.runs import StudyRun, make_run
from fl_lightning.study.schema import WrongStudy
from fl_lightning.study.store import Record, Store
from fl_lightning.study.table import tidy, write_csv

#: How many values past either end of a grid's axis are thought of.
_BEYOND = 8


class Run(NamedTuple):
    """A run by its labels, and what is written into its record.

    Attributes:
        study: Name of the study.
        method: Name of the method.
        case: Name of the case.
        purpose: ``tuning`` or ``report``.
        seed: Its seed.
        setting: Labels of the grid, such as ``decay=none, lr=0.01``.
        key: Digest of its settings.
        command: That trains it.
    """

    study: str
    method: str
    case: str
    purpose: str
    seed: int
    setting: str
    key: str
    command: str

    @property
    def values(self) -> tuple[str, ...]:
        """Values of the grid without the names of its axes."""
        return tuple(part.rpartition("=")[2] for part in self.setting.split(", "))


class WrongMigration(Exception):
    """Names that do not lead from each old run to one new run."""


# ---------------------------------------------------------------- all runs of a tree


def runs_of(path: Path) -> list[Run]:
    """All runs that a study can stand for, whichever settings are chosen."""
    study = Study(path)
    source = study.other or study
    pairs = [(method, case) for method in study.methods for case in study.cases_of(method)]
    result: list[StudyRun] = []
    for method, case in [] if study.other else dict.fromkeys(study.tuned_on(*pair) for pair in pairs):
        for point in _points(study, method, case):
            result += [make_run(study, method, case, seed, point, "tuning") for seed in study.tuning.seeds]
    for method, case in pairs:
        for point in _points(source, *study.tuned_on(method, case)) or [("", {})]:
            result += [make_run(study, method, case, seed, point, "report") for seed in study.seeds]
    return [
        Run(
            study=study.name,
            method=run.method,
            case=run.case,
            purpose=run.purpose,
            seed=run.seed,
            setting=run.setting,
            key=run.key,
            command=shlex.join(["fl-train", *run.arguments]),
        )
        for run in result
    ]


def _points(study: Study, method: str, case: str) -> list[Point]:
    """The grid, and what is some steps past its ends."""
    result = {point[0]: point for point in study.grid_of(method, case)}
    last = list(result.values())
    for _ in range(_BEYOND if study.tuning.beyond else 0):
        further = {point[0]: point for each in last for point in study.beyond(method, case, each)}
        last = [point for label, point in further.items() if label not in result]
        result |= further
    return list(result.values())


def old_runs(commit: str) -> list[Run]:
    """All runs of a commit's studies, listed by its own code."""
    with tempfile.TemporaryDirectory(prefix="fl-migrate-") as folder:
        archive = subprocess.run(
            ["git", "archive", commit, "--", ".", ":(exclude)studies/results"], stdout=subprocess.PIPE, check=True
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        own = Path(folder, "studies", "migrate.py")
        script = own if own.exists() else Path(__file__).resolve()
        listed = subprocess.run(
            [sys.executable, str(script), "--list"],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": folder},
            stdout=subprocess.PIPE,
            check=True,
        )
    return [Run(*row) for row in json.loads(listed.stdout)]


# ---------------------------------------------------------------- pairs of old and new runs


def _rule(text: str) -> tuple[tuple[str, str], str]:
    """``STUDY:OLD=NEW``; the study may be missing."""
    old, _, new = text.rpartition("=")
    study, _, name = old.rpartition(":")
    if not (name and new):
        raise WrongMigration(f"{text!r} is no renaming: give OLD=NEW, or STUDY:OLD=NEW with the study's old name")
    return (study, name), new


class Names:
    """What was renamed: ``OLD=NEW`` in all studies, ``STUDY:OLD=NEW`` in one.

    Args:
        studies: Files' stems.
        methods: Methods.
        cases: Cases.
    """

    def __init__(self, studies: Sequence[str] = (), methods: Sequence[str] = (), cases: Sequence[str] = ()) -> None:
        self._rules = [dict(map(_rule, texts)) for texts in (studies, methods, cases)]
        self._unused = [set(rules) for rules in self._rules]

    def place(self, run: Run) -> tuple[object, ...]:
        """What an old run has in common with its new one."""
        method, case = self._new(1, run.study, run.method), self._new(2, run.study, run.case)
        return self.study(run.study), method, case, run.purpose, run.seed, run.values

    def study(self, old: str) -> str:
        """Today's name of a study."""
        return self._new(0, "", old)

    def _new(self, kind: int, study: str, old: str) -> str:
        for index in ((study, old), ("", old)):
            if index in self._rules[kind]:
                self._unused[kind].discard(index)
                return self._rules[kind][index]
        return old

    def check(self) -> None:
        """Raise WrongMigration for a name that no old run had."""
        if unused := [name for rules in self._unused for _, name in sorted(rules)]:
            raise WrongMigration(f"no run of that commit is named {unused[0]!r}")


Pairs = dict[str, tuple[Run, Run]]


def pairs(old: Sequence[Run], new: Sequence[Run], names: Names, records: dict[str, Record]) -> Pairs:
    """The old and the new run of each record of a study, by its old key.

    Raises:
        WrongMigration: A record would be lost, or two would become one.
    """
    at: dict[tuple[object, ...], Run] = {}
    for run in new:
        if at.setdefault((run.study, run.method, run.case, run.purpose, run.seed, run.values), run) != run:
            raise WrongMigration(f"{run.method} on {run.case} has two settings with the values {run.setting}")
    alike: dict[str, list[tuple[Run, Run | None]]] = defaultdict(list)
    for run in old:
        alike[run.key].append((run, at.get(names.place(run))))
    result: Pairs = {}
    taken: dict[str, str] = {}
    for key, record in records.items():
        both = [(run, then) for run, then in alike.get(key, ()) if then is not None]
        if not both and key not in alike:
            continue
        title = f"{record['method']} on {record['case']}, seed {record['seed']}, {record['setting'] or 'untuned'}"
        if not both:
            raise WrongMigration(f"{title} ({key}) has no run in today's studies: say what was renamed")
        if len(keys := {then.key for _, then in both}) > 1:
            raise WrongMigration(f"{title} ({key}) would be {len(keys)} runs: {', '.join(sorted(keys))}")
        # runs that are the same share a record, under the name of the first that was trained
        name = (record["method"], record["case"])
        named = [(run, then) for run, then in both if name in ((run.method, run.case), (then.method, then.case))]
        result[key] = (named or both)[0]
        new_key = result[key][1].key
        if taken.setdefault(new_key, key) != key or (new_key != key and new_key in records):
            raise WrongMigration(f"{title} ({key}) would have the key of another record, {new_key}")
    return result


# ---------------------------------------------------------------- the results


def write(folder: Path, result: Pairs) -> tuple[int, int]:
    """Write new keys, commands and labels; returns how many records got a new key, and how many another label."""
    new_keys, new_labels = set[str](), set[str]()
    store, moved = Store(folder), dict[Path, Path]()

    def change(record: Record) -> Record | None:
        old, run = result.get(record["key"], (None, None))
        if old is None or run is None or old[1:] == run[1:]:
            return None
        changed = record | {"key": run.key}
        if "command" in record:
            changed |= {"method": run.method, "case": run.case, "setting": run.setting, "command": run.command}
            moved[store.files(record)] = store.files(changed)
            if run.key != record["key"]:
                new_keys.add(run.key)
            elif changed != record:
                new_labels.add(run.key)
        return None if changed == record else changed

    store.rewrite(change)
    for before, now in moved.items():
        if before != now and before.exists():
            now.parent.mkdir(parents=True, exist_ok=True)
            before.rename(now)
    return len(new_keys), len(new_labels)


def migrate(commit: str, names: Names, studies: Sequence[str] = ()) -> list[str]:
    """Bring the results of studies to today's names; returns a line for each that has results.

    Args:
        commit: From which the results are.
        names: What was renamed beside configurations and settings.
        studies: Today's names of the studies; all if empty.

    Raises:
        WrongMigration: Names that do not lead from each record to one run; nothing is written then.
    """
    paths = {path.stem: path for path in sorted(Path("studies").glob("*.yaml")) if not studies or path.stem in studies}
    if missing := sorted(set(studies) - set(paths)):
        raise WrongMigration(f"studies/{missing[0]}.yaml is no file")
    old: dict[str, list[Run]] = defaultdict(list)
    for run in old_runs(commit):
        names.place(run)  # a name counts as known wherever a study has it
        old[run.study].append(run)
    plan: list[tuple[Study, Path, Pairs, int]] = []
    for name, runs in old.items():
        study_name = names.study(name)
        before = Path("studies", "results", name)
        if study_name not in paths:
            if not studies and before.exists():
                raise WrongMigration(f"{before} has results, but studies/{study_name}.yaml is no file: give --study")
            continue
        study = Study(paths[study_name])
        folder = before if before.exists() else study.results
        store = Store(folder)
        records = store.records()
        new = runs_of(study.path)
        result = pairs(runs, new, names, records)
        if records and not result and not {run.key for run in new} & set(records):
            raise WrongMigration(f"no record in {folder} is of a run that {name}.yaml of {commit} stands for")
        plan.append((study, folder, result, len(records)))
    names.check()
    lines, changed = [], []
    for study, folder, result, count in plan:
        if folder != study.results:
            shutil.move(folder, study.results)
        new_keys, new_labels = write(study.results, result)
        changed += [study] if new_keys or new_labels else []
        lines.append(f"{study.name}: {count} records, {new_keys} have new keys, {new_labels} new labels alone")
    for study in changed:  # once all are written, for one study takes the choices of another
        if len(table := tidy(Progress(study, Store(study.results)))):
            write_csv(table, study.results / "results.csv")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, fromfile_prefix_chars="@"
    )
    parser.add_argument(
        "studies", nargs="*", metavar="STUDY", help="today's names of the studies; all if none is given"
    )
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--since", metavar="COMMIT", help="the last commit with the names that the results have")
    action.add_argument("--list", action="store_true", help="print all runs of the studies here as JSON")
    for kind in ("study", "method", "case"):
        help_ = f"a renamed {kind}; may be given many times"
        parser.add_argument(f"--{kind}", metavar="[STUDY:]OLD=NEW", action="append", default=[], help=help_)
    options = parser.parse_args(arguments)
    if options.list:
        json.dump([run for path in sorted(Path("studies").glob("*.yaml")) for run in runs_of(path)], sys.stdout)
        return
    try:
        names = Names(options.study, options.method, options.case)
        for line in migrate(options.since, names, options.studies):
            sys.stdout.write(f"{line}\n")
    except (WrongMigration, WrongStudy) as error:
        sys.exit(f"migrate: {error}")


if __name__ == "__main__":
    main()
