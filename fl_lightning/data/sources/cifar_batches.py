"""The standard files of CIFAR-10 (``cifar-10-batches-py``), read without unpickling anything but arrays.

Source: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fl_lightning.data.sources.array_file import missing_files_message, reading
from fl_lightning.data.sources.pickled_arrays import ArrayUnpickler

_FOLDERS = ("cifar-10-batches-py", "CIFAR10/cifar-10-batches-py")
_FILES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")


def has_cifar10_batches(root: Path) -> bool:
    """Whether the folder of the batches is in the root, or in its ``CIFAR10``."""
    return any((root / folder).is_dir() for folder in _FOLDERS)


def read_cifar10_batches(root: Path) -> tuple[Tensor, Tensor]:
    """Read the training and the test images together.

    Returns:
        Images (60000, 3, 32, 32), uint8, and classes (60000,), int64.

    Raises:
        FileNotFoundError: If a file is missing.
        ValueError: If a file is not a batch of CIFAR-10.
    """
    folder = next(folder for folder in _FOLDERS if (root / folder).is_dir())
    if missing := [f"{folder}/{name}" for name in _FILES if not (root / folder / name).is_file()]:
        raise FileNotFoundError(missing_files_message(root, missing, "CIFAR-10's Python version, six files"))
    images, labels = zip(*(_read_batch(root / folder / name) for name in _FILES), strict=True)
    return torch.cat(images), torch.cat(labels)


def _read_batch(path: Path) -> tuple[Tensor, Tensor]:
    with reading(path, "a batch of CIFAR-10"), path.open("rb") as file:
        batch = ArrayUnpickler(file, encoding="bytes").load()
        image = np.asarray(batch[b"data"], dtype=np.uint8).reshape(-1, 3, 32, 32)
        label = np.asarray(batch[b"labels"], dtype=np.int64)
        if label.shape != image.shape[:1] or not ((label >= 0) & (label < 10)).all():
            raise ValueError(f"{len(image)} images have labels of shape {label.shape}, not each one of 0 to 9")
    return torch.from_numpy(image), torch.from_numpy(label)
