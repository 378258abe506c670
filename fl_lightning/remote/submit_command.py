"""A run on the sites of a federation: ``fl-train submit --kit DIR --config FILE``."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from fl_lightning.arguments import check_output, fail
from fl_lightning.arguments import options as given_in
from fl_lightning.remote.verbs import Parser, add_run_options, follow_to_the_end, run_verb, submission_of

_DESCRIPTION = """Train on the sites of a federation, follow the run, and fetch its folder.

  fl-train submit --kit kits/wards/prod_00/lead@example.org --config configs/fedavg_cora.yaml --trainer.num_rounds 50

Other options are those of fl-train fit. A job that fails because a site's process died is submitted again and resumes
from its last checkpoint.
"""


def main(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    parser = Parser("submit", _DESCRIPTION)
    parser.add_argument("--kit", required=True, help="folder of the submitter's kit")
    parser.add_argument("--sites", nargs="+", help="only these, in the order of their clients (default: all, by name)")
    parser.add_argument("--write_job", metavar="FILE", help="write the job that would be sent (job.json) and exit")
    add_run_options(parser)
    return run_verb(_submit, parser, arguments)


def _submit(options: argparse.Namespace, rest: list[str]) -> int:
    from fl_lightning.files import whole_file
    from fl_lightning.remote.submit import connected_sites, session_of

    if options.write_job:
        check_output("--write_job", options.write_job, (value for _, value in given_in(rest)))
    with session_of(Path(options.kit)) as session:
        sites = options.sites or connected_sites(session)
        if not sites:
            fail("no site is connected to the server: start them (startup/start.sh in their kits)")
        submission, destination = submission_of(options, rest, sites)
        if options.write_job:
            with whole_file(Path(options.write_job)) as temporary:
                temporary.write_text(submission.job.write())
            return 0
        return follow_to_the_end(session, submission, destination, options.attempts)
