"""The algorithms, one file each. A module placed in this folder is found by itself; there is no list to extend."""

import importlib
import inspect
import pkgutil

from fl_lightning.strategies.base import Federation, Strategy

__all__ = ["Federation", "Strategy"]
for _module in pkgutil.iter_modules(__path__):
    for _name, _class in vars(importlib.import_module(f"{__name__}.{_module.name}")).items():
        if inspect.isclass(_class) and issubclass(_class, Strategy):
            globals()[_name] = _class
            if not inspect.isabstract(_class) and _name not in __all__:
                __all__ += [_name]
