"""The strategies, one file each, in a folder for each family. Files placed here are discovered automatically."""

import importlib
import inspect
import pkgutil

from fl_lightning.federation import Federation
from fl_lightning.renamed import refuse_former_names
from fl_lightning.strategies.base import Strategy

__all__ = ["Federation", "Strategy"]
for _module in pkgutil.walk_packages(__path__, f"{__name__}."):
    for _name, _class in vars(importlib.import_module(_module.name)).items():
        if inspect.isclass(_class) and issubclass(_class, Strategy):
            globals()[_name] = _class
            if "__init__" in vars(_class) and not hasattr(vars(_class)["__init__"], "__wrapped__"):
                refuse_former_names(_class)
            if not inspect.isabstract(_class) and _name not in __all__:
                __all__ += [_name]
del _module, _name, _class
