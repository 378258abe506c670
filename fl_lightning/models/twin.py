"""Two copies of one net in a client: what the federation trains, and what stays personal."""

import copy
from typing import ClassVar

from torch import nn

from fl_lightning.batches.base import Batch
from fl_lightning.models.output import NetOutput


class Twin(nn.Module):
    """Parameters ``shared.*`` and ``personal.*`` that start equal; the personal copy makes the predictions.

    An optimizer that treats each tensor separately steps them as two optimizers would, as long as no term of the
    objective sends a gradient from one to the other. Gradients are clipped copy by copy.

    Args:
        net: The net that is duplicated.
    """

    #: Sub-nets whose gradients are clipped separately.
    models: ClassVar[tuple[str, ...]] = ("shared", "personal")

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.shared = net
        self.personal = copy.deepcopy(net)
        self.takes_stacks: bool = getattr(net, "takes_stacks", False)

    def forward(self, batch: Batch) -> NetOutput:
        """Run the personal copy."""
        output: NetOutput = self.personal(batch)
        return output
