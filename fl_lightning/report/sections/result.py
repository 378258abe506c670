"""The metrics of the best round, of every model that was evaluated."""

from fl_lightning.report.document import Section
from fl_lightning.report.figures import Table
from fl_lightning.report.folder import Recorded
from fl_lightning.report.wording import number
from fl_lightning.run.tables import by_group, models_and_data

_MODELS = {
    "": "result",
    "trained/": "trained locally, before mixing",
    "gen/": "generated model",
    "benign/": "benign clients",
    "malicious/": "malicious clients",
    "unseen/": "unseen clients",
}


def section(run: Recorded) -> Section | None:
    """The section "Result"; None where nothing was evaluated."""
    table = _other_metrics(run)
    if table is None:
        return None
    text = "Only validation data choose the round; the test metrics are those of that round."
    return Section(anchor="result", title="Result", text=text, tables=[table, *_ways(run), *_groups(run)])


def _ways(run: Recorded) -> list[Table]:
    """Models on local and on global data, where both were measured."""
    metrics = run.figures
    rows = [
        [model, *(number(metrics.get(f"{name}{kind}")) for name in names for kind in ("", "_std"))]
        for model, *names in models_and_data(metrics, run.test_metric)
    ]
    columns = ["model", "local data", "std", "global data", "std"]
    return [Table(title="Models on local and on global data", columns=columns, rows=rows)] if rows else []


def _groups(run: Recorded) -> list[Table]:
    """Test metrics by class and by degree."""
    metrics, what = run.figures, run.record.examples if run.record else "examples"
    return [
        Table(
            title=title,
            columns=[title.rpartition(" ")[2], "mean", "std", "worst client", f"weighted by {what}"],
            rows=[
                [group, *(number(metrics.get(f"{name}{kind}")) for kind in ("", "_std", "_worst", "_weighted"))]
                for group, name in groups
            ],
        )
        for title, groups in by_group(metrics).items()
    ]


def model_in_words(name: str, test: str) -> str:
    """Which model a metric is of, by the metric's name and the result's."""
    if name == "test/asr":
        return "attack success"
    prefix = name.removesuffix(test)
    return _MODELS.get(prefix, prefix.rstrip("/").replace("/", ", "))


def _other_metrics(run: Recorded) -> Table | None:
    """Every model's metrics at the best round."""
    metrics = run.figures
    shown = {name for groups in by_group(metrics).values() for _, name in groups}
    shown |= {union for _, _, union in models_and_data(metrics, run.test_metric)}
    names = [name for name in metrics if f"{name}_weighted" in metrics and "test/" in name and name not in shown]
    names = [name for name in names if not name.endswith("loss") or run.test_metric.endswith("loss")]
    if not names:
        return None
    models = list(dict.fromkeys(map(_model_of, names)))
    names.sort(key=lambda name: (bool(_model_of(name)), models.index(_model_of(name)), not _is_main(name, run)))
    several = not all(_is_main(name, run) for name in names)
    rows = [
        [_label(name, run, several=several)]
        + [number(metrics.get(f"{name}{kind}")) for kind in ("", "_std", "_worst", "_weighted")]
        for name in names
    ]
    what = run.record.examples if run.record else "examples"
    head = "at the best round" if several else f"{run.test_metric} at the best round"
    columns = [head, "mean", "std", "worst client", f"weighted by {what}"]
    return Table(title="Metrics of the best round", columns=columns, rows=rows)


def _model_of(name: str) -> str:
    """The prefix of a metric's name that says which model it is of."""
    return name[: name.rindex("test/")]


def _is_main(name: str, run: Recorded) -> bool:
    return name.endswith(run.test_metric) or name == "test/asr"


def _label(name: str, run: Recorded, *, several: bool) -> str:
    if not several or name == "test/asr":
        return model_in_words(name, run.test_metric)
    metric = name.removeprefix(_model_of(name))
    return f"{model_in_words(name.replace(metric, run.test_metric), run.test_metric)}, {metric}"
