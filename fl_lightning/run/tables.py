"""What the metrics of a best round say of models on data, and of groups of examples, as rows of tables."""

import math
from collections.abc import Mapping

from fl_lightning.direction import group_of

#: Models by the prefix of their metrics; others are called by their prefix.
_MODELS = {"trained/": "local model", "gen/": "generated model", "blend/": "mean of both predictions"}


def models_and_data(metrics: Mapping[str, float], test: str) -> list[tuple[str, str, str]]:
    """Models that were scored on each client's own data and on those of all clients together.

    With FedAvg and its variants these are the global and the local model, and with the two kinds of data the four ways
    of Li et al., "OpenFGL: A Comprehensive Benchmark for Federated Graph Learning", VLDB 2025.

    Args:
        metrics: Those of the best round.
        test: Name of the reported metric, such as ``test/acc``.

    Returns:
        For each the model in words, and the names of its metric on local and on global data; empty without
        ``trainer.evaluate_union``.

    Example:
        >>> metrics = {"test/acc": 0.8, "trained/test/acc": 0.9, "union/test/acc": 0.7, "union/trained/test/acc": 0.5}
        >>> models_and_data(metrics, "test/acc")[1]
        ('local model', 'trained/test/acc', 'union/trained/test/acc')
    """
    bare = "/".join(test.split("/")[-2:])
    local = "trained/" + bare in metrics
    result = []
    for name in metrics:
        prefix = name.removesuffix(bare)
        if name.endswith(bare) and f"union/{name}" in metrics:
            called = _MODELS.get(prefix, prefix.rstrip("/")) or ("global model" if local else "model")
            result.append((called, name, f"union/{name}"))
    return result


def by_group(metrics: Mapping[str, float]) -> dict[str, list[tuple[str, str]]]:
    """The test metrics of groups of examples: group and name of the metric, by what it measures; no empty groups.

    Example:
        >>> known = {"test/acc": 0.8, "test/recall_class_0": 0.9, "test/recall_class_0_weighted": 0.9}
        >>> by_group({**known, "test/recall_class_1": float("nan")})
        {'test/recall by class': [('0', 'test/recall_class_0')]}
    """
    result: dict[str, list[tuple[str, str]]] = {}
    for name, value in metrics.items():
        group = group_of(name)
        if group is not None and name.startswith("test/") and not math.isnan(value):
            result.setdefault(f"{group[0]} by {group[1]}", []).append((group[2], name))
    return result
