"""The choice of malicious clients, the metrics of the benign ones, and attacks that forge what a client sends.

An attack changes only the data of the chosen clients or what they send; server and benign clients do not notice it.
Attacks on parameters and labels are in ``poisoning.py``, backdoors in ``backdoor.py``; defenses of the server are in
``fl_lightning.strategies.mixing.aggregation``.
"""

import dataclasses
import fnmatch
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from fl_lightning.files import whole_file
from fl_lightning.kernels.randomness import generator
from fl_lightning.renamed import refuse_former_names
from fl_lightning.round.metrics import summarize
from fl_lightning.round.payload import Payload
from fl_lightning.round.stage import Stage
from fl_lightning.run.callback import Callback, Trainer


class Attack(Callback):
    """Base class of all attacks: it chooses the malicious clients and scores the benign ones separately.

    Every metric of an evaluation is also reported over the benign clients, such as ``benign/test/acc`` for ``test/acc``
    (with several attacks, over clients that none of them chose); ``trainer.monitor`` may be ``benign/val/acc``. Every
    round has ``num_malicious``, the number of all malicious clients, and ``malicious_clients.json`` in the run's folder
    names them. The malicious clients depend only on the seed: attacks with the same seed choose the same clients, and a
    larger ratio adds to them.

    Args:
        ratio: Share of the training clients that are malicious, in [0, 1), rounded to whole clients; 0 for none.
        clients: The indices of the malicious clients, instead of ``ratio``.
        seed: Seed of every draw; None for that of the run.

    Raises:
        ValueError: A value is out of range, or not exactly one of ``ratio`` and ``clients`` is given.
    """

    #: Whether one client is malicious if neither a ratio nor clients are given.
    lone: ClassVar[bool] = False
    needs_data = True
    changes_training = True

    def __init__(
        self, *, ratio: float | None = None, clients: Sequence[int] | None = None, seed: int | None = None
    ) -> None:
        name = type(self).__name__
        if ratio is not None and clients is not None:
            raise ValueError(f"give {name}.ratio or {name}.clients, not both")
        if ratio is None and clients is None and not self.lone:
            raise ValueError(f"{name} needs ratio (for example 0.2) or clients (their indices)")
        if ratio is not None and not 0 <= ratio < 1:
            raise ValueError(f"{name}.ratio must be in [0, 1), got {ratio}")
        self.ratio = ratio
        self.clients = clients
        self.seed = seed
        self.malicious: tuple[int, ...] = ()
        self._of_checkpoint: list[int] | None = None

    def on_clients(self, trainer: Trainer, clients: tuple[Any, ...]) -> tuple[Any, ...]:
        """Choose the malicious clients."""
        self.root = trainer.run.seed if self.seed is None else self.seed
        self.malicious = self._choose(trainer.run.training_clients)
        self._of_checkpoint = None
        return clients

    def _choose(self, training_clients: Sequence[int]) -> tuple[int, ...]:
        name, count = type(self).__name__, len(training_clients)
        if self.clients is not None:
            chosen = sorted(set(self.clients))
            if strangers := sorted(set(chosen) - set(training_clients)):
                raise ValueError(
                    f"{name}.clients: {strangers} are not among the training clients, {list(training_clients)}"
                )
        else:
            number = 1 if self.ratio is None else math.floor(self.ratio * count + 0.5)
            if self.ratio and not number:
                raise ValueError(
                    f"{name}.ratio={self.ratio} of {count} training clients is no client: raise it to at least "
                    f"{0.5 / count:.3g}, or set it to 0"
                )
            order = torch.randperm(count, generator=generator(self.root, "malicious clients")).tolist()
            chosen = sorted(training_clients[position] for position in order[:number])
        if len(chosen) == count:
            raise ValueError(f"{name}: all {count} training clients would be malicious; leave at least one benign")
        return tuple(chosen)

    def on_fit_start(self, trainer: Trainer) -> None:
        """Record which clients are malicious; a resumed run must have the same ones."""
        name = type(self).__name__
        if self._of_checkpoint is not None and tuple(self._of_checkpoint) != self.malicious:
            raise ValueError(
                f"{name}: the malicious clients of the checkpoint are {self._of_checkpoint}, now they would be "
                f"{list(self.malicious)}: use its ratio, clients and seed"
            )
        if trainer.fabric.is_global_zero:
            record = {
                f"{number} {type(attack).__name__}": [trainer.run.registry.names[client] for client in attack.malicious]
                for number, attack in enumerate(_attacks(trainer), start=1)
            }
            with whole_file(trainer.run.folder / "malicious_clients.json") as temporary:
                temporary.write_text(json.dumps(record, indent=1) + "\n")

    def on_evaluate(self, trainer: Trainer, metrics: dict[str, float], prefix: str) -> None:
        """Add the metrics over the benign clients; all unseen clients are benign."""
        if prefix:
            return
        run = trainer.run
        for kind, scores in run.scores.items():
            if scores.clients and set(scores.clients) <= set(run.training_clients):
                metrics.update(summarize(benign_rows(trainer, scores), f"benign/{kind}", run.selection.directions))

    def on_round_end(self, trainer: Trainer, metrics: dict[str, float]) -> None:
        """Log the number of malicious clients."""
        metrics["num_malicious"] = len(malicious_clients(trainer))

    def state_dict(self) -> dict[str, Any]:
        """Which clients are malicious."""
        return {"clients": list(self.malicious)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore which clients are malicious."""
        self._of_checkpoint = list(state["clients"])


def _attacks(trainer: Trainer) -> list[Attack]:
    return [callback for callback in trainer.callbacks if isinstance(callback, Attack)]


def malicious_clients(trainer: Trainer) -> tuple[int, ...]:
    """The clients that any of the trainer's attacks has chosen, ascending."""
    return tuple(sorted({client for attack in _attacks(trainer) for client in attack.malicious}))


def benign_clients(trainer: Trainer) -> tuple[int, ...]:
    """The training clients that no attack has chosen, ascending."""
    malicious = set(malicious_clients(trainer))
    return tuple(client for client in trainer.run.training_clients if client not in malicious)


def benign_rows(trainer: Trainer, scores: Payload) -> Payload:
    """The scores of the benign clients among those that were scored."""
    benign = set(benign_clients(trainer))
    return scores.rows([client for client in scores.clients if client in benign])


def all_stages(trainer: Trainer) -> Iterator[Stage]:
    """Every stage that a run has, before and in its rounds."""
    yield from trainer.run.strategy.initial_stages()
    for round_idx in range(trainer.num_rounds):
        yield from trainer.run.strategy.stages(round_idx)


def replace_rows(tensor: Tensor, rows: Sequence[int], values: Tensor) -> Tensor:
    """A copy of a payload's tensor with other values for some clients."""
    changed = tensor.clone()
    changed[torch.tensor(rows, dtype=torch.int64, device=tensor.device)] = values.to(tensor)
    return changed


@refuse_former_names
class OutputAttack(Attack, ABC):
    """Base class of attacks in which malicious clients send forged outputs: embeddings, signatures, prototypes.

    A parameter that is communicated under the name of a forged output (such as FedAux's projection vector, if it is
    mixed) is the same thing and gets the same values.

    Args:
        scale: τ, the standard deviation of the drawn values, positive.
        client_outputs: Shell-style patterns of the client outputs; None for all.
        ratio: Share of the training clients that are malicious, in [0, 1).
        clients: The indices of the malicious clients, instead of ``ratio``.
        seed: Seed of every draw; None for that of the run.
    """

    def __init__(
        self,
        *,
        scale: float = 5.0,
        client_outputs: Sequence[str] | None = None,
        ratio: float | None = None,
        clients: Sequence[int] | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(ratio=ratio, clients=clients, seed=seed)
        if not scale > 0:
            raise ValueError(f"{type(self).__name__}.scale must be positive, got {scale}")
        self.scale = scale
        self.client_outputs = ("*",) if client_outputs is None else tuple(client_outputs)

    @abstractmethod
    def invent(self, shape: torch.Size, draw: torch.Generator) -> Tensor:
        """A client output of the given shape with standard deviation 1, float64."""

    def on_fit_start(self, trainer: Trainer) -> None:
        """Refuse strategies that never send such a client output."""
        super().on_fit_start(trainer)
        if not self.malicious:
            return
        missing, sent = set(self.client_outputs), dict[str, None]()
        for stage in all_stages(trainer):
            sent.update(dict.fromkeys(stage.client_outputs))
            missing = {pattern for pattern in missing if not fnmatch.filter(list(stage.client_outputs), pattern)}
            if not missing:
                return
        parameters = any(stage.upload or stage.flat for stage in all_stages(trainer))
        result = [*(f"the client output {name!r}" for name in sent), *(["parameters"] if parameters else [])]
        raise ValueError(
            f"{type(self).__name__}: {type(trainer.run.strategy).__name__} sends no client output that matches "
            f"{', '.join(map(repr, sorted(missing)))}; it sends {', '.join(result) or 'nothing'}. Choose another "
            "strategy or other client outputs, or ModelPoisoning for parameters"
        )

    def on_upload(self, trainer: Trainer, stage: Stage, payload: Payload) -> Payload:
        """Replace the malicious clients' outputs by forged ones."""
        rows = {client: row for row, client in enumerate(payload.clients) if client in self.malicious}
        if not rows:
            return payload
        client_outputs, parameters = dict(payload.extras), dict(payload.parameters)
        for name, tensor in payload.extras.items():
            if not any(fnmatch.fnmatch(name, pattern) for pattern in self.client_outputs):
                continue
            key = (self.root, type(self).__name__, trainer.run.round_idx, stage.name, name)
            shape = tensor.shape[1:]
            values = torch.stack([self.scale * self.invent(shape, generator(*key, client)) for client in rows])
            client_outputs[name] = replace_rows(tensor, list(rows.values()), values)
            if name in parameters and parameters[name].shape == tensor.shape and not stage.as_update:
                parameters[name] = replace_rows(parameters[name], list(rows.values()), values)
        return dataclasses.replace(payload, extras=client_outputs, parameters=parameters)


class SameValueAttack(OutputAttack):
    """Every malicious client sends x = a 1 with one number a ~ N(0, τ²), drawn again for every upload.

    FedSheafHN (Liang et al., 2024), section 4.2; τ is 5 or 20 there. The settings are those of :class:`OutputAttack`.
    """

    def invent(self, shape: torch.Size, draw: torch.Generator) -> Tensor:
        """One number, everywhere."""
        return torch.randn((), generator=draw, dtype=torch.float64).expand(shape)


class GaussianAttack(OutputAttack):
    """Every malicious client sends x ~ N(0, τ² I), drawn again for every upload.

    FedSheafHN (Liang et al., 2024), section 4.2; τ is 5 or 20 there. The settings are those of :class:`OutputAttack`.
    """

    def invent(self, shape: torch.Size, draw: torch.Generator) -> Tensor:
        """Independent numbers."""
        return torch.randn(shape, generator=draw, dtype=torch.float64)
