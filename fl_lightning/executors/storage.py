"""Storage of the state of many clients: in memory, or in files that the system maps into memory as needed."""

import math
import os
import tempfile
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

#: Smaller tensors are always in memory.
SMALLEST_FILE_BYTES = 2**16

#: Makes a tensor of zeros from its shape, type and device.
Allocate = Callable[[Sequence[int], torch.dtype, torch.device], Tensor]


def in_memory(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in memory."""
    return torch.zeros(tuple(shape), dtype=dtype, device=device)


def on_disk(folder: str | None = None) -> Allocate:
    """Make tensors on the CPU whose values are in files; results of computations with them are not.

    A file is unlinked once it is mapped, so that the system frees it with its tensor, or with the process in whatever
    way that ends.

    Args:
        folder: Folder of the files; None for the system's folder for temporary files. (If that is a file system in
            memory, nothing is gained.)
    """

    def allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        size = math.prod(shape)
        if size * dtype.itemsize < SMALLEST_FILE_BYTES or device.type != "cpu":
            return in_memory(shape, dtype, device)
        with tempfile.NamedTemporaryFile(dir=folder, prefix="clients-") as file:
            try:
                if hasattr(os, "posix_fallocate"):  # without it, a full disk would end the process with a signal
                    os.posix_fallocate(file.fileno(), 0, size * dtype.itemsize)
            except OSError as error:
                raise ValueError(
                    f"{size * dtype.itemsize / 2**20:,.0f} MiB of the clients' state do not fit into {file.name!r} "
                    f"({error}): choose another storage_folder"
                ) from error
            return torch.from_file(file.name, shared=True, size=size, dtype=dtype).view(tuple(shape))

    return allocate
