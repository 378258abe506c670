"""Finds out what a plain module returns, by calling copies of it on three nodes of two graphs, or three examples."""

import contextlib
import copy
import itertools
import math
import traceback
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.models.batch_norm import adopt, statistics_of
from fl_lightning.models.output import NetOutput
from fl_lightning.models.plain_inputs import EDGE_INPUTS, GIVEN, Inputs, edge_widths, parameters_of


class _Graph:
    """A path of three nodes, the last of which counts as a second graph; or three examples.

    Args:
        shape: Of what a node, or an example, has.
        like: A tensor of the type and on the device of what they have.
        edge_width: Number of attributes of an edge; None for edges without any.
        has_numbers: Whether they have the numbers of things, here 0, rather than quantities.
    """

    def __init__(
        self, shape: tuple[int, ...], *, like: Tensor | None, edge_width: int | None, has_numbers: bool = False
    ) -> None:
        to: dict[str, Any] = {} if like is None else {"dtype": like.dtype, "device": like.device}
        bound = 0 if has_numbers else 1
        self.x = torch.linspace(-bound, bound, 3 * math.prod(shape), **to).view(3, *shape)
        self.edge_index = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]], device=self.x.device)
        self.edge_weight = None if edge_width is None else self.x.new_ones(4)
        self.edge_attr = None if edge_width is None else self.x.new_ones(4, edge_width)
        self.batch, self.batch_size = self.edge_index.new_tensor([0, 0, 1]), 2


class Trial:
    """Examines a module by calling copies of it on three nodes or examples; ``inputs.pools`` says whether it pools.

    Attributes:
        has_numbers: Whether it computes on the numbers of things alone, as one with an ``nn.Embedding`` does.
    """

    def __init__(self, net: nn.Module, inputs: Inputs, num_features: int | tuple[int, ...]) -> None:
        shape = (num_features,) if isinstance(num_features, int) else num_features
        self.net, self.inputs, self.name = net, inputs, type(net).__name__
        ready = [p for p in net.parameters() if not isinstance(p, nn.parameter.UninitializedParameter)]
        is_lazy = len(ready) < sum(1 for _ in net.parameters())
        like, failures = next(iter(ready), None), []
        widths = (None, *(edge_widths(net) if inputs.edges or inputs.takes_data else ()))
        ways = (True, False) if inputs.graphs or inputs.takes_data else (False,)
        for self.has_numbers, pools, width in itertools.product((False, True), ways, widths):
            inputs.pools = pools
            self.graph = _Graph(shape, like=like, edge_width=width, has_numbers=self.has_numbers)
            try:
                result = self._call(net if is_lazy else copy.deepcopy(net))
            except Exception as error:  # it is the user's code
                failures.append(error)
                continue
            if not pools or _num_rows(result) == self.graph.batch_size:
                self._check_ready()
                return
        why = failures[0]
        said = str(why) or traceback.extract_tb(why.__traceback__)[-1].line  # an assertion may say nothing
        others = [] if inputs.takes_data else [n for n in parameters_of(net.forward)[1:] if n not in GIVEN]
        missing = f"; it was not given {', '.join(others)}, which clients' graphs do not have" if others else ""
        raise ValueError(
            f"{self.name} cannot compute on {inputs.reads.format(num_features)} ({type(why).__name__}: {said}){missing}"
        ) from why

    def _check_ready(self) -> None:
        """Refuse parameters that have no shape after the module was called.

        Raises:
            ValueError: There are some.
        """
        for name, parameter in self.net.named_parameters():
            if isinstance(parameter, nn.parameter.UninitializedParameter):
                raise ValueError(
                    f"{self.name}'s {name} is of a lazy layer that forward does not call with features and edges "
                    "alone, so that its width is unknown: give it its width, or leave it out"
                )

    def _call(self, net: nn.Module, *, training: bool = False, graph: _Graph | None = None) -> Any:
        mode = net.training
        net.train(training)
        try:
            with torch.no_grad(), torch.random.fork_rng([]):
                return self.inputs(net, graph or self.graph)
        finally:
            net.train(mode)

    def edge_data(self) -> Iterator[dict[str, Any]]:
        """With which weights and attributes of edges the module computes: with all that it reads, and without any."""
        reads = [self.inputs.takes_data or name in self.inputs.edges for name in EDGE_INPUTS]
        width = None if self.graph.edge_attr is None else self.graph.edge_attr.shape[1]
        if width is None and any(reads):
            yield {"weighted": False, "num_attributes": None}
            width = next(filter(self._takes_width, edge_widths(self.net)), None)
        yield {"weighted": reads[0], "num_attributes": width if reads[1] else None}

    def _takes_width(self, width: int) -> bool:
        """Whether the module computes with attributes of edges of this width."""
        graph = _Graph(self.graph.x.shape[1:], like=self.graph.x, edge_width=width, has_numbers=self.has_numbers)
        with contextlib.suppress(Exception):  # it is the user's code
            self._call(copy.deepcopy(self.net), graph=graph)
            return True
        return False

    def run(self) -> Any:
        """What the module returns: a tensor or a pair of them."""
        result = self._call(copy.deepcopy(self.net))
        parts = result[:2] if isinstance(result, tuple) else (result,)
        rows = self.num_rows
        if not parts or not all(isinstance(part, Tensor) and part.dim() == 2 and len(part) == rows for part in parts):
            shape = [tuple(part.shape) if isinstance(part, Tensor) else type(part).__name__ for part in parts]
            raise ValueError(f"{self.name} returns {shape} for 3 {self.inputs.row}s: return {self.inputs.returns}")
        return tuple(parts) if len(parts) > 1 else parts[0]

    def changes_inputs(self) -> bool:
        """Whether the module changes what it is called with in place, in training or in evaluation."""
        for training in (True, False):
            with contextlib.suppress(Exception):  # it is the user's code, and raises it once more where it is trained
                self._call(copy.deepcopy(self.net), training=training)
        inputs = (self.graph.x, self.graph.edge_weight, self.graph.edge_attr)
        return any(value is not None and value._version > 0 for value in inputs)

    @property
    def num_rows(self) -> int:
        """How many rows the module returns: one for each graph if it pools, else one for each node."""
        return self.graph.batch_size if self.inputs.pools else len(self.graph.x)

    def adopt_buffers(self) -> None:
        """Turn buffers that training changes into parameters without gradient, like running statistics.

        Raises:
            ValueError: One is not of a floating point type, or is not changed in place.
        """
        changing = self._changing()
        for name, value in changing.items():
            if not value.is_floating_point():
                raise ValueError(
                    f"{self.name} counts in its buffer {name} while it trains, and only floating point "
                    "numbers can be kept with a client's parameters: leave the counter out"
                )
            adopt(self.net, name)
        kept = statistics_of(self.net)
        try:
            if kept:
                self._call(copy.deepcopy(self.net), training=True)
        except Exception as error:  # it is the user's code
            if "cannot assign" in str(error):
                raise ValueError(
                    f"{self.name} replaces its buffer {', '.join(sorted(kept))} while it trains: change it in place "
                    "(self.name.copy_(...)), so that it can be kept with a client's parameters, or do without it"
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

    def embedding_of(self, wrapped: nn.Module) -> Tensor:
        """The embedding of the three nodes."""
        with torch.no_grad(), torch.random.fork_rng([]):
            every = torch.ones(len(self.graph.x), dtype=torch.bool, device=self.graph.x.device)
            key = torch.tensor(0)
            batch = SimpleNamespace(plain=self.graph, x=self.graph.x, example_mask=every, key=key)
            result: NetOutput = copy.deepcopy(wrapped).eval()(batch)
        return result.embedding

    def last_layer(self, num_outputs: int) -> str:
        """Name of the layer that computes the logits; empty if none does.

        It is the outermost layer that ends last, reads a row for each example and does not contain all parameters.
        """
        ended: list[tuple[str, bool]] = []

        def note(name: str, inputs: tuple[Any, ...], output: Any) -> None:
            read = bool(inputs) and isinstance(inputs[0], Tensor) and inputs[0].shape[:-1] == (self.num_rows,)
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


def _num_rows(result: Any) -> int:
    """Length of a tensor, or of the first of some."""
    first = result[0] if isinstance(result, tuple) and result else result
    return len(first) if isinstance(first, Tensor) and first.dim() else 0
