"""Writing a trained model to a file, with the few lines of Python that load it."""

import functools
import inspect
import math
import runpy
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from fl_lightning.extras import require
from fl_lightning.files import whole_file
from fl_lightning.models.plain import PyGNet, name_of
from fl_lightning.models.pretrained import is_pretrained
from fl_lightning.saved_tensors import write_saved
from fl_lightning.trained.loading import LoadedRun
from fl_lightning.trained.models import BatchModel

#: By the end of the file's name: what loads it, and what that is imported from.
_READ = {
    ".pt": ("torch", 'torch.load(file, map_location="cpu", weights_only=True)'),
    ".safetensors": ("safetensors.torch", "safetensors.torch.load_file(file)"),
}
_BEGINS = '"""Loads a model that fl-train exported'
_LOADER = '''{begins}."""

from pathlib import Path

{imports}
#: The model.
WHAT = {what!a}


def load(file=Path(__file__).with_name({name!r})):
    net = {call}
    net.load_state_dict({read})
    return {result}.eval()
'''


def export(run: LoadedRun, client: str | None, path: Path) -> Path:
    """Write a model's ``state_dict``, and beside it a file ``load_<name>.py`` whose ``load()`` returns the model.

    The files are read again, and the model that comes out is compared with what was scored, before they replace others.

    Args:
        run: The run.
        client: Name of the client; None for the server's model.
        path: The file, whose name ends in ``.pt`` or ``.safetensors``.

    Returns:
        The file that loads it.

    Raises:
        ValueError: The model cannot leave, or cannot be made from the class of its net and its settings; or the path
            is none of these, or would share the file that loads it with another.
        MissingExtra: The file is to be of safetensors, which is not installed.
        OSError: The files cannot be written.
    """
    loader = path.with_name(f"load_{path.stem}.py")
    if path.suffix not in _READ or not path.stem.isidentifier():
        raise ValueError(
            f"--to {path}: give the name of a file for torch or safetensors, of letters and digits, such as model.pt "
            "or model.safetensors"
        )
    if path.suffix == ".safetensors":
        require("export", f"--to {path}")
    if loader.is_file() and not loader.read_text(encoding="utf-8").startswith(_BEGINS):
        raise ValueError(f"{loader}, which would load the model, is there already: give --to another name")
    others = (path.with_suffix(suffix) for suffix in _READ if suffix != path.suffix)
    if loader.is_file() and (other := next(filter(Path.is_file, others), None)):
        raise ValueError(f"--to {path}: {loader} loads {other.name}: give --to another name, or delete {other.name}")
    model = run.global_model() if client is None else run.client(client)
    net = model.net if isinstance(model, BatchModel) else model
    what = f"{'the global model' if client is None else client} of {run.recorded.path}"
    text = _text(run, model, net, f"{what}, {run.strategy}, after round {run.round_idx}", path.name)
    with whole_file(loader) as new_loader, whole_file(path) as new_file:
        _save({name: value.detach() for name, value in net.state_dict().items()}, new_file)
        new_loader.write_text(text, encoding="utf-8")
        try:
            loaded = runpy.run_path(str(new_loader))["load"](new_file)
            same = all(run.same(loaded, model, name) for name in ([client] if client else run.names[:1]))
            why = "" if same else "it computes something else"
        except Exception as error:  # of the user's class, whatever it raises
            why = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if why:
            raise ValueError(
                f"{run.strategy} has changed the net {type(net).__name__}, which cannot be made from its class and "
                f"settings alone ({why}): use fl_lightning.load_run({str(run.recorded.path)!r}) in Python"
            )
    return loader


def _save(state: dict[str, Tensor], path: Path) -> None:
    if path.suffix == ".pt":
        with path.open("wb") as file:
            write_saved(state, file)
        return
    import safetensors.torch  # of an extra

    safetensors.torch.save_file({name: value.clone().contiguous() for name, value in state.items()}, path)


def _text(run: LoadedRun, model: nn.Module, net: nn.Module, what: str, name: str) -> str:
    """The file that loads a model."""
    if isinstance(model, BatchModel) and model.has_rule:
        raise ValueError(
            f"{run.strategy} computes outputs by a rule of its own, which a file of parameters does not hold: use "
            f"fl_lightning.load_run({str(run.recorded.path)!r}) in Python"
        )
    kind, result = type(net), "net"
    imports = {kind.__module__: kind.__qualname__}
    if isinstance(model, BatchModel):
        own = "" if model.num_outputs is None else f", num_outputs={model.num_outputs}"
        imports["fl_lightning.trained"] = type(model).__name__
        result = f"{type(model).__name__}(net{own})"
    settings = _settings(run, net)
    if "<" in kind.__qualname__ or kind.__module__ == "__main__" or settings is None:
        raise ValueError(
            f"the net {name_of(net)} cannot be made in another program: give model.net as a class in a module, with "
            "settings that are numbers and words, which returns the logits itself"
        )
    parts = [*map(_written, settings[0]), *(f"{key}={_written(value)}" for key, value in settings[1].items())]
    module, read = _READ[Path(name).suffix]
    form = next((str(value.dtype) for value in net.parameters() if value.is_floating_point()), "torch.float32")
    is_usual = form == "torch.float32"
    call = f"{kind.__qualname__}({', '.join(parts)})" + ("" if is_usual else f".to({form})")
    modules = [module] if is_usual or module == "torch" else [module, "torch"]
    lines = "".join(f"import {each}\n" for each in modules)
    lines += "".join(f"from {home} import {kinds}\n" for home, kinds in sorted(imports.items()))
    return _LOADER.format(begins=_BEGINS, what=what, imports=lines, name=name, call=call, read=read, result=result)


def _settings(run: LoadedRun, net: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """What a net's class is called with; None if it is not known, or cannot be written down."""
    for made in map(_without_weights, run.net_factories):
        settings: dict[str, Any] = {}
        if isinstance(made, functools.partial):  # as a configuration makes it, too
            settings, made = dict(made.keywords), next(filter(inspect.isclass, (made.func, *made.args)), None)
        if made is PyGNet and type(net) is not PyGNet:
            settings, made = dict(settings.get("arguments") or {}), type(net)
        if made is not type(net) or not all(map(_is_plain, settings.values())):
            continue
        widths = {"in_channels": run.num_features, "out_channels": run.num_outputs}
        by_name = set(widths) <= set(inspect.signature(made).parameters)
        return ((), {**widths, **settings}) if by_name else (tuple(widths.values()), settings)
    return None


def _without_weights(factory: Any) -> Any:
    """What builds a net, without the weights that it started from."""
    return factory.keywords["net"] if is_pretrained(factory) else factory


def _is_plain(value: Any) -> bool:
    """Whether :func:`_written` can write a value."""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(map(_is_plain, [*value, *value.values()]))
    return value is None or isinstance(value, bool | int | float | str | np.bool_ | np.integer | np.floating)


def _written(value: Any) -> str:
    """The text of Python that makes a plain value.

    Example:
        >>> _written({"dropout": np.float64(0.25), "bounds": (float("-inf"), 1)})
        "{'dropout': 0.25, 'bounds': (float('-inf'), 1)}"
    """
    if isinstance(value, list | tuple):
        items = ", ".join(map(_written, value))
        return f"[{items}]" if isinstance(value, list) else f"({items}{',' * (len(value) == 1)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_written(key)}: {_written(each)}' for key, each in value.items())}}}"
    if isinstance(value, np.generic):
        value = value.item()
    return f"float({str(value)!r})" if isinstance(value, float) and not math.isfinite(value) else repr(value)
