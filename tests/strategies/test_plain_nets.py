"""Which strategies run with a user's PyG module: all but those that say they have a net of their own."""

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.nn import GAT, GIN

from fl_lightning import SequentialExecutor, strategies
from fl_lightning.batches.base import single
from fl_lightning.kernels.csr import coordinates
from fl_lightning.strategies import FedAvg, FedBN, Pooled, Strategy

README = Path(__file__).parents[2] / "README.md"
STRATEGIES = {name: kind for name, kind in vars(strategies).items() if name in strategies.__all__}
STRATEGIES = {
    name: kind
    for name, kind in STRATEGIES.items()
    if isinstance(kind, type) and issubclass(kind, Strategy) and not kind.__abstractmethods__
}
NETS = {
    "GIN with BatchNorm": functools.partial(GIN, hidden_channels=8, num_layers=2, norm="batch_norm"),
    "GAT": functools.partial(GAT, hidden_channels=8, num_layers=2),
}
TINY = {
    "num_epochs": 1,
    "init_epochs": 1,
    "pretrain_epochs": 1,
    "num_head_epochs": 1,
    "num_neighbors": 2,
    "num_federated_rounds": 1,
    "num_pseudo_nodes": 6,
    "num_iterations": 1,
}


def tiny(kind: type[Strategy]) -> Strategy:
    return kind(**{name: value for name, value in TINY.items() if name in kind.__dataclass_fields__})


def refusal(kind: type[Strategy], net: str) -> str:
    """Why the strategy does not run with the net; empty if it does."""
    if kind.own_net:
        return (
            f"{kind.__name__} is tied by its paper to a net of its own, so it does not run with {net.partition(' ')[0]}"
        )
    if not kind.takes_statistics and "BatchNorm" in net:
        return f"{kind.__name__} computes with models that have no running statistics"
    if issubclass(kind, Pooled) and "BatchNorm" in net:
        return "Pooled has one model for all clients, but model.running_statistics is 'personal'"
    if issubclass(kind, FedBN) and "BatchNorm" not in net:
        return "FedBN keeps normalization layers local, but GAT has none"
    return ""


@pytest.mark.filterwarnings("ignore:DFedAvgM is for SGD with momentum")
@pytest.mark.filterwarnings("ignore:the maps cannot make the clients agree")
@pytest.mark.parametrize("net", list(NETS))
@pytest.mark.parametrize("name", list(STRATEGIES))
def test_a_strategy_runs_with_a_users_net_or_refuses_it_by_name(
    name: str, net: str, federation: Any, make_trainer: Any
) -> None:
    kind = STRATEGIES[name]
    trainer = make_trainer(num_rounds=2, executor=SequentialExecutor())
    model = kind.client_class(NETS[net])
    if why := refusal(kind, net):
        with pytest.raises(ValueError, match=f"^{why}"):
            trainer.fit(model, federation, tiny(kind))
        return
    trainer.fit(model, federation, tiny(kind))
    run = trainer.run
    assert not run.num_failures
    state = run.executor.state().parameters
    assert all(value.isfinite().all() for value in state.values())
    start = run.model.parameter_dict()
    assert any(not torch.equal(state[name][0], value) for name, value in start.items())


def test_the_readme_says_with_which_methods_a_users_net_runs() -> None:
    rows = re.findall(r"^\| ([a-z, ]+) \| (.+) \| (.+) \|$", README.read_text(), flags=re.MULTILINE)
    methods = {family: (re.findall(r"`(\w+)`", listed), reported) for family, listed, reported in rows if "`" in listed}
    assert {name for names, _ in methods.values() for name in names} >= set(STRATEGIES)
    for family, (names, reported) in methods.items():
        kinds = [STRATEGIES[name] for name in names]
        tied = [kind.__name__ for kind in kinds if kind.own_net]
        no_statistics = [k.__name__ for k in kinds if not k.takes_statistics and not k.own_net]
        expected = "all" + (f" but {listed(tied)}" if tied else "")
        expected += f"; {listed(no_statistics)} without BatchNorm" if no_statistics else ""
        expected += "; `FedBN` with it" if "FedBN" in names else ""
        assert reported == expected, family


def listed(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def test_a_view_of_a_graph_is_the_same_for_a_users_net(federation: Any, make_trainer: Any) -> None:
    trainer = make_trainer(num_rounds=1, executor=SequentialExecutor())
    trainer.fit(strategies.FedAvg.client_class(NETS["GAT"]), federation, FedAvg(num_epochs=0))
    batch = single(trainer.run.executor.collator([0]))
    view = batch.augmented(1, edge_dropout=0.5, feature_dropout=0.5)
    row, column = coordinates(view.adjacency.matrix)
    left = (view.adjacency.matrix.values() != 0) & (row != column)
    pairs = set(zip(column[left].tolist(), row[left].tolist(), strict=True))
    assert set(map(tuple, view.plain.edge_index.T.tolist())) == pairs
    assert 0 < len(pairs) < batch.plain.edge_index.shape[1]
    dropped = ~view.plain.x.any(dim=0)
    assert 0 < int(dropped.sum()) < len(dropped)
    assert torch.equal(view.plain.x[:, ~dropped], batch.plain.x[:, ~dropped])
