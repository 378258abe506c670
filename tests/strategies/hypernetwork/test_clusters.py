"""Clusters of clients that label alike things differently: a generator that is alive tells them apart."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Adam

from fl_lightning.batches.base import single
from fl_lightning.data import ClientGraph
from fl_lightning.round.context import Context
from fl_lightning.strategies import FedAvg, PFedHN, SheafRidge, Strategy
from fl_lightning.strategies.hypernetwork import SheafDiffusion

NUM_CLUSTERS, PER_CLUSTER, NUM_CLASSES, NUM_NODES = 3, 4, 3, 60
#: Class of a thing in each cluster: no two agree on any thing.
LABELS = torch.tensor([[0, 1, 2], [1, 2, 0], [2, 0, 1]])
#: Attention and an MLP before the ridge.
DEEP: dict[str, Any] = {
    "diffusion": functools.partial(SheafDiffusion, skip=True, hidden_channels=8),
    "diffusion_weight_decay": 5e-4,
    "attention": "qkv",
    "num_hidden_layers": 2,
    "hidden_channels": 32,
    "masked_averaging": False,
}


def things(seed: int) -> list[ClientGraph]:
    """Clients of the clusters in turn; a node is a thing with noise, and a word about the cluster that noise drowns."""
    draw = torch.Generator().manual_seed(seed)
    clients = []
    for number in range(NUM_CLUSTERS * PER_CLUSTER):
        cluster = number % NUM_CLUSTERS
        thing_N = torch.arange(NUM_NODES) % NUM_CLASSES
        x_NF = torch.eye(NUM_CLASSES)[thing_N] + 0.45 * torch.randn(NUM_NODES, NUM_CLASSES, generator=draw)
        word_NF = 0.5 * torch.eye(NUM_CLUSTERS)[cluster] + 0.7 * torch.randn(NUM_NODES, NUM_CLUSTERS, generator=draw)
        role_N = torch.arange(NUM_NODES) // NUM_CLASSES % 10
        clients.append(
            ClientGraph(
                name=f"client-{number:02d}",
                x_NF=torch.cat([x_NF, word_NF], dim=1),
                edge_index_2E=torch.empty(2, 0, dtype=torch.int64),
                y_N=LABELS[cluster][thing_N],
                train_mask_N=role_N < 2,
                val_mask_N=(role_N >= 2) & (role_N < 5),
                test_mask_N=role_N >= 5,
                node_idx_N=torch.arange(NUM_NODES),
            )
        )
    return clients


@pytest.fixture
def accuracy(given_clients, make_model, make_trainer):
    """Trains on the clusters; test accuracy of each client's generated (or averaged) model on each client's nodes."""

    def train(strategy: Strategy, *, num_rounds: int = 12) -> Tensor:
        trainer = make_trainer(num_rounds=num_rounds, evaluate_every=num_rounds)
        model = make_model(optimizer=functools.partial(Adam, lr=0.02), hidden_channels=16, dropout=0.0)
        trainer.fit(model, given_clients(things(seed=0)), strategy)
        clients = range(NUM_CLUSTERS * PER_CLUSTER)
        generated = strategy.model_for(clients)
        assert generated is not None
        own = trainer.run.executor.state().parameters
        table = torch.zeros(len(clients), len(clients))
        for judged in clients:
            parameters = {n: generated.parameters.get(n, own[n])[judged] for n in own}
            for home in clients:
                batch = single(trainer.run.executor.collator([home]))
                correct, count = model.score_table(parameters, batch, Context())["test/acc"].tolist()
                table[judged, home] = correct / count
        return table

    return train


CLUSTER = torch.arange(NUM_CLUSTERS * PER_CLUSTER) % NUM_CLUSTERS
SAME = CLUSTER[:, None] == CLUSTER


@pytest.mark.parametrize(
    "build",
    [
        functools.partial(SheafRidge, num_epochs=3, **DEEP),
        functools.partial(SheafRidge, num_epochs=3),
    ],
    ids=["SheafRidge, deep", "SheafRidge"],
)
@pytest.mark.filterwarnings("ignore:SheafRidge. for 10 rounds every client has been generated the same model")
def test_true_embeddings_beat_one_model_for_all_and_permuted_ones(build, accuracy) -> None:
    true, permuted, average = accuracy(build()), accuracy(build(permute_embeddings=True)), accuracy(FedAvg())

    own = true.diagonal().mean()
    assert own > average.diagonal().mean() + 0.1
    assert own > permuted.diagonal().mean() + 0.1
    # a generated model fits its own cluster, whoever's nodes they are, and no other
    assert true[SAME].mean() > true[~SAME].mean() + 0.3


def test_learned_embeddings_tell_clusters_apart_in_time(accuracy) -> None:
    strategy = PFedHN(num_epochs=3, hidden_channels=32, embedding_channels=16, num_server_steps=30)

    table = accuracy(strategy, num_rounds=40)

    assert table.diagonal().mean() > accuracy(FedAvg()).diagonal().mean() + 0.1
    assert table[SAME].mean() > table[~SAME].mean() + 0.1
