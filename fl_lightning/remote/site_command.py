"""Explains what would leave a site in a job, before it runs: ``fl-train site explain --job FILE --site FILE``."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fl_lightning.arguments import fail, settings_in
from fl_lightning.remote.verbs import Parser, run_verb

_DESCRIPTION = """Explain what would leave this site in a job, and what the site refuses and why.

  fl-train site explain --job job.json --site kits/wards/prod_00/berlin/local/fl_site.yaml

The job is job.json as fl-train submit sends it (--write_job writes it without sending), or a configuration of fl-train
fit. Nothing is trained and nothing leaves. The exit code is 1 if the site refuses something.
"""


def main(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    parser = Parser("site", _DESCRIPTION)
    parser.add_argument("action", choices=["explain"])
    parser.add_argument("--job", required=True, help="job.json, or a configuration (YAML)")
    parser.add_argument("--site", required=True, help="the site's own file, fl_site.yaml")
    parser.add_argument("--num_sites", type=int, default=3, help="number of sites, if a configuration is given (3)")
    return run_verb(_explain, parser, arguments)


def _explain(options: argparse.Namespace, rest: list[str]) -> int:
    from fl_lightning.remote.explain import explain
    from fl_lightning.remote.flare import limit_memory
    from fl_lightning.remote.job import memory_of
    from fl_lightning.remote.job_schema import Job, job_of

    if rest:
        fail(f"fl-train site has no option {rest[0]}")
    file, site_file = Path(options.job), Path(options.site)
    if not site_file.is_file():
        fail(f"--site {site_file} does not exist: give the site's fl_site.yaml")
    if options.num_sites < 1:
        fail(f"--num_sites must be at least 1, got {options.num_sites}")
    if file.suffix == ".json":
        job = Job.read(file.read_bytes())
    else:
        sites = [f"site-{index}" for index in range(options.num_sites)]
        job, _ = job_of(settings_in(str(file)), name="explained", sites=sites)
    limit_memory(memory_of(site_file))
    try:
        leaving, refused = explain(job, site_file)
    except MemoryError:
        fail("the job needs more memory than it may use here (policy.max_memory_gib)", code=1)
    for line in leaving:
        sys.stdout.write(f"{line}\n")
    for line in refused:
        sys.stdout.write(f"refused: {line}\n")
    return 1 if refused else 0
