"""How much of two predictions each client is given, chosen from validation scores with shrinkage.

Shape legend: C clients, S shares.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fl_lightning.strategies.server_state import ServerState


class ShareChoice(ServerState):
    """The last scores of every client, and what is chosen by them.

    With n_i the validation examples behind a client's mean metric m_i(s), and m(s) that of all clients' examples, its
    share is

        argmax_s  n_i / (n_i + n) m_i(s) + n / (n_i + n) m(s)

    the smallest where several are best. A client that has not scored yet, or has no example, takes the federation's.

    Args:
        shares: The values of s, in order.
        prior_examples: n, at least 0: as many of its own make a client as heavy as the federation in its choice. 0
            leaves to the federation nothing but ties, inf everything.
        num_clients: C.
        device: Where scores are kept.
    """

    server_state = ("scores_CS2",)

    def __init__(
        self, shares: Sequence[float], prior_examples: float, num_clients: int, device: torch.device | None = None
    ) -> None:
        self.shares_S = torch.tensor(shares, dtype=torch.float64, device=device)
        self.prior_examples = max(prior_examples, 1e-9)
        self.scores_CS2 = torch.zeros(num_clients, len(shares), 2, dtype=torch.float64, device=device)

    def note(self, clients: Sequence[int], scores_CS2: Tensor) -> None:
        """Keep clients' scores: totals, of which more is better, and numbers of examples."""
        self.scores_CS2[list(clients)] = scores_CS2.to(self.scores_CS2)

    def of(self, clients: Sequence[int]) -> Tensor:
        """The share of each client, (C,); the middle of the grid before anybody has scored."""
        total_S, count_S = self.scores_CS2.sum(dim=0).unbind(dim=-1)
        if not count_S[0]:
            return self.shares_S[len(self.shares_S) // 2].expand(len(clients))
        own_CS, count_CS = self.scores_CS2[list(clients)].unbind(dim=-1)
        weight_CS = count_CS / (count_CS + self.prior_examples)
        mean_CS = weight_CS * own_CS / count_CS.clamp(min=1) + (1 - weight_CS) * total_S / count_S
        return self.shares_S[mean_CS.argmax(dim=1)]
