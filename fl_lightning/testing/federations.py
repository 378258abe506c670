"""Small generated federations: five clients of unequal sizes, with a relation graph."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch_geometric.data import Data

from fl_lightning.data import (
    ClientSplit,
    FederatedDataModule,
    GlobalSplit,
    Partitioner,
    PlantedCommunities,
    PlantedRelations,
)
from fl_lightning.relations.topology import Ring

#: Nodes of each client.
SIZES = (30, 24, 18, 12, 8)
#: The group of each client.
GROUPS = (0, 1, 1, 0, 1)


class _Slices(Partitioner):
    """Consecutive nodes, in unequal shares.

    Args:
        sizes: Nodes of each client.
    """

    def __init__(self, sizes: Sequence[int] = SIZES) -> None:
        super().__init__(len(sizes))
        self.sizes = list(sizes)

    def assign(self, data: Data, seed: int) -> list[Tensor]:
        """Cut the nodes in their order."""
        return list(torch.split(torch.arange(data.num_nodes), self.sizes))


def small_graphs(folder: Path) -> FederatedDataModule:
    """Graphs of 30 to 8 nodes with six features, with cross edges, three classes; derived files go into the folder."""
    source = PlantedCommunities(num_nodes=sum(SIZES), num_communities=5, num_classes=3, num_features=6)
    settings = {"relation_graph": Ring(), "cross_edges": True, "cache_dir": str(folder)}
    return _set_up(FederatedDataModule(source, _Slices(), GlobalSplit(), **settings))  # type: ignore[arg-type]


def small_examples(folder: Path) -> FederatedDataModule:
    """Thirty rows of four features a client, two classes, in mini-batches of eight."""
    source = PlantedRelations(num_clients=5, num_groups=2, num_examples=30, num_features=4)
    return _set_up(
        FederatedDataModule(source, None, ClientSplit(), relation_graph=Ring(), batch_size=8, cache_dir=str(folder))
    )


def _set_up(data: FederatedDataModule) -> FederatedDataModule:
    data.prepare_data()
    data.setup()
    return data
