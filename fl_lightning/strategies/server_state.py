"""Declared state of a server, like the buffers of an ``nn.Module``: what is named is saved, loaded and moved."""

import copy
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn


class ServerState:
    """Saves and loads the attributes that its class and base classes name in ``server_state``.

    An attribute may be a tensor, a number, a string, None, a set of numbers or strings, an object with ``state_dict``
    and ``load_state_dict`` (such as a module or an optimizer), or a dict, list or tuple of all these. Loading
    needs the objects that ``setup`` created; tensors are replaced, so their shapes may differ.
    """

    #: Names of the attributes that live on between rounds, in addition to those of the base classes.
    server_state: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def state_names(cls) -> tuple[str, ...]:
        """``server_state`` of the class and its base classes, base classes first.

        Raises:
            ValueError: One of them is a single string.
        """
        result: dict[str, None] = {}
        for kind in reversed(cls.__mro__):
            names = vars(kind).get("server_state", ())
            if isinstance(names, str):
                raise ValueError(f"{kind.__name__}.server_state is the string {names!r}: write ({names!r},)")
            result |= dict.fromkeys(names)
        return tuple(result)

    def check_server_state(self) -> None:
        """Check that the named attributes exist; called after ``setup``.

        Raises:
            ValueError: One of them does not exist.
        """
        local = type(self).__name__
        if missing := [name for name in self.state_names() if not hasattr(self, name)]:
            raise ValueError(
                f"{local}.server_state names {', '.join(missing)}, which {local} does not have after "
                f"setup: correct the "
                "name, or create the attribute in setup"
            )

    def state_dict(self) -> dict[str, Any]:
        """What ``server_state`` names, by name, tensors not copied; loads with ``weights_only=True``.

        Raises:
            ValueError: A named attribute does not exist, or cannot be saved.
        """
        self.check_server_state()
        local = type(self).__name__
        return {name: pack(getattr(self, name), f"{local}.{name}") for name in self.state_names()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`: tensors are copied to the current devices, with the types they had.

        Raises:
            ValueError: The state lacks a name.
        """
        self.check_server_state()
        local = type(self).__name__
        if missing := [name for name in self.state_names() if name not in state]:
            raise ValueError(
                f"the state to load into {local} lacks {', '.join(missing)}: it is of another strategy, or of another "
                "version of it"
            )
        for name in self.state_names():
            setattr(self, name, self._restored(getattr(self, name), state[name], f"{local}.{name}"))

    def _state_device(self) -> torch.device:
        """The device of tensors that do not exist yet."""
        return torch.device("cpu")

    def _restored(self, present: Any, saved: Any, name: str) -> Any:
        """The value of an attribute from its saved state; objects with a state of their own load it."""
        if hasattr(present, "load_state_dict"):
            present.load_state_dict(saved if isinstance(present, nn.Module) else copy.deepcopy(saved))
            return present
        if isinstance(saved, Tensor):
            device = present.device if isinstance(present, Tensor) else self._state_device()
            if isinstance(present, Tensor) and present.requires_grad:  # an optimizer holds it
                with torch.no_grad():
                    return present.copy_(saved)
            # a deep copy keeps the strides, so that tensors that are the same for all clients stay small
            return copy.deepcopy(saved.detach()) if saved.device == device else saved.detach().to(device)
        if isinstance(saved, Mapping):
            now = present if isinstance(present, Mapping) else {}
            if missing := [key for key, value in now.items() if hasattr(value, "load_state_dict") and key not in saved]:
                raise ValueError(f"the state to load into {name} lacks {', '.join(map(str, missing))}")
            return {key: self._restored(now.get(key), value, f"{name}[{key!r}]") for key, value in saved.items()}
        if isinstance(saved, list | tuple):
            elements = list(present) if isinstance(present, list | tuple) else []
            elements += [None] * (len(saved) - len(elements))
            pairs = zip(elements, saved, strict=False)
            return type(saved)(self._restored(*pair, f"{name}[{i}]") for i, pair in enumerate(pairs))
        return copy.copy(saved)


def pack(value: Any, name: str) -> Any:
    """A value in the form stored in checkpoints, tensors not copied.

    Args:
        value: Value of an attribute.
        name: Name of the attribute, for the message.

    Raises:
        ValueError: Its type cannot be saved.
    """
    if isinstance(value, Tensor):
        return value.detach()
    if hasattr(value, "load_state_dict") and not isinstance(value, type):
        return value.state_dict()
    if isinstance(value, Mapping):
        return {key: pack(item, f"{name}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [pack(item, f"{name}[{i}]") for i, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, set | frozenset) and all(isinstance(item, int | float | str) for item in value):
        return set(value)
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise ValueError(
        f"{name} is {_kind(value)}, which cannot be saved in a checkpoint: give tensors, Python's numbers, strings, "
        "None, dicts, lists or tuples of these, or an object with state_dict and load_state_dict"
    )


def _kind(value: Any) -> str:
    module = type(value).__module__.partition(".")[0]
    return type(value).__name__ if module == "builtins" else f"{module}.{type(value).__name__}"
