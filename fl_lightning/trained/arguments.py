"""What ``fl-train predict`` and ``fl-train export`` share: a new client, and to whom it is related."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fl_lightning.trained.loading import LoadedRun


def add_neighbors(parser: argparse.ArgumentParser) -> None:
    """Add ``--neighbors``."""
    parser.add_argument(
        "--neighbors",
        nargs="*",
        metavar="NAME=WEIGHT",
        help="clients to which the new one is related, if they have a relation graph (the weight is 1 if left out)",
    )


def weights_of(given: Sequence[str] | None, *, joins: bool) -> dict[str, float] | None:
    """The weight of each client by name; None if the option was left out.

    Raises:
        ValueError: A weight is no number, or nobody joins.
    """
    if given is None:
        return None
    if not joins:
        raise ValueError("--neighbors is of a new client: give --onboard with it, or leave it out")
    result = {}
    for each in given:
        name, weight = each.rsplit("=", 1) if "=" in each else (each, "1")
        try:
            result[name] = float(weight)
        except ValueError:
            raise ValueError(f"--neighbors {each}: give a number after the name, such as {name}=0.5") from None
    return result


def onboarded(run: "LoadedRun", file: str, neighbors: dict[str, float] | None) -> tuple["LoadedRun", str]:
    """The run of a new client that joins, and the client's name; its metrics and ε are printed.

    Raises:
        ValueError: It cannot join (:meth:`LoadedRun.onboard`).
    """
    run = run.onboard(file, neighbors=neighbors)
    [name] = run.names
    means = [metric for metric in run.scores if metric.startswith("test/") and f"{metric}_worst" in run.scores]
    shown = [metric for metric in (*means, "epsilon") if metric in run.scores and metric != "test/loss"]
    if shown:
        print(f"{name}: {', '.join(f'{metric} {run.scores[metric]:.4g}' for metric in shown)}")
    return run, name
