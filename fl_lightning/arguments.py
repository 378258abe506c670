"""The arguments of ``fl-train``: its verbs, their options, and the settings files that the options name.

Nothing here imports torch or anything else that would delay the report of a mistake.
"""

import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from fl_lightning.yaml_input import WrongYaml, read_yaml

#: The verbs outside :mod:`fl_lightning.cli`, and the modules whose ``main(arguments) -> exit code`` runs them.
#: The first line of a module's docstring is the verb's description in ``--help``.
VERBS: dict[str, str] = {
    "choose": "fl_lightning.choice.command",
    "compare": "fl_lightning.report.compare_command",
    "completion": "fl_lightning.completion_command",
    "export": "fl_lightning.trained.export_command",
    "provision": "fl_lightning.remote.provision_command",
    "report": "fl_lightning.report.report_command",
    "site": "fl_lightning.remote.site_command",
    "sites": "fl_lightning.remote.sites_command",
    "study": "fl_lightning.study.command",
    "submit": "fl_lightning.remote.submit_command",
}

#: The verbs that need NVIDIA FLARE.
OVER_THE_NETWORK = ("provision", "site", "sites", "submit")

#: The verbs of :mod:`fl_lightning.cli`, which are methods of the trainer.
TRAINER_VERBS = {
    "fit": "Train the federation.",
    "validate": "Evaluate a checkpoint on the validation examples.",
    "test": "Evaluate a checkpoint on the test examples; unseen clients are onboarded first.",
    "predict": "Predict every node or example of every training client with a checkpoint.",
    "data": "Describe the clients: sizes, classes, heterogeneity; for graphs also edges, clustering, non-IIDness.",
}

DESCRIPTION = """Personalized federated learning on graphs.

  fl-train fit     --config configs/quickstart.yaml               train
  fl-train fit     --config configs/quickstart.yaml --ckpt_path last    continue a run that was stopped
  fl-train test    --config configs/quickstart.yaml               evaluate the newest run's best checkpoint
  fl-train data    --config configs/quickstart.yaml               look at the clients before training
  fl-train fit     --config ... --profile                         see where the time of a round goes
  fl-train fit     --config ... --print_config                    every setting with its value
  fl-train fit     --strategy.help FedSheafHN                     the settings of one strategy

Any setting can be overridden: --trainer.num_rounds 20 --data.partitioner.num_clients 20
"""


def predicts_new_data(words: Sequence[str]) -> bool:
    """Whether a command line is ``fl-train predict RUN ...``, which has a module of its own."""
    return words[0] == "predict" and len(words) > 1 and not words[1].startswith("-")


def fail(message: str, code: int = 2) -> NoReturn:
    """End the program with a one-line message; exit code 2 stands for a mistake of the user."""
    sys.stderr.write(f"fl-train: error: {' '.join(message.split())}\n")
    raise SystemExit(code)


def options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each word with its value, which follows = or is the next word."""
    for word, following in pairwise([*words, ""]):
        option, equals, value = word.partition("=")
        yield option, value if equals else following


def settings_in(config: str) -> dict[str, Any]:
    """The settings in a configuration file; a file that cannot be one is the user's mistake."""
    try:
        settings = read_yaml(Path(config))
    except WrongYaml as error:
        fail(f"--config {error}")
    if not isinstance(settings, dict):
        fail(f"--config {config} has no settings (name: value), but {'nothing' if settings is None else 'other text'}")
    return settings
