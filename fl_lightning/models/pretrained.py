"""A net that starts from weights in a file."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fl_lightning.extras import MissingExtra, require
from fl_lightning.models.fitting import fitted
from fl_lightning.models.plain import name_of
from fl_lightning.saved_tensors import load_data

#: What PyTorch's BatchNorm counts in a file, and clients' does not (``adopt_statistics``).
COUNTER = "num_batches_tracked"


class Pretrained(nn.Module):
    """A net whose weights are in a file: all clients start from them. For configurations; from Python, give the net.

    What is built is ``net`` itself. ``FedSheafHN``, which generates parameters from a start of its own, refuses it.

    Args:
        in_channels: Width of the features, which the data have.
        out_channels: Width of the logits, which the data have.
        net: What builds the net.
        file: Its ``state_dict``, by ``torch.save`` or in ``.safetensors`` (extra ``export``), as ``fl-train export``
            writes it.
        partly: Take what the net has by the same name and in the same shape, and leave the rest as it is drawn, such as
            the last layer for other classes.

    Raises:
        ValueError: The file is none of these, or does not fit the net.
    """

    def __new__(  # type: ignore[misc]  # noqa: D102
        cls,
        in_channels: int | tuple[int, ...],
        out_channels: int,
        net: Callable[[int, int], nn.Module],
        file: str,
        partly: bool = False,
    ) -> nn.Module:
        result = fitted(net, in_channels, out_channels)
        own, saved = result.state_dict(), _weights_in(Path(file).expanduser())
        saved = {name: value for name, value in saved.items() if name.rpartition(".")[2] != COUNTER or name in own}
        fitting = {name: value for name, value in saved.items() if name in own and value.shape == own[name].shape}
        if not fitting or (not partly and (len(fitting) < len(own) or len(fitting) < len(saved))):
            raise ValueError(f"{file} does not fit {name_of(result)}: {_misfit(own, saved)}{_remedy(fitting)}")
        for name, value in fitting.items():  # load_state_dict would want the counter
            own[name].copy_(value)
        return result

    def __init__(
        self,
        in_channels: int | tuple[int, ...],
        out_channels: int,
        net: Callable[[int, int], nn.Module],
        file: str,
        partly: bool = False,
    ) -> None:
        raise AssertionError("what is built is the net")


def is_pretrained(factory: Any) -> bool:
    """Whether a function that builds a net is :class:`Pretrained` with its settings."""
    return factory is Pretrained or (
        isinstance(factory, functools.partial) and Pretrained in (factory.func, *factory.args)
    )


def _weights_in(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name.

    Raises:
        ValueError: It is no ``state_dict``, or a number in it is not finite.
    """
    if not path.is_file():
        raise ValueError(f"file: there is no {path}")
    saved: Any
    try:
        if path.suffix == ".safetensors":
            require("export", str(path))
            import safetensors.torch  # of an extra

            saved = safetensors.torch.load_file(path)
        else:
            saved = load_data(path)
    except (MissingExtra, MemoryError, PermissionError):
        raise
    except Exception as error:  # whatever reading raises; what PyTorch advises is to run the file's code
        kind = type(error).__name__
        raise ValueError(f"{path} is damaged, or no state_dict that loads with weights_only=True ({kind})") from error
    if not isinstance(saved, Mapping) or not saved or not all(isinstance(each, Tensor) for each in saved.values()):
        raise ValueError(f"{path} is no state_dict: write one with torch.save(net.state_dict(), file)")
    if wrong := [name for name, value in saved.items() if not bool(torch.isfinite(value).all())]:
        raise ValueError(f"{path}: {wrong[0]} is not finite")
    return dict(saved)


def _misfit(own: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> str:
    """What a file and a net differ in."""
    parts = [f"it lacks {name}" for name in own if name not in saved][:3]
    parts += [f"the net has no {name}" for name in saved if name not in own][:3]
    shapes = {name: (tuple(saved[name].shape), tuple(own[name].shape)) for name in own if name in saved}
    parts += [f"{name} is {then}, in the net {now}" for name, (then, now) in shapes.items() if then != now][:3]
    return "; ".join(parts)


def _remedy(fitting: Mapping[str, Tensor]) -> str:
    if not fitting:
        return "; give the net that it is of"
    return f"; give the net that it is of, or set partly to true to take the {len(fitting)} that fit"
