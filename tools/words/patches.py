"""Exact pieces, in the text as it is after all rules: (file, old, new)."""

PATCHES: list[tuple[str, str, str]] = [
    # ---- former names are refused by the present ones
    (
        "fl_lightning/refusals.py",
        "from fl_lightning.round.client import ClientModule\n",
        "from fl_lightning.renamed import CLASSES, MODULES, SETTINGS, present_name\nfrom fl_lightning.round.client import ClientModule\n",
    ),
    (
        "fl_lightning/refusals.py",
        '#: Classes that had another name, by their bare names.\n_RENAMED = {"RegressionClient": "ClientModule, which does what the data ask for"}\n\n\n',
        "",
    ),
    ("fl_lightning/refusals.py", 'in _RENAMED:\n        return f"{key[1]', 'in CLASSES:\n        return f"{key[1]'),
    ("fl_lightning/refusals.py", "was renamed to {_RENAMED[bare]}", "was renamed to {CLASSES[bare]}"),
    (
        "fl_lightning/refusals.py",
        '    if given and given[1].rpartition(".")[2] in _RENAMED:\n        return _unknown_class(given[1], message)\n',
        '    if given and given[1].rpartition(".")[2] in CLASSES:\n        return _unknown_class(given[1], message)\n'
        '    if given and (former := next((each for each in MODULES if given[1].startswith(f"{each}.")), "")):\n'
        '        return f"{former} was renamed to {MODULES[former]}"\n',
    ),
    (
        "fl_lightning/refusals.py",
        "    settings = list(inspect.signature(cls).parameters)\n    near = difflib.get_close_matches(_OTHER_SETTINGS",
        "    if now := present_name(cls, name):\n"
        '        return f"there is no option --{option}: {name} was renamed to {now}"\n'
        "    settings = list(inspect.signature(cls).parameters)\n    near = difflib.get_close_matches(_OTHER_SETTINGS",
    ),
    (
        "fl_lightning/refusals.py",
        "    owners = _owners()\n    near = difflib.get_close_matches(name, sorted(owners), n=1)\n",
        "    owners = _owners()\n"
        '    if (now := SETTINGS.get(name, "")) and name not in owners:\n'
        '        return f"{name} was renamed to {now}"\n'
        "    near = difflib.get_close_matches(name, sorted(owners), n=1)\n",
    ),
    (
        "fl_lightning/strategies/__init__.py",
        "            globals()[_name] = _class\n",
        '            globals()[_name] = _class\n            if "__init__" in vars(_class) and not hasattr(vars(_class)["__init__"], "__wrapped__"):\n'
        "                refuse_former_names(_class)\n",
    ),
    (
        "fl_lightning/strategies/__init__.py",
        "from fl_lightning.federation import Federation\n",
        "from fl_lightning.federation import Federation\nfrom fl_lightning.renamed import refuse_former_names\n",
    ),
    ("fl_lightning/round/participation.py", "class Participation(Counted):", "@refuse_former_names\nclass Participation(Counted):"),
    (
        "fl_lightning/round/participation.py",
        "from fl_lightning.counts import Counted\n",
        "from fl_lightning.counts import Counted\nfrom fl_lightning.renamed import refuse_former_names\n",
    ),
    ("callbacks/attacks/forgery.py", "class OutputAttack(Attack, ABC):", "@refuse_former_names\nclass OutputAttack(Attack, ABC):"),
    (
        "callbacks/attacks/forgery.py",
        "from fl_lightning.kernels.randomness import generator\n",
        "from fl_lightning.kernels.randomness import generator\nfrom fl_lightning.renamed import refuse_former_names\n",
    ),
    (
        "callbacks/__init__.py",
        "from fl_lightning.run.callback import Callback\n",
        "from fl_lightning.renamed import former_classes\nfrom fl_lightning.run.callback import Callback\n",
    ),
    (
        "callbacks/__init__.py",
        "from collections.abc import Sequence\n",
        "from collections.abc import Sequence\nfrom typing import TYPE_CHECKING\n",
    ),
    (
        "callbacks/__init__.py",
        "__all__ = [",
        "if not TYPE_CHECKING:\n    __getattr__ = former_classes(__name__)\n\n__all__ = [",
    ),
    (
        "fl_lightning/strategies/decentralized/dense_maps.py",
        "class DenseMaps(RestrictionMaps):",
        "@refuse_former_names\nclass DenseMaps(RestrictionMaps):",
    ),
    (
        "fl_lightning/strategies/decentralized/dense_maps.py",
        "from fl_lightning.memory import require\n",
        "from fl_lightning.memory import require\nfrom fl_lightning.renamed import refuse_former_names\n",
    ),
    (
        "fl_lightning/strategies/decentralized/implicit_maps.py",
        "from fl_lightning.kernels.randomness import generator\n",
        "from fl_lightning.kernels.randomness import generator\nfrom fl_lightning.renamed import refuse_former_names\n",
    ),
    (
        "fl_lightning/strategies/decentralized/implicit_maps.py",
        "class ImplicitMaps(RestrictionMaps):",
        "@refuse_former_names\nclass ImplicitMaps(RestrictionMaps):",
    ),
    (
        "tests/test_layers.py",
        '("arguments", "counts", "deferred", "direction", "extras", "kernels", "memory", "optimizers", "yaml_input")',
        '("arguments", "counts", "deferred", "direction", "extras", "kernels", "memory", "optimizers", "renamed", "yaml_input")',
    ),
    ("docs/reference/index.md", "files\ncommands\n", "files\ncommands\nglossary\n"),
]
