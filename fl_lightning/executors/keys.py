"""Random keys of many clients and steps at once: :func:`fl_lightning.kernels.randomness.derive_key` on tensors."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.kernels.randomness import MASK_63, part_number, splitmix64


def derive_keys(*parts: int | str | Tensor) -> Tensor:
    """The keys of a path of which some parts are tensors, which are broadcast against each other.

    Args:
        parts: For example ``(seed, "train", round_idx, client_C, step_S1)``; at least one is a tensor, in int64 and of
            one or more dimensions.

    Returns:
        int64 keys, below 2**63 and not negative, equal to those of ``derive_key`` for each element.

    Example:
        >>> from fl_lightning.kernels.randomness import derive_key
        >>> keys = derive_keys(7, "train", torch.tensor([0, -3]))
        >>> keys.tolist() == [derive_key(7, "train", 0), derive_key(7, "train", -3)]
        True
    """
    state: Any = 0
    for part in parts:  # whole numbers wrap around in arrays as splitmix64 wants it
        number = part.numpy().astype(np.uint64) if isinstance(part, Tensor) else part_number(part)
        state = splitmix64(state ^ number)
    return torch.from_numpy((state & MASK_63).astype(np.int64))
