"""Choose a method and its settings for your data within a budget: ``fl-train choose --config FILE --budget 30m``."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from fl_lightning.arguments import fail
from fl_lightning.choice.answer import Answer
from fl_lightning.choice.candidates import DEFAULT, WrongChoice
from fl_lightning.choice.page import document
from fl_lightning.choice.preparation import Asked, Prepared, prepare
from fl_lightning.choice.search import CASE, Search
from fl_lightning.run.folder import whole_file
from fl_lightning.study.pool import Pool
from fl_lightning.study.runs import make_run
from fl_lightning.study.schema import WrongStudy
from fl_lightning.study.store import Store
from fl_lightning.study.worker import resolve
from fl_lightning.yaml_input import parse_yaml

_DESCRIPTION = """Choose a method and its settings for your data within a budget.

  fl-train choose --config mine.yaml --budget 30m
  fl-train choose --config mine.yaml --budget 2h --methods FedAvg SCAFFOLD Ditto --trainer.num_rounds 50

Methods and their settings are compared on validation data; the best methods are then trained with new seeds, beside
Local and Pooled. Other options are those of fl-train fit. The same command goes on where it was stopped.
"""
_MOST_PROCESSES = 4


class _Parser(argparse.ArgumentParser):
    """Reports a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        fail(f"choose: {message}")


def main(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    options, rest = _parser().parse_known_args(list(arguments))
    for word in rest:
        if word.partition("=")[0] in ("--kit", "--sites", "--num_sites", "--job"):
            fail(
                f"choose trains in a simulation, not at sites ({word}): leave it out, and submit chosen.yaml, or "
                "choose between two methods by two jobs"
            )
    stems = [Path(path).stem for path in options.config]
    asked = Asked(
        config=options.config,
        overrides=rest,
        budget=options.budget,
        methods=options.methods or (),
        grid=dict(map(_axis, options.grid or ())),
        metric=options.metric,
        max_bytes=options.max_bytes,
        processes=options.processes,
        folder=Path(options.output or f"choices/{stems[-1]}"),
    )
    signal.signal(signal.SIGTERM, _stop)
    try:
        answer = answer_of(asked, _say)
    except KeyboardInterrupt:
        fail("stopped; the same command goes on", code=130)
    except BrokenPipeError:
        raise
    except (WrongChoice, WrongStudy, OSError) as error:
        fail(str(error))
    _say(f"\n{answer}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="fl-train choose",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("-c", "--config", action="append", required=True, metavar="FILE", help="as of fl-train fit")
    parser.add_argument("--budget", default="30m", metavar="TIME", help="such as 90s, 30m, 2h (default: %(default)s)")
    parser.add_argument("--methods", nargs="+", metavar="NAME", help=f"strategies (default: {', '.join(DEFAULT)})")
    parser.add_argument(
        "--grid",
        nargs="+",
        metavar="SETTING=VALUES",
        help="values that are tried, such as model.optimizer.lr=0.01,0.1 strategy.proximal_weight=0.1,1",
    )
    parser.add_argument("--metric", metavar="NAME", help="validation metric that decides, such as val/acc")
    parser.add_argument("--max-bytes", metavar="SIZE", help="what a run may send, such as 200MB")
    parser.add_argument("--processes", type=_count, help="worker processes (default: one a core, 4 at most)")
    parser.add_argument("--output", metavar="FOLDER", help="where everything goes (default: choices/<config>)")
    return parser


def _count(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes: give at least 1")
    return int(text)


def _axis(word: str) -> tuple[str, list[Any]]:
    name, equals, values = word.partition("=")
    parsed = parse_yaml(f"[{values}]") if equals and values else None
    if "." not in name or not parsed:
        fail(f"choose: --grid {word!r} is no setting with its values: write model.optimizer.lr=0.01,0.1")
    return name, list(parsed)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


# ---------------------------------------------------------------- from the question to the answer


def answer_of(
    asked: Asked,
    say: Callable[[str], None],
    pool: Pool | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Answer:
    """Search, and write ``chosen.yaml`` and the page.

    Args:
        asked: What was asked for.
        say: Takes a line for the user.
        pool: Where runs are trained; None for one of as many processes as were asked for.
        clock: The time in seconds.

    Raises:
        WrongChoice: It is refused, or the folder is in use.
    """
    prepared, store = prepare(asked), Store(asked.folder)
    with store.running() as alone:
        if not alone:
            raise WrongChoice(f"another process chooses in {asked.folder}: wait for it, or give another --output")
        search = Search(
            prepared.study,
            store,
            prepared.candidates,
            asked=prepared.digest,
            seed=prepared.seed,
            num_rounds=prepared.num_rounds,
            evaluate_every=prepared.evaluate_every,
            seconds=prepared.seconds,
            max_bytes=prepared.max_bytes,
            say=say,
            clock=clock,
        )
        with pool or Pool(asked.processes or _processes()) as trained:
            found = search.run(trained)
        try:
            answer = Answer(found, asked.folder)
        except ValueError as error:
            raise WrongChoice(str(error)) from error
        _write_chosen(answer, prepared)
        document(answer).write(answer.page)
    return answer


def _processes() -> int:
    """As many as there are cores, four at most; one where a GPU computes."""
    import torch

    return 1 if torch.cuda.is_available() else min(_MOST_PROCESSES, len(os.sched_getaffinity(0)))


def _write_chosen(answer: Answer, prepared: Prepared) -> None:
    """The whole configuration of the method that is taken, with the seed of the configuration."""
    point = answer.found.finalists[answer.method]
    run = make_run(prepared.study, answer.method, CASE, prepared.seed, point, "report", prepared.num_rounds)
    arguments = [each for each in run.arguments if not each.startswith("--data.seed=")]
    whole = resolve([*arguments, "--trainer.logger=true"])
    if whole["error"]:
        raise WrongChoice(whole["error"])
    with whole_file(answer.config) as temporary:
        temporary.write_text(f"# {answer.sentence}\n{whole['config']}")
