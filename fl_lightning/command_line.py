"""The entry of ``fl-train``: hands a verb to the module that runs it, which alone is imported."""

import importlib
import pkgutil
import sys
from collections.abc import Sequence

#: The verbs that are not of :mod:`fl_lightning.cli`, and the functions (arguments) -> exit code that run them.
VERBS: dict[str, str] = {
    "provision": "fl_lightning.remote.command:provision",
    "sites": "fl_lightning.remote.command:sites",
    "study": "fl_lightning.study.command:main",
    "submit": "fl_lightning.remote.command:submit",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, that of the process if none is given; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in VERBS:
        return int(pkgutil.resolve_name(VERBS[words[0]])(words[1:]))
    return int(importlib.import_module("fl_lightning.cli").main(words))
