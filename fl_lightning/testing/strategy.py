"""The contract of all strategies, for your own: similar to scikit-learn's ``check_estimator``."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fl_lightning.round.client import ClientModule
from fl_lightning.strategies import Strategy
from fl_lightning.testing.checks import CHECKS, Check
from fl_lightning.testing.federations import small_examples, small_graphs
from fl_lightning.testing.runs import StrategyRuns


def check_strategy(
    strategy: Strategy,
    *,
    client: ClientModule | None = None,
    data: Any = None,
    checks: Sequence[Check] = CHECKS,
    accelerator: str = "cpu",
) -> None:
    """Check that a strategy fulfills the contract of all strategies.

    It is run for a few rounds on federations of five small clients: on graphs, and on examples unless it needs graphs.
    Both executors must come to the same, a resume must be exact after every round, the seed alone must decide, a client
    that fails must leave the others alone, ...; ``fl_lightning.testing.CHECKS`` has them all. Run it in a test of your
    own (with pytest or without).

    Args:
        strategy: With its settings, small ones if it has costly defaults. Only copies of it are run.
        client: What the clients are; None for the strategy's default. A small net makes it quick.
        data: A federation of five clients instead of the generated ones, set up.
        checks: Which checks.
        accelerator: Where it runs, for example ``gpu``.

    Raises:
        AssertionError: A check failed; it says which one, and what to do.
        ValueError: The strategy refuses its settings, the client or the data.

    Example:
        >>> import fl_lightning as fl
        >>> from fl_lightning.testing import check_strategy
        >>> from fl_lightning.testing.checks import check_executors_agree
        >>> check_strategy(fl.strategies.FedAvg(num_epochs=1), checks=[check_executors_agree])
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        federations = {"data": data} if data is not None else {"graphs": small_graphs(folder / "cache")}
        if data is None and not strategy.needs_graphs:
            federations["examples"] = small_examples(folder / "cache")
        for kind, federation in federations.items():
            runs = StrategyRuns(strategy, federation, folder / kind, client, accelerator)
            for check in checks:
                try:
                    check(runs)
                except AssertionError as error:
                    raise AssertionError(f"{type(strategy).__name__} on {kind}: {check.__name__}: {error}") from error
