"""What a study is: one YAML file of methods, cases, seeds and a tuning grid."""

import difflib
import itertools
import os
import random
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NoReturn

from fl_lightning.run.own_code import own_files
from fl_lightning.study.edge import Ordered, Point, given_twice, points_of, shown_names
from fl_lightning.study.schema import Axis, Case, File, Method, Until, WrongStudy, read_file, read_yaml

#: Metric of every round: bytes of all payloads so far.
TOTAL_BYTES = "comm/bytes_total"


class Study:
    """A study that was read and checked.

    Args:
        path: Its YAML file; what may stand in it says :class:`~fl_lightning.study.schema.File`.

    Raises:
        WrongStudy: It cannot be read, or is not valid; the message names the setting, the value and the remedy in one
            line.

    Attributes:
        own_files: The source files that names of the user's own classes lead to, as
            :func:`fl_lightning.run.own_code.own_files` finds them, as they were when they were first asked for: a
            process that trains imports each once, too.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.own_files = cache(own_files)
        content = read_file(path)
        self.name = path.stem
        self.title = content.title or path.stem
        self.processes = content.processes
        self.seeds = tuple(content.seeds)
        self.settings = content.settings
        self.until = content.until
        self.cases = self._each(content.cases)
        self.tuning = content.tuning
        self.history = tuple(content.history)
        self.keep = tuple(content.keep)
        self.pictures = content.pictures
        self.traffic = content.traffic
        self.distances = content.distances
        self.wandb = content.wandb
        self.states_gb = content.states_gb
        self.convergence = content.convergence
        self.results = path.parent / (content.results or f"results/{path.stem}")
        self.methods = {**content.methods, **self._found(content)}
        self.baselines = tuple(content.baselines)
        self._check()

    # ------------------------------------------------------------------ what there is to do

    def cases_of(self, method: str) -> list[str]:
        """The cases that a method is for."""
        return [case for case in self.cases if any(fnmatch(case, each) for each in self.methods[method].cases)]

    @property
    def panels(self) -> dict[str, str]:
        """The panel of every case."""
        return {name: case.panel for name, case in self.cases.items()}

    def configs_of(self, method: str, case: str) -> tuple[Path, ...]:
        """The configuration files of a method on a case."""
        names = (*_listed(self.cases[case].config), *_listed(self.methods[method].config))
        return tuple(self.path.parent / name for name in names)

    def tuned_on(self, method: str, case: str) -> tuple[str, str]:
        """The method and the case whose choice a method takes on a case; of the study ``other`` if there is one."""
        tuned = self._named_on(method, case)
        return tuned if self.other is None else self.other._named_on(*tuned)

    def _named_on(self, method: str, case: str) -> tuple[str, str]:
        return self.methods[method].tuned_as or method, self.cases[case].tuned_on or case

    def grid_of(self, method: str, case: str) -> list[Point]:
        """The settings that a method tries on a case: as many for every method, none without tuning.

        The axes that all share are gone through in order. A setting of the method's own takes each of its values
        equally often, in an order drawn once for each method; the first point has the first values.
        """
        if not self.tuning.budget:
            return []
        axes, own = {**self.tuning.grid, **self.cases[case].grid}, self.methods[method].tune
        shown = shown_names({**axes, **own}, self.tuning.beyond)
        common, method_points = (
            list(itertools.product(*(points_of(name, axis, shown[name]) for name, axis in part.items())))
            for part in (axes, own)
        )
        budget = self.tuning.budget
        draw = random.Random(self.methods[method].drawn_as or method)
        chosen = common if budget == len(common) else [common[0], *draw.sample(common[1:], budget - 1)]
        rounds = [draw.sample(method_points, len(method_points)) for _ in range(-(-budget // len(method_points)))]
        rest = [point for turn in rounds for point in turn]
        rest.remove(method_points[0])
        return [_joined([*shared, *mine]) for shared, mine in zip(chosen, [method_points[0], *rest], strict=False)]

    def until_of(self, case: str) -> Until | None:
        """When the runs of a case end; None after a fixed number of rounds."""
        return self.cases[case].until or self.until

    def axes_of(self, method: str, case: str) -> dict[str, Axis]:
        """The axes of the grid that a method tries on a case: those that all methods share, and its own."""
        return {**self.tuning.grid, **self.cases[case].grid, **self.methods[method].tune}

    def beyond(self, method: str, case: str, point: Point) -> list[Point]:
        """The settings just beyond the ends of the axes in ``tuning.beyond``, for a setting that is at such an end."""
        ordered = {axis.name: axis for axis in Ordered.all_of(self.axes_of(method, case), self.tuning.beyond)}
        going_on = [ordered[name] for name in self.tuning.beyond if name in ordered]
        return [further for axis in going_on for further in axis.past(point, self.tuning.steps)]

    @cached_property
    def other(self) -> "Study | None":
        """The study whose choices are taken, if any.

        Raises:
            WrongStudy: It cannot be used, or tunes nothing itself.
        """
        if self.tuning.study is None:
            return None
        path = self.path.parent / self.tuning.study
        if (further := read_file(path).tuning.study) is not None:
            self._refuse(
                "tuning.study", self.tuning.study, f"it takes the choices of {further}: name the one that tunes"
            )
        other = Study(path)
        if not other.tuning.budget:
            self._refuse("tuning.study", self.tuning.study, "it tunes nothing: name one that does, or leave it out")
        return other

    # ------------------------------------------------------------------ checks

    def _each(self, cases: Mapping[str, Case]) -> dict[str, Case]:
        """The cases, those with ``each`` once for each place, in order."""
        result: dict[str, Case] = {}
        for name, case in cases.items():
            if "{x" in name and not case.each:
                self._refuse("cases", name, "give the values of {x} in each")
            if case.each and case.x is not None:
                self._refuse(f"cases.{name}.x", case.x, "its places are in each: leave it out")
            for value in case.each:
                try:
                    at = _at(value, name)
                    parts = ("settings", "methods", "final", "grid")
                    filled = {part: _at(value, getattr(case, part)) for part in parts}
                except ValueError as error:
                    self._refuse(f"cases.{name}.each", value, f"{error}; formats are Python's, as in {{x:.0%}}")
                if at in result or at in cases:
                    self._refuse(
                        f"cases.{name}.each", value, f"{at} is there already: put {{x}} into the name, once each"
                    )
                result[at] = case.model_copy(update={**filled, "x": float(value), "each": []})
            if not case.each:
                result[name] = case
        return result

    def _found(self, content: File) -> dict[str, Method]:
        """A method for each strategy of the configurations that match and that is not among the methods yet."""
        taken = {strategy_of(self.path.parent / name) for m in content.methods.values() for name in _listed(m.config)}
        taken |= set(content.methods) | set(content.configs_except)
        result: dict[str, Method] = {}
        for pattern in content.configs:
            matches = sorted(self.path.parent.glob(pattern))
            if not matches:
                self._refuse("configs", repr(pattern), "nothing matches; patterns are relative to the study")
            for path in matches:
                name = strategy_of(path)
                if name and name not in taken:
                    result.setdefault(name, Method(config=os.path.relpath(path, self.path.parent), tier=99))
        return result

    def _check(self) -> None:
        if not self.methods:
            self._refuse("methods", "none", "name at least one, or give patterns in configs")
        for method in self.methods:
            for case in self.cases_of(method):
                configs = self.configs_of(method, case)
                if not configs and not self._has_strategy(method, case):
                    self._refuse(
                        f"methods.{method}.config",
                        "nothing",
                        f"give a file here or in cases.{case}.config, or strategy in settings",
                    )
                for config in configs:
                    if not config.is_file():
                        self._refuse(
                            f"config of methods.{method} or cases.{case}",
                            config,
                            "it is not a file; paths are relative to the study",
                        )
            if not self.cases_of(method):
                cases = self.methods[method].cases
                self._refuse(f"methods.{method}.cases", cases, f"no case matches; there are {', '.join(self.cases)}")
        for name, settings in self.cases.items():
            for method in settings.methods:
                self._known(f"cases.{name}.methods", method, self.methods)
        for name in self.baselines:
            self._known("baselines", name, self.methods)
        if self.convergence is not None and not (self.path.parent / self.convergence).is_file():
            self._refuse("convergence", self.convergence, "it is no file; give a study's, relative to this one")
        if len(set(self.seeds)) < len(self.seeds):
            self._refuse("seeds", list(self.seeds), "give each once")
        for name, picture in self.pictures.items():
            needed = [metric for metric in (picture.x, picture.metric) if metric != "round"]
            if picture.kind == "curves" and (lacking := sorted(set(needed) - set(self.history))):
                self._refuse(f"pictures.{name}", picture.metric, f"its curves need {', '.join(lacking)} in history")
            if picture.kind == "lines" and all(case.x is None for case in self.cases.values()):
                self._refuse(f"pictures.{name}", "lines", "no case has an x")
        if self.distances and not self.baselines:
            self._refuse("distances", True, "it needs baselines, with the first of which times are compared")
        if self.traffic is not None:
            if self.traffic.target:
                self._known("traffic.target", self.traffic.target, self.methods)
            if any(low >= high for low, high in itertools.pairwise(self.traffic.by_examples)):
                self._refuse("traffic.by_examples", self.traffic.by_examples, "give ascending bounds")
            if TOTAL_BYTES not in self.history:
                self._refuse("history", list(self.history), f"traffic needs {TOTAL_BYTES} in it")
        for seed in (*self.seeds, *self.tuning.seeds):
            if not 0 <= seed < 2**32:
                self._refuse("seeds", seed, "give numbers in [0, 4294967295]")
        self._check_tuning()

    def _has_strategy(self, method: str, case: str) -> bool:
        """Whether settings name the strategy of a method on a case."""
        mine, theirs = self.methods[method], self.cases[case]
        layers = (self.settings, mine.settings, theirs.settings, theirs.methods.get(method, {}))
        named = {name for layer in (*layers, mine.final, theirs.final) for name in layer}
        return not named.isdisjoint(("strategy", "strategy.class_path"))

    def _check_tuning(self) -> None:
        tuning, other = self.tuning, self.other
        if other is not None:
            if tuning.grid or tuning.seeds or tuning.budget or tuning.beyond:
                self._refuse("tuning.study", tuning.study, "give either it, or this study's own grid, seeds and budget")
            if shared := sorted(set(other.tuning.seeds) & set(self.seeds)):
                self._refuse("seeds", shared, f"{tuning.study} tuned on them: report others")
        if shared := sorted(set(tuning.seeds) & set(self.seeds)):
            self._refuse("tuning.seeds", shared, "they are reported too: tune on others")
        points = 1
        for name, axis in tuning.grid.items():
            self._check_axis(f"tuning.grid.{name}", name, axis)
            points *= len(axis)
        for case, settings in self.cases.items():
            if settings.grid and settings.tuned_on not in (None, case):
                self._refuse(
                    f"cases.{case}.grid",
                    list(settings.grid),
                    f"{settings.tuned_on} is tuned in its place: leave it out",
                )
            for name, axis in settings.grid.items():
                self._known(f"cases.{case}.grid", name, tuning.grid)
                self._check_axis(f"cases.{case}.grid.{name}", name, axis)
                if len(axis) != len(tuning.grid[name]):
                    remedy = f"give {len(tuning.grid[name])} values, as tuning.grid.{name} has"
                    self._refuse(f"cases.{case}.grid.{name}", axis, remedy)
        parts = [tuning.grid, *(case.grid for case in self.cases.values()), *(m.tune for m in self.methods.values())]
        for name in tuning.beyond:
            self._known("tuning.beyond", name, {name: part for part in parts for name in part})
            for axis in (part[name] for part in parts if name in part):
                if (ordered := Ordered.of(name, axis)) is None or not ordered.goes_on:
                    self._refuse("tuning.beyond", name, f"its axis must be two positive numbers or more, not {axis}")
        if tuning.steps is not None and not tuning.beyond:
            self._refuse("tuning.steps", tuning.steps, "name the axes that go on in tuning.beyond, or leave it out")
        if bool(tuning.budget) != bool(tuning.grid) or bool(tuning.budget) != bool(tuning.seeds):
            self._refuse("tuning", "incomplete", "give grid, budget and seeds, or none of them")
        if tuning.budget > points:
            self._refuse(
                "tuning.budget",
                tuning.budget,
                f"the axes that all methods share have {points} settings, and every method gets as many: give at most "
                "that, or more values",
            )
        for name, method in self.methods.items():
            if method.tune and method.tuned_as not in (None, name):
                self._refuse(
                    f"methods.{name}.tune", list(method.tune), f"{method.tuned_as} is tuned in its place: leave it out"
                )
            if len(method.tune) > 2:
                self._refuse(f"methods.{name}.tune", list(method.tune), "give at most two settings")
            for setting, axis in method.tune.items():
                self._check_axis(f"methods.{name}.tune.{setting}", setting, axis)
                if setting in tuning.grid:
                    self._refuse(f"methods.{name}.tune", setting, "all methods tune it: leave it out")
            for case in self.cases_of(name):
                tuned_as, tuned_on = self._named_on(name, case)
                source = other or self
                self._known(f"methods.{name}.tuned_as", tuned_as, source.methods)
                self._known(f"cases.{case}.tuned_on", tuned_on, source.cases)
                if other is None:
                    self._check_source(f"methods.{name}.tuned_as", tuned_as, self.methods[tuned_as].tuned_as)
                    self._check_source(f"cases.{case}.tuned_on", tuned_on, self.cases[tuned_on].tuned_on)

    def _check_source(self, where: str, name: str, further: str | None) -> None:
        """Refuse one whose choice is to be taken, if it takes another's itself."""
        if further not in (None, name):
            self._refuse(where, name, f"it takes the choice of {further} itself: name one that is tuned")

    def _check_axis(self, where: str, name: str, axis: Axis) -> None:
        if not axis:
            self._refuse(where, axis, "give values")
        if given_twice(name, axis) is not None:
            self._refuse(where, axis, "give each value once: every method tries as many settings, different ones")
        if isinstance(axis, list) and "." not in name:
            self._refuse(where, axis, "a list of values is for a setting (its dotted name), labels need settings each")

    def _known(self, where: str, name: str, known: Mapping[str, Any]) -> None:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            self._refuse(where, name, f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}")

    def _refuse(self, where: str, value: object, remedy: str) -> NoReturn:
        raise WrongStudy(f"{self.path}: {where} is {value}: {remedy}")


def _at(x: int | float, part: Any) -> Any:
    """A part of a case with ``{x}`` filled in."""
    if isinstance(part, dict):
        return {name: _at(x, value) for name, value in part.items()}
    if isinstance(part, list):
        return [_at(x, value) for value in part]
    if part == "{x}":
        return x
    if isinstance(part, str):
        return re.sub(r"{x(?::([^{}]*))?}", lambda match: format(x, match[1] or ""), part)
    return part


def strategy_of(config: Path) -> str:
    """The bare name of the strategy of a configuration file; empty where it has none."""
    strategy = read_yaml(config).get("strategy") if config.is_file() else None
    name = strategy.get("class_path") if isinstance(strategy, dict) else strategy
    return str(name or "").rpartition(".")[2]


def _listed(value: Sequence[str] | str) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _joined(points: Sequence[Point]) -> Point:
    settings = {name: value for _, part in points for name, value in part.items()}
    return ", ".join(label for label, _ in points), settings
