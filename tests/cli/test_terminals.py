"""Terminals that have not all letters: a run that was trained ends well."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = """
from fl_lightning import ClientModule, FederatedDataModule, FederatedTrainer
from fl_lightning.data import GivenPartitioner, PlantedCommunities
from fl_lightning.strategies import FedAvg
source = PlantedCommunities(num_nodes=60, num_communities=3)
data = FederatedDataModule(source, GivenPartitioner(), cache_dir="c", root="c")
FederatedTrainer(num_rounds=1, accelerator="cpu", logger=False).fit(ClientModule(), data, FedAvg())
"""


@pytest.mark.full
@pytest.mark.parametrize(
    ("door", "variables"),
    [
        ("command", {"PYTHONIOENCODING": "ascii"}),
        ("python", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}),
    ],
    ids=["command", "python"],
)
def test_an_ascii_terminal(tmp_path: Path, door: str, variables: dict[str, str]) -> None:
    words = ["-m", "fl_lightning.command_line", "fit", f"--config={ROOT / 'configs' / 'quickstart.yaml'}"]
    words = [*words, "--trainer.num_rounds=1"] if door == "command" else ["-c", PYTHON]
    environment = {**os.environ, **variables, "PYTHONPATH": str(ROOT), "FL_CACHE_DIR": str(tmp_path)}
    ended = subprocess.run([sys.executable, *words], cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr.decode()
    assert b"\\xb1" in ended.stdout
    assert b"Traceback" not in ended.stderr
