"""From each client's scores to the figures of a federation."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torchmetrics import Metric

from fl_lightning.payload import Payload


class OverClients(Metric):
    """Mean, standard deviation, worst and weighted mean over clients of one per-client metric.

    Federated accuracy is the plain mean over clients of each client's accuracy on its own nodes (Shamsian et al., ICML
    2021); the standard deviation is the population's. Clients without any example are left out.

    Args:
        higher_is_better: Whether the worst client is the one with the smallest value.
    """

    full_state_update = False
    clients: list[Tensor]

    def __init__(self, *, higher_is_better: bool = True) -> None:
        super().__init__(sync_on_compute=False)  # payloads are gathered before they are summed up
        self.larger_wins = higher_is_better
        self.add_state("clients", default=[], dist_reduce_fx="cat")

    def update(self, totals: Tensor) -> None:
        """Add clients.

        Args:
            totals: Numerator and number of examples of each client, (C, 2).
        """
        self.clients.append(totals)

    def compute(self) -> dict[str, Tensor]:
        """Return ``mean``, ``std``, ``worst`` and ``weighted``, scalars; nan where no client has examples."""
        totals = torch.cat(self.clients) if self.clients else torch.zeros(0, 2)
        return over_clients(totals, higher_is_better=self.larger_wins)


def over_clients(totals_C2: Tensor, *, higher_is_better: bool = True) -> dict[str, Tensor]:
    """What :class:`OverClients` computes, as a function.

    Args:
        totals_C2: Numerator and number of examples of each client.
        higher_is_better: Whether the worst client is the one with the smallest value.
    """
    totals_C2 = totals_C2[totals_C2[:, 1] > 0].double()
    values_C = totals_C2[:, 0] / totals_C2[:, 1]
    if not len(values_C):
        return dict.fromkeys(("mean", "std", "worst", "weighted"), torch.tensor(torch.nan))
    return {
        "mean": values_C.mean(),
        "std": values_C.std(correction=0),
        "worst": values_C.min() if higher_is_better else values_C.max(),
        "weighted": totals_C2[:, 0].sum() / totals_C2[:, 1].sum(),
    }


def less_is_better(name: str) -> bool:
    """Whether a metric is a loss or an error.

    Example:
        >>> less_is_better("val/mse"), less_is_better("test/acc")
        (True, False)
    """
    return name.endswith(("loss", "mse"))


def summarise(scores: Payload, prefix: str = "") -> dict[str, float]:
    """Figures over the clients of a score payload.

    Returns:
        For a metric ``val/acc``: its mean over clients under ``val/acc``, and ``val/acc_std``, ``val/acc_worst``,
        ``val/acc_weighted``; each name behind ``prefix``.
    """
    figures = {}
    for name, totals_C2 in scores.signals.items():
        for kind, value in over_clients(totals_C2.cpu(), higher_is_better=not less_is_better(name)).items():
            figures[f"{prefix}{name}" if kind == "mean" else f"{prefix}{name}_{kind}"] = float(value)
    return figures


def client_values(scores: Payload, name: str, clients: Sequence[int] | None = None) -> Tensor:
    """Each client's value of a metric (C,), nan without examples."""
    totals = scores.rows(clients).signals[name] if clients is not None else scores.signals[name]
    return (totals[:, 0] / totals[:, 1]).cpu()
