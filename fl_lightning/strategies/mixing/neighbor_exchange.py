"""The generated neighbors that clients of FedSage+ show each other, and the gradients that they return.

Shape legend: F features, S slots for new neighbors of a node, C clients, M nodes that a client shows the others.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from fl_lightning.batches import Batch, GraphBatch
from fl_lightning.kernels.edges import sample_neighbors
from fl_lightning.kernels.randomness import random_normal, random_order, random_uniform, subkey
from fl_lightning.models.neighbor_generator import Generated
from fl_lightning.round.context import Context
from fl_lightning.strategies.mixing.neighbor_generation import nearest


def shown_nodes(batch: GraphBatch, context: Context, key: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Indices of up to ``count`` drawn nodes that NeighGen learns from, and which of them are not padding, (M,)."""
    taught_N = context.client_state["impaired/taught"]
    place_M, is_one_M = random_order(subkey(key, "show"), taught_N, min(count, len(taught_N)))
    missing = (0, count - len(place_M))
    return F.pad(place_M, missing), F.pad(is_one_M, missing)


def shown(made: Generated, batch: GraphBatch, context: Context, key: Tensor, count: int) -> dict[str, Tensor]:
    """What a client shows others for some nodes: generated features, and how many of them are used and needed."""
    place_M, is_one_M = shown_nodes(batch, context, key, count)
    used_MS = made.used[place_M] & is_one_M[:, None]
    num_there_M = (context.client_state["impaired/lost"] >= 0).sum(dim=1)[place_M] * is_one_M
    features_MSF = made.features[place_M] * used_MS[..., None]
    return {"features": features_MSF, "used": used_MS.sum(dim=1), "lost": num_there_M, "nodes": is_one_M.sum()}


def foreign_gradient(batch: Batch, context: Context, *, slots: int, weight: float, noise_std: float) -> Tensor:
    """∂/∂x̃_i of Σ of L_ij for every other client i, by this client's neighbors, (C, M, s, F).

    The targets of a node are ``slots`` neighbors (S), drawn with replacement, of a random node of this client (of more
    than S neighbors, of S that are drawn first). Of what was generated only s of S slots may be shown.
    """
    assert isinstance(batch, GraphBatch)
    received, (num_clients, count, num_used, width) = context.received, context.received["features"].shape
    pair_C = subkey(received["keys"] ^ received["key"], "pair")
    draw_CMS = random_uniform(pair_C, count, slots + 1)
    linked_N = (batch.degree > 0) & batch.example_mask
    order_N = (~linked_N).long().argsort(stable=True)  # the nodes with neighbors first
    node_CM = order_N[(draw_CMS[..., 0] * linked_N.sum()).long()]
    known_NS = sample_neighbors(subkey(received["key"], "known"), batch.example_mask, batch.adjacency, slots)
    choice_CMS = (draw_CMS[..., 1:] * batch.degree.clamp(max=slots)[node_CM][..., None]).long()
    target_CMS = known_NS[node_CM].gather(-1, choice_CMS).clamp(min=0)
    target = batch.features_of(target_CMS.flatten()).view(num_clients, count, slots, width)
    slot_S = torch.arange(slots, device=batch.y.device)
    there_CMS, used_CMs = slot_S < received["lost"][..., None], slot_S[:num_used] < received["used"][..., None]
    features = received["features"].to(target)
    index = nearest(features, target, there_CMS)[1]
    chosen = target.gather(2, index[..., None].expand(-1, -1, -1, width))
    gradient = 2 * (features - chosen) / (slots * width * received["nodes"].clamp(min=1).view(-1, 1, 1, 1))
    if noise_std:
        gradient = gradient + noise_std * random_normal(subkey(pair_C, "noise"), count * num_used, width).to(
            gradient
        ).view(gradient.shape)
    counts_CMs = used_CMs & there_CMS.any(dim=-1, keepdim=True) & linked_N.any() & received["other"][:, None, None]
    return weight * gradient * counts_CMs[..., None]
