"""Checks before a run whose clients train privately (``model.privacy``)."""

from collections.abc import Sequence

from fl_lightning.federation import ClientRegistry
from fl_lightning.round.client import ClientModule
from fl_lightning.round.privacy import check_stage, check_tuning
from fl_lightning.strategies import Strategy


def check_privacy(strategy: Strategy, model: ClientModule, registry: ClientRegistry, clients: Sequence[int]) -> None:
    """Refuse a strategy or data that private training does not cover.

    Args:
        strategy: The strategy, set up.
        model: The client.
        registry: The client registry.
        clients: The clients that train.

    Raises:
        ValueError: The clients have graphs, or the strategy makes them reveal more about examples than gradients.
    """
    if model.privacy is None:
        return
    name = type(strategy).__name__
    if why := registry.task.not_private:
        raise ValueError(f"model.privacy {why}. Leave model.privacy out, or choose a source of examples")
    for stage in (*strategy.initial_stages(), *strategy.stages(0), *strategy.onboarding_stages()):
        check_stage(stage, name)
    for evaluation in strategy.evaluations(clients).values():
        for way, _ in evaluation.ways(clients):
            check_tuning(way.tuning, name)
