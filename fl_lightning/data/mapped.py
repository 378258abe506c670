"""Inputs of clients in files that are mapped into memory, for data that do not fit into it."""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fl_lightning.batches.client_data import ClientData
from fl_lightning.batches.lazy_clients import LazyClients
from fl_lightning.data.sources.folders import unwritable_cache_message


def with_mapped_inputs(clients: Sequence[ClientData], folder: Path) -> Iterator[ClientData]:
    """The clients one after another, with equal inputs that are mapped from files.

    Args:
        clients: What each holds.
        folder: Where the files are. They have no names, so that nothing is left of them after the run.

    Raises:
        ValueError: Clients are made when they are needed, or the folder cannot be written.
    """
    if isinstance(clients, LazyClients):
        raise ValueError(
            "data.memory_map is for clients whose data are loaded before training, but those of data.source are made "
            "when they are needed: leave it out"
        )
    for client in clients:
        yield client.with_inputs(_mapped(client.inputs, folder))


def _mapped(tensor: Tensor, folder: Path) -> Tensor:
    """The same numbers from a file; changes to them would not reach it."""
    if not tensor.numel():
        return tensor
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            tensor.contiguous().numpy().tofile(file)
            file.flush()
            dtype = torch.empty(0, dtype=tensor.dtype).numpy().dtype
            return torch.from_numpy(np.memmap(file, dtype, mode="c", shape=tuple(tensor.shape)))
    except OSError as error:
        raise ValueError(unwritable_cache_message(folder, error)) from error
