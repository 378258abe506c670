"""Layers that every client has for itself, since its features or its outputs mean something else than the others'.

They are found by the shapes of the net: a layer is a client's own if the shape of any of its parameters follows the
number of features, or that of outputs.
"""

import warnings

from torch import Size, nn

from fl_lightning.federation import ClientRegistry
from fl_lightning.models.fitting import fitted
from fl_lightning.models.plain import name_of
from fl_lightning.round.client import ClientModule, NetFactory


def keep_own_layers(model: ClientModule, registry: ClientRegistry, *, says: bool) -> None:
    """Find the clients' own layers, and let the client module keep them local.

    Args:
        model: Its net factories are known.
        registry: Whether features and outputs are the clients' own.
        says: Whether to say which they are.

    Raises:
        ValueError: No layer follows these numbers, or nets are given that are built already.

    Warns:
        UserWarning: Which layers are kept local, and why.
    """
    names: dict[str, None] = {}
    reasons = {"features": registry.own_inputs, "outputs": bool(registry.own_outputs)}
    for factory in model.net_factories:
        for what, own in reasons.items():
            if own:
                names |= dict.fromkeys(_following(factory, registry, what))
    model.own_layers = tuple(names)
    if names and says:
        whose = " and ".join(what for what, is_own in reasons.items() if is_own)
        warnings.warn(
            f"the clients have {whose} of their own, so that these parameters are kept local: {', '.join(names)}",
            stacklevel=2,
        )


def _following(factory: NetFactory, registry: ClientRegistry, what: str) -> list[str]:
    """The parameters of all layers in which the shape of one follows the number of features or of outputs."""
    if isinstance(factory, nn.Module):
        raise ValueError(
            f"model.net is a {name_of(factory)} that is built already, but the clients have {what} of their own: give "
            "its class, so that such layers can be found"
        )
    num_features, num_outputs = registry.num_features, registry.num_outputs
    if what == "outputs":
        others = _shapes(fitted(factory, num_features, num_outputs + 1))
    else:
        assert isinstance(num_features, int)  # what may be padded is a vector
        others = _shapes(fitted(factory, num_features + 1, num_outputs))
    shapes = _shapes(fitted(factory, num_features, num_outputs))
    layers = {name.rpartition(".")[0] for name, shape in shapes.items() if others.get(name) != shape}
    found = [name for name in shapes if name.rpartition(".")[0] in layers]
    if not found:
        raise ValueError(
            f"the clients have {what} of their own, but no layer of model.net has a shape that follows their number: "
            "choose another net"
        )
    return found


def _shapes(net: nn.Module) -> dict[str, Size]:
    return {name: parameter.shape for name, parameter in net.named_parameters()}
