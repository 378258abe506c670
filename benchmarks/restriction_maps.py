"""Restriction maps stored densely and implicitly: seconds of each operation, memory, and what truncation costs.

    .venv/bin/python benchmarks/restriction_maps.py

Writes benchmarks/results/restriction_maps.json and .md. 40 clients with models of the same size on an Erdos-Renyi
graph, float32. Every case runs in a process of its own, on one thread: with more, another program on the machine stalls
every barrier. Memory is the growth of the resident set at its peak (VmHWM) over the whole run: the maps, messages,
models and all that is used on the way, with freed memory kept as the trainer does. Seconds are those of maps whose
rank is full, models taking random steps, which no truncation can foresee: the best project, the best pull-back, and
for the update, which sorts its directions every few calls, the best mean over one such cycle.
"""

import json
import multiprocessing
import platform
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fl_lightning.relations.topology import ErdosRenyi
from fl_lightning.run.allocator import keep_freed_memory
from fl_lightning.strategies.decentralized import DenseMaps, ImplicitMaps, RestrictionMaps

NUM_CLIENTS = 40
FRACTION = 0.01
MAX_RANK = 32
CYCLE = MAX_RANK // 4
SIZES = [1_000, 10_000, 20_000, 100_000]
LARGEST_DENSE = 20_000  # the next size would need 94 GB
MEASURED_CYCLES = {"dense": 12, "implicit": 3}
RESULTS = Path(__file__).parent / "results"


def graph() -> Tensor:
    """The graph of the paper's rotated MNIST and CIFAR-10."""
    return ErdosRenyi(edge_probability=0.15)(NUM_CLIENTS, 0)


def memory_and_seconds(form: str, size: int) -> dict[str, float]:
    """Run one case."""
    torch.set_num_threads(1)
    keep_freed_memory()
    run(form, 100, 1)  # loads libraries
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM := VmRSS
    before = _status_bytes("VmRSS")
    row = run(form, size, MEASURED_CYCLES[form])
    return row | {"peak_bytes": _status_bytes("VmHWM") - before}


def run(form: str, size: int, cycles: int) -> dict[str, float]:
    """Fill the rank, then measure."""
    start = time.perf_counter()
    sizes, adjacency_CC = [size] * NUM_CLIENTS, graph()
    maps: RestrictionMaps
    if form == "dense":
        maps = DenseMaps(sizes, adjacency_CC, projection_fraction=FRACTION)
    else:
        maps = ImplicitMaps(sizes, adjacency_CC, projection_fraction=FRACTION, max_rank=MAX_RANK)
    built = time.perf_counter() - start
    torch.manual_seed(0)
    models = list(torch.randn(NUM_CLIENTS, size))
    step = 0.5 / maps.largest_map_curvature(models)
    unmeasured, cycle = (1, 1) if form == "dense" else (MAX_RANK + CYCLE + 1, CYCLE)
    clock: dict[str, list[float]] = {"project": [], "pull_back": [], "update": []}
    for iteration in range(unmeasured + cycles * cycle):
        for model_D in models:
            model_D += 0.01 * torch.randn(size)
        times = [time.perf_counter()]
        residual_M = maps.residual(maps.project(models))
        times.append(time.perf_counter())
        maps.pull_back(residual_M)
        times.append(time.perf_counter())
        maps.update(residual_M, models, step)
        times.append(time.perf_counter())
        if iteration >= unmeasured:
            for name, began, ended in zip(clock, times, times[1:], strict=False):
                clock[name].append(ended - began)
    update_cycles = torch.tensor(clock["update"]).view(cycles, cycle).mean(dim=1)
    return {
        "build_seconds": built,
        "project_seconds": min(clock["project"]),
        "pull_back_seconds": min(clock["pull_back"]),
        "update_seconds": float(update_cycles.min()),
        "stored_numbers": maps.num_stored_numbers,
        "message_numbers": maps.num_message_numbers,
    }


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def measure(form: str, size: int) -> dict[str, Any]:
    """One case, in a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        row: dict[str, Any] = {"form": form, "size": size, **pool.submit(memory_and_seconds, form, size).result()}
    row["iteration_seconds"] = 2 * row["project_seconds"] + row["pull_back_seconds"] + row["update_seconds"]
    print(row, flush=True)
    return row


def learn(maps: RestrictionMaps, targets: Tensor, noise: float, iterations: int) -> list[Tensor]:
    """Algorithm 1 on f_i = |theta - target_i|^2 / 2 with noisy gradients, from zero models."""
    random = torch.Generator().manual_seed(1)
    models = list(torch.zeros_like(targets))
    rate, strength = 0.05, 1.0
    for _ in range(iterations):
        pulled = maps.pull_back(maps.residual(maps.project(models)))
        gradients = [
            model_D
            - target_D
            + strength * pulled_D
            + noise * torch.randn(target_D.shape, generator=random, dtype=target_D.dtype)
            for model_D, target_D, pulled_D in zip(models, targets, pulled, strict=True)
        ]
        models = [model_D - rate * gradient_D for model_D, gradient_D in zip(models, gradients, strict=True)]
        maps.update(maps.residual(maps.project(models)), models, 0.02 / targets.shape[1] * strength)
    return models


def truncation(noise: float, size: int = 500, iterations: int = 200) -> list[dict[str, float]]:
    """What bounded rank does to maps and models after many iterations of the algorithm, worst client."""
    torch.manual_seed(0)
    targets = torch.randn(size, dtype=torch.float64) + torch.randn(NUM_CLIENTS, size, dtype=torch.float64)
    sizes, adjacency_CC, rows = [size] * NUM_CLIENTS, graph(), []
    unlearned = ImplicitMaps(sizes, adjacency_CC, projection_fraction=0.1, dtype=torch.float64)
    exact = DenseMaps(sizes, adjacency_CC, projection_fraction=0.1, dtype=torch.float64)
    start = [unlearned.matrix(client) for client in range(NUM_CLIENTS)]
    exact.load_state_dict({str(client): map_RD for client, map_RD in enumerate(start)})
    exact_models = torch.stack(learn(exact, targets, noise, iterations))
    for max_rank in (4, 16, 64):
        maps = ImplicitMaps(sizes, adjacency_CC, projection_fraction=0.1, max_rank=max_rank, dtype=torch.float64)
        models = torch.stack(learn(maps, targets, noise, iterations))
        row = {
            "noise": noise,
            "max_rank": max_rank,
            "largest_rank": max(maps.ranks),
            "reported": float(maps.truncation_errors().max()),
            "of_learned": max(
                float((maps.matrix(client) - exact.matrix(client)).norm() / (exact.matrix(client) - map_RD).norm())
                for client, map_RD in enumerate(start)
            ),
            "learned_of_maps": max(
                float((exact.matrix(client) - map_RD).norm() / map_RD.norm()) for client, map_RD in enumerate(start)
            ),
            "of_models": float(((models - exact_models).norm(dim=1) / exact_models.norm(dim=1)).max()),
        }
        print(row, flush=True)
        rows.append(row)
    return rows


def table(result: dict[str, Any]) -> str:
    """The metrics as markdown."""
    cases = result["cases"]
    dense = {row["size"]: row for row in cases if row["form"] == "dense"}
    lines = [
        "# Restriction maps, dense and implicit",
        "",
        f"{result['machine']}, one thread of a shared machine, torch {result['torch']}, {result['date']}. "
        f"{NUM_CLIENTS} clients, {result['num_edges']} directed edges, projection fraction {FRACTION}, float32, rank "
        f"{MAX_RANK}. An iteration is two projections, one pull-back and one update; milliseconds of all clients "
        "together. Memory is the peak of the whole run.",
        "",
        "| d | form | project | pull-back | update | iteration | build s | peak MB | faster | less memory |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in cases:
        ratios = ("", "")
        if row["form"] == "implicit" and (base := dense.get(row["size"])):
            ratios = (
                f"{base['iteration_seconds'] / row['iteration_seconds']:.1f}",
                f"{base['peak_bytes'] / row['peak_bytes']:.1f}",
            )
        elif row["form"] == "implicit":
            dense_bytes = 4 * row["message_numbers"] * row["size"]
            ratios = ("", f"{dense_bytes / row['peak_bytes']:.0f} (dense: {dense_bytes / 1e9:.0f} GB, computed)")
        operations = " | ".join(
            f"{row[name + '_seconds'] * 1e3:.1f}" for name in ("project", "pull_back", "update", "iteration")
        )
        lines.append(
            f"| {row['size']:,} | {row['form']} | {operations} | {row['build_seconds']:.1f} | "
            f"{row['peak_bytes'] / 1e6:.0f} | {ratios[0]} | {ratios[1]} |"
        )
    lines += [
        "",
        "What truncation costs: 200 iterations of the algorithm on 40 quadratic objectives (d = 500, projection "
        "fraction 0.1, float64) without and with noise in the gradients, against dense maps from one start, worst "
        "client. Reported: `truncation_errors()`, for the same residuals; the algorithm's own differ. Maps: error as a "
        "share of what they have learned. Models: relative error.",
        "",
        "| noise | max_rank | rank | reported | maps | models | learned / start |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {row['noise']} | {row['max_rank']} | {row['largest_rank']} | {row['reported']:.1e} | "
        f"{row['of_learned']:.1e} | {row['of_models']:.1e} | {row['learned_of_maps']:.2f} |"
        for row in result["truncation"]
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write."""
    torch.set_num_threads(1)
    cases = [
        measure(form, size)
        for size in SIZES
        for form in ("dense", "implicit")
        if form != "dense" or size <= LARGEST_DENSE
    ]
    result: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "num_edges": int(graph().sum()),
        "cases": cases,
        "truncation": [row for noise in (0.0, 1.0) for row in truncation(noise)],
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "restriction_maps.json").write_text(json.dumps(result, indent=2) + "\n")
    (RESULTS / "restriction_maps.md").write_text(table(result))
    print((RESULTS / "restriction_maps.md").read_text())


if __name__ == "__main__":
    main()
