"""What is known of clients without looking at what they hold."""

import torch

from fl_lightning.batches.graphs import GraphCollator
from fl_lightning.federation import ClientRegistry, Federation
from fl_lightning.tasks import NodeClassification

CPU = torch.device("cpu")


def test_the_data_module_and_its_clients_agree(federation) -> None:
    registry = federation.registry
    assert registry is federation.registry
    assert len(registry) == federation.num_clients == 5
    assert registry.names == tuple(client.name for client in federation.clients)
    assert registry.sizes == (30, 24, 18, 12, 8)
    assert registry.cost == tuple(client.num_nodes + client.num_edges for client in federation.clients)
    assert (registry.task, registry.num_features, registry.num_outputs) == (NodeClassification(), 6, 3)
    assert registry.partition_hash == federation.partition_hash
    assert torch.equal(registry.relation_CC, federation.relation_CC)


def test_a_site_with_one_graph_builds_the_batch_that_all_would(graphs) -> None:
    sparse = [vars(graph) | {"x_NF": torch.zeros_like(graph.x_NF)} for graph in graphs[1:]]
    clients = [graphs[0], *(type(graphs[0])(**changed) for changed in sparse)]
    whole = [clients[0], *clients[1:] * 100]  # client 0 alone is dense, all together sparse
    registry = ClientRegistry.of(whole, task=NodeClassification(), num_outputs=3)
    assert registry.layout == {"sparse_features": True}
    assert GraphCollator.layout_of(clients[:1]) == {"sparse_features": False}

    site = GraphCollator(clients[:1], layout=registry.layout, device=CPU, dtype=torch.float32)([0])
    whole = GraphCollator([clients[0], *clients[1:] * 100], device=CPU, dtype=torch.float32)([0])

    assert site.propagated_x is whole.propagated_x is None
    assert torch.equal(site.sparse_x.matrix.to_dense(), whole.sparse_x.matrix.to_dense())


def test_what_empty_values_of_a_federation_stand_for() -> None:
    small, large = {"w": torch.zeros(1)}, {"w": torch.zeros(2)}
    known = {"num_clients": 3, "training_clients": (0, 1, 2), "num_features": 1, "seed": 0, "device": CPU}
    one = Federation(**known, parameters=small)
    two = Federation(**known, parameters=small, architectures=(small, large))
    given = Federation(**known, parameters=small, architectures=(small, large), architecture_of=(1, 1, 0))
    assert (one.architectures, one.architecture_of) == ((small,), (0, 0, 0))
    assert two.architecture_of == (0, 1, 0)
    assert given.architecture_of == (1, 1, 0)
