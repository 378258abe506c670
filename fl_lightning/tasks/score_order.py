"""The order of examples by their scores, from which ranks among any of them are counted.

One sort serves all splits and metrics: searching a sorted copy for each would take several times as long.

Shape legend: N examples of each client, class or label (the other dimensions lead).
"""

import torch
from torch import Tensor


class ScoreOrder:
    """Counts how many of some examples are scored lower than each example, or at most as high.

    Args:
        score_N: Scores; nan is below all others.

    Example:
        >>> order, chosen = ScoreOrder(torch.tensor([0.5, 0.1, 0.5, 0.9])), torch.tensor([True, True, False, True])
        >>> order.below(chosen).tolist(), order.up_to(chosen).tolist()
        ([1, 0, 1, 2], [2, 1, 2, 3])
    """

    def __init__(self, score_N: Tensor) -> None:
        ordered_N, self._order_N = torch.where(score_N.isnan(), -torch.inf, score_N).sort(dim=-1)
        place_N = torch.arange(score_N.shape[-1], device=score_N.device).expand_as(self._order_N)
        begins_N = ordered_N != ordered_N.roll(1, dims=-1)  # of examples that are scored the same
        begins_N[..., :1] = True
        first_N = torch.where(begins_N, place_N, 0).cummax(dim=-1).values
        end_N = torch.where(begins_N.roll(-1, dims=-1), place_N, place_N.shape[-1])
        last_N = end_N.flip(-1).cummin(dim=-1).values.flip(-1)
        self._first_N = first_N.scatter(-1, self._order_N, first_N)
        self._last_N = last_N.scatter(-1, self._order_N, last_N)

    def below(self, chosen_N: Tensor) -> Tensor:
        """Number of chosen examples with a lower score than each example, int64 (N,)."""
        ordered_N = chosen_N.gather(-1, self._order_N).long()
        return (ordered_N.cumsum(dim=-1) - ordered_N).gather(-1, self._first_N)

    def up_to(self, chosen_N: Tensor) -> Tensor:
        """Number of chosen examples with the score of each example or a lower one, int64 (N,)."""
        return chosen_N.gather(-1, self._order_N).cumsum(dim=-1).gather(-1, self._last_N)
