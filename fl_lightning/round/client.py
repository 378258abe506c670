"""One client of the federation, written once and in the plain PyTorch way, as a LightningModule.

The mathematics is in pure functions of (parameters, batch), so that the sequential executor calls them for one client
after another and the stacked executor maps them over all clients at once.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Adam, Optimizer

from fl_lightning.batches.base import Batch
from fl_lightning.counts import Counted
from fl_lightning.models.batch_norm import adopt_statistics, statistics_of
from fl_lightning.models.gcn import GCN
from fl_lightning.models.output import NetOutput
from fl_lightning.models.plain import fitted
from fl_lightning.round.class_metrics import CLASS_METRICS, ClassMetric, class_scores
from fl_lightning.round.context import Context, Parameters
from fl_lightning.round.direction import KNOWN, Direction
from fl_lightning.round.privacy import RecordPrivacy

#: A pure function of (client module, its parameters, its batch, its context): a local loss, scalar.
Objective = Callable[["ClientModule", Parameters, Batch, Context], Tensor]
#: A pure function of (trained parameters, context) that is added to the local loss, scalar.
Penalty = Callable[[Parameters, Context], Tensor]
#: A pure function of (client, parameters, batch, context): the predictions that are scored instead of the net's own.
OutputRule = Callable[["ClientModule", Parameters, Batch, Context], NetOutput]
#: Builds a net from the width of the inputs (their shape, where they are no vectors) and of the outputs.
NetFactory = Callable[[Any, int], nn.Module]
OptimizerFactory = Callable[[Iterable[Any]], Optimizer]

#: Where :meth:`ClientModule.score_table` puts what metrics that are no sums over examples are computed from.
LOGITS = "logits"

#: The roles of examples.
SPLITS = ("train", "val", "test")

#: With fewer classes PyTorch's softmax over the last dimension is not vectorised on a CPU, and ten times slower.
_VECTOR = 16


def default_optimizer(parameters: Iterable[Any]) -> Optimizer:
    """Adam with learning rate 0.01 and no weight decay.

    Decay moves also what a client's data never touch, such as words that its nodes do not have, and an average then
    forgets what others learned in them: with the field's 5e-4, FedAvg ends 25 points below this on Cora (10 clients;
    studies/results/leaderboard_a). See :mod:`fl_lightning.optimizers` for decay that averaging survives.
    """
    return Adam(parameters, lr=0.01, fused=True)


class ClientModule(LightningModule, Counted):
    """A client's model, objective, evaluation and optimiser for classification of its nodes or examples.

    Subclass it and override :meth:`loss` and :meth:`scores` for another task, as :class:`RegressionClient` does.
    Overriding ``training_step`` itself ties the client to the sequential executor.

    Args:
        net: Builds the net from (number of features, number of outputs), or is a net, of which every client has a
            copy. It maps a batch to a ``NetOutput`` or to logits alone; or is a plain PyG module,
            ``forward(x, edge_index)`` (see :mod:`fl_lightning.models.plain`). Several nets are given to the clients in
            turn: client c has the net c modulo their number. None for the strategy's own net, or for one that fits the
            data (:meth:`~fl_lightning.strategies.Strategy.net_for`).
        optimizer: Builds the client's optimizer from its parameters; None for the strategy's ``default_optimizer``.
        gradient_clip_val: Largest Euclidean norm of a client's gradient, which is scaled down to it; None for no bound.
        running_statistics: Whether those of normalisation layers (BatchNorm) are ``personal``, and never leave their
            client, or ``shared``, and travel with the parameters.
        metrics: What else to measure of a classification beside accuracy and loss, each client's own over the classes:
            ``f1``, ``auroc`` (one class against the rest), ``balanced_accuracy``; None for nothing.
        privacy: Differential privacy of each training example (DP-SGD), for clients that hold examples; None for none.

    Raises:
        ValueError: A value is out of its range.
    """

    #: The validation metric that chooses the reported round.
    monitor: ClassVar[str] = "val/acc"
    #: Whether ``max`` or ``min`` of a metric is best, by its bare name; a subclass says it of those that it adds.
    metric_directions: ClassVar[Mapping[str, Direction]] = KNOWN
    #: What ``metrics`` may name.
    more_metrics: ClassVar[tuple[str, ...]] = CLASS_METRICS

    settings_prefix = "model."

    def __init__(
        self,
        net: list[NetFactory] | NetFactory | None = None,
        optimizer: OptimizerFactory | None = None,
        gradient_clip_val: float | None = None,
        running_statistics: Literal["personal", "shared"] = "personal",
        metrics: list[ClassMetric] | None = None,
        privacy: RecordPrivacy | None = None,
    ) -> None:
        super().__init__()
        self.has_own_net, self.has_own_optimizer = net is not None, optimizer is not None
        self.net_factories: list[NetFactory] = net if isinstance(net, list) else [GCN if net is None else net]
        if not self.net_factories:
            raise ValueError("model.net is an empty list: give at least one net")
        if not all(map(callable, self.net_factories)):
            raise ValueError(f"model.net is {net!r}: give the class of a net, a net, or a list of them")
        if gradient_clip_val is not None and gradient_clip_val <= 0:
            raise ValueError(f"model.gradient_clip_val must be positive, or null for none, got {gradient_clip_val}")
        if running_statistics not in ("personal", "shared"):
            raise ValueError(f"model.running_statistics must be 'personal' or 'shared', got {running_statistics!r}")
        for name in metrics or ():
            if name not in self.more_metrics:
                known = f"give some of {', '.join(self.more_metrics)}" if self.more_metrics else "leave it out"
                raise ValueError(f"model.metrics holds {name!r}, which {type(self).__name__} does not measure: {known}")
        self.metrics = tuple(dict.fromkeys(metrics or ()))
        self.optimizer_factory: OptimizerFactory = default_optimizer if optimizer is None else optimizer
        self.running_statistics = running_statistics
        self.gradient_clip_val = gradient_clip_val
        self.privacy = privacy
        self.net: nn.Module
        self.stage_objective: Objective | None = None
        self.penalty: Penalty | None = None
        self.context = Context()
        self.output_rule: OutputRule | None = None

    def given(self) -> dict[str, Any]:
        """Settings that are kept under other names."""
        return {"net": self.net_factories, "optimizer": self.optimizer_factory}

    @classmethod
    def directions(cls) -> dict[str, Direction]:
        """``metric_directions`` of the class and of those that it derives from, which it may overrule.

        Raises:
            ValueError: One of them is neither ``max`` nor ``min``.
        """
        found: dict[str, Direction] = {}
        for kind in reversed(cls.__mro__):
            found |= vars(kind).get("metric_directions", {})
        for name, direction in found.items():
            if direction not in ("max", "min"):
                raise ValueError(f"{cls.__name__}.metric_directions has {direction!r} for {name!r}: give max or min")
        return found

    def take_defaults(self, *, net: NetFactory, optimizer: OptimizerFactory) -> None:
        """Take over a run's net and optimizer, each only where the client was given none of its own."""
        if not self.has_own_net:
            self.net_factories = [net]
        if not self.has_own_optimizer:
            self.optimizer_factory = optimizer

    def build(
        self,
        num_features: int | tuple[int, ...],
        num_outputs: int,
        adapt: Callable[[nn.Module], nn.Module] | None = None,
    ) -> None:
        """Create the nets once the data's sizes are known; ``net`` is the first.

        Args:
            num_features: Width of the inputs, or the shape of one example.
            num_outputs: Classes, or targets.
            adapt: What the strategy makes of each net (``Strategy.build_net``).

        Raises:
            ValueError: A net cannot be built so.
        """
        try:
            nets = [fitted(factory, num_features, num_outputs) for factory in self.net_factories]
            for net in nets:
                adopt_statistics(net)
        except Exception as error:  # a net is its user's code, or a class that is none
            why = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise ValueError(f"model.net, for inputs of {num_features} and {num_outputs} outputs: {why}") from error
        self.nets = nets if adapt is None else [adapt(net) for net in nets]
        self.net = self.nets[0]

    def variants(self) -> "list[ClientModule]":
        """One client module for each of the nets."""
        modules = []
        for factory, net in zip(self.net_factories, self.nets, strict=True):
            module = copy.copy(self)
            module._modules = {}
            module.net_factories, module.nets, module.net = [factory], [net], net
            modules.append(module)
        return modules

    @property
    def num_parameters(self) -> int:
        """Numbers in the parameters of the (first) net."""
        return sum(parameter.numel() for parameter in self.net.parameters())

    def travelling(self, net: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters of a net that a server may know: all but running statistics that are personal."""
        stay = statistics_of(net) if self.running_statistics == "personal" else frozenset()
        return {name: parameter for name, parameter in net.named_parameters() if name not in stay}

    @property
    def num_travelling(self) -> int:
        """How many of the parameters' numbers a server may know."""
        return sum(parameter.numel() for parameter in self.travelling(self.net).values())

    def parameter_dict(self) -> dict[str, Tensor]:
        """The net's parameters by name."""
        return dict(self.net.named_parameters())

    def forward(self, batch: Batch) -> Tensor:
        """The logits of the client's own net, (N, num_outputs): what ``self(batch)`` is in ``training_step``."""
        return _as_output(self.net(batch)).logits

    def output(self, parameters: Parameters, batch: Batch) -> NetOutput:
        """Run the net with the given parameters; train or eval mode is the module's."""
        # executors refuse nets with tied weights, and to look for them here takes as long as a layer
        return _as_output(functional_call(self.net, dict(parameters), (batch,), tie_weights=False))

    def ruled_output(
        self, rule: OutputRule | None, parameters: Parameters, batch: Batch, context: Context
    ) -> NetOutput:
        """What is scored: the net's own output, or what a rule makes of it."""
        return self.output(parameters, batch) if rule is None else rule(self, parameters, batch, context)

    def part_output(self, part: str, parameters: Parameters, batch: Batch) -> NetOutput:
        """Run one of several models of the client, a sub-net: ``part`` is its name in the net.

        Args:
            part: For example ``shared`` of a :class:`~fl_lightning.models.Twin`.
            parameters: The client's; those of the sub-net are ``<part>.<name>``.
            batch: One client's batch.
        """
        return _as_output(self.call_part(part, parameters, batch))

    def call_part(self, part: str, parameters: Parameters, *inputs: Any, **settings: Any) -> Any:
        """What a sub-net makes of any inputs and settings of its ``forward``; otherwise as :meth:`part_output`."""
        net, own = self.net.get_submodule(part), parameters_of(part, parameters)
        return functional_call(net, own, inputs, settings, tie_weights=False)

    def frozen_output(self, parameters: Parameters, batch: Batch) -> NetOutput:
        """Run the net as a teacher: without dropout and without gradient, whatever the mode of the module."""
        training = self.training
        self.eval()
        try:
            with torch.no_grad():
                return self.output(parameters, batch)
        finally:
            self.train(training)

    def objective(self, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
        """The local loss, a pure function: the loss of the net's output on the batch.

        A stage may have another objective (``Stage.objective``) and a penalty beside it (``Stage.penalty``).

        Args:
            parameters: All parameters of the net.
            batch: One client's batch.
            context: What else the client knows: the parameters it began the stage with, what the server sent.

        Returns:
            Scalar loss.
        """
        return self.loss(self.output(parameters, batch), batch)

    def loss(self, output: NetOutput, batch: Batch) -> Tensor:
        """Mean cross entropy over the labelled training examples, scalar (or one for each client of a stack)."""
        return _masked_mean(_cross_entropy(output.logits, batch.y), batch.train_mask)

    def scores(self, output: NetOutput, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
        """Numerator and denominator of each metric, by name; ``val/...`` chooses and ``test/...`` is reported.

        Accuracy is the share of correctly labelled examples of the split, the loss is the mean cross entropy.
        """
        loss_N = _cross_entropy(output.logits, batch.y)  # first, for it refuses targets that are no classes
        return split_scores(batch, {"acc": output.logits.argmax(dim=-1) == batch.y, "loss": loss_N})

    def score_table(
        self, parameters: Parameters, batch: Batch, context: Context, rule: OutputRule | None = None
    ) -> dict[str, Tensor]:
        """The scores of a model, each metric's numerator and denominator as one float32 tensor (..., 2).

        With ``metrics``, also the logits (..., N, K), for :meth:`scores_of_parts`.
        """
        output = self.ruled_output(rule, parameters, batch, context)
        table = _as_table(self.scores(output, batch))
        return {**table, LOGITS: output.logits} if self.metrics else table

    def scores_of_parts(self, parts: Sequence[Batch], tables: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """The scores of a batch that was scored in parts, (..., 2).

        Args:
            parts: The batch's parts, of one client or of a stack.
            tables: What :meth:`score_table` found of each.
        """
        found = {
            name: torch.stack([table[name] for table in tables]).sum(dim=0) for name in tables[0] if name != LOGITS
        }
        if self.metrics:
            masks = [torch.stack([part.train_mask, part.val_mask, part.test_mask]) for part in parts]
            logits = torch.cat([table[LOGITS] for table in tables], dim=-2)
            more = class_scores(self.metrics, logits, torch.cat([p.y for p in parts], dim=-1), torch.cat(masks, dim=-1))
            for name, (total, count) in more.items():
                pairs = zip(SPLITS, total, count, strict=True)
                found |= _as_table({f"{split}/{name}": (t, n) for split, t, n in pairs})
        return found

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The stage's objective and its penalty on this client's own parameters."""
        parameters = self.parameter_dict()
        if self.stage_objective is None:
            loss = self.objective(parameters, batch, self.context)
        else:
            loss = self.stage_objective(self, parameters, batch, self.context)
        return loss if self.penalty is None else loss + self.penalty(parameters, self.context)

    def predictions(self, output: NetOutput) -> Tensor:
        """Class probabilities of every example, (N, num_classes)."""
        return output.logits.softmax(dim=-1)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Predictions for every example, (N, num_outputs)."""
        return self.predictions(self.ruled_output(self.output_rule, self.parameter_dict(), batch, self.context))

    def configure_optimizers(self) -> Optimizer:
        """The client's optimiser over its own parameters.

        Raises:
            ValueError: The optimiser refuses its settings.
        """
        try:
            return self.build_optimizer(self.net.named_parameters())
        except (TypeError, ValueError) as error:
            raise ValueError(f"model.optimizer: {error}") from error

    def build_optimizer(self, named_parameters: Iterable[tuple[str, Tensor]]) -> Optimizer:
        """Build the optimiser over named parameters, of one client or of a whole stack.

        Override it for settings that differ by parameter name; each tensor must be treated on its own.
        """
        return self.optimizer_factory([parameter for _, parameter in named_parameters])

    def clip(self, gradients: Mapping[str, Tensor | None]) -> Mapping[str, Tensor | None]:
        """Scale each client's gradient down to ``gradient_clip_val``, (C, *shape) by name; None stays None.

        Each of several models of a client has a norm of its own. Override it for another rule; both executors call it
        before every step of the optimiser.
        """
        if self.gradient_clip_val is None:
            return gradients
        models = getattr(self.net, "models", ()) if hasattr(self, "net") else ()
        groups: dict[str, dict[str, Tensor]] = {}
        for name, gradient in gradients.items():
            part = name.partition(".")[0]
            if gradient is not None:
                groups.setdefault(part if part in models else "", {})[name] = gradient
        clipped: dict[str, Tensor | None] = dict(gradients)
        for group in groups.values():
            norm_C = torch.stack([g.reshape(len(g), -1).norm(dim=1) for g in group.values()]).norm(dim=0)
            factor_C = (self.gradient_clip_val / (norm_C + 1e-6)).clamp(max=1.0)
            clipped |= {name: g * factor_C.view(-1, *[1] * (g.dim() - 1)) for name, g in group.items()}
        return clipped

    def constrain(self, parameters: Parameters, context: Context) -> Parameters:
        """Values that replace parameters after every optimiser step, by name: a projection onto what is allowed.

        A pure function of all parameters of one client; none is constrained here. It must leave alone what is allowed.
        """
        return {}

    def example_count(self, batch: Batch) -> Tensor:
        """Number of labelled training examples."""
        return batch.train_mask.sum(dim=-1)


def check_is_client(client: Any) -> None:
    """Refuse what is no client module.

    Raises:
        ValueError: It is a class, another LightningModule, a net, or something else.
    """
    if isinstance(client, ClientModule):
        return
    kind = client if isinstance(client, type) else type(client)
    if issubclass(kind, ClientModule):
        remedy = f"it is a class, give an instance of it, client={kind.__name__}()"
    elif issubclass(kind, LightningModule):
        remedy = (
            "derive it from fl_lightning.ClientModule (for numbers from fl_lightning.RegressionClient), which has the "
            "net, loss and scores; it may have a training_step of its own"
        )
    elif issubclass(kind, nn.Module):
        remedy = "it is a net, give client=fl_lightning.ClientModule(net=...)"
    else:
        remedy = "give client=fl_lightning.ClientModule()"
    raise ValueError(f"client is {kind.__name__}, which is no ClientModule: {remedy}")


class RegressionClient(ClientModule):
    """A client that predicts numbers: mean squared error over the examples and their targets.

    The settings are those of :class:`ClientModule`. The metric is ``mse``, of which less is better.
    """

    monitor: ClassVar[str] = "val/mse"
    more_metrics: ClassVar[tuple[str, ...]] = ()

    def loss(self, output: NetOutput, batch: Batch) -> Tensor:
        """Mean squared error over the training examples, scalar (or one for each client of a stack)."""
        return _masked_mean(_squared_error(output.logits, batch.y), batch.train_mask)

    def scores(self, output: NetOutput, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
        """Sum of the examples' squared errors (each a mean over its targets) and their number, for every split."""
        error_N = _squared_error(output.logits, batch.y)
        return split_scores(batch, {"mse": error_N, "loss": error_N})

    def predictions(self, output: NetOutput) -> Tensor:
        """Predicted targets, (N, num_outputs)."""
        return output.logits


def parameters_of(part: str, parameters: Parameters) -> dict[str, Tensor]:
    """Parameters of a sub-net by their names in it.

    Example:
        >>> sorted(parameters_of("shared", {"shared.head.bias": 1, "personal.head.bias": 2}))  # tensors, usually
        ['head.bias']
    """
    return {name.removeprefix(f"{part}."): p for name, p in parameters.items() if name.startswith(f"{part}.")}


def split_scores(batch: Batch, values: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Sum and count of each value over the training, validation and test examples.

    Args:
        batch: Of one client, or of a stack.
        values: One number (or boolean) for every example, (..., N), by the metric's name.

    Returns:
        By ``train/name``, ``val/name``, ``test/name``.
    """
    mask_SN = torch.stack([batch.train_mask, batch.val_mask, batch.test_mask])
    counts = mask_SN.sum(dim=-1).unbind()
    totals = {name: (value_N * mask_SN).sum(dim=-1).unbind() for name, value_N in values.items()}
    return {
        f"{split}/{name}": (totals[name][place], counts[place]) for place, split in enumerate(SPLITS) for name in values
    }


def _as_table(scores: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([value.float() for value in pair], dim=-1) for name, pair in scores.items()}


def _as_output(found: Any) -> NetOutput:
    """What a net returned; logits that are alone are the embedding as well."""
    if isinstance(found, NetOutput):
        return found
    return NetOutput(found, found) if isinstance(found, Tensor) else NetOutput(found[0], found[1])


def _masked_mean(value_N: Tensor, mask_N: Tensor) -> Tensor:
    weight_N = mask_N.to(value_N.dtype)
    return (value_N * weight_N).sum(dim=-1) / weight_N.sum(dim=-1).clamp(min=1)


def _squared_error(predicted: Tensor, y: Tensor) -> Tensor:
    """Squared error of every example, the mean over its targets, (..., N)."""
    if not y.is_floating_point():
        raise ValueError("the targets are classes, which RegressionClient does not predict: set model to ClientModule")
    return (predicted - y).square().mean(dim=-1)


def _cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    """Cross entropy of every example, (..., N)."""
    if y.is_floating_point():
        raise ValueError("the targets are numbers, which ClientModule does not predict: set model to RegressionClient")
    if logits.shape[-1] < _VECTOR and logits.device.type == "cpu":  # classes first, so that examples fill the vectors
        if logits.dim() == 2:
            return F.cross_entropy(logits.t()[None], y[None], reduction="none")[0]
        return F.cross_entropy(logits.mT, y, reduction="none")
    return F.cross_entropy(logits.flatten(0, -2), y.flatten(), reduction="none").view_as(y)
