"""Tiny files in the layouts that the sources of examples document."""

from pathlib import Path
from typing import Any

import numpy as np

NUM_IMAGES = 120
NUM_STEPS = 60
SENSORS = ["11", "22", "33"]
ADJACENCY = np.array([[1.0, 0.5, 0.0], [0.2, 1.0, 0.0], [0.0, 0.3, 1.0]], dtype=np.float32)


def save(root: Path, path: str, **arrays: Any) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    np.savez(root / path, **arrays)


def numbered_images(*shape: int) -> np.ndarray:
    """Images of zeros but for one pixel in the first row, which holds the image's number plus 1."""
    images = np.zeros((NUM_IMAGES, *shape), dtype=np.uint8)
    images[..., 0, 5] = np.arange(1, NUM_IMAGES + 1).reshape(-1, *[1] * (len(shape) - 2))
    return images


def write_example_files(root: Path) -> Path:
    """Write tiny files in every documented layout; return the root."""
    rng = np.random.default_rng(0)
    labels = np.arange(NUM_IMAGES) % 10
    for path, images in (
        ("MNIST/mnist", numbered_images(28, 28)),
        ("CIFAR10/cifar10_subset", numbered_images(3, 32, 32)),
    ):
        parts = {"x_train": images[:100], "y_train": labels[:100], "x_test": images[100:], "y_test": labels[100:]}
        save(root, path, **parts)
    task = np.array([3, 1, 1, 3, 3, 8], dtype=np.int16)
    table = np.c_[rng.normal(5.0, 3.0, (6, 2)), np.ones(6)].astype(np.float32)
    signs = np.array([-1, 1, 1, -1, 1, 1], dtype=np.int8)
    for path in ("vehicle_sensor/vehicle_ditto_train", "landmine/fmtl_small", "gleam/gleam"):
        save(root, path, X=table, y=signs, task=task)
    save(root, "school/school", X=table, y=np.array([10, 20, 30, 40, 50, 60], dtype=np.float32), task=task)
    save(
        root,
        "har/har_raw",
        halves=rng.normal(size=(9, 9, 64)).astype(np.float32),
        win=np.array([[i, i + 1] for i in range(8)], dtype=np.int32),
        y=np.array([0, 1, 2, 3, 4, 5, 0, 1], dtype=np.int8),
        subject=np.array([2, 1, 2, 1, 2, 2, 1, 1], dtype=np.int8),
    )
    years, months = np.arange(2000, 2005), np.arange(12)
    temp_F = 50.0 + 10 * np.arange(2)[:, None, None] + (years - 2000)[:, None] - 20 * np.cos(months / 12 * 2 * np.pi)
    borders = np.array([[0, 1], [1, 0]], dtype=np.uint8)
    save(root, "tpt48/tpt48", temp_F=temp_F, years=years, state=np.array(["Ohio", "Utah"]), adj=borders)
    speed = np.arange(1.0, NUM_STEPS + 1)[:, None] + np.array([0.0, 1000.0, 2000.0])
    graphs = {f"{name}_ids": np.array(SENSORS) for name in ("metr_la", "pems_bay")}
    graphs |= {f"{name}_adj": ADJACENCY for name in ("metr_la", "pems_bay")}
    save(root, "traffic/traffic_graphs", metr_la_speed_week=speed.astype(np.float32), **graphs)
    save(root, "traffic/pems_bay_speed", ids=np.array(SENSORS[::-1]), speed=speed[:, ::-1].astype(np.float32))
    save(
        root,
        "grda_toy/DG-15",
        data=rng.normal(size=(6, 2)),
        label=np.array([0, 1, 0, 1, 0, 1]),
        domain=np.array([1, 0, 1, 0, 0, 1]),
        A=borders,
    )
    views = [(viewpoint, year) for viewpoint in range(1, 6) for year in range(2009, 2015)] + [(1, 2015), (-1, 2009)]
    save(
        root,
        "compcars/compcars",
        image=np.arange(32, dtype=np.uint8)[:, None, None, None].repeat(3, 1).repeat(4, 2).repeat(4, 3),
        type=np.arange(32) % 4,
        viewpoint=np.array(views)[:, 0],
        year=np.array(views)[:, 1],
    )
    return root
