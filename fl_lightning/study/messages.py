"""What a study tells of its records: warnings of runs, files that have changed since, damaged lines."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator

from fl_lightning.counts import count
from fl_lightning.run.version import digest_of_sources, own_digest, sources
from fl_lightning.study.definition import Study
from fl_lightning.study.progress import Progress
from fl_lightning.study.runs import StudyRun
from fl_lightning.study.store import Store

#: The most frequent warnings are told, and the first files and lines.
_MOST = 5


def warned(messages: Iterable[str]) -> Iterator[str]:
    """Each kind of warning once, whatever clients and numbers it names, in the words of its first."""
    groups: dict[str, list[str]] = {}
    for message in messages:
        groups.setdefault(re.sub(r"\d[\w.,-]*", "", message), []).append(message)
    for same in sorted(groups.values(), key=len, reverse=True)[:_MOST]:
        yield f"{count(len(same), 'run')} warned: {same[0]}"


def changed_sources(progress: Progress) -> Iterator[str]:
    """How many runs were computed before which files of this package changed, as far as they were recorded."""
    known, now = progress.store.known_sources(), sources()
    older, changed, unknown = 0, set[str](), 0
    for digest, number in Counter(record["sources"] for record in progress.records.values()).items():
        then = known.get(digest, now if digest == digest_of_sources() else None)
        if then is None:
            unknown += number
        elif differ := {name for name in {*then, *now} if then.get(name) != now.get(name)}:
            older, changed = older + number, changed | differ
    check = f"fl-train study check {progress.study.path} compares one of each method"
    if older:
        yield f"{count(older, 'run')} computed before these files changed: {_first(sorted(changed))}; {check}"
    if unknown:
        where = progress.store.sources
        yield f"{count(unknown, 'run')} computed by other files of this package, which {where} does not name; {check}"


def changed_own_files(progress: Progress, runs: Iterable[StudyRun]) -> Iterator[str]:
    """How many of some recorded runs were computed before which files of the user's own classes changed."""
    known, stale, changed = progress.store.known_sources(), 0, set[str]()
    for run in runs:
        record = progress.records[run.key]
        if run.own and record["version"] != run.version:
            then, now = known.get(own_digest(record["version"]), {}), progress.study.own_files(run.own)
            if differ := {name for name in {*then, *now} if then.get(name) != now.get(name)}:
                stale, changed = stale + 1, changed | differ
    if stale:
        yield (
            f"{count(stale, 'run')} stale, computed before these files of your own changed, or were recorded: "
            f"{_first(sorted(changed))}"
        )


def damaged(study: Study, store: Store) -> Iterator[str]:
    """Which lines of the records are damaged, and what to do."""
    if store.damaged:
        yield (
            f"ignored in {study.results}, because they are damaged: {_first(store.damaged)}; restore the files from a "
            f"copy, or let fl-train study run train these again (older lines without a checksum: fl-train study seal "
            f"{study.path})"
        )


def _first(names: list[str]) -> str:
    return ", ".join(names[:_MOST]) + (f" and {len(names) - _MOST} more" if len(names) > _MOST else "")
