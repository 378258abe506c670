"""What a plain PyG module takes: how it is called with a client's graph, and what it reads of the edges."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

#: What ``forward`` may read of the edges, by the names of its parameters; None where the data have none.
EDGE_INPUTS = ("edge_weight", "edge_attr")
#: What it may read after the features.
GIVEN = ("edge_index", *EDGE_INPUTS)


class Inputs:
    """How a module is called.

    Attributes:
        takes_data: With a PyG ``Data``.
        edges: What it reads of the edges, and whether it cannot do without.
    """

    def __init__(self, net: nn.Module) -> None:
        self.takes_data = parameters_of(net.forward)[:1] == ["data"]
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


def check_inputs(net: nn.Module) -> None:
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
    result = {name: parameters[name].default is inspect.Parameter.empty for name in EDGE_INPUTS if name in parameters}
    for name in EDGE_INPUTS:
        if getattr(net, f"supports_{name}", True) is False:
            result.pop(name, None)
    dimensions = [module.edge_dim for module in net.modules() if hasattr(module, "edge_dim")]
    if dimensions and all(dimension is None for dimension in dimensions):
        result.pop("edge_attr", None)
    return result


def edge_widths(net: nn.Module) -> Iterator[int]:
    """How wide the attributes of edges may be that a module reads: as wide as what one of its layers takes."""
    named = ("edge_dim", "in_edge_channels", "dim", "in_features", "in_channels")
    values = (vars(module).get(name) for name in named for module in net.modules())
    yield from dict.fromkeys([*(v for v in values if isinstance(v, int) and v > 0), 1])


def parameters_of(function: Callable[..., Any]) -> list[str]:
    """Names of a function's parameters; none where they cannot be told."""
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of what is not written in Python
        return []
