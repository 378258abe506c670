"""Enforces a site's policy: refuses messages before anything is computed, and checks what leaves.

It counts what a job has asked for (messages, steps and evaluations of a round), whatever a server calls its federation.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fl_lightning.batches.client_data import ClientData
from fl_lightning.models.fitting import fitted
from fl_lightning.remote.ledger import SumLedger
from fl_lightning.remote.policy import Kind, Refused, SitePolicy
from fl_lightning.round.client import ClientModule
from fl_lightning.round.payload import Payload
from fl_lightning.round.stage import Evaluation, Stage
from fl_lightning.strategies import Strategy

_MIB = 2**20


class Guard:
    """Enforces a site's policy during a job.

    Args:
        policy: The rules.
        client_data: The client's data.
        ledger: The site's ledger, which counts evaluated models over all processes of a run.
        num_rounds: Rounds of the job; None if unknown.
    """

    def __init__(
        self,
        policy: SitePolicy,
        client_data: ClientData,
        ledger: SumLedger,
        *,
        num_rounds: int | None = None,
    ) -> None:
        self.policy = policy
        self.client_data = client_data
        self.ledger = ledger
        self.run, self.summed = "", False  # its name in the ledger, and whether the server learns only sums
        self.hides_scores = False  # of models within a stage
        self.num_rounds = num_rounds
        self.num_messages = 0
        self.steps: Counter[int] = Counter()
        self.evaluations: Counter[int] = Counter()
        self.scored: set[str] = set()

    # ---------------------------------------------------------------- messages

    def admit_message(self, wire: bytes) -> None:
        """Count a message, before it is read."""
        self.num_messages += 1
        if self.num_messages > self.policy.max_messages:
            raise Refused(f"policy.max_messages is {self.policy.max_messages}, and this job has sent that many")
        if len(wire) > self.policy.max_message_mib * _MIB:
            raise Refused(
                f"a message of {len(wire)} bytes arrived, but policy.max_message_mib is {self.policy.max_message_mib}"
            )

    def admit_widths(self, num_features: Any, num_outputs: Any, own: Sequence[str] = ()) -> None:
        """Refuse inputs that are not this client's, and more outputs than the bound.

        Where features (outputs) are each client's own, the widest client determines the net: there are at least as many
        as here, not more than a net may have parameters, and padding this client's data stays within the bound.
        """
        if isinstance(num_outputs, bool) or not isinstance(num_outputs, int) or num_outputs < 1:
            raise Refused("the number of outputs must be an integer of at least 1")
        self.policy.check_outputs(num_outputs)
        given = tuple(num_features) if isinstance(num_features, list | tuple) else num_features
        if "features" in own:
            self._admit_wider(given)
        elif given != self.client_data.num_features:
            raise Refused("the federation's inputs do not have the same width as this site's")
        if own:
            self._admit_padding(given, num_outputs)

    def _admit_wider(self, given: Any) -> None:
        whole = isinstance(given, int) and not isinstance(given, bool)
        if not whole or given < self.client_data.inputs.shape[1]:
            raise Refused("the federation's inputs are not as wide as this site's")
        if given > (most := self.policy.max_parameters):
            raise Refused(f"inputs of width {given} are asked for, policy.max_parameters is {most} here")

    def _admit_padding(self, num_features: Any, num_outputs: int) -> None:
        """Refuse what :meth:`ClientData.widened` would add, by its size, which the reason does not reveal."""
        inputs, targets = self.client_data.inputs, self.client_data.y_N
        padded = [(inputs, num_features)] if isinstance(num_features, int) else []
        padded += [(targets, num_outputs)] if targets.dim() > 1 else []
        added = sum(len(tensor) * (width - tensor.shape[1]) * tensor.element_size() for tensor, width in padded)
        if added > (most := self.policy.max_padding_mib) * _MIB:
            raise Refused(
                f"to pad this site's data to {num_features} features and {num_outputs} outputs takes more than "
                f"policy.max_padding_mib, {most} MiB: raise it here, or leave the widest site out of the federation"
            )

    def admit_nets(self, model: ClientModule, num_features: Any, num_outputs: int) -> None:
        """Refuse nets that are too large, by counting their parameters before they are allocated."""
        if (count := count_parameters(model, num_features, num_outputs)) is not None:
            self.admit_parameters(count)

    def admit_parameters(self, count: int) -> None:
        """Refuse nets with too many parameters."""
        if count > self.policy.max_parameters:
            raise Refused(
                f"the clients' nets have {count} parameters, policy.max_parameters is {self.policy.max_parameters} here"
            )

    # ---------------------------------------------------------------- work

    def check_stages(self, strategy: Strategy, names: Sequence[str]) -> None:
        """Refuse a strategy whose first stages would send what may not leave, before it starts.

        It is refused, too, if a pattern of what stays here fits none of the net's parameters.

        Args:
            strategy: The strategy, after ``setup``.
            names: Names of all parameters that are communicated.
        """
        federation = strategy.federation
        self.policy = self.policy.for_net([*names, *federation.own_names], federation.head_names)
        for stage in (*strategy.initial_stages(), *strategy.stages(0)):
            self.check_stage(stage, names)

    def check_stage(self, stage: Stage, names: Sequence[str]) -> None:
        """Refuse a stage whose response may not leave, before it runs."""
        self.policy.check_parameters(names if stage.flat else stage.upload)
        for name in stage.client_outputs:
            self.policy.check_output(name, kind_of(stage, name))
        if stage.scores:
            self.policy.check_scores(stage.scores, summed=self.summed)

    def admit_stage(
        self,
        stage: Stage,
        names: Sequence[str],
        round_idx: int,
        work_fraction: Any,
        steps_per_epoch: int,
        *,
        asked: str,
    ) -> None:
        """Refuse a stage, or count its steps and the models that it evaluates.

        Args:
            stage: The stage.
            names: Names of all parameters that are communicated.
            round_idx: The round.
            work_fraction: Share of the stage's steps.
            steps_per_epoch: Number of batches in an epoch of the client's data.
            asked: A digest of the request: a repeated one has the same response, and its models count once.
        """
        self.check_stage(stage, names)
        self.check_round(round_idx)
        if isinstance(work_fraction, bool) or not isinstance(work_fraction, int | float) or not 0 <= work_fraction <= 1:
            raise Refused("the work fraction must be in [0, 1]")
        self._count_steps(stage, round_idx, work_fraction, steps_per_epoch)
        if stage.scores and asked not in self.scored:
            self._count_evaluations(round_idx, stage.num_scored, asked)
            self.scored.add(asked)

    def admit_evaluations(
        self, evaluations: Sequence[Evaluation], round_idx: int, steps_per_epoch: int, *, asked: str
    ) -> None:
        """Refuse evaluations of models, or count them.

        Args:
            evaluations: The models.
            round_idx: The round.
            steps_per_epoch: Number of batches in an epoch of the client's data.
            asked: A digest of the request: a repeated one has the same response, and its models count once.
        """
        self.check_round(round_idx)
        for evaluation in evaluations:
            kind = scored_of(evaluation)
            if kind not in self.policy.evaluations:
                allowed = ", ".join(self.policy.evaluations) or "none"
                raise Refused(
                    f"a model that is {kind} is to be evaluated, but policy.evaluations allows only {allowed}"
                )
        if asked not in self.scored:
            self._count_evaluations(round_idx, len(evaluations), asked)
        for evaluation in evaluations:
            self.admit_tuning(evaluation, round_idx, steps_per_epoch)
        self.scored.add(asked)

    def admit_tuning(self, evaluation: Evaluation, round_idx: int, steps_per_epoch: int) -> None:
        """Refuse training before an evaluation or a prediction, or count its steps."""
        self.check_round(round_idx)
        if evaluation.tuning is not None:
            self._count_steps(evaluation.tuning, round_idx, 1.0, steps_per_epoch)

    def check_round(self, round_idx: Any) -> None:
        """Refuse a round that the job does not have."""
        if isinstance(round_idx, bool) or not isinstance(round_idx, int) or round_idx < 0:
            raise Refused("a round is an integer of at least 0")
        if self.num_rounds is not None and round_idx > self.num_rounds:
            raise Refused(f"round {round_idx} is requested, but the job has {self.num_rounds} rounds")

    def _count_steps(self, stage: Stage, round_idx: int, work_fraction: float, steps_per_epoch: int) -> None:
        epochs, steps = stage.schedule(work_fraction, steps_per_epoch)
        if self.steps[round_idx] + epochs * steps > self.policy.max_steps_per_round:
            raise Refused(
                f"{self.steps[round_idx]} steps of round {round_idx} were taken and {epochs * steps} more are "
                f"requested, "
                f"policy.max_steps_per_round is {self.policy.max_steps_per_round}"
            )
        self.steps[round_idx] += epochs * steps

    def _count_evaluations(self, round_idx: int, count: int, asked: str) -> None:
        """Count models, in this process whatever the run's name, and in the run whatever the process."""
        most = self.policy.max_evaluations_per_round
        before = self.evaluations[round_idx]
        if before + count > most:
            raise Refused(
                f"{before} models were evaluated in round {round_idx} and {count} more are requested, "
                f"policy.max_evaluations_per_round is {most}"
            )
        if not self.ledger.count_models(self.run, round_idx, asked, count, most):
            raise Refused(
                f"{count} more models are requested in round {round_idx}, policy.max_evaluations_per_round is {most}, "
                "and some were evaluated before this site was restarted"
            )
        self.evaluations[round_idx] += count

    # ---------------------------------------------------------------- responses

    def leaving(self, upload: Payload, stage: Stage) -> Payload:
        """The part of a response that may leave: numbers from too few examples are set to zero.

        Raises:
            Refused: A part of it may not leave at all.
        """
        for name in upload.extras:
            self.policy.check_output(name, kind_of(stage, name))
        extras = dict(upload.extras)
        for base in stage.scores:
            count = extras.get(f"{base}/count", extras[base][..., 1] if base in extras else None)
            if count is not None and (self.hides_scores or bool((count < self.policy.min_examples).any())):
                extras |= {n: torch.zeros_like(t) for n, t in extras.items() if n.partition("/")[0] == base}
        for name, too_few_K in self._too_few(upload, stage):
            extras[name] = extras[name].masked_fill(_as_wide(too_few_K, extras[name]), 0)
        return dataclasses.replace(upload, extras=extras)

    def _too_few(self, upload: Payload, stage: Stage) -> Iterator[tuple[str, Tensor]]:
        """Each client output with rows for classes, counts included, and which classes have too few examples, (K,)."""
        for name, counted_by in stage.per_class.items():
            if name not in upload.extras:
                continue
            if counted_by:
                counts_K = upload.extras[counted_by][0]
            else:
                counts_K = self._training_counts(upload.extras[name].shape[1])
            too_few_K = counts_K < self.policy.min_examples
            yield name, too_few_K
            if counted_by:
                yield counted_by, too_few_K

    def _training_counts(self, num_classes: int) -> Tensor:
        return torch.bincount(self.client_data.y_N[self.client_data.train_mask_N].clamp(min=0), minlength=num_classes)[
            :num_classes
        ]


def _as_wide(chosen_K: Tensor, output_1K: Tensor) -> Tensor:
    """A mask over classes, broadcast to a client output (1, K, ...)."""
    return chosen_K.to(output_1K.device).view(1, -1, *[1] * (output_1K.dim() - 2)).expand_as(output_1K)


def kind_of(stage: Stage, name: str) -> Kind:
    """What a client output, or the first part of its name, describes."""
    base = name.partition("/")[0]
    if {name, base} & {*stage.per_example, *stage.single}:
        return "example"
    by_class = {*stage.per_class, *stage.per_class.values()}
    return (
        "class"
        if any(name == each or ("/" not in name and each.startswith(f"{name}/")) for each in by_class)
        else "client"
    )


def scored_of(evaluation: Evaluation) -> Any:
    """Which model an evaluation is for."""
    if evaluation.tuning is not None:
        return "tuned"
    received = evaluation.payload is not None and evaluation.payload.parameters
    return "received" if received and not evaluation.prefer_trained else "own"


def count_parameters(model: ClientModule, num_features: Any, num_outputs: int) -> int | None:
    """Number of parameters of the largest of a client's nets, from meta tensors.

    Returns:
        The count; None if a net cannot be built in this way, which happens only with classes of the site's owner.
    """
    counts: Mapping[str, int] | list[int] = []
    with torch.device("meta"), torch.random.fork_rng([]):
        try:
            nets = [fitted(factory, num_features, num_outputs) for factory in model.net_factories]
            counts = [sum(p.numel() for p in net.parameters()) for net in nets]
        except (ValueError, RuntimeError, TypeError, NotImplementedError):
            return None
    return max(counts)
