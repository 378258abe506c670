"""From what a user gives as a net to the net of a client."""

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fl_lightning.models.plain import PlainNet, made
from fl_lightning.models.plain_examples import PlainExampleNet
from fl_lightning.models.plain_inputs import reads_examples, reads_graphs


def fitted(factory: Callable[..., nn.Module], num_features: Any, num_outputs: int) -> nn.Module:
    """Build a net, and wrap it if it is a plain module of PyG or PyTorch.

    Args:
        factory: A function of the widths of inputs and outputs; they are passed by name if it has ``in_channels`` and
            ``out_channels``, as PyG's models do, whose second argument is another. Or a net, which is copied: its
            weights are those that all clients start from.
        num_features: Width of the inputs, or the shape of one example.
        num_outputs: Width of the outputs.

    Raises:
        ValueError: It is not a net, does not return predictions, or is a LightningModule with a training of its own.
    """
    if isinstance(factory, nn.Module):
        net = copy.deepcopy(factory).to(torch.get_default_dtype())  # which the run's precision sets
    else:
        net = made(factory, num_features, num_outputs)
    _check_trains_nothing(net)
    if reads_graphs(net):
        return PlainNet(net, num_features, num_outputs)
    return PlainExampleNet(net, num_features, num_outputs) if reads_examples(net) else net


def _check_trains_nothing(net: nn.Module) -> None:
    """Refuse a LightningModule whose hooks would be ignored: of a net only ``forward`` is called.

    Raises:
        ValueError: It overrides hooks.
    """
    kind = type(net)
    bases = [each for each in kind.__mro__ if each.__name__ == "LightningModule"]  # of lightning or pytorch_lightning
    if not bases:
        return
    own = {name for each in kind.__mro__[: kind.__mro__.index(bases[0])] for name in vars(each)}
    ignored = sorted(own & set(dir(bases[0])) - set(dir(nn.Module)))
    if ignored := [name for name in ignored if name[0] != "_" and inspect.isfunction(getattr(kind, name))]:
        raise ValueError(
            f"{kind.__name__} is a LightningModule with {', '.join(ignored)}, which a net never runs: give an "
            "nn.Module with its layers and forward as net, and put its loss, training_step and configure_optimizers "
            "into a class derived from fl_lightning.ClientModule"
        )
