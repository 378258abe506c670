"""Whether a user's module computes the same on a stack of clients as on each client's graph: it is tried."""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from fl_lightning.batches.base import Batch
from fl_lightning.batches.client_graph import ClientGraph
from fl_lightning.batches.graph_sets import ClientGraphs, GraphSetCollator
from fl_lightning.batches.graphs import GraphBatch, GraphCollator
from fl_lightning.batches.plain_graph import PlainGraph
from fl_lightning.models.stacked.functions import NotStackable

#: Nodes of the clients' graphs, and the sets of graphs that they are in where graphs are the examples, so that most are
#: padded.
SIZES, SETS = (8, 5, 2), ((3, 4, 1), (4, 1), (1, 1))
#: How far results may be apart, in the scale of the largest: in double precision, and else in units of the precision.
TOLERANCE_OF_DOUBLE, TOLERANCE = 1e-7, 1e4


def try_on_stack(
    net: Any, num_features: int, *, weighted: bool, num_attributes: int | None, has_numbers: bool = False
) -> None:
    """Compare logits, and gradients in all parameters, on a stack of small graphs with those of one at a time.

    Args:
        net: The net (``models/plain.py``).
        num_features: Width of the features.
        weighted: Whether edges have weights.
        num_attributes: Width of the attributes of edges; None for none.
        has_numbers: Whether nodes and edges have the numbers of things, rather than quantities.

    Raises:
        NotStackable: They differ, or the net cannot be run on a stack.
    """
    members = _graphs(num_features, weighted=weighted, num_attributes=num_attributes, pools=net.pools)
    if has_numbers:
        members = [_numbered(member) for member in members]
    in_double_first(net, functools.partial(_try_on_stack, members=members, has_numbers=has_numbers))


def _try_on_stack(net: Any, members: list[ClientGraph], has_numbers: bool) -> None:
    like = next(net.parameters(), torch.zeros(()))
    to: dict[str, Any] = {"device": like.device, "dtype": like.dtype}
    counts = [len(sizes) for sizes in SETS] if net.pools else SIZES
    whole = _noisy(_batch(members, to, pools=net.pools), has_numbers=has_numbers)
    alone = []
    for row, member in enumerate(members):
        plain: Any = PlainGraph(member, **to)
        if net.pools:
            plain.batch, plain.batch_size = _graph_of(row).to(like.device), counts[row]
        alone.append(SimpleNamespace(plain=plain, key=torch.tensor(0)))
    together = functools.partial(logits_together, net, batch=whole)
    unlike = "on one graph, as if it computed across nodes other than by layers that are known there"
    compare_on_stack(net, moved(net, len(members)), together, alone, counts, unlike=unlike)


def in_double_first(net: Any, attempt: Callable[[Any], None]) -> None:
    """Try a copy of a net in double precision, in which rounding is no difference, and if it fails as it is.

    Raises:
        NotStackable: The net as it is fails.
    """
    with contextlib.suppress(Exception):  # a net may compute in single precision alone, as GPUs of Apple do
        attempt(copy.deepcopy(net).double())
        return
    attempt(copy.deepcopy(net))


def compare_on_stack(
    net: Any,
    start: dict[str, Tensor],
    together: Callable[[dict[str, Tensor]], Tensor],
    alone: Sequence[Any],
    counts: Sequence[int],
    *,
    unlike: str,
) -> None:
    """Compare what a net computes, and its running statistics, on a stack and on each client's batch, without dropout.

    Args:
        net: The net, whose mode and dropout are changed.
        start: The parameters of each client, (C, *shape) by name.
        together: Computes the logits on the stack with such parameters, (C, N, K).
        alone: The batch of each client.
        counts: How many rows of the logits are each client's own.
        unlike: Where a net that differs does so, and how it may have computed.

    Raises:
        NotStackable: They differ, or the net cannot be run on a stack.
    """
    net.has_dropout = False
    is_trained = {"": False, **{name: parameter.requires_grad for name, parameter in net.named_parameters()}}
    for training in (True, False):
        found = run_on_stack(net.train(training), start, together, counts)
        for row, batch in enumerate(alone):
            rows = {name: value[row] for name, value in start.items()}
            with _WithoutDropout():
                expected = _results(net, rows, functools.partial(_logits, net, batch=batch), counts)
            whole = max((_size(value) for name, value in expected.items() if is_trained[name]), default=0.0)
            for name, value in expected.items():
                actual = found[name][row]
                scale = whole if is_trained[name] else _size(value)
                if not _close(actual if name else actual[: counts[row]], value, scale):
                    what = f"a gradient of {name}" if is_trained[name] else name or "outputs"
                    raise NotStackable(
                        f"{net.plain_name}.forward has {what} on a stack of clients that it does not have {unlike}"
                    )


def run_on_stack(
    net: nn.Module, start: dict[str, Tensor], together: Callable[[dict[str, Tensor]], Tensor], counts: Sequence[int]
) -> dict[str, Tensor]:
    """The logits and gradients on a stack; the arguments are those of :func:`compare_on_stack`.

    Raises:
        NotStackable: The net cannot be run on one.
    """
    with _running(net) as innermost:
        try:
            return _results(net, start, together, counts)
        except Exception as error:  # it is the user's code
            said = str(error).strip().partition("\n")[0]
            why = said if isinstance(error, NotStackable) else f"{type(error).__name__}: {said}"
            raise NotStackable(f"{innermost()} does not run on a stack of clients ({why})") from error


def moved(net: nn.Module, num_clients: int) -> dict[str, Tensor]:
    """A net's parameters for each client, (C, *shape), away from where they are: what begins at zero is to be seen."""
    generator = torch.Generator().manual_seed(1)
    start = {}
    for name, parameter in net.named_parameters():
        noise = 0.1 * torch.randn(num_clients, *parameter.shape, generator=generator).to(parameter)
        start[name] = parameter.detach() + (noise if parameter.requires_grad else torch.zeros_like(noise))
    return start


def _batch(members: list[ClientGraph], to: dict[str, Any], *, pools: bool) -> GraphBatch:
    """The graphs, or sets of graphs, as a stack of clients."""
    if not pools:
        return GraphCollator(members, layout={"sparse_features": False}, **to)(range(len(members)))
    clients = []
    for member, sizes in zip(members, SETS, strict=True):
        nothing = torch.zeros(len(sizes), dtype=torch.bool)
        masks: dict[str, Any] = {f"{role}_mask_N": nothing for role in ("train", "val", "test")}
        y_N, num_nodes_G = nothing.long(), torch.tensor(sizes)
        clients.append(ClientGraphs(name="trial", union=member, num_nodes_G=num_nodes_G, y_N=y_N, **masks))
    return GraphSetCollator(clients, **to)(range(len(clients)))


def _graph_of(row: int) -> Tensor:
    """The graph of each node of a set."""
    return torch.arange(len(SETS[row])).repeat_interleave(torch.tensor(SETS[row]))


def _graphs(num_features: int, *, weighted: bool, num_attributes: int | None, pools: bool) -> list[ClientGraph]:
    """Random directed graphs, one node of each without edges; of sets without edges between their graphs."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for row, size in enumerate(SIZES):
        edge_NN = torch.rand(size, size, generator=generator) < 0.6
        edge_NN.fill_diagonal_(False)
        if pools:
            edge_NN &= _graph_of(row)[:, None] == _graph_of(row)
        edge_NN[-1], edge_NN[:, -1] = False, False
        edges_2E = edge_NN.nonzero().t()
        count, nothing = edges_2E.shape[1], torch.zeros(size, dtype=torch.bool)
        weight_E = torch.rand(count, generator=generator) + 0.5
        attr_EK = torch.randn(count, num_attributes or 0, generator=generator)
        made.append(
            ClientGraph(
                name="trial",
                x_NF=torch.randn(size, num_features, generator=generator),
                edge_index_2E=edges_2E,
                y_N=torch.zeros(size, dtype=torch.int64),
                node_idx_N=torch.arange(size),
                train_mask_N=nothing,
                val_mask_N=nothing,
                test_mask_N=nothing,
                edge_weight_E=weight_E if weighted else None,
                edge_attr_EK=None if num_attributes is None else attr_EK,
                is_directed=True,
            )
        )
    return made


def _numbered(graph: ClientGraph) -> ClientGraph:
    """The graph with the numbers 0 and 1 in the place of what nodes and edges have."""
    attr_EK = graph.edge_attr_EK
    changed = None if attr_EK is None else (attr_EK > 0).float()
    return dataclasses.replace(graph, x_NF=(graph.x_NF > 0).float(), edge_attr_EK=changed)


def _noisy(batch: GraphBatch, *, has_numbers: bool) -> GraphBatch:
    """The batch with other features, large ones unless they are numbers, where it is padded, which must not matter."""
    x_CNF, propagated_CNF = batch.x, batch.propagated_x
    assert x_CNF is not None
    assert propagated_CNF is not None
    drawn_CNF = torch.randn(x_CNF.shape, generator=torch.Generator().manual_seed(2)).to(x_CNF)
    noise_CNF = (drawn_CNF > 0).to(x_CNF) if has_numbers else 100 * drawn_CNF
    noise_CNF = noise_CNF * ~batch.node_mask.unsqueeze(-1)
    return batch.replace({"x": x_CNF + noise_CNF, "propagated_x": propagated_CNF + noise_CNF})


class _WithoutDropout(TorchFunctionMode):
    """A context in which nothing is dropped."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return (args or (kwargs.get("input"),))[0] if func in (F.dropout, torch.dropout) else func(*args, **kwargs)


def _logits(net: nn.Module, parameters: dict[str, Tensor], batch: Any) -> Tensor:
    result: Tensor = functional_call(net, parameters, (batch,), tie_weights=False).logits
    return result


def logits_together(net: Any, parameters: dict[str, Tensor], batch: Batch) -> Tensor:
    """The logits on a stack of clients, with the parameters of each."""
    if net.takes_stacks:
        return _logits(net, parameters, batch)
    mapped: Tensor = torch.vmap(lambda p, t: _logits(net, p, batch.replace(t)))(parameters, batch.tensors())
    return mapped


def _results(
    net: nn.Module, start: dict[str, Tensor], compute: Callable[[dict[str, Tensor]], Tensor], counts: Sequence[int]
) -> dict[str, Tensor]:
    """Logits, under an empty name, the gradients of a function of them that has no others for padding, and the rest.

    The rest are the parameters without gradient after the forward pass: running statistics have changed.
    """
    trained = [name for name, parameter in net.named_parameters() if parameter.requires_grad]
    leaves = {name: value.detach().clone().requires_grad_(name in trained) for name, value in start.items()}
    others = {name: value.clone() for name, value in leaves.items() if name not in trained}
    with torch.random.fork_rng([]):
        logits = compute({**leaves, **others})
    results = {"": logits.detach(), **others}
    if logits.requires_grad:
        rows = [logits] if logits.dim() == 2 else [each[:size] for each, size in zip(logits, counts, strict=True)]
        total = torch.stack([(row * torch.linspace(1, 2, row.numel()).to(row).view_as(row)).sum() for row in rows])
        gradients = torch.autograd.grad(total.sum(), [leaves[name] for name in trained], allow_unused=True)
        results |= {
            name: torch.zeros_like(leaves[name]) if gradient is None else gradient
            for name, gradient in zip(trained, gradients, strict=True)
        }
    return results


def _size(tensor: Tensor) -> float:
    """The largest absolute value."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _close(one: Tensor, other: Tensor, scale: float) -> bool:
    """Whether results agree within the tolerance, in the given scale."""
    precision = TOLERANCE_OF_DOUBLE if other.dtype == torch.float64 else TOLERANCE * torch.finfo(other.dtype).eps
    far = precision * max(1.0, scale)
    return one.shape == other.shape and bool(((one - other).abs() <= far).all())


@contextlib.contextmanager
def _running(net: Any) -> Iterator[Callable[[], str]]:
    """A context in which it is known which layer runs: the innermost one that has begun and not ended."""
    names = {id(layer): name for name, layer in net.stacked_net.named_modules()}
    begun: list[nn.Module] = []

    def begin(layer: nn.Module, inputs: Any) -> None:
        if id(layer) in names:
            begun.append(layer)

    def end(layer: nn.Module, inputs: Any, output: Any) -> None:
        if id(layer) in names:
            begun.pop()

    hooks = [register_module_forward_pre_hook(begin), register_module_forward_hook(end)]

    def innermost() -> str:
        layer = begun[-1] if begun else net.stacked_net
        kind = type(layer).__name__.removeprefix("Stacked")
        return f"{names[id(layer)]} ({kind})" if names[id(layer)] else f"{kind}.forward"

    try:
        yield innermost
    finally:
        for hook in hooks:
            hook.remove()
