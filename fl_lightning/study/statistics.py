"""Whether differences are significant: paired tests, average ranks, wins, ties and losses.

Metrics are paired by case and seed: a seed draws partition, split and initialization, alike for every method. Seeds of
a case are compared by the paired t-test (five pairs are too few for a rank test to reject anything), cases by the
Wilcoxon signed-rank test of their means and by Friedman's with Nemenyi's (Demšar, "Statistical comparisons of
classifiers over multiple data sets", JMLR 2006). Cases without any difference are left out of the former, as Wilcoxon
does; Demšar divides their ranks. Several tests that are read together are corrected by Holm's method.
A comparison is unfinished where most runs of either method were still rising: neither is then called above or below.
"""

import gc
import itertools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import scipy.stats
from numpy.typing import NDArray

from fl_lightning.run.curve import STILL_RISING
from fl_lightning.study.column import counts_errors, sign_of
from fl_lightning.study.marks import marked_pairs

#: Differences with a smaller corrected p-value are called differences.
LEVEL = 0.05
#: Fewer pairs are not tested.
FEWEST_PAIRS = 3
_TESTED = ("difference", "p", "holm", "verdict")
ABOVE, BELOW, SAME, UNTESTED = "above", "below", "not distinguishable", "too few runs to test"
#: Over cases.
FEW_CASES = "too few cases to test"
#: In place of above and below.
UNFINISHED = "unfinished"


def best_baselines(table: pd.DataFrame, baselines: Sequence[str], metric: str = "test") -> dict[str, str]:
    """The baseline of every case that is best on validation, mean over its seeds, among those that have a metric."""
    known = table[table["method"].isin(baselines) & table["val"].notna() & table[metric].notna()]
    result: dict[str, str] = {}
    for case, rows in known.groupby("case", sort=False):
        means = rows.groupby("method", sort=False)["val"].mean() * sign_of(rows)
        result[str(case)] = str(means.idxmax())
    return result


def against_baselines(table: pd.DataFrame, baselines: Sequence[str], metric: str = "test") -> pd.DataFrame:
    """Every method against the best simple baseline of the case, over the seeds that both have.

    Returns:
        A row for each case and method: ``metric``, ``is_error``, ``baseline``, ``pairs``, ``difference`` (in the
        metric's unit, positive where the method is better), ``p`` of the paired t-test, ``holm`` (corrected over the
        methods of the case), ``verdict``, and whether the comparison is ``unfinished``.
    """
    result, rising = [], marked_pairs(table, STILL_RISING)
    for case, baseline in best_baselines(table, baselines, metric).items():
        values, of_case = by_seed(table, case, metric), table[(table["case"] == case) & table[metric].notna()]
        rows = []
        for method in values.columns.drop(baseline):
            gain_S = (values[method] - values[baseline]).dropna().to_numpy()
            rows.append(
                {
                    "case": case,
                    "method": method,
                    "metric": str(of_case["metric"].iloc[0]),
                    "is_error": counts_errors(of_case, metric),
                    "baseline": baseline,
                    "pairs": len(gain_S),
                    "unfinished": not rising.isdisjoint({(method, case), (baseline, case)}),
                    "difference": float(gain_S.mean()) if len(gain_S) else np.nan,
                    "p": paired_p(gain_S),
                }
            )
        holm = corrected([row["p"] for row in rows])
        result += [
            {**row, "holm": p, "verdict": verdict(row["difference"], p, unfinished=row["unfinished"])}
            for row, p in zip(rows, holm, strict=True)
        ]
    columns = ["case", "method", "metric", "is_error", "baseline", "pairs", "unfinished", *_TESTED]
    return pd.DataFrame(result, columns=columns)


def over_cases(comparisons: pd.DataFrame) -> pd.DataFrame:
    """Every method against the best simple baselines over all its cases: the Wilcoxon signed-rank test of the means.

    Args:
        comparisons: Of :func:`against_baselines`, of one metric.

    Returns:
        A row for each method: ``cases``, how many of them are ``unfinished``, mean ``difference``, ``p``, ``holm``
        (corrected over the methods) and ``verdict``: above or below only if the finished cases alone say so, too, and
        :data:`FEW_CASES` where so few cases could have no other p-value.
    """
    known = comparisons.dropna(subset="difference")
    whole, finished = _wilcoxon(known), _wilcoxon(known[~known["unfinished"].astype(bool)])
    rows = []
    for method, row in whole.items():
        number = int(known.loc[known["method"] == method, "unfinished"].sum())
        word = row["verdict"]
        if word in (ABOVE, BELOW) and number and finished.get(method, {}).get("verdict") != word:
            word = UNFINISHED
        rows.append({"method": method, "unfinished": number, **row, "verdict": word})
    return pd.DataFrame(rows, columns=["method", "cases", "unfinished", *_TESTED])


def _wilcoxon(comparisons: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Cases, mean difference, p, corrected p and verdict of each method."""
    rows: dict[str, dict[str, Any]] = {}
    least, ways = {}, {}
    for method, result in comparisons.groupby("method", sort=False):
        gain_K = result["difference"].to_numpy()
        p = np.nan
        number = np.count_nonzero(gain_K)  # of the others the test knows nothing
        if len(gain_K) >= FEWEST_PAIRS:
            p = float(scipy.stats.wilcoxon(gain_K, zero_method="wilcox").pvalue) if number else 1.0
        rows[str(method)] = {"cases": len(gain_K), "difference": float(gain_K.mean()), "p": p}
        ways[str(method)] = float(np.sign(gain_K) @ scipy.stats.rankdata(np.abs(gain_K)))  # a mean may go the other way
        least[str(method)] = np.nan if np.isnan(p) else 2.0 ** (1 - (number or len(gain_K)))  # if all have one sign
    holm = corrected([row["p"] for row in rows.values()])
    for (method, row), p, lowest in zip(rows.items(), holm, corrected(least.values()), strict=True):
        row |= {"holm": p, "verdict": verdict(ways[method], p) if lowest < LEVEL else FEW_CASES}
    return rows


def case_means(table: pd.DataFrame, metric: str = "test") -> pd.DataFrame:
    """Mean over seeds, cases × methods, more being better, of the cases and methods that have no gap.

    Methods that lack more cases than half are left out; of the others those that lack the most, and the cases that any
    of the rest lacks, so that as many metrics as possible remain.
    """
    known = table[table[metric].notna()]
    signs = {case: sign_of(rows, metric) for case, rows in known.groupby("case", sort=False)}
    signed = table.assign(value=table[metric].astype(float) * table["case"].map(signs))
    means = signed.pivot_table(index="case", columns="method", values="value", sort=False)
    count = means.notna().sum()
    fewest = sorted({number for number in count if number * 2 > len(means)}, reverse=True)
    return max(
        (means.loc[:, count >= number].dropna() for number in fewest), key=lambda each: each.size, default=means[:0]
    )


def panel_means(table: pd.DataFrame, panels: Mapping[str, str], metric: str = "test") -> dict[str, pd.DataFrame]:
    """The means of the cases of each panel, and of all under an empty name where there are several.

    Args:
        table: The tidy table.
        panels: The panel of every case.
        metric: A column of the table.
    """
    names = list(dict.fromkeys(panels[case] for case in dict.fromkeys(table["case"])))
    result = {name: table[table["case"].map(panels) == name] for name in names} if len(names) > 1 else {}
    means = {name: case_means(rows, metric) for name, rows in {**result, "": table}.items()}
    return {name: each for name, each in means.items() if each.shape[0] > 1 and each.shape[1] > 1}


def average_ranks(means: pd.DataFrame) -> "pd.Series[float]":
    """The average rank of each method over the cases, 1 for the best; ties share."""
    ranks: pd.Series[float] = means.rank(axis=1, ascending=False).mean().sort_values()
    return ranks


def friedman_p(means: pd.DataFrame) -> float:
    """P-value of Friedman's test that all methods are equal; nan with fewer than three methods or cases."""
    if means.shape[1] < 3 or means.shape[0] < 3:
        return float("nan")
    return float(scipy.stats.friedmanchisquare(*(means[method] for method in means.columns)).pvalue)


def nemenyi(means: pd.DataFrame) -> pd.DataFrame:
    """P-values of Nemenyi's test of every pair of methods, methods × methods.

    Raises:
        ModuleNotFoundError: ``scikit-posthocs`` is not installed.
    """
    import scikit_posthocs

    return scikit_posthocs.posthoc_nemenyi_friedman(means)


def wins_ties_losses(table: pd.DataFrame, metric: str = "test") -> pd.DataFrame:
    """Of the method of a row against that of a column: cases above / not distinguishable / below, as text.

    Seeds of a case are compared by the paired t-test, corrected over the cases of a pair of methods. Unfinished cases
    that would be above or below are counted behind them.
    """
    rising = marked_pairs(table, STILL_RISING)
    methods = list(dict.fromkeys(table["method"]))
    values = {case: by_seed(table, case, metric) for case in dict.fromkeys(table["case"])}
    shown = pd.DataFrame("", index=methods, columns=methods)
    for first, second in itertools.combinations(methods, 2):
        pairs = {case: result for case, result in values.items() if {first, second} <= set(result.columns)}
        gains = {case: (result[first] - result[second]).dropna().to_numpy() for case, result in pairs.items()}
        gains = {case: gain_S for case, gain_S in gains.items() if len(gain_S) >= FEWEST_PAIRS}
        if not gains:
            continue
        holm = corrected([paired_p(gain_S) for gain_S in gains.values()])
        words = [
            verdict(float(gain_S.mean()), p, unfinished=not rising.isdisjoint({(first, case), (second, case)}))
            for (case, gain_S), p in zip(gains.items(), holm, strict=True)
        ]
        above, same, below = (str(words.count(word)) for word in (ABOVE, SAME, BELOW))
        open_cases = f" ({words.count(UNFINISHED)} unfinished)" if UNFINISHED in words else ""
        shown.loc[first, second] = f"{above}/{same}/{below}{open_cases}"
        shown.loc[second, first] = f"{below}/{same}/{above}{open_cases}"
    return shown


# ---------------------------------------------------------------- one test


def paired_p(difference_S: NDArray[np.float64]) -> float:
    """The paired t-test's p-value; nan with too few pairs, 1 if there is no difference at all."""
    if len(difference_S) < FEWEST_PAIRS:
        return float("nan")
    if not np.any(difference_S):
        return 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # if all differences are equal the p-value is 0
        return float(scipy.stats.ttest_1samp(difference_S, 0.0).pvalue)


def corrected(p_values: Iterable[float]) -> list[float]:
    """Holm's correction of those that are no nan.

    Raises:
        ModuleNotFoundError: ``statsmodels`` is not installed.
    """
    from statsmodels.stats.multitest import multipletests

    p_T = np.array(list(p_values), dtype=float)
    tested_T = ~np.isnan(p_T)
    if tested_T.any():
        gc.freeze()  # multipletests collects garbage at every call: 0.1 s with all that is imported
        try:
            p_T[tested_T] = multipletests(p_T[tested_T], alpha=LEVEL, method="holm")[1]
        finally:
            gc.unfreeze()
    return [float(p) for p in p_T]


def verdict(difference: float, p: float, *, unfinished: bool = False) -> str:
    """The word for a tested difference, which is neither above nor below where the comparison is unfinished.

    Example:
        >>> verdict(0.02, 0.01), verdict(0.02, 0.2), verdict(-0.02, 0.01)
        ('above', 'not distinguishable', 'below')
    """
    if np.isnan(p):
        return UNTESTED
    if p >= LEVEL:
        return SAME
    if unfinished:
        return UNFINISHED
    return ABOVE if difference > 0 else BELOW


def by_seed(table: pd.DataFrame, case: str, metric: str) -> pd.DataFrame:
    """Seeds × methods of a case, more being better."""
    rows = table[(table["case"] == case) & table[metric].notna()]
    sign = sign_of(rows, metric) if len(rows) else 1.0
    return rows.pivot_table(index="seed", columns="method", values=metric, sort=False) * sign
