"""Regression metrics that are not means over examples, for each client: mean absolute error, RMSE and R².

Shape legend: S splits, C clients (or no such dimension), N examples, H numbers of a target.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from fl_lightning.tasks.class_metrics import weighted

NumberMetric = Literal["mae", "rmse", "r2"]

#: The metrics by name.
NUMBER_METRICS: tuple[str, ...] = get_args(NumberMetric)


def number_scores(
    metrics: Sequence[str], output_CNH: Tensor, y_CNH: Tensor, masks_SCN: Tensor
) -> dict[str, tuple[Tensor, Tensor]]:
    """Numerator and denominator of metrics for every split and client.

    Each is computed from the known numbers of each column of targets, and is the mean over the columns that have one:
    ``mae``, the mean absolute error; ``rmse``, the root of the mean squared error; ``r2``, 1 - Σ (y - ŷ)² / Σ (y - ȳ)²,
    of columns whose numbers differ.

    Args:
        metrics: Names of :data:`NUMBER_METRICS`.
        output_CNH: Predictions.
        y_CNH: Targets; nan if missing.
        masks_SCN: Examples of each split.

    Returns:
        By the metric's name the value times the number of examples, and that number, both (S, C); both are 0 where
        there is no value.

    Example:
        >>> y, predicted = torch.tensor([[1.0], [3.0]]), torch.tensor([[2.0], [3.0]])
        >>> scores = number_scores(NUMBER_METRICS, predicted, y, torch.ones(1, 2, dtype=torch.bool))
        >>> {name: round(float(total / count), 3) for name, (total, count) in scores.items()}
        {'mae': 0.5, 'rmse': 0.707, 'r2': 0.5}
    """
    known_SCNH = masks_SCN.unsqueeze(-1) & ~y_CNH.isnan()
    y_CNH = y_CNH.double().nan_to_num()
    error_CNH = output_CNH.double() - y_CNH
    count_SCH = known_SCNH.sum(dim=-2).double()

    def mean(value: Tensor) -> Tensor:
        return torch.where(known_SCNH, value, 0.0).sum(dim=-2) / count_SCH  # nan where nothing is known

    squared_SCH = mean(error_CNH.square())
    values = {"mae": mean(error_CNH.abs()), "rmse": squared_SCH.sqrt()}
    has_value = dict.fromkeys(values, count_SCH > 0)  # not by nan, which outputs may be as well
    if "r2" in metrics:
        variance_SCH = mean((y_CNH - mean(y_CNH).unsqueeze(-2)).square())
        values["r2"], has_value["r2"] = 1 - squared_SCH / variance_SCH, variance_SCH > 0
    count_SC, result = masks_SCN.double().sum(dim=-1), {}
    for name in metrics:
        has_SCH = has_value[name]
        value_SC = torch.where(has_SCH, values[name], 0.0).sum(dim=-1) / has_SCH.sum(dim=-1)
        result[name] = weighted(value_SC, count_SC, has_SCH.any(dim=-1))
    return result
