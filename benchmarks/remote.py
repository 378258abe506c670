"""What a federation over NVFlare costs: seconds to start, seconds of a round, bytes; beside the same run in process.

    OMP_NUM_THREADS=1 python benchmarks/remote.py

A server and three sites as processes of this machine, over mutual TLS on 127.0.0.1; FedAvg and FedSheafHN on the
quickstart's graph, 20 rounds. Writes benchmarks/results/remote.json and .md.
"""

import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from fl_lightning.remote.job import Parts
from fl_lightning.remote.submit import Submission, run_job, session_of
from fl_lightning.remote.trial import Trial
from fl_lightning.run import checkpoint

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
NUM_ROUNDS = 20
OPTIONS = {
    "FedAvg": ["--strategy", "FedAvg"],
    "FedSheafHN": ["--strategy.num_neighbors", "2"],
}


def parts_of(strategy: str, folder: Path) -> Parts:
    """The quickstart with three clients."""
    options = ["--config", str(ROOT / "configs" / "quickstart.yaml"), *OPTIONS[strategy]]
    options += [f"--trainer.num_rounds={NUM_ROUNDS}", "--data.source.num_communities=3", "--trainer.logger=false"]
    options += [f"--trainer.default_root_dir={folder}", "--trainer.executor=SequentialExecutor"]
    return Parts(options)


def rounds(history: list[dict[str, float]]) -> float:
    """Median seconds of a round, without the first."""
    return statistics.median(row["seconds"] for row in history[1:])


def measure(folder: Path) -> dict[str, Any]:
    """All metrics."""
    result: dict[str, Any] = {"load": os.getloadavg()[0], "cores": os.cpu_count()}
    with Trial(folder / "sites", 3) as trial:
        trial.give(yaml.safe_load(parts_of("FedAvg", folder / "local").trainer.config)["data"])
        begin = time.monotonic()
        trial.start()
        with session_of(trial.admin_kit) as session:
            trial.wait(session)
            result["seconds until the sites are connected"] = time.monotonic() - begin
            for strategy in OPTIONS:
                local = parts_of(strategy, folder / "local")
                local.trainer.fit(local.model, local.datamodule, local.strategy)
                config = local.trainer.config
                submission = Submission.of_config(config, name=strategy, sites=trial.sites)
                outcome = run_job(session, submission, folder / "fetched", trial.processes.check)
                if outcome.status != "finished" or outcome.folder is None:
                    raise RuntimeError(f"{strategy}: {outcome.message}")
                state = checkpoint.read(outcome.folder / "checkpoints" / "last.ckpt")
                result[strategy] = {
                    "seconds from submission to the first message": outcome.facts["seconds_to_start"],
                    "seconds of the job": outcome.facts["seconds"],
                    "seconds of a round": rounds(state["history"]),
                    "seconds of a round in process": rounds(local.trainer.run.history),
                    "bytes down": outcome.facts["bytes"]["down"],
                    "bytes up": outcome.facts["bytes"]["up"],
                    "bytes of payloads (ledger)": int(state["history"][-1]["comm/bytes_total"]),
                    "as in process": state["history"][-1]["test/acc"] == local.trainer.run.history[-1]["test/acc"],
                }
    return result


def table(result: dict[str, Any]) -> str:
    """The metrics in Markdown."""
    lines = [
        f"`python benchmarks/remote.py`: 3 sites, {NUM_ROUNDS} rounds, {result['cores']} cores at a load of "
        f"{result['load']:.1f} when it began.",
        f"Server and sites were connected {result['seconds until the sites are connected']:.1f} s after they were "
        "started.",
        "",
        "| | FedAvg | FedSheafHN |",
        "|---|---|---|",
    ]
    for name, value in result["FedAvg"].items():
        cells = [result[strategy][name] for strategy in OPTIONS]
        summary = [
            f"{'yes' if cell else 'no'}"
            if isinstance(value, bool)
            else f"{cell:,.2f}"
            if "seconds" in name
            else f"{cell:,}"
            for cell in cells
        ]
        lines.append(f"| {name} | {' | '.join(summary)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        metrics = measure(Path(scratch))
    (RESULTS / "remote.json").write_text(json.dumps(metrics, indent=1) + "\n")
    (RESULTS / "remote.md").write_text(table(metrics))
