"""kernel_smooth against the dense kernel: error, seconds and memory, forward and backward, 128 channels of float32.

    .venv/bin/python benchmarks/kernel_smoothing.py

Writes benchmarks/results/kernel_smoothing.json and .md. Every case runs in a process of its own, on one thread: with
more, another program on the machine stalls every barrier. Memory is the growth of the resident set at its peak (VmHWM)
over what it is with the inputs h, s and the gradient of z in place, so it counts z, the gradients of h and s and all
that is kept between. Seconds are the best of several runs, with freed memory kept as the trainer does. The dense form
is the definition under autograd; it does not depend on the bandwidth and runs once a size.
"""

import ctypes
import json
import multiprocessing
import platform
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fl_lightning.kernels.kernel_smoothing import kernel_smooth, smoothing_series
from fl_lightning.run.allocator import keep_freed_memory

BANDWIDTHS = [0.01, 0.05, 0.1, 0.5, 1.0, 10.0]
SIZES = [250, 2_500, 17_000, 34_000, 170_000]
LARGEST_DENSE = 17_000  # the next size would need more than 20 GB
CHANNELS = 128
MEASURED_SECONDS = 3.0
RESULTS = Path(__file__).parent / "results"

Form = Callable[[Tensor, Tensor], Tensor]


def dense(h_ND: Tensor, score_N: Tensor, bandwidth: float) -> Tensor:
    """The definition."""
    kernel_NN = (-(((score_N[:, None] - score_N) / bandwidth) ** 2)).exp()
    return kernel_NN @ h_ND / kernel_NN.sum(dim=1, keepdim=True)


def chosen_form(bandwidth: float | None) -> Form:
    """``kernel_smooth`` at a bandwidth, or the dense form for None."""
    if bandwidth is None:
        return lambda h_ND, score_N: dense(h_ND, score_N, 1.0)
    return lambda h_ND, score_N: kernel_smooth(h_ND, score_N, bandwidth=bandwidth)


def inputs(num_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """h, s uniform in [-1, 1] and the gradient of z."""
    torch.manual_seed(num_nodes)
    h_ND = torch.randn(num_nodes, CHANNELS, requires_grad=True)
    score_N = (torch.rand(num_nodes) * 2 - 1).requires_grad_()
    return h_ND, score_N, torch.randn(num_nodes, CHANNELS)


def seconds(bandwidth: float | None, num_nodes: int) -> tuple[float, float]:
    """Best seconds of a forward, and of a backward."""
    keep_freed_memory()
    form, (h_ND, score_N, grad_ND) = chosen_form(bandwidth), inputs(num_nodes)
    forward: list[float] = []
    backward: list[float] = []
    began = time.perf_counter()
    while len(forward) < 2 or time.perf_counter() - began < MEASURED_SECONDS:
        start = time.perf_counter()
        z_ND = form(h_ND, score_N)
        middle = time.perf_counter()
        torch.autograd.grad(z_ND, (h_ND, score_N), grad_ND)
        forward.append(middle - start)
        backward.append(time.perf_counter() - middle)
    return min(forward), min(backward)


def peak_bytes(bandwidth: float | None, num_nodes: int) -> int:
    """Peak growth of the resident set over one forward and backward; blocks it frees go back to the system at once."""
    ctypes.CDLL(None).mallopt(-3, 2**16)  # M_MMAP_THRESHOLD of malloc.h
    form = chosen_form(bandwidth)
    for size in (64, num_nodes):  # the first one loads libraries and starts threads
        h_ND, score_N, grad_ND = inputs(size)
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM := VmRSS
        before = _status_bytes("VmRSS")
        gradients = torch.autograd.grad(form(h_ND, score_N), (h_ND, score_N), grad_ND)
        after = _status_bytes("VmHWM")
        del gradients
    return after - before


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def errors(bandwidth: float, num_nodes: int = 2_500, channels: int = 16) -> dict[str, float]:
    """Largest errors over three placements of the scores, against the dense form in float64.

    z relative to max|h|, the gradient in h to max|gradient of z|, the gradient in s to its own maximum; where all
    nodes but one have the same score the last may vanish, so that placement counts for the first two only.
    """
    h_ND, uniform_N, grad_ND = (tensor.detach().double() for tensor in inputs(num_nodes))
    h_ND, grad_ND = h_ND[:, :channels], grad_ND[:, :channels]
    one_far_N = torch.ones_like(uniform_N)
    one_far_N[0] = -1
    result: dict[str, float] = {}

    def note(name: str, error: Tensor, scale: Tensor) -> None:
        result[name] = max(result.get(name, 0.0), float(error.detach().abs().max() / scale.detach().abs().max()))

    for placement, score_N in {"uniform": uniform_N, "narrow": uniform_N * 0.1, "one_far": one_far_N}.items():
        for dtype in (torch.float64, torch.float32):
            leaves = [tensor.to(dtype).requires_grad_() for tensor in (h_ND, score_N)]
            exact_leaves = [leaf.detach().double().requires_grad_() for leaf in leaves]
            z_ND = kernel_smooth(leaves[0], leaves[1], bandwidth=bandwidth)
            exact_ND = dense(exact_leaves[0], exact_leaves[1], bandwidth)
            grad_h, grad_s = torch.autograd.grad(z_ND, leaves, grad_ND.to(dtype))
            exact_h, exact_s = torch.autograd.grad(exact_ND, exact_leaves, grad_ND.to(dtype).double())
            name = str(dtype).removeprefix("torch.")
            note(f"z_{name}", z_ND - exact_ND, h_ND)
            note(f"grad_h_{name}", grad_h - exact_h, grad_ND)
            if placement != "one_far":
                note(f"grad_s_{name}", grad_s - exact_s, exact_s)
    return result


def gemm_rates(size: int = 1536) -> dict[str, float]:
    """Best measured GFLOP/s of a square matrix product."""
    rates = {}
    for dtype in (torch.float32, torch.float64):
        a = torch.randn(size, size, dtype=dtype)
        best = float("inf")
        for _ in range(10):
            start = time.perf_counter()
            a @ a
            best = min(best, time.perf_counter() - start)
        rates[str(dtype).removeprefix("torch.")] = 2 * size**3 / best / 1e9
    return rates


def memory_and_seconds(bandwidth: float | None, num_nodes: int) -> tuple[int, float, float]:
    """Both measurements, in this order: the second one keeps what it frees."""
    torch.set_num_threads(1)
    return peak_bytes(bandwidth, num_nodes), *seconds(bandwidth, num_nodes)


def measure(bandwidth: float | None, num_nodes: int) -> dict[str, Any]:
    """Time and memory of one case, in a fresh process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        memory, forward, backward = pool.submit(memory_and_seconds, bandwidth, num_nodes).result()
    series = smoothing_series(bandwidth, num_nodes) if bandwidth else None
    row: dict[str, Any] = {
        "form": "plain dense" if bandwidth is None else "dense blocks" if series is None else "series",
        "num_nodes": num_nodes,
        "bandwidth": bandwidth,
        "num_features": series.num_features if series else None,
        "forward_seconds": forward,
        "backward_seconds": backward,
        "peak_bytes": memory,
    }
    print(row, flush=True)
    return row


def table(result: dict[str, Any], cases: list[dict[str, Any]], error_rows: list[dict[str, Any]]) -> str:
    """The metrics as markdown."""
    reference = {row["num_nodes"]: row for row in cases if row["bandwidth"] is None}
    rates = result["gemm_gflops"]
    lines = [
        "# kernel_smooth against the dense kernel",
        "",
        f"{result['machine']}, one thread of a shared machine, torch {result['torch']}, {result['date']}. Matrix "
        f"products: {rates['float32']:.0f} GFLOP/s float32, {rates['float64']:.0f} float64. float32 inputs, "
        f"{CHANNELS} channels, tolerance 1e-6, scores uniform in [-1, 1]. Memory beyond h, s and the gradient of z.",
        "",
        "| nodes | bandwidth | form | features | forward ms | backward ms | peak MB | faster | less memory |",
        "|---:|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in cases:
        total, ratios = row["forward_seconds"] + row["backward_seconds"], ("", "")
        if row["bandwidth"] is not None and (base := reference.get(row["num_nodes"])):
            base_total = base["forward_seconds"] + base["backward_seconds"]
            ratios = (f"{base_total / total:.1f}", f"{base['peak_bytes'] / row['peak_bytes']:.1f}")
        lines.append(
            f"| {row['num_nodes']:,} | {row['bandwidth'] or 'any'} | {row['form']} | {row['num_features'] or ''} | "
            f"{row['forward_seconds'] * 1e3:.1f} | {row['backward_seconds'] * 1e3:.1f} | "
            f"{row['peak_bytes'] / 1e6:.1f} | {ratios[0]} | {ratios[1]} |"
        )
    names = [name for name in error_rows[0] if name != "bandwidth"]
    lines += [
        "",
        "Largest error at 2,500 nodes, tolerance 1e-6, against the dense form in float64, over uniform and narrow "
        "scores and one node far from all others: z relative to max abs(h), grad_h to the largest gradient of z, "
        "grad_s to its own largest entry (without the last placement, where it vanishes).",
        "",
        "| bandwidth | " + " | ".join(names) + " |",
        "|---:|" + "---:|" * len(names),
    ]
    lines += [
        f"| {row['bandwidth']} | " + " | ".join(f"{row[name]:.1e}" for name in names) + " |" for row in error_rows
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure and write."""
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "gemm_gflops": gemm_rates(),
    }
    error_rows = [{"bandwidth": bandwidth, **errors(bandwidth)} for bandwidth in BANDWIDTHS]
    cases = [
        measure(bandwidth, num_nodes)
        for num_nodes in SIZES
        for bandwidth in [None, *BANDWIDTHS]
        if bandwidth is not None or num_nodes <= LARGEST_DENSE
    ]
    result |= {"cases": cases, "errors": error_rows}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "kernel_smoothing.json").write_text(json.dumps(result, indent=2) + "\n")
    (RESULTS / "kernel_smoothing.md").write_text(table(result, cases, error_rows))
    print((RESULTS / "kernel_smoothing.md").read_text())


if __name__ == "__main__":
    main()
