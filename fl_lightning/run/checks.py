"""Errors and warnings about combinations of strategies, nets and data, raised while a run is set up."""

import warnings
from collections.abc import Sequence
from typing import cast

import torch

from fl_lightning.batches.client_data import ClientData
from fl_lightning.batches.samplers import GraphSampler
from fl_lightning.federation import ClientRegistry
from fl_lightning.models.batch_norm import statistics_of
from fl_lightning.models.plain import name_of, plain_alone
from fl_lightning.models.pretrained import is_pretrained
from fl_lightning.models.reach import reads_beyond
from fl_lightning.round.client import ClientModule
from fl_lightning.strategies import Strategy


def check_union(strategy: Strategy, evaluate_union: bool) -> None:
    """Refuse to score models on all clients' examples if they need their own client's examples."""
    if evaluate_union and strategy.needs_own_examples:
        raise ValueError(
            f"trainer.evaluate_union is true, but {type(strategy).__name__}'s models use state of each client's own "
            "nodes, so they cannot be scored on those of others: leave it false, or choose another strategy"
        )


def check_directions(strategy: Strategy, registry: ClientRegistry) -> None:
    """Refuse graphs whose edges a strategy cannot handle: directed ones, or those with weights or attributes.

    Raises:
        ValueError: The strategy cannot handle them.
    """
    name = type(strategy).__name__
    if strategy.needs_undirected and registry.is_directed:
        raise ValueError(
            f"{name} is for graphs whose edges go both ways, with equal weights, but source.undirected is false and "
            "edges lack their reverse: set data.source.undirected to true, or choose another strategy"
        )
    carried = ["edge_weight"] * registry.has_edge_weights + ["edge_attr"] * bool(registry.num_edge_attributes)
    if strategy.adds_edges and carried:
        raise ValueError(
            f"{name} adds edges to the clients' graphs, whose {' and '.join(carried)} are unknown: remove them from "
            "the graph, or choose another strategy"
        )


def check_cross_edges(strategy: Strategy, registry: ClientRegistry) -> None:
    """Refuse clients that do not know of the edges between them if the strategy needs these.

    Raises:
        ValueError: They do not.
    """
    if strategy.needs_cross_edges and not registry.has_cross_edges:
        raise ValueError(
            f"{type(strategy).__name__} needs the edges between the clients, but these do not know of them: set "
            "data.cross_edges to true, for a graph that is cut into disjoint clients, or choose another strategy"
        )


def check_own(strategy: Strategy, registry: ClientRegistry) -> None:
    """Refuse clients with features or outputs of their own if the strategy brings these together.

    Raises:
        ValueError: It has one model for all, or compares what clients know of the same classes.
    """
    name = type(strategy).__name__
    own = registry.own
    if own and strategy.needs_common_layers:
        raise ValueError(
            f"{name} has one model for all clients, but these have {' and '.join(own)} of their own: choose another "
            "strategy"
        )
    if registry.own_outputs and strategy.needs_classes:
        raise ValueError(
            f"{name} compares classes of clients, but these have classes of their own: choose another strategy, or set "
            "own_outputs to false on the source (leave outputs out of own at sites) if they mean the same for all"
        )


def check_edge_attributes(model: ClientModule, registry: ClientRegistry) -> None:
    """Refuse a net made for another number of attributes of an edge.

    Raises:
        ValueError: Edges have others, or none.
    """
    for net in model.nets:
        width, there = getattr(net, "edge_channels", None), registry.num_edge_attributes
        if width is not None and width != there:
            remedy = f"set it to {there}" if there else "give the graphs edge_attr, or choose another net, such as GIN"
            raise ValueError(
                f"{name_of(net)}.edge_channels is {width}, but edges of the clients' graphs have {there} attributes: "
                f"{remedy}"
            )


def say_unused_edge_data(strategy: Strategy, model: ClientModule, registry: ClientRegistry) -> None:
    """Warn if edge weights or attributes are not used.

    A net uses weights or attributes if it or one of its layers has ``takes_edge_weight`` or ``takes_edge_attr``.

    Warns:
        UserWarning: A net or the strategy does not use them.
    """
    there = {"edge_weight": registry.has_edge_weights, "edge_attr": bool(registry.num_edge_attributes)}
    for what in (name for name, is_there in there.items() if is_there):
        deaf = [name_of(net) for net in model.nets if not takes(net, what)]
        if what == "edge_weight" and not strategy.takes_edge_weight:
            deaf.append(type(strategy).__name__)
        if deaf:
            one = len(set(deaf)) == 1
            warnings.warn(
                f"{' and '.join(dict.fromkeys(deaf))} {'does' if one else 'do'} not use the graph's {what} and "
                f"{'treats' if one else 'treat'} all edges alike. Choose another, or remove {what} from the graph.",
                stacklevel=2,
            )


def check_start(strategy: Strategy, model: ClientModule) -> None:
    """Refuse weights of a file that the strategy does not start from; warn of those of a net that is given.

    Raises:
        ValueError: ``model.net`` is ``Pretrained``.

    Warns:
        UserWarning: ``model.net`` is a net.
    """
    if strategy.starts_from_net:
        return
    why = (
        f"{type(strategy).__name__} generates parameters from a start of its own and does not use the weights that the "
        "net has: choose SheafRidge or PFedHN, which start from them"
    )
    if any(is_pretrained(factory) for factory in model.net_factories):
        raise ValueError(f"model.net is Pretrained, but {why}; or leave Pretrained out")
    if any(isinstance(factory, torch.nn.Module) for factory in model.net_factories):
        warnings.warn(f"model.net is a net with weights, but {why}; or give what builds the net", stacklevel=2)


def takes(net: torch.nn.Module, what: str) -> bool:
    """Whether a net or a layer in it uses ``edge_weight`` or ``edge_attr``."""
    return any(getattr(layer, f"takes_{what}", False) for layer in net.modules())


def check_inductive(strategy: Strategy, clients: Sequence[ClientData]) -> None:
    """Refuse nodes that are hidden from training if the strategy needs them there.

    Raises:
        ValueError: Its models need their client's own nodes, it changes the clients' graphs, or it chooses by
            validation.
    """
    if not any(client.seen() is not client for client in clients):
        return
    if strategy.needs_own_examples or strategy.adds_edges:
        raise ValueError(
            f"data.splitter is inductive, but {type(strategy).__name__} computes with the very nodes that it has "
            "trained on, or adds some to their graphs, so that it cannot be scored on unseen ones: choose another "
            "splitter or another strategy"
        )
    if getattr(strategy, "validate_every", None) is not None:
        raise ValueError(
            "strategy.validate_every chooses on validation nodes, but data.splitter is inductive and hides them from "
            "the rounds: set it to null, or choose another strategy"
        )


def check_sampler(
    strategy: Strategy, model: ClientModule, registry: ClientRegistry, sampler: GraphSampler | None
) -> None:
    """Refuse to train on parts of graphs if the strategy or the net needs the whole ones.

    Raises:
        ValueError: The strategy has state for every node, changes the clients' graphs or computes with them, or the
            net reads nodes that are not sampled.
    """
    if sampler is None:
        return
    name, given = type(strategy).__name__, f"data.sampler is {type(sampler).__name__}"
    has_rows = any(spec.per_example for spec in strategy.client_state().values())
    if strategy.needs_whole_graphs or strategy.adds_edges or strategy.needs_cross_edges or has_rows:
        raise ValueError(
            f"{given}, but clients of {name} need their whole graphs in training: leave data.sampler out, or choose "
            "another strategy"
        )
    if sampler.num_hops is None:
        return
    for net in model.nets:
        if alone := plain_alone(net):
            warnings.warn(
                f"{name_of(net)} computes on one client's graph at a time ({alone[0].why_alone}): in training its "
                "layers get the sampled edges as from PyG's NeighborLoader, so that GCNConv normalizes by the degrees "
                "in the sample, and models are scored with those in the whole graph",
                stacklevel=2,
            )
        if reads_beyond(
            net,
            sampler.num_hops,
            cast("int", registry.num_features),
            has_edge_weights=registry.has_edge_weights,
            num_edge_attributes=registry.num_edge_attributes,
        ):
            raise ValueError(
                f"{given} with {sampler.num_hops} fan-outs, but {name_of(net)} reads nodes that are more than "
                f"{sampler.num_hops} edges away: give data.sampler.fan_outs a number for each convolution, or take a "
                "net with fewer"
            )


def check_architectures(strategy: Strategy, num_nets: int) -> None:
    """Refuse several nets if the strategy needs the same net for all clients."""
    if num_nets > 1 and not strategy.takes_architectures:
        raise ValueError(
            f"model.net lists {num_nets} nets, but {type(strategy).__name__} needs the same net for all clients: "
            "give one net, or a strategy for different architectures (SheafFMTL, FedProto, Local)"
        )


def check_statistics(strategy: Strategy, model: ClientModule) -> None:
    """Refuse running statistics that a strategy cannot handle.

    Raises:
        ValueError: The strategy cannot handle them, or there are none to share.
    """
    shared, name = model.running_statistics == "shared", type(strategy).__name__
    if not any(map(statistics_of, model.nets)):
        if shared:
            raise ValueError("model.running_statistics is 'shared', but model.net has none: leave it out")
        return
    if not strategy.takes_statistics:
        raise ValueError(
            f"{name} computes with models that have no running statistics: give model.net layers without them "
            "(LayerNorm, GroupNorm), or choose another strategy"
        )
    if shared and not strategy.shares_statistics:
        raise ValueError(
            f"model.running_statistics is 'shared', but {name} does more with models than average them, which does "
            "not yield variances: set it to 'personal'"
        )
