"""One client by itself, in float64 and without dropout, whose objectives are compared with their parts."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from fl_lightning import ClientModule
from fl_lightning.batches import ClientGraph, GraphBatch
from fl_lightning.batches.base import single
from fl_lightning.batches.graphs import GraphCollator


def one_client(
    graph: ClientGraph, net: Callable[[int, int], nn.Module], num_models: int = 1, *, num_classes: int = 3
) -> tuple[ClientModule, GraphBatch, list[dict[str, Tensor]]]:
    """A client, its batch, and some random models of it."""
    client = ClientModule(net)
    client.build(graph.num_features, num_classes)
    client.double().eval()
    batch = single(GraphCollator([graph], device=torch.device("cpu"), dtype=torch.float64)([0]))
    draw = torch.Generator().manual_seed(0)
    shapes = {name: p.shape for name, p in client.parameter_dict().items()}
    models = [
        {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()}
        for _ in range(num_models)
    ]
    return client, batch, models
