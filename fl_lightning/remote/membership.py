"""A site's membership in one federation: a client with its net, its data in batches and an executor of its own."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor

from fl_lightning.batches.base import Collator
from fl_lightning.batches.client_data import ClientData
from fl_lightning.direction import group_of
from fl_lightning.executors import SequentialExecutor, StageRequest, StageResult
from fl_lightning.federation import ClientRegistry
from fl_lightning.remote.digests import settings_of
from fl_lightning.remote.guard import Guard
from fl_lightning.remote.message import Message, packed
from fl_lightning.remote.policy import Refused
from fl_lightning.remote.questions import check_tensors
from fl_lightning.remote.secure import check_share, weighting_of
from fl_lightning.round.client import ClientModule
from fl_lightning.round.payload import FLAT, Payload, to_wire
from fl_lightning.round.privacy import SecretNumbers
from fl_lightning.round.stage import Evaluation, Stage
from fl_lightning.run import settings
from fl_lightning.run.assembly import build_nets, describe_federation, executor_for
from fl_lightning.run.checks import (
    check_architectures,
    check_cross_edges,
    check_directions,
    check_inductive,
    check_own,
    check_sampler,
)
from fl_lightning.run.privacy import check_privacy
from fl_lightning.strategies import Strategy
from fl_lightning.tasks import Drawing, task_of

_log = logging.getLogger(__name__)


class Membership:
    """A client of a federation, set up from the server's message and the site's own settings.

    Args:
        start: The server's ``start`` message.
        client_data: What the client holds.
        model: The client module, with the settings of the run and the task of the site's data.
        strategy: The strategy, with the settings of the run.
        guard: Checks what the server asks for.
        drawing: How training examples are drawn.
        accelerator: Where the client trains, as in Lightning.

    Attributes:
        index: The client's index in the federation.
        secure: Whether the server learns only sums.
        weighting: How responses are weighted in these sums; None without them.
        architectures: Initial parameters of a client of each architecture.
        known: Initial parameters of this client.
        num_flat: Number of parameters of the largest architecture.
        collator: Batches of the client.
        executor: Runs the client.
        few: Names of the metrics that are means over parts, such as classes, one of which has too few examples.
        metric_names: Names of the client's metrics, or why it cannot be evaluated.
        counted: Those of them that have a value, from enough examples.
        work: The request that led to the current state, under secure aggregation; empty otherwise.

    Raises:
        Refused: The server's settings differ from the site's, or its data, net or stages are not allowed.
    """

    def __init__(
        self,
        start: Message,
        client_data: ClientData,
        model: ClientModule,
        strategy: Strategy,
        guard: Guard,
        *,
        drawing: Drawing,
        accelerator: str,
    ) -> None:
        about = start.about
        if about["strategy"] != type(strategy).__name__:
            raise Refused(f"the server runs {about['strategy']}, this site {type(strategy).__name__}")
        if other := settings.differences(about["settings"], settings_of(strategy, model)):
            raise Refused(
                f"the server's settings differ from this site's; {'; '.join(other)} (then: server, now: site)"
            )
        guard.admit_widths(about["num_features"], about["num_outputs"], about["own"])
        self.drawing, self.model = drawing, model
        self.index, self.secure = int(about["index"]), bool(about["secure"])
        fabric = Fabric(accelerator=accelerator, devices=1, precision=about["precision"])
        registry = _registry(start, client_data)
        strategy.check_task(registry.task)
        if lacking := registry.task.lacks(client_data):
            raise Refused(lacking)
        check_directions(strategy, registry)
        check_cross_edges(strategy, registry)
        check_own(strategy, registry)
        strategy.check_client(model)
        strategy.complete(model, registry)  # with the strategy's own net if the job names none
        guard.admit_nets(model, registry.num_features, registry.num_outputs)
        if registry.own:
            client_data = client_data.widened(registry.num_features, registry.num_outputs)
        self.client_data = client_data
        self.architectures = build_nets(fabric, model, strategy, registry, about["seed"])
        check_architectures(strategy, len(self.architectures))
        training_clients = tuple(about["training_clients"])
        federation = describe_federation(fabric, model, registry, training_clients, self.architectures, about["seed"])
        strategy.setup(federation)
        try:  # of the settings alone
            check_inductive(strategy, [client_data])
            check_sampler(strategy, model, registry, drawing.sampler)
            check_privacy(strategy, model, registry, training_clients)
            if self.secure:
                check_share(float(about["secure_share"]))
        except ValueError as error:
            raise Refused(str(error)) from error
        self.weighting = weighting_of(strategy) if self.secure else None
        self.collator = self._collator(registry, fabric.device, getattr(torch, about["dtype"]))
        self.executor = executor_for(model, SequentialExecutor())
        self.executor.numbers = SecretNumbers()  # the server knows the run's seed
        self.executor.setup(
            fabric,
            model,
            self.collator,
            (self.index,),
            seed=about["seed"],
            client_state=strategy.client_state(),
            persistence=strategy.persistence(),
            time_limit=guard.policy.max_seconds,
        )
        self.known = dict(self.architectures[federation.architecture_of[self.index]])
        self.num_flat = max(sum(p.numel() for p in net.values()) for net in self.architectures)
        self.few: frozenset[str] = frozenset()
        self.metric_names: list[str] | str = []
        self.counted: frozenset[str] = frozenset()
        self.work = ""

    def _collator(self, registry: ClientRegistry, device: torch.device, dtype: torch.dtype) -> Collator:
        """Batches of the single client, at its index in the federation."""
        members = [self.client_data] * (self.index + 1)
        return registry.task.collator(members, layout=registry.layout, drawing=self.drawing, device=device, dtype=dtype)

    def find_metrics(self, guard: Guard) -> None:
        """Evaluate the client once to find the names of its metrics, and which are of enough examples to leave."""
        data, target, min_examples = self.client_data, self.model.task.target, guard.policy.min_examples
        masks = {"train": data.train_mask_N, "val": data.val_mask_N, "test": data.test_mask_N}
        self.few = frozenset(
            f"{split}/{metric}"
            for split, mask_N in masks.items()
            for metric, count in target.fewest(data.y_N[mask_N]).items()
            if count < min_examples
        )
        guard.hides_scores = self.model.monitor in self.few
        result = self.executor.probe()
        if self.index in result.failures:
            _log.warning("the client cannot be evaluated: %s", result.failures[self.index])
            self.metric_names = result.failures[self.index].partition(":")[0]
        else:
            self.metric_names = sorted(result.upload.extras)
            told = self._told(result.upload.extras, min_examples)
            self.counted = frozenset(name for name, pair_12 in told.items() if pair_12[0, 1] > 0)

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in a local epoch of the client."""
        return self.collator.steps_per_epoch(self.index)

    def check_tensors(self, message: Message, *, models: int | None = None) -> None:
        """Refuse tensors that belong to no parameter of the client.

        Args:
            message: The server's message.
            models: How many models it has; None if its tensors have no index before their names.
        """
        check_tensors(message.tensors, self.known, self.num_flat, models=models)

    def scores(
        self, evaluations: Sequence[tuple[str, Evaluation]], round_idx: int, min_examples: int
    ) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Evaluate the client's models.

        Returns:
            For each metric, by the index of its model and its name, the numerator and denominator that
            :mod:`fl_lightning.round.metrics` adds up, (1, 2); zeros for a split with fewer examples than
            ``min_examples``, for all classes (or ranges of degrees) of a split if one has fewer, since the others would
            give it away, and for a mean over classes, labels or numbers of which one has fewer. And the kinds of error
            of models that could not be evaluated.
        """
        output: dict[str, Tensor] = {}
        failures: dict[str, str] = {}
        for index, (kind, evaluation) in enumerate(evaluations):
            result = self.executor.evaluate({kind: evaluation}, [self.index], round_idx)[kind]
            if self.index in result.failures:
                _log.warning("evaluation %r failed: %s", kind, result.failures[self.index])
                failures[kind] = result.failures[self.index].partition(":")[0]
                continue
            told = self._told(result.upload.extras, min_examples)
            output |= {f"{index}/{name}": pair_12 for name, pair_12 in told.items()}
        return output, failures

    def _told(self, scores: Mapping[str, Tensor], min_examples: int) -> dict[str, Tensor]:
        """The scores (1, 2) by name, zeros where they are of too few examples."""
        pairs = {name: pair_12.cpu() for name, pair_12 in scores.items()}
        few = {(group_of(name) or (name,))[:2] for name, pair in pairs.items() if 0 < pair[0, 1] < min_examples}
        few |= {(name,) for name in self.few}
        return {n: torch.zeros(1, 2) if (group_of(n) or (n,))[:2] in few else pair for n, pair in pairs.items()}

    def blank(self, stage: Stage, work_fraction: float, received: Payload | None) -> Payload:
        """What the client would send if a stage changed nothing: what the server knows, and client outputs of zeros.

        Neither what the server sent nor what the client has become has an influence on its shapes.

        Args:
            stage: The stage.
            work_fraction: Share of the stage's steps.
            received: What the server sent.

        Raises:
            Refused: The client outputs cannot be computed with the initial model, so their shapes are not known.
        """
        executor = self.executor.of(self.index)
        assert isinstance(executor, SequentialExecutor), "a site has no other"
        known = {} if stage.as_update else self.known_to_server(stage, received)
        initial = self.initial_on_wire(stage)
        parameters = {n: known.get(n, initial[n] * 0).to(initial[n]) for n in ([FLAT] if stage.flat else stage.upload)}
        outputs: dict[str, Tensor] = {}
        if stage.client_outputs:
            sent = {} if received is None else received.named()
            zeros = Payload.from_named((self.index,), {name: torch.zeros_like(tensor) for name, tensor in sent.items()})
            outputs = self._blank_outputs(executor, stage, zeros)
        trained = (p.requires_grad and stage.trains(name) for name, p in executor.client.net.named_parameters())
        steps = executor.num_steps(stage, self.index, work_fraction) if any(trained) else 0
        return Payload(
            clients=(self.index,),
            parameters=parameters,
            extras={name: parameters.get(name, tensor) for name, tensor in outputs.items()},
            num_examples=torch.ones(1, dtype=torch.int64),
            num_steps=torch.tensor([steps]),
        )

    def _blank_outputs(self, executor: SequentialExecutor, stage: Stage, received: Payload) -> dict[str, Tensor]:
        for payload in (None, received):  # few outputs need what the server sends
            try:
                return executor.blank_outputs(stage, self.index, payload)
            except Exception as error:  # it runs the strategy's code
                _log.info("the client outputs of stage %r with the initial model: %r", stage.name, error)
        raise Refused(
            f"{', '.join(stage.client_outputs)} cannot be computed with the initial model, so this site, which adds "
            f"noise, could not respond if stage {stage.name!r} failed"
        )

    def known_to_server(self, stage: Stage, received: Payload | None) -> dict[str, Tensor]:
        """The parameters that the server sent for a stage, and else the common initial ones, (1, *shape)."""
        return self.initial_on_wire(stage) | ({} if received is None else dict(received.parameters))

    def initial_on_wire(self, stage: Stage) -> dict[str, Tensor]:
        """The common initial parameters as a stage communicates them, (1, *shape)."""
        initial = {name: tensor[None] for name, tensor in self.known.items()}
        return to_wire(initial, self.num_flat) if stage.flat else initial

    def run(self, request: StageRequest, state: Message, *, raises: bool) -> StageResult:
        """Run a stage.

        Args:
            request: The request.
            state: The client's state before it, to which it returns if the stage cannot run at all.
            raises: Whether the error is raised then, instead of being the client's failure.
        """
        try:
            return self.executor.run(request)
        except Exception as error:
            if raises:
                raise
            _log.exception("stage %s failed", request.stage.name)
            self.become(state)
            return StageResult(upload=Payload(clients=()), failures={self.index: type(error).__name__})

    def state(self) -> Message:
        """Everything that lives on in the client."""
        client_data = self.executor.rewritten_data().get(self.index, {})
        about: dict[str, Any] = {"after": self.work} if self.work else {}  # so that two sums never have equal states
        if self.index in self.executor.active:
            about["round"] = self.executor.round
        return Message(
            kind="state",
            about=about,
            tensors=packed(self.executor.state(), self.index)
            | {f"h/{name}": tensor for name, tensor in client_data.items()},
        )

    def become(self, state: Message) -> None:
        """Restore a state that :meth:`state` returned."""
        client_data = {name[2:]: tensor for name, tensor in state.tensors.items() if name.startswith("h/")}
        if client_data:
            self.executor.load_rewritten_data({self.index: client_data})
        elif self.executor.rewritten_data():
            self.executor.rewrite({self.index: self.client_data})
        tensors = {name: tensor for name, tensor in state.tensors.items() if not name.startswith("h/")}
        now = tuple(state.about["round"]) if "round" in state.about else None
        self.executor.load_state(Payload.from_named((self.index,), tensors), now)
        self.work = str(state.about.get("after", ""))


def _registry(start: Message, client_data: ClientData) -> ClientRegistry:
    """The federation as the server describes it; what edges carry is known from the site's own data."""
    about = start.about
    unknown, width = (0,) * len(about["names"]), about["num_features"]
    return ClientRegistry(
        names=tuple(about["names"]),
        sizes=unknown,
        cost=unknown,
        task=task_of(about["task"]),
        num_features=tuple(width) if isinstance(width, list) else width,
        num_outputs=about["num_outputs"],
        own_inputs="features" in about["own"],
        own_outputs=unknown if "outputs" in about["own"] else (),
        relation_CC=start.tensors.get("relation"),
        layout=about["layout"],
        **client_data.edge_facts,
    )
