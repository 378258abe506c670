"""The bounds of a strategy's settings."""

import math


class Bounded:
    """What has settings with bounds."""

    def require_at_least(self, minimum: float, *settings: str, may_be_infinite: bool = False) -> None:
        """Refuse settings below a minimum, and infinite ones unless they have a meaning; None is allowed.

        Raises:
            ValueError: One of them is below the minimum, or infinite.
        """
        for name in settings:
            value = getattr(self, name)
            if value == math.inf and not may_be_infinite:
                raise ValueError(f"strategy.{name} must be finite, got {value}")
            if value is not None and not value >= minimum:  # nan neither
                bound = f"be at least {minimum}" if minimum else "not be negative"
                raise ValueError(f"strategy.{name} must {bound}, got {value}")

    def require_positive(self, *settings: str) -> None:
        """Refuse settings that are not above 0, and infinite ones.

        Raises:
            ValueError: One of them is not positive, or infinite.
        """
        for name in settings:
            value = getattr(self, name)
            if not 0 < value < math.inf:
                bound = "finite" if value == math.inf else "positive"
                raise ValueError(f"strategy.{name} must be {bound}, got {value}")

    def require_within(self, least: float, most: float, *settings: str) -> None:
        """Refuse settings outside a closed interval.

        Raises:
            ValueError: One of them is outside the interval.
        """
        for name in settings:
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"strategy.{name} must be in [{least}, {most}], got {getattr(self, name)}")
