"""What a site refuses, whatever a server asks."""

from collections.abc import Sequence
from dataclasses import dataclass

from fl_lightning.remote.filters import SiteFilter


class Refused(ValueError):
    """A site will not do what it is asked; the message holds nothing of its data and goes back to the server."""


@dataclass(frozen=True, kw_only=True)
class SitePolicy:
    """A site's own rules.

    Args:
        strategies: Class names of the strategies that may be run here; None for any.
        min_examples: Fewest examples that anything may be said of: with fewer labelled training examples the site
            trains for nobody, and of a split with fewer examples its metrics say nothing. At least 1.
        filters: What every answer passes before it leaves, in this order.
        secure_only: Answer only under secure aggregation.

    Raises:
        ValueError: A value is out of its range.
    """

    strategies: Sequence[str] | None = None
    min_examples: int = 5
    filters: Sequence[SiteFilter] = ()
    secure_only: bool = False

    def __post_init__(self) -> None:
        if self.min_examples < 1:
            raise ValueError(f"site.min_examples must be at least 1, got {self.min_examples}")

    def check_strategy(self, name: str) -> None:
        """Refuse a strategy that is not on the list."""
        if self.strategies is not None and name not in self.strategies:
            raise Refused(f"this site runs {', '.join(self.strategies) or 'no strategy'} alone, not {name}")
