"""Inputs of a plain module: how it is called with a client's graph or examples, and what it reads about the edges."""

import inspect
from collections.abc import Callable, Iterator
from inspect import Parameter
from typing import Any

from torch import nn

#: What ``forward`` may read about the edges, by parameter name; None if the data have none.
EDGE_INPUTS = ("edge_weight", "edge_attr")
#: What it may read about several graphs: the graph of each node, and how many there are.
GRAPH_INPUTS = ("batch", "batch_size")
#: What it may read after the features.
GIVEN = ("edge_index", *EDGE_INPUTS, *GRAPH_INPUTS)


class Inputs:
    """How a module is called.

    Attributes:
        takes_data: Whether it is called with a PyG ``Data``.
        edges: What it reads about the edges, and whether that is required.
        graphs: What it may read about several graphs.
        pools: Whether it is called with several graphs, and returns a row for each.
        copies: Whether it gets copies of the client's data, which it changes in place.
    """

    copies = False

    #: What its inputs are, and the shapes that it is to return.
    reads, returns = (
        "nodes of {} features",
        (
            "logits of shape (num_nodes, num_outputs), or a tuple of them and an embedding; for graphs, "
            "forward(x, edge_index, batch) returns (num_graphs, num_outputs)"
        ),
    )

    def __init__(self, net: nn.Module) -> None:
        names = parameters_of(net.forward)
        self.takes_data = names[:1] == ["data"]
        self.edges = {} if self.takes_data else edge_inputs(net)
        self.graphs = [name for name in GRAPH_INPUTS if name in names]
        self.pools = False

    @property
    def row(self) -> str:
        """What the module returns a row for."""
        return "graph" if self.pools else "node"

    def __call__(self, net: nn.Module, graph: Any) -> Any:
        """Call the module with a graph (:meth:`arguments`)."""
        first, others = self.arguments(net, graph)
        return net(first, **others)

    def arguments(self, net: nn.Module, graph: Any) -> tuple[Any, dict[str, Any]]:
        """The first argument of the module's ``forward``, and the others by name.

        Args:
            net: The module.
            graph: It has ``x``, ``edge_index`` and optionally edge weights and attributes; if the module pools, also
                ``batch`` and ``batch_size``.

        Raises:
            ValueError: ``forward`` requires something that the graph does not have.
        """
        edges = {name: self._given(getattr(graph, name, None)) for name in EDGE_INPUTS}
        x = self._given(graph.x)
        if self.takes_data:
            from torch_geometric.data import Data  # takes a second

            graphs = {"batch": graph.batch, "num_graphs": graph.batch_size} if self.pools else {}
            return Data(x=x, edge_index=graph.edge_index, **edges, **graphs), {}
        if missing := [name for name, is_needed in self.edges.items() if is_needed and edges[name] is None]:
            raise ValueError(f"{type(net).__name__}.forward needs {missing[0]}, which the clients' graphs do not have")
        graphs = {name: getattr(graph, name) for name in (self.graphs if self.pools else ())}
        return x, {"edge_index": graph.edge_index, **{name: edges[name] for name in self.edges}, **graphs}

    def _given(self, value: Any) -> Any:
        """An input, or a copy of it."""
        return value.clone() if self.copies and value is not None else value


class ExampleInputs(Inputs):
    """How a module is called that reads examples: with their inputs alone, (N, *X)."""

    reads, returns = (
        "examples of shape {}",
        "logits of shape (num_examples, num_outputs), or a tuple of them and an embedding",
    )
    row = "example"

    def __init__(self, net: nn.Module) -> None:
        if more := required_of(net.forward)[1:]:
            raise ValueError(
                f"{type(net).__name__}.forward needs {', '.join(more)}, which clients' examples do not have: it gets "
                "their inputs alone; for graphs it has a parameter edge_index"
            )
        self.takes_data, self.edges, self.graphs, self.pools = False, {}, [], False

    def __call__(self, net: nn.Module, examples: Any) -> Any:
        """Call the module with examples that have ``x``."""
        return net(self._given(examples.x))


def reads_graphs(net: nn.Module) -> bool:
    """Whether a module reads the edges of graphs, or a PyG ``Data``."""
    names = parameters_of(net.forward)
    return "edge_index" in names or names[:1] == ["data"]


def reads_examples(net: nn.Module) -> bool:
    """Whether a module reads the inputs of examples: the first parameter of ``forward`` is no ``batch``."""
    if reads_graphs(net) or type(net).__module__.startswith("fl_lightning."):
        return False
    first = next(iter(_signature(net.forward)), None)
    return first is not None and first.name != "batch" and "Batch" not in str(first.annotation)


def check_inputs(net: nn.Module) -> None:
    """Refuse modules that would cache one client's graph, or need something that clients' graphs do not have.

    Raises:
        ValueError: It is such a module.
    """
    for name, module in net.named_modules():
        if getattr(module, "cached", False) is True:
            where = f"{name} ({type(module).__name__})" if name else type(module).__name__
            raise ValueError(f"{where} keeps the first graph that it sees for all others: leave out cached=True")
    first, *parameters = _signature(net.forward)
    if first.name in GIVEN:
        raise ValueError(
            f"{type(net).__name__}.forward begins with {first.name}: let it begin with the features, as "
            "forward(x, edge_index) does"
        )
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_ONLY)
    others = [p.name for p in parameters if p.kind in plain and p.default is p.empty and p.name not in GIVEN]
    if others:
        raise ValueError(
            f"{type(net).__name__}.forward needs {', '.join(others)}, which clients' graphs do not have: it may take "
            f"features, {', '.join(GIVEN)}, and parameters with defaults"
        )


def edge_inputs(net: nn.Module) -> dict[str, bool]:
    """What a module's ``forward`` reads about the edges, and whether that is required.

    A PyG layer or model that was made without ``edge_dim``, or declares that it takes none, does not read them. Of a
    ``forward`` of the user's own the layers say nothing: it may read the edges itself.
    """
    parameters = {parameter.name: parameter for parameter in _signature(net.forward)}
    result = {name: parameters[name].default is inspect.Parameter.empty for name in EDGE_INPUTS if name in parameters}
    if not type(net).forward.__module__.startswith(("torch_geometric.nn.conv.", "torch_geometric.nn.models.")):
        return result
    for name in EDGE_INPUTS:
        if getattr(net, f"supports_{name}", True) is False:
            result.pop(name, None)
    dimensions = [module.edge_dim for module in net.modules() if hasattr(module, "edge_dim")]
    if dimensions and all(dimension is None for dimension in dimensions):
        result.pop("edge_attr", None)
    return result


def edge_widths(net: nn.Module) -> Iterator[int]:
    """Possible widths of the edge attributes that a module reads: those that its layers take."""
    named = ("edge_dim", "in_edge_channels", "dim", "in_features", "in_channels")
    values = (vars(module).get(name) for name in named for module in net.modules())
    yield from dict.fromkeys([*(v for v in values if isinstance(v, int) and v > 0), 1])


def parameters_of(function: Callable[..., Any]) -> list[str]:
    """Names of a function's parameters; empty if they are unknown."""
    return [parameter.name for parameter in _signature(function)]


def takes_widths_by_name(function: Callable[..., Any]) -> bool:
    """Whether it has ``in_channels`` and ``out_channels``, as PyG's models do, whose second argument is another."""
    return {"in_channels", "out_channels"} <= set(parameters_of(function))


def positional_of(function: Callable[..., Any]) -> list[str]:
    """Names of the parameters that can be given by their place; empty if they are unknown."""
    return [p.name for p in _signature(function) if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def is_variadic(function: Callable[..., Any]) -> bool:
    """Whether it takes any number of arguments by their place, or it is unknown which."""
    signature = _signature(function)
    return (not signature and not inspect.isclass(function)) or any(p.kind is p.VAR_POSITIONAL for p in signature)


def required_of(function: Callable[..., Any]) -> list[str]:
    """Names of a function's parameters without a default; empty if they are unknown."""
    variadic = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return [p.name for p in _signature(function) if p.default is p.empty and p.kind not in variadic]


def _signature(function: Callable[..., Any]) -> list[Parameter]:
    """The parameters of a function; those that a ``Sequential`` of PyG was given, whose ``forward`` takes any."""
    owner: Any = getattr(function, "__self__", None)
    if type(owner).__module__ == "torch_geometric.nn.sequential":
        return [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in owner.signature.param_dict]
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # not written in Python
        return []
