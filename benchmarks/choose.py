"""How far the choice of ``fl-train choose`` is from the best method, in 15 cases of the leaderboards.

    .venv/bin/python benchmarks/choose.py run [--workers 2] [--minutes 60] [--cases Cora-10 ...] [--budgets 10]
    .venv/bin/python benchmarks/choose.py render

``run`` trains what is missing below ``--folder``, one training or choice in each of ``--workers`` processes of one
thread, and stops after so many ``--minutes``; the same command goes on. In each case:

- a choice among all default candidates by the command's own search, on seeds that no study reports: ``--budget 10runs
  --seeds 1``, then ``--budget 20runs --seeds 3``; a run has 99 rounds (180 in C), which nine divides as halving does;
- the reference: the level of every candidate, from tuned cells of the leaderboards (seeds 0 to 4, in B 0 to 2), in the
  table to convergence where that has the pair. What the leaderboards lack, or had not finished (``reference`` in
  benchmarks/choose.yaml), is trained on seeds 0 and 1 until validation stops improving; its level is that of another
  method plus the mean difference of the two, paired over these seeds. For TwinScaffold the runs of
  ``studies/twin.yaml`` are used so where it has the case.

The distance of a method is by how much its level is below that of the best; a choice has that of the method that it
names. ``render`` writes benchmarks/results/choose.json from the folder, and choose.md.
"""

import argparse
import functools
import json
import os
import re
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

from fl_lightning.study.schema import read_yaml

ROOT = Path(__file__).parents[1]
FOUND = ROOT / "benchmarks" / "results" / "choose.json"
STUDIES = ROOT / "studies" / "results"
#: Later ones count where they have at least three seeds of a pair.
TABLES = ("leaderboard_a", "leaderboard_b", "leaderboard_c", "convergence_a", "convergence_b", "convergence_c")
#: Of what is trained for the reference; the choices have 200 (200 to 202 for finalists, 1200 for the search).
SEEDS = (0, 1)
CHOICE_SEED = 200
#: Budgets in runs, and how many seeds of the finalists they have.
BUDGETS = {10: 1, 20: 3}
#: The default candidates of ``fl-train choose`` without the ceiling.
METHODS = ("SCAFFOLD", "FedAvg", "FedOpt", "TwinScaffold", "SheafRidge", "Ditto", "FedPer", "Local", "PFedMe")
#: What one would do without choosing.
ALWAYS = ("FedAvg", "SCAFFOLD", "FedOpt")
RANDOM = "at random"

Settings = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A case of a leaderboard.

    Attributes:
        config: Configuration file.
        settings: Of every run, after it.
        num_rounds: Of a run of the choice.
        tuned: Settings of what is trained for the reference: the learning rate that tuning chose most often.
        reference: What is trained for it: a method, and the method whose level it is compared with.
        beside: What TwinScaffold is compared with where ``studies/twin.yaml`` has it.
        until: Patience and most rounds of it.
    """

    config: str
    settings: Settings
    num_rounds: int = 99
    tuned: Settings
    reference: Mapping[str, str] = field(default_factory=dict)
    beside: str = "SCAFFOLD"
    until: Mapping[str, int] = field(default_factory=lambda: {"patience": 50, "at_most": 400})


CASES = {name: Case(**content) for name, content in read_yaml(ROOT / "benchmarks" / "choose.yaml").items()}


# ---------------------------------------------------------------- one training, one choice


def _words(settings: Settings) -> list[str]:
    return [f"--{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in settings.items()]


def arguments_of(name: str, method: str, seed: int) -> list[str]:
    """Of ``fl-train``, for a run of the reference."""
    case = CASES[name]
    patience = -(-case.until["patience"] // int(case.settings.get("trainer.evaluate_every", 1)))  # in evaluations
    stop = {"class_path": "fl_lightning.callbacks.EarlyStopping", "init_args": {"patience": patience}}
    settings = {
        **case.settings,
        "strategy": method,
        **case.tuned,
        "trainer.num_rounds": case.until["at_most"],
        "trainer.callbacks": [stop],
        "trainer.accelerator": "cpu",
        "data.seed": seed,
        "seed_everything": seed,
    }
    return ["fit", f"--config={case.config}", *_words(settings)]


def train(name: str, method: str, seed: int, path: Path) -> str:
    """Train a run of the reference and write what it came to."""
    from fl_lightning.study.worker import train as trained

    found = trained([*arguments_of(name, method, seed), "--trainer.logger=false"], path.parent / "scratch")
    kept = ("error", "result", "marks", "num_rounds", "cpu_seconds", "partition")
    return _write(path, {key: found[key] for key in kept if key in found})


def choose(name: str, budget: int, path: Path) -> str:
    """Choose for so many runs, in the folder of all budgets of the case, and write what was found."""
    from fl_lightning.choice.asking import answer_of
    from fl_lightning.choice.candidates import WrongChoice
    from fl_lightning.choice.preparation import Asked

    case = CASES[name]
    settings = {
        **case.settings,
        "trainer.num_rounds": case.num_rounds,
        "trainer.accelerator": "cpu",
        "seed_everything": CHOICE_SEED,
    }
    asked = Asked(
        config=[case.config],
        overrides=_words(settings),
        budget=f"{budget}runs",
        seeds=BUDGETS[budget],
        processes=1,
        folder=path.parent / "search",
    )
    try:
        answer = answer_of(asked, functools.partial(print, f"{name}:", flush=True))
    except WrongChoice as error:
        return _write(path, {"error": str(error)})
    found = {
        "error": "",
        "method": answer.method,
        "settings": answer.settings,
        "sentence": answer.sentence,
        "notes": answer.notes,
        "taken": answer.found.taken / case.num_rounds,
        "left_out": answer.found.left_out,
        "finalists": {
            each.method: {"val": list(each.val.values()), "test": list(each.test.values())} for each in answer.standings
        },
    }
    return _write(path, found)


def _write(path: Path, content: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(content))
    temporary.replace(path)
    return str(path)


# ---------------------------------------------------------------- all of them


def tasks(folder: Path, names: Sequence[str], budgets: Sequence[int]) -> Iterator[tuple[Any, ...]]:
    """What is missing: the choices of the smallest budget, the reference by seeds, and the other choices."""
    for budget in sorted(budgets)[:1]:
        yield from _choices(folder, names, budget)
    for seed in SEEDS:
        for name in names:
            for method in CASES[name].reference:
                if not (path := folder / _slug(name) / f"{method}-{seed}.json").exists():
                    yield train, name, method, seed, path
    for budget in sorted(budgets)[1:]:
        yield from _choices(folder, names, budget)


def _choices(folder: Path, names: Sequence[str], budget: int) -> Iterator[tuple[Any, ...]]:
    for name in names:
        if not (path := folder / _slug(name) / f"choice-{budget}.json").exists():
            yield choose, name, budget, path


def _slug(name: str) -> str:
    return re.sub(r"[^\w-]+", "-", name)


def run(missing: Iterable[tuple[Any, ...]], workers: int, minutes: float) -> None:
    """Do what is missing."""
    end = time.monotonic() + 60 * minutes
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_begin) as pool:
        todo: set[Future[str]] = {pool.submit(*task) for task in missing}
        print(f"{len(todo)} to do", flush=True)
        while todo:
            done, todo = wait(todo, timeout=max(0.0, end - time.monotonic()), return_when=FIRST_COMPLETED)
            for future in done:
                print(f"{len(todo)} left: {future.exception() or future.result()}", flush=True)
            if not done:
                print(f"time is over, {len(todo)} are missing: the same command goes on", flush=True)
                pool.shutdown(wait=False, cancel_futures=True)
                for process in active_children():
                    process.kill()
                break


def _begin() -> None:
    import torch

    os.chdir(ROOT)
    torch.set_num_threads(1)


# ---------------------------------------------------------------- the page


def collected(folder: Path) -> dict[str, Any]:
    """By case: the choices, and the level of each method in percent; what the folder lacks is kept from before."""
    before = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    cells = {name: of_study(name) for name in (*TABLES, "twin")}
    result: dict[str, Any] = {}
    for name, case in CASES.items():
        at = folder / _slug(name)
        files = {str(budget): at / f"choice-{budget}.json" for budget in BUDGETS}
        choices = before.get(name, {}).get("choices", {})
        choices |= {budget: json.loads(file.read_text()) for budget, file in files.items() if file.exists()}
        table: dict[str, dict[int, tuple[float, bool]]] = {}
        for study in TABLES:
            for method, runs in cells[study].get(name, {}).items():
                if method in METHODS and (method not in table or len(runs) >= 3):
                    table[method] = runs
        levels = {method: _level(runs) for method, runs in table.items()}
        twin = cells["twin"].get(name, {})
        for method, beside in {"TwinScaffold": case.beside, **case.reference}.items():
            own = {seed: at / f"{method}-{seed}.json" for seed in SEEDS}
            trained = {seed: _of(json.loads(file.read_text())) for seed, file in own.items() if file.exists()}
            runs, base = (trained, table[beside]) if method in case.reference else (twin[method], twin[beside])
            if gains := [runs[seed][0] - base[seed][0] for seed in runs if seed in base]:
                acc, rising = levels[beside]["acc"] + statistics.fmean(gains), any(each[1] for each in runs.values())
                levels[method] = {"acc": acc, "seeds": len(gains), "rising": rising, "beside": beside}
            elif earlier := before.get(name, {}).get("levels", {}).get(method):
                levels[method] = earlier
        result[name] = {"choices": choices, "levels": levels}
    return result


def of_study(name: str) -> dict[str, dict[str, dict[int, tuple[float, bool]]]]:
    """Test accuracy in percent, and whether it was still rising, by case, method and seed."""
    result: dict[str, dict[str, dict[int, tuple[float, bool]]]] = {}
    file = STUDIES / name / "runs.jsonl"
    for line in file.read_text().splitlines() if file.exists() else ():
        record = json.loads(line)
        if record["purpose"] == "report" and not record["error"] and "test/acc" in record["result"]:
            method = {"pFedMe": "PFedMe"}.get(record["method"], record["method"])
            result.setdefault(record["case"], {}).setdefault(method, {})[record["seed"]] = _of(record)
    return result


def _of(record: Mapping[str, Any]) -> tuple[float, bool]:
    is_late = record["result"]["best_round"] >= 0.9 * record["num_rounds"] - 1  # what older records tell
    is_rising = "still_rising" in record["marks"] if "marks" in record else is_late
    return 100 * record["result"]["test/acc"], is_rising


def _level(runs: Mapping[int, tuple[float, bool]]) -> dict[str, Any]:
    values = list(runs.values())
    rising = sum(each[1] for each in values) > len(values) / 2
    return {"acc": statistics.fmean(each[0] for each in values), "seeds": len(values), "rising": rising}


def distances(levels: Mapping[str, Any]) -> dict[str, float]:
    """Points by which each method is behind the best one."""
    best = max(each["acc"] for each in levels.values())
    return {name: best - each["acc"] for name, each in levels.items()}


def page(found: Mapping[str, Any]) -> str:
    """The page of results."""
    first, *larger = BUDGETS
    rows, rest = [], []
    columns: dict[str, list[float]] = {each: [] for each in ("choice", *ALWAYS, RANDOM)}
    always: dict[str, list[float]] = {}
    for name, content in found.items():
        levels, chosen = content["levels"], _method(content, first)
        if not {chosen, *ALWAYS} <= set(levels):
            rest.append(name)
            continue
        behind = distances(levels)
        best = min(behind, key=lambda method: behind[method])
        row = {"choice": behind[chosen], **{each: behind[each] for each in ALWAYS}}
        row[RANDOM] = statistics.fmean(behind.values())
        for each, value in row.items():
            columns[each].append(value)
        for method, value in behind.items():
            always.setdefault(method, []).append(value)
        rows.append([name, f"{best} {levels[best]['acc']:.1f}", chosen, *(f"{value:.1f}" for value in row.values())])
    for word, function in (("mean", statistics.fmean), ("largest", max)):
        rows.append([f"**{word}**", "", "", *(f"**{function(values):.1f}**" for values in columns.values() if values)])
    others = sorted((statistics.fmean(values), method) for method, values in always.items())
    lines = [
        "# How far the choice is from the best method",
        "",
        f"Of {len(columns[RANDOM])} cases: by how many points of test accuracy a method is behind the best candidate "
        "in the leaderboards, whose seeds chose nothing. `fl-train choose` tries its default candidates for the cost "
        f"of {first} runs, each of {CASES['Cora-10'].num_rounds} rounds ({CASES['FL60'].num_rounds} where clients hold "
        "examples), with one new seed of the finalists. At random: the mean over candidates. "
        "`python benchmarks/choose.py run` and `render` make this page.",
        "",
        *_table(
            ["case", "best method", "choice", "its distance", *(f"always {each}" for each in ALWAYS), RANDOM], rows
        ),
        "",
        "Always the same method, over the cases in which the reference has it:",
        "",
        *_table(
            ["method", "cases", "mean", "largest"],
            [[each, str(len(always[each])), f"{mean:.1f}", f"{max(always[each]):.1f}"] for mean, each in others],
        ),
        "",
        *(line for budget in larger for line in _larger(found, first, budget)),
        *_facts(found),
    ]
    if rest:
        lines += [f"- Left out, since a choice or the reference is missing: {'; '.join(rest)}."]
    return "\n".join(lines) + "\n"


def _larger(found: Mapping[str, Any], first: int, budget: int) -> Iterator[str]:
    """The choices of a larger budget, which has more new seeds, beside those of the first."""
    rows: list[tuple[str, str, str, float, float]] = []
    for name, content in found.items():
        one, other = _method(content, first), _method(content, budget)
        if {one, other} <= set(content["levels"]):
            behind = distances(content["levels"])
            rows.append((name, one, other, behind[one], behind[other]))
    if not rows:
        return
    yield f"With {BUDGETS[budget]} new seeds, for the cost of {budget} runs, where that was run:"
    yield ""
    shown = [[name, f"{one} {near:.1f}", f"{other} {far:.1f}"] for name, one, other, near, far in rows]
    for word, function in (("mean", statistics.fmean), ("largest", max)):
        ends = [function(each[3] for each in rows), function(each[4] for each in rows)]
        shown.append([f"**{word}**", *(f"**{value:.1f}**" for value in ends)])
    yield from _table(["case", f"choice for {first} runs", f"choice for {budget} runs"], shown)
    yield ""


def _method(content: Mapping[str, Any], budget: int) -> str:
    """What was chosen; empty if nothing was."""
    return str(content["choices"].get(str(budget), {}).get("method", ""))


def _facts(found: Mapping[str, Any]) -> Iterator[str]:
    """Costs, and what of the reference is not finished or from another study."""
    for budget in map(str, BUDGETS):
        done = [each["choices"][budget] for each in found.values() if each["choices"].get(budget, {}).get("method")]
        if done:
            taken = [each["taken"] for each in done]
            yield f"- The budget of {budget} runs: {min(taken):.1f} to {max(taken):.1f} were trained."
    paired = [level for each in found.values() for level in each["levels"].values() if "beside" in level]
    rising = [
        f"{method} in {name}"
        for name, each in found.items()
        for method, level in each["levels"].items()
        if level["rising"] and "beside" not in level
    ]
    yield (
        f"- {len(paired)} levels are those of another method plus a difference, paired over the one or two seeds that "
        "both have: of TwinScaffold, which the leaderboards lack."
    )
    yield f"- Still rising in the leaderboards, so that their levels are too low: {', '.join(rising) or 'none'}."


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for cells in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Run or render."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["run", "render"])
    parser.add_argument("--folder", type=Path, default=ROOT / "choices" / "benchmark")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--budgets", nargs="+", type=int, choices=list(BUDGETS), default=list(BUDGETS))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e6)
    options = parser.parse_args()
    if options.verb == "run":
        os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        run(tasks(options.folder.resolve(), options.cases, options.budgets), options.workers, options.minutes)
        return
    found = collected(options.folder.resolve())
    FOUND.write_text(json.dumps(found, indent=1) + "\n")
    FOUND.with_suffix(".md").write_text(page(found))


if __name__ == "__main__":
    main()
