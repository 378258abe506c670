"""A trial federation of sites on one machine: ``fl-train sites --config FILE``."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from fl_lightning.arguments import fail
from fl_lightning.remote.verbs import Parser, add_run_options, follow_to_the_end, run_verb, submission_of
from fl_lightning.yaml_input import parse_yaml

_DESCRIPTION = """Try a federation on this machine: provision, start a server and sites on 127.0.0.1, train, stop.

  fl-train sites --config configs/quickstart.yaml --num_sites 10

Site k holds client k of the configuration's data. Other options are those of fl-train fit.
"""


def main(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    parser = Parser("sites", _DESCRIPTION)
    parser.add_argument("--num_sites", type=int, default=3, help="number of sites (3)")
    parser.add_argument("--folder", default="runs/sites", help="where to put kits and logs (runs/sites)")
    add_run_options(parser)
    return run_verb(_sites, parser, arguments)


def _sites(options: argparse.Namespace, rest: list[str]) -> int:
    from fl_lightning.remote.submit import session_of
    from fl_lightning.remote.trial import Trial

    if options.num_sites < 1:
        fail(f"--num_sites must be at least 1, got {options.num_sites}")
    with Trial(Path(options.folder), options.num_sites) as trial:
        submission, destination = submission_of(options, rest, trial.sites)
        trial.give(parse_yaml(submission.config)["data"], submission.classes)
        trial.start()
        with session_of(trial.admin_kit) as session:
            trial.wait(session)
            processes = trial.processes
            return follow_to_the_end(
                session, submission, destination, options.attempts, processes.check, processes.last_words
            )
