"""The page of one run: its head, its foot and the order of its sections."""

from pathlib import Path

import numpy as np

from fl_lightning.counts import count
from fl_lightning.report.document import Document, Fact
from fl_lightning.report.folder import Recorded, telling
from fl_lightning.report.pictures import Album
from fl_lightning.report.sections import (
    clients,
    cost,
    diagnostics,
    embeddings,
    failures,
    graphs,
    learning,
    partition,
    predictions,
    result,
    settings,
)
from fl_lightning.report.verdict import verdict
from fl_lightning.report.wording import duration, number, size
from fl_lightning.run.curve import DIVERGED, STILL_RISING

_STATUS = {"finished": "good", "interrupted": "warn", "failed": "bad", "unknown": "warn"}


def write(run: Recorded, other: Recorded | None, path: Path) -> Path:
    """Write the page of a run, with another run (``Local``, for example) to compare each client with.

    Raises:
        ValueError: The other run is of another partition, or has no scores of single clients.
    """
    return document(run, other).write(path)


def document(run: Recorded, other: Recorded | None = None) -> Document:
    """The page of a run; the arguments are those of :func:`write`."""
    if other is not None:
        _check_partner(run, other)
    with telling(run.path):
        return _document(run, other)


def _document(run: Recorded, other: Recorded | None) -> Document:
    album = Album()
    sections = [
        result.section(run),
        learning.section(run, album),
        clients.section(run, other, album),
        failures.section(run, album),
        predictions.section(run, album),
        embeddings.section(run, album),
        partition.section(run, album),
        graphs.section(run, album),
        cost.section(run, album),
        diagnostics.section(run, album),
        settings.section(run),
    ]
    return Document(
        title=_title(run),
        subtitle=_subtitle(run),
        verdict=verdict(run),
        status=(run.status, _STATUS.get(run.status, "warn")),
        alerts=_alerts(run),
        facts=_facts(run),
        sections=[section for section in sections if section is not None],
        footer=_footer(run),
    )


def _check_partner(run: Recorded, other: Recorded) -> None:
    """Refuse runs whose clients are not the same."""
    for each in (run, other):
        if not each.client_values(each.client_metric):
            raise ValueError(f"{each.path} has no scores of single clients (report.json): train it with RunReport")
    assert run.record is not None
    assert other.record is not None
    if run.record.partition_hash != other.record.partition_hash:
        raise ValueError(
            f"{other.path} is of another partition than {run.path} (or another data set or split): compare runs with "
            "the same data settings and data.seed"
        )


def _title(run: Recorded) -> str:
    source = str(run.flat_settings.get("data.source", ""))
    name = str(run.flat_settings.get("data.source.name", ""))
    return " on ".join(part for part in (run.strategy or "A run", name or source.removesuffix("Source")) if part)


def _subtitle(run: Recorded) -> str:
    parts = [run.name]
    if run.record is not None:
        held_out = len(run.record.names) - len(run.record.training)
        parts.append(count(len(run.record.training), "client") + (f" and {held_out} held out" if held_out else ""))
    seed = run.result.get("seed", run.record.seed if run.record else None)
    return " · ".join([*parts, *([f"seed {seed}"] if seed is not None else [])])


def _alerts(run: Recorded) -> list[str]:
    result = []
    if run.status == "failed":
        result.append(f"The run failed: {run.result.get('error', '')}")
    if run.status == "interrupted":
        result.append("A signal ended the run before its last round; it can be continued with --ckpt_path last.")
    if run.status == "unknown":
        result.append("There is no result.json: the run was killed or is still running. The metrics are those so far.")
    if why := run.marks.get(STILL_RISING):
        result.append(f"It was still rising: {why}. More rounds (trainer.num_rounds, --ckpt_path last) may change it.")
    if why := run.marks.get(DIVERGED):
        result.append(f"It diverged: {why}. Lower learning rates, or a bound on updates, may prevent this.")
    if run.record is None:
        result.append("There is no report.json (callback RunReport), so clients, matrices and embeddings are missing.")
    if not len(run.rounds):
        result.append(
            "There is no metrics.csv (or no round in it), so there are no curves: log with trainer.logger true."
        )
    return result + [f"Settings changed by a resume: {change}" for change in run.result.get("changes", [])]


def _facts(run: Recorded) -> list[Fact]:
    metrics, test = run.figures, run.test_metric
    result = []
    if test in metrics:
        result.append(
            Fact(name=f"{test}, mean over clients", value=number(metrics[test]), more=_plus_minus(metrics, test))
        )
    if f"{test}_worst" in metrics:
        values = run.reported_values
        worst = (max if run.less_is_better else min)(values, key=lambda name: values[name]) if values else ""
        result.append(Fact(name="worst client", value=number(metrics[f"{test}_worst"]), more=worst))
    bare = f"test/{test.rpartition('/')[2]}"
    if run.record and bare in run.record.reference:
        summary = "the same prediction for all examples of a client"
        result.append(Fact(name=f"{bare} without a model", value=number(run.record.reference[bare]), more=summary))
    for name, value in run.reference(bare).items():
        result.append(Fact(name=f"{bare} of {name}", value=number(value), more="on the same test examples"))
    if run.best_round is not None:
        rounds = f"of {len(run.rounds)}, by {run.monitor} {number(metrics.get(run.monitor))}"
        result.append(Fact(name="best round (from 0)", value=str(run.best_round), more=rounds))
    elif len(run.rounds):
        result.append(Fact(name="rounds", value=str(len(run.rounds)), more="none was evaluated"))
    total = run.column("comm/bytes_total")
    if total is not None:
        result.append(Fact(name="communication", value=size(float(np.nanmax(total))), more="in all rounds"))
    seconds = run.column("seconds")
    if seconds is not None:
        each = duration(float(np.nanmedian(seconds)))
        result.append(Fact(name="time", value=duration(float(np.nansum(seconds))), more=f"{each} a round (median)"))
    failed = sum(run.result.get("failures", {}).values())
    if failed:
        result.append(Fact(name="failures", value=str(failed), more=count(len(run.result["failures"]), "client")))
    return result


def _plus_minus(metrics: dict[str, float], name: str) -> str:
    std = metrics.get(f"{name}_std")
    return "" if std is None else f"± {number(std)} (standard deviation)"


def _footer(run: Recorded) -> list[str]:
    versions = ", ".join(f"{name} {version}" for name, version in run.result.get("versions", {}).items())
    partition = run.result.get("partition_hash") or (run.record.partition_hash if run.record else "")
    lines = [f"Versions: {versions}." if versions else "", f"Partition {partition[:12]}." if partition else ""]
    return [*(line for line in lines if line), f"Regenerate with: fl-train report {run.path}"]
