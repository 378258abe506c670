"""Nets that do not depend on this package: plain PyG modules, and what the package needs to know about them.

A net of this package maps a ``batch`` to a ``NetOutput``. A user's or PyG's net maps ``(x, edge_index)`` (for whole
graphs ``(x, edge_index, batch)``, or a PyG ``data``) to logits, to logits and an embedding, or to an embedding alone;
``fitting.py`` finds out which and wraps it, and likewise nets for examples without graphs (``plain_examples.py``).
Its layers are exchanged for ones that compute on a stack of clients, with the same parameters (``models/stacked``);
what else it computes runs under ``torch.vmap``. Where that is impossible, :attr:`PlainNet.why_alone` says why, and it
computes on one client's graph at a time.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl_lightning.batches.graph_sets import GraphSetBatch
from fl_lightning.batches.graphs import GraphBatch
from fl_lightning.kernels.layout import by_columns
from fl_lightning.models.batch_norm import adopt_statistics
from fl_lightning.models.output import NetOutput
from fl_lightning.models.plain_inputs import (
    EDGE_INPUTS,
    Inputs,
    check_inputs,
    is_variadic,
    positional_of,
    reads_graphs,
    required_of,
    takes_widths_by_name,
)
from fl_lightning.models.plain_trial import Trial

#: The head that is added to a module whose output is not as wide as the logits.
ADDED_HEAD = "head"


class PlainNet(nn.Module):
    """A plain PyG module as a client's net. Its parameters keep the names that they have in the module.

    If the module's output is not as wide as the logits, a linear layer is added; its parameters are ``head.weight`` and
    ``head.bias``. In addition to features and edges, ``forward`` of the module gets ``edge_weight`` and ``edge_attr``
    if it has parameters of these names, or all of these in one PyG ``Data`` if its first parameter is ``data``.

    A module for whole graphs pools: it has a parameter ``batch``, the graph of each node (N,), and returns a row for
    each graph. It may also have ``batch_size``, the number of graphs (``data.num_graphs``).

    Args:
        net: Maps features (N, F) and edges (2, E) to (N, any width), or to a tuple of logits and an embedding; if it
            pools, to (G, any width).
        num_features: Width of the features.
        num_outputs: Width of the logits.

    Attributes:
        head_names: The parameters of the last layer, which computes the logits: those of the added head or of the
            module itself; empty if no layer computes them.
        embedding_channels: Width of the embedding.
        takes_edge_weight: Whether ``forward`` reads the weights of edges.
        takes_edge_attr: Whether it reads their attributes.
        why_alone: Why it computes on one client's graph at a time; empty if it computes on a stack of clients.
        takes_stacks: Whether it computes on a stack without ``vmap``, as a net of known layers alone does.
        has_dropout: Whether dropout drops anything in training.
        transposed: Weights that it multiplies with transposed, on a stack.
        pools: Whether its outputs are of graphs; it is then for tasks on graphs alone (``needs_graph_examples``).

    Shapes:
        batch: Of one client, also under ``vmap``, or a stack. logits ``(N, num_outputs)``; embedding: the input of the
        module's last layer if the logits are the module's own, else the input of the head. If it pools, both have G
        rows.

    Raises:
        ValueError: The module does not return one row of numbers for each node or graph, or cannot be a client's net.
    """

    def __init__(self, net: nn.Module, num_features: Any, num_outputs: int) -> None:
        super().__init__()
        self._inputs = self._inputs_of(net)
        self._net = (net,)  # in a tuple, so that it is not registered: its parts belong to this module
        self.takes_edge_weight, self.takes_edge_attr = (
            self._inputs.takes_data or name in self._inputs.edges for name in EDGE_INPUTS
        )
        self._head = ""
        trial = Trial(net, self._inputs, num_features)  # after which lazy layers have their parameters
        adopt_statistics(net)
        output = trial.run()
        self._inputs.copies = trial.changes_inputs()
        self.pools = self.needs_graph_examples = self._inputs.pools
        row = self._inputs.row
        trial.adopt_buffers()
        self._adopted: tuple[str, ...] = getattr(net, "_adopted", ())
        self._parameters, self._buffers = net._parameters, net._buffers
        self._modules = dict(net._modules)
        logits = output[0] if isinstance(output, tuple) else output
        if logits.shape[-1] == num_outputs:
            self._head = trial.last_layer(num_outputs)
        elif isinstance(output, tuple):
            raise ValueError(
                f"{self.plain_name} returns {logits.shape[-1]} logits per {row}, but there are {num_outputs} outputs"
            )
        elif ADDED_HEAD in self._modules or ADDED_HEAD in self._parameters:
            raise ValueError(
                f"{self.plain_name} returns {logits.shape[-1]} numbers per {row}, but there are {num_outputs} "
                f"outputs, and the layer that would be added is called {ADDED_HEAD}, like a part of it: "
                "rename that part, or return as many numbers as there are outputs"
            )
        else:
            self._modules[ADDED_HEAD] = nn.Linear(logits.shape[-1], num_outputs).to(logits)
            self._head = ADDED_HEAD
        if taken := [name for name in (*self._modules, *self._parameters, *self._buffers) if hasattr(PlainNet, name)]:
            raise ValueError(f"{self.plain_name} has a part called {taken[0]}, which is taken: rename it")
        self._stacked: tuple[nn.Module, ...] = ()
        self.why_alone, self.takes_stacks, self.has_dropout = "it has not been tried", False, True
        self.train(net.training)
        self.embedding_channels: int = trial.embedding_of(self).shape[-1]
        self._stack(num_features, trial)

    @staticmethod
    def _inputs_of(net: nn.Module) -> Inputs:
        check_inputs(net)
        return Inputs(net)

    def _stack(self, num_features: Any, trial: Trial) -> None:
        """Exchange the layers, and try them."""
        from fl_lightning.models.stacked.exchange import exchanged, foreign, linear_weights
        from fl_lightning.models.stacked.functions import NotStackable
        from fl_lightning.models.stacked.trial import try_on_stack

        self.why_alone = ""
        try:
            self._stacked = (exchanged(self._net[0], self._head, pools=self.pools),)
            self.takes_stacks = not self.pools and not any(foreign(self._stacked[0]))
            *others, fullest = trial.edge_data()
            for edges in (fullest,) if self.takes_stacks else (*others, fullest):
                try_on_stack(self, num_features, has_numbers=trial.has_numbers, **edges)
        except NotStackable as error:
            self._stacked, self.takes_stacks, self.why_alone = (), False, str(error)
        self.transposed: tuple[str, ...] = () if self.why_alone else linear_weights(self)
        self.train(self.training)

    @property
    def stacked_net(self) -> nn.Module:
        """The module with its layers exchanged."""
        return self._stacked[0]

    @property
    def plain_module(self) -> nn.Module:
        """The module itself, also if a head was added."""
        return self._net[0]

    @property
    def plain_name(self) -> str:
        """Class of the module."""
        return type(self._net[0]).__name__

    @property
    def whole_module(self) -> nn.Module | None:
        """The module itself, with the same parameters; None if a head was added, so that it has no logits."""
        net = self._net[0]
        return None if self._head_is_added else net

    @property
    def head_names(self) -> tuple[str, ...]:
        """The parameters of the last layer."""
        return tuple(name for name, _ in self.named_parameters() if self._head and name.startswith(f"{self._head}."))

    def train(self, mode: bool = True) -> "PlainNet":
        """Also set the mode of the module itself, which is not registered."""
        for net in (*self._net, *self._stacked):
            net.train(mode)
        return super().train(mode)

    def forward(self, batch: Any) -> NetOutput:
        """Run the module; its random draws follow from the batch's key."""
        if not self.why_alone and isinstance(batch, GraphBatch):
            from fl_lightning.models.stacked.graph import StackedGraph  # takes a second

            with StackedGraph(batch, has_dropout=self.has_dropout) as graph:
                return graph.examples(self._run(self.stacked_net, graph))
        with drawn_by(batch.key):
            if not isinstance(batch, GraphSetBatch):
                return self._run(self._net[0], batch.plain)
            from fl_lightning.models.stacked.graph import plain_graphs  # takes a second

            graphs = plain_graphs(batch)
            padding = (0, 0, 0, len(batch.example_mask) - graphs.batch_size)
            return NetOutput(*(F.pad(rows, padding) for rows in self._run(self._net[0], graphs)))

    def _run(self, net: nn.Module, graph: Any) -> NetOutput:
        if not self._head:
            result = self._inputs(net, graph)
            return NetOutput(*result[:2]) if isinstance(result, tuple) else NetOutput(result, result)
        if self._head_is_added:
            result = self._inputs(net, graph)
            return NetOutput(self.get_submodule(self._head)(result), result)
        seen: list[Any] = []
        head = net.get_submodule(self._head)
        hook = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            result = self._inputs(net, graph)
        finally:
            hook.remove()
        if isinstance(result, tuple):
            return NetOutput(*result[:2])
        if not seen:
            raise ValueError(
                f"{self.plain_name}.forward computes logits without {self._head}, which computed them in a trial on "
                "three rows: call the same last layer whatever the values are"
            )
        return NetOutput(result, getattr(seen[-1], "dense", seen[-1]))

    @property
    def _head_is_added(self) -> bool:
        return bool(self._head) and self._head not in self._net[0]._modules and "." not in self._head


@contextlib.contextmanager
def drawn_by(key: Tensor) -> Iterator[None]:
    """Seed torch's generators from a key, and restore them afterward."""
    with torch.random.fork_rng([key.device] if key.is_cuda else []):
        torch.manual_seed(int(key))
        yield


def plain_parts(net: nn.Module) -> list[PlainNet]:
    """The plain PyG modules in a net."""
    return [part for part in net.modules() if isinstance(part, PlainNet)]


def plain_alone(net: nn.Module) -> list[PlainNet]:
    """Those of them that compute on one client's graph at a time."""
    return [part for part in plain_parts(net) if part.why_alone]


def parameters_as_stored(net: nn.Module) -> dict[str, Tensor]:
    """Copies of a net's parameters by name, each stored as clients' are (``kernels/layout.py``).

    A plain net that computes on a stack multiplies with transposed weights, so they are stored column by column.
    """
    weights = {id(part.get_parameter(name)) for part in plain_parts(net) for name in part.transposed}
    return {
        name: (by_columns(p.detach()) if id(p) in weights else p.detach()).clone() for name, p in net.named_parameters()
    }


def name_of(net: nn.Module) -> str:
    """Class of a net, or of the user's module in it."""
    return net.plain_name if isinstance(net, PlainNet) else type(net).__name__


def made(factory: Callable[..., Any], num_features: Any, num_outputs: int, **settings: Any) -> nn.Module:
    """Call a factory with the widths, by name if it has ``in_channels`` and ``out_channels``, and with other settings.

    Raises:
        ValueError: It needs more, does not take both widths, or does not make a net.
    """
    if isinstance(factory, functools.partial) and str(factory.func.__module__).startswith("jsonargparse."):
        wrapped = factory  # of a class, which the parser's function hides
        factory = functools.partial(wrapped.args[-1], **wrapped.keywords) if wrapped.keywords else wrapped.args[-1]
    by_name = takes_widths_by_name(factory)
    widths = ["in_channels", "out_channels"] if by_name else positional_of(factory)[:2]
    kind = getattr(factory, "__name__", "net")
    if lacking := [name for name in required_of(factory) if name not in {*widths, *settings}]:
        more = ", ".join(f"{name}=..." for name in lacking)
        place = "" if by_name or not widths else f" beside {' and '.join(widths)}, to which the widths are passed"
        other = "" if by_name else ", or a function of both widths"
        raise ValueError(f"it also needs {' and '.join(lacking)}{place}: give functools.partial({kind}, {more}){other}")
    if len(widths) < 2 and not is_variadic(factory):
        raise ValueError(
            "it does not take the widths of inputs and outputs: give its constructor the parameters in_channels and "
            f"out_channels, or give an instance, {kind}(...)"
        )
    if by_name:
        net = factory(in_channels=num_features, out_channels=num_outputs, **settings)
    else:
        net = factory(num_features, num_outputs, **settings)
    if not isinstance(net, nn.Module):
        raise ValueError(f"it makes a {type(net).__name__}, which is not a torch.nn.Module")
    return net


class PyGNet(PlainNet):
    """A model of PyG, or your own, by the path of its class, for configurations.

    Args:
        in_channels: Width of the features.
        out_channels: Width of the logits.
        architecture: Path of the class, for example ``torch_geometric.nn.GraphSAGE``.
        arguments: Its other settings, for example ``{hidden_channels: 64, num_layers: 2}``.

    Raises:
        ValueError: There is no such class, or it does not accept the settings.
    """

    def __init__(
        self, in_channels: int, out_channels: int, *, architecture: str, arguments: dict[str, Any] | None = None
    ) -> None:
        module, _, name = architecture.rpartition(".")
        try:
            factory = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ValueError(f"architecture {architecture!r} cannot be imported: {error}") from error
        net = made(factory, in_channels, out_channels, **(arguments or {}))
        if not reads_graphs(net):
            raise ValueError(f"{architecture} takes no edge_index: give it as model.net itself")
        super().__init__(net, in_channels, out_channels)
