"""One client of the federation, written once and in the plain PyTorch way, as a LightningModule.

The mathematics is in pure functions of (parameters, batch), so that the sequential executor calls them for one client
after another and the stacked executor maps them over all clients at once.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Adam, Optimizer

from fl_lightning.batch import GraphBatch
from fl_lightning.models.gcn import GCN, NodeOutput

Parameters = Mapping[str, Tensor]
#: A pure function of (trained parameters, parameters received at the start of the stage) added to the local loss.
Penalty = Callable[[Parameters, Parameters], Tensor]
#: Builds a net from the width of the inputs and of the outputs.
NetFactory = Callable[[int, int], nn.Module]
OptimizerFactory = Callable[[Iterable[Any]], Optimizer]


def default_optimizer(parameters: Iterable[Any]) -> Optimizer:
    """Adam with the field's common settings: learning rate 0.01, weight decay 5e-4."""
    return Adam(parameters, lr=0.01, weight_decay=5e-4, fused=True)


class ClientModule(LightningModule):
    """A client's model, objective, evaluation and optimiser for node classification on its own graph.

    Subclass it and override :meth:`loss` or :meth:`scores` for another task. Overriding ``training_step`` itself ties
    the client to the sequential executor.

    Args:
        net: Builds the net from (number of features, number of classes); it maps a batch to a ``NodeOutput``.
        optimizer: Builds the client's optimiser from its parameters.
    """

    def __init__(self, net: NetFactory = GCN, optimizer: OptimizerFactory = default_optimizer) -> None:
        super().__init__()
        self.net_factory = net
        self.optimizer_factory = optimizer
        self.net: nn.Module
        self.penalty: Penalty | None = None
        self.anchor: Parameters = {}

    def build(self, num_features: int, num_classes: int) -> None:
        """Create the net once the data's sizes are known."""
        self.net = self.net_factory(num_features, num_classes)

    def parameter_dict(self) -> dict[str, Tensor]:
        """The net's parameters by name."""
        return dict(self.net.named_parameters())

    def output(self, parameters: Parameters, batch: GraphBatch) -> NodeOutput:
        """Run the net with the given parameters; train or eval mode is the module's."""
        output: NodeOutput = functional_call(self.net, dict(parameters), (batch,))
        return output

    def objective(
        self, parameters: Parameters, batch: GraphBatch, anchor: Parameters, penalty: Penalty | None = None
    ) -> Tensor:
        """The local loss, a pure function: task loss plus the strategy's penalty.

        Args:
            parameters: All parameters of the net.
            batch: One client's batch.
            anchor: The parameters as they were when the stage began.
            penalty: The strategy's term, if it has one.

        Returns:
            Scalar loss.
        """
        loss = self.loss(self.output(parameters, batch), batch)
        return loss if penalty is None else loss + penalty(parameters, anchor)

    def loss(self, output: NodeOutput, batch: GraphBatch) -> Tensor:
        """Mean cross entropy over the labelled training nodes, scalar (or one for each client of a stack)."""
        loss_N = _cross_entropy(output.logits, batch.y)
        weight_N = batch.train_mask.to(loss_N.dtype)
        return (loss_N * weight_N).sum(dim=-1) / weight_N.sum(dim=-1).clamp(min=1)

    def scores(self, output: NodeOutput, batch: GraphBatch) -> dict[str, tuple[Tensor, Tensor]]:
        """Numerator and denominator of each metric, by name; ``val/...`` chooses and ``test/...`` is reported.

        Accuracy is the share of correctly labelled nodes of the split, the loss is the mean cross entropy.
        """
        correct_N = output.logits.argmax(dim=-1) == batch.y
        loss_N = _cross_entropy(output.logits, batch.y)
        scores = {}
        for split, mask_N in (("train", batch.train_mask), ("val", batch.val_mask), ("test", batch.test_mask)):
            count = mask_N.sum(dim=-1)
            scores[f"{split}/acc"] = ((correct_N & mask_N).sum(dim=-1), count)
            scores[f"{split}/loss"] = ((loss_N * mask_N).sum(dim=-1), count)
        return scores

    def training_step(self, batch: GraphBatch, batch_idx: int) -> Tensor:
        """The local objective on this client's own parameters."""
        return self.objective(self.parameter_dict(), batch, self.anchor, self.penalty)

    def _evaluation_step(self, batch: GraphBatch, split: str) -> dict[str, Tensor]:
        scores = self.scores(self.output(self.parameter_dict(), batch), batch)
        return {name: total / count for name, (total, count) in scores.items() if name.startswith(split)}

    def validation_step(self, batch: GraphBatch, batch_idx: int) -> dict[str, Tensor]:
        """Metrics over this client's validation nodes."""
        return self._evaluation_step(batch, "val")

    def test_step(self, batch: GraphBatch, batch_idx: int) -> dict[str, Tensor]:
        """Metrics over this client's test nodes."""
        return self._evaluation_step(batch, "test")

    def predict_step(self, batch: GraphBatch, batch_idx: int) -> Tensor:
        """Class probabilities of every node, (N, num_classes)."""
        return self.output(self.parameter_dict(), batch).logits.softmax(dim=-1)

    def configure_optimizers(self) -> Optimizer:
        """The client's optimiser over its own parameters."""
        return self.build_optimizer(self.net.named_parameters())

    def build_optimizer(self, named_parameters: Iterable[tuple[str, Tensor]]) -> Optimizer:
        """Build the optimiser over named parameters, of one client or of a whole stack.

        Override it for settings that differ by parameter name; each tensor must be treated on its own.
        """
        return self.optimizer_factory([parameter for _, parameter in named_parameters])

    def constrain(self, parameters: Parameters) -> Parameters:
        """Values that replace parameters after every optimiser step, by name: a projection onto what is allowed.

        A pure function of all parameters of one client; none is constrained here. It must leave alone what is allowed.
        """
        return {}

    def example_count(self, batch: GraphBatch) -> Tensor:
        """Number of labelled training examples."""
        return batch.train_mask.sum(dim=-1)


def _cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Cross entropy of every node, (..., N)."""
    return F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="none").view_as(y)
