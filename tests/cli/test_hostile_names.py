"""Names of anybody's, through every verb that prints them: they are shown as they are, and steer nothing."""

import json
import os
from pathlib import Path

import pytest
import torch
import yaml

from fl_lightning.command_line import main

CLIENTS = (
    "ward [/b] 3",
    "[red]b",
    "[link=x]ok[/link]",
    ":smile:",
    "C:\\new\\",
    'a"""\nimport os; os.mkdir("struck")\n"""',
    "up\x1b]0;title\x07",
    "US$ 1 $x_{$",
)
SHOWN = (*CLIENTS[:5], CLIENTS[-1], "up\\x1b]0;title\\x07")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of clients with such names, in a folder with such a name."""
    folder = tmp_path / "[/x] [bold]"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "500")
    monkeypatch.setenv("FL_CACHE_DIR", str(tmp_path / "cache"))
    draw = torch.Generator().manual_seed(0)
    Path("a[").mkdir()
    for file in ("clients.pt", "a[/b].pt"):
        torch.save({name: (torch.randn(20, 3, generator=draw), torch.arange(20) % 2) for name in CLIENTS}, file)
    bar = {"class_path": "fl_lightning.callbacks.RoundProgressBar", "init_args": {"worst_clients": len(CLIENTS)}}
    settings = {
        "strategy": "FedAvg",
        "model": {"class_path": "ClientModule", "init_args": {"net": "fl_lightning.models.MLP"}},
        "data": {"source": {"class_path": "ExampleFile", "init_args": {"path": "clients.pt"}}},
        "trainer": {"num_rounds": 1, "default_root_dir": "runs", "run_name": "a", "callbacks": [bar]},
    }
    Path("run.yaml").write_text(yaml.safe_dump(settings))
    return "--config=run.yaml"


def test_every_verb_shows_names_as_they_are(config: str, capfd: pytest.CaptureFixture[str]) -> None:
    def shown(*words: str) -> str:
        assert main(words) == 0
        out, err = capfd.readouterr()
        assert not set("\x1b\x07") & set(out + err)
        return out

    table = shown("data", config, "--picture=labels.png", "--csv=clients.csv")
    assert [name for name in SHOWN if name not in table] == []
    results = shown("fit", config)
    assert [name for name in SHOWN if name not in results] == []
    run = next(Path("runs").glob("**/result.json")).parent
    assert json.loads((run / "result.json").read_text())["status"] == "finished"
    assert str(run) in shown("test", config, "--ckpt_path=last")
    assert f"predictions in {run.parent}" in shown("predict", config, "--ckpt_path=last")
    assert f"{run}/report.html" in shown("report", str(run))
    assert "br/[tuned].html" in shown("compare", str(run), "--output=br/[tuned].html")
    shown("fit", config, "--data.source.init_args.path=a[/b].pt")
    assert "a[/b].pt" in shown("compare", "runs")
    if os.name == "posix":
        shown("export", str(run), f"--client={CLIENTS[5]}")
        assert not Path("struck").exists()
