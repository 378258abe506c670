"""Nets that know nothing of this package: plain PyG modules, and what the package needs to know of them.

A net of this package maps a batch to a ``NetOutput``. A net of a user's, or of PyG's, maps ``(x, edge_index)`` (or a
PyG ``data``) to logits, to logits and an embedding, or to an embedding alone; :func:`fitted` finds out which and wraps
it. It computes on one client's graph at a time, so the sequential executor runs it.
"""

import importlib
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.models.output import NetOutput


class PlainNet(nn.Module):
    """A plain PyG module as a client's net, whose parameters are ``net.*`` and, of what makes the logits, ``head.*``.

    The head is the module's last layer where that makes the logits, else a linear one that reads its output.

    Args:
        net: Maps features (N, F) and edges (2, E) to (N, any width), or to a tuple of logits and an embedding.
        num_features: Width of the features.
        num_outputs: Width of the logits.

    Shapes:
        batch: Of one client. logits ``(N, num_outputs)``; embedding: what the module's last layer reads, where the
        logits are the module's own; else what the head reads.

    Raises:
        ValueError: The module does not compute one row of numbers for each node.
    """

    #: The sequential executor alone gives a net one client's graph.
    needs_plain_graph = True

    def __init__(self, net: nn.Module, num_features: int, num_outputs: int) -> None:
        super().__init__()
        self.net = net
        self.takes_data = _first_parameter(net) == "data"
        self.takes_edge_weight, self.takes_edge_attr = (
            self.takes_data or name in _names(net.forward) for name in ("edge_weight", "edge_attr")
        )
        #: Whether the head is the module's own last layer; what it reads is the embedding.
        self.has_own_head = False
        self.head: nn.Module | None = None
        output = self._try(num_features)
        if not isinstance(output, tuple) and output.shape[-1] != num_outputs:
            self.head = nn.Linear(output.shape[-1], num_outputs)
        elif not isinstance(output, tuple):
            if last := self._find_last_layer(num_features, num_outputs):
                self.has_own_head, self.head = True, net.get_submodule(last)
                net.set_submodule(last, _Elsewhere(self.head))
        elif output[0].shape[-1] != num_outputs:
            raise ValueError(
                f"{type(net).__name__} returns {output[0].shape[-1]} logits of each node, but there are {num_outputs} "
                "outputs"
            )

    def forward(self, batch: Any) -> NetOutput:
        """Run the module on the client's graph."""
        if self.has_own_head:
            return self._watched(batch.plain)
        found = self._run(batch.plain)
        if self.head is not None:
            return NetOutput(self.head(found), found)
        return NetOutput(*found[:2]) if isinstance(found, tuple) else NetOutput(found, found)

    def _watched(self, graph: Any) -> NetOutput:
        """Run the module and see what its last layer reads."""
        seen: list[Any] = []
        assert self.head is not None
        hook = self.head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            logits = self._run(graph)
        finally:
            hook.remove()
        return NetOutput(logits, seen[-1])

    def _run(self, graph: Any) -> Any:
        return self.net(graph) if self.takes_data else self.net(graph.x, graph.edge_index)

    def _try(self, num_features: int) -> Any:
        """What the module returns for three nodes on a path."""
        weight = next(
            (p for p in self.net.parameters() if not isinstance(p, nn.parameter.UninitializedParameter)), None
        )
        x_NF = torch.ones(3, num_features, dtype=None if weight is None else weight.dtype)
        device = torch.device("cpu") if weight is None else weight.device
        edges_2E = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]], device=device)
        training = self.net.training
        self.net.eval()
        with torch.no_grad(), torch.random.fork_rng([]):
            found = self._run(SimpleNamespace(x=x_NF.to(device), edge_index=edges_2E, batch=None, edge_attr=None))
        self.net.train(training)
        parts = found[:2] if isinstance(found, tuple) else (found,)
        if not parts or not all(isinstance(part, Tensor) and part.dim() == 2 and len(part) == 3 for part in parts):
            shape = [tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__ for part in parts]
            raise ValueError(
                f"{type(self.net).__name__} returns {shape} for 3 nodes: return logits of shape (num_nodes, "
                "num_outputs), or a tuple of them and an embedding"
            )
        return tuple(parts) if len(parts) > 1 else parts[0]

    def _find_last_layer(self, num_features: int, num_outputs: int) -> str:
        """Name of the outermost layer that ends last, if it makes outputs of the logits' width; else empty."""
        ended: list[str] = []

        def note(name: str, inputs: tuple[Any, ...], output: Any) -> None:
            read = bool(inputs) and isinstance(inputs[0], Tensor) and inputs[0].dim() == 2
            ended.append(name if read and isinstance(output, Tensor) and output.shape[-1] == num_outputs else "")

        hooks = [
            layer.register_forward_hook(lambda _, inputs, output, name=name: note(name, inputs, output))
            for name, layer in self.net.named_modules()
            if name and next(layer.parameters(), None) is not None
        ]
        self._try(num_features)
        for hook in hooks:
            hook.remove()
        return ended[-1] if ended else ""


class _Elsewhere(nn.Module):
    """Stands where a layer was taken from, and calls it; its parameters have one name, where the layer is now."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = (layer,)  # in a tuple, which is not registered

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.layer[0](*inputs, **named)

    def __getattr__(self, name: str) -> Any:
        if "layer" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.layer[0], name)


def fitted(factory: Callable[..., nn.Module], num_features: Any, num_outputs: int) -> nn.Module:
    """Build a net, and wrap it where it is a plain PyG module.

    Args:
        factory: Called with the widths of inputs and outputs; by name where it has ``in_channels`` and
            ``out_channels``, as PyG's models have, whose second argument is another.
        num_features: Width of the inputs, or the shape of one example.
        num_outputs: Width of the outputs.

    Raises:
        ValueError: It is no net, or returns what is no prediction.
    """
    net = _made(factory, num_features, num_outputs)
    return PlainNet(net, num_features, num_outputs) if _is_plain(net) else net


def _made(factory: Callable[..., Any], num_features: Any, num_outputs: int, **settings: Any) -> nn.Module:
    if {"in_channels", "out_channels"} <= set(_names(factory)):
        net = factory(in_channels=num_features, out_channels=num_outputs, **settings)
    else:
        net = factory(num_features, num_outputs, **settings)
    if not isinstance(net, nn.Module):
        raise ValueError(f"it makes a {type(net).__name__}, which is no torch.nn.Module")
    return net


def _is_plain(net: nn.Module) -> bool:
    names = _names(net.forward)
    return "edge_index" in names or names[:1] == ["data"]


def _first_parameter(net: nn.Module) -> str:
    return next(iter(_names(net.forward)), "")


def _names(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of what is not written in Python
        return []


class PyGNet(PlainNet):
    """A class of PyG's models, or of your own, by its path: for configurations.

    Args:
        in_channels: Width of the features.
        out_channels: Width of the logits.
        architecture: Path of the class, for example ``torch_geometric.nn.GraphSAGE``.
        arguments: Its other settings, for example ``{hidden_channels: 64, num_layers: 2}``.

    Raises:
        ValueError: There is no such class, or it does not take the settings.
    """

    def __init__(
        self, in_channels: int, out_channels: int, *, architecture: str, arguments: dict[str, Any] | None = None
    ) -> None:
        module, _, name = architecture.rpartition(".")
        try:
            made = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"architecture {architecture!r} cannot be imported: {error}") from error
        net = _made(made, in_channels, out_channels, **(arguments or {}))
        if not _is_plain(net):
            raise ValueError(f"{architecture} takes no edge_index: give it as model.net itself")
        super().__init__(net, in_channels, out_channels)
