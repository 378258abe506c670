"""Former settings of strategies, and what became of them."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

_Class = TypeVar("_Class")

_MOVED = ["embedding", "embedding_model", "permute_embeddings", "ridge", "strength", "mix_only_moved"]
_MOVED += ["validate_every", "validate_personal", "predict"]
_ALWAYS = ["scaled_attention", "attention_residual", "activation", "layer_norm", "normalize_embeddings", "last_layer"]
_ALWAYS += ["start_from_clients"]
#: What became of a class's former settings, by the names of class and setting.
FORMER_SETTINGS: Mapping[str, Mapping[str, str]] = {
    "FedSheafHN": dict.fromkeys(_MOVED, "moved to SheafRidge")
    | dict.fromkeys(_ALWAYS, "is SheafRidge's way, where it is no setting")
    | {
        "output_scale": "is gone: the hypernetwork starts as printed",
        "clean_weights": "is gone: dropout is as printed",
    },
    "FedAux": dict.fromkeys(("sign_free", "mix_projection"), "moved to LocalAux"),
    "SheafRidge": dict.fromkeys(_ALWAYS, "is no setting any more: it is always as configurations had it")
    | dict.fromkeys(("output_scale", "clean_weights"), "is gone: the last layer is fitted"),
}


def former_settings(cls: type[_Class]) -> type[_Class]:
    """Make a class refuse its former settings with a message about what became of them (:data:`FORMER_SETTINGS`).

    Raises:
        TypeError: The class is called with one of them.
    """
    create: Callable[..., None] = vars(cls)["__init__"]
    former = FORMER_SETTINGS[cls.__name__]

    @functools.wraps(create)
    def init(self: _Class, *args: Any, **settings: Any) -> None:
        for name in settings.keys() & former.keys():
            raise TypeError(f"{cls.__name__}({name}=...): {name} {former[name]}")
        create(self, *args, **settings)

    setattr(cls, "__init__", init)  # noqa: B010 (a type checker refuses the assignment)
    return cls
