"""A site's checks of a server's messages: anything that no honest server sends is refused before anything changes."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fl_lightning.batches.client_data import ClientData
from fl_lightning.remote.job_schema import PRECISIONS, Job
from fl_lightning.remote.message import Message
from fl_lightning.remote.policy import Refused, SitePolicy
from fl_lightning.remote.schema import OF_SUMS, QUESTIONS, WrongMessage, check_facts, shown
from fl_lightning.round.payload import FLAT
from fl_lightning.tasks import Task
from fl_lightning.trainer import FederatedTrainer

#: Kinds of messages with tensors.
_WITH_TENSORS = ("start", "run", "evaluate", "predict")


def check_question(message: Message) -> None:
    """Refuse a message with fields that no server sends.

    Raises:
        Refused: Its kind is unknown, or it is not as its table says.
    """
    if message.kind not in QUESTIONS:
        raise Refused(f"this site knows no message {shown(message.kind)!r}")
    try:
        check_facts(message.about, QUESTIONS[message.kind], optional=OF_SUMS)
    except WrongMessage as error:
        raise Refused(f"the server's message {message.kind!r} is wrong: {error}") from error
    if message.tensors and message.kind not in _WITH_TENSORS:
        raise Refused(f"the server's message {message.kind!r} is wrong: it has tensors")


def check_start(message: Message, client_data: ClientData, task: Task, own: Sequence[str]) -> None:
    """Refuse a federation that does not fit the site's data.

    Raises:
        Refused: It is for other data, or its parts contradict each other.
    """
    about, count = message.about, len(message.about["names"])
    width = list(client_data.inputs.shape[1:])
    wrong = {
        "task": about["task"] != task.plain,
        "num_features": "features" not in own and about["num_features"] not in (width, *width[: len(width) == 1]),
        "own": about["own"] != list(own),
        "index": about["index"] >= count,
        "training_clients": max(about["training_clients"]) >= count,
        "precision": about["precision"] not in PRECISIONS,
        "layout": any(not isinstance(value, bool) for value in about["layout"].values()),
        "relation": any(
            name != "relation" or tensor.shape != (count, count) or not tensor.isfinite().all()
            for name, tensor in message.tensors.items()
        ),
    }
    if names := [name for name, is_wrong in wrong.items() if is_wrong]:
        raise Refused(f"the server's message 'start' is wrong: its {', '.join(names)} cannot be this site's")


def rounds_of(job: Job) -> tuple[int, int]:
    """A job's rounds, and the rounds from one evaluation to the next; the trainer's own if it does not say."""
    trainer = inspect.signature(FederatedTrainer).parameters
    num_rounds, every = (job.trainer.get(name, trainer[name].default) for name in ("num_rounds", "evaluate_every"))
    return num_rounds, every


def check_terms(about: Mapping[str, Any], policy: SitePolicy, job: Job | None) -> None:
    """Refuse a federation that is not what the owner allows, or not what the job says, which its submitter has signed.

    Args:
        about: The fields of the server's message ``start``.
        policy: The site's rules.
        job: The job; None if the site was opened without one.

    Raises:
        Refused: The strategy or aggregation in plain is not allowed here, or the server changes the job.
    """
    policy.check_strategy(about["strategy"])
    if policy.secure_only and not about["secure"]:
        raise Refused("this site responds only under secure aggregation")
    if job is None:
        return
    changed = {
        "secure": about["secure"] != job.secure,
        "secure_share": about["secure"] and about["secure_share"] < job.secure_share,
        "seed": about["seed"] != job.seed,
        "names": len(about["names"]) != len(job.sites),
    }
    if names := [name for name, is_changed in changed.items() if is_changed]:
        raise Refused(f"the server's message 'start' does not keep to the job: its {', '.join(names)} differ")


def check_tensors(
    tensors: Mapping[str, Tensor], net: Mapping[str, Tensor], length: int, *, models: int | None = None
) -> None:
    """Refuse tensors that are not a payload for one client with the site's net.

    Args:
        tensors: The tensors of a message.
        net: The client's parameters by name.
        length: Number of parameters of the largest net.
        models: How many evaluations they belong to, whose indices precede their names; None for a stage's tensors.

    Raises:
        Refused: They have other names or shapes.
    """
    shapes = {f"p/{name}": (1, *parameter.shape) for name, parameter in net.items()} | {f"p/{FLAT}": (1, length)}
    for name, tensor in tensors.items():
        index, _, inner = name.partition("/") if models is not None else ("", "", name)
        fits = models is None or (index.isdecimal() and int(index) < models)
        is_parameter = inner.startswith("p/")
        fits &= inner in shapes if is_parameter else inner.startswith(("s/", "l/"))
        fits &= tuple(tensor.shape) == shapes.get(inner) if is_parameter else tensor.shape[:1] == (1,)
        if not fits:
            raise Refused(
                f"the server sends {shown(name)!r} of shape {tuple(tensor.shape)}, which is not expected here"
            )
