"""The server half of a strategy: what is sent, what is asked for, what is made of the updates.

Three families have a base of their own: ``mixing`` (parameters are averaged), ``hypernetwork`` (parameters are
generated) and ``decentralized`` (there is no server).
"""

import dataclasses
import fnmatch
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args, get_origin

import torch
from torch import Tensor, nn

from fl_lightning.counts import check_counts
from fl_lightning.federation import ClientRegistry, Federation
from fl_lightning.models.gcn import GCN
from fl_lightning.models.plain import plain_parts
from fl_lightning.round.client import ClientModule, NetFactory, OptimizerFactory, Penalty, default_optimizer
from fl_lightning.round.payload import Payload
from fl_lightning.round.stage import Evaluation, Persistence, Stage, StageAddress, StateSpec
from fl_lightning.strategies.server_state import ServerState
from fl_lightning.tasks import Task

#: More local epochs than this are a mistake.
MOST_EPOCHS = 10**6

#: The pattern of the last layer's parameters, whatever they are called in a net of a user's.
HEAD = "head.*"

#: How clients count in a weighted sum: by their training examples, or alike; None where a sum is not enough.
SumWeighting = Literal["examples", "equal"] | None


@dataclass(kw_only=True, eq=False)
class Strategy(ServerState, ABC):
    """Base of all strategies. A strategy is one subclass in one file; nothing else has to be edited.

    A round runs the stages in order: ``configure`` says what is sent, the clients work, ``aggregate`` aggregates what
    came back (only of the clients that succeeded). All processes run the same server on the same payloads.

    The fields of the dataclass are the settings, checked in ``__post_init__``. A subclass adds its own, and redeclares
    one to change its default; what is no setting is a ``ClassVar``, or is made in ``setup``. What lives on between
    rounds is named in ``server_state``, which is saved and loaded.

    Args:
        num_epochs: Local epochs a round.
        reset_optimizer: Start the clients' optimizers anew every round instead of keeping their state.
    """

    num_epochs: int = 3
    reset_optimizer: bool = False

    #: The client that the strategy is written for, which is the default; others must derive from it.
    client_class: ClassVar[type[ClientModule]] = ClientModule
    #: The net of clients that hold graphs and were given none; None for a GCN.
    default_net: ClassVar[type[nn.Module] | None] = None
    #: The optimizer of clients that were given none, where the method needs another than the package's.
    default_optimizer: ClassVar[OptimizerFactory] = staticmethod(default_optimizer)
    #: That of clients that hold examples, where the method needs another for them; None for the same.
    examples_optimizer: ClassVar[OptimizerFactory | None] = None
    #: Whether the paper ties the strategy to a net of its own, so that it does not run with a user's PyG module.
    own_net: ClassVar[bool] = False
    #: Whether clients may have different nets; their parameters are then communicated flat.
    takes_architectures: ClassVar[bool] = False
    #: Whether clients' nets may have running statistics.
    takes_statistics: ClassVar[bool] = True
    #: Whether these may be communicated: only where models are averaged, for other steps make no variances.
    shares_statistics: ClassVar[bool] = False
    #: Whether clients must hold graphs.
    needs_graphs: ClassVar[bool] = False
    #: Whether they must each hold one (and graphs, therefore), whose nodes are the examples.
    needs_nodes: ClassVar[bool] = False
    #: Whether each example must be of one class.
    needs_classes: ClassVar[bool] = False
    #: Whether edges must go both ways.
    needs_undirected: ClassVar[bool] = False
    #: Whether it gives clients' graphs edges, of which nobody knows weights or attributes.
    adds_edges: ClassVar[bool] = False
    #: Whether what it computes of edges itself, beside the clients' nets, takes their weights into account.
    takes_edge_weight: ClassVar[bool] = True
    #: Whether a model's output takes something kept of its client's own examples, so that it has none on others'.
    needs_own_examples: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Check the settings, of which those that are one of several values are checked here for all strategies."""
        settings = dataclasses.fields(self)
        check_counts({s.name: s.type for s in settings}, {s.name: getattr(self, s.name) for s in settings}, "strategy.")
        self.require_at_least(0, "num_epochs")
        for setting in settings:
            choices, value = get_args(setting.type), getattr(self, setting.name)
            if get_origin(setting.type) is Literal and value not in choices:
                raise ValueError(f"strategy.{setting.name} must be {' or '.join(map(repr, choices))}, got {value!r}")
            if value is None and type(None) not in choices:
                raise ValueError(f"strategy.{setting.name} must not be null: leave it out for {setting.default!r}")
        if self.num_epochs > MOST_EPOCHS:
            raise ValueError(f"strategy.num_epochs must be at most {MOST_EPOCHS:,}, got {self.num_epochs:.3g}")

    def require_at_least(self, minimum: float, *settings: str) -> None:
        """Refuse settings below a minimum; None is no number and passes.

        Raises:
            ValueError: One of them is below.
        """
        for name in settings:
            value = getattr(self, name)
            if value is not None and not value >= minimum:  # nan neither
                bound = f"be at least {minimum}" if minimum else "not be negative"
                raise ValueError(f"strategy.{name} must {bound}, got {value}")

    def require_positive(self, *settings: str) -> None:
        """Refuse settings that are not above 0.

        Raises:
            ValueError: One of them is not.
        """
        for name in settings:
            if not getattr(self, name) > 0:
                raise ValueError(f"strategy.{name} must be positive, got {getattr(self, name)}")

    def require_within(self, least: float, most: float, *settings: str) -> None:
        """Refuse settings outside an interval; its ends are allowed.

        Raises:
            ValueError: One of them is outside.
        """
        for name in settings:
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"strategy.{name} must be in [{least}, {most}], got {getattr(self, name)}")

    def require_net(self, federation: Federation, parameters: str, having: str) -> None:
        """Refuse a net without what the strategy's default net has.

        Args:
            federation: Whose clients have the net.
            parameters: Shell-style pattern of the parameters by which it is told.
            having: Of which they are, in words.

        Raises:
            ValueError: The net has none of them.
        """
        if not fnmatch.filter(federation.parameters, parameters):
            assert self.default_net is not None
            raise ValueError(
                f"{type(self).__name__} needs a net with {having}: set model.net to "
                f"fl_lightning.models.{self.default_net.__name__}"
            )

    def default_client(self) -> ClientModule:
        """The client of a run that was given none."""
        return self.client_class()

    def net_for(self, registry: ClientRegistry, client: ClientModule) -> NetFactory:
        """The net of clients that were given none: what the strategy needs, or what fits the task."""
        return registry.task.default_net(registry.num_features, self.default_net)

    def optimizer_for(self, registry: ClientRegistry) -> OptimizerFactory:
        """The optimizer of clients that were given none, by what they hold."""
        cls = type(self)
        if registry.task.has_graphs or cls.examples_optimizer is None:
            return cls.default_optimizer
        return cls.examples_optimizer

    def complete(self, client: ClientModule, registry: ClientRegistry) -> None:
        """Give a client the net and the optimizer that it was not given."""
        client.take_defaults(net=self.net_for(registry, client), optimizer=self.optimizer_for(registry))

    def select(self, names: Sequence[str], patterns: Sequence[str]) -> tuple[str, ...]:
        """Names of parameters that match any of the patterns; ``head.*`` is the last layer, whatever it is called.

        Raises:
            ValueError: A pattern matches nothing.
        """
        return select_names(names, patterns, self.federation.head_names)

    def check_client(self, client: ClientModule) -> None:
        """Refuse a client that the strategy is not written for.

        Raises:
            ValueError: Its class does not derive from ``client_class``.
        """
        if not isinstance(client, self.client_class):
            raise ValueError(
                f"{type(self).__name__} needs clients of the class {self.client_class.__name__}, but model is "
                f"{type(client).__name__}: leave model out, or set model to {self.client_class.__name__}"
            )

    def check_task(self, task: Task) -> None:
        """Refuse examples where the strategy is for graphs, for their nodes or for classes.

        Raises:
            ValueError: The task is another.
        """
        if self.needs_graphs and not task.has_graphs:
            what = "is for clients that hold graphs, but these hold examples: choose a source of graphs"
        elif self.needs_nodes and not task.is_on_nodes:
            what = (
                "is for clients that hold graphs whose nodes are the examples, but these learn of "
                f"{task.examples}: choose a source of one graph for each client"
            )
        elif self.needs_classes and not task.target.has_classes:
            what = f"is for classes, but the targets are {task.target.name}: choose a source of classes"
        else:
            return
        raise ValueError(f"{type(self).__name__} {what}, or another strategy")

    def setup(self, federation: Federation) -> None:
        """Create the server's state. Called once, before anything is trained or loaded."""
        self.federation = federation

    @property
    def min_updates(self) -> int:
        """Updates that a round needs by the strategy's own rules; one with fewer fails."""
        return 1

    def check_round(self, num_clients: int) -> None:
        """Refuse rounds of too few clients.

        Raises:
            ValueError: So many, whom a round asks, are fewer than ``min_updates``.
        """
        if num_clients < self.min_updates:
            raise ValueError(
                f"{type(self).__name__} needs {self.min_updates} updates in every round, but a round asks "
                f"{num_clients} clients: raise participation.fraction or num_clients"
            )

    def check_net(self, net: nn.Module) -> None:
        """Refuse a net that the strategy cannot run with.

        Raises:
            ValueError: It is a plain PyG module, and the strategy is tied to a net of its own.
        """
        if self.own_net and (plain := plain_parts(net)):
            raise ValueError(
                f"{type(self).__name__} is tied by its paper to a net of its own, so it does not run with "
                f"{plain[0].plain_name}: leave model.net out, or set it to "
                f"fl_lightning.models.{(self.default_net or GCN).__name__}"
            )

    def build_net(self, net: nn.Module) -> nn.Module:
        """What the clients have of the user's net: itself, or one with more models or parameters beside it."""
        return net

    def client_state(self) -> Mapping[str, StateSpec]:
        """What each client remembers between stages beside its parameters, by name."""
        return {}

    def persistence(self) -> Persistence:
        """What else of a client lives on between rounds: all parameters, and the optimizer's state unless it is reset.

        A strategy that sends clients what they train, and evaluates what it sends, says less; what it says too little
        of is lost as a round ends, in checkpoints as in the run itself.
        """
        return Persistence(optimizer=not self.reset_optimizer)

    def penalty(self) -> Penalty | None:
        """The term added to the local objective."""
        return None

    def training(self, round_idx: int) -> Stage:
        """The stage in which the clients train; override it to say what else they compute."""
        return Stage(
            name="train", num_epochs=self.num_epochs, reset_optimizer=self.reset_optimizer, penalty=self.penalty()
        )

    def stage(self, address: StageAddress) -> Stage:
        """The stage at an address.

        Raises:
            ValueError: There is none.
        """
        result: Sequence[Stage] = ()
        if address.phase == "initial":
            result = self.initial_stages()
        elif address.phase == "round":
            result = self.stages(address.round_idx)
        elif address.phase == "onboarding":
            result = self.onboarding_stages()
        named = [stage for stage in result if stage.name == address.name]
        if not named:
            raise ValueError(f"{type(self).__name__} has no stage at {address}")
        return named[0]

    def initial_stages(self) -> Sequence[Stage]:
        """Stages to run once, before round 0."""
        return ()

    @abstractmethod
    def stages(self, round_idx: int) -> Sequence[Stage]:
        """The stages of a round, in order."""

    def configure(self, stage: Stage, clients: Sequence[int]) -> Payload | None:
        """What is sent to the given clients at the start of a stage; None for nothing."""
        return None

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        """Aggregate the clients' updates. ``upload`` may lack clients that failed and may be empty."""
        return

    def sum_weighting(self) -> SumWeighting:
        """How the server weights the clients, if it needs nothing of their updates but the weighted sum.

        A subclass of one that says so and overrides ``aggregate``, ``onboard`` or ``mixing_matrix`` has to say it
        again.
        """
        return None

    def settings_against_sums(self) -> list[str]:
        """Names of the settings, as they are, because of which a weighted sum of all updates is not enough."""
        return []

    def model_for(self, clients: Sequence[int]) -> Payload | None:
        """The parameters that replace the clients' own in the main evaluation; None for their own."""
        return None

    def evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """Which models are evaluated, by a prefix of their metrics; the one with the empty prefix is the result."""
        return {"": Evaluation(payload=self.model_for(clients))}

    def later_evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """Ways of evaluating that only a later state of the server has; sites do no others than these and the present.

        Payloads are examples of their names and shapes.
        """
        return {}

    def onboarding_stages(self) -> Sequence[Stage]:
        """Stages by which clients that were held out of training join; the server is not trained in them."""
        return [*self.initial_stages(), *self.stages(0)]

    def onboard(self, stage: Stage, upload: Payload) -> None:
        """Take in what unseen clients responded, without training the server."""
        return

    def metrics(self) -> Mapping[str, float]:
        """Metrics of the server for the logs, of the last round."""
        return {}

    def matrices(self) -> Mapping[str, Tensor]:
        """Square matrices over the training clients, by name: similarities, mixing weights, adjacency.

        For callbacks to look at; a row without a value yet is nan.
        """
        return {}

    def _state_device(self) -> torch.device:
        return self.federation.device


class RecordsMetrics(Strategy):
    """A strategy that notes its metrics in ``recorded_metrics`` when they arise; they are logged and in checkpoints."""

    server_state: ClassVar[tuple[str, ...]] = ("recorded_metrics",)

    def setup(self, federation: Federation) -> None:
        """Begin without metrics."""
        super().setup(federation)
        self.recorded_metrics: dict[str, float] = {}

    def metrics(self) -> Mapping[str, float]:
        """The metrics that were noted last."""
        return self.recorded_metrics


def select_names(names: Sequence[str], patterns: Sequence[str], head: Sequence[str] = ()) -> tuple[str, ...]:
    """Names that match any of the shell-style patterns.

    Args:
        names: All names.
        patterns: The patterns. Where no name matches ``head.*``, it stands for the names of ``head``.
        head: Names of the last layer's parameters, which need not be called so (``Federation.head_names``).

    Raises:
        ValueError: A pattern matches nothing.

    Example:
        >>> select_names(["convs.0.weight", "head.weight"], ["head.*"])
        ('head.weight',)
        >>> select_names(["conv1.weight", "conv2.weight"], ["head.*"], head=["conv2.weight"])
        ('conv2.weight',)
    """
    if HEAD in patterns and not fnmatch.filter(names, HEAD) and set(head) & set(names):
        others = [pattern for pattern in patterns if pattern != HEAD]
        chosen = {*head, *(select_names(names, others) if others else ())}
        return tuple(name for name in names if name in chosen)
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise ValueError(
                f"parameter pattern {pattern!r} matches none of the model's parameters: {', '.join(names)}"
            )
    return tuple(name for name in names if any(fnmatch.fnmatch(name, pattern) for pattern in patterns))


def server_dtype(clients_dtype: torch.dtype) -> torch.dtype:
    """What a server computes in: float32, or float64 where the clients do."""
    return torch.promote_types(clients_dtype, torch.float32)
