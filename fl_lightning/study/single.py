"""Single runs: a sweep for W&B agents, one of its runs, and a check that metrics are reproduced."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from fl_lightning.counts import count
from fl_lightning.run.interruption import uninterrupted
from fl_lightning.run.version import digest_of_sources, sources
from fl_lightning.study.definition import Study
from fl_lightning.study.leases import Leases
from fl_lightning.study.pool import Pool
from fl_lightning.study.record import kept_rounds, make_record, task_arguments
from fl_lightning.study.runner import Runner
from fl_lightning.study.runs import StudyRun, as_read
from fl_lightning.study.schema import Wandb, WrongStudy
from fl_lightning.study.store import Record, Store
from fl_lightning.yaml_input import dump_yaml


def sweep(study: Study, store: Store, results: str | None = None) -> str | None:
    """A W&B sweep, as YAML, over the runs that can be trained now: those of the tuning, then the reported ones.

    Args:
        study: The study.
        store: Where its records are.
        results: The folder of results that the agents are told; None for the study's own.

    Returns:
        The text; None without such runs.
    """
    runs = list(Runner(study, store).todo(ready=True))
    if not runs:
        return None
    elsewhere = ["--results", results] if results else []
    return dump_yaml(
        {
            "name": study.title,
            "program": "fl-train",
            "method": "grid",
            "command": ["fl-train", "study", "train", str(study.path), *elsewhere, "${args}"],
            "parameters": {"run": {"values": [run.key for run in runs]}},
        },
        sort_keys=False,
    )


def train_run(study: Study, store: Store, key: str, scratch: Path) -> Record | None:
    """Train a run in this process, send it to W&B and store it; this process has its lease meanwhile.

    Returns:
        Its record; None if no run that can be trained has the key.

    Raises:
        WrongStudy: Another process trains it, or a signal ended it; nothing is stored, and it is still to do.
    """
    runner = Runner(study, store)
    run = next((run for run in runner.todo(ready=True) if run.key == key), None)
    if run is None:
        return None
    with runner.leases:
        if runner.leases.claim(run.key, store.partial_state(run)) is None:
            raise WrongStudy(f"{run.title}: another process trains it")
        runner.read_others()  # maybe it was done just now
        if run.key not in {each.key for each in runner.todo(ready=True)}:
            return None
        return _train(study, store, run, scratch, runner.leases)


def _train(study: Study, store: Store, run: StudyRun, scratch: Path, leases: Leases) -> Record:
    from fl_lightning.study.worker import train

    store.keep_sources(digest_of_sources(), sources())
    folder = store.files({"method": run.method, "case": run.case, "seed": run.seed})
    keep = study.keep if run.purpose == "report" else ()
    arguments = as_read(task_arguments(study, run, study.wandb or Wandb()), scratch)
    partial = store.partial_state(run)
    result = train(arguments, scratch, study.history, keep, folder, None, partial)
    if result.get("interrupted"):
        raise WrongStudy(f"{run.title}: {result['error']}; nothing was recorded, and it goes on if it is begun again")
    record = make_record(run, result)
    with uninterrupted(), leases.held(run.key) as is_mine:
        if not is_mine:
            raise WrongStudy(f"{run.title} was taken over by another process, since this one showed no sign of life")
        store.keep_own_sources(run)
        store.add(record, kept_rounds(study, run, result))
        store.forget_partial(run)
    return record


def check(
    study: Study, store: Store, pool: Pool, say: Callable[[str], None], methods: Collection[str] = ()
) -> list[StudyRun]:
    """Train one reported run of every method (or of some) again, the cheapest one, and compare it with its record.

    Returns:
        Those that were not reproduced.
    """
    runs = _cheapest(Runner(study, store, methods=methods))
    changed = []
    tasks = [(run, "train", ((*run.arguments, "--trainer.logger=false"), pool.scratch)) for run in runs]
    for run, result in pool.map(tasks):
        summary = _difference(store.records()[run.key], None if result is None else make_record(run, result))
        changed += [run] if summary else []
        say(f"{run.title}: {summary or 'reproduced'}")
    return changed


def _cheapest(runner: Runner) -> list[StudyRun]:
    result: dict[str, tuple[float, StudyRun]] = {}
    for method, case in runner.groups:
        for run in runner.progress.report(method, case):
            record = runner.progress.records.get(run.key)
            if record is None or record["error"]:
                continue
            seconds: float = record["seconds"]
            if method not in result or seconds < result[method][0]:
                result[method] = seconds, run
    return [run for _, run in result.values()]


def _difference(then: Record, now: Record | None) -> str:
    if now is None or now["error"]:
        return f"it fails now ({'its worker died' if now is None else now['error']})"
    metrics: dict[str, Any] = then["result"]
    changed = [name for name, value in metrics.items() if now["result"].get(name) != value]
    shown = ", ".join(f"{name} {metrics[name]} then, {now['result'].get(name)} now" for name in changed[:3])
    return f"{count(len(changed), 'metric')} changed: {shown}" if changed else ""
