"""Differential privacy of single training examples: clipped and noisy gradients (DP-SGD).

Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang: "Deep Learning with Differential Privacy", CCS 2016, algorithm
1, as in Opacus: each example is drawn with probability q, its gradient is clipped to a norm S, normal noise of standard
deviation z S is added to the sum, and the result is divided by the expected number of examples.

Shape legend: C clients, B drawn examples (padded), D numbers of the trained parameters. There is no C for one client.
"""

import functools
import logging
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.batches.poisson import PoissonBatch
from fl_lightning.counts import Counted
from fl_lightning.extras import require
from fl_lightning.kernels.randomness import random_normal, random_uniform, subkey
from fl_lightning.round.context import Parameters

#: Limit of the gradient values of single examples that are in memory at once (256 MiB in float32).
GRADIENT_NUMBERS = 64 * 2**20


class PrivacySpent(ValueError):
    """One more stage would reveal more about a client's examples than is allowed."""


class RecordPrivacy(Counted):
    """Differential privacy of each training example of a client, whatever else the client has.

    The sampling probability is the data's batch size over the client's number of training examples; 1 without a batch
    size. ε compares a client's data with the same data in which one training example counts for nothing; the number of
    examples is assumed to be public. It covers all that a client's training sends, over all rounds, but not metrics.

    Args:
        max_grad_norm: S, the largest Euclidean norm of one example's gradient over all trained parameters, positive.
        noise_multiplier: z, at least 0; without noise nothing is private, and ε is infinite.
        delta: δ, in (0, 1); well below one over the number of examples.
        max_epsilon: The ε that no client may exceed: it fails instead of training further. None for no bound.

    Raises:
        ValueError: A value is out of range, or dp-accounting is not installed.
    """

    settings_prefix = "model.privacy."

    def __init__(
        self, *, max_grad_norm: float, noise_multiplier: float, delta: float = 1e-5, max_epsilon: float | None = None
    ) -> None:
        for name, value in {"max_grad_norm": max_grad_norm, "max_epsilon": max_epsilon}.items():
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"model.privacy.{name} must be positive and finite, got {value}")
        if not (noise_multiplier >= 0 and math.isfinite(noise_multiplier)):
            raise ValueError(f"model.privacy.noise_multiplier must be at least 0 and finite, got {noise_multiplier}")
        if not 0 < delta < 1:
            raise ValueError(f"model.privacy.delta must be in (0, 1), got {delta}")
        require("privacy", "model.privacy")
        self.max_grad_norm = max_grad_norm
        self.noise_multiplier = noise_multiplier
        self.delta = delta
        self.max_epsilon = max_epsilon


# ---------------------------------------------------------------- random numbers


class KeyedNumbers:
    """Random numbers from keys of the run's seed: the same in every executor, and known to all who have the seed."""

    def uniform(self, key: Tensor, count: int) -> Tensor:
        """Numbers in (0, 1), float64 (*key.shape, count); the first ones do not depend on ``count``."""
        return random_uniform(subkey(key, "poisson"), count, 1)[..., 0]

    def normal(self, key: Tensor, count: int) -> Tensor:
        """Standard normal numbers, float64 (*key.shape, count)."""
        return random_normal(subkey(key, "noise"), 1, count)[..., 0, :]


class SecretNumbers(KeyedNumbers):
    """Random numbers from the system's entropy: nobody can subtract the noise, and no draw can be repeated."""

    def uniform(self, key: Tensor, count: int) -> Tensor:
        """Numbers in (0, 1), float64 (*key.shape, count): odd multiples of 2**-53."""
        shape = (*key.shape, count)
        words = np.frombuffer(os.urandom(8 * math.prod(shape)), dtype=np.uint64) >> np.uint64(12)
        return torch.from_numpy((words.astype(np.float64) + 0.5) / 2.0**52).view(shape).to(key.device)

    def normal(self, key: Tensor, count: int) -> Tensor:
        """Standard normal numbers, float64 (*key.shape, count)."""
        drawn: Tensor = torch.special.ndtri(self.uniform(key, count))
        return drawn


def draw_noise(
    numbers: KeyedNumbers, key: Tensor, parameters: Parameters, noise_multiplier: float
) -> dict[str, Tensor]:
    """Normal numbers of standard deviation ``noise_multiplier``, with the names and shapes of the parameters, (*shape).

    Args:
        numbers: Source of random numbers.
        key: int64 key of the step, scalar, or (C,) if the parameters have a client dimension.
        parameters: The trained parameters.
        noise_multiplier: The standard deviation.
    """
    if not noise_multiplier:
        return {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    sizes = [math.prod(parameter.shape[key.dim() :]) for parameter in parameters.values()]
    drawn = torch.split(noise_multiplier * numbers.normal(key, sum(sizes)), sizes, dim=-1)
    return {name: part.reshape(p.shape).to(p.dtype) for (name, p), part in zip(parameters.items(), drawn, strict=True)}


# ---------------------------------------------------------------- gradients


def private_gradient(
    loss: Callable[[Parameters, PoissonBatch], Tensor],
    trained: Parameters,
    batch: PoissonBatch,
    noise: Parameters,
    max_grad_norm: float,
    most_examples: int,
) -> dict[str, Tensor]:
    """The noisy mean of the clipped gradients of a client's drawn examples, by name; also under ``vmap``.

    An example whose gradient is not finite counts as one whose gradient is zero.

    Args:
        loss: Loss of a batch of one example.
        trained: The parameters whose gradient is taken.
        batch: The drawn examples of one client.
        noise: Normal numbers of standard deviation z, by the same names.
        max_grad_norm: S.
        most_examples: Number of examples whose gradients are in memory at once.
    """
    fields = {name: tensor for name, tensor in batch.tensors().items() if name not in ("key", "expected")}
    yes, no = torch.ones_like(batch.train_mask[:1]), torch.zeros_like(batch.train_mask[:1])
    masks = {"example_mask": yes, "train_mask": yes, "val_mask": no, "test_mask": no}

    def of_one(trained: Parameters, index: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        key = subkey(batch.key ^ index, "example")  # dropout is drawn for each example separately
        return loss(
            trained, batch.replace({name: tensor[None] for name, tensor in tensors.items()} | masks | {"key": key})
        )

    index_B = torch.arange(batch.train_mask.shape[0], device=batch.key.device)
    gradients = torch.vmap(torch.func.grad(of_one), in_dims=(None, 0, 0))
    total: dict[str, Tensor] = {}
    for start in range(0, len(index_B), most_examples):
        some = slice(start, start + most_examples)
        gradient = gradients(dict(trained), index_B[some], {name: tensor[some] for name, tensor in fields.items()})
        clipped = clipped_sum(gradient, batch.train_mask[some], max_grad_norm)
        total = {name: total[name] + part if total else part for name, part in clipped.items()}
    return {name: ((total[name] + max_grad_norm * noise[name]) / batch.expected).to(trained[name]) for name in total}


def clipped_sum(gradients: Parameters, drawn_B: Tensor, max_grad_norm: float) -> dict[str, Tensor]:
    """The sum of examples' gradients, each clipped to a norm of at most ``max_grad_norm``; at least in float32.

    Args:
        gradients: Gradients of each example, (B, *shape) by name.
        drawn_B: Which examples count.
        max_grad_norm: S.
    """
    wide = {name: g.to(torch.promote_types(g.dtype, torch.float32)) for name, g in gradients.items()}
    norm_B = torch.stack([g.flatten(1).norm(dim=1) if g.dim() > 1 else g.abs() for g in wide.values()]).norm(dim=0)
    counts_B = drawn_B & norm_B.isfinite()
    factor_B = (max_grad_norm / norm_B.clamp(min=torch.finfo(norm_B.dtype).tiny)).clamp(max=1.0)

    def total(gradient: Tensor) -> Tensor:
        shape = (-1, *[1] * (gradient.dim() - 1))
        return torch.where(counts_B.view(shape), gradient * factor_B.view(shape), 0.0).sum(dim=0)

    return {name: total(gradient) for name, gradient in wide.items()}


# ---------------------------------------------------------------- accounting

#: Sampling probability and noise multiplier of a step.
Step = tuple[float, float]


def epsilon_of(steps: Mapping[Step, float], delta: float, *, precision: float = 0.0) -> float:
    """ε of training steps, composed as Rényi differential privacy by ``dp-accounting``.

    Mironov: "Rényi Differential Privacy of the Gaussian Mechanism", CSF 2017; for sampled steps Mironov, Talwar, Zhang:
    "Rényi Differential Privacy of the Sampled Gaussian Mechanism", 2019.

    Args:
        steps: Number of steps for each sampling probability and noise multiplier.
        delta: δ.
        precision: The sum, over additional Gaussian mechanisms, of their noise multipliers to the power of -2.
    """
    from dp_accounting.rdp import compute_epsilon

    taken = {step: count for step, count in steps.items() if count}
    if not taken and not precision:
        return 0.0
    if any(not multiplier for _, multiplier in taken):
        return math.inf
    parts = [count * np.array(_renyi(*step)[1]) for step, count in taken.items()]
    orders = _renyi(1.0, 1.0)[0]
    parts.append(precision / 2 * np.array(orders))
    return float(compute_epsilon(orders, np.sum(parts, axis=0), delta)[0])


@functools.lru_cache(maxsize=2**16)
def _renyi(rate: float, multiplier: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Orders, and the Rényi divergence of one step at each of them, which take a tenth of a second to compute."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.rdp import RdpAccountant

    gaussian = GaussianDpEvent(multiplier)
    accountant = RdpAccountant()
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it would report each order that is left out of the bound
    try:
        accountant.compose(gaussian if rate >= 1 else PoissonSampledDpEvent(rate, gaussian))
    finally:
        logger.setLevel(level)
    return tuple(map(float, accountant._orders)), tuple(map(float, accountant._rdp))


# ---------------------------------------------------------------- the budget of a client


def spend(privacy: RecordPrivacy, spent_3: Tensor, rate: float, num_steps: int) -> Tensor:
    """What a client has spent after some more steps: their number, sampling probability and noise multiplier, (3,).

    Args:
        privacy: The settings.
        spent_3: What it has spent before.
        rate: The sampling probability.
        num_steps: Number of further steps.

    Raises:
        PrivacySpent: Its ε would be above ``max_epsilon``, or cannot be computed any more.
    """
    before, old_rate, old_multiplier = spent_3.tolist()
    if not num_steps:
        return spent_3
    if before and (old_rate, old_multiplier) != (rate, privacy.noise_multiplier):
        raise PrivacySpent(
            f"it has taken {before:.0f} steps with sampling probability {old_rate:g} and noise multiplier "
            f"{old_multiplier:g}, now they are {rate:g} and {privacy.noise_multiplier:g}: go on with the settings of "
            "the checkpoint, or begin a new run"
        )
    new = [before + num_steps, rate, privacy.noise_multiplier]
    if privacy.max_epsilon is not None:
        after = epsilon_of({(rate, privacy.noise_multiplier): new[0]}, privacy.delta)
        if after > privacy.max_epsilon:
            raise PrivacySpent(
                f"its privacy is spent: ε would be {after:.3g}, model.privacy.max_epsilon is {privacy.max_epsilon:g}"
            )
    return torch.tensor(new, dtype=spent_3.dtype, device=spent_3.device)


def epsilon_spent(privacy: RecordPrivacy, spent_3: Tensor) -> float:
    """ε of what :func:`spend` has counted."""
    count, rate, multiplier = spent_3.tolist()
    return epsilon_of({(rate, multiplier): count}, privacy.delta)


# ---------------------------------------------------------------- checks


def check_stage(stage: Any, of: str) -> None:
    """Refuse a stage (:class:`~fl_lightning.round.stage.Stage`) that reveals more about examples than their gradients.

    Args:
        stage: The stage.
        of: What the stage belongs to, for the message.

    Raises:
        ValueError: It reveals more.
    """
    why = "takes several steps on one draw, where each step needs one of its own" if stage.program.repeat > 1 else ""
    if stage.program.rewrite is not None:
        why = "makes new data of the examples, without noise"
    for name, what in {"client_state": "remembers", "client_outputs": "sends"}.items():
        if selected := getattr(stage, name):
            why = f"{what} {', '.join(sorted(selected))}, made of the examples without noise"
    if why:
        raise ValueError(
            f"model.privacy does not cover {of}, whose stage {stage.name!r} {why}: choose a strategy whose clients "
            "train and send parameters alone, such as FedAvg, FedProx, FedPer or Ditto, or leave model.privacy out"
        )


def check_tuning(tuning: Any, of: str) -> None:
    """Refuse training before an evaluation, which would not be counted.

    Raises:
        ValueError: There is such training.
    """
    if tuning is not None:
        raise ValueError(
            f"model.privacy does not cover {of}, which trains models before they are evaluated: choose a strategy "
            "without that, such as FedAvg, FedProx, FedPer or Ditto, or leave model.privacy out"
        )
