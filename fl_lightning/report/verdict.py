"""What a run came to, in a sentence or two."""

import math

from fl_lightning.counts import count
from fl_lightning.report.folder import Recorded
from fl_lightning.report.wording import listed, number

_WORDS = {
    "acc": "accuracy",
    "ap": "average precision",
    "auroc": "area under the ROC curve",
    "f1": "F1 score",
    "loss": "loss",
    "mae": "mean absolute error",
    "mse": "mean squared error",
    "r2": "R²",
    "rmse": "root mean squared error",
}
#: What stands before a metric that is of some clients; anything else there is a kind of model.
_OF_CLIENTS = ("benign", "malicious", "unseen")


def metric_in_words(name: str) -> str:
    """A metric as a reader says it.

    Example:
        >>> metric_in_words("test/acc"), metric_in_words("benign/test/acc"), metric_in_words("trained/test/recall_at_5")
        ('test accuracy', 'test accuracy of benign clients', 'test recall at 5 of trained models')
    """
    *before, split, metric = ["", *name.split("/")][-3:]
    whose = "clients" if before and before[0] in _OF_CLIENTS else "models"
    of = f" of {before[0]} {whose}" if before and before[0] else ""
    return f"{split} {_WORDS.get(metric, metric.replace('_', ' '))}{of}".strip()


def verdict(run: Recorded) -> str:
    """The sentences at the head of a run's page; empty for one that was never evaluated."""
    metrics, test = run.figures, run.test_metric
    value = metrics.get(test, math.nan)
    if not math.isfinite(value):
        return ""
    scored = run.reported_values
    clients = f" on average over {count(len(scored), 'client')}" if scored else ""
    parts = [f"{run.strategy or 'The run'} comes to a {metric_in_words(test)} of {number(value)}{clients}"]
    worst = metrics.get(f"{test}_worst", math.nan)
    if math.isfinite(worst):
        parts.append(f", {number(worst)} at the worst")
    bare = f"test/{test.rpartition('/')[2]}"
    sentences = ["".join(parts) + ". " + _against_chance(run, bare, value)]
    others = [f"{name} comes to {number(other)}" for name, other in run.reference(bare).items()]
    if others:
        sentences.append(f"On the same test examples {listed(others)}.")
    if run.best_round is not None:
        sentences.append(f"Validation chose round {run.best_round}, of {count(len(run.rounds), 'round')} from 0.")
    sentences.append("It is one run with one seed: compare methods over several.")
    return " ".join(each.strip() for each in sentences if each.strip())


def _against_chance(run: Recorded, bare: str, value: float) -> str:
    chance = run.record.reference.get(bare) if run.record else None
    if chance is None or not math.isfinite(chance):
        return ""
    gain = (chance - value) if run.less_is_better else (value - chance)
    if gain <= 0:
        return f"That is no better than the same prediction for all examples of a client ({number(chance)})."
    return f"The same prediction for all examples of a client would come to {number(chance)}."
