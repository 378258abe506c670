"""What the verbs for remote federations have in common."""

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fl_lightning.arguments import fail, warning_line

if TYPE_CHECKING:  # importing NVFlare takes seconds, --help should not
    from fl_lightning.remote.submit import Submission


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one line.

    Args:
        verb: Of ``fl-train``.
        description: What it does, with examples.
    """

    def __init__(self, verb: str, description: str) -> None:
        super().__init__(
            prog=f"fl-train {verb}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Exit with the message."""
        fail(message)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Options of a run over a network; the others are those of ``fl-train fit``."""
    parser.add_argument("--name", help="name of the run; with --ckpt_path last, of the run to resume")
    parser.add_argument("--ckpt_path", choices=["last"], help="resume the run of this name")
    parser.add_argument("--attempts", type=int, default=3, help="jobs to submit before giving up (3)")
    parser.add_argument("--timeout_seconds", type=int, default=600, help="time within which a site must respond (600)")
    parser.add_argument("--num_outputs", type=int, help="classes of the federation (default: those of the sites)")
    parser.add_argument("--secure", action="store_true", help="secure aggregation: the server learns only sums")
    parser.add_argument("--secure_share", type=float, help="more than this share must complete a secure sum (0.667)")
    parser.add_argument("--predict", action="store_true", help="have each site write predictions.csv into its folder")


def run_verb(verb: Callable[[argparse.Namespace, list[str]], int], parser: Parser, arguments: Sequence[str]) -> int:
    """Run a verb with its options and the remaining words; a mistake is reported in one line."""
    warnings.filterwarnings("ignore", message=".*torch.jit.script. is deprecated.*", category=DeprecationWarning)
    options, rest = parser.parse_known_args(list(arguments))
    try:
        return verb(options, rest)
    except (ValueError, OSError) as error:
        fail(str(error))
    except RuntimeError as error:
        fail(str(error), code=1)


def submission_of(options: argparse.Namespace, rest: Sequence[str], sites: Sequence[str]) -> "tuple[Submission, Path]":
    """The run that the options describe, and where its folder goes."""
    from fl_lightning.remote.job import Parts
    from fl_lightning.remote.secure import WARNING
    from fl_lightning.remote.submit import Submission

    if options.ckpt_path and not options.name:
        fail("--ckpt_path last needs --name: give the name of the run to resume")
    for name in ("attempts", "timeout_seconds", "num_outputs"):
        value = getattr(options, name)
        if value is not None and value < 1:
            fail(f"--{name} must be at least 1, got {value}")
    trainer = Parts(rest).trainer
    if options.secure:
        sys.stdout.write(f"{WARNING}\n")
    submission = Submission.of_config(
        trainer.config,
        name=options.name or f"{trainer.root.name}-{time.strftime('%Y%m%d-%H%M%S')}",
        sites=list(sites),
        resume=options.ckpt_path == "last",
        timeout_seconds=options.timeout_seconds,
        num_outputs=options.num_outputs,
        secure=options.secure,
        **({} if options.secure_share is None else {"secure_share": options.secure_share}),
        predict=options.predict,
    )
    return submission, trainer.root.parent


def follow_to_the_end(
    session: Any,
    submission: "Submission",
    destination: Path,
    attempts: int,
    watch: Callable[[], None] = lambda: None,
    last_words: Callable[[], str] = lambda: "",
) -> int:
    """Submit until the run is done, and report its outcome, with the participants' last log lines if it failed.

    Returns:
        The exit code.
    """
    from fl_lightning.remote.submit import follow

    def warn(message: str) -> None:
        sys.stderr.write(warning_line(message))

    outcome = follow(session, submission, destination, attempts=attempts, watch=watch, warn=warn)
    if outcome.status != "finished":
        fail(f"{submission.job.name}: {outcome.message}{last_words()}", code=2 if outcome.status == "refused" else 1)
    chosen = {n: v for n, v in outcome.facts["result"].items() if n.startswith(("val/", "test/")) and "_" not in n}
    metrics = "  ".join(f"{name} {value:.4f}" for name, value in chosen.items())
    sys.stdout.write(f"{submission.job.name}: {metrics}\n{outcome.folder}\n")
    return 0
