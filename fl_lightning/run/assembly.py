"""A run: everything that belongs to one fit, test or prediction, and its assembly."""

import functools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers.logger import Logger
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from fl_lightning.batches.lazy_clients import num_examples_of
from fl_lightning.data import FederatedDataModule
from fl_lightning.executors import ByArchitecture, Executor
from fl_lightning.executors.optimizer_state import check_optimizer
from fl_lightning.federation import ClientRegistry, Federation, in_turn
from fl_lightning.kernels.randomness import derive_key
from fl_lightning.models.plain import name_of, parameters_as_stored
from fl_lightning.round.client import ClientModule
from fl_lightning.round.lr_schedule import LRSchedule
from fl_lightning.round.participation import Participation
from fl_lightning.round.payload import Payload
from fl_lightning.round.selection import Selection
from fl_lightning.run.allocator import release_freed_memory
from fl_lightning.run.checks import (
    check_architectures,
    check_cross_edges,
    check_directions,
    check_edge_attributes,
    check_inductive,
    check_own,
    check_sampler,
    check_start,
    check_statistics,
    check_union,
    say_unused_edge_data,
)
from fl_lightning.run.interruption import Interruption
from fl_lightning.run.own_layers import keep_own_layers
from fl_lightning.run.pooling import on_pool
from fl_lightning.run.privacy import check_privacy
from fl_lightning.run.processes import shard
from fl_lightning.run.profiling import RoundClock, RoundTrace
from fl_lightning.strategies import Pooled, Strategy


@dataclass(kw_only=True)
class Run:
    """The state of one fit, test or prediction, which ends with it.

    Attributes:
        fabric: Device, precision and processes.
        datamodule: The clients' data.
        registry: The client registry.
        training_clients: Indices of the clients that take part in the rounds, ascending.
        evaluated_clients: Indices of the training clients that are evaluated.
        unseen_clients: Indices of the clients that are held out, to be onboarded at the end.
        model: The client module with the first architecture's net built.
        architectures: Initial parameters of a client of each architecture, by name, on the device.
        strategy: The algorithm.
        executor: Runs this process's clients.
        selection: Selects the best round.
        best_server: The strategy's state after the best round, for onboarding; None if no client is held out.
        seed: Root of every random draw of the training.
        settings: The known settings on which results depend, for comparison when the run is resumed.
        folder: The run's folder; created when everything else has been checked.
        checkpoints: Files to which this run was written or from which it was resumed, wherever they are.
        config: The whole configuration as YAML; empty for a run from Python.
        config_file: Name of the configuration file in the folder.
        config_sources: The configuration files that were given on the command line.
        written: The settings in the configuration file, for loggers.
        changes: Settings that were changed when the run was resumed.
        round_idx: Number of finished rounds, and so the index of the current one.
        scored_round: The round whose random draws the last evaluation used for training (fine-tuning).
        history: The metrics of each finished round, with its index under ``round``.
        scores: Each client's last scores, by the prefix of the evaluation.
        failures: Why clients failed in the current round, by name.
        dropouts: Names of the clients that were drawn for the current round and dropped out.
        num_failures: How often each client has failed, by name; random dropouts are not failures.
        num_overflows: How many failures of the current round are clients whose numbers overflowed.
        reported: Errors in a user's code and overflows that have been reported, by kind and line.
        unusual: Clients that sent an update far longer than the others'; the first was reported by name.
        should_stop: Whether the current round is the last.
        interruption: The signal that ends the run.
        interrupted: Whether a signal, of any process, has ended the rounds.
        loggers: The loggers of the metrics.
        clock: Measures the parts of the rounds.
        trace: Records some rounds, if requested.
        references: Metrics of the best round of each reference (``trainer.references``), by the strategy's name, and
            those of the task's predictions without learning.
    """

    fabric: Fabric
    datamodule: FederatedDataModule
    registry: ClientRegistry
    training_clients: tuple[int, ...]
    evaluated_clients: tuple[int, ...]
    unseen_clients: tuple[int, ...]
    model: ClientModule
    architectures: tuple[dict[str, Tensor], ...]
    strategy: Strategy
    executor: Executor
    selection: Selection
    seed: int
    settings: Mapping[str, Any]
    folder: Path = Path()
    checkpoints: set[Path] = field(default_factory=set)
    config: str = ""
    config_file: str = ""
    config_sources: tuple[str, ...] = ()
    written: dict[str, Any] = field(default_factory=dict)
    best_server: dict[str, Any] | None = None
    changes: list[str] = field(default_factory=list)
    round_idx: int = 0
    scored_round: int = 0
    history: list[dict[str, float]] = field(default_factory=list)
    scores: dict[str, Payload] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    dropouts: tuple[str, ...] = ()
    num_failures: dict[str, int] = field(default_factory=dict)
    num_overflows: int = 0
    reported: set[tuple[str, ...]] = field(default_factory=set)
    unusual: set[int] = field(default_factory=set)
    should_stop: bool = False
    interruption: Interruption = field(default_factory=Interruption)
    interrupted: bool = False
    loggers: list[Logger] = field(default_factory=list)
    clock: RoundClock = field(default_factory=RoundClock)
    trace: RoundTrace | None = None
    references: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    @property
    def last_round(self) -> int:
        """The round after which a checkpoint was written, or the last one of a fit."""
        return max(self.round_idx - 1, 0)


def assemble(
    *,
    fabric: Fabric,
    datamodule: FederatedDataModule,
    model: ClientModule,
    strategy: Strategy,
    executor: Executor,
    participation: Participation,
    evaluate_union: bool,
    selection: Selection,
    seed: int,
    settings: Mapping[str, Any],
    config: str = "",
    config_sources: Sequence[str] = (),
    loggers: Sequence[Logger] = (),
) -> Run:
    """Set up a run: data, nets and server. Its clients follow, by :func:`start_clients`, and then its folder.

    Raises:
        ValueError: The settings do not fit the data or each other.
    """
    check_union(strategy, evaluate_union)
    registry = prepare_data(fabric, datamodule)
    strategy.check_task(registry.task)
    check_directions(strategy, registry)
    check_cross_edges(strategy, registry)
    check_own(strategy, registry)
    if registry.task.is_on_nodes:
        check_inductive(strategy, [client for client in getattr(datamodule, "clients", ()) if client is not None])
    strategy.check_client(model)
    training_clients = participation.training_clients(len(registry), seed)
    prepare_participation(participation, datamodule, registry, training_clients, strategy)
    strategy.check_round(participation.num_chosen(len(training_clients)))
    architectures = build_nets(fabric, model, strategy, registry, seed)
    check_architectures(strategy, len(architectures))
    check_start(strategy, model)
    check_statistics(strategy, model)
    check_edge_attributes(model, registry)
    if fabric.is_global_zero:
        say_unused_edge_data(strategy, model, registry)
    strategy.setup(describe_federation(fabric, model, registry, training_clients, architectures, seed))
    strategy.check_server_state()
    drawing = getattr(datamodule, "drawing", None)
    check_sampler(strategy, model, registry, None if drawing is None else drawing.sampler)
    check_privacy(strategy, model, registry, training_clients)
    trained = set(training_clients)
    return Run(
        fabric=fabric,
        datamodule=datamodule,
        registry=registry,
        training_clients=training_clients,
        evaluated_clients=participation.evaluated(training_clients, seed),
        unseen_clients=tuple(client for client in range(len(registry)) if client not in trained),
        model=model,
        architectures=architectures,
        strategy=strategy,
        executor=executor_for(model, executor),
        selection=selection,
        seed=seed,
        settings=settings,
        config=config,
        config_sources=tuple(config_sources),
        loggers=list(loggers),
    )


def start_clients(run: Run, clients: Sequence[Any], *, dtype: torch.dtype, participation: Participation) -> None:
    """Give this process its share of the clients.

    Args:
        run: The run.
        clients: The data of each client of the federation.
        dtype: Floating point type of batches.
        participation: How many clients a round has, and how long a client may take.

    Raises:
        ValueError: There are too few clients, nets that cannot be run, a metric that does not fit, or a time limit that
            cannot be enforced.
    """
    time_limit = participation.time_limit_seconds
    num_asked = participation.num_chosen(len(run.training_clients))
    shares = shard(run.registry.cost, run.fabric.world_size)
    collator = run.datamodule.collator(clients, device=run.fabric.device, dtype=dtype)
    mine, together = shares[run.fabric.global_rank], num_asked // run.fabric.world_size
    if mine:
        first = functools.partial(collator, mine[:1])
        run.executor = run.executor.tried(run.model, first, run.fabric, time_limit)
    if isinstance(run.strategy, Pooled):
        run.executor = on_pool(
            run.executor,
            run.strategy,
            run.datamodule,
            clients,
            run.training_clients,
            device=run.fabric.device,
            dtype=dtype,
            says=run.fabric.is_global_zero,
        )
    run.executor.setup(
        run.fabric,
        run.model,
        collator,
        mine,
        seed=run.seed,
        client_state=run.strategy.client_state(),
        persistence=run.strategy.persistence(),
        num_together=len(mine) if num_asked == len(run.training_clients) else together,
        time_limit=time_limit,
    )
    check_monitor(run)


# ---------------------------------------------------------------- the steps


def prepare_data(fabric: Fabric, datamodule: FederatedDataModule) -> ClientRegistry:
    """Make or read the clients' data, on the first process of a machine before the others."""
    with fabric.rank_zero_first():
        datamodule.prepare_data()
    datamodule.setup()
    release_freed_memory()
    return datamodule.registry


def prepare_participation(
    participation: Participation,
    datamodule: FederatedDataModule,
    registry: ClientRegistry,
    training_clients: tuple[int, ...],
    strategy: Strategy,
) -> None:
    """Have the draws of rounds know the clients.

    Raises:
        ValueError: ``participation.availability`` or ``sampling_weights`` does not fit them.
    """
    clients = getattr(datamodule, "clients", None)
    by_examples = participation.sampling_weights == "examples"
    if by_examples and (clients is None or clients[training_clients[0]] is None):
        raise ValueError(
            "participation.sampling_weights is 'examples', but the numbers of examples are the sites' own: give numbers"
        )
    if by_examples and getattr(strategy, "weighting", None) == "examples":
        warnings.warn(
            "participation.sampling_weights is 'examples', and strategy.weighting counts the examples once more: set "
            "strategy.weighting to equal for an unbiased mean",
            stacklevel=2,
        )
    participation.prepare(registry.names, training_clients, lambda client: num_examples_of(clients or (), client))


def build_nets(
    fabric: Fabric, model: ClientModule, strategy: Strategy, registry: ClientRegistry, seed: int
) -> tuple[dict[str, Tensor], ...]:
    """Build the net of every architecture as the strategy needs it, and copy its initial parameters."""
    model.take_task(registry.task)
    strategy.complete(model, registry)

    def adapt(net: nn.Module) -> nn.Module:
        registry.task.check_net(net)
        strategy.check_net(net)
        return strategy.build_net(net)

    with fabric.init_module(), torch.device("cpu"), torch.random.fork_rng([]):  # the same weights on every device
        torch.manual_seed(derive_key(seed, "client", "initialisation"))  # codespell:ignore initialisation
        model.build(registry.num_features, registry.num_outputs, adapt)
        keep_own_layers(model, registry, says=fabric.is_global_zero)
    stored = [(model.communicated(net), parameters_as_stored(net)) for net in model.nets]
    return tuple({name: every[name].to(fabric.device) for name in names} for names, every in stored)


def describe_federation(
    fabric: Fabric,
    model: ClientModule,
    registry: ClientRegistry,
    training_clients: tuple[int, ...],
    architectures: tuple[dict[str, Tensor], ...],
    seed: int,
) -> Federation:
    """The federation as the server knows it."""
    optimizer = check_optimizer(model.configure_optimizers())
    return Federation(
        num_clients=len(registry),
        training_clients=training_clients,
        num_features=registry.num_features,
        num_outputs=registry.num_outputs,
        parameters=architectures[0],
        architectures=architectures,
        architecture_of=in_turn(len(registry), len(architectures)),
        learning_rate=float(optimizer.param_groups[0]["lr"]),
        lr_schedule=LRSchedule(model.lr_scheduler, model.configure_optimizers),
        plain_sgd=is_plain_sgd(model, optimizer),
        seed=seed,
        device=fabric.device,
        client_names=registry.names,
        groups=registry.groups,
        client=model,
        relation_CC=None if registry.relation_CC is None else registry.relation_CC.to(fabric.device),
    )


def is_plain_sgd(model: ClientModule, optimizer: Optimizer) -> bool:
    """Whether a client's step is its gradient (including the optimizer's weight decay) times one learning rate."""
    changed = [getattr(type(model), name) is not getattr(ClientModule, name) for name in ("clip", "constrain")]
    clipped = model.gradient_clip_val is not None or any(changed)
    if type(optimizer) is not SGD or clipped or len({group["lr"] for group in optimizer.param_groups}) > 1:
        return False
    return not any(group["momentum"] or group["maximize"] for group in optimizer.param_groups)


def executor_for(model: ClientModule, executor: Executor) -> Executor:
    """The executor, or the one that the client's own hooks need; one per architecture if there are several."""
    executor, architectures = executor.suited(model), model.nets
    several = len(architectures) > 1 and not executor.takes_architectures
    return ByArchitecture(executor) if several else executor


def check_monitor(run: Run) -> None:
    """Score one client before training: the monitored metric must exist, and must be a validation metric."""
    monitor = run.selection.monitor
    result = run.executor.probe()
    for client, why in result.failures.items():
        raise ValueError(
            f"{type(run.model).__name__} with {name_of(run.model.nets[0])} cannot compute on the data of "
            f"{run.registry.names[client]} ({why}): give a model and a model.net that fit the data"
        )
    scores = result.upload
    run.selection.take(scores.extras)
    metric = run.selection.metric
    if not metric.endswith(tuple(scores.extras)):
        raise ValueError(f"trainer.monitor is {monitor!r}, but the model is scored by {_listed(scores.extras)}")
    validation = [name for name in scores.extras if name.startswith("val/")]
    if not metric.endswith(tuple(validation)):
        raise ValueError(
            f"trainer.monitor is {monitor!r}, which is not a validation metric, and the best round must not be chosen "
            f"on training or test examples. Set it to {_listed(validation)}, or leave it out"
        )
    run.selection.check()
    if not run.datamodule.has_validation and run.fabric.is_global_zero:
        warnings.warn(
            "no client has validation examples, so no best round can be chosen: the last one is reported (to choose "
            "one, set data.splitter.val)",
            stacklevel=2,
        )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
