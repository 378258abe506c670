"""Commands of the tests, on a small federation, and how they are refused."""

from pathlib import Path

import pytest

from fl_lightning.cli import main

QUICKSTART = Path(__file__).parents[1] / "configs" / "quickstart.yaml"
SMALL = [
    f"--config={QUICKSTART}",
    "--trainer.num_rounds=2",
    "--data.source.num_nodes=200",
    "--data.source.num_communities=5",
    "--strategy.num_epochs=1",
    "--strategy.init_epochs=1",
    "--strategy.num_neighbors=2",
    "--model.init_args.net.init_args.hidden_channels=8",
]
#: The same federation with plain averaging.
PLAIN = [*SMALL[:4], "--strategy=FedAvg"]


def refused_after(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message of a command that must be refused before training, in one line."""
    with pytest.raises(SystemExit) as stop:
        main(list(arguments))
    assert stop.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("fl-train: error: ")]
    assert len(lines) == 1
    return lines[0]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    line = refused_after(capsys, *arguments)
    assert not list(Path("runs").glob("**/*.ckpt"))
    return line
