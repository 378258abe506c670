"""Predict new data with the model of a run: ``fl-train predict RUN --data FILE --client NAME``."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from fl_lightning.arguments import check_output, mistake, warn_in_one_line
from fl_lightning.trained.arguments import add_neighbors, onboarded, weights_of


def main(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code, 2 for a mistake of the user's."""
    parser = argparse.ArgumentParser(
        prog="fl-train predict",
        allow_abbrev=False,
        description="Predict new nodes, graphs, links or examples with a trained model. (fl-train predict --config ... "
        "predicts those that the clients have.)",
    )
    parser.add_argument("run", metavar="RUN", help="folder of a run, such as runs/quickstart/version_0")
    parser.add_argument(
        "--data", required=True, metavar="FILE", help="graphs or tensors, by torch.save, or a table of molecules (.csv)"
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--client", metavar="NAME", help="the client whose model predicts")
    which.add_argument("--global", action="store_true", dest="server", help="the server's model, for a new client")
    which.add_argument(
        "--onboard", action="store_true", help="a new client's own: it joins by training on the examples with a target"
    )
    add_neighbors(parser)
    parser.add_argument("--checkpoint", choices=("best", "last"), default="best", help="which round (default: best)")
    parser.add_argument(
        "--finetune", type=int, default=0, metavar="EPOCHS", help="train on the new examples with a target beforehand"
    )
    parser.add_argument(
        "--to", default="predictions.csv", metavar="FILE", help="the file of predictions (default: %(default)s)"
    )
    given = parser.parse_args(arguments)
    from fl_lightning.trained.loading import load_run

    warn_in_one_line()
    try:
        check_output("--to", given.to, [given.data])
        run = load_run(given.run, checkpoint=given.checkpoint)
        client, neighbors = given.client, weights_of(given.neighbors, joins=given.onboard)
        if given.onboard:
            run, client = onboarded(run, given.data, neighbors)
        data = run.new_data(given.data, client)
        if given.onboard and not given.finetune:
            predicted = run.predictions()[client]
        else:
            predicted = run.predict(data, client, num_finetune_epochs=given.finetune)
        names, trained = run.new_names(given.data, client), given.onboard or given.finetune > 0
        run.write_predictions(Path(given.to), data, predicted, names, trained=trained)
    except (ValueError, OSError) as error:
        return mistake("predict", error)
    print(f"{len(predicted)} predictions in {given.to}: {run.strategy} after round {run.round_idx}")
    return 0
