"""Noisy and missing features."""

from typing import Literal, get_args

import torch

from fl_lightning.data.heterogeneity.base import AnyClient, Graded

#: What of the features is missing.
Missing = Literal["entries", "columns"]


class FeatureNoise(Graded):
    """Gaussian noise on all features of a client, whatever the roles of its examples.

    Args:
        strength: Standard deviation of the noise, in those of all features of the client together, in [0, 100]: at 1
            noise and features vary alike.
        clients: Share of the clients whose features are noisy, rounded to the nearest number, in [0, 1].
    """

    most = 100.0

    def changed(self, client: AnyClient, draw: torch.Generator, num_outputs: int) -> AnyClient:
        """Add the noise."""
        inputs = client.inputs
        noise = torch.randn(inputs.shape, generator=draw)
        return client.with_inputs(inputs + self.strength * inputs.std(correction=0) * noise)


class MissingFeatures(Graded):
    """Features of a client that are missing, and zero for that.

    Args:
        strength: Share of them, in [0, 1].
        clients: Share of the clients whose features are missing, rounded to the nearest number, in [0, 1].
        kind: ``entries``, each by itself; or ``columns``: a client lacks the same ones of all its examples, rounded to
            the nearest number (of images, pixels).
    """

    def __init__(self, strength: float, clients: float = 1.0, kind: Missing = "entries") -> None:
        super().__init__(strength, clients)
        if kind not in get_args(Missing):
            raise ValueError(f"MissingFeatures.kind must be {' or '.join(get_args(Missing))}, got {kind!r}")
        self.kind = kind

    def changed(self, client: AnyClient, draw: torch.Generator, num_outputs: int) -> AnyClient:
        """Set them to zero."""
        inputs = client.inputs
        if self.kind == "entries":
            return client.with_inputs(inputs.masked_fill(torch.rand(inputs.shape, generator=draw) < self.strength, 0.0))
        flat_NF = inputs.flatten(1).clone()
        order = torch.randperm(flat_NF.shape[1], generator=draw)
        flat_NF[:, order[: round(len(order) * self.strength)]] = 0.0
        return client.with_inputs(flat_NF.view_as(inputs))
