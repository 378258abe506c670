"""From each client's scores to the metrics of a federation."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torchmetrics import Metric

from fl_lightning.direction import KNOWN, Direction, direction_of
from fl_lightning.round.payload import Payload


class OverClients(Metric):
    """Mean, standard deviation, worst value and weighted mean over clients of one per-client metric.

    Federated accuracy is the unweighted mean over clients of each client's accuracy on its own nodes (Shamsian et al.,
    ICML 2021); the standard deviation is the population's. Clients without any example are left out.

    Args:
        higher_is_better: Whether the worst client is the one with the smallest value.
    """

    full_state_update = False
    clients: list[Tensor]

    def __init__(self, *, higher_is_better: bool = True) -> None:
        super().__init__(sync_on_compute=False)  # payloads are gathered before they are summarized
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


def over_clients(totals_C2: Tensor, *, higher_is_better: bool | Tensor = True) -> dict[str, Tensor]:
    """The function behind :class:`OverClients`; with a leading dimension for many metrics at once.

    Args:
        totals_C2: Numerator and number of examples of each client, (C, 2), or (metrics, C, 2).
        higher_is_better: Whether the worst client is the one with the smallest value; one flag for each metric.
    """
    # one more client without examples, since there may be no clients
    total_C, count_C = torch.nn.functional.pad(totals_C2.double(), (0, 0, 0, 1)).unbind(dim=-1)
    has_C = count_C > 0
    num_clients = has_C.sum(dim=-1)
    value_C = torch.where(has_C, total_C / count_C, 0.0)
    mean = value_C.sum(dim=-1) / num_clients
    deviation_C = torch.where(has_C, value_C - mean[..., None], 0.0)
    sign = torch.as_tensor(higher_is_better, device=mean.device) * 2.0 - 1
    worst = torch.where(has_C, value_C * sign[..., None], torch.inf).amin(dim=-1) * sign
    return {
        "mean": mean,
        "std": (deviation_C.square().sum(dim=-1) / num_clients).sqrt(),
        "worst": torch.where(num_clients > 0, worst, torch.nan),
        "weighted": torch.where(has_C, total_C, 0.0).sum(dim=-1) / torch.where(has_C, count_C, 0.0).sum(dim=-1),
    }


def summarize(scores: Payload, prefix: str = "", directions: Mapping[str, Direction] = KNOWN) -> dict[str, float]:
    """Metrics over the clients of a score payload.

    Args:
        scores: Numerator and number of examples of each metric and client, (C, 2).
        prefix: Prefix of the names.
        directions: Whether more or less of a metric is better, by its bare name.

    Returns:
        For a metric ``val/acc``: its mean over clients under ``val/acc``, and ``val/acc_std``, ``val/acc_worst``,
        ``val/acc_weighted``; each name after ``prefix``. A metric of unknown direction has no worst client, and hence
        no ``_worst``.
    """
    if not scores.extras:
        return {}
    names = [f"{prefix}{name}" for name in scores.extras]
    known = [direction_of(name, directions) for name in scores.extras]
    larger_wins = torch.tensor([direction != "min" for direction in known])
    result = over_clients(torch.stack(list(scores.extras.values())).cpu(), higher_is_better=larger_wins)
    metrics = {"" if kind == "mean" else f"_{kind}": values.tolist() for kind, values in result.items()}
    return {
        f"{name}{kind}": values[i]
        for i, name in enumerate(names)
        for kind, values in metrics.items()
        if kind != "_worst" or known[i]
    }


def summarize_sums(sums: Mapping[str, Tensor], prefix: str = "") -> dict[str, float]:
    """Metrics of a federation whose clients reveal only sums: no worst client and no standard deviation.

    Args:
        sums: For each metric, (4,): the sum of the clients' values, the number of clients that have one, and the sums
            of numerators and of denominators.
        prefix: Prefix of the metrics' names.

    Returns:
        For a metric ``val/acc``: its mean over clients under ``val/acc``, and ``val/acc_weighted``; nan if no client
        has a value.
    """
    metrics: dict[str, float] = {}
    for name, (value, count, total, weight) in sums.items():
        metrics[f"{prefix}{name}"] = float(value / count)
        metrics[f"{prefix}{name}_weighted"] = float(total / weight)
    return metrics


def client_values(scores: Payload, name: str, clients: Sequence[int] | None = None) -> Tensor:
    """Each client's value of a metric, (C,); nan without examples."""
    totals = scores.rows(clients).extras[name] if clients is not None else scores.extras[name]
    return (totals[:, 0] / totals[:, 1]).cpu()
