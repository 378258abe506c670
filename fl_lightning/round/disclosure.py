"""A description of what leaves a client, derived from the stages themselves.

A client output is described by the first line of the docstring of the function that computes it.
"""

import inspect
from collections.abc import Sequence

from fl_lightning.round.stage import ClientOutput, Stage

#: What also leaves a client, in every stage and at every evaluation.
COUNTS = "numbers of training examples and of local steps"
SCORES = "numerator and denominator of each metric and split"
#: What other clients know before anything is sent, where the edges between clients are kept (``data.cross_edges``).
CROSS_EDGES = "known beforehand to the clients at both ends, with the indices of their two nodes"


def what_leaves(stage: Stage, names: Sequence[str]) -> list[str]:
    """What a client sends in a stage in addition to :data:`COUNTS`; empty for nothing.

    Args:
        stage: The stage.
        names: Names of all parameters of a client.

    """
    leaving = []
    if stage.upload:
        what = "its anchor, a copy of" if stage.program.send_anchor else "the change of" if stage.as_update else ""
        leaving.append(f"{what} {'all parameters' if stage.flat else _named(stage.upload, names)}".strip())
    for name, output in stage.client_outputs.items():
        rows = ", for each of its examples" if name in stage.per_example else ""
        leaving.append(f"{name}{describes(output)}{rows}")
    return leaving


def _named(chosen: Sequence[str], names: Sequence[str]) -> str:
    """Describe some of the parameters by the modules or the last names that the other parameters have in common."""
    modules, leaves = ({_split(name)[part] for name in chosen} for part in (0, 1))
    local: dict[str, None] = {}
    for name in names:
        module, leaf = _split(name)
        if name in set(chosen):
            continue
        if module in modules and leaf in leaves:
            return f"{len(chosen)} of {len(names)} parameters"
        local[f"*.{leaf}" if module in modules else name if name == module else f"{module}.*"] = None
    return f"all parameters but {' and '.join(local)}" if local else "all parameters"


def _split(name: str) -> tuple[str, str]:
    """The module and the last name of a parameter."""
    return name.partition(".")[0], name.rpartition(".")[2]


def describes(output: ClientOutput) -> str:
    """The first line of a client output's docstring after a colon; empty if it has none."""
    text = inspect.getdoc(output if inspect.isroutine(output) else type(output))
    if not text:
        return ""
    line = text.splitlines()[0].rstrip(".")
    return f": {line[0].lower() if line[1:2].islower() or line[1:2] == ' ' else line[0]}{line[1:]}"
