"""How the run learned: curves over the rounds, and the metrics of the chosen one."""

from collections.abc import Sequence

import numpy as np

from fl_lightning.report.document import Section
from fl_lightning.report.figures import Curve, Picture, Table
from fl_lightning.report.folder import Column, Recorded
from fl_lightning.report.pictures import Album
from fl_lightning.report.references import levels
from fl_lightning.report.sections.result import model_in_words
from fl_lightning.report.wording import number

#: With the color of each, which is the same in all pictures.
SPLITS = {"train": 2, "val": 1, "test": 0}
_WORST = 3


def section(run: Recorded, album: Album) -> Section:
    """The section "Learning"."""
    metric = run.test_metric.rpartition("/")[2]
    prefix = run.test_metric.removesuffix(f"test/{metric}")
    mark = None if run.best_round is None else (float(run.best_round), f"best round {run.best_round}")
    pictures = []

    def draw(
        named: dict[str, Column],
        title: str,
        y_label: str,
        table: Table | None = None,
        note: str = "",
        reference: str = "",
    ) -> None:
        x = run.rounds.astype(float)
        curves = [Curve(label=label, x=x, y=column, order=SPLITS.get(label)) for label, column in named.items()]
        if curves:
            curves += levels([run], reference, curves, ", test") if reference else []
            pictures.append(
                album.curves(curves, title=title, x_label="round", y_label=y_label, mark=mark, table=table, note=note)
            )

    def columns(*names: str, labels: Sequence[str] = ()) -> dict[str, Column]:
        pairs = zip(names, labels or names, strict=True)
        return {label: column for name, label in pairs if (column := run.column(name)) is not None}

    draw(
        columns(*(f"{prefix}{split}/{metric}" for split in SPLITS), labels=list(SPLITS)),
        "Learning curves",
        f"{metric}, mean over clients",
        _rounds_table(run),
        reference=f"test/{metric}",
    )
    if spread := _spread(run, album, mark):
        pictures.append(spread)
    if metric != "loss":
        draw(columns(*(f"{prefix}{split}/loss" for split in SPLITS), labels=list(SPLITS)), "Loss", "mean over clients")
    others = [name for name in run.history if name.endswith(f"/test/{metric}") or name == "test/asr"]
    if others:
        named = [f"test/{metric}", *others]
        labels = [model_in_words(name, f"test/{metric}") for name in named]
        draw(columns(*named, labels=labels), "Models of the same rounds", f"test {metric}, mean over clients")
    text = "Means over clients after each round; the dashed line is the round that validation chose."
    return Section(
        anchor="learning",
        title="Learning",
        text=text if pictures else "",
        pictures=pictures,
        empty="" if pictures else "No round was evaluated, so there are no curves.",
    )


def _spread(run: Recorded, album: Album, mark: tuple[float, str] | None) -> Picture | None:
    test = run.test_metric
    mean, std, worst = (run.column(f"{test}{kind}") for kind in ("", "_std", "_worst"))
    if mean is None or std is None or worst is None:
        return None
    x = run.rounds.astype(float)
    curves = [
        Curve(label="mean ± standard deviation", x=x, y=mean, low=mean - std, high=mean + std),
        Curve(label="worst client", x=x, y=worst, order=_WORST),
    ]
    return album.curves(curves, title="Spread over clients", x_label="round", y_label=test, mark=mark)


def _rounds_table(run: Recorded) -> Table | None:
    metrics = [run.monitor, run.test_metric, f"{run.test_metric}_std", f"{run.test_metric}_worst", "seconds"]
    known = [name for name in metrics if run.column(name) is not None]
    if not known:
        return None
    last = len(run.rounds) - 1
    indices = {round(step * last / 10) for step in range(11)}
    if run.best_round is not None:
        indices |= set(np.flatnonzero(run.rounds == run.best_round).tolist())
    rows = [
        [str(run.rounds[position]), *(number(run.history[name][position]) for name in known)]
        for position in sorted(indices)
    ]
    return Table(title="Some of the rounds", columns=["round", *known], rows=rows)
