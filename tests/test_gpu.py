"""On a GPU: the contract of all strategies, and every task as on a CPU. ``pytest -m gpu`` runs these."""

from pathlib import Path
from typing import Any

import pytest
import torch
from strategies.test_contract import STRATEGIES, pytestmark, tiny
from task_data import FEATURES, NODES, graph_data, link_data, node_data, ring
from torch_geometric.data import Data

from fl_lightning import FederatedDataModule, FederatedTrainer, SequentialExecutor, StackedExecutor
from fl_lightning.data import NeighborSampler, RandomPartitioner
from fl_lightning.strategies import Ditto, FedAvg
from fl_lightning.testing import CHECKS, StrategyRuns
from fl_lightning.testing.comparison import assert_same

if not torch.cuda.is_available():
    pytest.skip("there is no GPU here", allow_module_level=True)

pytestmark = [*pytestmark, pytest.mark.gpu]
both_executors = pytest.mark.parametrize("executor", [SequentialExecutor, StackedExecutor])


#: With ``--dist loadgroup`` the checks of a strategy share its runs.
GROUPED = [pytest.param(kind, id=kind.__name__, marks=pytest.mark.xdist_group(kind.__name__)) for kind in STRATEGIES]


@pytest.fixture(scope="module", params=GROUPED)
def runs(request: Any, federation: Any, make_model: Any, tmp_path_factory: Any) -> StrategyRuns:
    """The runs of a strategy on the GPU."""
    folder: Path = tmp_path_factory.mktemp(request.param.__name__)
    return StrategyRuns(tiny(request.param), federation, folder, make_model(request.param, dropout=0.5), "gpu")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_contract(runs: StrategyRuns, check: Any) -> None:
    check(runs)


def test_strategies_come_to_what_they_do_on_a_cpu(runs: StrategyRuns) -> None:
    strategy = tiny(type(runs.strategy), dropout=False)  # the server's own is drawn on its device
    there = (StrategyRuns(strategy, runs.data, runs.folder / where, runs.client, where) for where in ("gpu", "cpu"))
    gpu, cpu = (each.everyone for each in there)
    for num_rounds, state in gpu.seen.states.items():
        assert_same(state, cpu.seen.states[num_rounds], tolerance=1e-6)
    assert_same(gpu.history, cpu.history, tolerance=1e-5)


def sampled(folder: Path) -> FederatedDataModule:
    graph = Data(
        x=torch.linspace(-1, 1, NODES * FEATURES).sin().view(NODES, FEATURES),
        edge_index=ring(NODES),
        y=torch.arange(NODES) % 3,
    )
    sampler = NeighborSampler([3, 2])
    return FederatedDataModule(
        graph, RandomPartitioner(3), cache_dir=str(folder), root=str(folder), batch_size=8, sampler=sampler
    )


@both_executors
@pytest.mark.parametrize("strategy", [FedAvg, Ditto])
@pytest.mark.parametrize(
    "make_data",
    [
        lambda folder: node_data("numbers", folder),
        lambda folder: node_data("labels", folder),
        lambda _: graph_data(batch_size=4),
        lambda _: graph_data(kind="numbers"),
        link_data,
        sampled,
    ],
    ids=["node regression", "labels of nodes", "graphs", "regression of graphs", "links", "sampled"],
)
def test_tasks_come_to_what_they_do_on_a_cpu(make_data: Any, strategy: Any, executor: Any, tmp_path: Path) -> None:
    runs = []
    for accelerator in ("cpu", "gpu"):
        trainer = FederatedTrainer(
            num_rounds=3,
            accelerator=accelerator,
            precision="64-true",
            executor=executor(),
            logger=False,
            default_callbacks=False,
            default_root_dir=str(tmp_path / accelerator),
        )
        result = trainer.fit(None, make_data(tmp_path), strategy())
        runs.append((result, trainer.run.history))
    assert_same(runs[1], runs[0], tolerance=1e-5)


@both_executors
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_precisions(precision: Any, executor: Any, federation: FederatedDataModule, tmp_path: Path) -> None:
    trainer = FederatedTrainer(
        num_rounds=5,
        accelerator="gpu",
        precision=precision,
        executor=executor(),
        logger=False,
        default_callbacks=False,
        default_root_dir=str(tmp_path),
    )
    result = trainer.fit(None, federation, FedAvg(num_epochs=3))
    assert result["test/acc"] > 0.5
