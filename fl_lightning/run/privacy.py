"""What is refused before a run whose clients train privately (``model.privacy``)."""

from collections.abc import Sequence

from fl_lightning.federation import ClientRegistry
from fl_lightning.round.client import ClientModule
from fl_lightning.round.privacy import check_stage, check_tuning
from fl_lightning.strategies import Strategy


def check_privacy(strategy: Strategy, model: ClientModule, registry: ClientRegistry, clients: Sequence[int]) -> None:
    """Refuse a strategy that is set up, or data, that the privacy of training does not cover.

    Args:
        strategy: Set up.
        model: The client.
        registry: What the clients hold.
        clients: Those that train.

    Raises:
        ValueError: The clients hold graphs, or the strategy has them tell more of their examples than gradients.
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
