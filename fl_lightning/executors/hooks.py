"""Which of Lightning's hooks a client may override, and which executor honors them.

| hook | sequential | stacked |
|---|---|---|
| ``objective``, ``output``, ``loss``, ``scores``, ``predictions`` | yes | yes |
| ``build_optimizer``, ``clip``, ``constrain``, ``example_count`` | yes | yes |
| ``training_step``, ``predict_step`` | yes | hands over |
| ``configure_optimizers`` (one optimizer; a scheduler is ``lr_scheduler``) | yes | hands over |
| ``on_train_start``, ``on_train_epoch_start``, ``on_train_batch_start``, and their ends | yes | hands over |
| ``on_before_zero_grad``, ``on_before_backward``, ``on_after_backward`` | yes | hands over |
| ``on_before_optimizer_step`` | yes | hands over |
| all other hooks of Lightning's training and evaluation loops, ``setup``, unknown ``on_...`` | refused | refused |
| ``log``, ``logger``, ``current_epoch``, ``global_step``, ``trainer`` (there is ``round_idx``) | refused | refused |

The stacked executor, which steps all clients as one, hands a client with hooks of its own over to the sequential one.
"""

import difflib
import inspect
from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn

from fl_lightning.round.client import ClientModule

#: Called for one client after another, so by the sequential executor alone.
SEQUENTIAL = (
    "training_step",
    "predict_step",
    "configure_optimizers",
    "on_train_start",
    "on_train_end",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)

#: What to override instead of hooks that no executor calls.
INSTEAD = {
    "validation_step": "scores",
    "test_step": "scores",
    "optimizer_step": "build_optimizer, clip or constrain",
    "optimizer_zero_grad": "build_optimizer, clip or constrain",
    "lr_scheduler_step": "build_optimizer",
    "configure_gradient_clipping": "clip",
    "backward": "objective",
    "manual_backward": "objective",
    "forward": "output, or the net's own forward",
    "setup": "__init__",
    "training_epoch_end": "on_train_epoch_end",  # of former versions of Lightning
    "training_step_end": "on_train_batch_end",
    "validation_epoch_end": "scores",
    "test_epoch_end": "scores",
}

#: What else of Lightning's loops no executor calls, beside hooks whose names begin with ``on_``.
_UNCALLED = (
    "train_dataloader",
    "val_dataloader",
    "test_dataloader",
    "predict_dataloader",
    "transfer_batch_to_device",
    "configure_callbacks",
    "configure_model",
    "prepare_data",
    "teardown",
)

#: Methods of one client that the executors call with the arguments of those of :class:`ClientModule`.
_CALLED = (
    *SEQUENTIAL,
    "objective",
    "output",
    "loss",
    "scores",
    "score_table",
    "predictions",
    "build_optimizer",
    "clip",
    "constrain",
    "example_count",
)


def overridden(client: ClientModule, names: tuple[str, ...]) -> list[str]:
    """Which of the methods the client's class overrides, or has without its base class having them."""
    return [name for name in names if getattr(type(client), name, None) is not getattr(ClientModule, name, None)]


def own_loss(client: ClientModule) -> Callable[..., Any]:
    """The method of a client that says what its loss is: the outermost one that its class overrides."""
    names = overridden(client, ("training_step", "objective", "loss"))
    method: Callable[..., Any] = getattr(client, names[0] if names else "training_step")
    return method


def check_hooks(client: ClientModule) -> None:
    """Refuse a client with hooks that would be silently ignored.

    Raises:
        ValueError: It overrides a hook of Lightning's loops that no executor calls, or has one that there is not, steps
            by itself, or has a method that takes other arguments than it gets.
    """
    if not client.automatic_optimization:
        raise ValueError(
            "model.automatic_optimization is False, but an executor takes the steps: leave it True, and return the "
            "loss from training_step"
        )
    loops = [name for name in dir(type(client)) if name.startswith("on_")]
    names = dict.fromkeys([*INSTEAD, *_UNCALLED, *loops])
    ignored = overridden(client, tuple(name for name in names if name not in SEQUENTIAL))
    kind = type(client).__name__
    if ignored:
        name = ignored[0]
        near = [] if hasattr(ClientModule, name) else difflib.get_close_matches(name, SEQUENTIAL, n=1)
        advice = f"did you mean {near[0]}?" if near else "see the table in executors/hooks.py"
        if name in INSTEAD:
            advice = f"override {INSTEAD[name]} instead"
        raise ValueError(f"model: {kind} overrides {name}, which a federation never calls: {advice}")
    for name in overridden(client, _CALLED):
        check_parameters(getattr(client, name), getattr(ClientModule, name), f"model: {kind}.{name}")


def check_parameters(method: Callable[..., Any], base: Callable[..., Any], what: str) -> None:
    """Refuse an object's method that does not take what it is called with.

    Args:
        method: The bound method.
        base: The function of the base class that it overrides.
        what: What it is, for the message.

    Raises:
        ValueError: It takes other arguments.
    """
    expected = list(inspect.signature(base).parameters)
    try:
        inspect.signature(method).bind(*expected[1:])
    except TypeError as error:
        raise ValueError(
            f"{what} is called with ({', '.join(expected)}), but it takes others ({error}): give it these parameters"
        ) from error


def check_is_client(client: Any) -> None:
    """Check that an object is a client module.

    Raises:
        ValueError: It is a class, another LightningModule, a net, or something else.
    """
    if isinstance(client, ClientModule):
        return
    kind = client if isinstance(client, type) else type(client)
    if issubclass(kind, ClientModule):
        remedy = f"it is a class, give an instance of it, client={kind.__name__}()"
    elif issubclass(kind, LightningModule):
        remedy = (
            "derive it from fl_lightning.ClientModule, which has the net, loss and scores; it may have a "
            "training_step of its own"
        )
    elif issubclass(kind, nn.Module):
        remedy = "it is a net, give client=fl_lightning.ClientModule(net=...)"
    else:
        remedy = "give client=fl_lightning.ClientModule()"
    raise ValueError(f"client is {kind.__name__}, which is not a ClientModule: {remedy}")
