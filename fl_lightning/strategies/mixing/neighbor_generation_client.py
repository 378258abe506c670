"""A client of FedSage+: a classifier and a generator of neighbors."""

from collections.abc import Callable, Iterable
from typing import Any, Literal

from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.models.neighbor_generator import NeighborGenerationNet, NeighborGenerator, Rounding
from fl_lightning.round.client import ClientModule, NetFactory, OptimizerFactory
from fl_lightning.round.lr_schedule import LRSchedulerFactory
from fl_lightning.round.privacy import RecordPrivacy
from fl_lightning.tasks.class_metrics import ClassMetric
from fl_lightning.tasks.number_metrics import NumberMetric


class NeighborGenerationClient(ClientModule):
    """A client with a generator in addition to its classifier, with a learning rate and weight decay of its own.

    Args:
        net: The classifier, as for :class:`~fl_lightning.ClientModule`.
        optimizer: As for :class:`~fl_lightning.ClientModule`; also used for the generator.
        encoder_channels: Widths of the generator's encoder.
        generator_channels: Widths of the layers that generate features (paper's code: 256 and 2048, which for Cora are
            15 million parameters per client).
        num_slots: S, the largest number of neighbors that are generated for a node.
        rounding: How many are generated: the predicted number of lost neighbors, rounded to the ``nearest`` whole
            number (FederatedScope, and the authors where they complete a single graph) or ``down`` (the authors'
            federated code, where a prediction below 1, as for nearly all nodes of Cora, yields none).
        generator_dropout: Drop probability in the generator, in [0, 1).
        generator_lr: Learning rate of the generator.
        generator_weight_decay: Weight decay of the generator.
        gradient_clip_val: As for :class:`~fl_lightning.ClientModule`.
        running_statistics: As for :class:`~fl_lightning.ClientModule`.
        metrics: As for :class:`~fl_lightning.ClientModule`.
        privacy: As for :class:`~fl_lightning.ClientModule`.
        lr_scheduler: As for :class:`~fl_lightning.ClientModule`.
    """

    def __init__(
        self,
        net: list[NetFactory] | NetFactory | None = None,
        optimizer: OptimizerFactory | None = None,
        *,
        encoder_channels: tuple[int, int] = (32, 128),
        generator_channels: tuple[int, int] = (256, 256),
        num_slots: int = 5,
        rounding: Rounding = "nearest",
        generator_dropout: float = 0.5,
        generator_lr: float = 1e-3,
        generator_weight_decay: float = 1e-4,
        gradient_clip_val: float | None = None,
        running_statistics: Literal["personal", "shared"] = "personal",
        metrics: list[ClassMetric | NumberMetric] | None = None,
        privacy: RecordPrivacy | None = None,
        lr_scheduler: LRSchedulerFactory | None = None,
    ) -> None:
        super().__init__(net, optimizer, gradient_clip_val, running_statistics, metrics, privacy, lr_scheduler)
        if rounding not in ("nearest", "down"):
            raise ValueError(f"model.rounding must be 'nearest' or 'down', got {rounding!r}")
        if generator_lr <= 0:
            raise ValueError(f"model.generator_lr must be positive, got {generator_lr}")
        self.generator_settings: dict[str, Any] = {
            "hidden_channels": encoder_channels,
            "generator_channels": generator_channels,
            "num_slots": num_slots,
            "dropout": generator_dropout,
            "rounding": rounding,
        }
        self.generator_group = {"lr": generator_lr, "weight_decay": generator_weight_decay}

    def build(
        self,
        num_features: int | tuple[int, ...],
        num_outputs: int,
        adapt: Callable[[nn.Module], nn.Module] | None = None,
    ) -> None:
        """Create the nets, each with a generator."""

        def beside_generator(net: nn.Module) -> nn.Module:
            assert isinstance(num_features, int)
            generator = NeighborGenerator(num_features, num_outputs, **self.generator_settings)
            return NeighborGenerationNet(net if adapt is None else adapt(net), generator)

        super().build(num_features, num_outputs, beside_generator)

    def build_optimizer(self, named_parameters: Iterable[tuple[str, Tensor]]) -> Optimizer:
        """The optimizer, with a group of its own for the generator."""
        named = list(named_parameters)
        groups = [
            [p for name, p in named if name.startswith("generator.") == is_generator] for is_generator in (False, True)
        ]
        optimizer = self.optimizer_factory([{"params": group} for group in groups])
        optimizer.param_groups[1].update(self.generator_group)
        return optimizer

    def generator_optimizer(self, parameters: Iterable[Tensor]) -> Optimizer:
        """The optimizer of a stage that trains the generator alone."""
        optimizer = self.optimizer_factory(parameters)
        optimizer.param_groups[0].update(self.generator_group)
        return optimizer
