"""What a client module refuses: settings out of range, and what a constructor has set beside the net."""

from collections.abc import Collection
from typing import Any

from torch import nn

from fl_lightning.tasks.class_metrics import CLASS_METRICS, PER_CLASS, PER_DEGREE
from fl_lightning.tasks.number_metrics import NUMBER_METRICS


def check_client_settings(
    net: Any,
    optimizer: Any,
    lr_scheduler: Any,
    gradient_clip_val: float | None,
    running_statistics: str,
    metrics: Any,
) -> None:
    """Check the settings of a client module.

    Raises:
        ValueError: One of them is out of range, or of another kind.
    """
    if net == []:
        raise ValueError("model.net is an empty list: give at least one net")
    if net is not None and not all(map(callable, net if isinstance(net, list) else [net])):
        raise ValueError(f"model.net is {net!r}: give the class of a net, a net, or a list of them")
    if optimizer is not None and not callable(optimizer):
        raise ValueError(
            f"model.optimizer is a {type(optimizer).__name__}: give its class, or a function of the parameters, such "
            "as functools.partial(torch.optim.Adam, lr=0.01)"
        )
    if lr_scheduler is not None and not callable(lr_scheduler):
        raise ValueError(
            f"model.lr_scheduler is a {type(lr_scheduler).__name__}: give its class, or a function of the optimizer, "
            "such as functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.99)"
        )
    if gradient_clip_val is not None and gradient_clip_val <= 0:
        raise ValueError(f"model.gradient_clip_val must be positive, or null for none, got {gradient_clip_val}")
    if running_statistics not in ("personal", "shared"):
        raise ValueError(f"model.running_statistics must be 'personal' or 'shared', got {running_statistics!r}")
    if isinstance(metrics, str):
        raise ValueError(f"model.metrics is {metrics!r}: give a list, [{metrics!r}]")
    if not isinstance(metrics, list | tuple | None):
        raise ValueError(
            f"model.metrics is a {type(metrics).__name__}: give a list of names of metrics, such as ['f1'], or "
            "override scores for one of your own"
        )
    known = (*CLASS_METRICS, *PER_CLASS, *PER_DEGREE, *NUMBER_METRICS)
    for name in metrics or ():
        if not isinstance(name, str) or name not in known:  # a metric of torchmetrics "equals" every name
            raise ValueError(
                f"model.metrics has {name!r}, which is not the name of a metric: give some of {', '.join(known)}, or "
                "override scores for one of your own"
            )


def check_modules(client: nn.Module, built: Collection[nn.Module]) -> None:
    """Refuse what a constructor has set beside the net: it would be replaced, or neither trained nor communicated.

    Args:
        client: The client module.
        built: The nets that an earlier run has built.

    Raises:
        ValueError: There is such a thing.
    """
    kind = type(client).__name__
    net = client._modules.get("net")
    if net is not None and all(net is not each for each in built):
        raise ValueError(f"model: {kind} sets self.net, which a run builds: give super().__init__(net=...) instead")
    own = [name for name, p in client.named_parameters() if p.requires_grad and not name.startswith("net.")]
    if own:
        raise ValueError(
            f"model: {kind} has parameters beside its net ({', '.join(own[:3])}), which are neither trained nor "
            "communicated: put them into the net (model.net), or freeze them by requires_grad_(False)"
        )
