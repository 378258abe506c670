"""The option that ``fl-train predict`` and ``fl-train export`` share: to whom a new client is related."""

import argparse
from collections.abc import Sequence


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
