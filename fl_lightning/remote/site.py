"""A site holds the data of one client: it handles the server's messages and decides for itself what it releases.

| message | what the site does | what leaves it |
|---|---|---|
| ``enroll`` | | name, task, numbers of features and outputs, whose they are, density, edges, a digest of class names |
| ``start`` | builds net, strategy and executor from its own settings, and compares them with the server's | a digest |
| ``run`` | a stage, from the named state | the stage's payload, after the site's filters; a digest |
| ``evaluate`` | evaluates the models that its strategy evaluates | the metrics, as far as its policy releases them |
| ``sum_...`` | its part in a secure sum (``sum_member.py``) | keys, sealed shares, shares |
| ``predict`` | writes ``predictions.csv`` into its folder | |
| ``load``, ``forget`` | restores a state, deletes states | |

If something fails, only the kind of error leaves; its text, which may contain data, is in the site's log. Under secure
aggregation the kind stays, too, and at a site that adds noise even that something failed (``release.py``).
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fl_lightning.batches.client_data import ClientData
from fl_lightning.executors import StageRequest
from fl_lightning.federation import UserNames
from fl_lightning.files import private_folder
from fl_lightning.remote.digests import card_of, digest_of, digest_of_facts
from fl_lightning.remote.evaluations import allowed_evaluation
from fl_lightning.remote.guard import Guard
from fl_lightning.remote.identity import Identity
from fl_lightning.remote.job_schema import Job
from fl_lightning.remote.ledger import SumLedger
from fl_lightning.remote.membership import Membership
from fl_lightning.remote.message import Message, packed
from fl_lightning.remote.own import own_of, with_own_outputs
from fl_lightning.remote.policy import Refused, SitePolicy
from fl_lightning.remote.questions import check_question, check_start, check_terms, rounds_of, run_of
from fl_lightning.remote.release import (
    blank_response,
    check_hidden,
    check_plan,
    failed,
    open_accounts,
    pay_for,
    released_scores,
    released_update,
    told_of,
)
from fl_lightning.remote.sealed import SealedFiles
from fl_lightning.remote.secure import check_stage
from fl_lightning.remote.states import StateStore
from fl_lightning.remote.sum_member import SumMember
from fl_lightning.round.client import ClientModule
from fl_lightning.round.stage import StageAddress
from fl_lightning.run.predictions import Predicted, write_predictions
from fl_lightning.strategies import Strategy
from fl_lightning.tasks import Drawing

_log = logging.getLogger(__name__)
#: Messages that belong to a sum under secure aggregation, and only there.
_SUMMED = ("sum_keys", "sum_shares", "sum_confirm", "sum_reveal", "run", "evaluate")


class Site:
    """The client's side of a remote federation.

    Args:
        client_data: What the client holds.
        model: The client module, with the settings of the run and the task of the site's data.
        strategy: The strategy, with the settings of the run.
        folder: Where the site keeps its states of the run; a site that is restarted continues from there.
        account: Where it records, for all runs, what it has revealed: its privacy account and the ledger of its sums.
            None for ``folder``.
        identity: Its certificate, with which secure sums are signed; None without certificates.
        policy: What it refuses; the defaults of :class:`SitePolicy` if none is given.
        drawing: How training examples are drawn, as in the data module; None for all at once.
        names: The user's names of nodes or examples, and of classes; None for numbers from 0.
        accelerator: Where the client trains, as in Lightning.
        job: What its submitter has signed, to which the server must keep; None if that is not known.
        own: Which of the client's ``features`` and ``outputs`` mean something else than at other sites: the layers that
            read and compute them then stay here.

    Raises:
        Refused: Its folder or account cannot be used.
        ValueError: ``own`` is something else, or features are its own that are no vectors.
    """

    def __init__(
        self,
        client_data: ClientData,
        model: ClientModule,
        strategy: Strategy,
        folder: Path,
        *,
        policy: SitePolicy | None = None,
        drawing: Drawing | None = None,
        names: UserNames | None = None,
        accelerator: str = "cpu",
        job: Job | None = None,
        account: Path | None = None,
        identity: Identity | None = None,
        own: Sequence[str] = (),
    ) -> None:
        self.own = own_of(own, client_data)
        self.names = names or UserNames(number_N=torch.arange(client_data.size))
        self.client_data = client_data = with_own_outputs(client_data, self.own, model.task, self.names)
        self.model, self.task = model, model.task  # the site's own: the model takes that of the federation
        self.strategy = strategy
        self.folder = folder
        self.policy = (policy or SitePolicy()).for_training(model.privacy)
        self.drawing = drawing or Drawing()
        self.accelerator = accelerator
        self.job = job
        private_folder(folder)
        account = private_folder(account or folder)
        try:
            self.states = StateStore(folder / "states")
            self.files = SealedFiles(folder, self.states.digest)
            self.ledger = SumLedger(account)
            self.sum = SumMember(self.files, self.ledger, identity, self.policy.min_sum_clients)
            self.accountant = open_accounts(self.policy, account)
        except ValueError as error:
            raise Refused(str(error)) from error
        num_rounds = None if job is None else rounds_of(job)[0]
        self.guard = Guard(self.policy, client_data, self.ledger, num_rounds=num_rounds)
        self.current = ""
        self.last: Message | None = None
        self.scored: Message | None = None
        self.is_started = False
        self._go_on()

    def _go_on(self) -> None:
        """Restore the client that is stored in the folder, if there is one."""
        self.is_started = False
        if (start := self._kept("start")) is not None:
            try:
                check_question(start)
                check_start(start, self.client_data, self.names, self.task, self.own)
                self._set_up(start)
                self.last, self.scored = self._kept("response"), self._kept("scores")
                self.current = ""  # the server's next message names the client's state
            except ValueError as error:  # it belonged to a run with other settings, or of other data
                _log.info("the last federation is not resumed: %s", error)

    # ---------------------------------------------------------------- messages

    def respond(self, wire: bytes) -> bytes:
        """The response to a message, both as bytes; an error here is a response, too."""
        try:
            self.guard.admit_message(wire)
            message = Message.read(wire)
        except ValueError as error:
            return Message(kind="failure", about={"to": "", "why": str(error)}).wire
        handlers = {
            "enroll": self._enroll,
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
            if message.kind in handlers and message.kind not in ("enroll", "start") and not self.is_started:
                raise Refused("this site is not in a federation")
            check_question(message)
            if self.is_started and self.member.secure != message.is_of_sums and message.kind in _SUMMED:
                raise Refused(f"this run is {'under' if self.member.secure else 'without'} secure aggregation")
            return handlers[message.kind](message).wire
        except Refused as error:
            return self._failure(message, str(error)).wire
        except Exception as error:  # a client runs its user's code; the text of its errors may hold data
            _log.exception("%s failed", message.kind)
            is_secure = bool(message.about.get("secure")) or (self.is_started and self.member.secure)
            is_quiet = self.policy.is_quiet(summed=message.is_of_sums or is_secure)
            return self._failure(message, failed(message.kind) if is_quiet else type(error).__name__).wire

    def _failure(self, message: Message, why: str) -> Message:
        return Message(kind="failure", about={"to": message.name, "why": why, "state": self.current})

    def _said(self, message: Message, tensors: Mapping[str, Tensor] | None = None, **about: Any) -> Message:
        return Message(
            kind="response", about={"to": message.name, "state": self.current, **about}, tensors=tensors or {}
        )

    def _enroll(self, message: Message) -> Message:
        """Describe the client."""
        self.policy.check_strategy(message.about["strategy"])
        return self._said(message, **card_of(self.client_data, self.names, self.task, self.own, self.states.digest))

    def _start(self, message: Message) -> Message:
        """Join a federation."""
        check_start(message, self.client_data, self.names, self.task, self.own)
        try:
            self._set_up(message)
            check_plan(self.job, self.strategy, self.member, self.model.privacy, self.accountant, self.policy)
        except BaseException:
            self._go_on()  # discard the new one
            raise
        self.sum.end()
        self._keep("start", message)
        for name in ("response", "scores"):
            self.files.drop(name)
        self.last = self.scored = None
        return self._said(message, parameters=digest_of(self.member.architectures), **told_of(self.member, self.policy))

    def _set_up(self, start: Message) -> None:
        about = start.about
        check_terms(about, self.policy, self.job)
        mine = self.client_data, self.model, self.strategy, self.guard
        self.member = member = Membership(start, *mine, drawing=self.drawing, accelerator=self.accelerator)
        self.guard.run, self.guard.summed = run_of(about, self.job), member.secure
        if member.secure:
            self.sum.join(self.guard.run, member.index, about["names"], float(about["secure_share"]))
        self.guard.admit_parameters(member.num_flat)
        self.guard.check_stages(self.strategy, list(member.known))
        member.find_metrics(self.guard)
        self.is_started = True
        self.current = self.states.put(member.state())

    # ---------------------------------------------------------------- sums

    def _sum_keys(self, message: Message) -> Message:
        """Start a sum; continue from a summed state if the server did not learn the next one."""
        about = message.about
        state = about["state"]
        last = self.last
        if (
            about["purpose"] == "run"
            and last is not None
            and last.kind == "response"
            and last.about["from"] == state
            and self.states.get(last.about["state"]) is not None
            and list(about["place"]) != last.about["place"]
        ):
            state = last.about["state"]
        self._become(state)
        return self._said(message, **self.sum.open(message.name, about["purpose"], about["place"], self._entry(state)))

    def _sum_step(self, message: Message) -> Message:
        """Another step of the sum. Its response is the same after a restart, since it does not depend on the state."""
        return Message(kind="response", about={"to": message.name, **self.sum.step(message.kind, message.about)})

    def _enter(self, message: Message, address: Sequence[Any], work: str | None) -> int:
        """Take part in the sum that a message asks for; returns how many clients are summed at the least."""
        if self._entry(message.about["state"]) != self.sum.state.get("state"):
            raise Refused("no sum was started from this state")
        return self.sum.enter(message, address, work)

    def _entry(self, digest: str) -> str:
        """A state's name in the site's ledger, which is the same in all runs."""
        return self.ledger.name(self._state(digest).wire)

    def _state(self, digest: str) -> Message:
        state = self.states.get(digest)
        if state is None:
            raise Refused(
                f"this site does not have the state {digest[:12]}...: restore its folder, or resume from another one"
            )
        return state

    # ---------------------------------------------------------------- work

    def _run(self, message: Message) -> Message:
        """Run a stage; a repeated message gets the same response, and nothing is trained twice."""
        member = self.member
        if self.last is not None and self.last.about["to"] == message.name:
            self._become(self.last.about["state"])
            return self.last
        about = message.about
        if self.client_data.num_examples < self.policy.min_examples:
            raise Refused("this site has too few training examples to respond")
        member.check_tensors(message)
        address = StageAddress(**about["address"])
        self.guard.check_round(address.round_idx)  # before a schedule of learning rates counts up to it
        stage = self.strategy.stage(address)
        check_hidden(stage, self.drawing, self.policy)
        self.guard.admit_stage(
            stage,
            list(member.known),
            address.round_idx,
            about["work_fraction"],
            member.steps_per_epoch,
            asked=digest_of_facts(about["address"], about["work_fraction"], about["state"], *message.tensors.items()),
        )
        payload = message.payload((member.index,))
        stage_address = [address.phase, address.round_idx, address.name]
        summed_with, work_name = 1, ""
        if member.secure:
            check_stage(stage)
            work_name = digest_of_facts(stage_address, about["work_fraction"], *packed(payload, member.index).items())
            summed_with = self._enter(message, stage_address, work_name)
        pay_for(stage, about["work_fraction"], member, self.model.privacy, self.accountant, self.policy)
        blank = blank_response(stage, about["work_fraction"], payload, member, self.guard, summed_with)
        lost = self.last is not None and self.last.about["from"] == about["state"] != self.last.about["state"]
        if self.last is not None and lost and not member.secure:  # a sum may contain it, see _sum_keys
            self.states.drop(self.last.about["state"])  # the server never learned it
            self.current = self.current if self.current == about["state"] else ""
        self._become(about["state"])
        request = StageRequest(
            stage=stage, address=address, work_fraction={member.index: about["work_fraction"]}, payload=payload
        )
        result = member.run(request, self._state(about["state"]), raises=blank is None)
        member.work = work_name if blank is None else digest_of_facts(work_name or message.name, about["state"])
        self.current = self.states.put(member.state())
        try:
            leaving = released_update(result, stage, payload, blank, member, self.guard, self.sum, summed_with)
            response = self._said(message, packed(leaving, member.index))
        except Refused as error:
            response = self._failure(message, str(error))
        self.last = dataclasses.replace(
            response,
            about={**response.about, "from": about["state"], **({"place": stage_address} if member.secure else {})},
        )
        self._keep("response", self.last)
        return self.last

    def _evaluate(self, message: Message) -> Message:
        """Evaluate models: the metrics that the policy releases, with zeros for a split with too few examples."""
        member = self.member
        if self.scored is not None and self.scored.about["to"] == message.name:
            return self.scored
        about, round_idx = message.about, message.about["round_idx"]
        member.check_tensors(message, models=len(about["evaluations"]))
        if len({kind for kind, _ in about["evaluations"]}) < len(about["evaluations"]):
            raise Refused("an evaluation is requested twice")
        allowed = []
        for index, (kind, what) in enumerate(about["evaluations"]):
            models = message.payload((member.index,), f"{index}/")
            allowed.append((kind, allowed_evaluation(self.strategy, member.index, kind, what, models)))
        self.guard.admit_evaluations(
            [evaluation for _, evaluation in allowed],
            round_idx,
            member.steps_per_epoch,
            asked=digest_of_facts(about["evaluations"], round_idx, about["state"], *message.tensors.items()),
        )
        if member.secure:
            self._enter(message, ["evaluate", round_idx], None)
        self._become(about["state"])
        self._forget(message)
        tensors, failures = released_scores(allowed, round_idx, member, self.policy, self.sum)
        self.scored = self._said(message, tensors, failures=failures)
        self._keep("scores", self.scored)
        return self.scored

    def _predict(self, message: Message) -> Message:
        """Write the predictions of the client's model into the site's folder."""
        member = self.member
        member.check_tensors(message, models=1)
        self._become(message.about["state"])
        payload = message.payload((member.index,), "0/")
        evaluation = allowed_evaluation(self.strategy, member.index, "", message.about["evaluation"], payload)
        round_idx = message.about["round_idx"]
        self.guard.admit_tuning(evaluation, round_idx, member.steps_per_epoch)
        of_client = partial(Predicted, task=self.task, client_data=self.client_data, names=self.names)
        try:
            output_NK = member.executor.predict(evaluation, [member.index], round_idx)[member.index]
            write_predictions(self.folder / "predictions.csv", [of_client(output_NK=output_NK)], secret=True)
        except Exception:
            if not self.policy.hides_failures:
                raise
            _log.exception("the predictions failed; the server is not told")
        return self._said(message)

    # ---------------------------------------------------------------- states

    def _become(self, digest: str) -> None:
        """Restore a state, unless it is the current one."""
        if digest != self.current:
            self.member.become(self._state(digest))
            self.current = digest

    def _load(self, message: Message) -> Message:
        """Restore the state of a checkpoint."""
        self._become(message.about["state"])
        self.last = None
        return self._said(message)

    def _forget(self, message: Message) -> Message:
        """Delete states that the server no longer needs."""
        for digest in message.about["forget"]:
            if digest != self.current:
                self.states.drop(digest)
        return self._said(message)

    def _kept(self, name: str) -> Message | None:
        content = self.files.read(name)
        return None if content is None else Message.read(content)

    def _keep(self, name: str, message: Message) -> None:
        self.files.write(name, message.wire)
