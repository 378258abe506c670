"""The metrics that a verb of the trainer returns."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pandas import DataFrame

#: What is known of a metric beside its mean over clients, by the end of its name.
_BESIDE = ("std", "worst", "weighted")


class Metrics(dict[str, float]):
    """Metrics by name, which a terminal and a notebook show as a table.

    Example:
        >>> metrics = Metrics({"best_round": 3, "test/acc": 0.82, "test/acc_std": 0.03, "test/acc_worst": 0.74})
        >>> print(metrics)  # doctest: +NORMALIZE_WHITESPACE
                     value    std  worst weighted
        best_round  3.0000
        test/acc    0.8200 0.0300 0.7400
    """

    def to_frame(self) -> "DataFrame":
        """A row for each metric: its value (the mean over clients), and over clients std, worst and weighted mean."""
        from pandas import DataFrame

        beside = {f"{name}_{end}" for name in self for end in _BESIDE} & self.keys()
        rows = {
            name: [value, *(self.get(f"{name}_{end}", float("nan")) for end in _BESIDE)]
            for name, value in self.items()
            if name not in beside
        }
        return DataFrame.from_dict(rows, orient="index", columns=["value", *_BESIDE], dtype=float)

    def __repr__(self) -> str:
        return str(self.to_frame().to_string(na_rep="", float_format="{:.4f}".format)) if self else "{}"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return str(self.to_frame().to_html(na_rep="", float_format="{:.4f}".format))
