"""Malicious clients that poison the model through what they send, or through what they train on."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fl_lightning.executors import StageRequest
from fl_lightning.kernels.randomness import generator
from fl_lightning.round.payload import FLAT, Payload
from fl_lightning.round.stage import Stage, StageAddress
from fl_lightning.run.callback import Trainer
from fl_lightning.run.processes import gather

from .forgery import Attack, all_stages, replace_rows


class ModelPoisoning(Attack):
    """Malicious clients train honestly and send -λ times their update, which pushes the model back.

    If the strategy needs parameters instead of updates, they send what they received minus λ times the change.
    Panacea (section V-D, λ = 0.5), after Fang, Cao, Jia, Gong: "Local Model Poisoning Attacks to Byzantine-Robust
    Federated Learning", USENIX Security 2020.

    Args:
        factor: λ, positive.
        ratio: Share of the training clients that are malicious, in [0, 1).
        clients: The indices of the malicious clients, instead of ``ratio``.
        seed: Seed of the choice of clients; None for that of the run.
    """

    invents_stages = True

    def __init__(
        self,
        *,
        factor: float = 0.5,
        ratio: float | None = None,
        clients: Sequence[int] | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(ratio=ratio, clients=clients, seed=seed)
        if not factor > 0:
            raise ValueError(f"{type(self).__name__}.factor must be positive, got {factor}")
        self.factor = factor

    def on_fit_start(self, trainer: Trainer) -> None:
        """Refuse strategies whose clients never send parameters."""
        super().on_fit_start(trainer)
        if self.malicious and not any(stage.upload or stage.flat for stage in all_stages(trainer)):
            raise ValueError(
                f"{type(self).__name__}: the clients of {type(trainer.run.strategy).__name__} send no parameters, so "
                "there is nothing to poison: choose another strategy"
            )

    def on_send(self, trainer: Trainer, stage: Stage, payload: Payload | None) -> None:
        """Keep the parameters that the malicious clients begin with: those the server sends, or else their own."""
        wanted = {FLAT} if stage.flat else set(stage.upload)
        taking_part = trainer.run.training_clients if payload is None else payload.clients
        malicious = tuple(client for client in taking_part if client in self.malicious)
        self._began = Payload(clients=())
        if wanted and malicious and not stage.as_update:
            sent = payload is not None and wanted <= payload.parameters.keys()
            self._began = payload.rows(malicious) if payload and sent else _ask(trainer, stage, payload, malicious)

    def on_upload(self, trainer: Trainer, stage: Stage, payload: Payload) -> Payload:
        """Reverse the updates of the malicious clients."""
        able = self.malicious if stage.as_update else self._began.clients
        clients = [client for client in payload.clients if client in able]
        if not clients or not payload.parameters:
            return payload
        rows = [payload.clients.index(client) for client in clients]
        began = {} if stage.as_update else self._began.rows(clients).parameters
        parameters: dict[str, Tensor] = {}
        for name, tensor in payload.parameters.items():
            start = began[name].to(tensor) if began else torch.zeros_like(tensor[rows])
            parameters[name] = replace_rows(tensor, rows, start - self.factor * (tensor[rows] - start))
        outputs = {name: parameters.get(name, tensor) for name, tensor in payload.extras.items()}  # sent once if both
        return dataclasses.replace(payload, parameters=parameters, extras=outputs)


def _ask(trainer: Trainer, stage: Stage, payload: Payload | None, clients: Sequence[int]) -> Payload:
    """What some clients, of all processes, would send in a stage without training."""
    question = Stage(name=stage.name, upload=stage.upload)
    address = StageAddress(phase="callback", round_idx=trainer.run.round_idx, name=stage.name)
    request = StageRequest(stage=question, address=address, work_fraction=dict.fromkeys(clients, 1.0), payload=payload)
    return gather(trainer.fabric, trainer.run.executor.run(request).upload)


class SignFlip(ModelPoisoning):
    """Malicious clients send the opposite of their update: :class:`ModelPoisoning` with λ = 1.

    Args:
        ratio: Share of the training clients that are malicious, in [0, 1).
        clients: The indices of the malicious clients, instead of ``ratio``.
        seed: Seed of the choice of clients; None for that of the run.
    """

    def __init__(
        self, *, ratio: float | None = None, clients: Sequence[int] | None = None, seed: int | None = None
    ) -> None:
        super().__init__(factor=1.0, ratio=ratio, clients=clients, seed=seed)


class LabelFlipping(Attack):
    """Malicious clients train on random labels; their validation and test labels stay true.

    Panacea (section V-A): "the malicious clients randomly flip the labels of their local data samples for training". We
    read flipping as a change: every training label becomes one of the other classes, each as likely as the next. With
    two classes that is the opposite label; ``may_keep`` draws from all classes, the true one included.

    Args:
        may_keep: Draw each label from all classes, so that some stay unchanged.
        ratio: Share of the training clients that are malicious, in [0, 1).
        clients: The indices of the malicious clients, instead of ``ratio``.
        seed: Seed of the choice of clients and of the labels; None for that of the run.
    """

    def __init__(
        self,
        *,
        may_keep: bool = False,
        ratio: float | None = None,
        clients: Sequence[int] | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(ratio=ratio, clients=clients, seed=seed)
        self.may_keep = may_keep

    def on_clients(self, trainer: Trainer, clients: tuple[Any, ...]) -> tuple[Any, ...]:
        """Change the labels of the malicious clients' training examples."""
        changed = list(super().on_clients(trainer, clients))
        for client in self.malicious:
            num_classes = trainer.run.registry.outputs_of(changed[client])
            require_classes(self, changed[client], num_classes)
            draw = generator(self.root, "label flipping", client)
            changed[client] = self._flip(changed[client], num_classes, draw)
        return tuple(changed)

    def _flip(self, client: Any, num_classes: int, draw: torch.Generator) -> Any:
        first = 0 if self.may_keep else 1
        shift_N = torch.randint(first, num_classes, client.y_N.shape, generator=draw)
        flipped_N = (client.y_N + shift_N) % num_classes
        return dataclasses.replace(client, y_N=torch.where(client.train_mask_N, flipped_N, client.y_N))


def require_classes(attack: Attack, client: Any, num_classes: int) -> None:
    """Refuse data without classes.

    Raises:
        ValueError: The client has targets of a regression, or there is one class only.
    """
    if client.y_N.is_floating_point() or num_classes < 2:
        what = "numbers to predict" if client.y_N.is_floating_point() else "a single class"
        raise ValueError(
            f"{type(attack).__name__} is for classification, but {client.name} has {what}: use ModelPoisoning, or "
            "other data"
        )
