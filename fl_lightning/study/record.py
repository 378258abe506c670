"""What is asked of a worker for a run, and what is recorded of its result."""

import json
import shlex

from fl_lightning.run.version import digest_of_sources
from fl_lightning.study.definition import Study
from fl_lightning.study.runs import StudyRun
from fl_lightning.study.schema import Wandb
from fl_lightning.study.store import Record

#: Metrics of the best round that are not about accuracy.
_LEFT_OUT = ("comm/", "num_", "seconds", "failed_round")


def task_arguments(study: Study, run: StudyRun, wandb: Wandb | None = None) -> tuple[str, ...]:
    """A run's arguments and its logger, which is not part of its key: W&B if the study, or the caller, asks for it."""
    wandb = wandb or study.wandb
    if wandb is None:
        return (*run.arguments, "--trainer.logger=false")
    logger = {
        "class_path": "fl_lightning.run.loggers.WandbLogger",
        "init_args": {
            **wandb.model_dump(),
            "name": f"{run.method} {run.case} {run.setting} {run.seed}",
            "group": f"{run.method} {run.case} {run.setting}",
            "tags": [study.name, run.purpose, run.method, run.case],
        },
    }
    return (*run.arguments, f"--trainer.logger={json.dumps(logger)}")


def kept_rounds(study: Study, run: StudyRun, result: Record) -> Record | None:
    """The metrics of every round that are kept; none of tuning."""
    return result.get("rounds") if study.history and run.purpose == "report" else None


def make_record(run: StudyRun, result: Record) -> Record:
    """The record of a run; that of a tuning run contains nothing about test examples.

    If a file of the user's own classes has changed since the run was made, nobody knows which of the two was computed
    with: its version is then one that no run has, so that it is stale.
    """
    error = result["error"]
    if not error and result["result"][result["monitor"]] is None:
        error = f"{result['monitor']} is not finite in any round"
    record: Record = {
        "key": run.key,
        "purpose": run.purpose,
        "method": run.method,
        "case": run.case,
        "seed": run.seed,
        "setting": run.setting,
        "error": error,
        "val": None,
        "monitor": result.get("monitor", ""),
        "mode": result.get("mode", ""),
        "seconds": result.get("seconds", 0.0),
        "cpu_seconds": result.get("cpu_seconds", 0.0),
        "partition": result.get("partition", ""),
        "version": run.version if run.own_files_now is not None else f"{run.version}, changed since it began",
        "sources": digest_of_sources(),
        "command": shlex.join(["fl-train", *run.arguments]),
    }
    if result.get("killed"):
        record["killed"] = True
    for name in ("warnings", "marks", "near", "resumed"):
        if name in result and (result[name] or name == "marks"):
            record[name] = result[name]
    if record["error"]:
        return record
    record["val"] = result["result"][result["monitor"]]
    if run.purpose == "report":
        metrics = {name: value for name, value in result["result"].items() if not name.startswith(_LEFT_OUT)}
        selected = ("kinds", "clients", "malicious", "num_rounds", "bytes", "training_seconds", "failures")
        record |= {"result": metrics, **{name: result[name] for name in selected}}
    return record
