"""What a server knows of a federation before it hears from anyone."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Federation:
    """What a server knows before it hears from anyone.

    Attributes:
        num_clients: All clients, those held out of training included; indices run from 0.
        training_clients: Those that take part in the rounds.
        num_features: Width of the inputs, or the shape of one example.
        parameters: One client's initial parameters by name, common to all of the first architecture.
        learning_rate: Of the clients' optimiser.
        architectures: The same for every architecture; client c has number c modulo their number.
        seed: Root of every random key.
        device: Where the server computes.
        relation_CC: Client relation graph over all clients: float32, non-negative, symmetric, zero diagonal, (C, C);
            None if the data have none.
        client_names: Each client's own name. Server draws that belong to a client are keyed by it, for indices depend
            on the order of the clients; empty stands for the indices.
    """

    num_clients: int
    training_clients: tuple[int, ...]
    num_features: int | tuple[int, ...]
    parameters: Mapping[str, Tensor]
    seed: int
    device: torch.device
    relation_CC: Tensor | None = None
    learning_rate: float = 0.01
    architectures: tuple[Mapping[str, Tensor], ...] = ()
    client_names: tuple[str, ...] = ()
