"""Wrong command lines and configuration files: a run that took the value, or one line that names the setting."""

import copy
import math
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import yaml
from campaign.command import Ending, call, empty_folder
from campaign.configuration import NAMES, Configuration, Place, as_word, complete, look_up, places, small, write
from campaign.record import Record

NONSENSE: list[Any] = [
    *(None, True, False, "", " ", "nonsense", "ünïcødé ∞ 🦜", "line\nbreak", "null", "1", "0.5", "-", "%s", "../x"),
    *(0, -1, 1, 2, 3, 7, 0.5, -0.5, 1.5, 1e-300, 1e308, math.inf, -math.inf, math.nan, 10**6, 2**31, 2**63, 10**30),
    *([], [1, 2], ["a"], [[]], {}, {"a": 1}, {"class_path": "Nothing"}, {"init_args": {}}, "${oc.env:HOME}"),
    *("fl_lightning.Nothing", "no.such.Thing", "os.system", "torch.nn.Linear", "fl_lightning", "builtins.int"),
    *("FedAvg", "GCN", "Ring", "StackedExecutor", "GlobalSplit", "torch.optim.SGD", "/dev/null", "/proc/nothing"),
    *("[", "{a: "),
]
WORDS = ["stray", "--", "-x", "--trainer", "--config", "--config=no.yaml", "--trainer.num_rounds", "--ckpt_path=best"]
#: They start other processes, or wait for them.
MACHINES = {"devices", "num_nodes"}


@dataclass(frozen=True)
class Change:
    """What is wrong with a command.

    Attributes:
        kind: ``value``, ``option`` (a value on the command line), ``misspelled``, ``missing`` or ``word`` (on the
            line).
        place: The setting.
        value: Its new value or name, or the word.
    """

    kind: str
    path: Place = ()
    value: Any = None

    def apply(self, config: Configuration) -> list[str]:
        """Change the configuration, or say what is added to the command line."""
        if self.kind == "word":
            return [self.value]
        if self.kind == "option":
            return [f"--{'.'.join(map(str, self.path))}={as_word(self.value)}"]
        try:
            holder, key = look_up(config, self.path[:-1]), self.path[-1]
            old = look_up(config, self.path)
        except KeyError:
            return []  # another change has taken it away
        if self.kind == "value":
            holder[key] = copy.deepcopy(self.value)
        else:
            del holder[key]
        if self.kind == "misspelled":
            holder[self.value] = old
        return []

    def was_taken(self, config: Configuration) -> bool:
        """Whether a run with this configuration did as it was told."""
        if self.kind == "missing":
            return True
        if self.kind in ("misspelled", "word"):
            return self.value == "--"
        try:
            return same(self.value, look_up(config, self.path))
        except KeyError:
            return False


def same(given: Any, found: Any) -> bool:
    """Whether a setting has the value that was given; text may be read as YAML, class names and defaults filled in."""
    if isinstance(found, dict) and "class_path" in found and isinstance(given, str):
        return same(given, found["class_path"])
    if isinstance(given, dict) and isinstance(found, dict):
        return all(key in found and same(value, found[key]) for key, value in given.items())
    if isinstance(given, list) and isinstance(found, list):
        return len(given) == len(found) and all(map(same, given, found))
    if isinstance(given, str) != isinstance(found, str):
        given, found = read(given), read(found)
    if isinstance(given, bool) or isinstance(found, bool):
        return given is found
    if isinstance(given, int | float) and isinstance(found, int | float):
        both_nan = math.isnan(given) and math.isnan(found)
        return given == found or both_nan or (isinstance(found, float) and float(given) == found)
    if isinstance(given, str) and isinstance(found, str):
        return given == found or found.endswith(f".{given}")
    return bool(given == found)


def read(value: Any) -> Any:
    """Text as YAML, as far as it is some."""
    try:
        return yaml.safe_load(value) if isinstance(value, str) else value
    except yaml.YAMLError:
        return value


@dataclass(frozen=True)
class Command:
    """A configuration of a strategy and what is changed in it."""

    strategy: str
    changes: tuple[Change, ...]

    def run(self) -> Ending:
        """Write the configuration, and call ``fl-train`` with it."""
        config, words = small(self.strategy), ["fit", "--config=wrong.yaml"]
        for change in self.changes:
            copy_setting(complete(self.strategy), config, change.path)
        with empty_folder() as folder:
            for change in self.changes:
                words += change.apply(config)
            write(config, folder / "wrong.yaml")
            return call(words)

    def fault(self) -> str:
        """What is wrong with how it ended; empty if nothing is."""
        ending = self.run()
        if ending.crash:
            return ending.crash
        if ending.is_long:  # a costly setting that was taken is none; what hangs before the training is
            return "" if ending.config else "it took too long before it trained"
        if ending.code == 2:
            if not ending.is_one_line:
                return f"it said more than a line:\n{ending.said}"
            words = {form for word in re.findall(r"[\w-]+", ending.errors[0]) for form in (word, word.lstrip("-"))}
            return "" if words & self._names() else f"it names no setting:\n{ending.said}"
        if ending.code != 0:
            return f"exit code {ending.code}:\n{ending.said}"
        ignored = [change for change in self._lone() if not change.was_taken(ending.config)]
        return f"it ran without {ignored}" if ignored else ""

    def _names(self) -> set[str]:
        """What a message may name: a setting, the file, or what was given in place of it."""
        known = {str(path[-1]) for path in places(complete(self.strategy))}
        given = {word for change in self.changes for word in re.findall(r"[\w-]+", str(change.value))}
        return known | given | {"wrong"}

    def _lone(self) -> list[Change]:
        """The changes that no other one overrides."""

        def within(one: Change, other: Change) -> bool:
            return one is not other and one.path[: len(other.path)] == other.path[: len(one.path)]

        return [one for one in self.changes if not any(within(one, other) for other in self.changes if other.path)]


def copy_setting(source: Configuration, target: Configuration, path: Place) -> None:
    """Give a configuration a setting of another one, with what it belongs to."""
    for key in path:
        if key not in target if isinstance(target, dict) else len(target) <= int(key):
            target[key] = source[key]
            return
        if not isinstance(target[key], dict | list):
            target[key] = source[key]
        source, target = source[key], target[key]


def wrong_command(draw: random.Random) -> Command:
    """A small configuration with one to three changes."""
    name = draw.choice(NAMES)
    known = list(places(complete(name)))
    changes: list[Change] = []
    number = draw.randint(1, 3)
    while len(changes) < number:
        kind = draw.choices(["value", "option", "misspelled", "missing", "word"], [4, 3, 2, 1, 1])[0]
        path, value = draw.choice(known), draw.choice(NONSENSE)
        if kind == "word":
            changes.append(Change(kind, (), draw.choice(WORDS)))
        elif kind == "misspelled":
            changes += [Change(kind, path, misspelled(path[-1], draw))] if isinstance(path[-1], str) else []
        elif kind != "option" or all(isinstance(key, str) for key in path):
            machines = MACHINES.intersection(path)
            changes += [] if machines and value not in (None, 0, 1, "", "nonsense") else [Change(kind, path, value)]
    return Command(name, tuple(changes))


def misspelled(name: str, draw: random.Random) -> str:
    """Another name."""
    path = draw.randrange(len(name))
    return draw.choice([name + "s", name[:path] + name[path + 1 :] + "_", name.upper(), name.replace("_", "-") + "é"])


def campaign(trials: Iterable[int], seed: int, record: Record) -> list[str]:
    """Call some commands; what is wrong with them, each with the fewest changes that show it."""
    faults = []
    for trial in trials:
        command = wrong_command(random.Random(f"{seed} {trial}"))
        fault = command.fault()
        record.count("wrong command lines and files", survived=not fault)
        if fault:
            for change in command.changes:
                fewer = Command(command.strategy, tuple(other for other in command.changes if other is not change))
                if actual := fewer.fault():
                    command, fault = fewer, actual
            faults.append(f"seed {seed}, trial {trial}: {command}\n{fault}\n")
    return faults


def test_wrong_commands(seed: int, record: Record) -> None:
    faults = campaign(range(150), seed, record)
    assert not faults, "\n".join(faults)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 1000, 50))
def test_many_wrong_commands(seed: int, record: Record, first: int) -> None:
    faults = campaign(range(first, first + 50), seed + 1, record)
    assert not faults, "\n".join(faults)
