"""Whether a client's own ``training_step`` leaves out what the strategy adds to the loss, which one line then says."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fl_lightning.round.client import ClientModule


@contextmanager
def noticed(client: ClientModule, *, says: bool) -> Iterator[None]:
    """A context for a step of a client, which warns if its own ``training_step`` has not called what a stage adds.

    Args:
        client: The client with the stage's objective and penalty.
        says: Whether this process warns.
    """
    called: set[str] = set()

    def seen(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            called.add(name)
            return function(*given)

        return call

    before = client.stage_objective, client.penalty
    added = {"objective": client.stage_objective, "penalty": client.penalty}
    expected = {name: seen(name, function) for name, function in added.items() if function is not None}
    client.stage_objective, client.penalty = expected.get("objective"), expected.get("penalty")
    try:
        yield
    finally:
        client.stage_objective, client.penalty = before
    if says and (missing := [name for name in expected if name not in called]):
        warnings.warn(
            f"{type(client).__name__}.training_step leaves out the strategy's {' and '.join(missing)}, so that this is "
            "another method: return super().training_step(batch, batch_idx), with terms of your own if you like, or "
            "override loss instead",
            stacklevel=2,
        )
