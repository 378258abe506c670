"""The evaluations of a run, as defined by its strategy."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from fl_lightning.batches.union import UnionCollator
from fl_lightning.round.inspection import check_models
from fl_lightning.round.metrics import summarize, summarize_sums
from fl_lightning.run.assembly import Run
from fl_lightning.run.callback import Hooks, WrongSetting
from fl_lightning.run.failures import Failures
from fl_lightning.run.processes import gather, gather_by_client


@dataclass(frozen=True)
class Evaluator:
    """Scores models; the run keeps each client's scores (``scores``) and their round (``scored_round``).

    Args:
        run: The run.
        hooks: The callbacks.
        failures: Where failing clients are reported.
        union: Whether models are also scored on the examples of all training clients together.
    """

    run: Run
    hooks: Hooks
    failures: Failures
    union: bool = False

    def __call__(
        self, clients: Sequence[int], prefix: str = "", round_idx: int | None = None, *, whole: bool = False
    ) -> dict[str, float]:
        """Score the given clients' models, and return the metrics over them.

        Args:
            clients: The clients whose models are scored.
            prefix: Prefix of the metrics' names.
            round_idx: The round whose random draws fine-tuning uses; None for the current one.
            whole: Also score the models that a round has trained, even if there is no current round.
        """
        run = self.run
        run.scored_round = round_idx = run.round_idx if round_idx is None else round_idx
        evaluations = dict(run.strategy.evaluations(clients))
        if run.executor.round is None and not whole:  # a checkpoint lacks the models that end with their round
            evaluations = {kind: each for kind, each in evaluations.items() if not each.prefer_trained}
        for payload in {id(each.payload): each.payload for each in evaluations.values()}.values():
            check_models(payload, run.registry.names)
        results = dict(run.executor.evaluate(evaluations, clients, round_idx))
        if self.union:
            collator = UnionCollator(run.executor.evaluation_collator, run.training_clients)
            output = run.executor.evaluate(evaluations, clients, round_idx, collator=collator)
            results |= {f"union/{kind}": result for kind, result in output.items()}
        metrics: dict[str, float] = {}
        for kind, result in results.items():
            scores = run.scores[prefix + kind] = gather(run.fabric, result.upload)
            shown = dataclasses.replace(scores, extras=_scored(scores.extras)) if kind else scores
            values = summarize(shown, prefix + kind, run.selection.directions)
            metrics |= values | summarize_sums(_scored(result.sums) if kind else result.sums, prefix + kind)
            failures = gather_by_client(run.fabric, result.failures)
            self.failures.report(failures, f"in the evaluation {prefix + kind!r}", len(clients))
        self.hooks.measured("on_evaluate", metrics, prefix)
        return metrics

    def check_monitor(self) -> None:
        """Refuse a metric of another model (``gen/val/acc``) that no evaluation has, before it selects a round.

        For the main model, the scores of the first client have been checked (``assembly.check_monitor``).

        Raises:
            WrongSetting: No evaluation has the metric.
        """
        monitor, is_mean = self.run.selection.monitor, self.run.selection.monitor == self.run.selection.metric
        if (is_mean and monitor.startswith("val/")) or any(monitor in row for row in self.run.history):
            return
        metrics = self(self.run.evaluated_clients, whole=True)
        if monitor not in metrics:
            known = [name for name in metrics if "val/" in name and f"{name}_weighted" in metrics]
            raise WrongSetting(f"trainer.monitor is {monitor!r}, but there are {', '.join(sorted(known))}")


def _scored(scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Scores without those of training examples that an evaluation has left out: the second number counts them."""
    return {name: pair for name, pair in scores.items() if not name.startswith("train/") or pair[..., 1].any()}


def epsilons(run: Run) -> dict[str, float]:
    """ε of private training so far, for each client and the largest; empty without private training."""
    if run.model.privacy is None:
        return {}
    result = gather_by_client(run.fabric, run.executor.epsilons())
    named = {f"epsilon/{run.registry.names[client]}": result[client] for client in sorted(result)}
    return {"epsilon": max(result.values()), **named} if result else {}
