"""A site: where one client's data are, and stay. It answers the server's messages and decides for itself what it tells.

| message | what the site does | what leaves it |
|---|---|---|
| ``enrol`` | | name, task, numbers of features and outputs, density, what edges carry, a digest of class names |
| ``start`` | builds net, strategy and executor from its own settings, and compares them with the server's | a digest |
| ``run`` | a stage, from the named state | the stage's payload, after the site's filters; a digest |
| ``evaluate`` | scores models that its strategy evaluates | of each metric and split what the policy tells |
| ``sum_...`` | its part in a secure sum (``sum_member.py``) | keys, sealed shares, shares |
| ``predict`` | writes ``predictions.csv`` into its folder | |
| ``load``, ``forget`` | goes back to a state, deletes states | |

Of a failure the kind of error leaves, not its text, which may hold data: that is in the site's log.
"""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from torch import Tensor

from fl_lightning.batches.base import Collator
from fl_lightning.batches.client_data import ClientData
from fl_lightning.executors import SequentialExecutor, Work
from fl_lightning.executors.private import rate_of
from fl_lightning.federation import OwnNames, Roster
from fl_lightning.remote.accounting import BudgetSpent, PrivacyAccountant
from fl_lightning.remote.digests import content_of, digest_of, digest_of_facts, settings_of
from fl_lightning.remote.evaluations import allowed_evaluation
from fl_lightning.remote.filters import CannotFilter
from fl_lightning.remote.guard import Guard
from fl_lightning.remote.identity import Identity
from fl_lightning.remote.ledger import SumLedger
from fl_lightning.remote.message import Message, packed
from fl_lightning.remote.metrics import summands
from fl_lightning.remote.policy import Refused, SitePolicy
from fl_lightning.remote.questions import check_question, check_start, check_tensors
from fl_lightning.remote.sealed import SealedFiles
from fl_lightning.remote.secure import MASKED, check_share, check_stage, summand, weighting_of
from fl_lightning.remote.states import StateStore
from fl_lightning.remote.sum_member import SumMember
from fl_lightning.round.client import ClientModule
from fl_lightning.round.payload import Payload, to_wire
from fl_lightning.round.privacy import SecretNumbers
from fl_lightning.round.stage import Stage, StageAddress
from fl_lightning.run import settings
from fl_lightning.run.assembly import build_nets, describe_federation, executor_for
from fl_lightning.run.checks import check_architectures, check_directions
from fl_lightning.run.folder import private_folder
from fl_lightning.run.predictions import Predicted, write_predictions
from fl_lightning.run.privacy import check_privacy
from fl_lightning.strategies import Strategy
from fl_lightning.tasks import Drawing, task_of

_log = logging.getLogger(__name__)
#: Messages that are of a sum under secure aggregation, and there alone.
_SUMMED = ("sum_keys", "sum_shares", "sum_confirm", "sum_reveal", "run", "evaluate")


class Site:
    """The client's side of a remote federation.

    Args:
        holds: What the client holds.
        model: The client module, with the settings of the run and the task of the site's data.
        strategy: The strategy, with the settings of the run.
        folder: Where the site keeps its states of the run; a site that is started again goes on from there.
        account: Where it keeps, for all runs, what it has told: the account of its noise and the book of its sums.
            None for ``folder``.
        identity: Its certificate, by which secure sums are signed; None where there are none.
        policy: What it refuses; the defaults of :class:`SitePolicy` if none is given.
        drawing: How training examples are drawn, as of the data module; None for all at once.
        own: What the user calls nodes or examples, and classes; None for numbers from 0.
        accelerator: Where the client trains, as in Lightning.
        num_rounds: Rounds of the job, where it is known; for later ones the site does nothing.
    """

    def __init__(
        self,
        holds: ClientData,
        model: ClientModule,
        strategy: Strategy,
        folder: Path,
        *,
        policy: SitePolicy | None = None,
        drawing: Drawing | None = None,
        own: OwnNames | None = None,
        accelerator: str = "cpu",
        num_rounds: int | None = None,
        account: Path | None = None,
        identity: Identity | None = None,
    ) -> None:
        self.holds = holds
        self.model = model
        self.strategy = strategy
        self.folder = folder
        self.policy = (policy or SitePolicy()).for_training(model.privacy)
        self.drawing = drawing or Drawing()
        self.own = own or OwnNames(number_N=torch.arange(holds.size))
        self.accelerator = accelerator
        private_folder(folder)
        account = private_folder(account or folder)
        try:
            self.states = StateStore(folder / "states")
            self.files = SealedFiles(folder, self.states.digest)
            self.ledger = SumLedger(account)
            self.accountant = PrivacyAccountant(account, delta=self.policy.record_delta)
            self.sum = SumMember(self.files, self.ledger, identity, self.policy.min_sum_clients)
            for each in (*self.policy.filters, self.policy.metric_noise):
                if each is not None:
                    each.open(account)
        except ValueError as error:
            raise Refused(str(error)) from error
        self.guard = Guard(self.policy, holds, self.ledger, num_rounds=num_rounds)
        self.current = ""
        self.last: Message | None = None
        self.scored: Message | None = None
        self.work = ""
        self.is_started = False
        self._go_on()

    def _go_on(self) -> None:
        """Be the client that the folder tells of, if it tells of one."""
        self.is_started = False
        if (kept := self._kept("start")) is not None:
            try:
                self._set_up(kept)
                self.last, self.scored = self._kept("answer"), self._kept("scores")
                self.current = ""  # where the client was is in the server's next message
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
            "sum_keys": self._sum_keys,
            "sum_shares": self._sum_step,
            "sum_confirm": self._sum_step,
            "sum_reveal": self._sum_step,
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
            if self.is_started and self.secure != self._is_of_sums(message) and message.kind in _SUMMED:
                raise Refused(f"this run is {'under' if self.secure else 'without'} secure aggregation")
            return handlers[message.kind](message).wire
        except Refused as error:
            return self._failure(message, str(error)).wire
        except Exception as error:  # a client runs its user's code; the text of its errors may hold data
            _log.exception("%s failed", message.kind)
            return self._failure(message, type(error).__name__).wire

    @staticmethod
    def _is_of_sums(message: Message) -> bool:
        return message.kind.startswith("sum_") or "shares" in message.about

    def _failure(self, message: Message, why: str) -> Message:
        return Message(kind="failure", about={"to": message.name, "why": why, "state": self.current})

    def _said(self, message: Message, tensors: Mapping[str, Tensor] | None = None, **about: Any) -> Message:
        return Message(kind="answer", about={"to": message.name, "state": self.current, **about}, tensors=tensors or {})

    def _enrol(self, message: Message) -> Message:
        """Who the client is."""
        self.policy.check_strategy(message.about["strategy"])
        holds = self.holds
        x, named, task = holds.inputs, self.own.class_names, self.model.task
        return self._said(
            message,
            name=holds.name,
            task=task.plain,
            num_features=holds.num_features,
            num_outputs=task.target.num_outputs([holds.y_N], len(named or ())),
            class_names="" if named is None else hashlib.sha256(json.dumps(named).encode()).hexdigest(),
            has_validation=bool(holds.val_mask_N.any()),
            edges=dict(holds.edge_facts),
            density=round(int(torch.count_nonzero(x)) / max(1, x.numel()), 3),  # more digits would tell how many rows
            data=self.states.digest(content_of(holds)),
        )

    def _start(self, message: Message) -> Message:
        """Become a client of a federation."""
        check_start(message, self.holds, self.model.task)
        try:
            self._set_up(message)
        except BaseException:
            self._go_on()  # nothing of it is kept
            raise
        self._keep("start", message)
        for name in ("answer", "scores"):
            self.files.drop(name)
        self.last = self.scored = None
        tells = self.policy.tells_metrics(summed=self.secure)
        return self._said(message, parameters=digest_of(self.architectures), metrics=tells, scored=self.metric_names)

    def _names_of_metrics(self) -> list[str] | str:
        """Which metrics the client is scored by, or why it cannot be."""
        outcome = self.executor.probe()
        if self.index in outcome.failures:
            _log.warning("the client cannot be scored: %s", outcome.failures[self.index])
            return outcome.failures[self.index].partition(":")[0]
        return sorted(outcome.upload.signals)

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
            task=task_of(about["task"]),
            num_features=tuple(width) if isinstance(width, list) else width,
            num_outputs=about["num_outputs"],
            relation_CC=start.tensors.get("relation"),
            layout=about["layout"],
            **self.holds.edge_facts,
        )
        self.strategy.check_task(roster.task)
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
        try:
            check_privacy(self.strategy, self.model, roster, training_clients)
        except ValueError as error:  # of the settings alone
            raise Refused(str(error)) from error
        self.weighting = weighting_of(self.strategy) if self.secure else None
        if self.secure:
            try:
                check_share(float(about["secure_share"]))
            except ValueError as error:
                raise Refused(str(error)) from error
            self.sum.join(self.label, self.index, about["names"], float(about["secure_share"]))
        self.collator = self._collator(roster, fabric.device, getattr(torch, about["dtype"]))
        self.executor = executor_for(self.model, SequentialExecutor())
        self.executor.numbers = SecretNumbers()  # the server knows the run's seed
        mine = (self.index,)
        self.executor.setup(
            fabric,
            self.model,
            self.collator,
            mine,
            seed=about["seed"],
            memory=self.strategy.memory(),
            client_state=self.strategy.client_state(),
            time_limit=self.policy.max_seconds,
        )
        self.known = dict(self.architectures[federation.architecture_of[self.index]])
        self.num_flat = max(sum(p.numel() for p in net.values()) for net in self.architectures)
        self.guard.run = self.label
        self.guard.admit_parameters(self.num_flat)
        self.guard.check_stages(self.strategy, list(self.known))
        self.metric_names = self._names_of_metrics()
        self.work = ""
        self.is_started = True
        self.current = self.states.put(self._state())

    def _collator(self, roster: Roster, device: torch.device, dtype: torch.dtype) -> Collator:
        """Batches of the one client, at its index in the federation."""
        members = [self.holds] * (self.index + 1)
        layout = roster.layout
        return roster.task.collator(members, layout=layout, drawing=self.drawing, device=device, dtype=dtype)

    # ---------------------------------------------------------------- sums

    def _sum_keys(self, message: Message) -> Message:
        """Begin a sum. A state that was summed is gone on from, where the server did not get to know the next one."""
        about = message.about
        state = about["state"]
        last = self.last
        if (
            about["purpose"] == "run"
            and last is not None
            and last.kind == "answer"
            and last.about["from"] == state
            and self.states.get(last.about["state"]) is not None
            and list(about["place"]) != last.about["place"]
        ):
            state = last.about["state"]
        self._become(state)
        return self._said(message, **self.sum.open(message.name, about["purpose"], about["place"], self._entry(state)))

    def _sum_step(self, message: Message) -> Message:
        """Another step of the sum. Its answer is the same after a restart: it tells of no state."""
        return Message(kind="answer", about={"to": message.name, **self.sum.step(message.kind, message.about)})

    def _enter(self, message: Message, place: Sequence[Any], work: str | None) -> int:
        """Take part in the sum with what a message asks for; how many clients are summed at the least."""
        if self._entry(message.about["state"]) != self.sum.kept.get("state"):
            raise Refused("no sum was begun from this state")
        return self.sum.enter(place, {int(c): text for c, text in message.about["shares"].items()}, work)

    def _entry(self, digest: str) -> str:
        """A state's name in the site's book, which is the same in all runs."""
        state = self.states.get(digest)
        if state is None:
            raise Refused(_gone(digest))
        return self.ledger.name(state.wire)

    # ---------------------------------------------------------------- work

    def _run(self, message: Message) -> Message:
        """A stage; a message that is repeated is answered again, and nothing is trained twice."""
        if self.last is not None and self.last.about["to"] == message.name:
            self._become(self.last.about["state"])
            return self.last
        about = message.about
        if self.holds.num_examples < self.policy.min_examples:
            raise Refused("this site has too few training examples to answer")
        check_tensors(message.tensors, self.known, self.num_flat)
        address = StageAddress(**about["address"])
        stage = self.strategy.stage(address)
        self._check(stage)
        self.guard.admit_stage(
            stage,
            list(self.known),
            address.round_idx,
            about["effort"],
            self.collator.steps_per_epoch(self.index),
            asked=digest_of_facts(about["address"], about["effort"], about["state"], *message.tensors.items()),
        )
        payload = message.payload((self.index,))
        place = [address.phase, address.round_idx, address.name]
        summed_with, work_name = 1, ""
        if self.secure:
            check_stage(stage)
            work_name = digest_of_facts(place, about["effort"], *packed(payload, self.index).items())
            summed_with = self._enter(message, place, work_name)
        self._pay(stage, about["effort"])
        lost = self.last is not None and self.last.about["from"] == about["state"] != self.last.about["state"]
        if self.last is not None and lost and not self.secure:  # a sum may have it; see _sum_keys
            self.states.drop(self.last.about["state"])  # the server never got to know it
            self.current = self.current if self.current == about["state"] else ""
        self._become(about["state"])
        work = Work(stage=stage, address=address, effort={self.index: about["effort"]}, payload=payload)
        outcome = self.executor.run(work)
        self.work = work_name
        self.current = self.states.put(self._state())
        if self.index in outcome.failures:
            _log.warning("stage %s failed: %s", stage.name, outcome.failures[self.index])
            answer = self._failure(message, outcome.failures[self.index].partition(":")[0])
        else:
            try:
                leaving = self._leaving(outcome.upload, stage, payload, summed_with)
                answer = self._said(message, packed(leaving, self.index))
            except Refused as error:
                answer = self._failure(message, str(error))
        self.last = dataclasses.replace(
            answer, about={**answer.about, "from": about["state"], **({"place": place} if self.secure else {})}
        )
        self._keep("answer", self.last)
        return self.last

    def _pay(self, stage: Stage, effort: float) -> None:
        """Have the site's account count what private training is about to take, whatever comes of it."""
        privacy = self.model.privacy
        if privacy is None or not (steps := self.executor.private_steps(stage, self.index, effort)):
            return
        rate = rate_of(self.collator, self.index)
        try:
            self.accountant.spend_steps(rate, privacy.noise_multiplier, steps, self.policy.max_record_epsilon)
        except BudgetSpent as error:
            raise Refused(str(error)) from error

    def _check(self, stage: Stage) -> None:
        """Refuse what the site's filters cannot hide."""
        hides = any(each.hides_counts for each in self.policy.filters)
        if (
            hides
            and stage.num_steps is None
            and self.drawing.batch_size is not None
            and self.drawing.steps_per_epoch is None
        ):
            raise Refused("the number of steps would tell that of examples, which is hidden: set data.steps_per_epoch")

    def _leaving(self, upload: Payload, stage: Stage, received: Payload | None, summed_with: int) -> Payload:
        """What leaves the site: the stage's payload, filtered, and hidden in a sum."""
        known: dict[str, Tensor] = {}
        if not stage.as_update:
            initial = {name: tensor[None] for name, tensor in self.known.items()}
            known = to_wire(initial, self.num_flat) if stage.flat else initial
            known |= {} if received is None else received.parameters
        upload = self.guard.leaving(upload, stage)
        try:
            for each in self.policy.filters:
                upload = each(upload, known, summed_with=summed_with)
        except CannotFilter as error:
            raise Refused(str(error)) from error
        if not self.weighting:
            return upload
        return Payload(clients=upload.clients, signals={MASKED: self.sum.hide(*summand(upload, self.weighting))[None]})

    def _evaluate(self, message: Message) -> Message:
        """What the policy tells of each metric; zeros for a split of too few examples."""
        if self.scored is not None and self.scored.about["to"] == message.name:
            return self.scored
        about, round_idx = message.about, message.about["round_idx"]
        check_tensors(message.tensors, self.known, self.num_flat, models=len(about["evaluations"]))
        if len({kind for kind, _ in about["evaluations"]}) < len(about["evaluations"]):
            raise Refused("an evaluation is asked for twice")
        allowed = [
            (
                kind,
                allowed_evaluation(self.strategy, self.index, kind, what, message.payload((self.index,), f"{place}/")),
            )
            for place, (kind, what) in enumerate(about["evaluations"])
        ]
        self.guard.admit_evaluations(
            [evaluation for _, evaluation in allowed],
            round_idx,
            self.collator.steps_per_epoch(self.index),
            asked=digest_of_facts(about["evaluations"], about["state"], *message.tensors.items()),
        )
        if self.secure:
            self._enter(message, ["evaluate", round_idx], None)
        self._become(about["state"])
        self._forget(message)
        found: dict[str, Tensor] = {}
        failures: dict[str, str] = {}
        for place, (kind, evaluation) in enumerate(allowed):
            outcome = self.executor.evaluate({kind: evaluation}, [self.index], round_idx)[kind]
            if self.index in outcome.failures:
                _log.warning("evaluation %r failed: %s", kind, outcome.failures[self.index])
                failures[kind] = outcome.failures[self.index].partition(":")[0]
                continue
            for name, pair_12 in outcome.upload.signals.items():
                enough = bool(pair_12[0, 1] >= self.policy.min_examples)
                found[f"{place}/{name}"] = pair_12.cpu() if enough else torch.zeros(1, 2)
        self.scored = self._said(message, **self._scores(found, failures, len(allowed)))
        self._keep("scores", self.scored)
        return self.scored

    def _scores(self, found: dict[str, Tensor], failures: dict[str, str], num_models: int) -> dict[str, Any]:
        """What the policy tells of metrics, (1, 2) by the place of their model and their name."""
        try:
            found = self.policy.tell(found, summed=self.secure)
        except CannotFilter as error:
            raise Refused(str(error)) from error
        if not self.secure:
            return {"tensors": found, "failures": failures}
        keys = [f"{place}/{name}" for place in range(num_models) for name in self.metric_names]
        whole = {key: torch.zeros(1, 2) for key in keys} | found
        hidden = self.sum.hide(summands(whole), 1.0)
        return {"tensors": {f"s/{MASKED}": hidden[None]}, "failures": failures}

    def _predict(self, message: Message) -> Message:
        """Write what the client's model predicts, here."""
        check_tensors(message.tensors, self.known, self.num_flat, models=1)
        self._become(message.about["state"])
        payload = message.payload((self.index,), "0/")
        evaluation = allowed_evaluation(self.strategy, self.index, "", message.about["evaluation"], payload)
        self.guard.admit_tuning(evaluation, message.about["round_idx"], self.collator.steps_per_epoch(self.index))
        output_NK = self.executor.predict(evaluation, [self.index], message.about["round_idx"])[self.index]
        predicted = Predicted(task=self.model.task, holds=self.holds, own=self.own, output_NK=output_NK)
        write_predictions(self.folder / "predictions.csv", [predicted], secret=True)
        return self._said(message)

    # ---------------------------------------------------------------- states

    def _state(self) -> Message:
        """All that lives on in the client."""
        held = self.executor.holdings().get(self.index, {})
        about: dict[str, Any] = {"after": self.work} if self.work else {}  # so that no two sums are of equal states
        if self.index in self.executor.active:
            about["round"] = self.executor.round
        return Message(
            kind="state",
            about=about,
            tensors=packed(self.executor.state(), self.index) | {f"h/{name}": tensor for name, tensor in held.items()},
        )

    def _become(self, digest: str) -> None:
        """Go to a state, if it is another than the present one."""
        if digest == self.current:
            return
        state = self.states.get(digest)
        if state is None:
            raise Refused(_gone(digest))
        held = {name[2:]: tensor for name, tensor in state.tensors.items() if name.startswith("h/")}
        if held:
            self.executor.load_holdings({self.index: held})
        elif self.executor.holdings():
            self.executor.rewrite({self.index: self.holds})
        tensors = {name: tensor for name, tensor in state.tensors.items() if not name.startswith("h/")}
        now = tuple(state.about["round"]) if "round" in state.about else None
        self.executor.load_state(Payload.from_named((self.index,), tensors), now)
        self.work = str(state.about.get("after", ""))
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
        content = self.files.read(name)
        return None if content is None else Message.read(content)

    def _keep(self, name: str, message: Message) -> None:
        self.files.write(name, message.wire)


def _gone(digest: str) -> str:
    return f"this site does not hold the state {digest[:12]}...: restore its folder, or resume from another checkpoint"
