"""Exchanges the layers of a user's module for ones that compute on a stack of clients, where that is possible."""

import copy
from collections.abc import Iterator
from typing import Any

import torch_geometric.nn as pyg
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.utils._trim_to_layer import TrimToLayer

from fl_lightning.models.stacked import attention, convolutions
from fl_lightning.models.stacked.functions import NotStackable
from fl_lightning.models.stacked.norms import StackedLayerNorm

#: What takes the place of PyG's layers.
LAYERS: dict[type[nn.Module], Any] = {
    pyg.GCNConv: convolutions.StackedGCNConv,
    pyg.SAGEConv: convolutions.StackedSAGEConv,
    pyg.GraphConv: convolutions.StackedGraphConv,
    pyg.GINConv: convolutions.StackedGINConv,
    pyg.GINEConv: convolutions.StackedGINEConv,
    pyg.GATConv: attention.StackedGATConv,
    pyg.GATv2Conv: attention.StackedGATv2Conv,
    pyg.TransformerConv: attention.StackedTransformerConv,
    pyg.LayerNorm: StackedLayerNorm,
}
#: Layers whose ``forward`` is right on a whole stack as it is, or by the functions that are replaced.
AS_THEY_ARE = (
    *(nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Identity, nn.Linear, nn.Dropout, nn.BatchNorm1d, nn.LayerNorm),
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus),
    *(nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.Softsign),
    *(pyg.Linear, pyg.BatchNorm, pyg.MLP, pyg.JumpingKnowledge, TrimToLayer),
    *(pyg.GCN, pyg.GraphSAGE, pyg.GIN, pyg.GAT),
)
#: Layers that mix the nodes of a graph in a way of their own.
MIXING = (nn.modules.instancenorm._InstanceNorm, nn.RNNBase, nn.MultiheadAttention)


def exchanged(net: nn.Module, head: str = "", *, pools: bool = False) -> nn.Module:
    """A module that shares parameters, buffers and hooks with the given one and computes on a stack.

    Args:
        net: The module.
        head: Name of the layer that computes the logits, whose input is the embedding; empty if that is not needed.
        pools: Whether it knows the graph of each node, so that PyG's other norms can leave padding out.

    Raises:
        NotStackable: A layer, or one of its options, is not known on a stack.
    """
    above = [head.rpartition(".")[0]]
    while above[-1]:
        above.append(above[-1].rpartition(".")[0])
    for name in above if head in dict(net.named_modules()) else ():
        if type(layer := net.get_submodule(name)) in LAYERS:
            raise NotStackable(f"{type(layer).__name__}'s {head} computes the logits, which it does in another order")
    return _exchanged(net, "", {}, pools=pools)


def linear_weights(net: nn.Module) -> tuple[str, ...]:
    """The weights of all linear layers of a net by name, except those that are parametrized."""
    layers = [(name, layer) for name, layer in net.named_modules() if isinstance(layer, (nn.Linear, pyg.Linear))]
    return tuple(f"{name}.weight" for name, layer in layers if not is_parametrized(layer, "weight"))


def _exchanged(net: nn.Module, name: str, done: dict[int, nn.Module], *, pools: bool) -> nn.Module:
    if id(net) in done:
        return done[id(net)]
    kind = LAYERS.get(type(net))
    where = f"{name} ({type(net).__name__})" if name else type(net).__name__
    if kind is None and (isinstance(net, (MessagePassing, *MIXING)) or (_is_norm_of_pyg(net) and not pools)):
        raise NotStackable(f"{where} has no form for a stack of clients")
    if isinstance(net, pyg.BatchNorm) and getattr(net, "allow_single_element", False):
        raise NotStackable(f"{where} has no form for a stack of clients with allow_single_element=True")
    for option, supported in kind.options(net).items() if kind is not None else ():
        if not supported:
            raise NotStackable(f"{where} has no form for a stack of clients with {option}")
    other = done[id(net)] = _copied(net)
    if kind is not None:
        other.__class__ = kind
    other._modules = {
        key: child if child is None else _exchanged(child, f"{name}.{key}".lstrip("."), done, pools=pools)
        for key, child in net._modules.items()
    }
    return other


def _copied(net: nn.Module) -> nn.Module:
    """A copy that shares everything; ``copy.copy`` does not take modules with parametrizations."""
    if not is_parametrized(net):
        return copy.copy(net)
    other = type(net).__new__(type(net))
    vars(other).update(vars(net))
    return other


def _is_norm_of_pyg(net: nn.Module) -> bool:
    return type(net).__module__.startswith("torch_geometric.nn.norm.") and type(net) not in AS_THEY_ARE


def foreign(net: nn.Module) -> Iterator[nn.Module]:
    """The parts of an exchanged module that are only right for one client at a time, so that ``vmap`` maps them."""
    known = (*AS_THEY_ARE, *LAYERS.values())
    yield from (part for part in net.modules() if type(part) not in known and not _is_aggregation(part))


def _is_aggregation(net: nn.Module) -> bool:
    """An aggregation is part of a convolution that does without it."""
    return isinstance(net, pyg.aggr.Aggregation)
