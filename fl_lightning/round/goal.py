"""Whether more or less of a metric is better; told by its name, without importing what computes it."""


def less_is_better(name: str) -> bool:
    """Whether a metric is a loss or an error.

    Example:
        >>> less_is_better("val/mse"), less_is_better("test/acc")
        (True, False)
    """
    return name.endswith(("loss", "mse"))
