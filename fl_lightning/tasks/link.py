"""The task on pairs of nodes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from fl_lightning.tasks.base import Drawing, Task
from fl_lightning.tasks.targets import LABELS, Target


@dataclass(frozen=True, kw_only=True)
class LinkPrediction(Task):
    """Whether two nodes of a client's graph are linked. As no source has pairs with roles yet, it is refused."""

    examples = "pairs"
    example = "pair"
    has_graphs = True
    not_private = "is for clients with independent examples, but these have pairs of a graph's nodes"

    @property
    def target(self) -> Target:
        """One label: linked or not."""
        return LABELS

    def collator(  # noqa: D102
        self,
        clients: Sequence[Any],
        *,
        layout: Mapping[str, Any] | None = None,
        drawing: Drawing | None = None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> NoReturn:
        raise ValueError("LinkPrediction cannot be trained yet: choose a source of nodes, graphs or examples")

    def default_net(
        self, num_features: int | tuple[int, ...], local: type[nn.Module] | None = None
    ) -> Callable[..., nn.Module]:
        """There is none yet."""
        raise ValueError("LinkPrediction has no net yet: choose a source of nodes, graphs or examples")
