"""The report of a study: tables, tests and pictures in one Markdown file that a command rewrites."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from fl_lightning.counts import count
from fl_lightning.files import whole_file
from fl_lightning.run.curve import STILL_RISING
from fl_lightning.study import statistics
from fl_lightning.study.column import counts_errors, scale_in, scale_of
from fl_lightning.study.definition import Study
from fl_lightning.study.distance import distances
from fl_lightning.study.edge import Point
from fl_lightning.study.marks import legend, marked_pairs, with_signs
from fl_lightning.study.pictures import draw
from fl_lightning.study.progress import Progress
from fl_lightning.study.room import room, with_shares
from fl_lightning.study.runs import argument
from fl_lightning.study.schema import Settings
from fl_lightning.study.store import Store
from fl_lightning.study.table import (
    by_round,
    further_metrics,
    leaderboard,
    markdown,
    near_the_end,
    on_current_data,
    tidy,
    units,
    what_it_lacks,
    what_was_run,
)
from fl_lightning.study.traffic import traffic

_SIGNS = {statistics.ABOVE: " ▲", statistics.BELOW: " ▼"}


def write_report(progress: Progress, table: pd.DataFrame) -> Path:
    """Write ``report.md`` and its pictures into the folder of the results."""
    study, folder = progress.study, progress.store.folder
    lacking, table, references = what_it_lacks(table), on_current_data(table), progress.ceilings
    ranked = _without(references, table)
    comparisons = statistics.against_baselines(ranked, study.baselines)
    shown = leaderboard(progress, table)
    parts = [f"# {study.title}", " ".join((_preamble(progress, table, shown), *lacking))]
    parts += ["## Test metrics", *_two_tables(progress, _leaderboard(progress, shown, table, comparisons))]
    if text := room(table, references):
        parts += ["## Room for methods", text]
    if study.distances:
        parts += ["## Distance to the best", distances(ranked, study.baselines[0])]
    if further := [f"**{words}**\n\n{_markdown(board)}" for words, board in further_metrics(progress, table)]:
        parts += ["## Further test metrics", *further]
    if (near := near_the_end(table, study)) is not None:
        parts += ["## Rounds to 95 % of the final validation score", _NEAR, _markdown(near)]
    if study.traffic is not None:
        parts += ["## What went over the wire", traffic(progress)]
    if any(case.paper for case in study.cases.values()):
        parts += ["## Beside the papers", _papers(progress, table)]
    for metric, result in comparisons.groupby("metric", sort=False):
        several = comparisons["metric"].nunique() > 1
        parts += [f"## Against the best simple baseline{f', {metric}' if several else ''}", _comparisons(result)]
    if means := statistics.panel_means(ranked, study.panels):
        parts += ["## Average ranks", _unfinished_in(ranked, means), _average_ranks(means)]
    matrix, rising = statistics.wins_ties_losses(ranked), bool(marked_pairs(ranked, STILL_RISING))
    if (matrix != "").any(axis=None):
        parts += [
            "## Wins, ties and losses",
            "Cases in which the row's method is above / not distinguishable from / below the column's"
            + (", and cases in which it would be above or below, but one of the two was still rising" if rising else "")
            + ".",
            markdown(matrix, "method"),
        ]
    for title, column in {
        "Spread over clients (standard deviation)": "test_std",
        "Worst client": "test_worst",
        "Attack success on benign clients": "test_asr",
        "Attack success on malicious clients": "malicious_test_asr",
        "Attack success on benign clients after simple tuning": "tuned_test_asr",
        "Attack success on malicious clients after simple tuning": "tuned_malicious_test_asr",
        "Validation": "val",
    }.items():
        if column in table:
            parts += [f"## {title}", _markdown(leaderboard(progress, table, column))]
    if means := statistics.panel_means(ranked, study.panels, "val"):
        parts += ["## Average ranks by validation", _average_ranks(means)]
    parts += ["## Other models of the same runs", _kinds(progress, table)]
    parts += _by_round(progress)
    if any(case.tuned_on or study.tuning.budget or study.tuning.study for case in study.cases.values()):
        parts += ["## Chosen settings", _choices(progress)]
    parts += [f"![{name}]({name})" for name in draw(progress, table, folder)]
    path = folder / "report.md"
    with whole_file(path) as temporary:
        temporary.write_text("\n\n".join(part for part in parts if part) + "\n")
    return path


def _without(references: Sequence[str], table: pd.DataFrame) -> pd.DataFrame:
    """The rows of the methods that compete."""
    return table[~table["method"].isin(references)]


def _preamble(progress: Progress, table: pd.DataFrame, shown: pd.DataFrame) -> str:
    study, tuning = progress.study, (progress.study.other or progress.study).tuning
    lines = [
        f"Mean ± standard deviation over seeds {', '.join(map(str, study.seeds))}; {units(table)}. Round and settings "
        "are chosen on validation. What is empty was not run.",
    ]
    if lacking := what_was_run(shown)[1]:
        lines.append(f"Of these nothing was run yet: {'; '.join(lacking)}.")
    if tuning.budget:
        seeds = ", ".join(map(str, tuning.seeds))
        on = f"seed {seeds}, which is" if len(tuning.seeds) == 1 else f"seeds {seeds}, which are"
        lines.append(f"Every method tried {count(tuning.budget, 'setting')} on the {on} not reported.")
        if tuning.beyond:
            most = "" if tuning.steps is None else f", for {count(tuning.steps, 'value')} at most"
            lines.append(
                f"Where the best has the smallest or the largest {' or '.join(tuning.beyond)}, the grid goes on as "
                f"long as that is better{most}{_untried(progress)}."
            )
            lines += _past_the_grid(progress)
    lines.append(
        f"`fl-train study run {_shown(study.path)}` makes what is missing, `fl-train study "
        "report` this file; every metric stands in `results.csv` with its command."
    )
    return " ".join(lines)


def _shown(path: Path) -> str:
    """A study's path relative to its repository, if it is in one; otherwise as given."""
    here = path.absolute()
    root = next((above for above in here.parents if (above / "pyproject.toml").is_file()), None)
    return str(here.relative_to(root) if root else path)


def _untried(progress: Progress) -> str:
    """Whose grid is not at its end yet."""
    source = progress.source
    open_at = [
        f"{method} on {case}"
        for method, case in source.tuned()
        if len(source.scores(trials := source.trials(method, case))) < len(trials)
        and source.choice(method, case) is not None
    ]
    return f", which is yet to be tried by {', '.join(open_at)}" if open_at else ""


def _past_the_grid(progress: Progress) -> list[str]:
    """How many settings were tried past the grid, by whom."""
    source = progress.source
    more = {
        f"{method} on {case}": len(source.scores(source.trials(method, case))) - len(source.grid(method, case))
        for method, case in source.tuned()
    }
    counted = [f"{name} {number}" for name, number in more.items() if number > 0]
    return [f"Settings past it that were tried so far: {', '.join(counted)}."] if counted else []


def _leaderboard(progress: Progress, shown: pd.DataFrame, table: pd.DataFrame, comparisons: pd.DataFrame) -> str:
    shown = with_shares(with_signs(shown, table), table, progress.ceilings)
    for row in comparisons.itertuples():
        shown.loc[row.method, row.case] += _SIGNS.get(row.verdict, "")
    best = statistics.best_baselines(_without(progress.ceilings, table), progress.study.baselines)
    for case, method in best.items():
        shown.loc[method, case] += " (best simple)"
    note = (
        "▲ above, ▼ below the simple baseline that validation ranks first (paired t-test over seeds, Holm over the "
        f"methods of a case, {statistics.LEVEL:g}); without a sign: not distinguishable from it, too few runs, or one "
        "of the two was still rising."
    )
    return "\n\n".join(filter(None, (_markdown(shown), note if best else "", legend(table))))


def _two_tables(progress: Progress, shown: str) -> list[str]:
    """The leaderboard, and beneath it that of the study to convergence if the study names one."""
    study = progress.study
    if study.convergence is None:
        return [shown]
    other = Study(study.path.parent / study.convergence)
    progress = Progress(other, Store(other.results))
    table = on_current_data(tidy(progress))
    parts = ["### The papers' protocol", shown, "### To convergence"]
    if not len(table):
        return [*parts, f"Nothing of `{_shown(other.path)}` was run yet."]
    comparisons = statistics.against_baselines(_without(progress.ceilings, table), other.baselines)
    return [*parts, _leaderboard(progress, leaderboard(progress, table), table, comparisons)]


_NEAR = (
    "After how many rounds validation was at 95 % of its best (of an error: at the best / 0.95), and how many MB had "
    "gone over the wire by then, where that was kept: medians over seeds. This is speed; the table above has the level."
)


def _unfinished_in(table: pd.DataFrame, means: Mapping[str, pd.DataFrame]) -> str:
    """How many of the ranked means are unfinished; empty for none."""
    largest = max(means.values(), key=lambda each: each.size)
    ranked = {(method, case) for method in largest.columns for case in largest.index}
    number = len(ranked & marked_pairs(table, STILL_RISING))
    return f"Of the {len(ranked)} means that are ranked {number} were still rising in most seeds." if number else ""


def _markdown(shown: pd.DataFrame) -> str:
    """Without the methods and cases of which nothing was run; the preamble names them."""
    return markdown(what_was_run(shown)[0], "method")


def _papers(progress: Progress, table: pd.DataFrame) -> str:
    """Methods by cases: ours, and in brackets what is printed."""
    cells: dict[str, dict[str, str]] = {}
    for case, settings in progress.study.cases.items():
        for method, printed in settings.paper.items():
            result = table[(table["case"] == case) & (table["method"] == method)]["test"].dropna()
            scale = scale_in(table[table["case"] == case]) if len(result) else 100.0
            ours = f"{scale * result.mean():.1f} " if len(result) else ""
            cells.setdefault(case, {})[method] = f"{ours}({printed})"
    return "Ours, and in brackets what is printed.\n\n" + markdown(pd.DataFrame(cells).fillna(""), "method")


def _comparisons(comparisons: pd.DataFrame) -> str:
    counts = comparisons.groupby("method", sort=False)["verdict"].value_counts().unstack(fill_value=0)
    overall = statistics.over_cases(comparisons).set_index("method")
    scale = scale_of(is_error=counts_errors(comparisons))
    shown = pd.DataFrame(index=overall.index)
    shown["cases"] = overall["cases"].astype(str)
    if overall["unfinished"].any():
        shown["unfinished"] = overall["unfinished"].astype(str)
    shown["mean difference"] = [f"{scale * value:+.1f}" for value in overall["difference"]]
    words = [statistics.ABOVE, statistics.SAME, statistics.BELOW, statistics.UNTESTED]
    for word in [*words, statistics.UNFINISHED] if statistics.UNFINISHED in counts else words:
        head = "above or below, but unfinished" if word == statistics.UNFINISHED else word
        shown[head] = [str(int(counts.get(word, pd.Series(dtype=int)).get(method, 0))) for method in overall.index]
    shown["p over cases (Wilcoxon, Holm)"] = ["" if np.isnan(p) else f"{p:.2g}" for p in overall["holm"]]
    shown["over all cases"] = overall["verdict"]
    return markdown(shown, "method")


def _average_ranks(means: Mapping[str, pd.DataFrame]) -> str:
    """A column for each panel, over the cases that all methods in it have."""
    columns = {
        name: f"{name or ('all' if len(means) > 1 else 'average rank')} ({len(result)} cases)"
        for name, result in means.items()
    }
    ranks = pd.DataFrame({columns[name]: statistics.average_ranks(result) for name, result in means.items()})
    ranks = ranks.sort_values(list(ranks.columns)[::-1])
    shown = ranks.map(lambda rank: "" if np.isnan(rank) else f"{rank:.2f}")
    tests = {columns[name]: statistics.friedman_p(result) for name, result in means.items()}
    summary = ", ".join(f"{p:.2g} in {name}" if len(means) > 1 else f"{p:.2g}" for name, p in tests.items() if p == p)
    test = f"Friedman's test that all are equal: p = {summary}.\n\n" if summary else ""
    return f"{test}{markdown(shown, 'method')}"


def _kinds(progress: Progress, table: pd.DataFrame) -> str:
    """Models before mixing, generated models, unseen clients: each at the round of its own best validation metric."""
    parts = []
    for metric in (name for name in table.columns if name.endswith("_test") and table[name].notna().any()):
        shown = leaderboard(progress, table[table[metric].notna()], metric)
        parts.append(f"{metric.removesuffix('_test')}\n\n{_markdown(shown)}")
    return "\n\n".join(parts)


def _by_round(progress: Progress) -> list[str]:
    """Metrics of every round other than scores and bytes, each with a heading and a table; means over seeds."""
    study, parts = progress.study, []
    metrics = [name for name in study.history if name.partition("/")[0] not in ("val", "test", "comm")]
    history = progress.store.history() if metrics else {}
    for metric in metrics:
        shown = pd.DataFrame("", index=list(study.methods), columns=list(study.cases))
        for method in study.methods:
            for case in study.cases_of(method):
                if (result := by_round(progress, history, method, case, ("round", metric))) is not None:
                    shown.loc[method, case] = _course(*result)
        parts += [f"## {metric}, first and last round", _markdown(shown)]
    return parts


def _course(round_R: np.ndarray, value_R: np.ndarray) -> str:
    """Where a metric begins and ends, and where it is highest if that is well above both."""
    ends = [float(value) for value in value_R[[0, -1]]]
    summary = " → ".join(f"{value:.2f}" if np.isfinite(value) else "undefined" for value in ends)
    if not np.isfinite(value_R).any():
        return summary
    highest = int(np.nanargmax(value_R))
    if value_R[highest] <= np.nanmax([*ends, -np.inf]) + 0.05:
        return summary
    return f"{summary} (highest {value_R[highest]:.2f} in round {round_R[highest]:.0f})"


def _choices(progress: Progress) -> str:
    study = progress.study
    cases = list(dict.fromkeys(case.tuned_on or name for name, case in study.cases.items()))
    shown = pd.DataFrame("", index=list(study.methods), columns=cases)
    for method, settings in study.methods.items():
        for name in study.cases_of(method):
            chosen, case = progress.choice(method, name), study.cases[name]
            final = settings.final if case.tuned_on else settings.final | case.final
            if chosen is not None and chosen.point[0]:
                shown.loc[method, case.tuned_on or name] = _trained(chosen.point, final)
    return _markdown(shown)


def _trained(point: Point, final: Settings) -> str:
    """A chosen setting as it is trained: by its label, or by its settings where others win over them.

    Example:
        >>> point = ("lr=0.1, decay=none", {"model.optimizer.lr": 0.1, "model.optimizer.weight_decay": 0.0})
        >>> _trained(point, {})
        'lr=0.1, decay=none'
        >>> _trained(point, {"model.optimizer.lr": 0.3, "model.net.dropout": 0.5})
        'lr=0.3, weight_decay=0.0'
    """
    label, chosen = point
    if not chosen.keys() & final.keys():
        return label
    trained = {name: final.get(name, value) for name, value in chosen.items()}
    return ", ".join(f"{name.rpartition('.')[2]}={argument(value)}" for name, value in trained.items())
