"""Private training (``model.privacy``) in executors: checks, draws, gradients and the account of each client."""

import functools
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from fl_lightning.batches.base import Batch, Collator, single
from fl_lightning.batches.examples import ExampleBatch, ExampleCollator
from fl_lightning.batches.poisson import PoissonBatch, poisson_draws, sampling_rate
from fl_lightning.executors.hooks import SEQUENTIAL, overridden
from fl_lightning.executors.knowledge import knowing
from fl_lightning.executors.trial import OF_GIVEN, own_methods, reads_own_parameters
from fl_lightning.models.batch_norm import TORCH_NORMS, BatchNorm
from fl_lightning.round.client import ClientModule, Objective
from fl_lightning.round.context import Context, Parameters
from fl_lightning.round.privacy import (
    GRADIENT_NUMBERS,
    KeyedNumbers,
    RecordPrivacy,
    check_stage,
    draw_noise,
    private_gradient,
)
from fl_lightning.round.stage import Stage, StateSpec

#: Name of the client state that counts what was spent: steps, sampling probability, noise multiplier.
SPENT = "privacy/spent"
#: Hooks that see neither gradients nor examples.
_HARMLESS = ("predict_step", "configure_optimizers")


def private_state_specs(client: ClientModule) -> dict[str, StateSpec]:
    """The client state of the privacy accounts."""
    return {} if client.privacy is None else {SPENT: StateSpec(initial=torch.zeros(3, dtype=torch.float64))}


def check_client(client: ClientModule) -> None:
    """Refuse a client whose training would reveal more about examples than their gradients.

    Raises:
        ValueError: It has a hook of its own in training, or a net with statistics over examples.
    """
    if client.privacy is None:
        return
    if hooks := overridden(client, tuple(name for name in SEQUENTIAL if name not in _HARMLESS)):
        raise ValueError(
            f"model.privacy is for a loss of each example by itself, but {type(client).__name__} overrides "
            f"{', '.join(hooks)}: override loss or objective instead, or leave model.privacy out"
        )
    for net in client.nets:
        if normed := [type(layer).__name__ for layer in net.modules() if isinstance(layer, (BatchNorm, *TORCH_NORMS))]:
            raise ValueError(
                f"model.net has {normed[0]}, whose statistics are over examples and without noise, so model.privacy "
                "cannot cover it: give the net LayerNorm or GroupNorm"
            )


def check_examples(client: ClientModule, collator: Collator, first: int) -> None:
    """Refuse data that are not independent examples, and a net or loss without a gradient for each example.

    Args:
        client: The built client, on the device.
        collator: Makes batches of clients.
        first: The client to try it on.

    Raises:
        ValueError: The data, the net or the loss is not supported.
    """
    if client.privacy is None:
        return
    batch = single(collator([first]))
    if not isinstance(batch, ExampleBatch):
        raise ValueError(
            "model.privacy is for clients with independent examples: a node of a graph enters the losses of its "
            "neighbors, so the noise of one gradient does not hide it. Leave model.privacy out, or choose examples"
        )
    trained = {name: p.detach() for name, p in client.net.named_parameters() if p.requires_grad}
    few = batch.replace({name: tensor[:2] for name, tensor in batch.tensors().items() if name != "key"})
    drawn = next(poisson_draws(few, batch.key[None], KeyedNumbers()))
    noise = {name: torch.zeros_like(p) for name, p in trained.items()}
    parameters, reads = client.parameter_dict(), False
    client.train()
    try:
        with knowing(client, {"anchor": trained}) as context:
            private_gradient(functools.partial(_loss, client, None, context, trained), trained, drawn, noise, 1.0, 2)
            if own_methods(client):
                reads = reads_own_parameters(
                    client, lambda twin: {"loss": twin.objective(parameters, few, context)}, batch.key
                )
    except Exception as error:  # it may be the user's code
        why = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        raise ValueError(
            f"model.privacy needs the gradient of each example, which {type(client).__name__} with model.net does not "
            f"have under torch.vmap ({why}): write loss and net for it, or leave model.privacy out"
        ) from error
    finally:
        client.eval()
    if reads:
        raise ValueError(
            f"model.privacy takes the gradient of what {type(client).__name__} computes from the parameters that it is "
            "given, but its loss is computed from self.net or self.parameters(), whose gradient would be left out: "
            f"{OF_GIVEN}"
        )


def rate_of(collator: Collator, client: int) -> float:
    """The probability with which an example of a client is drawn in a step."""
    assert isinstance(collator, ExampleCollator), "checked before"
    return sampling_rate(collator.client_data(client).num_examples, collator.batch_size)


def private_draws(batch: Batch, keys: Tensor, numbers: KeyedNumbers) -> Iterator[PoissonBatch]:
    """What each private step trains on."""
    assert isinstance(batch, ExampleBatch), "checked before"
    return poisson_draws(batch, keys, numbers)


def gradient_of_client(
    client: ClientModule,
    stage: Stage,
    privacy: RecordPrivacy,
    *,
    trained: Parameters,
    others: Parameters,
    batch: PoissonBatch,
    context: Context,
    noise: Parameters,
    num_together: int = 1,
) -> dict[str, Tensor]:
    """The private gradient of one client, by name; a penalty, which sees no example, is added after the noise.

    Args:
        client: The client module, in training mode.
        stage: The stage.
        privacy: The settings.
        trained: The parameters whose gradient is taken.
        others: The parameters that are not trained.
        batch: The drawn examples.
        context: What the client knows.
        noise: The result of :func:`~fl_lightning.round.privacy.draw_noise`.
        num_together: Number of clients under the same ``vmap``, which share the memory.
    """
    numbers = sum(parameter.numel() for parameter in trained.values()) * num_together
    loss: Callable[[Parameters, PoissonBatch], Tensor] = functools.partial(
        _loss, client, stage.objective, context, others
    )
    most = max(1, GRADIENT_NUMBERS // max(1, numbers))
    result = private_gradient(loss, trained, batch, noise, privacy.max_grad_norm, most)
    penalty = stage.penalty
    if penalty is None:
        return result
    pulled = torch.func.grad(lambda parameters: penalty({**others, **parameters}, context))(dict(trained))
    return {name: gradient + pulled[name] for name, gradient in result.items()}


def noise_of_step(
    numbers: KeyedNumbers, batch: Batch, trained: Parameters, privacy: RecordPrivacy
) -> dict[str, Tensor]:
    """The noise of a step, for one client or for a stack."""
    return draw_noise(numbers, batch.key, trained, privacy.noise_multiplier)


def check_private_stage(client: ClientModule, stage: Stage) -> None:
    """Refuse a stage that private training does not cover, whatever was checked before the run.

    Raises:
        ValueError: The stage is not covered.
    """
    if client.privacy is not None:
        check_stage(stage, "this run")


def _loss(
    client: ClientModule,
    objective: Objective | None,
    context: Context,
    others: Mapping[str, Tensor],
    trained: Parameters,
    batch: PoissonBatch,
) -> Tensor:
    """The loss of one example."""
    whole = {**others, **trained}
    if objective is None:
        return client.objective(whole, batch, context)
    return objective(client, whole, batch, context)
