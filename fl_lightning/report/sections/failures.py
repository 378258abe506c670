"""Who took part, who failed and who was malicious."""

import numpy as np

from fl_lightning.counts import count
from fl_lightning.report.document import Section
from fl_lightning.report.figures import Curve, Picture, Table
from fl_lightning.report.folder import Recorded
from fl_lightning.report.pictures import Album
from fl_lightning.report.wording import number


def section(run: Recorded, album: Album) -> Section | None:
    """The section "Failures and attacks"; None where there were none."""
    x = run.rounds.astype(float)
    pictures, tables, notes = [], [], []
    failed = "failed" if "num_dropouts" in run.history else "failed or dropped out"  # older runs count both as one
    columns = {"took part": "num_participants", failed: "num_failures", "dropped out": "num_dropouts"}
    result = {label: column for label, name in columns.items() if (column := run.column(name)) is not None}
    trouble = [
        column for name in ("num_failures", "num_dropouts", "failed_round") if (column := run.column(name)) is not None
    ]
    partial = result.get("took part")
    if any(column.max() > 0 for column in trouble) or (partial is not None and partial.min() < partial.max()):
        curves = [Curve(label=label, x=x, y=column) for label, column in result.items()]
        pictures.append(album.curves(curves, title="Participation", x_label="round", y_label="clients", from_zero=True))
    failures = run.result.get("failures", {})
    if failures:
        rows = [[name, number(times)] for name, times in sorted(failures.items(), key=lambda item: -item[1])]
        tables.append(Table(title="Failures", columns=["client", "failures"], rows=rows))
    causes = run.record.failures if run.record else []
    folded = []
    if causes:
        rows = [[f"{round_idx}: {name}", why] for round_idx, name, why in causes]
        folded.append(Table(title=f"The first {count(len(causes), 'failure')}", columns=["round", "cause"], rows=rows))
    failed_rounds = run.column("failed_round")
    if failed_rounds is not None and failed_rounds.max() > 0:
        notes.append(
            f"{count(int(np.nansum(failed_rounds)), 'round')} had too few updates, and the server aggregated nothing."
        )
    for attack, members in run.malicious.items():
        notes.append(f"Attack {attack}: {', '.join(members) or 'nobody'} ({count(len(members), 'client')}).")
    if run.malicious and (picture := _attack(run, album)):
        pictures.append(picture)
    if not (pictures or tables or notes):
        return None
    return Section(
        anchor="failures",
        title="Failures and attacks",
        pictures=pictures,
        tables=tables,
        folded=folded,
        notes=notes,
    )


def _attack(run: Recorded, album: Album) -> Picture | None:
    test = run.test_metric.removeprefix("benign/")
    named = {
        "all clients": test,
        "benign clients": f"benign/{test}",
        "attack success": "test/asr",
        "attack success, malicious clients": "malicious/test/asr",
    }
    x = run.rounds.astype(float)
    curves = [Curve(label=label, x=x, y=run.history[n]) for label, n in named.items() if run.column(n) is not None]
    return album.curves(curves, title="Under attack", x_label="round", y_label=test) if curves else None
