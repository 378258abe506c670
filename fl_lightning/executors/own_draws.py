"""Random draws in a user's own code: they follow from keys, so that runs can be repeated and resumed."""

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor


@contextlib.contextmanager
def drawn_from(key: Tensor) -> Iterator[None]:
    """A context in which the generators of torch, NumPy and Python begin at a key; they are restored afterward."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    with torch.random.fork_rng([key.device]) if key.is_cuda else contextlib.nullcontext():
        begin_at(key)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])
            torch.set_rng_state(before[2])


def begin_at(key: Tensor) -> None:
    """Let the generators begin at a key, within :func:`drawn_from`."""
    number = int(key)
    if key.device.type == "cpu":  # torch.manual_seed looks at all devices, which takes long
        torch.default_generator.manual_seed(number)
    else:
        torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)
