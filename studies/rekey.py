"""Keep what is done of a study where a method's settings have come to name a default that was in force before.

    python studies/rekey.py studies/leaderboard_c.yaml FedOpt strategy.adaptivity

The key of a cell is a digest of its settings, so that a default that is written out gives another key to the same run.
This writes the new key, and the command with the setting in it, into the records that were made without it. Name only
what the runs were made with: nothing is trained here, and nothing can tell.
"""

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from fl_lightning.study.cells import Cell, make_cell
from fl_lightning.study.definition import Study
from fl_lightning.study.progress import Progress
from fl_lightning.study.store import Record, Store


def pairs(path: Path, method: str, setting: str) -> Iterator[tuple[Cell, Cell]]:
    """Each cell of a method without a setting that its study gives it, and the same cell with it.

    Raises:
        ValueError: The study does not give the method this setting.
    """
    before, now = Study(path), Study(path)
    if setting not in before.methods[method].settings:
        raise ValueError(f"{path} has no {setting} in the settings of {method}: write the old default there first")
    del before.methods[method].settings[setting]
    progress = Progress(before, Store(before.results))
    for case in before.cases_of(method):
        for trial in progress.trials(method, case):
            for cell in trial.cells:
                yield cell, make_cell(now, method, case, cell.seed, trial.point, "tuning")
        choice = progress.choice(method, case)
        for seed in before.seeds if choice is not None else ():
            made = [make_cell(study, method, case, seed, choice.point, "report") for study in (before, now)]
            yield made[0], made[1]


def rekey(path: Path, method: str, setting: str) -> int:
    """Write the new keys and commands; returns in how many records and histories."""
    new = {old.key: cell for old, cell in pairs(path, method, setting)}
    commands: dict[str, str] = {}

    def change(record: Record) -> Record | None:
        cell = new.get(record["key"])
        if cell is None:
            return None
        if "command" not in record:  # a history
            return record | {"key": cell.key}
        command = shlex.join(["fl-train", *cell.arguments])
        commands[record["command"]] = command
        return record | {"key": cell.key, "command": command}

    folder = Study(path).results
    count = Store(folder).rewrite(change)
    table = folder / "results.csv"
    if table.exists() and commands:
        lines = table.read_text().splitlines(keepends=True)
        for place, line in enumerate(lines):
            for old, command in commands.items():
                if line.rstrip("\n").endswith(f",{old}"):
                    lines[place] = line.replace(old, command)
        table.write_text("".join(lines))
    return count


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, help="the study's YAML file, in which the setting is named by now")
    parser.add_argument("method", help="name of the method")
    parser.add_argument("setting", help="the setting that was a default, such as strategy.adaptivity")
    options = parser.parse_args(arguments)
    sys.stdout.write(f"{rekey(options.study, options.method, options.setting)} records have their new keys\n")


if __name__ == "__main__":
    main()
