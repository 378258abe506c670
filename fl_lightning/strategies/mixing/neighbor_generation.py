"""What a client of FedSage+ computes on its own: hidden neighbors, NeighGen's losses, the completed graph.

Shape legend: N nodes of a client, F features, S slots for new neighbors of a node.
"""

import dataclasses
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from fl_lightning.batches import Batch, ClientGraph, GraphBatch, GraphCollator
from fl_lightning.batches.base import single
from fl_lightning.kernels.edges import sample_neighbors
from fl_lightning.kernels.randomness import random_places, subkey
from fl_lightning.models.neighbor_generator import Generated
from fl_lightning.models.output import NetOutput
from fl_lightning.round.client import ClientModule, parameters_of
from fl_lightning.round.context import Context, Parameters


def hide(
    batch: Batch, key: Tensor, share: float, num_slots: int, taught: Literal["training", "all"] = "training"
) -> dict[str, Tensor]:
    """Hide a share of the validation nodes (if there are none, of those that do not train).

    Returns:
        ``hidden`` (N,), boolean; for every node the indices of up to S hidden neighbors, ``lost`` (N, S), else -1; and
        ``taught`` (N,), boolean, the nodes that stay, or the training nodes among them.
    """
    assert isinstance(batch, GraphBatch)
    pool_N = torch.where(batch.val_mask.any(), batch.val_mask, batch.example_mask & ~batch.train_mask)
    number = (share * pool_N.sum() + 0.5).floor()
    hidden_N = pool_N & (random_places(subkey(key, "hide"), pool_N) < number)
    return {
        "hidden": hidden_N,
        "lost": sample_neighbors(subkey(key, "lost"), hidden_N, batch.adjacency, num_slots),
        "taught": (batch.example_mask if taught == "all" else batch.train_mask) & ~hidden_N,
    }


def generate(
    client: ClientModule, parameters: Parameters, batch: GraphBatch, context: Context, key: Tensor, *, drops: bool
) -> Generated:
    """Run the client's generator on its graph without the hidden nodes."""
    generator = client.net.get_submodule("generator")
    kept_N = batch.example_mask & ~context.client_state["impaired/hidden"]
    arguments = (batch, kept_N, key)
    made: Generated = functional_call(generator, parameters_of("generator", parameters), arguments, {"drops": drops})
    return made


def num_lost(batch: GraphBatch, context: Context) -> Tensor:
    """How many neighbors of each node are hidden, (N,)."""
    hidden_N1 = context.client_state["impaired/hidden"][:, None].to(batch.dtype)
    return batch.sum_neighbors(hidden_N1)[:, 0].round()


def nearest(new: Tensor, target: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
    """Squared distance of each generated feature vector to the nearest target (mean over features), and its index.

    Args:
        new: Generated features, (..., S, F).
        target: Targets, (..., S, F).
        there: Which targets exist, boolean (..., S); if there is none, the distance is 0.
    """
    square = new.square().sum(dim=-1)[..., :, None] + target.square().sum(dim=-1)[..., None, :]
    apart = ((square - 2 * new @ target.mT) / new.shape[-1]).masked_fill(~there[..., None, :], torch.inf)
    index = apart.argmin(dim=-1)
    least = apart.gather(-1, index[..., None])[..., 0]
    return torch.where(there.any(dim=-1, keepdim=True), least, 0.0).clamp(min=0), index


def local_loss(
    client: ClientModule, made: Generated, batch: GraphBatch, context: Context, weights: tuple[float, float, float]
) -> Tensor:
    """L_A: the losses of the numbers of lost neighbors, of their features, and of the classes predicted with them."""
    taught_N = context.client_state["impaired/taught"]
    number = taught_N.sum().clamp(min=1)
    counted_N = F.smooth_l1_loss(made.num_lost, num_lost(batch, context), reduction="none")
    lost_NS = context.client_state["impaired/lost"]
    target_NSF = batch.features_of(lost_NS.clamp(min=0).flatten()).view(made.features.shape)
    apart_NS, _ = nearest(made.features, target_NSF, lost_NS >= 0)
    made_NS = made.used & taught_N[:, None]
    train_N = batch.train_mask & ~context.client_state["impaired/hidden"]
    terms = (
        (counted_N * taught_N).sum() / number,
        (apart_NS * made_NS).sum() / (number * lost_NS.shape[1]),
        client.loss(NetOutput(made.logits, made.logits), batch.replace({"train_mask": train_N})),
    )
    return torch.stack([weight * term for weight, term in zip(weights, terms, strict=True)]).sum()


def generation_metrics(
    client: ClientModule, parameters: Parameters, batch: Batch, context: Context
) -> dict[str, Tensor]:
    """How many neighbors are generated, and the mean errors of their number and features over the nodes that stay."""
    assert isinstance(batch, GraphBatch)
    made = generate(client, parameters, batch, context, context.received["key"], drops=False)
    kept_N = batch.example_mask & ~context.client_state["impaired/hidden"]
    lost_NS = context.client_state["impaired/lost"]
    target_NSF = batch.features_of(lost_NS.clamp(min=0).flatten()).view(made.features.shape)
    apart_NS = nearest(made.features, target_NSF, lost_NS >= 0)[0] * made.features.shape[-1]
    compared_NS = made.used & (lost_NS >= 0).any(dim=1, keepdim=True)
    return {
        "generated_neighbors": made.used.sum(),
        "count_error": ((made.num_lost - num_lost(batch, context)).abs() * kept_N).sum() / kept_N.sum(),
        "feature_error": (apart_NS * compared_NS).sum() / compared_NS.sum().clamp(min=1),
    }


def with_generated_neighbors(graph: ClientGraph, made: Generated) -> ClientGraph:
    """The graph with the generated neighbors, without labels and roles, after its own nodes."""
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
        y_N=torch.cat([graph.y_N, graph.y_N.new_full((len(owner), *graph.y_N.shape[1:]), -1)]),
        node_idx_N=torch.cat([graph.node_idx_N, nothing]),
        **masks,  # type: ignore[arg-type]
    )


def generate_neighbors(
    client: ClientModule, parameters: Parameters, graph: ClientGraph, context: Context
) -> ClientGraph:
    """Run the generator without dropout, and add the generated neighbors."""
    like = next(iter(parameters.values()))
    batch = single(GraphCollator([graph], device=like.device, dtype=like.dtype)([0]))
    return with_generated_neighbors(
        graph, generate(client, parameters, batch, context, context.received["key"], drops=False)
    )
