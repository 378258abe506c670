"""Choose a method and its settings for your data within a budget: ``fl-train choose --config FILE --budget 30m``."""

import argparse
import signal
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

from fl_lightning.arguments import fail, say
from fl_lightning.extras import require
from fl_lightning.yaml_input import parse_yaml

if TYPE_CHECKING:
    from fl_lightning.choice.answer import Answer
    from fl_lightning.choice.preparation import Asked

_DESCRIPTION = """Choose a method and its settings for your data within a budget.

  fl-train choose --config mine.yaml --budget 30m
  fl-train choose --config mine.yaml --budget 2h --methods FedAvg SCAFFOLD Ditto --trainer.num_rounds 50

Methods and their settings are compared on validation data; the best methods are then trained with new seeds, beside
Local and Pooled. Other options are those of fl-train fit. The same command goes on where it was stopped.

With --kit, every run is a job at the sites of a federation, within their policies and privacy budgets.
"""


class _Parser(argparse.ArgumentParser):
    """Reports a mistake in one line."""

    def error(self, message: str) -> NoReturn:
        fail(f"choose: {message}")


def main(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    options, rest = _parser().parse_known_args(list(arguments))
    if options.kit is None and (options.sites or options.secure):
        fail("choose: --sites and --secure are for a federation: give the submitter's --kit, too")
    if options.kit is not None and options.processes:
        fail("choose: --processes is for a simulation: the jobs at the sites of a --kit run one after another")
    if options.kit is not None and options.seeds:
        fail("choose: --seeds is for a simulation: at the sites of a --kit there are three, which they plan for")
    grid = dict(map(_axis, options.grid or ()))
    from fl_lightning.choice.asking import answer_of
    from fl_lightning.choice.candidates import WrongChoice
    from fl_lightning.choice.preparation import Asked
    from fl_lightning.study.schema import WrongStudy

    folder = Path(options.output or f"choices/{Path(options.config[-1]).stem}")
    at_sites: dict[str, Any] = {"seeds": options.seeds}
    if options.kit is not None:
        from fl_lightning.choice.halving import FEWEST_SEEDS

        at_sites = {"seeds": FEWEST_SEEDS, "command": f"fl-train submit --kit {options.kit}"}
        folder /= "sites"
    asked = Asked(
        config=options.config,
        overrides=rest,
        budget=options.budget,
        methods=options.methods or (),
        grid=grid,
        metric=options.metric,
        max_bytes=options.max_bytes,
        processes=options.processes,
        folder=folder,
        **at_sites,
    )
    signal.signal(signal.SIGTERM, _stop)
    try:
        answer = answer_of(asked, say) if options.kit is None else _answer_at_sites(options, asked)
    except KeyboardInterrupt:
        fail("stopped; the same command goes on", code=130)
    except BrokenPipeError:
        raise
    except (WrongChoice, WrongStudy, OSError) as error:
        fail(str(error))
    say(f"\n{answer}")
    return 0


def _answer_at_sites(options: argparse.Namespace, asked: "Asked") -> "Answer":
    require("flare", "fl-train choose --kit")
    from fl_lightning.choice.jobs import answer_at_sites

    return answer_at_sites(asked, Path(options.kit), options.sites or (), say, secure=options.secure)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="fl-train choose",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("-c", "--config", action="append", required=True, metavar="FILE", help="as of fl-train fit")
    parser.add_argument(
        "--budget",
        default="30m",
        metavar="SIZE",
        help="time, such as 90s, 30m, 2h (default: %(default)s), or work: 20runs",
    )
    parser.add_argument(
        "--methods", nargs="+", metavar="NAME", help="strategies (default: nine, and that of the configuration)"
    )
    parser.add_argument(
        "--grid",
        nargs="+",
        metavar="SETTING=VALUES",
        help="values that are tried, such as strategy.proximal_weight=0.1,1, or a range: model.optimizer.lr=0.001..0.1",
    )
    parser.add_argument("--metric", metavar="NAME", help="validation metric that decides, such as val/acc")
    parser.add_argument("--max-bytes", metavar="SIZE", help="what a run may send, such as 200MB")
    parser.add_argument("--processes", type=_count, help="worker processes (default: one a core, 4 at most)")
    parser.add_argument("--seeds", type=_count, help="new seeds of the finalists, at most (default: 10)")
    parser.add_argument("--kit", metavar="FOLDER", help="train at the sites of a federation: the submitter's kit")
    parser.add_argument("--sites", nargs="+", metavar="NAME", help="of these alone (default: all that are connected)")
    parser.add_argument("--secure", action="store_true", help="at sites: secure aggregation")
    parser.add_argument("--output", metavar="FOLDER", help="where everything goes (default: choices/<config>)")
    return parser


def _count(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _axis(word: str) -> tuple[str, list[Any]]:
    name, equals, values = word.partition("=")
    parsed = parse_yaml(f"[{values}]") if equals and values else None
    if "." not in name or not parsed:
        fail(f"choose: --grid {word!r} is no setting with its values: write model.optimizer.lr=0.01,0.1")
    return name, list(parsed)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
