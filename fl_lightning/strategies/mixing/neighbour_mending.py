"""What the clients of FedSage+ compute: hidden neighbours, NeighGen's losses, the exchange, the mended graph.

Shape legend: N nodes of a client, F features, S slots for new neighbours of a node, C clients, M nodes that a client
lets the others look at.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from fl_lightning.batches import Batch, ClientGraph, GraphBatch, GraphCollator
from fl_lightning.batches.base import single
from fl_lightning.kernels.edges import sample_neighbours
from fl_lightning.kernels.randomness import random_normal, random_order, random_places, random_uniform, subkey
from fl_lightning.models.graph_sage import GraphSAGE
from fl_lightning.models.neighbour_generator import Generated, MendingNet, NeighbourGenerator, Rounding
from fl_lightning.models.output import NetOutput
from fl_lightning.round.client import (
    ClientModule,
    NetFactory,
    OptimizerFactory,
    default_optimizer,
    parameters_of,
)
from fl_lightning.round.context import Context, Parameters


class MendingClient(ClientModule):
    """A client with a generator beside its classifier, which has a learning rate and a weight decay of its own.

    Args:
        net: As for :class:`~fl_lightning.ClientModule`: the classifier.
        optimizer: Likewise; the generator's, too.
        encoder_channels: Widths of the generator's encoder.
        generator_channels: Widths of the layers that make features (paper's code: 256 and 2048, which for Cora are 15
            million numbers a client).
        num_slots: S, most neighbours that are generated for a node.
        rounding: How many they are: the number that is said to be lost, rounded to the ``nearest`` whole number
            (FederatedScope everywhere, and the authors where they mend a graph on its own) or ``down`` (the authors'
            federated code, where what is below 1, as nearly all nodes of Cora are, gets none).
        generator_dropout: Drop probability in the generator, in [0, 1).
        generator_lr: Learning rate of the generator.
        generator_weight_decay: Weight decay of the generator.
        gradient_clip_val: As for :class:`~fl_lightning.ClientModule`.
    """

    def __init__(
        self,
        net: list[NetFactory] | NetFactory = GraphSAGE,
        optimizer: OptimizerFactory = default_optimizer,
        *,
        encoder_channels: tuple[int, int] = (32, 128),
        generator_channels: tuple[int, int] = (256, 256),
        num_slots: int = 5,
        rounding: Rounding = "nearest",
        generator_dropout: float = 0.5,
        generator_lr: float = 1e-3,
        generator_weight_decay: float = 1e-4,
        gradient_clip_val: float | None = None,
    ) -> None:
        super().__init__(net, optimizer, gradient_clip_val)
        if rounding not in ("nearest", "down"):
            raise ValueError(f"model.rounding must be 'nearest' or 'down', got {rounding!r}")
        if generator_lr <= 0:
            raise ValueError(f"model.generator_lr must be positive, got {generator_lr}")
        self.generator_settings: dict[str, Any] = {
            "hidden_channels": encoder_channels,
            "generator_channels": generator_channels,
            "num_slots": num_slots,
            "dropout": generator_dropout,
            "rounding": rounding,
        }
        self.generator_group = {"lr": generator_lr, "weight_decay": generator_weight_decay}

    def build(
        self,
        num_features: int | tuple[int, ...],
        num_outputs: int,
        adapt: Callable[[nn.Module], nn.Module] | None = None,
    ) -> None:
        """Create the nets, each with a generator."""

        def beside_generator(net: nn.Module) -> nn.Module:
            assert isinstance(num_features, int)
            generator = NeighbourGenerator(num_features, num_outputs, **self.generator_settings)
            return MendingNet(net if adapt is None else adapt(net), generator)

        super().build(num_features, num_outputs, beside_generator)

    def build_optimizer(self, named_parameters: Iterable[tuple[str, Tensor]]) -> Optimizer:
        """The optimiser, with a group of its own for the generator."""
        named = list(named_parameters)
        groups = [[p for name, p in named if name.startswith("generator.") == own] for own in (False, True)]
        optimizer = self.optimizer_factory([{"params": group} for group in groups])
        optimizer.param_groups[1].update(self.generator_group)
        return optimizer

    def generator_optimizer(self, parameters: Iterable[Tensor]) -> Optimizer:
        """The optimiser of a stage that trains the generator alone."""
        optimizer = self.optimizer_factory(parameters)
        optimizer.param_groups[0].update(self.generator_group)
        return optimizer


def hide(batch: Batch, key: Tensor, share: float, num_slots: int) -> dict[str, Tensor]:
    """Hide a share of the validation nodes (if there are none, of those that do not train).

    Returns:
        ``hidden`` (N,), boolean, and for every node the places of up to S hidden neighbours, ``lost`` (N, S), else -1.
    """
    assert isinstance(batch, GraphBatch)
    pool_N = torch.where(batch.val_mask.any(), batch.val_mask, batch.real_mask & ~batch.train_mask)
    number = (share * pool_N.sum() + 0.5).floor()
    hidden_N = pool_N & (random_places(subkey(key, "hide"), pool_N) < number)
    return {
        "hidden": hidden_N,
        "lost": sample_neighbours(subkey(key, "lost"), hidden_N, batch.adjacency, num_slots),
    }


def generate(
    client: ClientModule, parameters: Parameters, batch: GraphBatch, context: Context, key: Tensor, *, drops: bool
) -> Generated:
    """Run the client's generator on its graph without the hidden nodes."""
    generator = client.net.get_submodule("generator")
    kept_N = batch.real_mask & ~context.memory["impaired/hidden"]
    arguments = (batch, kept_N, key)
    made: Generated = functional_call(generator, parameters_of("generator", parameters), arguments, {"drops": drops})
    return made


def num_lost(batch: GraphBatch, context: Context) -> Tensor:
    """How many neighbours of each node are hidden, (N,)."""
    hidden_N1 = context.memory["impaired/hidden"][:, None].to(batch.dtype)
    return batch.sum_neighbours(hidden_N1)[:, 0].round()


def nearest(new: Tensor, target: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
    """Squared distance of each generated feature vector to the nearest target, a mean over features, and its place.

    Args:
        new: (..., S, F).
        target: (..., S, F).
        there: Which targets there are, boolean (..., S); where there is none the distance is 0.
    """
    square = new.square().sum(dim=-1)[..., :, None] + target.square().sum(dim=-1)[..., None, :]
    apart = ((square - 2 * new @ target.mT) / new.shape[-1]).masked_fill(~there[..., None, :], torch.inf)
    place = apart.argmin(dim=-1)
    least = apart.gather(-1, place[..., None])[..., 0]
    return torch.where(there.any(dim=-1, keepdim=True), least, 0.0).clamp(min=0), place


def local_loss(
    client: ClientModule, made: Generated, batch: GraphBatch, context: Context, weights: tuple[float, float, float]
) -> Tensor:
    """L_A: numbers of lost neighbours, their features, and the classes that are found with them."""
    train_N = batch.train_mask & ~context.memory["impaired/hidden"]
    number = train_N.sum().clamp(min=1)
    counted_N = F.smooth_l1_loss(made.num_lost, num_lost(batch, context), reduction="none")
    lost_NS = context.memory["impaired/lost"]
    target_NSF = batch.features_of(lost_NS.clamp(min=0).flatten()).view(made.features.shape)
    apart_NS, _ = nearest(made.features, target_NSF, lost_NS >= 0)
    made_NS = made.used & train_N[:, None]
    terms = (
        (counted_N * train_N).sum() / number,
        (apart_NS * made_NS).sum() / (number * lost_NS.shape[1]),
        client.loss(NetOutput(made.logits, made.logits), batch.replace({"train_mask": train_N})),
    )
    return torch.stack([weight * term for weight, term in zip(weights, terms, strict=True)]).sum()


def shown_nodes(batch: GraphBatch, context: Context, key: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Places of up to ``count`` training nodes, drawn at random, and which of the places are such, (M,)."""
    train_N = batch.train_mask & ~context.memory["impaired/hidden"]
    place_M, is_one_M = random_order(subkey(key, "show"), train_N, min(count, len(train_N)))
    missing = (0, count - len(place_M))
    return F.pad(place_M, missing), F.pad(is_one_M, missing)


def shown(made: Generated, batch: GraphBatch, context: Context, key: Tensor, count: int) -> dict[str, Tensor]:
    """What a client shows the others of some training nodes: generated features, and how many are used and needed."""
    place_M, is_one_M = shown_nodes(batch, context, key, count)
    used_MS = made.used[place_M] & is_one_M[:, None]
    num_there_M = (context.memory["impaired/lost"] >= 0).sum(dim=1)[place_M] * is_one_M
    features_MSF = made.features[place_M] * used_MS[..., None]
    return {"features": features_MSF, "used": used_MS.sum(dim=1), "lost": num_there_M, "nodes": is_one_M.sum()}


def foreign_gradient(batch: Batch, context: Context, *, slots: int, weight: float, noise_std: float) -> Tensor:
    """∂/∂x̃_i of Σ of L_ij for every other client i, by this client's neighbours, (C, M, s, F).

    The targets of a node are ``slots`` neighbours (S), drawn with replacement, of a random node of this client (of more
    than S neighbours, of S that are drawn first). Of what was generated only s of S slots may be shown.
    """
    assert isinstance(batch, GraphBatch)
    inbox, (num_clients, count, num_used, width) = context.inbox, context.inbox["features"].shape
    pair_C = subkey(inbox["keys"] ^ inbox["key"], "pair")
    draw_CMS = random_uniform(pair_C, count, slots + 1)
    linked_N = (batch.degree > 0) & batch.real_mask
    order_N = (~linked_N).long().argsort(stable=True)  # the nodes with neighbours first
    node_CM = order_N[(draw_CMS[..., 0] * linked_N.sum()).long()]
    known_NS = sample_neighbours(subkey(inbox["key"], "known"), batch.real_mask, batch.adjacency, slots)
    choice_CMS = (draw_CMS[..., 1:] * batch.degree.clamp(max=slots)[node_CM][..., None]).long()
    target_CMS = known_NS[node_CM].gather(-1, choice_CMS).clamp(min=0)
    target = batch.features_of(target_CMS.flatten()).view(num_clients, count, slots, width)
    slot_S = torch.arange(slots, device=batch.y.device)
    there_CMS, used_CMs = slot_S < inbox["lost"][..., None], slot_S[:num_used] < inbox["used"][..., None]
    features = inbox["features"].to(target)
    place = nearest(features, target, there_CMS)[1]
    chosen = target.gather(2, place[..., None].expand(-1, -1, -1, width))
    gradient = 2 * (features - chosen) / (slots * width * inbox["nodes"].clamp(min=1).view(-1, 1, 1, 1))
    if noise_std:
        gradient = gradient + noise_std * random_normal(subkey(pair_C, "noise"), count * num_used, width).to(
            gradient
        ).view(gradient.shape)
    counts_CMs = used_CMs & there_CMS.any(dim=-1, keepdim=True) & linked_N.any() & inbox["other"][:, None, None]
    return weight * gradient * counts_CMs[..., None]


def figures(client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> dict[str, Tensor]:
    """How many neighbours are made, and the mean errors of their number and features over the nodes that stay."""
    assert isinstance(batch, GraphBatch)
    made = generate(client, parameters, batch, context, context.inbox["key"], drops=False)
    kept_N = batch.real_mask & ~context.memory["impaired/hidden"]
    lost_NS = context.memory["impaired/lost"]
    target_NSF = batch.features_of(lost_NS.clamp(min=0).flatten()).view(made.features.shape)
    apart_NS = nearest(made.features, target_NSF, lost_NS >= 0)[0] * made.features.shape[-1]
    compared_NS = made.used & (lost_NS >= 0).any(dim=1, keepdim=True)
    return {
        "generated_neighbours": made.used.sum(),
        "count_error": ((made.num_lost - num_lost(batch, context)).abs() * kept_N).sum() / kept_N.sum(),
        "feature_error": (apart_NS * compared_NS).sum() / compared_NS.sum().clamp(min=1),
    }


def mended(graph: ClientGraph, made: Generated) -> ClientGraph:
    """The graph with the generated neighbours, which have no labels and no role, behind its own nodes."""
    owner = made.used.nonzero()[:, 0].cpu()
    if not len(owner):
        return graph
    new = graph.num_nodes + torch.arange(len(owner))
    edges = torch.cat([graph.edge_index_2E, torch.stack([owner, new]), torch.stack([new, owner])], dim=1)
    order = (edges[0] * (graph.num_nodes + len(owner)) + edges[1]).argsort()
    nobody, nothing = torch.zeros(len(owner), dtype=torch.bool), torch.full((len(owner),), -1)
    masks = {name: torch.cat([value, nobody]) for name, value in vars(graph).items() if name.endswith("mask_N")}
    return dataclasses.replace(
        graph,
        x_NF=torch.cat([graph.x_NF, made.features[made.used].cpu().to(graph.x_NF)]),
        edge_index_2E=edges[:, order],
        y_N=torch.cat([graph.y_N, nothing]),
        node_idx_N=torch.cat([graph.node_idx_N, nothing]),
        **masks,  # type: ignore[arg-type]
    )


def mend(client: ClientModule, parameters: Parameters, graph: ClientGraph, context: Context) -> ClientGraph:
    """Run the generator, without dropout, and add what it makes."""
    like = next(iter(parameters.values()))
    batch = single(GraphCollator([graph], device=like.device, dtype=like.dtype)([0]))
    return mended(graph, generate(client, parameters, batch, context, context.inbox["key"], drops=False))
