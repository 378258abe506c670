"""Nets in which every example chooses, layer by layer, between a shared and a local copy of the layer (Flow)."""

import copy
from collections.abc import Mapping
from typing import ClassVar, Literal

from torch import Tensor, nn
from torch.func import functional_call

from fl_lightning.batches.base import Batch
from fl_lightning.batches.graphs import GraphBatch
from fl_lightning.kernels.linear import Linear
from fl_lightning.models.gcn import GraphConvolution
from fl_lightning.models.output import NetOutput

#: Which outputs of the layers are passed on: the shared ones, the local ones, mixtures by the policy, or its choices.
Route = Literal["shared", "local", "soft", "hard"]


class Routes:
    """The shared copies' shares in a forward pass, (..., N, layers), or one number for all layers.

    Nodes have the shares of their examples.
    """

    shares: Tensor | float = 1.0
    of_nodes: Tensor | float = 1.0


class RoutedLayer(nn.Module):
    """Two copies of a layer whose outputs are mixed example by example.

    Args:
        layer: The layer.
        index: Its index.
        routes: The object with the shares.
    """

    def __init__(self, layer: nn.Module, index: int, routes: Routes) -> None:
        super().__init__()
        self.shared = layer
        self.local = copy.deepcopy(layer)
        self.index = index
        self.routes = routes

    def forward(self, *inputs: object) -> Tensor:
        """Mix the outputs of both copies, or run only the one that counts."""
        shares = self.routes.of_nodes if isinstance(self.shared, GraphConvolution) else self.routes.shares
        if isinstance(shares, float):
            only: Tensor = (self.shared if shares else self.local)(*inputs)
            return only
        shared, local = self.shared(*inputs), self.local(*inputs)
        share = shares[..., self.index].unsqueeze(-1).to(shared.dtype)
        mixed: Tensor = local + share * (shared - local)
        return mixed


class Policy(nn.Module):
    """Maps an example to the probability of the shared copy in each layer; for graphs its first layer is a convolution.

    Args:
        in_channels: Width of the inputs.
        num_layers: Number of routed layers.
        is_graph: Whether examples are nodes or whole graphs; nodes are routed by their own and their neighbors'
            features, whole graphs by the mean over their nodes.
        hidden_channels: Width of the hidden layer.
    """

    def __init__(self, in_channels: int, num_layers: int, *, is_graph: bool, hidden_channels: int) -> None:
        super().__init__()
        self.first = (GraphConvolution if is_graph else Linear)(in_channels, hidden_channels)
        self.last = Linear(hidden_channels, num_layers)

    def forward(self, batch: Batch) -> Tensor:
        """Probabilities, (..., N, num_layers)."""
        if isinstance(batch, GraphBatch):
            hidden = batch.pool(self.first(None, batch).relu())
        else:
            x: Tensor = batch.x  # type: ignore[attr-defined]
            hidden = self.first(x.flatten(batch.example_mask.dim())).relu()
        shares: Tensor = self.last(hidden).sigmoid()
        return shares


class Routed(nn.Module):
    """A net with two copies of each layer and a policy: ``net.*.shared.*``, ``net.*.local.*`` and ``policy.*``.

    Args:
        net: The net; its parameters must be those of linear layers and graph convolutions.
        hidden_channels: Width of the policy's hidden layer.

    Raises:
        ValueError: The net has other layers, no first layer from which the width of the inputs is known, or a layer
            with the name of the local copies.
    """

    #: Sub-nets whose gradients are clipped separately.
    models: ClassVar[tuple[str, ...]] = ("net", "policy")

    def __init__(self, net: nn.Module, *, hidden_channels: int) -> None:
        super().__init__()
        kinds = (GraphConvolution, nn.Linear)
        layers = [(name, layer) for name, layer in net.named_modules() if isinstance(layer, kinds)]
        covered = {f"{name}.{inner}" for name, layer in layers for inner, _ in layer.named_parameters()}
        others = [name for name, _ in net.named_parameters() if name not in covered]
        if others or not layers:
            raise ValueError(
                f"Flow routes linear layers and graph convolutions, but {type(net).__name__} has "
                f"{', '.join(others) or 'none'}: give another net, such as GCN or MLP"
            )
        if named := [name for name, _ in layers if "local" in name.split(".")]:
            raise ValueError(
                f"Flow calls its copies of a layer shared and local, but {type(net).__name__} has a layer "
                f"{named[0]}: give the net's layers other names than local"
            )
        self.routes = Routes()
        first = layers[0][1]
        is_graph = isinstance(first, GraphConvolution)
        width = first.weight.shape[0 if is_graph else 1]
        self.policy = Policy(width, len(layers), is_graph=is_graph, hidden_channels=hidden_channels)
        for index, (name, layer) in enumerate(layers):
            parent, _, inner = name.rpartition(".")
            owner, routed = net.get_submodule(parent), RoutedLayer(layer, index, self.routes)
            setattr(owner, inner, routed)
        self.net = net
        self.takes_stacks: bool = getattr(net, "takes_stacks", False)

    def forward(self, batch: Batch, route: Route = "hard") -> NetOutput:
        """Run the net on a route; by default the policy's choice, example by example."""
        if route in ("soft", "hard"):
            shares = self.policy(batch)
            shares = (shares >= 0.5).to(shares.dtype) if route == "hard" else shares
            self.routes.shares = shares
            self.routes.of_nodes = batch.spread(shares) if isinstance(batch, GraphBatch) else shares
        else:
            self.routes.shares = self.routes.of_nodes = 1.0 if route == "shared" else 0.0
        try:
            output: NetOutput = self.net(batch)
            return output
        finally:
            self.routes.shares = self.routes.of_nodes = 1.0


def run_route(net: nn.Module, parameters: Mapping[str, Tensor], batch: Batch, route: Route) -> NetOutput:
    """The output of a routed net with the given parameters for a batch on a route."""
    output: NetOutput = functional_call(net, dict(parameters), (batch, route), tie_weights=False)
    return output


def policy_shares(net: nn.Module, parameters: Mapping[str, Tensor], batch: Batch) -> Tensor:
    """Each example's probability of the shared copy, (..., N, layers)."""
    inner = {name.removeprefix("policy."): p for name, p in parameters.items() if name.startswith("policy.")}
    shares: Tensor = functional_call(net.get_submodule("policy"), inner, (batch,), tie_weights=False)
    return shares


def training_mean(value_N: Tensor, batch: Batch) -> Tensor:
    """The mean over the training examples, (...)."""
    return (value_N * batch.train_mask).sum(dim=-1) / batch.train_mask.sum(dim=-1).clamp(min=1)
