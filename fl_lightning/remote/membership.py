"""A site's membership in one federation: a client with its net, its data in batches and an executor of its own."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor

from fl_lightning.batches.base import Collator
from fl_lightning.batches.client_data import ClientData
from fl_lightning.direction import group_of
from fl_lightning.executors import SequentialExecutor
from fl_lightning.federation import ClientRegistry
from fl_lightning.remote.digests import settings_of
from fl_lightning.remote.guard import Guard
from fl_lightning.remote.message import Message, packed
from fl_lightning.remote.policy import Refused
from fl_lightning.remote.questions import check_tensors
from fl_lightning.remote.secure import check_share, weighting_of
from fl_lightning.round.client import ClientModule
from fl_lightning.round.payload import Payload
from fl_lightning.round.privacy import SecretNumbers
from fl_lightning.round.stage import Evaluation
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
        metric_names: Names of the client's metrics, or why it cannot be evaluated.
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
        self.drawing = drawing
        self.index, self.secure = int(about["index"]), bool(about["secure"])
        fabric = Fabric(accelerator=accelerator, devices=1, precision=about["precision"])
        registry = _registry(start, client_data)
        strategy.check_task(registry.task)
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
        self.metric_names: list[str] | str = []
        self.work = ""

    def _collator(self, registry: ClientRegistry, device: torch.device, dtype: torch.dtype) -> Collator:
        """Batches of the single client, at its index in the federation."""
        members = [self.client_data] * (self.index + 1)
        return registry.task.collator(members, layout=registry.layout, drawing=self.drawing, device=device, dtype=dtype)

    def find_metrics(self) -> None:
        """Evaluate the client once to find the names of its metrics."""
        result = self.executor.probe()
        if self.index in result.failures:
            _log.warning("the client cannot be evaluated: %s", result.failures[self.index])
            self.metric_names = result.failures[self.index].partition(":")[0]
        else:
            self.metric_names = sorted(result.upload.extras)

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
            ``min_examples``, and for all classes (or ranges of degrees) of a split if one has fewer, since the others
            would give it away. And the kinds of error of models that could not be evaluated.
        """
        output: dict[str, Tensor] = {}
        failures: dict[str, str] = {}
        for index, (kind, evaluation) in enumerate(evaluations):
            result = self.executor.evaluate({kind: evaluation}, [self.index], round_idx)[kind]
            if self.index in result.failures:
                _log.warning("evaluation %r failed: %s", kind, result.failures[self.index])
                failures[kind] = result.failures[self.index].partition(":")[0]
                continue
            pairs = {name: pair_12.cpu() for name, pair_12 in result.upload.extras.items()}
            few = {(group_of(name) or (name,))[:2] for name, pair in pairs.items() if 0 < pair[0, 1] < min_examples}
            for name, pair_12 in pairs.items():
                hidden = (group_of(name) or (name,))[:2] in few
                output[f"{index}/{name}"] = torch.zeros(1, 2) if hidden else pair_12
        return output, failures

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
