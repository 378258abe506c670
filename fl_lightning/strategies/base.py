"""The server half of a strategy: what is sent, what the clients do, and how their updates are aggregated.

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
from fl_lightning.strategies.bounds import Bounded
from fl_lightning.strategies.server_state import ServerState
from fl_lightning.tasks import Task

#: More local epochs than this are taken to be a mistake.
MOST_EPOCHS = 10**6

#: The pattern of the last layer's parameters, whatever their names in a user's net.
HEAD = "head.*"

#: How clients are weighted in a sum: by their training examples, or equally; None if a sum is not enough.
SumWeighting = Literal["examples", "equal"] | None


@dataclass(kw_only=True, eq=False)
class Strategy(ServerState, Bounded, ABC):
    """Base class of all strategies. A strategy is one subclass in one file; nothing else has to be edited.

    A round runs the stages in order: ``configure`` returns what is sent, the clients work, and ``aggregate`` aggregates
    the updates of the clients that succeeded. All processes run the same server on the same payloads.

    The fields of the dataclass are the settings, checked in ``__post_init__``. A subclass adds its own, and redeclares
    one to change its default; anything else is a ``ClassVar`` or is created in ``setup``. What lives on between rounds
    is named in ``server_state``, which is saved and loaded.

    Args:
        num_epochs: Number of local epochs per round.
        reset_optimizer: Reset the clients' optimizers every round instead of keeping their state.
    """

    num_epochs: int = 3
    reset_optimizer: bool = False

    #: The client class that the strategy is written for, which is the default; others must derive from it.
    client_class: ClassVar[type[ClientModule]] = ClientModule
    #: The default net of clients with graphs; None for a GCN.
    default_net: ClassVar[type[nn.Module] | None] = None
    #: The default optimizer of the clients, if the method needs another than the package's.
    default_optimizer: ClassVar[OptimizerFactory] = staticmethod(default_optimizer)
    #: The default optimizer of clients with independent examples, if the method needs another; None for the same.
    examples_optimizer: ClassVar[OptimizerFactory | None] = None
    #: Whether the paper ties the strategy to a net of its own, so that it does not run with a user's PyG module.
    own_net: ClassVar[bool] = False
    #: Whether clients may have different nets; their parameters are then communicated flat.
    takes_architectures: ClassVar[bool] = False
    #: Whether clients' nets may have running statistics.
    takes_statistics: ClassVar[bool] = True
    #: Whether these may be communicated: only if models are averaged, since other steps do not yield variances.
    shares_statistics: ClassVar[bool] = False
    #: Whether clients must have graphs.
    needs_graphs: ClassVar[bool] = False
    #: Whether each client must have exactly one graph, whose nodes are the examples.
    needs_nodes: ClassVar[bool] = False
    #: Whether each example must be of one class.
    needs_classes: ClassVar[bool] = False
    #: Whether features and outputs must mean the same for all clients, since one model has all of its layers.
    needs_common_layers: ClassVar[bool] = False
    #: Whether edges must go both ways.
    needs_undirected: ClassVar[bool] = False
    #: Whether it adds edges to the clients' graphs, whose weights and attributes are unknown.
    adds_edges: ClassVar[bool] = False
    #: Whether clients' own computations in training, outside their nets, need the whole graphs.
    needs_whole_graphs: ClassVar[bool] = False
    #: Whether its own computations with edges, outside the clients' nets, take edge weights into account.
    takes_edge_weight: ClassVar[bool] = True
    #: Whether a model's output uses state of its client's own examples, so that it cannot predict other examples.
    needs_own_examples: ClassVar[bool] = False
    #: Whether clients start from the weights of the net that is given.
    starts_from_net: ClassVar[bool] = True
    #: Whether the server can receive a client after the training.
    takes_unseen_clients: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Check the settings; those that are one of several values are checked here for all strategies."""
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

    def require_net(self, federation: Federation, parameters: str, having: str) -> None:
        """Refuse a net that lacks a part of the strategy's default net.

        Args:
            federation: The federation whose clients have the net.
            parameters: Shell-style pattern of the parameters of the part.
            having: The part, in words.

        Raises:
            ValueError: The net has none of the parameters.
        """
        if not fnmatch.filter(federation.parameters, parameters):
            assert self.default_net is not None
            raise ValueError(
                f"{type(self).__name__} needs a net with {having}: set model.net to "
                f"fl_lightning.models.{self.default_net.__name__}"
            )

    def default_client(self) -> ClientModule:
        """The default client of a run."""
        return self.client_class()

    def net_for(self, registry: ClientRegistry, client: ClientModule) -> NetFactory:
        """The default net of the clients: what the strategy needs, or what fits the task."""
        return registry.task.default_net(registry.num_features, self.default_net)

    def optimizer_for(self, registry: ClientRegistry) -> OptimizerFactory:
        """The default optimizer of the clients, which may depend on their data."""
        cls = type(self)
        if registry.task.has_graphs or cls.examples_optimizer is None:
            return cls.default_optimizer
        return cls.examples_optimizer

    def complete(self, client: ClientModule, registry: ClientRegistry) -> None:
        """Give a client the default net and optimizer if it has none."""
        client.take_defaults(net=self.net_for(registry, client), optimizer=self.optimizer_for(registry))

    def select(self, names: Sequence[str], patterns: Sequence[str]) -> tuple[str, ...]:
        """Names of parameters that match any of the patterns; ``head.*`` is the last layer, whatever its name.

        A pattern may match what is each client's own (``Federation.own_names``), of which nothing is returned.

        Raises:
            ValueError: A pattern matches nothing.
        """
        own = [name for name in self.federation.own_names if name not in names]
        chosen = select_names([*names, *own], patterns, self.federation.head_names)
        return tuple(name for name in chosen if name not in own)

    def check_client(self, client: ClientModule) -> None:
        """Refuse a client of the wrong class.

        Raises:
            ValueError: Its class does not derive from ``client_class``.
        """
        if not isinstance(client, self.client_class):
            raise ValueError(
                f"{type(self).__name__} needs clients of the class {self.client_class.__name__}, but model is "
                f"{type(client).__name__}: leave model out, or set model to {self.client_class.__name__}"
            )

    def check_task(self, task: Task) -> None:
        """Refuse a task that the strategy does not support: it may need graphs, nodes as examples, or classes.

        Raises:
            ValueError: The task is not supported.
        """
        if self.needs_graphs and not task.has_graphs:
            what = "is for clients with graphs, but these have independent examples: choose a source of graphs"
        elif self.needs_nodes and not task.is_on_nodes:
            what = (
                "is for clients with graphs whose nodes are the examples, but here the examples are "
                f"{task.examples}: choose a source of one graph for each client"
            )
        elif self.needs_classes and not task.target.has_classes:
            what = f"is for classes, but the targets are {task.target.name}: choose a source of classes"
        else:
            return
        raise ValueError(f"{type(self).__name__} {what}, or another strategy")

    def setup(self, federation: Federation) -> None:
        """Create the server's state. It is called once, before anything is trained or loaded."""
        self.federation = federation

    @property
    def needs_cross_edges(self) -> bool:
        """Whether clients must know of the edges between their nodes and those of other clients."""
        return False

    @property
    def min_updates(self) -> int:
        """How many updates a round needs by the strategy's own rules; a round with fewer fails."""
        return 1

    def check_round(self, num_clients: int) -> None:
        """Refuse rounds with too few clients.

        Raises:
            ValueError: A round has fewer clients than ``min_updates``.
        """
        if num_clients < self.min_updates:
            raise ValueError(
                f"{type(self).__name__} needs {self.min_updates} updates in every round, but a round has "
                f"{num_clients} clients: raise participation.fraction or num_clients"
            )

    def check_net(self, net: nn.Module) -> None:
        """Refuse a net that the strategy cannot run with.

        Raises:
            ValueError: It is a plain PyG module, but the strategy needs a net of its own.
        """
        if self.own_net and (plain := plain_parts(net)):
            raise ValueError(
                f"{type(self).__name__} is tied by its paper to a net of its own, so it does not run with "
                f"{plain[0].plain_name}: leave model.net out, or set it to "
                f"fl_lightning.models.{(self.default_net or GCN).__name__}"
            )

    def build_net(self, net: nn.Module) -> nn.Module:
        """The net that clients have: the user's net, or one that adds models or parameters to it."""
        return net

    def client_state(self) -> Mapping[str, StateSpec]:
        """What each client keeps between stages in addition to its parameters, by name."""
        return {}

    def persistence(self) -> Persistence:
        """What else lives on between rounds: by default all parameters, and the optimizer's state unless it is reset.

        A strategy that sends clients everything that they train, and evaluates what it sends, should keep less. What
        is not kept is lost at the end of a round, in checkpoints as well as in the run itself.
        """
        return Persistence(optimizer=not self.reset_optimizer)

    def penalty(self) -> Penalty | None:
        """The term added to the local objective."""
        return None

    def training(self, round_idx: int) -> Stage:
        """The stage in which the clients train; override it to add what else they compute."""
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
        """How the server weights the clients, if it needs only the weighted sum of their updates; else None.

        A subclass that overrides ``aggregate``, ``onboard`` or ``mixing_matrix`` has to override this as well.
        """
        return None

    def settings_against_sums(self) -> list[str]:
        """Names of the settings whose current values make a weighted sum of all updates insufficient."""
        return []

    def model_for(self, clients: Sequence[int]) -> Payload | None:
        """The parameters that replace the clients' own in the main evaluation; None for their own."""
        return None

    def evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """Which models are evaluated, by a prefix of their metrics; the one with the empty prefix is the result."""
        return {"": Evaluation(payload=self.model_for(clients))}

    def later_evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """Evaluations that only a later state of the server has; sites refuse any but these and the current ones.

        The payloads are examples of names and shapes.
        """
        return {}

    def onboarding_stages(self) -> Sequence[Stage]:
        """Stages of the onboarding of unseen clients; the server is not trained in them."""
        return [*self.initial_stages(), *self.stages(0)]

    def onboard(self, stage: Stage, upload: Payload) -> None:
        """Process the updates of unseen clients without training the server."""
        return

    def metrics(self) -> Mapping[str, float]:
        """Metrics of the server in the last round, for the logs."""
        return {}

    def matrices(self) -> Mapping[str, Tensor]:
        """Square matrices over the training clients, by name: similarities, mixing weights, adjacency.

        They are for callbacks; a row without a value yet is nan.
        """
        return {}

    def _state_device(self) -> torch.device:
        return self.federation.device


class RecordsMetrics(Strategy):
    """A strategy that records its metrics in ``recorded_metrics`` as they arise, for logs and checkpoints."""

    server_state: ClassVar[tuple[str, ...]] = ("recorded_metrics",)

    def setup(self, federation: Federation) -> None:
        """Begin without metrics."""
        super().setup(federation)
        self.recorded_metrics: dict[str, float] = {}

    def metrics(self) -> Mapping[str, float]:
        """The metrics that were recorded last."""
        return self.recorded_metrics


def select_names(names: Sequence[str], patterns: Sequence[str], head: Sequence[str] = ()) -> tuple[str, ...]:
    """Names that match any of the shell-style patterns.

    Args:
        names: All names.
        patterns: The patterns. If no name matches ``head.*``, it stands for the names in ``head``.
        head: Names of the last layer's parameters, which may have other names (``Federation.head_names``).

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
    """The floating point type of a server: float32, or float64 if the clients use it."""
    return torch.promote_types(clients_dtype, torch.float32)
