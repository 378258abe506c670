"""A site's checks of a server's messages: anything that no honest server sends is refused before anything changes."""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from fl_lightning.batches.client_data import ClientData
from fl_lightning.federation import UserNames
from fl_lightning.remote.digests import digest_of_facts, num_outputs_of
from fl_lightning.remote.job_schema import PRECISIONS, Job
from fl_lightning.remote.message import Message
from fl_lightning.remote.policy import Refused, SitePolicy
from fl_lightning.remote.schema import OF_SUMS, QUESTIONS, WrongMessage, check_facts, shown
from fl_lightning.round.payload import FLAT
from fl_lightning.run.processes import dtype_of
from fl_lightning.tasks import Task, task_of
from fl_lightning.trainer import FederatedTrainer

#: Kinds of messages with tensors.
_WITH_TENSORS = ("start", "run", "evaluate", "predict")
#: What may differ between the submissions of a job to which its run belongs; of ``trainer`` only the precision is the
#: clients' own.
_OF_A_SUBMISSION = ("name", "trainer", "resume", "timeout_seconds", "predict", "planned_rounds")
#: Types of the numbers that strategies send beside parameters.
_REAL = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool)


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


def check_start(message: Message, client_data: ClientData, names: UserNames, task: Task, own: Sequence[str]) -> None:
    """Refuse a federation that does not fit the site's data, or that no server has made of the sites' cards.

    Args:
        message: The server's message ``start``.
        client_data: What the client holds.
        names: The user's names.
        task: The task of the site's data.
        own: Whether its ``features`` and ``outputs`` mean something else than at other sites.

    Raises:
        Refused: It is for other data, or its parts contradict each other.
    """
    about, count = message.about, len(message.about["names"])
    layout, is_known = about["layout"], about["precision"] in PRECISIONS
    width = list(client_data.inputs.shape[1:])
    wrong = {
        "task": about["task"] != task.of_all([task_of(about["task"])]).plain,
        "num_features": "features" not in own and about["num_features"] not in (width, *width[: len(width) == 1]),
        "num_outputs": about["num_outputs"] < num_outputs_of(client_data, names, task),
        "own": about["own"] != list(own),
        "index": about["index"] >= count,
        "training_clients": max(about["training_clients"]) >= count,
        "precision": not is_known,
        "dtype": is_known and about["dtype"] != str(dtype_of(about["precision"])).removeprefix("torch."),
        "layout": layout.keys() != task.layout_for(1.0).keys() or not all(isinstance(v, bool) for v in layout.values()),
        "relation": any(
            name != "relation"
            or tensor.shape != (count, count)
            or tensor.dtype not in (torch.float32, torch.float64)
            or not tensor.isfinite().all()
            for name, tensor in message.tensors.items()
        ),
    }
    if found := [name for name, is_wrong in wrong.items() if is_wrong]:
        raise Refused(f"the server's message 'start' is wrong: its {', '.join(found)} cannot be this site's")


def rounds_of(job: Job) -> tuple[int, int]:
    """A job's rounds, and the rounds from one evaluation to the next; the trainer's own if it does not say."""
    return _of_trainer(job, "num_rounds"), _of_trainer(job, "evaluate_every")


def run_of(about: Mapping[str, Any], job: Job | None) -> str:
    """The name of a run in a site's ledger, and in the masks of its sums: the same at all sites.

    A job's run is named after what its submitter has signed, however often it is submitted and whatever the server
    says: it does not sum a state again because the server calls the federation something else.

    Args:
        about: The fields of the server's message ``start``.
        job: The job; None if the site was opened without one.

    Returns:
        A digest of 64 hexadecimal digits.
    """
    if job is None:
        return str(about["federation"])
    facts = {name: fact for name, fact in dataclasses.asdict(job).items() if name not in _OF_A_SUBMISSION}
    return digest_of_facts({**facts, "precision": precision_of(job)})


def precision_of(job: Job) -> str:
    """A job's precision; the trainer's own if it does not say."""
    return str(_of_trainer(job, "precision"))


def _of_trainer(job: Job, name: str) -> Any:
    return job.trainer.get(name, inspect.signature(FederatedTrainer).parameters[name].default)


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
        "precision": about["precision"] != precision_of(job),
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
        Refused: They have other names, shapes or types.
    """
    dtypes = {f"p/{name}": parameter.dtype for name, parameter in net.items()}
    dtypes[f"p/{FLAT}"] = reduce(torch.promote_types, dtypes.values(), torch.bool)
    shapes = {f"p/{name}": (1, *parameter.shape) for name, parameter in net.items()} | {f"p/{FLAT}": (1, length)}
    for name, tensor in tensors.items():
        index, _, inner = name.partition("/") if models is not None else ("", "", name)
        fits = models is None or (index.isdecimal() and int(index) < models)
        is_parameter = inner.startswith("p/")
        fits &= inner in shapes if is_parameter else inner.startswith(("s/", "l/"))
        fits &= tuple(tensor.shape) == shapes.get(inner) if is_parameter else tensor.shape[:1] == (1,)
        fits &= tensor.dtype == dtypes.get(inner) if is_parameter else tensor.dtype in _REAL
        if not fits:
            kind = str(tensor.dtype).removeprefix("torch.")
            raise Refused(
                f"the server sends {shown(name)!r} of shape {tuple(tensor.shape)} and type {kind}, which is not "
                "expected here"
            )
