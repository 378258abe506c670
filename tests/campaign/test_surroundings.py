"""Terminals that show ASCII alone, disks that are full, and settings that are left to their defaults."""

import contextlib
import io
import random
import resource
import sys
from collections.abc import Iterator
from unittest import mock

import pytest
from campaign.command import call, empty_folder
from campaign.configuration import NAMES, small, write
from campaign.record import Record
from campaign.test_hostile import tried

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@contextlib.contextmanager
def full_disk(num_bytes: int) -> Iterator[None]:
    """No file may become longer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def full_disks(number: int, seed: int) -> Iterator[tuple[str, bool]]:
    """A run that cannot write ends with exit code 1 or 2 and a line that says so, or it needed no more room."""
    for trial in range(number):
        draw = random.Random(f"{seed} {trial}")
        name, num_bytes = draw.choice(NAMES), draw.choice([0, 1, 100, 4096, 20_000, 10**5, 10**6])
        config = small(name, logger=draw.random() < 0.5)
        with empty_folder() as folder:
            write(config, folder / "small.yaml")
            with full_disk(num_bytes):
                ending = call(["fit", "--config=small.yaml"], seconds=60)
        said = ending.code == 0 or (ending.code in (1, 2) and any("fl-train: error" in line for line in ending.errors))
        yield f"{name}, {num_bytes} bytes: {ending.crash or ending.said}", not ending.crash and said


def test_full_disks(seed: int, record: Record) -> None:
    tried(record, "disks that are full", full_disks(60, seed))


def ascii_terminals(number: int, seed: int) -> Iterator[tuple[str, bool]]:
    """Runs with names and words that an ASCII terminal does not have come to their end, or are refused in one line."""
    for trial in range(number):
        draw = random.Random(f"{seed} ascii {trial}")
        name = draw.choice(NAMES)
        config = small(name, run_name=draw.choice(["small", "größe", "大", "a b", "$x$"]))
        terminal = io.TextIOWrapper(io.BytesIO(), encoding=draw.choice(["ascii", "latin-1", "cp1252"]), errors="strict")
        with empty_folder() as folder, mock.patch.object(sys, "__stdout__", terminal):
            write(config, folder / "small.yaml")
            ending = call(["fit", "--config=small.yaml"], seconds=60, terminal=terminal)
        fine = ending.code == 0 or ending.is_one_line  # what Oracle needs, for one, is not in every draw
        yield f"{name}, {terminal.encoding}: {ending.crash or ending.said}", not ending.crash and fine


def test_ascii_terminals(seed: int, record: Record) -> None:
    tried(record, "terminals that show ASCII alone", ascii_terminals(40, seed))


def defaults(seed: int) -> Iterator[tuple[str, bool]]:
    """Every strategy with nothing set but random ones of its net, its optimizer and its metrics."""
    for name in NAMES:
        for trial in range(6):
            draw = random.Random(f"{seed} {name} {trial}")
            config = small(name)
            more = {
                "optimizer": draw.choice([{}, {"optimizer": {"class_path": "SGD", "init_args": {"lr": 0.1}}}]),
                "metrics": draw.choice([{}, {"metrics": ["f1"]}, {"metrics": ["auroc", "balanced_accuracy"]}]),
                "clip": draw.choice([{}, {"gradient_clip_val": 1.0}]),
                "epochs": {},
            }
            init = {key: value for each in more.values() for key, value in each.items()}
            if draw.random() < 0.5:
                config["strategy"]["init_args"].pop("num_epochs", None)
            words = [f"--model.{key}={value}" for key, value in init.items() if not isinstance(value, dict)]
            if "optimizer" in init:
                words += ["--model.optimizer=torch.optim.SGD", "--model.optimizer.lr=0.1"]
            with empty_folder() as folder:
                write(config, folder / "small.yaml")
                ending = call(["fit", "--config=small.yaml", *words], seconds=60)
            yield (
                f"{name} {words}: {ending.crash or ending.said}",
                ending.code == 0 or ending.is_long or ending.is_one_line,
            )


def test_defaults(seed: int, record: Record) -> None:
    tried(record, "defaults of net, optimizer and metrics", defaults(seed))
