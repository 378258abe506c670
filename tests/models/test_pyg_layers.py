"""Every convolution of PyG as a client's net: it trains a round, or is refused by name for a reason."""

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch_geometric.nn import conv

from fl_lightning import ClientModule
from fl_lightning.strategies import FedAvg

WIDTH = 6  # features of the federation's nodes
SETTINGS: dict[str, Any] = {
    "in_channels": WIDTH,
    "out_channels": 3,
    "channels": WIDTH,
    "K": 2,
    "alpha": 0.1,
    "num_layers": 2,
    "num_relations": 2,
    "aggregators": ["mean", "max"],
    "scalers": ["identity", "linear"],
    "deg": torch.tensor([1, 2, 3]),
    "edge_dim": 4,
    "dim": 4,
    "kernel_size": 2,
    "filter_size": 2,
    "num_node_types": 1,
    "num_edge_types": 1,
    "edge_type_emb_dim": 2,
    "edge_attr_emb_dim": 2,
    "nn": nn.Linear(WIDTH, 5),
}
OWN: dict[str, dict[str, Any]] = {
    "EdgeConv": {"nn": nn.Linear(2 * WIDTH, 5)},
    "NNConv": {"nn": nn.Linear(4, WIDTH * 3)},
    "DirGNNConv": {"conv": conv.SAGEConv(WIDTH, 3)},
    "GPSConv": {"conv": conv.GCNConv(WIDTH, WIDTH), "heads": 2, "attn_type": "performer"},
    "EGConv": {"num_heads": 3},
    "PDNConv": {"hidden_channels": 4},
    "PointGNNConv": dict.fromkeys(("mlp_h", "mlp_f", "mlp_g"), nn.Linear(WIDTH, WIDTH)),
    "GatedGraphConv": {"out_channels": 8},
}
#: Why the others cannot be a client's net, which knows features and edges alone.
REFUSED = {
    "RGCNConv": "not given edge_type",
    "FastRGCNConv": "not given edge_type",
    "RGATConv": "not given edge_type",
    "HEATConv": "forward needs node_type, edge_type",
    "DNAConv": r"Feature shape must be \[num_nodes, num_layers, channels\]",
    "WLConv": "cannot compute on nodes of 6 features",
    "PANConv": "cannot compute on nodes of 6 features|torch.sparse|returns",
    "PPFConv": "forward needs pos, normal",
    "PointNetConv": "forward needs pos",
    "PointTransformerConv": "forward needs pos",
    "PointGNNConv": "forward needs pos",
    "GCN2Conv": "forward needs x_0",
    "FAConv": "forward needs x_0",
    # these compute, but on attributes of edges, which this federation's graphs do not have
    "GINEConv": "cannot compute on the data of client-00",
    "GMMConv": "cannot compute on the data of client-00",
    "NNConv": "cannot compute on the data of client-00",
    "MeshCNNConv": "cannot compute on the data of client-00|cannot compute on nodes",
}


def layers() -> list[str]:
    """Those whose ``forward`` takes features and edges, and which this machine can make."""
    actual = []
    for name in conv.__all__:
        parameters = list(inspect.signature(getattr(conv, name).forward).parameters)
        if "x" in parameters[1:2] and "edge_index" in parameters and not name.startswith("CuGraph"):
            actual.append(name)
    return [name for name in actual if name != "SplineConv"]  # which needs pyg-lib


def made(name: str) -> nn.Module:
    parameters = list(inspect.signature(getattr(conv, name).__init__).parameters.values())[1:]
    needed = {p.name: SETTINGS[p.name] for p in parameters if p.default is p.empty and p.name in SETTINGS}
    return getattr(conv, name)(**{**needed, **OWN.get(name, {})})


def test_there_are_most_of_them() -> None:
    assert len(layers()) > 45


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", layers())
def test_a_layer_trains_a_round_or_is_refused_by_name(name: str, make_trainer: Any, federation: Any) -> None:
    trainer, strategy, layer = make_trainer(num_rounds=1), FedAvg(num_epochs=2), made(name)
    if name in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name]) as refusal:
            trainer.fit(ClientModule(layer), federation, strategy)
        assert name in str(refusal.value)
        return
    trainer.fit(ClientModule(layer), federation, strategy)
    assert not trainer.run.num_failures
    state, start = trainer.run.executor.state().parameters, trainer.run.architectures[0]
    moved = [name for name, value in start.items() if not torch.equal(state[name][0], value)]
    assert moved, "nothing was trained"
    assert all(value.isfinite().all() for value in state.values())
    # the names are the layer's own
    assert {name for name in start if not name.startswith("head.")} <= set(dict(layer.named_parameters()))
