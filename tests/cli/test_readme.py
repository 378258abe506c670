"""What the README and the tutorial of algorithms show is what it says it is."""

import re
from pathlib import Path

import pytest

from fl_lightning import ClientModule, FederatedDataModule, FederatedTrainer, SequentialExecutor, StackedExecutor
from fl_lightning.data import GivenPartitioner, PlantedCommunities
from fl_lightning.strategies.local import Local
from fl_lightning.strategies.mixing.fedavg import FedAvg

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
TUTORIAL = (ROOT / "docs" / "tutorials" / "your-algorithm.md").read_text()


def half_way() -> type:
    """The tutorial's example algorithm, without the run that follows it."""
    example = re.findall(r"```python\n(.*?)```", TUTORIAL, flags=re.DOTALL)[0]
    namespace: dict[str, type] = {"__name__": "halfway"}
    exec(compile(example, "your-algorithm.md", "exec"), namespace)
    return namespace["Halfway"]


@pytest.mark.parametrize("executor", [SequentialExecutor, StackedExecutor])
def test_example_algorithm(executor: type, tmp_path: Path) -> None:
    def final_loss(strategy: object) -> float:
        source = PlantedCommunities(num_nodes=120, num_communities=4, num_features=8)
        data = FederatedDataModule(source, GivenPartitioner(), cache_dir=str(tmp_path))
        trainer = FederatedTrainer(
            num_rounds=2, executor=executor(), logger=False, accelerator="cpu", default_root_dir=str(tmp_path)
        )
        trainer.fit(ClientModule(), data, strategy)  # type: ignore[arg-type]
        return trainer.run.history[-1]["val/loss"]

    strategy = half_way()
    assert final_loss(strategy(pull=1.0)) == pytest.approx(final_loss(FedAvg()), rel=1e-4)
    assert final_loss(strategy(pull=0.0)) == pytest.approx(final_loss(Local()), rel=1e-4)
    assert final_loss(strategy(pull=0.5)) != pytest.approx(final_loss(Local()), rel=1e-3)


def test_files_and_configs_that_it_names_exist() -> None:
    for name in re.findall(r"configs/[\w/]+\.yaml|benchmarks/[\w/]+\.(?:py|json)", README):
        assert (ROOT / name).is_file(), name
    for name in re.findall(r"^\| `([\w/]+(?:\.py|/))`", README, flags=re.MULTILINE):
        assert (ROOT / name).exists() or (ROOT / "fl_lightning" / name).exists(), name


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 120
    (example,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    compile(example, "README.md", "exec")
