"""A client that joins after the training: the run once more with one more client, which is onboarded."""

import copy
import dataclasses
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fl_lightning.batches.client_data import ClientData
from fl_lightning.executors import SequentialExecutor
from fl_lightning.federation import ClientRegistry
from fl_lightning.round.participation import Participation
from fl_lightning.run.assembly import Run, build_nets, describe_federation, executor_for
from fl_lightning.run.callback import Hooks
from fl_lightning.run.evaluation import epsilons
from fl_lightning.run.failures import ClientFailure
from fl_lightning.run.rounds import Rounds


def joined(
    run: Run, client_data: ClientData, neighbors: Mapping[str, float] | None, num_epochs: int | None
) -> tuple[Run, dict[str, float]]:
    """A run with one more client, and that client's metrics and ε; the run that is given stays as it is.

    What follows is what happens to clients that were held out (:func:`fl_lightning.run.unseen.join`): the strategy's
    onboarding stages on the server as it is.

    Args:
        run: The run, with the state of a checkpoint.
        client_data: What the new client has.
        neighbors: Its row of the client relation graph, weights by training client; None where there is none.
        num_epochs: Epochs of each stage that trains; None for the strategy's.

    Raises:
        ValueError: Nobody can join, the client lacks what the strategy needs, or its training fails.
    """
    strategy = run.strategy
    _check(run, client_data.name)
    result = _with_one_more(run, client_data, _row(run.registry, neighbors))
    stages = [
        stage if num_epochs is None or not stage.num_epochs else dataclasses.replace(stage, num_epochs=num_epochs)
        for stage in result.strategy.onboarding_stages()
    ]
    if any(stage.num_epochs for stage in stages) and not bool(client_data.train_mask_N.any()):
        raise ValueError(
            f"{type(strategy).__name__} trains on what a new client knows, and no example has a target: give y, known "
            "for some"
        )
    hooks = Hooks(SimpleNamespace(callbacks=[]))
    rounds = Rounds(
        result,
        hooks,
        Participation(on_failure="stop"),
        num_rounds=result.round_idx,
        evaluate_every=1,
        evaluate_union=False,
    )
    try:
        rounds.exchange(stages, result.unseen_clients, "onboarding")
        return result, rounds.evaluate(result.unseen_clients) | epsilons(result)
    except ClientFailure as error:
        why = result.failures[client_data.name]
        raise ValueError(f"{client_data.name} cannot join, since its training failed: {why}") from error


def _check(run: Run, name: str) -> None:
    """Refuse a client of a federation that nobody can join."""
    kind, registry = type(run.strategy).__name__, run.registry
    if not run.strategy.takes_unseen_clients:
        raise ValueError(
            f"nobody can join a run of {kind} after the training, by how the method works: hold clients out "
            "(trainer.participation.held_out_fraction), or begin with another client's model"
        )
    if registry.own:
        raise ValueError(
            f"nobody can join this run after the training: the clients' {' and '.join(registry.own)} mean something "
            "else for each, and so do the layers that are each client's own"
        )
    if run.strategy.needs_cross_edges:
        raise ValueError(
            f"nobody can join a run of {kind} after the training: its clients know of the edges between their nodes "
            "and those of others, and nothing is known of a new client's"
        )
    if name in registry.names:
        raise ValueError(f"there is a client {name!r} already: give the new one another name")


def _row(registry: ClientRegistry, neighbors: Mapping[str, float] | None) -> Tensor | None:
    """The new client's row of the client relation graph, (C,); None where there is none."""
    if registry.relation_CC is None:
        if neighbors:
            raise ValueError("neighbors are given, but the clients have no relation graph (data.relation_graph)")
        return None
    if neighbors is None:
        raise ValueError(
            "the clients have a relation graph: give neighbors, the weight of each client to which the new one is "
            f"related, such as {{{registry.names[0]!r}: 1.0}}, or {{}}"
        )
    place = {name: index for index, name in enumerate(registry.names)}
    row_C = torch.zeros(len(registry))
    for name, weight in neighbors.items():
        if name not in place or not 0 <= float(weight) < float("inf"):
            raise ValueError(
                f"neighbors has {name!r}: {weight}; give numbers of at least 0 by name, of {', '.join(registry.names)}"
            )
        row_C[place[name]] = float(weight)
    return row_C


def _with_one_more(run: Run, client_data: ClientData, row_C: Tensor | None) -> Run:
    """A copy of a run whose last client is the new one, held out so far."""
    new = len(run.registry)
    relation_CC = run.registry.relation_CC
    if relation_CC is not None and row_C is not None:
        relation_CC = pad(relation_CC, (0, 1, 0, 1))
        relation_CC[new, :-1] = relation_CC[:-1, new] = row_C.to(relation_CC)
    registry = dataclasses.replace(
        run.registry,
        names=(*run.registry.names, client_data.name),
        sizes=(*run.registry.sizes, client_data.size),
        cost=(*run.registry.cost, client_data.cost),
        relation_CC=relation_CC,
        groups=(),
    )
    model, strategy = copy.deepcopy(run.model), dataclasses.replace(run.strategy)
    architectures = build_nets(run.fabric, model, strategy, registry, run.seed)
    strategy.setup(describe_federation(run.fabric, model, registry, run.training_clients, architectures, run.seed))
    strategy.load_state_dict(extended(run.strategy.state_dict(), strategy.state_dict(), new))
    places = [client_data] * len(registry)  # of which the new one's alone is looked at
    known = run.executor.collator
    result = dataclasses.replace(
        run,
        registry=registry,
        evaluated_clients=(),
        unseen_clients=(new,),
        model=model,
        architectures=architectures,
        strategy=strategy,
        executor=executor_for(model, SequentialExecutor()),
        scores={},
        failures={},
        num_failures={},
        reported=set(),
        unusual=set(),
    )
    result.executor.setup(
        run.fabric,
        model,
        run.datamodule.collator(places, device=run.fabric.device, dtype=known.dtype),
        [new],
        seed=run.seed,
        client_state=strategy.client_state(),
        persistence=strategy.persistence(),
    )
    return result


def extended(saved: Any, initial: Any, num_clients: int) -> Any:
    """The state of a server with one more client, whose rows are the initial ones, or zeros where there are none yet.

    Args:
        saved: The state with ``num_clients``.
        initial: The initial state with one more; a dimension of a tensor that has one more there counts the clients.
        num_clients: How many there are without the new one.
    """
    if isinstance(saved, Tensor) and isinstance(initial, Tensor) and saved.dim() == initial.dim():
        sizes = list(zip(saved.shape, initial.shape, strict=True))
        counts = [old == num_clients and new == num_clients + 1 for old, new in sizes]
        if not any(counts):
            return saved
        result = saved.new_zeros([old + count for (old, _), count in zip(sizes, counts, strict=True)])
        if result.shape == initial.shape:
            result.copy_(initial)
        result[tuple(slice(old) for old, _ in sizes)] = saved
        return result
    if isinstance(saved, Mapping) and isinstance(initial, Mapping):
        added = {key: value for key, value in initial.items() if key == num_clients}  # by the clients' indices
        return added | {key: extended(value, initial.get(key), num_clients) for key, value in saved.items()}
    if isinstance(saved, list | tuple) and isinstance(initial, list | tuple):
        more = initial[num_clients:] if len(saved) == num_clients == len(initial) - 1 else saved[len(initial) :]
        return type(saved)([*(extended(*pair, num_clients) for pair in zip(saved, initial, strict=False)), *more])
    return saved
