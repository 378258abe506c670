"""The shells' completion, in bash itself."""

import argparse
import shutil
import subprocess

import pytest

from fl_lightning import completion_command
from fl_lightning.completion_command import script
from fl_lightning.study.command import _parser

_TRY = """
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
_fl_train
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def complete(tmp_path_factory):
    """What bash offers for the last of some words."""
    if shutil.which("bash") is None:
        pytest.skip("there is no bash")
    folder = tmp_path_factory.mktemp("completion")
    (folder / "try.sh").write_text(script() + _TRY)
    (folder / "configs").mkdir()
    (folder / "configs" / "mine.yaml").touch()

    def run(*words: str) -> list[str]:
        command = ["bash", "try.sh", "fl-train", *words]
        return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout.split()

    return run


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["f"], ["fit"]),
        (["study", "sw"], ["sweep"]),
        (["fit", "--config", "configs/m"], ["configs/mine.yaml"]),
        (["fit", "--config", "=", "configs/m"], ["configs/mine.yaml"]),
        (["study", "run", "configs/m"], ["configs/mine.yaml"]),
        (["fit", "--trainer.num_r"], ["--trainer.num_rounds"]),
        (["fit", "--strategy", "FedSh"], ["FedSheafHN"]),
        (["fit", "--strategy", "=", "FedSh"], ["FedSheafHN"]),
        (["fit", "--strategy", "FedPer", "--strategy.pers"], ["--strategy.personal"]),
        (["fit", "--strategy", "Local", "--strategy.pers"], []),
        (["data", "--data.partitioner", "Giv"], ["GivenPartitioner"]),
        (["fit", "--model.net", "fl_lightning.models.Net"], []),  # NetOutput is none
    ],
)
def test_bash_completes(words, expected, complete) -> None:
    assert complete(*words) == expected


def test_the_verbs_of_studies_are_those_there_are() -> None:
    choices = next(action.choices for action in _parser()._actions if isinstance(action, argparse._SubParsersAction))
    assert set(completion_command._STUDY_VERBS) == set(choices)


def test_zsh_reads_the_same_script(capsys) -> None:
    assert completion_command.main(["zsh"]) == 0
    assert "bashcompinit\n_fl_train()" in capsys.readouterr().out
