"""Write a client's trained model to a file, with what loads it: ``fl-train export RUN --client NAME --to FILE``."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from fl_lightning.arguments import check_output, mistake, warn_in_one_line
from fl_lightning.trained.arguments import add_neighbors, onboarded, weights_of


def main(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code, 2 for a mistake of the user's."""
    parser = argparse.ArgumentParser(
        prog="fl-train export",
        allow_abbrev=False,
        description="Write a trained model's state_dict, and beside it a file of Python that loads it.",
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run, such as runs/quickstart/version_0")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--client", metavar="NAME", help="the client whose model it is")
    which.add_argument("--global", action="store_true", dest="server", help="the server's model, of all clients")
    which.add_argument("--onboard", metavar="FILE", help="the data of a new client, which joins by training on them")
    add_neighbors(parser)
    parser.add_argument("--checkpoint", choices=("best", "last"), default="best", help="which round (default: best)")
    parser.add_argument("--to", default="model.pt", metavar="FILE", help="the file, .pt or .safetensors (%(default)s)")
    given = parser.parse_args(arguments)
    from fl_lightning.trained.export import export
    from fl_lightning.trained.loading import load_run

    warn_in_one_line()
    try:
        check_output("--to", given.to, [given.onboard or ""])
        run = load_run(given.run, checkpoint=given.checkpoint)
        client, neighbors = given.client, weights_of(given.neighbors, joins=bool(given.onboard))
        if given.onboard:
            run, client = onboarded(run, given.onboard, neighbors)
        loader = export(run, client, Path(given.to))
    except (ValueError, OSError) as error:
        return mistake("export", error)
    print(f"{given.to}, which {loader} loads: {run.strategy} after round {run.round_idx}")
    return 0
