"""Print a script with which a shell completes verbs, settings, classes and files: ``fl-train completion bash``.

The script contains all words, so that nothing is imported when the tab key is pressed. Regenerate it when the package
is upgraded; it does not know users' own strategies. (Making the script of jsonargparse and shtab takes minutes: it
writes out every class of every setting for each verb.)
"""

import argparse
import inspect
import sys
from collections.abc import Mapping, Sequence

from fl_lightning.arguments import TRAINER_VERBS, VERBS

_DESCRIPTION = """Print a script with which a shell completes verbs, settings, classes and files.

  fl-train completion bash > ~/.local/share/bash-completion/completions/fl-train
  fl-train completion zsh >> ~/.zshrc
"""

_STUDY_VERBS = ("run", "status", "table", "report", "check", "seal", "sweep", "train")

#: zsh uses the same script.
_FOR_ZSH = """autoload -U +X compinit && compinit
autoload -U +X bashcompinit && bashcompinit
"""

_SCRIPT = """_fl_train() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} strategy= words= i
  [[ $word == = ]] && word=
  [[ $before == = ]] && before=${{COMP_WORDS[COMP_CWORD-2]}}
  for ((i = 2; i < COMP_CWORD - 1; i++)); do
    [[ ${{COMP_WORDS[i]}} == --strategy ]] && strategy=${{COMP_WORDS[i+1]}}
    [[ ${{COMP_WORDS[i]}} == --strategy && $strategy == = ]] && strategy=${{COMP_WORDS[i+2]}}
  done
  if ((COMP_CWORD == 1)); then
    words="{verbs} --help --version"
  elif [[ ${{COMP_WORDS[1]}} == study && $COMP_CWORD == 2 ]]; then
    words="{study}"
  elif [[ " {trainer} " == *" ${{COMP_WORDS[1]}} "* ]]; then
    case $before in
      {values}
      *) [[ $word == -* ]] && words="{settings}"
        case $strategy in
          {strategies}
        esac ;;
    esac
  fi
  if [[ -n $words && ($word == -* || $COMP_CWORD == 1 || $before == -* || ${{COMP_WORDS[1]}} == study) ]]; then
    COMPREPLY=($(compgen -W "$words" -- "$word"))
  else
    compopt -o filenames 2> /dev/null
    COMPREPLY=($(compgen -f -- "$word"))
  fi
}}
complete -F _fl_train fl-train
"""


def script() -> str:
    """The script for bash."""
    from fl_lightning.data import FederatedDataModule, Partitioner, Source, Splitter
    from fl_lightning.executors import Executor
    from fl_lightning.refusals import known_classes, known_nets
    from fl_lightning.round.client import ClientModule
    from fl_lightning.strategies import Strategy
    from fl_lightning.trainer import FederatedTrainer

    owners = {"trainer": FederatedTrainer, "data": FederatedDataModule, "model": ClientModule}
    settings = [f"--{group}.{name}" for group, owner in owners.items() for name in inspect.signature(owner).parameters]
    options = ["--config", "--ckpt_path", "--seed_everything", "--print_config", "--profile", "--resume_with_changes"]
    known = known_classes()

    def named(base: type) -> str:
        return " ".join(sorted(n for n, cls in known.items() if issubclass(cls, base) and not inspect.isabstract(cls)))

    paths = {
        "--strategy|--strategy.help": Strategy,
        "--data.source": Source,
        "--data.partitioner": Partitioner,
        "--data.splitter": Splitter,
        "--trainer.executor": Executor,
        "--model": ClientModule,
    }
    values = {path: named(base) for path, base in paths.items()}
    values["--model.net"] = " ".join(sorted(known_nets()))
    values["--config|-c|--ckpt_path"] = ""
    strategies = {
        name: "$words " + " ".join(f"--strategy.{setting}" for setting in inspect.signature(known[name]).parameters)
        for name in named(Strategy).split()
    }
    return _SCRIPT.format(
        verbs=" ".join(sorted([*TRAINER_VERBS, *VERBS])),
        study=" ".join(_STUDY_VERBS),
        trainer=" ".join(TRAINER_VERBS),
        settings=" ".join(["--strategy", "--model", *options, *sorted(settings)]),
        values="\n      ".join(_cases(values)),
        strategies="\n          ".join(_cases(strategies)),
    )


def _cases(words: Mapping[str, str]) -> list[str]:
    return [f'{pattern}) words="{text}" ;;' for pattern, text in words.items()]


def main(arguments: Sequence[str]) -> int:
    """Run the verb; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="fl-train completion", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shell", choices=("bash", "zsh"))
    shell = parser.parse_args(arguments).shell
    sys.stdout.write((_FOR_ZSH if shell == "zsh" else "") + script())
    return 0
