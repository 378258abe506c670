"""A site: where one client's data are, and stay. It answers the server's messages and decides for itself what it tells.

| message | what the site does | what leaves it |
|---|---|---|
| ``enrol`` | | name, kind, numbers of features and outputs, density, what edges carry, a digest of class names |
| ``start`` | builds net, strategy and executor from its own settings, and compares them with the server's | a digest |
| ``run`` | a stage, from the named state | the stage's payload, after the site's filters; a digest |
| ``evaluate`` | scores models | a numerator and a denominator for each metric and split of at least ``min_examples`` |
| ``predict`` | writes ``predictions.csv`` into its folder | |
| ``load``, ``forget`` | goes back to a state, deletes states | |

Of a failure the kind of error leaves, not its text, which may hold data: that is in the site's log.
"""

import dataclasses
import hashlib
import hmac
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor

from fl_lightning.batches.base import Collator
from fl_lightning.batches.client_examples import ClientExamples
from fl_lightning.batches.client_graph import ClientGraph
from fl_lightning.batches.examples import ExampleCollator
from fl_lightning.batches.graphs import GraphCollator
from fl_lightning.executors import SequentialExecutor, Work
from fl_lightning.federation import OwnNames, Roster, edge_facts
from fl_lightning.remote.filters import CannotFilter
from fl_lightning.remote.guard import Guard, width_of
from fl_lightning.remote.message import Message, packed
from fl_lightning.remote.policy import Refused, SitePolicy
from fl_lightning.remote.questions import check_evaluation, check_question, check_start, check_tensors
from fl_lightning.remote.references import find
from fl_lightning.remote.secure import PairwiseMasks, check_stage, masked, weighting_of
from fl_lightning.remote.states import StateStore
from fl_lightning.round.client import ClientModule
from fl_lightning.round.payload import Payload, to_wire
from fl_lightning.round.stage import Evaluation, Stage, StageAddress
from fl_lightning.run import settings
from fl_lightning.run.assembly import (
    build_nets,
    check_architectures,
    check_directions,
    check_kind,
    describe_federation,
    executor_for,
)
from fl_lightning.run.folder import private_folder, whole_file
from fl_lightning.run.predictions import Predicted, write_predictions
from fl_lightning.strategies import Strategy

_log = logging.getLogger(__name__)


class Site:
    """The client's side of a remote federation.

    Args:
        holds: What the client holds.
        model: The client module, with the settings of the run.
        strategy: The strategy, with the settings of the run.
        folder: Where the site keeps states and keys; a site that is started again goes on from there.
        policy: What it refuses; the defaults of :class:`SitePolicy` if none is given.
        batch_size: Examples of a mini-batch, as of the data module.
        steps_per_epoch: Mini-batches of a local epoch, as of the data module.
        drop_last: Leave out a short last mini-batch, as of the data module.
        own: What the user calls nodes or examples, and classes; None for numbers from 0.
        accelerator: Where the client trains, as in Lightning.
        num_rounds: Rounds of the job, where it is known; for later ones the site does nothing.
    """

    def __init__(
        self,
        holds: ClientGraph | ClientExamples,
        model: ClientModule,
        strategy: Strategy,
        folder: Path,
        *,
        policy: SitePolicy | None = None,
        batch_size: int | None = None,
        steps_per_epoch: int | None = None,
        drop_last: bool = False,
        own: OwnNames | None = None,
        accelerator: str = "cpu",
        num_rounds: int | None = None,
    ) -> None:
        self.holds = holds
        self.model = model
        self.strategy = strategy
        self.folder = folder
        self.policy = policy or SitePolicy()
        self.guard = Guard(self.policy, holds, num_rounds=num_rounds)
        self.batch_size = batch_size
        self.steps_per_epoch = steps_per_epoch
        self.drop_last = drop_last
        self.own = own or OwnNames(number_N=torch.arange(holds.size))
        self.accelerator = accelerator
        private_folder(folder)
        try:
            self.states = StateStore(folder / "states")
            self.masks = PairwiseMasks(folder)
            for each in self.policy.filters:
                each.open(folder)
        except ValueError as error:
            raise Refused(str(error)) from error
        self.current = ""
        self.last: Message | None = None
        self.is_started = False
        self._go_on()

    def _go_on(self) -> None:
        """Be the client that the folder tells of, if it tells of one."""
        self.is_started = False
        if (kept := self._kept("start")) is not None:
            try:
                self._set_up(kept)
                self.last = self._kept("answer")
            except Refused as error:  # it was of a run with other settings
                _log.info("the last federation is not gone on with: %s", error)

    # ---------------------------------------------------------------- messages

    def answer(self, wire: bytes) -> bytes:
        """The answer to a message, both as bytes; what goes wrong here is an answer too."""
        try:
            self.guard.admit_message(wire)
            message = Message.read(wire)
        except ValueError as error:
            return Message(kind="failure", about={"to": "", "why": str(error)}).wire
        handlers = {
            "enrol": self._enrol,
            "start": self._start,
            "keys": self._keys,
            "run": self._run,
            "evaluate": self._evaluate,
            "predict": self._predict,
            "load": self._load,
            "forget": self._forget,
        }
        try:
            if message.kind in handlers and message.kind not in ("enrol", "start") and not self.is_started:
                raise Refused("this site was not told of a federation")
            check_question(message)
            return handlers[message.kind](message).wire
        except Refused as error:
            return self._failure(message, str(error)).wire
        except Exception as error:  # a client runs its user's code; the text of its errors may hold data
            _log.exception("%s failed", message.kind)
            return self._failure(message, type(error).__name__).wire

    def _failure(self, message: Message, why: str) -> Message:
        return Message(kind="failure", about={"to": message.name, "why": why, "state": self.current})

    def _said(self, message: Message, tensors: Mapping[str, Tensor] | None = None, **about: Any) -> Message:
        return Message(kind="answer", about={"to": message.name, "state": self.current, **about}, tensors=tensors or {})

    def _enrol(self, message: Message) -> Message:
        """Who the client is."""
        self.policy.check_strategy(message.about["strategy"])
        holds = self.holds
        x, width = holds.x_NF if isinstance(holds, ClientGraph) else holds.x_NX, width_of(holds)
        named = self.own.class_names
        outputs = (
            holds.y_N.shape[1] if holds.y_N.is_floating_point() else max(int(holds.y_N.max()) + 1, len(named or ()))
        )
        return self._said(
            message,
            name=holds.name,
            kind="graphs" if isinstance(holds, ClientGraph) else "examples",
            num_features=width,
            num_outputs=outputs,
            class_names="" if named is None else hashlib.sha256(json.dumps(named).encode()).hexdigest(),
            has_validation=bool(holds.val_mask_N.any()),
            edges=edge_facts(holds),
            density=round(int(torch.count_nonzero(x)) / max(1, x.numel()), 3),  # more digits would tell how many rows
            data=self.states.digest(_content(holds)),
        )

    def _start(self, message: Message) -> Message:
        """Become a client of a federation."""
        check_start(message, self.holds)
        try:
            self._set_up(message)
        except BaseException:
            self._go_on()  # nothing of it is kept
            raise
        self._keep("start", message)
        (self.folder / "answer").unlink(missing_ok=True)
        self.last = None
        return self._said(message, key=self.masks.public, parameters=digest_of(self.architectures))

    def _set_up(self, start: Message) -> None:
        about = start.about
        self.policy.check_strategy(about["strategy"])
        if self.policy.secure_only and not about["secure"]:
            raise Refused("this site answers under secure aggregation alone")
        own = settings_of(self.strategy, self.model)
        if about["strategy"] != type(self.strategy).__name__:
            raise Refused(f"the server runs {about['strategy']}, this site {type(self.strategy).__name__}")
        if other := settings.differences(about["settings"], own):
            raise Refused(f"the server's settings are not this site's; {'; '.join(other)} (then: server, now: site)")
        self.guard.admit_widths(about["num_features"], about["num_outputs"])
        self.index = int(about["index"])
        self.secure = bool(about["secure"])
        self.label = str(about["federation"])
        fabric = Fabric(accelerator=self.accelerator, devices=1, precision=about["precision"])
        width = about["num_features"]
        roster = Roster(
            names=tuple(about["names"]),
            sizes=(0,) * len(about["names"]),
            work=(0,) * len(about["names"]),
            kind=about["kind"],
            num_features=tuple(width) if isinstance(width, list) else width,
            num_outputs=about["num_outputs"],
            relation_CC=start.tensors.get("relation"),
            layout=about["layout"],
            **edge_facts(self.holds),
        )
        check_kind(self.strategy, roster)
        check_directions(self.strategy, roster)
        self.strategy.check_client(self.model)
        self.strategy.complete(self.model, roster)  # with the strategy's own net, where the job names none
        self.guard.admit_nets(self.model, roster.num_outputs)
        self.architectures = build_nets(fabric, self.model, self.strategy, roster, about["seed"])
        check_architectures(self.strategy, len(self.architectures))
        training_clients = tuple(about["training_clients"])
        federation = describe_federation(
            fabric, self.model, roster, training_clients, self.architectures, about["seed"]
        )
        self.strategy.setup(federation)
        self.weighting = weighting_of(self.strategy) if self.secure else None
        self.collator = self._collator(roster, fabric.device, getattr(torch, about["dtype"]))
        self.executor = executor_for(self.model, SequentialExecutor())
        mine = (self.index,)
        self.executor.setup(
            fabric,
            self.model,
            self.collator,
            mine,
            seed=about["seed"],
            memory=self.strategy.memory(),
            time_limit=self.policy.max_seconds,
        )
        self.known = dict(self.architectures[federation.architecture_of[self.index]])
        self.num_flat = max(sum(p.numel() for p in net.values()) for net in self.architectures)
        self.guard.admit_parameters(self.num_flat)
        self.guard.check_stages(self.strategy, list(self.known))
        self.masks.meet({int(client): key for client, key in self._told("keys").get(self.label, {}).items()})
        self.is_started = True
        self.current = self.states.put(self._state())

    def _collator(self, roster: Roster, device: torch.device, dtype: torch.dtype) -> Collator:
        """Batches of the one client, at its index in the federation."""
        if isinstance(self.holds, ClientGraph):
            graphs = [self.holds] * (self.index + 1)
            return GraphCollator(graphs, layout=roster.layout, device=device, dtype=dtype)
        return ExampleCollator(
            [self.holds] * (self.index + 1),
            batch_size=self.batch_size,
            steps_per_epoch=self.steps_per_epoch,
            drop_last=self.drop_last,
            device=device,
            dtype=dtype,
        )

    def _keys(self, message: Message) -> Message:
        """Learn the others' public keys; in one federation they do not change."""
        keys = {int(client): key for client, key in message.about["keys"].items()}
        if keys.get(self.index) != self.masks.public:
            raise Refused("the server has another public key of this site than its own")
        known = self._told("keys").setdefault(self.label, message.about["keys"])
        if known != message.about["keys"]:
            raise Refused("the server has changed the other sites' public keys within one federation")
        self._tell("keys", {self.label: known})
        self.masks.meet(keys)
        return self._said(message)

    # ---------------------------------------------------------------- work

    def _run(self, message: Message) -> Message:
        """A stage; a message that is repeated is answered again, and nothing is trained twice."""
        if self.last is not None and self.last.about["to"] == message.name:
            self._become(self.last.about["state"])
            return self.last
        about = message.about
        if self.last is not None and self.last.about["from"] == about["state"] != self.last.about["state"]:
            self.states.drop(self.last.about["state"])  # the server never got to know it
            self.current = self.current if self.current == about["state"] else ""
        if self.holds.num_examples < self.policy.min_examples:
            raise Refused("this site has too few training examples to answer")
        check_tensors(message.tensors, self.known, self.num_flat)
        address = StageAddress(**about["address"])
        stage = self.strategy.stage(address)
        self._check(stage)
        steps_per_epoch = self.collator.steps_per_epoch(self.index)
        self.guard.admit_stage(stage, list(self.known), address.round_idx, about["effort"], steps_per_epoch)
        if self.secure:
            self._once(address, message)
        self._become(about["state"])
        payload = message.payload((self.index,))
        work = Work(stage=stage, address=address, effort={self.index: about["effort"]}, payload=payload)
        outcome = self.executor.run(work)
        self.current = self.states.put(self._state())
        if self.index in outcome.failures:
            _log.warning("stage %s failed: %s", stage.name, outcome.failures[self.index])
            answer = self._failure(message, outcome.failures[self.index].partition(":")[0])
        else:
            try:
                leaving = self._leaving(outcome.upload, stage, payload, f"{self.label}/{address}", about["clients"])
                answer = self._said(message, packed(leaving, self.index))
            except Refused as error:
                answer = self._failure(message, str(error))
        self.last = dataclasses.replace(answer, about={**answer.about, "from": about["state"]})
        self._keep("answer", self.last)
        return self.last

    def _check(self, stage: Stage) -> None:
        """Refuse what the site's filters cannot hide."""
        hides = any(each.hides_counts for each in self.policy.filters)
        if hides and stage.num_steps is None and self.batch_size is not None and self.steps_per_epoch is None:
            raise Refused("the number of steps would tell that of examples, which is hidden: set data.steps_per_epoch")

    def _once(self, address: StageAddress, message: Message) -> None:
        """Refuse to answer a stage to two messages: what two sums differ by would be told of one client."""
        check_stage(self.strategy.stage(address))
        asked = self._told("asked")
        if asked.setdefault(f"{self.label}/{address}", message.name) != message.name:
            raise Refused("this stage was asked for already, with other clients or from another model")
        self._tell("asked", asked)

    def _leaving(
        self, upload: Payload, stage: Stage, received: Payload | None, label: str, clients: Sequence[int]
    ) -> Payload:
        """What leaves the site: the stage's payload, filtered, and hidden in a sum."""
        known: dict[str, Tensor] = {}
        if not stage.as_update:
            initial = {name: tensor[None] for name, tensor in self.known.items()}
            known = to_wire(initial, self.num_flat) if stage.flat else initial
            known |= {} if received is None else received.parameters
        upload = self.guard.leaving(upload, stage)
        try:
            for each in self.policy.filters:
                upload = each(upload, known)
        except CannotFilter as error:
            raise Refused(str(error)) from error
        return masked(self.masks, upload, self.weighting, clients, label) if self.weighting else upload

    def _evaluate(self, message: Message) -> Message:
        """Numerator and denominator of each metric; zeros for a split of too few examples."""
        check_tensors(message.tensors, self.known, self.num_flat, models=len(message.about["evaluations"]))
        self._become(message.about["state"])
        self._forget(message)
        tensors: dict[str, Tensor] = {}
        failures: dict[str, str] = {}
        asked = {
            kind: self._evaluation(described, message.payload((self.index,), f"{place}/"))
            for place, (kind, described) in enumerate(message.about["evaluations"])
        }
        steps_per_epoch = self.collator.steps_per_epoch(self.index)
        round_idx = message.about["round_idx"]
        self.guard.admit_evaluations(list(asked.values()), round_idx, steps_per_epoch, asked_in=message.name)
        for place, (kind, evaluation) in enumerate(asked.items()):
            outcome = self.executor.evaluate({kind: evaluation}, [self.index], round_idx)[kind]
            if self.index in outcome.failures:
                _log.warning("evaluation %r failed: %s", kind, outcome.failures[self.index])
                failures[kind] = outcome.failures[self.index].partition(":")[0]
                continue
            for name, pair_12 in outcome.upload.signals.items():
                enough = bool(pair_12[0, 1] >= self.policy.min_examples)
                tensors[f"{place}/{name}"] = pair_12 if enough else torch.zeros_like(pair_12)
        return self._said(message, tensors, failures=failures)

    def _evaluation(self, described: dict[str, Any], payload: Payload | None) -> Evaluation:
        return dataclasses.replace(check_evaluation(find(described, self.strategy)), payload=payload)

    def _predict(self, message: Message) -> Message:
        """Write what the client's model predicts, here."""
        check_tensors(message.tensors, self.known, self.num_flat, models=1)
        self._become(message.about["state"])
        evaluation = self._evaluation(message.about["evaluation"], message.payload((self.index,), "0/"))
        self.guard.admit_tuning(evaluation, message.about["round_idx"], self.collator.steps_per_epoch(self.index))
        output_NK = self.executor.predict(evaluation, [self.index], message.about["round_idx"])[self.index]
        predicted = Predicted(holds=self.holds, own=self.own, output_NK=output_NK)
        write_predictions(self.folder / "predictions.csv", [predicted], secret=True)
        return self._said(message)

    # ---------------------------------------------------------------- states

    def _state(self) -> Message:
        """All that lives on in the client."""
        held = self.executor.holdings().get(self.index, {})
        return Message(
            kind="state",
            tensors=packed(self.executor.state(), self.index) | {f"h/{name}": tensor for name, tensor in held.items()},
        )

    def _become(self, digest: str) -> None:
        """Go to a state, if it is another than the present one."""
        if digest == self.current:
            return
        state = self.states.get(digest)
        if state is None:
            raise Refused(
                f"this site does not hold the state {digest[:12]}...: restore its folder, or resume from another "
                "checkpoint"
            )
        held = {name[2:]: tensor for name, tensor in state.tensors.items() if name.startswith("h/")}
        if held:
            self.executor.load_holdings({self.index: held})
        elif self.executor.holdings():
            self.executor.rewrite({self.index: self.holds})
        tensors = {name: tensor for name, tensor in state.tensors.items() if not name.startswith("h/")}
        self.executor.load_state(Payload.from_named((self.index,), tensors))
        self.current = digest

    def _load(self, message: Message) -> Message:
        """Go back to the state of a checkpoint."""
        self._become(message.about["state"])
        self.last = None
        return self._said(message)

    def _forget(self, message: Message) -> Message:
        """Delete states that the server needs no more."""
        for digest in message.about["forget"]:
            if digest != self.current:
                self.states.drop(digest)
        return self._said(message)

    def _kept(self, name: str) -> Message | None:
        """A message that was kept; one that is damaged is moved aside, and the site does without it."""
        path = self.folder / name
        content = self._unsealed(path)
        if content is not None or not path.exists():
            return None if content is None else Message.read(content)
        aside = path.with_name(f"{name}.damaged")
        _log.error("%s is damaged, and is now %s: the site waits for a server to begin", path, aside.name)
        path.replace(aside)
        return None

    def _keep(self, name: str, message: Message) -> None:
        self._seal(self.folder / name, message.wire)

    def _told(self, name: str) -> dict[str, Any]:
        """What the site has to remember.

        Raises:
            Refused: It is damaged, and cannot be done without.
        """
        path = self.folder / f"{name}.json"
        content = self._unsealed(path)
        if content is None and path.exists():
            raise Refused(
                f"{path.name} of this site is damaged: bring it back from a copy, or move the site's folder away to "
                "begin anew"
            )
        return {} if content is None else dict(json.loads(content))

    def _tell(self, name: str, content: Mapping[str, Any]) -> None:
        self._seal(self.folder / f"{name}.json", json.dumps(content).encode())

    def _seal(self, path: Path, content: bytes) -> None:
        """Write a file of the owner's alone, with a digest of its name and content behind it."""
        with whole_file(path, secret=True) as temporary:
            temporary.write_bytes(content + self.states.digest(path.name.encode() + content).encode())

    def _unsealed(self, path: Path) -> bytes | None:
        """The content of such a file; None where there is none, or it is damaged."""
        try:
            sealed = path.read_bytes()
        except OSError:
            return None
        content, digest = sealed[:-64], sealed[-64:]
        expected = self.states.digest(path.name.encode() + content).encode()
        return content if hmac.compare_digest(digest, expected) else None


def settings_of(strategy: Strategy, model: ClientModule) -> dict[str, Any]:
    """What server and sites must have alike, as JSON."""
    net = model.net_factories if model.has_own_net else None  # which the initial parameters tell of, too
    optimizer = model.optimizer_factory if model.has_own_optimizer else type(strategy).default_optimizer
    described = settings.of_objects(strategy=strategy, model=model, net=net, optimizer=optimizer)
    return dict(json.loads(json.dumps(described)))


def _content(holds: ClientGraph | ClientExamples) -> bytes:
    tensors = {name: value for name, value in vars(holds).items() if isinstance(value, Tensor)}
    return Message(kind="data", tensors=tensors).wire


def digest_of(architectures: Sequence[Mapping[str, Tensor]]) -> str:
    """The same for the same initial parameters of every architecture."""
    named = {f"{place}/{name}": p for place, net in enumerate(architectures) for name, p in net.items()}
    return Message(kind="parameters", tensors=named).name
