"""The metrics of the best round, of every model that was evaluated."""

from fl_lightning.report.document import Section
from fl_lightning.report.figures import Table
from fl_lightning.report.folder import Recorded
from fl_lightning.report.wording import number

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
    return Section(anchor="result", title="Result", text=text, tables=[table])


def model_in_words(name: str, test: str) -> str:
    """Which model a metric is of, by the metric's name and the result's."""
    if name == "test/asr":
        return "attack success"
    prefix = name.removesuffix(test)
    return _MODELS.get(prefix, prefix.rstrip("/").replace("/", ", "))


def _other_metrics(run: Recorded) -> Table | None:
    """Every model's metrics at the best round."""
    metrics = run.figures
    names = [name for name in metrics if f"{name}_weighted" in metrics and "test/" in name]
    rows = [
        [model_in_words(name, run.test_metric) if name.endswith(run.test_metric) else name]
        + [number(metrics.get(f"{name}{kind}")) for kind in ("", "_std", "_worst", "_weighted")]
        for name in names
        if not name.endswith("loss") or run.test_metric.endswith("loss")
    ]
    if not rows:
        return None
    what = run.record.examples if run.record else "examples"
    columns = [f"{run.test_metric} at the best round", "mean", "std", "worst client", f"weighted by {what}"]
    return Table(title="Metrics of the best round", columns=columns, rows=rows)
