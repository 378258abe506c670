"""Each client's share of two predictions, chosen from validation scores with shrinkage to the federation's.

Shape legend: C clients, S shares.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fl_lightning.strategies.server_state import ServerState


class ShareChoice(ServerState):
    """The last scores of every client, and the shares chosen from them.

    Let m_i(s) be the mean metric over a client's n_i validation examples, and m(s) that over all clients' examples. The
    client's share is

        argmax_s  n_i / (n_i + n) m_i(s) + n / (n_i + n) m(s),

    the smallest if there are several. A client without scores or examples takes the federation's share, argmax m(s).

    Args:
        shares: The values of s, increasing.
        prior_examples: n, at least 0: the number of a client's examples that weigh as much as the federation. At 0 the
            federation decides only ties, at inf everything.
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
