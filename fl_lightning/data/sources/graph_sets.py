"""Clients that each hold many graphs, each with its own label."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.data import Data

from fl_lightning.batches.client_graph import ClientGraph
from fl_lightning.batches.graph_sets import ClientGraphs
from fl_lightning.data.allocation import Allocation, Asked, digest_of, masks_of, split_examples
from fl_lightning.data.preparation import Preparation, checked_targets
from fl_lightning.data.sources.base import Source
from fl_lightning.data.sources.examples import client_names
from fl_lightning.data.sources.joined import GRAPH, Part, joined
from fl_lightning.tasks import GraphClassification, GraphRegression
from fl_lightning.tasks.base import kind_of_target


class GraphSets(Source):
    """Graphs in memory.

    Args:
        clients: For each client its graphs, with ``x``, ``edge_index``, ``y`` (a class, labels or numbers of the graph)
            and perhaps ``edge_weight`` and ``edge_attr``.
        names: Of the clients; None for their numbers.
        undirected: Add missing reverse edges.

    Raises:
        ValueError: A client has no graphs, or not a name for each client.
    """

    def __init__(
        self, clients: Sequence[Sequence[Data]], names: Sequence[str] | None = None, undirected: bool = True
    ) -> None:
        if not clients or not all(clients):
            raise ValueError("GraphSets.clients must have at least one graph of each client")
        if names is not None and (len(names) != len(clients) or len(set(names)) < len(names)):
            raise ValueError(f"GraphSets.names is {names}: give each of the {len(clients)} clients its own")
        self.sets = [list(each) for each in clients]
        self.names = client_names("client", len(clients)) if names is None else tuple(names)
        self.preparation = Preparation(normalize_features=False, largest_component=False, undirected=undirected)

    def identity(self) -> dict[str, Any]:
        """The graphs themselves are part of the partition's hash."""
        return {"source": type(self).__name__, "names": list(self.names), "preparation": self.preparation.identity()}

    def allocate(self, asked: Asked, prepared: Any) -> Allocation:
        """Every client's graphs."""
        rows = [torch.stack([torch.as_tensor(graph.y).reshape(-1) for graph in names]) for names in self.sets]
        y = torch.cat(rows)
        kind = kind_of_target(y)
        task = GraphRegression() if kind == "numbers" else GraphClassification(multi_label=kind == "labels")
        targets = list(torch.split(checked_targets(y, len(y), "GraphSets"), [len(each) for each in rows]))
        roles = split_examples(task, targets, asked)
        clients = tuple(map(self._client, self.names, self.sets, targets, roles))
        tensors = [t for each in clients for t in (each.union.x_NF, each.union.edge_index_2E, each.num_nodes_G)]
        return Allocation(
            task=task,
            clients=clients,
            num_outputs=task.target.num_outputs(targets),
            source_idx=tuple(torch.arange(each.size) for each in clients),
            partition_hash=digest_of(asked.identity(self.identity()), (*tensors, *targets, *roles)),
        )

    def _client(self, name: str, graphs: Sequence[Data], y_G: Tensor, role_G: Tensor) -> ClientGraphs:
        keys = ("x", "edge_index", "edge_weight", "edge_attr")
        whole = joined(
            Part(
                graph=Data(**{k: graph[k] for k in keys if graph.get(k) is not None}, y=torch.zeros(graph.num_nodes)),
                preparation=self.preparation,
                name=f"{name}, graph {index}",
            )
            for index, graph in enumerate(graphs)
        )
        union = ClientGraph(
            name=name,
            x_NF=whole.x,
            edge_index_2E=whole.edge_index,
            y_N=torch.full((whole.num_nodes,), -1),
            **masks_of(torch.zeros(whole.num_nodes)),
            node_idx_N=torch.arange(whole.num_nodes),
            edge_weight_E=whole.get("edge_weight"),
            edge_attr_EK=whole.get("edge_attr"),
        )
        num_nodes_G = torch.bincount(whole[GRAPH], minlength=len(graphs))
        return ClientGraphs(name=name, union=union, num_nodes_G=num_nodes_G, y_N=y_G, **masks_of(role_G))
