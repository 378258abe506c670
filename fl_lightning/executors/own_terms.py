"""Own code of clients and of strategies: what leaves the other out is told, what a stack gets wrong, refused."""

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from fl_lightning.batches.base import Batch
from fl_lightning.executors.failure import WrongReturn
from fl_lightning.executors.hooks import overridden
from fl_lightning.executors.trial import reads_own_parameters
from fl_lightning.models.output import NetOutput
from fl_lightning.round.client import ClientModule
from fl_lightning.round.context import Context, Parameters
from fl_lightning.round.program import Change
from fl_lightning.round.stage import Stage


@contextmanager
def noticed(client: ClientModule, *, says: bool) -> Iterator[None]:
    """A context for a step of a client, which warns if its own ``training_step`` has not called what a stage adds.

    Args:
        client: The client with the stage's objective and penalty.
        says: Whether this process warns.
    """
    called: set[str] = set()
    before = client.stage_objective, client.penalty
    added = {"objective": client.stage_objective, "penalty": client.penalty}
    expected = {name: _noting(name, function, called) for name, function in added.items() if function is not None}
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


def watched_objective(client: ClientModule, stage: Stage, said: set[tuple[str, str]], *, says: bool) -> Stage:
    """A stage that warns, once, if its objective does not call the client's own ``objective``.

    Args:
        client: The client.
        stage: The stage.
        said: Stages that were watched before, and for what; this one is added.
        says: Whether this process warns.
    """
    objective = stage.objective
    if objective is None or (stage.name, "objective") in said or not overridden(client, ("objective",)):
        return stage
    said.add((stage.name, "objective"))
    is_watched = True  # in the first step

    def watched(client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
        nonlocal is_watched
        if not is_watched:
            return objective(client, parameters, batch, context)
        is_watched, called = False, set[str]()
        client.objective = _noting("objective", client.objective, called)  # type: ignore[method-assign]
        try:
            loss = objective(client, parameters, batch, context)
        finally:
            del client.objective
        if says and not called:
            warnings.warn(
                f"{type(client).__name__}.objective is left out, as the strategy's stage {stage.name!r} has an "
                "objective of its own: override loss instead",
                stacklevel=2,
            )
        return loss

    watched.takes_stacks = getattr(objective, "takes_stacks", False)  # type: ignore[attr-defined]
    return dataclasses.replace(stage, objective=watched)


def functions_of(stage: Stage) -> list[tuple[str, Callable[..., Any]]]:
    """What a stage computes with a client, (kind, function)."""
    training = [("objective", stage.objective), ("step", stage.program.step)]
    outputs = [*stage.client_outputs.values(), *stage.client_state.values()]
    return [(kind, function) for kind, function in training if function] + [("output", each) for each in outputs]


def refuse_own_parameters(
    client: ClientModule,
    functions: Iterable[tuple[str, Callable[..., Any]]],
    parameters: Parameters,
    batch: Batch,
    context: Context,
    trained: Sequence[str] = (),
) -> None:
    """Refuse functions of a strategy that compute from the client's own parameters: a stack's are not those.

    Args:
        client: The client.
        functions: Functions of (client, parameters, batch, context), (kind, function); an ``objective`` trains, as does
            the ``step`` of a program, which is also given gradients.
        parameters: Parameters of one client.
        batch: Its data.
        context: What it knows.
        trained: Names of the parameters that have gradients.

    Raises:
        WrongReturn: A function computes something else if the client's own parameters are others.
    """
    gradients = {name: parameters[name] for name in trained}  # of their shapes: what is compared has the same ones
    shown = None if client.privacy is not None else batch
    for kind, function in functions:

        def compute(twin: ClientModule, kind: str = kind, function: Any = function) -> dict[str, Tensor]:
            twin.context = context
            if kind == "step":
                return _tensors(function(twin.train(), parameters, gradients, shown, context))
            return _tensors(function(twin.train(kind == "objective"), parameters, batch, context))

        try:
            reads = reads_own_parameters(client, compute, batch.key)
        except Exception:  # it occurs once more, and is reported then
            continue
        if reads:
            raise WrongReturn(
                function,
                "a result of client.net or client.parameters(), which are no client's where all are trained at once",
                "what follows from the parameters that it is given, as client.output(parameters, batch) does, or set "
                "trainer.executor to SequentialExecutor",
            )


def _tensors(result: Tensor | Mapping[str, Tensor] | NetOutput | Change) -> dict[str, Tensor]:
    """What a function has returned, by name."""
    if isinstance(result, Change):
        kinds = {**result.values(), "gradients": dict(result.gradients or {})}
        return {f"{kind}/{name}": tensor for kind, each in kinds.items() for name, tensor in each.items()}
    if isinstance(result, NetOutput):
        return {"logits": result.logits}
    return {"": result} if isinstance(result, Tensor) else dict(result)


def _noting(name: str, function: Callable[..., Any], called: set[str]) -> Callable[..., Any]:
    """The function, which adds its name to a set when it is called."""

    def call(*given: Any) -> Any:
        called.add(name)
        return function(*given)

    return call
