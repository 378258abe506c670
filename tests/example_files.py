"""Tiny files in the layouts that the sources of examples document."""

import itertools
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


#: The sets of ``configs/fedstar_sm.yaml`` and ``configs/fedavg_sm.yaml``.
TU_SETS = ("MUTAG", "BZR", "COX2", "DHFR", "PTC_MR", "AIDS", "NCI1")
LABORATORIES = "ABCDEFGHI"


def write_tu_set(root: Path, name: str, num_labels: int, num_graphs: int = 30) -> None:
    """Paths and rings of some nodes, which are the two classes, in the text files of the TU collection."""
    raw = root / "TU" / name / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    lines: dict[str, list[str]] = {key: [] for key in ("A", "graph_indicator", "graph_labels", "node_labels")}
    for graph in range(1, num_graphs + 1):
        first, size = len(lines["graph_indicator"]) + 1, 3 + graph % 4
        nodes = range(first, first + size)
        pairs = [*itertools.pairwise(nodes), *([(nodes[-1], first)] if graph % 2 else [])]
        lines["A"] += [f"{one}, {other}" for pair in pairs for one, other in (pair, pair[::-1])]
        lines["graph_indicator"] += [str(graph)] * size
        lines["graph_labels"].append(str(graph % 2))
        lines["node_labels"] += [str(node % num_labels) for node in nodes]
    for key, entries in lines.items():
        (raw / f"{name}_{key}.txt").write_text("".join(f"{entry}\n" for entry in entries))


def write_laboratories(root: Path, num_molecules: int = 12) -> None:
    """AqSolDB's table with alcohols of nine laboratories, the less soluble the longer they are."""
    lines = ["ID,Name,SMILES,Solubility,Group,MolWt"]
    for place, laboratory in enumerate(LABORATORIES):
        for number in range(1, num_molecules + 1):
            solubility = 1.0 - 0.5 * number + 0.1 * place
            smiles = "C" * number + "O"
            lines.append(f"{laboratory}-{number},alcohol,{smiles},{solubility},G{1 + number % 5},{14 * number + 18}")
    (root / "aqsoldb").mkdir(parents=True, exist_ok=True)
    (root / "aqsoldb" / "curated-solubility-dataset.csv").write_text("\n".join(lines))


def write_graph_sets(root: Path) -> Path:
    """The sets of graphs of the configurations; return the root."""
    for number, name in enumerate(TU_SETS):
        write_tu_set(root, name, num_labels=2 + number)
    write_laboratories(root)
    return root


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
    write_graph_sets(root)
    return root
