"""Onboarding: clients that were held out of the training join the trained server."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from fl_lightning.round.stage import Phase, Stage
from fl_lightning.run.assembly import Run

#: :meth:`fl_lightning.run.rounds.Rounds.exchange`.
Exchange = Callable[[Sequence[Stage], Sequence[int], Phase], bool]
#: :class:`fl_lightning.run.evaluation.Evaluator`.
Evaluate = Callable[[Sequence[int], str], dict[str, float]]


def keep_chosen_server(run: Run) -> None:
    """Keep the server of the current round, if it is the best so far and there are unseen clients."""
    if run.unseen_clients and run.selection.best_round == run.round_idx:
        run.best_server = copy.deepcopy(run.strategy.state_dict())


def join(run: Run, exchange: Exchange, evaluate: Evaluate) -> dict[str, float]:
    """Onboard the unseen clients, which have seen nothing yet, to the server as it is, and score them.

    The server is then as it was before.
    """
    with _server_kept(run):
        return _joined(run, exchange, evaluate)


def join_chosen_server(run: Run, exchange: Exchange, evaluate: Evaluate) -> dict[str, float]:
    """Onboard the unseen clients to the server of the best round; what the last round left stays."""
    assert run.best_server is not None, "some round is the best"
    num_rounds = run.round_idx
    with _server_kept(run):
        run.strategy.load_state_dict(copy.deepcopy(run.best_server))
        run.round_idx = run.selection.best_round + 1
        metrics = _joined(run, exchange, evaluate)
        run.round_idx = num_rounds
    return metrics


@contextmanager
def _server_kept(run: Run) -> Iterator[None]:
    """Give the server back the state that it had before."""
    server = copy.deepcopy(run.strategy.state_dict())
    yield
    run.strategy.load_state_dict(server)


def _joined(run: Run, exchange: Exchange, evaluate: Evaluate) -> dict[str, float]:
    if run.executor.round is not None and run.executor.round[0] == "onboarding":  # they have joined before
        run.executor.reset(run.unseen_clients)
    exchange(run.strategy.onboarding_stages(), run.unseen_clients, "onboarding")
    return evaluate(run.unseen_clients, "unseen/")
