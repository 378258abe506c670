"""Gradients of bounded length."""

from collections.abc import Collection, Mapping

from torch import Tensor

from fl_lightning.kernels.per_client import along, norm


def clipped(
    gradients: Mapping[str, Tensor | None], most: float, models: Collection[str] = ()
) -> dict[str, Tensor | None]:
    """Scale each client's gradient down to a Euclidean norm, (C, *shape) by name; None stays None.

    Args:
        gradients: Gradients of all parameters.
        most: The largest norm.
        models: Sub-nets that are models of their own, by the first part of their parameters' names: each has a norm of
            its own.
    """
    groups: dict[str, dict[str, Tensor]] = {}
    for name, gradient in gradients.items():
        part = name.partition(".")[0]
        if gradient is not None:
            groups.setdefault(part if part in models else "", {})[name] = gradient
    result: dict[str, Tensor | None] = dict(gradients)
    for group in groups.values():
        factor_C = (most / (norm(list(group.values()), is_stack=True) + 1e-6)).clamp(max=1.0)
        result |= {name: g * along(factor_C, g) for name, g in group.items()}
    return result
