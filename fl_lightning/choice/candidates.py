"""The methods among which one is chosen, from the simplest on, and the settings that each of them tries."""

import dataclasses
import difflib
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fl_lightning.choice.halving import MOST_POINTS
from fl_lightning.choice.ranges import Range, drawn
from fl_lightning.refusals import known_classes, why_not_imported
from fl_lightning.strategies import Strategy
from fl_lightning.study.edge import Point, given_twice, points_of
from fl_lightning.study.schema import Axis, Settings

#: The one case of the study that a search is.
CASE = "mine"
#: What the others are measured by: training alone, and one training on all clients' data. Both are always there.
FLOOR, CEILING = "Local", "Pooled"
#: What everybody knows: the others are compared with it where it is among them.
COMMON = "FedAvg"
#: The methods that are tried by default, from the simplest on: of those that tie the first is taken.
DEFAULT = (FLOOR, COMMON, "FedPer", "FedOpt", "SCAFFOLD", "Ditto", "PFedMe", "TwinScaffold", "SheafRidge")
#: Settings of single methods that are tried, the method's own default first.
OWN: Mapping[str, dict[str, Axis]] = {
    "FedOpt": {"strategy.adaptivity": [1e-4, 1e-5, 1e-3]},
    "Ditto": {"strategy.proximal_weight": [0.1, 0.01, 1.0]},
    "PFedMe": {"strategy.proximal_weight": [0.01, 0.1, 1.0]},
}
_OPTIMIZER, _RATE, _DECAY = "model.optimizer", "model.optimizer.lr", "model.optimizer.weight_decay"
#: What a search has one value of, and what decides which examples validation is of.
_FIXED = tuple(f"trainer.{name}" for name in ("num_rounds", "evaluate_every", "monitor", "monitor_mode"))
_OF_EXAMPLES = tuple(f"data.{name}" for name in ("partitioner", "splitter", "heterogeneity", "seed"))
#: Clients of FedOpt make plain steps: Adam is the server's.
_PLAIN_STEPS: dict[str, Settings] = {
    str(rate): {_OPTIMIZER: "torch.optim.SGD", _RATE: rate, _DECAY: 0.0} for rate in (0.3, 1.0, 0.1)
}


class WrongChoice(ValueError):
    """What was asked for cannot be done; the message says why, in one line."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A method, and what it tries.

    Attributes:
        name: Bare name of the strategy's class.
        settings: Of the method, whatever it tries.
        points: The settings that it tries, the most promising ones first.
        axes: The axes that they are points of, without ranges.
        as_given: Whether the configuration names this method.
    """

    name: str
    settings: Settings
    points: Sequence[Point]
    axes: Mapping[str, Axis]
    as_given: bool = False


def candidates(
    config: Mapping[str, Any], methods: Sequence[str] = (), grid: Mapping[str, Sequence[Any]] | None = None
) -> list[Candidate]:
    """The candidates of a configuration, from the simplest on, and last the ceiling.

    The method that the configuration names is one of them, with its settings; the others have their own defaults and
    its number of local epochs.

    Args:
        config: All settings, by group.
        methods: Strategies by name; empty for :data:`DEFAULT` and the configuration's.
        grid: Values by setting, or a range such as ``["0.001..0.1"]``, in place of those that are tried by default.

    Raises:
        WrongChoice: There is no such method, none of them has a setting of the grid, or a range is none.
        MissingExtra: There is a range, and no Optuna, which draws from it.
    """
    given = config.get("strategy") or {}
    own = str(given.get("class_path", "")).rpartition(".")[2]
    named = [_known(name) for name in methods] or [*DEFAULT, *([own] if own else [])]
    names = list(dict.fromkeys([FLOOR, *sorted(named, key=_simplicity), CEILING]))
    names = [*(name for name in names if name != CEILING), CEILING]
    fields = {name: _settings_of(name) for name in names}
    grid = dict(grid or {})
    for setting, values in grid.items():
        if (again := given_twice(setting, list(values))) is not None:
            raise WrongChoice(f"--grid {setting}: {values[again]} is there twice: give each value once")
        if setting in _FIXED:
            raise WrongChoice(f"--grid {setting}: all runs of a search have the same: give one value, --{setting}")
        if setting.startswith(_OF_EXAMPLES):
            raise WrongChoice(
                f"--grid {setting}: validation would be of other clients or examples, and settings cannot be compared: "
                f"give one value, --{setting}, to a search of its own"
            )
        if setting.startswith("strategy.") and not any(setting.split(".")[1] in each for each in fields.values()):
            raise WrongChoice(f"--grid {setting}: none of {', '.join(names)} has this setting")
    optimizer = ((config.get("model") or {}).get("init_args") or {}).get("optimizer")
    for setting in grid:
        if setting.startswith("model.optimizer.") and not optimizer and "model.optimizer" not in grid:
            raise WrongChoice(
                f"--grid {setting}: the configuration names no optimizer, and each strategy has its own: give "
                "--model.optimizer, too, such as torch.optim.Adam"
            )
    try:
        ranges = {setting: of for setting, values in grid.items() if (of := Range.of(setting, values)) is not None}
    except ValueError as error:
        raise WrongChoice(str(error)) from error
    return [_candidate(name, config, given if name == own else {}, fields[name], grid, ranges) for name in names]


def _candidate(
    name: str,
    config: Mapping[str, Any],
    given: Mapping[str, Any],
    fields: Iterable[str],
    grid: Mapping[str, Any],
    ranges: Mapping[str, Range],
) -> Candidate:
    init_args = dict(given.get("init_args") or {})
    if not given:
        epochs = ((config.get("strategy") or {}).get("init_args") or {}).get("num_epochs")
        init_args = {"num_epochs": epochs} if epochs is not None and "num_epochs" in fields else {}
    path = given.get("class_path") or _path(name)
    axes: dict[str, Axis] = {**_shared(name, config, grid, as_given=bool(given)), **OWN.get(name, {})}
    for setting in [each for each in axes if each.partition(".")[2] in init_args]:  # what was given comes first
        axes[setting] = list(dict.fromkeys([init_args[setting.partition(".")[2]], *axes[setting]]))
    for setting, values in grid.items():
        if not setting.startswith("strategy.") or setting.split(".")[1] in fields:
            axes[setting] = list(values)
    strategy: Settings = {"class_path": path, **({"init_args": init_args} if init_args else {})}
    own_ranges = {setting: each for setting, each in ranges.items() if setting in axes}
    seed = int(config.get("seed_everything") or 0)
    points = drawn({**axes, **own_ranges}, MOST_POINTS, seed) if own_ranges else _diagonal(axes)
    listed = {setting: axis for setting, axis in axes.items() if setting not in own_ranges}  # a range has no edges
    return Candidate(name=name, settings={"strategy": strategy}, points=points, axes=listed, as_given=bool(given))


def _given_first(optimizer: Any) -> dict[str, Settings]:
    """The configuration's optimizer, then plain steps but for those that it makes."""
    given = optimizer if isinstance(optimizer, Mapping) else {}
    init_args = {name: value for name, value in (given.get("init_args") or {}).items() if value}
    is_plain = str(given.get("class_path", "")).rpartition(".")[2] == "SGD" and set(init_args) == {"lr"}
    rate = init_args["lr"] if is_plain else None
    others = {label: steps for label, steps in _PLAIN_STEPS.items() if steps[_RATE] != rate}
    return {"given": {}, **others}


def _shared(name: str, config: Mapping[str, Any], grid: Mapping[str, Any], *, as_given: bool) -> dict[str, Axis]:
    """The axes of the clients' optimizer: as given, a larger and a smaller rate, and no decay."""
    if _RATE in grid or _OPTIMIZER in grid:
        return {}
    optimizer = ((config.get("model") or {}).get("init_args") or {}).get("optimizer")
    if name == "FedOpt":
        return {"client_lr": _given_first(optimizer) if as_given else _PLAIN_STEPS}
    if optimizer is None:
        adam = {_OPTIMIZER: "torch.optim.Adam"}
        return {"lr": {"default": {}, **{str(rate): {**adam, _RATE: rate} for rate in (0.03, 0.003)}}}
    init_args = (optimizer.get("init_args") or {}) if isinstance(optimizer, Mapping) else {}
    rate, decay = init_args.get("lr"), init_args.get("weight_decay")
    if not isinstance(rate, int | float):
        return {}
    rates = [float(rate), *(float(f"{rate * factor:.3g}") for factor in (3.0, 1 / 3))]
    return {_RATE: rates, **({_DECAY: [decay, 0.0]} if decay else {})}


def _diagonal(axes: Mapping[str, Axis]) -> list[Point]:
    """All points of a grid, first those whose values are the first ones of their axes."""
    lists = [list(points_of(name, axis)) for name, axis in axes.items()]
    places = sorted(itertools.product(*(range(len(each)) for each in lists)), key=sum)
    result: list[Point] = []
    for place in places:
        chosen = [points[index] for points, index in zip(lists, place, strict=True)]
        label = ", ".join(label for label, _ in chosen)
        result.append((label, {name: value for _, settings in chosen for name, value in settings.items()}))
    return result


# ---------------------------------------------------------------- the classes


def _strategies() -> dict[str, type[Strategy]]:
    return {name: cls for name, cls in known_classes().items() if issubclass(cls, Strategy)}


def _known(name: str) -> str:
    """A strategy's name however it is spelled; of a class of one's own after its module, which is loaded."""
    if "." in name:
        if why := why_not_imported(name):
            raise WrongChoice(f"--methods: {name!r} cannot be imported: {why}")
        module, _, bare = name.rpartition(".")
        if bare not in _strategies() or _strategies()[bare].__module__.partition(".")[0] != module.partition(".")[0]:
            raise WrongChoice(f"--methods {name!r} is no strategy of a name of its own: give another, or rename it")
        return bare
    known = {each.lower(): each for each in _strategies()}
    if (found := known.get(name.lower())) is None:
        near = difflib.get_close_matches(name.lower(), known, n=1)
        advice = f"did you mean {known[near[0]]}?" if near else f"the defaults are {', '.join(DEFAULT)}"
        raise WrongChoice(f"--methods {name!r} is no strategy: {advice}")
    return found


def _settings_of(name: str) -> list[str]:
    cls = _strategies().get(name)
    return [each.name for each in dataclasses.fields(cls) if each.init] if cls is not None else []


def _path(name: str) -> str:
    cls = _strategies()[name]
    return f"{cls.__module__}.{cls.__qualname__}"


def _simplicity(name: str) -> int:
    """The place in the order from the simplest on; what is not among the defaults comes after them."""
    return DEFAULT.index(name) if name in DEFAULT else len(DEFAULT)
