"""Which of the finalists is taken, and the sentence with its evidence.

Validation on seeds that took no part in the search decides: of the methods that are not below the best one by more than
the standard error of their difference, paired over seeds, the simplest is taken (the one-standard-error rule of Breiman
et al., "Classification and Regression Trees", 1984). What a test at 95 % cannot tell apart is no tie: with three seeds
that may be 15 points. What has a lower mean than a method that is out is out, too: its scatter alone does not make it
as good. What fails with a seed with which others do not is out. Test metrics are the evidence, and decide nothing.

Shape legend: S seeds.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fl_lightning.choice.candidates import CEILING, COMMON, FLOOR
from fl_lightning.choice.halving import FEWEST_SEEDS
from fl_lightning.counts import count
from fl_lightning.direction import direction_of
from fl_lightning.report.gaps import half_width
from fl_lightning.report.wording import number, size
from fl_lightning.run.curve import STILL_RISING
from fl_lightning.study.store import Record, is_less_better, metric_tested

_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@dataclass(frozen=True)
class Interval:
    """A mean over seeds and its 95 % interval (Student's t); the ends are nan with fewer than three seeds.

    Attributes:
        mean: The mean.
        low: Lower end.
        high: Upper end.
        seeds: How many.
    """

    mean: float
    low: float
    high: float
    seeds: int

    @classmethod
    def of(cls, value_S: Sequence[float]) -> "Interval":
        """That of some values."""
        count = len(value_S)
        mean = statistics.fmean(value_S) if count else math.nan
        if count < FEWEST_SEEDS:
            return cls(mean, math.nan, math.nan, count)
        half = half_width(np.array(value_S))
        return cls(mean, mean - half, mean + half, count)

    @property
    def is_clear(self) -> bool:
        """Whether it leaves zero out."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True, kw_only=True)
class Standing:
    """A finalist.

    Attributes:
        method: Its name.
        label: Its setting.
        val: Validation metric by seed, more being better.
        test: Test metric by seed, likewise.
        worst: Test metric of the worst client, mean over seeds, as it was measured; nan if unknown.
        sent: Bytes of a run, mean over seeds.
        seconds: Likewise.
        is_rising: Whether most of its runs were still rising.
        errors: Why runs failed.
    """

    method: str
    label: str
    val: Mapping[int, float]
    test: Mapping[int, float]
    worst: float
    sent: float
    seconds: float
    is_rising: bool
    errors: Sequence[str] = ()

    @classmethod
    def of(cls, method: str, label: str, records: Mapping[int, Record]) -> "Standing":
        """That of the records of a method, by seed."""
        whole = {seed: record for seed, record in records.items() if not record["error"]}
        sign = -1.0 if any(map(is_less_better, whole.values())) else 1.0
        names = {seed: metric_tested(record) for seed, record in whole.items()}
        test = {seed: record["result"].get(names[seed]) for seed, record in whole.items()}
        worst = [record["result"].get(f"{names[seed]}_worst") for seed, record in whole.items()]
        known = [value for value in worst if value is not None]
        rising = [STILL_RISING in record["marks"] for record in whole.values()]
        return cls(
            method=method,
            label=label,
            val={seed: sign * record["val"] for seed, record in whole.items()},
            test={seed: sign * value for seed, value in test.items() if value is not None},
            worst=statistics.fmean(known) if known else math.nan,
            sent=_mean([float(sum(record["bytes"].values())) for record in whole.values()]),
            seconds=_mean([record["training_seconds"] for record in whole.values()]),
            is_rising=sum(rising) > 0.5 * len(rising),
            errors=tuple(record["error"] for record in records.values() if record["error"]),
        )


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else math.nan


def difference(first: Mapping[int, float], second: Mapping[int, float]) -> Interval:
    """By how much the first is better, paired over the seeds that both have."""
    return Interval.of(_gaps(first, second))


def _gaps(first: Mapping[int, float], second: Mapping[int, float]) -> list[float]:
    return [first[seed] - second[seed] for seed in first if seed in second]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is to be done.

    Attributes:
        method: The method that is taken.
        against: What it is compared with in the sentence; empty if there is nothing.
        test: By how much it is better on test examples.
        sentence: The answer with its evidence.
        notes: What has to be known beside it.
    """

    method: str
    against: str
    test: Interval
    sentence: str
    notes: Sequence[str] = ()


def decide(
    standings: Sequence[Standing], metric: str, *, less_is_better: bool, num_rounds: int, has_new_seeds: bool = True
) -> Verdict:
    """The verdict over the finalists.

    Args:
        standings: The finalists, the simplest first.
        metric: Name of the test metric, such as ``test/acc``; where there are no test examples, of the validation
            metric, which is then given as ``test``, too.
        less_is_better: Whether it is an error.
        num_rounds: Of a whole run.
        has_new_seeds: Whether the results are of new seeds; otherwise they are validation's of the search's own.

    Raises:
        ValueError: No finalist but the ceiling has a result.
    """
    methods = [each for each in standings if each.method != CEILING]
    most = max((len(each.val) for each in methods), default=0)
    if not most:
        raise ValueError("no method has a result")
    rivals = [each for each in methods if len(each.val) == most]
    words = _Words(metric, less_is_better)
    ranked = sorted(rivals, key=lambda each: -_mean(list(each.val.values())))
    best = ranked[0]
    tied = list(itertools.takewhile(lambda each: each is best or not _is_below(each, best), ranked))
    chosen = next(each for each in rivals if each in tied)
    named = {each.method: each for each in rivals}
    local, common = named.get(FLOOR), named.get(COMMON)
    if len(rivals) == 1:
        test = Interval.of(list(chosen.test.values()))
        sentence = f"{chosen.method}: nothing else could be compared"
        against = None
    elif chosen is local:
        against = (
            best
            if best is not local
            else max((each for each in rivals if each is not local), key=lambda each: _mean(list(each.val.values())))
        )
        test = difference(chosen.test, against.test)
        shown = difference(against.test, chosen.test)
        sentence = (
            f"stay local: federation adds nothing that can be seen here ({words.than(against.method, FLOOR, shown)})"
        )
    else:
        simple = [each for each in (common, local) if each is not None and each is not chosen]
        against = max(
            simple, key=lambda each: _mean(list(each.val.values())), default=None
        )  # whichever is harder to beat
        test = difference(chosen.test, against.test) if against else Interval.of(list(chosen.test.values()))
        sentence = ""
        if chosen is common:
            others = [each for each in rivals if each not in (common, local)]
            sentence = "nothing is clearly better than FedAvg: take FedAvg" if others else "take FedAvg"
            sentence += f" ({words.than(chosen.method, FLOOR, test)})" if against else ""
        elif against is not None:
            sentence = f"{words.than(chosen.method, against.method, test)}{_bytes(chosen, against)}"
        else:
            sentence = f"{chosen.method}: the simplest of those that tie"
    notes = []
    if not has_new_seeds:
        notes.append(
            "The budget ended before all finalists were trained with a new seed: the numbers are validation's of the "
            "seed of the search, which chose the settings, too, so they are optimistic. A larger --budget goes on."
        )
    elif not words.has_test:
        notes.append("There are no test examples: the numbers are validation's, which decided, too.")
    notes += _notes(chosen, against, best, test, words, num_rounds)
    notes += [
        f"{each.method} {'has not all results' if each.method == CEILING else 'is out'}: {len(each.errors)} of its "
        f"{_counted(len(each.val) + len(each.errors))} failed, first with {each.errors[0]}."
        for each in standings
        if len(each.val) < most and each.errors
    ]
    return Verdict(
        method=chosen.method, against=against.method if against else "", test=test, sentence=sentence, notes=notes
    )


def _is_below(one: Standing, best: Standing) -> bool:
    """Whether a method is no tie with the best; with fewer than three seeds its mean alone says so."""
    gap_S = _gaps(best.val, one.val)
    error = statistics.stdev(gap_S) / math.sqrt(len(gap_S)) if len(gap_S) >= FEWEST_SEEDS else 0.0
    return _mean(gap_S) > error


def _notes(
    chosen: Standing, against: Standing | None, best: Standing, test: Interval, words: "_Words", num_rounds: int
) -> list[str]:
    notes = []
    if (seeds := len(chosen.val)) < FEWEST_SEEDS:
        notes.append(
            f"With {_counted(seeds)} alone nothing can be told apart: give a larger --budget, or more --seeds."
        )
    if best is not chosen and (gap := difference(best.val, chosen.val)).mean > 0:
        notes.append(
            f"On validation {words.than(best.method, chosen.method, gap)}: that is less than its standard error, and "
            f"{chosen.method} is the simpler one."
        )
    if against is not None and chosen.method == FLOOR and test.high < 0:
        notes.append("Validation decided: on test examples the difference can be seen.")
    compared = [each for each in (chosen, against) if each is not None]
    if against is not None and chosen.method != FLOOR and not test.is_clear and test.seeds >= FEWEST_SEEDS:
        gap = difference(chosen.val, against.val)
        if gap.is_clear:
            notes.append(
                f"Validation decided ({words.than(chosen.method, against.method, gap)}); on test examples the "
                "difference cannot be seen."
            )
        else:
            notes.append(
                f"{chosen.method} is likelier to be better, no more: neither on validation nor on test examples does "
                "the interval leave out zero."
                if words.has_test
                else f"{chosen.method} is likelier to be better, no more: zero is in the interval."
            )
    if rising := [each.method for each in compared if each.is_rising]:
        notes.append(
            f"{' and '.join(rising)} {'was' if len(rising) == 1 else 'were'} still rising after "
            f"{count(num_rounds, 'round')}: this is how it stands so far, and more rounds (--trainer.num_rounds) may "
            "change it."
        )
    return notes


def _bytes(chosen: Standing, against: Standing) -> str:
    """How much is sent, beside what the other sends."""
    if not (math.isfinite(chosen.sent) and math.isfinite(against.sent)):
        return ""
    if not against.sent:
        return f", {size(chosen.sent)} in a run"
    ratio = chosen.sent / against.sent
    for value, word in ((1.0, "the same bytes"), (2.0, "twice the bytes"), (0.5, "half the bytes")):
        if abs(ratio / value - 1) < 0.05:
            return f", {word}"
    return f", {ratio:.2g} times the bytes"


@dataclass(frozen=True)
class _Words:
    """Differences in words.

    Attributes:
        metric: Name of the metric.
        less_is_better: Whether it is an error.
    """

    metric: str
    less_is_better: bool

    @property
    def has_test(self) -> bool:
        """Whether it is of test examples."""
        return "test/" in self.metric

    @property
    def in_points(self) -> bool:
        """Whether it is a share, whose differences are told in points; the scale of others is not known."""
        return direction_of(self.metric) == "max"

    def than(self, one: str, other: str, gap: Interval) -> str:
        """How one stands to another."""
        if not gap.seeds:
            return f"{one} and {other} have {self.metric} of no seed in common"
        if self.in_points:
            way = "above" if gap.mean >= 0 else "below"
            text = f"{one}: {self._value(abs(gap.mean))} points {way} {other}"
        else:
            way = "lower" if (gap.mean >= 0) == self.less_is_better else "higher"
            text = f"{one}: {self.metric} {self._value(abs(gap.mean))} {way} than {other}"
        seeds = _counted(gap.seeds)
        if gap.seeds < FEWEST_SEEDS:
            return f"{text}, {seeds}"
        low, high = (gap.low, gap.high) if gap.mean >= 0 else (-gap.high, -gap.low)
        return f"{text}, 95 % interval {self._value(low)} to {self._value(high)}, {seeds}"

    def _value(self, value: float) -> str:
        if self.in_points:
            return f"{100 * value:.1f}".replace("-", "−")
        return f"{'−' if value < 0 else ''}{number(abs(value))}"


def _counted(seeds: int) -> str:
    word = _WORDS[seeds] if seeds < len(_WORDS) else str(seeds)
    return f"{word} seed{'' if seeds == 1 else 's'}"
