"""How far the choice of ``fl-train choose`` is from the best method: 15 cases of the leaderboards, for 10 and 20 runs.

    .venv/bin/python benchmarks/choose.py run [--workers 2] [--minutes 60] [--cases Cora-10 ...]
    .venv/bin/python benchmarks/choose.py render

``run`` trains what is missing below ``--folder``, one training or choice in each of ``--workers`` processes of one
thread, and stops after so many ``--minutes``; the same command goes on. In each case:

- a choice among all default candidates by the command's own search, on seeds that no study reports: ``--budget 10runs
  --seeds 1``, then ``--budget 20runs --seeds 3``; a run has 99 rounds (180 in C), which nine divides as halving does;
- the reference: every candidate but the ceiling to convergence on two seeds that did not choose, with the learning
  rate that tuning chose most often in the leaderboards and otherwise as in ``studies/twin.yaml``. What that study has
  is taken from it.

The distance of a method is by how much its test accuracy in the reference is below that of the best method there, mean
over seeds; a choice has the distance of the method that it names, and ``random`` the mean over all methods of the case.
``render`` writes benchmarks/results/choose.json from the folder, and choose.md.
"""

import argparse
import functools
import json
import os
import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

from fl_lightning.study.schema import read_yaml

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TWIN = ROOT / "studies" / "results" / "twin" / "runs.jsonl"
#: Of the reference, as in studies/twin.yaml; the choices have 200 (200 to 202 for finalists, 1200 for the search).
SEEDS = (100, 101)
CHOICE_SEED = 200
#: Budgets in runs, and how many seeds of the finalists they have.
BUDGETS = {10: 1, 20: 3}
#: The default candidates of ``fl-train choose`` without the ceiling.
METHODS = ("SCAFFOLD", "FedAvg", "FedOpt", "TwinScaffold", "SheafRidge", "Ditto", "FedPer", "Local", "PFedMe")
#: What one would do without choosing.
ALWAYS = ("FedAvg", "SCAFFOLD", "FedOpt")
#: Methods whose runs come last: the reference of a case may lack them, unless they were chosen, and then says so.
WEAK = ("FedPer", "Local", "PFedMe")
RANDOM = "random"

Settings = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A case of a leaderboard.

    Attributes:
        config: Configuration file.
        settings: Of every run, after it.
        num_rounds: Of a run of the choice.
        tuned: Settings of the reference: what tuning chose most often.
        methods: Settings of single methods in the reference.
        without: Methods that do not fit the net or the task.
        until: Patience and most rounds of the reference.
    """

    config: str
    settings: Settings
    num_rounds: int = 99
    tuned: Settings
    methods: Mapping[str, Settings] = field(default_factory=dict)
    without: Sequence[str] = ()
    until: Mapping[str, int] = field(default_factory=lambda: {"patience": 50, "at_most": 400})


def cases() -> dict[str, Case]:
    """By name."""
    return {name: Case(**content) for name, content in read_yaml(ROOT / "benchmarks" / "choose.yaml").items()}


CASES = cases()


# ---------------------------------------------------------------- one training, one choice


def _words(settings: Settings) -> list[str]:
    return [f"--{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in settings.items()]


def methods_of(case: Case) -> list[str]:
    """The methods of its reference."""
    return [name for name in METHODS if name not in case.without]


def arguments_of(name: str, method: str, seed: int) -> list[str]:
    """Of ``fl-train``, for a run of the reference."""
    case = CASES[name]
    patience = -(-case.until["patience"] // int(case.settings.get("trainer.evaluate_every", 1)))  # in evaluations
    stop = {"class_path": "fl_lightning.callbacks.EarlyStopping", "init_args": {"patience": patience}}
    settings = {
        **case.settings,
        "strategy": method,
        **case.tuned,
        **case.methods.get(method, {}),
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


def twin() -> dict[tuple[str, str, int], Any]:
    """Runs of ``studies/twin.yaml`` by case, method and seed."""
    records = [json.loads(line) for line in TWIN.read_text().splitlines()]
    return {
        (record["case"], record["method"], record["seed"]): record
        for record in records
        if record["purpose"] == "report" and not record["error"] and record["seed"] in SEEDS
    }


def tasks(folder: Path, names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """What is missing, what matters most first: the choices, then the reference with its first seed and its second."""
    known = twin()
    for budget in BUDGETS:
        for name in names:
            if not (path := folder / _slug(name) / f"choice-{budget}.json").exists():
                yield choose, name, budget, path
    for seed in SEEDS:
        for method in METHODS:
            for name in names:
                path = folder / _slug(name) / f"{method}-{seed}.json"
                if method in methods_of(CASES[name]) and (name, method, seed) not in known and not path.exists():
                    yield train, name, method, seed, path


def _slug(name: str) -> str:
    return re.sub(r"[^\w-]+", "-", name)


def run(folder: Path, names: Sequence[str], workers: int, minutes: float) -> None:
    """Do what is missing."""
    end = time.monotonic() + 60 * minutes
    context = get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_begin) as pool:
        todo: set[Future[str]] = {pool.submit(*task) for task in tasks(folder, names)}
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
    """By case: the choices, and test accuracy by method and seed, with where it is from."""
    known = twin()
    result: dict[str, Any] = {}
    for name, case in CASES.items():
        at = folder / _slug(name)
        files = {str(budget): at / f"choice-{budget}.json" for budget in BUDGETS}
        choices = {budget: json.loads(file.read_text()) for budget, file in files.items() if file.exists()}
        reference: dict[str, Any] = {}
        for method in methods_of(case):
            for seed in SEEDS:
                path, of_twin = at / f"{method}-{seed}.json", known.get((name, method, seed))
                record = of_twin or (json.loads(path.read_text()) if path.exists() else {"error": "missing"})
                if not record["error"]:
                    reference.setdefault(method, {})[str(seed)] = {
                        "acc": record["result"]["test/acc"],
                        "rounds": record["num_rounds"],
                        "marks": sorted(record["marks"]),
                        "of_twin": of_twin is not None,
                    }
        result[name] = {"choices": choices, "reference": reference}
    return result


def distances(reference: Mapping[str, Any], needed: Sequence[str]) -> dict[str, float]:
    """Points by which each method is behind the best one, mean over the seeds that all needed methods have.

    Returns:
        Those of the methods that have these seeds; nothing if there is no such seed.
    """
    seeds = set.intersection(*(set(reference.get(name, {})) for name in needed))
    if not seeds:
        return {}
    whole = {name: runs for name, runs in reference.items() if seeds <= set(runs)}
    mean = {name: 100 * statistics.fmean(runs[seed]["acc"] for seed in seeds) for name, runs in whole.items()}
    return {name: max(mean.values()) - value for name, value in mean.items()}


def page(found: Mapping[str, Any]) -> str:
    """The page of results."""
    rows, rest, absent = [], [], []
    columns: dict[str, list[float]] = {each: [] for each in (*map(str, BUDGETS), *ALWAYS, RANDOM)}
    always: dict[str, list[float]] = {}
    for name, content in found.items():
        chosen = {str(budget): _method(content, budget) for budget in BUDGETS}
        needed = [each for each in methods_of(CASES[name]) if each not in WEAK or each in chosen.values()]
        behind = distances(content["reference"], needed)
        if not behind or not all(chosen.values()):
            rest.append(name)
            continue
        if missing := [each for each in methods_of(CASES[name]) if each not in behind]:
            absent.append(f"{name}: {', '.join(missing)}")
        best = min(behind, key=lambda method: behind[method])
        row = {each: behind[method] for each, method in chosen.items()} | {each: behind[each] for each in ALWAYS}
        row[RANDOM] = statistics.fmean(behind.values())
        for each, value in row.items():
            columns[each].append(value)
        for method, value in behind.items():
            always.setdefault(method, []).append(value)
        cells = [f"{chosen[each]} {value:.1f}" if each in chosen else f"{value:.1f}" for each, value in row.items()]
        rows.append([name, f"{best} {_accuracy(content['reference'][best])}", *cells])
    number = len(rows)
    for word, function in (("mean", statistics.fmean), ("largest", max)):
        rows.append([f"**{word}**", "", *(f"**{function(values):.1f}**" for values in columns.values() if values)])
    head = ["case", "best method", *(f"choice for {budget} runs" for budget in BUDGETS)]
    others = sorted((statistics.fmean(values), method) for method, values in always.items())
    lines = [
        "# How far the choice is from the best method",
        "",
        f"Of {number} cases: by how many points of test accuracy a method is behind the best candidate at "
        f"convergence, mean over seeds {' and '.join(map(str, SEEDS))}, which chose nothing. `fl-train choose` tries "
        f"its default candidates for the cost of so many runs, each of {CASES['Cora-10'].num_rounds} rounds "
        f"({CASES['FL60'].num_rounds} where clients hold examples): {_budgets()}. At random: the mean over candidates. "
        "`python benchmarks/choose.py run` and `render` make this page.",
        "",
        _row([*head, *(f"always {method}" for method in ALWAYS), "at random"]),
        _row(["---"] * (len(head) + len(ALWAYS) + 1)),
        *map(_row, rows),
        "",
        "Always the same method, over the cases in which the reference has it:",
        "",
        _row(["method", "cases", "mean", "largest"]),
        _row(["---"] * 4),
        *(_row([each, str(len(always[each])), f"{mean:.1f}", f"{max(always[each]):.1f}"]) for mean, each in others),
        "",
        *_facts(found),
    ]
    if absent:
        lines += [f"- Not in the reference: {'; '.join(absent)}."]
    if rest:
        lines += [f"- Left out, since a choice or the reference is missing: {'; '.join(rest)}."]
    return "\n".join(lines) + "\n"


def _method(content: Mapping[str, Any], budget: int) -> str:
    """What was chosen; empty if nothing was."""
    return str(content["choices"].get(str(budget), {}).get("method", ""))


def _budgets() -> str:
    return ", ".join(
        f"{runs} with {seeds} new seed{'s' * (seeds > 1)} of the finalists" for runs, seeds in BUDGETS.items()
    )


def _facts(found: Mapping[str, Any]) -> Iterator[str]:
    """Costs, and what of the reference is not finished or from another study."""
    for budget in map(str, BUDGETS):
        done = [each["choices"][budget] for each in found.values() if each["choices"].get(budget, {}).get("method")]
        if done:
            taken = [each["taken"] for each in done]
            yield f"- The budget of {budget} runs: {min(taken):.1f} to {max(taken):.1f} were trained."
    runs = [run for each in found.values() for by_seed in each["reference"].values() for run in by_seed.values()]
    rising = sum("still_rising" in run["marks"] for run in runs)
    yield (
        f"- The reference: {len(runs)} runs, {sum(run['of_twin'] for run in runs)} of them from "
        f"`studies/twin.yaml`; {rising} were still rising at their end."
    )


def _accuracy(runs: Mapping[str, Any]) -> str:
    return f"{100 * statistics.fmean(run['acc'] for run in runs.values()):.1f}"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Run or render."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=["run", "render"])
    parser.add_argument("--folder", type=Path, default=ROOT / "choices" / "benchmark")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e6)
    options = parser.parse_args()
    if options.verb == "run":
        os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
        run(options.folder.resolve(), options.cases, options.workers, options.minutes)
        return
    found = collected(options.folder.resolve())
    (RESULTS / "choose.json").write_text(json.dumps(found, indent=1) + "\n")
    (RESULTS / "choose.md").write_text(page(found))


if __name__ == "__main__":
    main()
