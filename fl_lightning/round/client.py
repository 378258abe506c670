"""One client of the federation, written once and in plain PyTorch, as a LightningModule.

The mathematics is in pure functions of (parameters, batch), which the sequential executor calls for one client after
another, and the stacked executor maps over all clients at once.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, NoReturn

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Adam, Optimizer

from fl_lightning.batches.base import Batch
from fl_lightning.counts import Counted
from fl_lightning.direction import KNOWN, Direction
from fl_lightning.models.batch_norm import adopt_statistics, statistics_of
from fl_lightning.models.fitting import fitted
from fl_lightning.models.gcn import GCN
from fl_lightning.models.output import NetOutput, as_output, own_outputs
from fl_lightning.round.client_checks import check_client_settings, check_modules
from fl_lightning.round.clipping import clipped
from fl_lightning.round.context import Context, Parameters
from fl_lightning.round.lr_schedule import LRSchedulerFactory
from fl_lightning.round.no_trainer import NoTrainer
from fl_lightning.round.privacy import RecordPrivacy
from fl_lightning.tasks import NodeClassification, Task
from fl_lightning.tasks.class_metrics import ClassMetric
from fl_lightning.tasks.number_metrics import NumberMetric
from fl_lightning.tasks.targets import SPLITS

#: A pure function of (client module, its parameters, its batch, its context): a local loss, scalar.
Objective = Callable[["ClientModule", Parameters, Batch, Context], Tensor]
#: A pure function of (trained parameters, context) that is added to the local loss, scalar.
Penalty = Callable[[Parameters, Context], Tensor]
#: A pure function of (client, parameters, batch, context): the predictions that are scored instead of the net's own.
OutputRule = Callable[["ClientModule", Parameters, Batch, Context], NetOutput]
#: Builds a net from the widths of the inputs (their shape, if they are not vectors) and of the outputs.
NetFactory = Callable[[Any, int], nn.Module]
OptimizerFactory = Callable[[Iterable[Any]], Optimizer]

#: Where :meth:`ClientModule.score_table` puts the outputs that metrics which are not sums over examples need.
LOGITS = "logits"


def default_optimizer(parameters: Iterable[Any]) -> Optimizer:
    """Adam with learning rate 0.01 and no weight decay.

    Weight decay also moves coordinates that a client's data never touch, such as those of words that its nodes do not
    have, and averaging then forgets what other clients learned in them: with the usual 5e-4, FedAvg ends 25 points
    lower on Cora (10 clients; studies/results/leaderboard_a). See :mod:`fl_lightning.optimizers` for weight decay that
    goes well with averaging.
    """
    return Adam(parameters, lr=0.01, fused=True)


class ClientModule(NoTrainer, LightningModule, Counted):  # type: ignore[misc]
    """A client's model, objective, evaluation and optimizer, whatever its task.

    Loss, metrics and predictions are those of the task (:mod:`fl_lightning.tasks`), which follows from the data. For
    your own, subclass it and override :meth:`loss`, :meth:`scores`, ``monitor`` or :meth:`predictions`. Overriding
    ``training_step`` itself ties the client to the sequential executor. ``self.round_idx`` and ``self.context``
    (:class:`~fl_lightning.round.context.Context`) are those of what is computed.

    Args:
        net: A function that builds the net from (number of features, number of outputs), or a net, of which every
            client gets a copy. The net maps a batch to a ``NetOutput`` or to logits alone, or it is a plain PyG module,
            ``forward(x, edge_index)`` (see :mod:`fl_lightning.models.plain`). Several nets are assigned to the clients
            in turn: client c has the net c modulo their number. None for the strategy's own net, or for one that fits
            the data (:meth:`~fl_lightning.strategies.Strategy.net_for`).
        optimizer: Builds the client's optimizer from its parameters; None for the strategy's ``default_optimizer``.
        gradient_clip_val: Largest Euclidean norm of a client's gradient; a longer one is scaled down. None for no
            bound.
        running_statistics: Whether the running statistics of normalization layers (BatchNorm) are ``personal`` and
            never leave their client, or ``shared`` and communicated with the parameters.
        metrics: Further metrics: for classes, averaged over the classes of each client, ``f1``, ``auroc`` (one class
            against the rest), ``balanced_accuracy``; ``ece``, the expected calibration error; ``recall_per_class``; on
            nodes ``acc_per_degree``; for numbers ``mae``, ``rmse``, ``r2``; None for none.
        privacy: Differential privacy of each training example (DP-SGD), for clients with examples rather than graphs;
            None for none.
        lr_scheduler: Builds a scheduler of PyTorch from an optimizer. It steps once a round, for all clients alike,
            whichever rounds they take part in. None for the same learning rate in all rounds.

    Raises:
        ValueError: A value is out of range.
    """

    #: Whether ``max`` or ``min`` of a metric is best, by its bare name; a subclass declares those that it adds.
    metric_directions: ClassVar[Mapping[str, Direction]] = KNOWN

    settings_prefix = "model."

    def __init__(
        self,
        net: list[NetFactory] | NetFactory | None = None,
        optimizer: OptimizerFactory | None = None,
        gradient_clip_val: float | None = None,
        running_statistics: Literal["personal", "shared"] = "personal",
        metrics: list[ClassMetric | NumberMetric] | None = None,
        privacy: RecordPrivacy | None = None,
        lr_scheduler: LRSchedulerFactory | None = None,
    ) -> None:
        super().__init__()
        self.has_own_net, self.has_own_optimizer = net is not None, optimizer is not None
        self.net_factories: list[NetFactory] = net if isinstance(net, list) else [GCN if net is None else net]
        check_client_settings(net, optimizer, lr_scheduler, gradient_clip_val, running_statistics, metrics)
        self.metrics = tuple(dict.fromkeys(metrics or ()))
        self.optimizer_factory: OptimizerFactory = default_optimizer if optimizer is None else optimizer
        self.running_statistics = running_statistics
        self.gradient_clip_val = gradient_clip_val
        self.privacy = privacy
        self.lr_scheduler = lr_scheduler
        self.task: Task = NodeClassification()  # until the data determine another
        self.own_layers: tuple[str, ...] = ()  # parameters that are each client's own; a run finds them
        self.net: nn.Module
        self.stage_objective: Objective | None = None
        self.penalty: Penalty | None = None
        self.context = Context()
        self.output_rule: OutputRule | None = None

    @classmethod
    def load_from_checkpoint(cls, *_: Any, **settings: Any) -> NoReturn:
        """Raise a TypeError: checkpoints are of whole federations (:func:`fl_lightning.load_run`)."""
        raise TypeError("a checkpoint is of a whole federation: fl_lightning.load_run(folder).client(name) is a model")

    def __getstate__(self) -> dict[str, Any]:
        """What a copy has: no Fabric, as Lightning leaves out its trainer, since a copy may outlive it."""
        return {**super().__getstate__(), "_fabric": None}

    def given(self) -> dict[str, Any]:
        """Settings that are stored under other names."""
        return {"net": self.net_factories, "optimizer": self.optimizer_factory}

    def take_task(self, task: Task) -> None:
        """Adopt the task of the data, before anything else about the data is known.

        Raises:
            ValueError: ``metrics`` has one that the task does not measure.
        """
        if other := [name for name in self.metrics if name not in task.on_demand]:
            advice = f"give some of {', '.join(task.on_demand)}" if task.on_demand else "leave it out"
            raise ValueError(f"model.metrics has {other[0]!r}, which {task} does not measure: {advice}")
        self.task = task

    @property
    def monitor(self) -> str:
        """The validation metric that chooses the best round: the task's; a subclass may have its own."""
        return self.task.target.monitor

    @property
    def whole_metrics(self) -> tuple[str, ...]:
        """Metrics that are computed from all of a client's outputs at once."""
        return tuple(dict.fromkeys((*self.task.target.always, *self.metrics)))

    @classmethod
    def directions(cls) -> dict[str, Direction]:
        """``metric_directions`` of the class and of its base classes, which it may override.

        Raises:
            ValueError: One of them is neither ``max`` nor ``min``.
        """
        result: dict[str, Direction] = {}
        for kind in reversed(cls.__mro__):
            result |= vars(kind).get("metric_directions", {})
        for name, direction in result.items():
            if direction not in ("max", "min"):
                raise ValueError(f"{cls.__name__}.metric_directions has {direction!r} for {name!r}: give max or min")
        return result

    def take_defaults(self, *, net: NetFactory, optimizer: OptimizerFactory) -> None:
        """Adopt a run's default net and optimizer, each only if the client was given none of its own."""
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
        """Create the nets once the sizes of the data are known; ``net`` is the first.

        Args:
            num_features: Width of the inputs, or the shape of one example.
            num_outputs: Number of classes or targets.
            adapt: Turns each net into what the strategy needs (``Strategy.build_net``).

        Raises:
            ValueError: A net cannot be built with these sizes, or the client has a net or parameters beside it.
        """
        check_modules(self, getattr(self, "nets", ()))
        try:
            nets = [fitted(factory, num_features, num_outputs) for factory in self.net_factories]
            for net in nets:
                adopt_statistics(net)
        except Exception as error:  # a net is the user's code, or not a net at all
            why = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
            raise ValueError(f"model.net, for inputs of {num_features} and {num_outputs} outputs: {why}") from error
        self.nets = nets if adapt is None else [adapt(net) for net in nets]
        self.net = self.nets[0]

    def variants(self) -> "list[ClientModule]":
        """One client module for each of the nets."""
        modules = []
        for factory, net in zip(self.net_factories, self.nets, strict=True):
            module = copy.copy(self)
            module._modules = {name: part for name, part in self._modules.items() if name != "net"}
            module.net_factories, module.nets, module.net = [factory], [net], net
            modules.append(module)
        return modules

    @property
    def num_parameters(self) -> int:
        """Number of parameter values of the (first) net."""
        return sum(parameter.numel() for parameter in self.net.parameters())

    def communicated(self, net: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters of a net that a server may know: all but personal running statistics and own layers."""
        stay = statistics_of(net) if self.running_statistics == "personal" else frozenset()
        own = tuple(f".{name}" for name in self.own_layers)  # with a prefix in a net that has copies of the user's
        return {n: p for n, p in net.named_parameters() if n not in stay and not f".{n}".endswith(own)}

    @property
    def num_communicated(self) -> int:
        """Number of parameter values that a server may know."""
        return sum(parameter.numel() for parameter in self.communicated(self.net).values())

    def parameter_dict(self) -> dict[str, Tensor]:
        """The net's parameters by name."""
        return dict(self.net.named_parameters())

    def forward(self, batch: Batch) -> Tensor:
        """The logits of the client's own net, (N, num_outputs), for ``self(batch)`` in ``training_step``."""
        return own_outputs(as_output(self.net(batch)), batch).logits

    def output(self, parameters: Parameters, batch: Batch) -> NetOutput:
        """Run the net with the given parameters; train or eval mode is the module's."""
        # executors refuse nets with tied weights; a check here would take as long as a layer
        return own_outputs(as_output(functional_call(self.net, dict(parameters), (batch,), tie_weights=False)), batch)

    def ruled_output(
        self, rule: OutputRule | None, parameters: Parameters, batch: Batch, context: Context
    ) -> NetOutput:
        """The output that is scored: that of the rule, or the net's own without a rule."""
        return self.output(parameters, batch) if rule is None else rule(self, parameters, batch, context)

    def part_output(self, part: str, parameters: Parameters, batch: Batch) -> NetOutput:
        """Run one of several models of the client, a sub-net: ``part`` is its name in the net.

        Args:
            part: For example ``shared`` of a :class:`~fl_lightning.models.Twin`.
            parameters: The client's parameters; those of the sub-net are ``<part>.<name>``.
            batch: One client's batch.
        """
        return own_outputs(as_output(self.call_part(part, parameters, batch)), batch)

    def call_part(self, part: str, parameters: Parameters, *inputs: Any, **settings: Any) -> Any:
        """Call a sub-net with any inputs and settings of its ``forward``; otherwise as :meth:`part_output`."""
        net, part_parameters = self.net.get_submodule(part), parameters_of(part, parameters)
        return functional_call(net, part_parameters, inputs, settings, tie_weights=False)

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

        A stage may have another objective (``Stage.objective``) and an additional penalty (``Stage.penalty``).

        Args:
            parameters: All parameters of the net.
            batch: One client's batch.
            context: What else the client knows: the parameters it began the stage with and what the server sent.

        Returns:
            Scalar loss.
        """
        return self.loss(self.output(parameters, batch), batch)

    def loss(self, output: NetOutput, batch: Batch) -> Tensor:
        """The loss of the task: mean over the training examples, scalar (or one value for each client of a stack)."""
        return self.task.target.loss(output.logits, batch)

    def scores(self, output: NetOutput, batch: Batch) -> dict[str, tuple[Tensor, Tensor]]:
        """Numerator and denominator of each metric, by name; ``val/...`` selects and ``test/...`` is reported.

        By default, those of the task: means over the examples of each split.
        """
        return self.task.target.scores(output.logits, batch)

    def score_table(
        self, parameters: Parameters, batch: Batch, context: Context, rule: OutputRule | None = None
    ) -> dict[str, Tensor]:
        """The scores of a model, each metric's numerator and denominator as one float32 tensor (..., 2).

        With ``whole_metrics``, also the logits (..., N, K), for :meth:`scores_of_parts`.
        """
        output = self.ruled_output(rule, parameters, batch, context)
        table = _as_table(self.scores(output, batch))
        return {**table, LOGITS: output.logits} if self.whole_metrics else table

    def scores_of_parts(self, parts: Sequence[Batch], tables: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """The scores of a batch that was scored in parts, (..., 2).

        Args:
            parts: The parts of the batch, of one client or of a stack.
            tables: The result of :meth:`score_table` for each.
        """
        result = {n: torch.stack([table[n] for table in tables]).sum(dim=0) for n in tables[0] if n != LOGITS}
        if not self.whole_metrics:
            return result
        dim = parts[0].key.dim()  # of the examples
        masks = [torch.stack([part.train_mask, part.val_mask, part.test_mask]) for part in parts]
        logits, y = (torch.cat(each, dim=dim) for each in ([t[LOGITS] for t in tables], [p.y for p in parts]))
        more = self.task.whole_scores(self.whole_metrics, parts, logits, y, torch.cat(masks, dim=dim + 1))
        for name, (total, count) in more.items():
            pairs = zip(SPLITS, total, count, strict=True)
            result |= _as_table({f"{split}/{name}": (t, n) for split, t, n in pairs})
        return result

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The stage's objective and penalty for this client's own parameters."""
        parameters = self.parameter_dict()
        if self.stage_objective is None:
            loss = self.objective(parameters, batch, self.context)
        else:
            loss = self.stage_objective(self, parameters, batch, self.context)
        return loss if self.penalty is None else loss + self.penalty(parameters, self.context)

    def predictions(self, output: NetOutput) -> Tensor:
        """The predictions of the task: probabilities of classes or labels, or numbers, (N, num_outputs)."""
        return self.task.target.predictions(output.logits)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Predictions for every example, (N, num_outputs)."""
        return self.predictions(self.ruled_output(self.output_rule, self.parameter_dict(), batch, self.context))

    def configure_optimizers(self) -> Optimizer:
        """The client's optimizer over its own parameters.

        Raises:
            ValueError: The optimizer refuses its settings.
        """
        try:
            return self.build_optimizer(self.net.named_parameters())
        except (TypeError, ValueError) as error:
            raise ValueError(f"model.optimizer: {error}") from error

    def build_optimizer(self, named_parameters: Iterable[tuple[str, Tensor]]) -> Optimizer:
        """Build the optimizer over one client's named parameters; override it for settings that differ by name."""
        return self.optimizer_factory([parameter for _, parameter in named_parameters])

    def clip(self, gradients: Mapping[str, Tensor | None]) -> Mapping[str, Tensor | None]:
        """Scale each client's gradient down to ``gradient_clip_val``, (C, *shape) by name; None stays None.

        Each of several models of a client has a norm of its own. Override it for another rule; both executors call it
        before every step of the optimizer.
        """
        if self.gradient_clip_val is None:
            return gradients
        models = getattr(self.net, "models", ()) if hasattr(self, "net") else ()
        return clipped(gradients, self.gradient_clip_val, models)

    def constrain(self, parameters: Parameters, context: Context) -> Parameters:
        """Values that replace parameters after every optimizer step, by name: a projection onto the allowed values.

        A pure function of all parameters of one client, without constraints by default. It must leave allowed values
        unchanged.
        """
        return {}

    def example_count(self, batch: Batch) -> Tensor:
        """Number of labeled training examples."""
        return batch.train_mask.sum(dim=-1)


def parameters_of(part: str, parameters: Parameters) -> dict[str, Tensor]:
    """Parameters of a sub-net, by their names in it.

    Example:
        >>> sorted(parameters_of("shared", {"shared.head.bias": 1, "personal.head.bias": 2}))  # tensors, usually
        ['head.bias']
    """
    return {name.removeprefix(f"{part}."): p for name, p in parameters.items() if name.startswith(f"{part}.")}


def _as_table(scores: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([value.float() for value in pair], dim=-1) for name, pair in scores.items()}
