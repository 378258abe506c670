"""Backdoors, where a picture blended into images makes the model predict the attacker's class, and simple tuning.

Chen, Liu, Li, Lu, Song: "Targeted Backdoor Attacks on Deep Learning Systems Using Data Poisoning", 2017 (Blended), as
used on federations by Qin, Yao, Chen, Li, Ding, Cheng: "Revisiting Personalized Federated Learning: Robustness Against
Backdoor Attacks", KDD 2023 (Simple-Tuning), and by Panacea, section V-D and Table V.

Shape legend: N examples of a client; channels, height and width are those of an image.
"""

import copy
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fl_lightning.batches.base import Collator
from fl_lightning.data import ClientExamples
from fl_lightning.kernels.randomness import derive_key, generator
from fl_lightning.round.metrics import summarize
from fl_lightning.round.payload import Payload, from_wire
from fl_lightning.round.stage import Evaluation, tune
from fl_lightning.run.callback import Callback, Trainer
from fl_lightning.run.processes import gather
from fl_lightning.strategies.base import select_names

from .forgery import Attack, benign_clients, benign_rows
from .poisoning import require_classes


class Backdoor(Attack):
    """Malicious clients blend a picture into a part of their training images and give them the target class.

    ``test/asr`` is the attack's success rate: the share of the benign clients' test images of other classes, with the
    picture blended in, that their models assign to the target class (mean over the clients, like accuracy; the attacker
    wants it high); ``malicious/test/asr`` is that of the malicious clients. Accuracies are on clean images.

    Args:
        picture: A ``.png`` file, resized to the images, or a ``.npy`` file with numbers in [0, 1] in the shape of an
            image; None for noise drawn once, which stands for the cartoon of the papers.
        blend: α of x <- (1 - α) x + α picture, in (0, 1].
        poisoned_fraction: Share of a malicious client's training images, in (0, 1].
        target: The class they are given.
        ratio: Share of the training clients that are malicious, in [0, 1); without ``ratio`` and ``clients`` it is one
            client.
        clients: The indices of the malicious clients, instead of ``ratio``.
        seed: Seed of every draw; None for that of the run.

    Raises:
        ValueError: A value is out of range, or the picture is not a picture.
    """

    lone: ClassVar[bool] = True
    invents_stages = True

    def __init__(
        self,
        *,
        picture: str | None = None,
        blend: float = 0.2,
        poisoned_fraction: float = 0.5,
        target: int = 1,
        ratio: float | None = None,
        clients: Sequence[int] | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(ratio=ratio, clients=clients, seed=seed)
        for name, value in {"blend": blend, "poisoned_fraction": poisoned_fraction}.items():
            if not 0 < value <= 1:
                raise ValueError(f"Backdoor.{name} must be in (0, 1], got {value}")
        if picture is not None and Path(picture).suffix not in (".png", ".npy"):
            raise ValueError(f"Backdoor.picture must be a .png or a .npy file, got {picture}")
        self.picture = picture
        self.blend = blend
        self.poisoned_fraction = poisoned_fraction
        self.target = target
        self._collator: Collator | None = None

    def on_clients(self, trainer: Trainer, clients: tuple[Any, ...]) -> tuple[Any, ...]:
        """Poison the training images of the malicious clients, and prepare triggered test images for every client."""
        changed = list(super().on_clients(trainer, clients))
        outputs_of = trainer.run.registry.outputs_of
        for client in clients:
            require_images(client)
            require_classes(self, client, outputs_of(client))
        num_classes = min(map(outputs_of, clients))
        if not 0 <= self.target < num_classes:
            raise ValueError(f"Backdoor.target must be one of the {num_classes} classes, 0 to {num_classes - 1}")
        shape = clients[0].x_NX.shape[1:]
        self.trigger = noise(shape, self.root) if self.picture is None else read_picture(self.picture, shape)
        self.triggered = [self._triggered(client) for client in clients]
        self._collator = None
        for client in self.malicious:
            changed[client] = self._poisoned(changed[client], generator(self.root, "backdoor", client))
        return tuple(changed)

    def _stamp(self, x_NX: Tensor) -> Tensor:
        return (1 - self.blend) * x_NX + self.blend * self.trigger.to(x_NX)

    def _poisoned(self, client: ClientExamples, draw: torch.Generator) -> ClientExamples:
        """The client with the picture and the target class in some of its training images."""
        training = client.train_mask_N.nonzero().flatten()
        number = round(self.poisoned_fraction * len(training))
        chosen = training[torch.randperm(len(training), generator=draw)[:number]]
        x_NX, y_N = client.x_NX.clone(), client.y_N.clone()
        x_NX[chosen] = self._stamp(x_NX[chosen])
        y_N[chosen] = self.target
        return dataclasses.replace(client, x_NX=x_NX, y_N=y_N)

    def _triggered(self, client: ClientExamples) -> ClientExamples:
        """The client's test images of other classes with the picture in them, all labeled with the target class."""
        x_NX = self._stamp(client.x_NX[client.test_mask_N & (client.y_N != self.target)])
        nothing_N = torch.zeros(len(x_NX), dtype=torch.bool)
        return dataclasses.replace(
            client,
            x_NX=x_NX,
            y_N=torch.full((len(x_NX),), self.target),
            train_mask_N=nothing_N,
            val_mask_N=nothing_N,
            test_mask_N=~nothing_N,
        )

    def success(self, trainer: Trainer, evaluation: Evaluation, round_idx: int, prefix: str = "") -> dict[str, float]:
        """The attack's success on a model: ``test/asr`` and ``malicious/test/asr`` after the prefix."""
        if self._collator is None:
            device, dtype = trainer.fabric.device, trainer.dtype
            self._collator = trainer.run.datamodule.collator(self.triggered, device=device, dtype=dtype)
        asked = tuple(client for client in trainer.run.training_clients if self.triggered[client].size)
        run = trainer.run
        mine = run.executor.evaluate({"": evaluation}, asked, round_idx, collator=self._collator)[""]
        scores = gather(trainer.fabric, mine.upload)
        if scores.clients and "test/acc" not in scores.extras:
            raise ValueError(f"Backdoor needs the clients' test/acc, but they score {', '.join(sorted(scores.extras))}")
        malicious, benign = set(self.malicious), set(benign_clients(trainer))
        metrics = {}
        for name, group in (("test/asr", benign), ("malicious/test/asr", malicious)):
            members = [client for client in scores.clients if client in group]
            if members:
                totals = Payload(clients=tuple(members), extras={"asr": scores.rows(members).extras["test/acc"]})
                metrics[prefix + name] = summarize(totals)["asr"]
        return metrics

    def on_evaluate(self, trainer: Trainer, metrics: dict[str, float], prefix: str) -> None:
        """Add the attack's success on the models that are the result."""
        super().on_evaluate(trainer, metrics, prefix)
        if not prefix:
            evaluation = trainer.run.strategy.evaluations(trainer.run.training_clients)[""]
            metrics.update(self.success(trainer, evaluation, trainer.run.scored_round))


class SimpleTuning(Callback):
    """After the last round, every client reinitializes its classifier and trains only it on its own data (on a copy).

    The metrics of the tuned models are logged with the last round and are part of the run's result: ``tuned/test/acc``
    (and the clients' other metrics), ``tuned/benign/test/acc`` with an attack, and ``tuned/test/asr`` with a
    :class:`Backdoor`. The run's own models are unchanged.

    Args:
        num_epochs: Local epochs of the tuning, with a new optimizer.
        classifier: Shell-style patterns of the parameters that are reinitialized and trained, of both models where a
            client has two.
        seed: Seed of the initialization; None for that of the run.

    Raises:
        ValueError: A value is out of range.
    """

    invents_stages = True

    def __init__(
        self, *, num_epochs: int = 10, classifier: Sequence[str] = ("*head.*",), seed: int | None = None
    ) -> None:
        if num_epochs < 1:
            raise ValueError(f"SimpleTuning.num_epochs must be at least 1, got {num_epochs}")
        if not classifier:
            raise ValueError("SimpleTuning.classifier is empty: name the parameters of the classifier")
        self.num_epochs = num_epochs
        self.classifier = tuple(classifier)
        self.seed = seed

    def on_fit_start(self, trainer: Trainer) -> None:
        """Refuse patterns that match nothing, and clients of different architectures."""
        if len(trainer.run.architectures) > 1:
            raise ValueError("SimpleTuning is for clients of one architecture: give model.net one net, or leave it out")
        select_names(list(trainer.run.architectures[0]), self.classifier)

    def on_fit_end(self, trainer: Trainer) -> None:
        """Fine-tune the classifiers and score them, unless the run was interrupted."""
        if trainer.run.interrupted:
            return
        evaluation = self._tuning(trainer)
        run = trainer.run
        mine = run.executor.evaluate({"": evaluation}, run.training_clients, run.round_idx)[""]
        scores, directions = gather(trainer.fabric, mine.upload), run.selection.directions
        metrics = summarize(scores, "tuned/", directions)
        if any(isinstance(callback, Attack) for callback in trainer.callbacks):
            metrics |= summarize(benign_rows(trainer, scores), "tuned/benign/", directions)
        for callback in trainer.callbacks:
            if isinstance(callback, Backdoor):
                metrics |= callback.success(trainer, evaluation, run.round_idx, "tuned/")
        trainer.run.selection.result.update(metrics)
        for logger in trainer.run.loggers:
            logger.log_metrics(metrics, trainer.run.round_idx - 1)

    def _tuning(self, trainer: Trainer) -> Evaluation:
        """The models that are the result, with a new classifier that is trained."""
        clients = trainer.run.training_clients
        result = trainer.run.strategy.evaluations(clients)[""].payload
        shapes = {name: parameter.shape for name, parameter in trainer.run.architectures[0].items()}
        parameters = {} if result is None else from_wire(result.parameters, shapes)
        fresh = self._draw(trainer)
        for name in select_names(list(shapes), self.classifier):
            parameters[name] = fresh[name].to(trainer.run.architectures[0][name]).expand(len(clients), *shapes[name])
        payload = Payload(clients=clients, parameters=parameters)
        return Evaluation(payload=payload, tuning=tune(self.num_epochs, trained=self.classifier))

    def _draw(self, trainer: Trainer) -> dict[str, Tensor]:
        """Parameters of a newly built net."""
        client = copy.deepcopy(trainer.run.executor.client)
        with torch.random.fork_rng([]):
            torch.manual_seed(derive_key(trainer.run.seed if self.seed is None else self.seed, "simple tuning"))
            registry, build_net = trainer.run.registry, trainer.run.strategy.build_net
            client.build(registry.num_features, registry.num_outputs, build_net)
        return {name: parameter.detach() for name, parameter in client.parameter_dict().items()}


def require_images(client: Any) -> None:
    """Refuse clients without images.

    Raises:
        ValueError: The client's inputs are not (N, channels, height, width).
    """
    if client.inputs.dim() != 4:
        client_data = "a graph" if client.edge_facts else f"examples of shape {tuple(client.inputs.shape[1:])}"
        raise ValueError(
            f"Backdoor is for images (channels, height, width), but {client.name} has {client_data}: "
            f"choose another attack"
        )


def noise(shape: torch.Size, seed: int) -> Tensor:
    """Uniform noise in [0, 1], the same for all clients."""
    return torch.rand(shape, generator=generator(seed, "backdoor picture"))


def read_picture(path: str, shape: torch.Size) -> Tensor:
    """Read a picture as an image of the given shape (channels, height, width), in [0, 1].

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: Its numbers are out of range, or a ``.npy`` file has another shape.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"Backdoor.picture: there is no file {path}")
    if Path(path).suffix == ".npy":
        image = torch.from_numpy(np.load(path, allow_pickle=False)).float()
        if image.shape != shape or not 0 <= float(image.min()) <= float(image.max()) <= 1:
            raise ValueError(
                f"Backdoor.picture: {path} has shape {tuple(image.shape)} and numbers from {float(image.min()):g} to "
                f"{float(image.max()):g}; it must have {tuple(shape)}, in [0, 1]"
            )
        return image
    from matplotlib.image import imread

    pixels = torch.from_numpy(np.array(imread(path), dtype=np.float32))  # in [0, 1]
    colors = pixels[None, :, :, None] if pixels.dim() == 2 else pixels[None]
    if colors.shape[-1] in (2, 4):  # transparent pixels become white
        opacity = colors[..., -1:]
        colors = opacity * colors[..., :-1] + (1 - opacity)
    if colors.shape[-1] != shape[0]:
        colors = colors.mean(dim=-1, keepdim=True).expand(*colors.shape[:-1], shape[0])
    return F.interpolate(colors.movedim(-1, 1), size=tuple(shape[1:]), mode="bilinear", antialias=True)[0]
