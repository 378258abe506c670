"""Nets that know nothing of this package: plain PyG modules, and what the package needs to know of them.

A net of this package maps a batch to a ``NetOutput``. A net of a user's, or of PyG's, maps ``(x, edge_index)`` (or a
PyG ``data``) to logits, to logits and an embedding, or to an embedding alone; :func:`fitted` finds out which and wraps
it. It computes on one client's graph at a time, so the sequential executor runs it.
"""

import contextlib
import copy
import importlib
import inspect
import traceback
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.models.batch_norm import adopt, adopt_statistics
from fl_lightning.models.output import NetOutput

#: What ``forward`` may read of the edges, by the names of its parameters; None where the data have none.
EDGE_INPUTS = ("edge_weight", "edge_attr")
#: What it may read after the features.
GIVEN = ("edge_index", *EDGE_INPUTS)
#: The head that is added to a module whose output is no row of logits.
ADDED_HEAD = "head"


class PlainNet(nn.Module):
    """A plain PyG module as a client's net. Its parameters have the names that they have in the module.

    Where the module's output is not as wide as the logits, a linear layer that reads it makes them; its parameters are
    ``head.weight`` and ``head.bias``. ``forward`` of the module is given, beside features and edges, ``edge_weight``
    and ``edge_attr`` if it has parameters of these names, or all of these in one PyG ``Data`` if its first one is
    ``data``.

    Args:
        net: Maps features (N, F) and edges (2, E) to (N, any width), or to a tuple of logits and an embedding.
        num_features: Width of the features.
        num_outputs: Width of the logits.

    Attributes:
        head_names: The parameters of the last layer, which makes the logits: the added head's, or the module's own;
            empty where no layer makes them.
        embedding_channels: Width of the embedding.
        takes_edge_weight: Whether ``forward`` reads the weights of edges.
        takes_edge_attr: Whether it reads their attributes.

    Shapes:
        batch: Of one client. logits ``(N, num_outputs)``; embedding: what the module's last layer reads, where the
        logits are the module's own; else what the head reads.

    Raises:
        ValueError: The module does not compute one row of numbers for each node, or is one that clients cannot have.
    """

    def __init__(self, net: nn.Module, num_features: int, num_outputs: int) -> None:
        super().__init__()
        _check(net)
        adopt_statistics(net)
        self._net = (net,)  # in a tuple, which is not registered: its parts are this module's own
        self._inputs = _Inputs(net)
        self.takes_edge_weight, self.takes_edge_attr = (
            self._inputs.takes_data or name in self._inputs.edges for name in EDGE_INPUTS
        )
        self._head = ""
        trial = _Trial(net, self._inputs, num_features)
        output = trial.run()
        trial.adopt_buffers()
        self._adopted: tuple[str, ...] = getattr(net, "_adopted", ())
        self._parameters, self._buffers = net._parameters, net._buffers
        self._modules = dict(net._modules)
        logits = output[0] if isinstance(output, tuple) else output
        if logits.shape[-1] == num_outputs:
            self._head = trial.last_layer(num_outputs)
        elif isinstance(output, tuple):
            raise ValueError(
                f"{self.plain_name} returns {logits.shape[-1]} logits of each node, but there are {num_outputs} outputs"
            )
        elif ADDED_HEAD in self._modules or ADDED_HEAD in self._parameters:
            raise ValueError(
                f"{self.plain_name} returns {logits.shape[-1]} numbers of each node where there are {num_outputs} "
                f"outputs, and the layer that would be added is called {ADDED_HEAD}, as a part of it already is: "
                "rename that part, or return as many numbers as there are outputs"
            )
        else:
            self._modules[ADDED_HEAD] = nn.Linear(logits.shape[-1], num_outputs).to(logits)
            self._head = ADDED_HEAD
        if taken := [name for name in (*self._modules, *self._parameters, *self._buffers) if hasattr(PlainNet, name)]:
            raise ValueError(f"{self.plain_name} has a part called {taken[0]}, which is taken: rename it")
        self.train(net.training)
        self.embedding_channels: int = trial.embedding_of(self).shape[-1]

    @property
    def plain_name(self) -> str:
        """Class of the module."""
        return type(self._net[0]).__name__

    @property
    def head_names(self) -> tuple[str, ...]:
        """The parameters of the last layer."""
        return tuple(name for name, _ in self.named_parameters() if self._head and name.startswith(f"{self._head}."))

    def train(self, mode: bool = True) -> "PlainNet":
        """Put the module itself, which its parts do not know, into the mode too."""
        self._net[0].train(mode)
        return super().train(mode)

    def forward(self, batch: Any) -> NetOutput:
        """Run the module on the client's graph; in training, what it draws at random follows from the batch's key."""
        with _drawn_by(batch.key) if self.training else contextlib.nullcontext():
            return self._run(batch.plain)

    def _run(self, graph: Any) -> NetOutput:
        net = self._net[0]
        if not self._head:
            found = self._inputs(net, graph)
            return NetOutput(*found[:2]) if isinstance(found, tuple) else NetOutput(found, found)
        head = self.get_submodule(self._head)
        if self._head not in net._modules and "." not in self._head:
            found = self._inputs(net, graph)
            return NetOutput(head(found), found)
        seen: list[Any] = []
        hook = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            found = self._inputs(net, graph)
        finally:
            hook.remove()
        return NetOutput(*found[:2]) if isinstance(found, tuple) else NetOutput(found, seen[-1])


@contextlib.contextmanager
def _drawn_by(key: Tensor) -> Iterator[None]:
    """Let torch's generators draw what follows from a key, and put them back afterwards."""
    with torch.random.fork_rng([key.device] if key.is_cuda else []):
        torch.manual_seed(int(key))
        yield


class _Inputs:
    """How a module is called.

    Attributes:
        takes_data: With a PyG ``Data``.
        edges: What it reads of the edges, and whether it cannot do without.
    """

    def __init__(self, net: nn.Module) -> None:
        self.takes_data = _names(net.forward)[:1] == ["data"]
        self.edges = {} if self.takes_data else edge_inputs(net)

    def __call__(self, net: nn.Module, graph: Any) -> Any:
        """What the module makes of a graph with ``x``, ``edge_index`` and, maybe, ``edge_weight`` and ``edge_attr``.

        Raises:
            ValueError: ``forward`` cannot do without what the graph does not have.
        """
        edges = {name: getattr(graph, name, None) for name in EDGE_INPUTS}
        if self.takes_data:
            from torch_geometric.data import Data  # takes a second

            return net(Data(x=graph.x, edge_index=graph.edge_index, **edges))
        if missing := [name for name, is_needed in self.edges.items() if is_needed and edges[name] is None]:
            raise ValueError(f"{type(net).__name__}.forward needs {missing[0]}, which the clients' graphs do not have")
        return net(graph.x, edge_index=graph.edge_index, **{name: edges[name] for name in self.edges})


class _Graph:
    """Three nodes on a path."""

    def __init__(self, num_features: int, *, like: Tensor | None, edge_width: int | None) -> None:
        to: dict[str, Any] = {} if like is None else {"dtype": like.dtype, "device": like.device}
        self.x = torch.linspace(-1, 1, 3 * num_features, **to).view(3, num_features)
        self.edge_index = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]], device=self.x.device)
        self.edge_weight = None if edge_width is None else self.x.new_ones(4)
        self.edge_attr = None if edge_width is None else self.x.new_ones(4, edge_width)


class _Trial:
    """Calls copies of a module on three nodes, to see what it is like."""

    def __init__(self, net: nn.Module, inputs: _Inputs, num_features: int) -> None:
        self.net, self.inputs, self.name = net, inputs, type(net).__name__
        ready = [p for p in net.parameters() if not isinstance(p, nn.parameter.UninitializedParameter)]
        is_lazy = len(ready) < sum(1 for _ in net.parameters())
        like, failures = next(iter(ready), None), []
        for width in (None, *(_edge_widths(net) if inputs.edges or inputs.takes_data else ())):
            self.graph = _Graph(num_features, like=like, edge_width=width)
            try:
                self._call(net if is_lazy else copy.deepcopy(net))
            except Exception as error:  # it is its user's code
                failures.append(error)
            else:
                return
        why = failures[0]
        said = str(why) or traceback.extract_tb(why.__traceback__)[-1].line  # an assertion may say nothing
        others = [] if inputs.takes_data else [n for n in _names(net.forward)[1:] if n not in GIVEN]
        missing = f"; it was not given {', '.join(others)}, which clients' graphs do not have" if others else ""
        raise ValueError(
            f"{self.name} cannot compute on nodes of {num_features} features ({type(why).__name__}: {said}){missing}"
        ) from why

    def _call(self, net: nn.Module, *, training: bool = False) -> Any:
        mode = net.training
        net.train(training)
        try:
            with torch.no_grad(), torch.random.fork_rng([]):
                return self.inputs(net, self.graph)
        finally:
            net.train(mode)

    def run(self) -> Any:
        """What the module returns: a tensor or a pair of them."""
        found = self._call(copy.deepcopy(self.net))
        parts = found[:2] if isinstance(found, tuple) else (found,)
        if not parts or not all(isinstance(part, Tensor) and part.dim() == 2 and len(part) == 3 for part in parts):
            shape = [tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__ for part in parts]
            raise ValueError(
                f"{self.name} returns {shape} for 3 nodes: return logits of shape (num_nodes, "
                "num_outputs), or a tuple of them and an embedding"
            )
        return tuple(parts) if len(parts) > 1 else parts[0]

    def adopt_buffers(self) -> None:
        """Make buffers that training changes parameters without gradient, as running statistics are.

        Raises:
            ValueError: One is no number with a fraction, or is not changed in place.
        """
        if not (changing := self._changing()):
            return
        for name, value in changing.items():
            if not value.is_floating_point():
                raise ValueError(
                    f"{self.name} counts in its buffer {name} while it trains, and only numbers with a "
                    "fraction can be kept with a client's parameters: leave the counter out"
                )
            adopt(self.net, name)
        try:
            self._call(copy.deepcopy(self.net), training=True)
        except TypeError as error:
            raise ValueError(
                f"{self.name} replaces its buffer {', '.join(changing)} while it trains: change it in "
                "place (self.name.copy_(...)), so that it can be kept with a client's parameters"
            ) from error

    def _changing(self) -> dict[str, Tensor]:
        if not dict(self.net.named_buffers()):
            return {}
        copied = copy.deepcopy(self.net)
        self._call(copied, training=True)
        now = dict(copied.named_buffers())
        before = dict(self.net.named_buffers())
        return {
            name: value
            for name, value in before.items()
            if name not in now or not torch.equal(now[name].nan_to_num(), value.nan_to_num())
        }

    def embedding_of(self, wrapped: PlainNet) -> Tensor:
        """The embedding of the three nodes."""
        with torch.no_grad(), torch.random.fork_rng([]):
            found: NetOutput = copy.deepcopy(wrapped).eval()(SimpleNamespace(plain=self.graph))
        return found.embedding

    def last_layer(self, num_outputs: int) -> str:
        """Name of the layer that makes the logits; empty if none does.

        It is the outermost one that ends last, reads a row for each node and leaves other parameters outside.
        """
        ended: list[tuple[str, bool]] = []

        def note(name: str, inputs: tuple[Any, ...], output: Any) -> None:
            read = bool(inputs) and isinstance(inputs[0], Tensor) and inputs[0].shape[:-1] == self.graph.x.shape[:1]
            ended.append((name, read and isinstance(output, Tensor) and output.shape[-1] == num_outputs))

        net = copy.deepcopy(self.net)
        layers = {
            name: layer for name, layer in net.named_modules() if name and next(layer.parameters(), None) is not None
        }
        for name, layer in layers.items():
            layer.register_forward_hook(lambda _, inputs, output, name=name: note(name, inputs, output))
        self._call(net)
        total = sum(1 for _ in net.parameters())
        last = ""
        for name, makes_logits in reversed(ended):
            if last and not name.startswith(f"{last}."):
                break
            if not makes_logits:
                return ""
            last = name
            if sum(1 for _ in layers[name].parameters()) < total:
                return name
        return last


def _check(net: nn.Module) -> None:
    """Refuse modules that would remember one client's graph, or need what clients' graphs do not have.

    Raises:
        ValueError: It is one.
    """
    for name, module in net.named_modules():
        if getattr(module, "cached", False) is True:
            where = f"{name} ({type(module).__name__})" if name else type(module).__name__
            raise ValueError(f"{where} keeps the first graph that it sees for all others: leave out cached=True")
    parameters = list(inspect.signature(net.forward).parameters.values())[1:]
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_ONLY)
    others = [p.name for p in parameters if p.kind in plain and p.default is p.empty and p.name not in GIVEN]
    if others:
        raise ValueError(
            f"{type(net).__name__}.forward needs {', '.join(others)}, which clients' graphs do not have: it may take "
            f"features, {', '.join(GIVEN)}, and what has a default"
        )


def edge_inputs(net: nn.Module) -> dict[str, bool]:
    """What a module's ``forward`` reads of the edges, and whether it cannot do without.

    A layer or a model of PyG's that was made without ``edge_dim``, or that says it takes none, does not read them.
    """
    parameters = inspect.signature(net.forward).parameters
    found = {name: parameters[name].default is inspect.Parameter.empty for name in EDGE_INPUTS if name in parameters}
    for name in EDGE_INPUTS:
        if getattr(net, f"supports_{name}", True) is False:
            found.pop(name, None)
    dimensions = [module.edge_dim for module in net.modules() if hasattr(module, "edge_dim")]
    if dimensions and all(dimension is None for dimension in dimensions):
        found.pop("edge_attr", None)
    return found


def _edge_widths(net: nn.Module) -> Iterator[int]:
    """How wide the attributes of edges may be that a module reads: as wide as what one of its layers takes."""
    named = ("edge_dim", "in_edge_channels", "dim", "in_features", "in_channels")
    values = (vars(module).get(name) for name in named for module in net.modules())
    yield from dict.fromkeys([*(v for v in values if isinstance(v, int) and v > 0), 1])


def plain_parts(net: nn.Module) -> list[PlainNet]:
    """The plain PyG modules in a net; they compute on one client's graph at a time."""
    return [part for part in net.modules() if isinstance(part, PlainNet)]


def name_of(net: nn.Module) -> str:
    """Class of a net, or of the user's module in it."""
    return net.plain_name if isinstance(net, PlainNet) else type(net).__name__


def fitted(factory: Callable[..., nn.Module], num_features: Any, num_outputs: int) -> nn.Module:
    """Build a net, and wrap it where it is a plain PyG module.

    Args:
        factory: Called with the widths of inputs and outputs; by name where it has ``in_channels`` and
            ``out_channels``, as PyG's models have, whose second argument is another. Or a net, which is copied: its
            weights are those that all clients start from.
        num_features: Width of the inputs, or the shape of one example.
        num_outputs: Width of the outputs.

    Raises:
        ValueError: It is no net, or returns what is no prediction.
    """
    net = copy.deepcopy(factory) if isinstance(factory, nn.Module) else _made(factory, num_features, num_outputs)
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
