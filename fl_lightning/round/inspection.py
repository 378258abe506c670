"""The server's check of what arrived, before it makes anything of it."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fl_lightning.round.payload import FLAT, Payload, finite_rows
from fl_lightning.round.stage import Stage


def inspect_upload(
    upload: Payload, stage: Stage, architectures: Sequence[Mapping[str, Tensor]]
) -> tuple[Payload, dict[int, str]]:
    """Keep the rows that the server can use.

    Args:
        upload: What arrived.
        stage: What was asked for.
        architectures: The parameters of one client of each architecture, for their shapes.

    Returns:
        The sound rows, and why each other row was refused, by client.

    Raises:
        ValueError: Names or shapes are not those of the stage (an attack or a callback changed them for all clients).
    """
    if not upload.clients:
        return upload, {}
    length = max(sum(parameter.numel() for parameter in net.values()) for net in architectures)
    expected = {name: architectures[0][name].shape for name in stage.upload}
    if stage.flat:
        expected = {FLAT: torch.Size([length])}
    found = {name: tensor.shape[1:] for name, tensor in upload.parameters.items()}
    whole = {name: name.rpartition("/")[0] for name in upload.signals}  # of a signal of several tensors
    signals = {whole[name] if whole[name] in stage.signals else name for name in upload.signals}
    if expected != found or signals != set(stage.signals):
        wrong = {name for name in expected | found if expected.get(name) != found.get(name)}
        wrong |= signals ^ set(stage.signals)
        raise ValueError(
            f"stage {stage.name!r}: the upload's {sorted(wrong)} are missing, unexpected or of a wrong shape"
        )
    tensors = upload.tensors()
    if not tensors:
        return upload, {}
    finite = finite_rows(tensors.values()).tolist()
    refused = {
        c: "it sent numbers that are not finite" for c, fine in zip(upload.clients, finite, strict=True) if not fine
    }
    return upload.rows([client for client in upload.clients if client not in refused]), refused
