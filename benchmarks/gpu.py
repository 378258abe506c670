"""A round on a GPU beside the same round on the processors of its machine, and what CUDA graphs would save.

    FL_DATA_ROOT=... python benchmarks/gpu.py          # on a machine with a GPU; Cora and SM are read from FL_DATA_ROOT

FedAvg with all clients stacked and one after another; seconds a round are the median of the rounds after the second,
evaluation included, and each pair of runs takes turns in one process. The processors compute with as many threads as
``--threads`` says. For CUDA graphs the gradients of a step of the stacked clients are captured once and replayed with
the keys of each step, beside the same function called as usual; the optimizer's step is beside it. Writes
benchmarks/results/gpu.json and gpu.md.
"""

import argparse
import functools
import json
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from methods import RESULTS, ROOT
from suite import arxiv_like, cora, number, planted, seconds_a_round

from fl_lightning import ClientModule, FederatedDataModule, FederatedTrainer, SequentialExecutor, StackedExecutor
from fl_lightning.cli import FederatedCLI
from fl_lightning.executors.group import GroupTraining
from fl_lightning.models import GCN
from fl_lightning.strategies import FedAvg, FedSheafHN, Strategy

#: Rounds that are not counted: the first makes the batches.
WARM_UP = 2


def fit(data: FederatedDataModule, strategy: Strategy, width: int, rounds: int, **settings: Any) -> FederatedTrainer:
    """A run that writes nothing."""
    trainer = FederatedTrainer(num_rounds=rounds, logger=False, default_callbacks=False, **settings)
    trainer.fit(ClientModule(functools.partial(GCN, hidden_channels=width)), data, strategy)
    return trainer


def from_config(name: str, rounds: int, **settings: Any) -> FederatedTrainer:
    """A run of a configuration."""
    arguments = [f"--config={ROOT / 'configs' / name}", f"--trainer.num_rounds={rounds}", "--trainer.logger=false"]
    arguments += ["--trainer.default_callbacks=false"]
    arguments += [f"--trainer.{key}={value}" for key, value in settings.items() if key != "executor"]
    arguments += [f"--trainer.executor={type(settings['executor']).__name__}"]
    trainer: FederatedTrainer = FederatedCLI(args=["fit", *arguments]).trainer
    return trainer


def cases() -> Iterator[tuple[str, Callable[..., FederatedTrainer], int, bool]]:
    """Name, the run, rounds, and whether one client after another is measured too."""
    yield "Cora, 20 clients, GCN of width 64", functools.partial(fit, cora(), FedAvg(), 64), 42, True
    yield "Cora, 20 clients, GCN of width 1,024", functools.partial(fit, cora(), FedAvg(), 1024), 12, True
    yield "Cora, 20 clients, FedSheafHN", functools.partial(fit, cora(), FedSheafHN(init_epochs=5), 128), 22, False
    for num_clients, rounds in ((100, 22), (1_000, 12)):
        data = planted(num_clients, 100)
        yield (
            f"{num_clients:,} clients of 100 nodes, width 128",
            functools.partial(fit, data, FedAvg(), 128),
            rounds,
            False,
        )
    data = arxiv_like()
    yield "the size of ogbn-arxiv, 20 clients, width 256", functools.partial(fit, data, FedAvg(), 256), 12, True
    yield "seven sets of molecules (SM), GIN 3 x 64", functools.partial(from_config, "fedavg_sm.yaml"), 5, True


def measured(run: Callable[..., FederatedTrainer], rounds: int, one_by_one: bool) -> dict[str, float]:
    """Milliseconds a round by where and how."""
    result = {}
    for accelerator in ("cpu", "gpu"):
        for name, executor in (("stacked", StackedExecutor), ("one by one", SequentialExecutor)):
            if name == "stacked" or one_by_one:
                trainer = run(rounds=rounds, accelerator=accelerator, executor=executor())
                result[f"{accelerator}, {name}"] = 1e3 * seconds_a_round(trainer, WARM_UP)
                print(f"  {accelerator}, {name}: {result[f'{accelerator}, {name}']:.1f} ms", flush=True)
    trainer = run(rounds=rounds, accelerator="gpu", executor=StackedExecutor(), precision="bf16-mixed")
    return {**result, "gpu, stacked, bf16": 1e3 * seconds_a_round(trainer, WARM_UP)}


class Replayed:
    """Gradients of the stacked clients, captured in a CUDA graph; the first group of a run alone is looked at."""

    def __init__(self, repeats: int = 50) -> None:
        self.repeats = repeats
        self.result: dict[str, float] = {}
        self.original = GroupTraining._gradients

    def __enter__(self) -> "Replayed":
        measure = self

        def gradients(training: Any, leaves: Any, trained: Any, batch: Any, step: int, autocast: Any) -> Any:
            if step == 1 and not measure.result:
                measure.result = measure.look(training, leaves, trained, batch, step, autocast)
            return measure.original(training, leaves, trained, batch, step, autocast)

        GroupTraining._gradients = gradients  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        GroupTraining._gradients = self.original  # type: ignore[method-assign]

    def look(self, training: Any, leaves: Any, trained: Any, batch: Any, step: int, autocast: Any) -> dict[str, float]:
        """Milliseconds of the gradients as usual and replayed, and the largest difference between them."""
        key = batch.key.clone()
        fixed = batch.replace({"key": key})

        def usual() -> Any:
            return self.original(training, leaves, trained, fixed, step, autocast)

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                usual()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            static = usual()
        key.add_(1)  # another step's
        graph.replay()
        difference = max(float((static[name] - each).abs().max()) for name, each in usual().items() if each is not None)
        return {
            "gradients": self.milliseconds(usual),
            "gradients, replayed": self.milliseconds(graph.replay),
            "difference": difference,
        }

    def milliseconds(self, run: Callable[[], Any]) -> float:
        """The mean of a call."""
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(self.repeats):
            run()
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start) / self.repeats


def table(result: dict[str, Any]) -> str:
    """The metrics as markdown."""
    lines = [
        "# Rounds on a GPU",
        "",
        f"`python benchmarks/gpu.py` on one {result['gpu']}, torch {result['torch']}, beside {result['threads']} "
        "threads of its machine's processors: milliseconds a round.",
        "",
        "| case | CPU, stacked | CPU, one by one | GPU, stacked | GPU, one by one | GPU, stacked, bf16 "
        "| GPU against CPU, stacked | stacked against one by one, GPU |",
        "|---|" + 7 * "---:|",
    ]
    for name, row in result["rounds"].items():
        known = [row.get(f"{where}, {how}") for where in ("cpu", "gpu") for how in ("stacked", "one by one")]
        cells = [number(each) if each else "" for each in (*known, row["gpu, stacked, bf16"])]
        ratios = [known[0] / known[2], known[3] / known[2] if known[3] else None]
        lines.append(f"| {name} | {' | '.join([*cells, *(f'{each:.1f}' if each else '' for each in ratios)])} |")
    lines += [
        "",
        "| case | a step's gradients, ms | replayed from a CUDA graph, ms | a round, ms |",
        "|---|---:|---:|---:|",
    ]
    for name, row in result["graphs"].items():
        round_ms = number(result["rounds"][name]["gpu, stacked"])
        lines.append(f"| {name} | {number(row['gradients'])} | {number(row['gradients, replayed'])} | {round_ms} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--cases", nargs="*", default=[""], help="beginnings of their names")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    path = RESULTS / "gpu.json"
    known = json.loads(path.read_text()) if path.exists() else {"rounds": {}, "graphs": {}}
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "threads": options.threads}
    for name, run, rounds, one_by_one in cases():
        if not name.startswith(tuple(options.cases)):
            continue
        print(name, flush=True)
        known["rounds"][name] = measured(run, rounds, one_by_one)
        if "SM" not in name:  # of full batches
            try:
                with Replayed() as replayed:
                    run(rounds=1, accelerator="gpu", executor=StackedExecutor())
                known["graphs"][name] = replayed.result
                print(f"  {replayed.result}", flush=True)
            except RuntimeError as error:  # what cannot be captured
                print(f"  not captured: {error}", flush=True)
        path.write_text(json.dumps({**about, **known}, indent=2) + "\n")
        (RESULTS / "gpu.md").write_text(table({**about, **known}))
    print((RESULTS / "gpu.md").read_text())


if __name__ == "__main__":
    main()
