"""Checks of what crosses between server and clients: uploads before they are used, models before they are sent.

Shape legend: C clients.
"""

import statistics
from collections.abc import Container, Mapping, Sequence

import torch
from torch import Tensor

from fl_lightning.round.payload import FLAT, Payload, finite_rows, row_norms
from fl_lightning.round.stage import Stage

#: The squares of norms up to this one have a sum over a million clients that is finite in float32.
LARGEST_NORM = 1e16
#: Updates whose norm is more than this multiple of the median are reported.
UNUSUAL = 1e3
#: To save time, updates are computed only if some upload's norm is more than this multiple of the median.
FAR = 10.0


class ServerDiverged(RuntimeError):
    """The server's models are not finite."""


def inspect_upload(
    upload: Payload,
    stage: Stage,
    architectures: Sequence[Mapping[str, Tensor]],
    *,
    sent: Payload | None = None,
    max_update_norm: float | None = None,
) -> tuple[Payload, dict[int, str], dict[int, str]]:
    """Keep the rows that the server can use: finite, and no longer than is safe to sum and to square in float32.

    Args:
        upload: What arrived.
        stage: The stage that the upload belongs to.
        architectures: The parameters of one client of each architecture, for their shapes.
        sent: What the server had sent, from which the clients' training began.
        max_update_norm: Largest Euclidean norm of a client's update of its parameters; None for no bound. If there is
            one, a client output must not be more than 1,000 times as long as the median of this exchange either.

    Returns:
        The valid rows; why each other row was refused, by client; and, by client, a message about an update or a
        client output that is kept although it is more than 1,000 times as long as the median, so that it alone decides
        an average.

    Raises:
        ValueError: Names or shapes are not those of the stage (an attack or a callback changed them for all clients).
    """
    if not upload.clients:
        return upload, {}, {}
    _check_form(upload, stage, architectures)
    tensors = upload.tensors()
    if not tensors:
        return upload, {}, {}
    lengths = _norms(upload, tensors)
    refused = {
        client: _why_too_long(norm, tensors, row)
        for row, (client, norm) in enumerate(lengths.items())
        if not norm <= LARGEST_NORM
    }
    upload = _without(upload, refused)
    if max_update_norm is not None and upload.parameters and upload.clients:
        long = {
            client: f"its update is {norm:.3g} long, participation.max_update_norm is {max_update_norm:g}"
            for client, norm in _norms(upload, updates(upload, stage, sent)).items()
            if norm > max_update_norm
        }
        upload, refused = _without(upload, long), refused | long
    if max_update_norm is not None and upload.extras and upload.clients:
        bound = f", and participation.max_update_norm leaves out what is more than {UNUSUAL:,.0f} times as long"
        long = {client: message + bound for client, message in _long_outputs(upload, stage).items()}
        upload, refused = _without(upload, long), refused | long
    return upload, refused, _unusual(upload, stage, sent, [lengths[client] for client in upload.clients])


def _check_form(upload: Payload, stage: Stage, architectures: Sequence[Mapping[str, Tensor]]) -> None:
    """Refuse an upload in which tensors of the stage are missing, unexpected or of a wrong shape."""
    if stage.flat:
        longest = max(sum(parameter.numel() for parameter in net.values()) for net in architectures)
        expected = {FLAT: torch.Size([longest])}
    else:
        expected = {name: architectures[0][name].shape for name in stage.upload}
    result = {name: tensor.shape[1:] for name, tensor in upload.parameters.items()}
    whole = {name: name.rpartition("/")[0] for name in upload.extras}  # of a client output of several tensors
    client_outputs = {whole[name] if whole[name] in stage.client_outputs else name for name in upload.extras}
    wrong = {name for name in expected | result if expected.get(name) != result.get(name)}
    wrong |= client_outputs ^ set(stage.client_outputs)
    if wrong:
        raise ValueError(
            f"stage {stage.name!r}: the upload's {sorted(wrong)} are missing, unexpected or of a wrong shape"
        )


def _without(upload: Payload, clients: Container[int]) -> Payload:
    return upload.rows([client for client in upload.clients if client not in clients])


def _norms(upload: Payload, tensors: Mapping[str, Tensor]) -> dict[int, float]:
    """The norm of each client's rows, by client."""
    return dict(zip(upload.clients, row_norms(tensors.values()).tolist(), strict=True))


def _long_outputs(upload: Payload, stage: Stage) -> dict[int, str]:
    """Clients with a client output far longer than the median; numbers of examples and scores are no lengths."""
    result: dict[int, str] = {}
    no_lengths = {*stage.scores, *stage.per_example, *stage.per_class.values()}
    measured = {name: tensor for name, tensor in upload.extras.items() if name not in no_lengths}
    for output in sorted(stage.client_outputs.keys() - no_lengths):
        tensors = {name: tensor for name, tensor in measured.items() if output in (name, name.rpartition("/")[0])}
        norms = _norms(upload, tensors) if tensors else {}
        median = statistics.median(norms.values()) if norms else 0.0
        result |= {
            client: f"its {output} is {norm:.3g} long, the median of this exchange is {median:.3g}"
            for client, norm in norms.items()
            if norm > UNUSUAL * median > 0
        }
    return result


def _unusual(upload: Payload, stage: Stage, sent: Payload | None, lengths: Sequence[float]) -> dict[int, str]:
    """Messages about updates and client outputs far longer than the median."""
    if not lengths or max(lengths) <= FAR * statistics.median(lengths):
        return {}
    result = _long_outputs(upload, stage) if upload.extras else {}
    if not upload.parameters:
        return result
    norms = _norms(upload, updates(upload, stage, sent))
    median = statistics.median(norms.values())
    return result | {
        client: f"its update is {norm:.3g} long, the median of this exchange is {median:.3g}"
        for client, norm in norms.items()
        if norm > UNUSUAL * median > 0
    }


def updates(upload: Payload, stage: Stage, sent: Payload | None) -> dict[str, Tensor]:
    """How far clients moved from what they were sent; what they sent, if that is unknown. (C, *shape) by name."""
    if stage.as_update or sent is None:
        return dict(upload.parameters)
    start = sent.rows(upload.clients).parameters
    return {name: tensor - start[name] if name in start else tensor for name, tensor in upload.parameters.items()}


def check_models(models: Payload | None, names: Sequence[str]) -> None:
    """Check that the server's models are finite.

    Args:
        models: The models that it sends to clients or that are evaluated.
        names: Names of all clients, by index.

    Raises:
        ServerDiverged: Some are not finite.
    """
    if models is None or not models.parameters or not models.clients:
        return
    distinct = [tensor[:1] if tensor.stride(0) == 0 else tensor for tensor in models.parameters.values()]
    if torch.stack([tensor.sum() for tensor in distinct]).isfinite().all():
        return
    finite = finite_rows(models.parameters.values()).tolist()
    if all(finite):  # only their sum is not
        return
    diverged = [names[client] for client, fine in zip(models.clients, finite, strict=True) if not fine]
    raise ServerDiverged(
        f"the server's models of {', '.join(diverged[:3])}{', ...' if len(diverged) > 3 else ''} are not finite: lower "
        "the learning rates (of model.optimizer and of the strategy), or bound participation.max_update_norm"
    )


def _why_too_long(norm: float, tensors: Mapping[str, Tensor], row: int) -> str:
    if all(tensor[row].isfinite().all() for tensor in tensors.values()):
        return f"it sent numbers too large to mix in float32 (of length {norm:.3g}, at most {LARGEST_NORM:g} is taken)"
    return "it sent numbers that are not finite"
