"""How the run learned: curves over the rounds, and the metrics of the chosen one."""

from collections.abc import Sequence

import numpy as np

from fl_lightning.report.document import Section
from fl_lightning.report.figures import Curve, Picture, Table
from fl_lightning.report.folder import Column, Recorded
from fl_lightning.report.pictures import Album
from fl_lightning.report.references import levels
from fl_lightning.report.wording import number

_MODELS = {
    "": "result",
    "trained/": "trained locally, before mixing",
    "gen/": "generated model",
    "benign/": "benign clients",
    "malicious/": "malicious clients",
    "unseen/": "unseen clients",
}
_SPLITS = ("train", "val", "test")


def section(run: Recorded, album: Album) -> Section:
    """The section "Learning"."""
    metric = run.monitor.rpartition("/")[2]
    prefix = run.monitor.removesuffix(f"val/{metric}")
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
        curves = [Curve(label=label, x=run.rounds.astype(float), y=column) for label, column in named.items()]
        if curves:
            curves += levels([run], reference, curves, ", test") if reference else []
            pictures.append(
                album.curves(curves, title=title, x_label="round", y_label=y_label, mark=mark, table=table, note=note)
            )

    def columns(*names: str, labels: Sequence[str] = ()) -> dict[str, Column]:
        pairs = zip(names, labels or names, strict=True)
        return {label: column for name, label in pairs if (column := run.column(name)) is not None}

    draw(
        columns(*(f"{prefix}{split}/{metric}" for split in _SPLITS), labels=_SPLITS),
        "Learning curves",
        f"{metric}, mean over clients",
        _rounds_table(run),
        reference=f"test/{metric}",
    )
    if spread := _spread(run, album, mark):
        pictures.append(spread)
    if metric != "loss":
        draw(columns(*(f"{prefix}{split}/loss" for split in _SPLITS), labels=_SPLITS), "Loss", "mean over clients")
    others = [name for name in run.history if name.endswith(f"/test/{metric}") or name == "test/asr"]
    if others:
        named = [f"test/{metric}", *others]
        labels = [_model(name, f"test/{metric}") for name in named]
        draw(columns(*named, labels=labels), "Models of the same rounds", f"test {metric}, mean over clients")
    server = [n for n in run.history if n.startswith("server/") and run.column(n) is not None]
    for name in server[:6]:
        draw(
            {name.removeprefix("server/"): run.history[name]}, "Server", name.removeprefix("server/").replace("_", " ")
        )
    text = "" if not pictures else "Only validation data choose the round; the test metrics are those of that round."
    return Section(
        anchor="learning",
        title="Learning",
        text=text,
        pictures=pictures,
        tables=[table] if (table := _other_metrics(run)) else [],
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
        Curve(label="worst client", x=x, y=worst),
    ]
    return album.curves(curves, title="Spread over clients", x_label="round", y_label=test, mark=mark)


def _model(name: str, test: str) -> str:
    if name == "test/asr":
        return "attack success"
    prefix = name.removesuffix(test)
    return _MODELS.get(prefix, prefix.rstrip("/").replace("/", ", "))


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


def _other_metrics(run: Recorded) -> Table | None:
    """Every model's metrics at the best round."""
    metrics = run.figures
    names = [name for name in metrics if f"{name}_weighted" in metrics and "test/" in name]
    rows = [
        [_model(name, run.test_metric) if name.endswith(run.test_metric) else name]
        + [number(metrics.get(f"{name}{kind}")) for kind in ("", "_std", "_worst", "_weighted")]
        for name in names
        if not name.endswith("loss") or run.test_metric.endswith("loss")
    ]
    if not rows:
        return None
    what = run.record.examples if run.record else "examples"
    columns = [f"{run.test_metric} at the best round", "mean", "std", "worst client", f"weighted by {what}"]
    return Table(title="Metrics of the best round", columns=columns, rows=rows)
