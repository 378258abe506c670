"""The settings in the YAML file of a study."""

import difflib
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fl_lightning import yaml_input

#: Overrides: the value of each setting by its dotted name, in the order in which they are given to ``fl-train fit``.
Settings = dict[str, Any]
#: An axis of a grid: values of the setting that it is named for, or settings by a label.
Axis = list[Any] | dict[str, Settings]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Until(_Part):
    """The end of runs that go on until they no longer improve.

    Attributes:
        patience: Rounds without improvement of the monitored validation metric after which a run ends.
        at_most: Rounds after which it ends in any case.
    """

    patience: int = Field(ge=1)
    at_most: int = Field(ge=1)


class Method(_Part):
    """A row of the leaderboard: configuration files and overrides.

    Attributes:
        config: One file or several merged, where later files override earlier ones, relative to the study's file, after
            those of the case.
        settings: Overrides, before those of the case.
        final: Overrides that win over the case's and the chosen ones.
        tune: At most two axes of the method's own, in addition to those of all methods.
        drawn_as: The name by which its settings are drawn from the grid; its own if None, a former one keeps its draw.
        tuned_as: The method whose chosen setting it takes, instead of tuning by itself.
        cases: Shell-style patterns of the cases it is for.
        tier: Methods of tier 1 run before those of tier 2, so that partial results already form a table.
    """

    config: list[str] | str = []
    settings: Settings = {}
    final: Settings = {}
    tune: dict[str, Axis] = {}
    drawn_as: str | None = None
    tuned_as: str | None = None
    cases: list[str] = ["*"]
    tier: int = Field(default=1, ge=1)


class Case(_Part):
    """A column of the leaderboard: data set × partition × clients × protocol.

    Attributes:
        config: Configuration files, as for a method.
        settings: Overrides of every method.
        methods: Overrides of single methods, by their names.
        final: Overrides that win over all others, chosen ones too.
        grid: Axes of the study's grid that have other values here, as many of them.
        tuned_on: The case whose chosen settings it uses (of the study in ``tuning.study``, if there is one); itself if
            None.
        until: When its runs end, in place of the study's ``until``.
        paper: Published metrics by method, in the unit that is shown.
        panel: The panel of pictures to which it belongs; average ranks are also given for each panel.
        x: Its coordinate in them.
        each: Instead of ``x``: the case is repeated for each of these values. ``{x}`` stands for the value in the
            case's name, settings and grid; in the name a Python format is possible, ``{x:.0%}``.
    """

    config: list[str] | str = []
    settings: Settings = {}
    methods: dict[str, Settings] = {}
    final: Settings = {}
    grid: dict[str, Axis] = {}
    tuned_on: str | None = None
    until: Until | None = None
    paper: dict[str, float | str] = {}
    panel: str = ""
    x: float | None = None
    each: list[int | float] = []


class Tuning(_Part):
    """How settings are chosen: on validation data only, as many for every method.

    Attributes:
        seeds: Of the tuning; none of them may be reported.
        budget: How many settings of the grid every method tries.
        grid: The axes that all methods share.
        beyond: Axes of positive numbers, shared or of single methods, that are extended if the best setting is at an
            end: the next value, by the ratio of the last two, is tried as long as it is better.
        steps: How many values beyond an end of an axis are tried at most; None for any number.
        study: Another study's file, whose choices are used instead.
    """

    seeds: list[int] = []
    budget: int = Field(default=0, ge=0)
    grid: dict[str, Axis] = {}
    beyond: list[str] = []
    steps: int | None = Field(default=None, ge=1)
    study: str | None = None


class Picture(_Part):
    """A picture of the report.

    Attributes:
        kind: ``lines``: the metric against the cases' ``x``, a panel for each ``panel``; ``curves``: against the rounds
            or another metric of every round (of ``history``), a panel for each case; ``ranks``: average ranks over the
            cases with Nemenyi's critical difference.
        metric: A column of ``results.csv``; of curves a metric of every round.
        change: Of lines, whether they show how far the metric moves from the first place, paired by seed.
        band: Of lines, whether a band shows the 95 % confidence interval of the mean over seeds (Student's t), instead
            of bars of one standard deviation.
        x: Of curves, what they are drawn against.
        x_scale: Its factor.
        x_label: Label of the axis.
        y_label: Likewise; the unit is added.
        log: Whether the horizontal axis is logarithmic.
    """

    kind: Literal["lines", "curves", "ranks"]
    metric: str = "test"
    change: bool = False
    band: bool = False
    x: str = "round"
    x_scale: float = 1.0
    x_label: str = ""
    y_label: str = ""
    log: bool = False


class Traffic(_Part):
    """The report's table of communication.

    Attributes:
        target: The method whose best validation, or nearly, the others are to reach; none if empty.
        by_examples: Bounds of bins of clients by their number of training examples, whose test metrics are shown.
    """

    target: str = ""
    by_examples: list[float] = []


class Wandb(_Part):
    """Where a study sends its runs.

    Attributes:
        project: Project.
        entity: User or team; None for the account's default.
        offline: Write to disk only.
        save_dir: Folder that gets W&B's own folder ``wandb``.
    """

    project: str = "fl_lightning"
    entity: str | None = None
    offline: bool = False
    save_dir: str = "runs"


class WrongStudy(ValueError):
    """A study file that cannot be used."""


class File(_Part):
    """The file.

    Attributes:
        title: Title of the report; the file's name if empty.
        processes: Worker processes.
        seeds: The reported seeds.
        settings: Overrides of all runs.
        until: When runs end, in place of a fixed number of rounds; it has the last word on ``trainer.num_rounds``.
        methods: Rows.
        configs: Shell-style patterns of configuration files: each strategy of theirs that no method has becomes one.
        configs_except: Strategies that they do not add.
        cases: Columns.
        tuning: How settings are chosen.
        baselines: The simple methods that others are compared with.
        history: Metrics of every round that are kept; the report has tables of the test metrics among them.
        keep: Patterns of the files in the runs' folders that are kept.
        pictures: Of the report, by file name.
        traffic: The table of communication, if wanted.
        distances: Whether the report says how far each method is from the best one of a case; times are multiples of
            the first baseline's.
        results: Folder, relative to the file; ``results/<name>`` if None.
        convergence: File of the study of the same methods run to convergence, whose table is the report's second one.
        states_gb: Gigabytes of the last states of runs that are kept as long as the study is open, so that its runs can
            be lengthened; the oldest go first. With 0 none are kept, and what was kept goes.
        wandb: Where the runs are sent to, if anywhere.
    """

    title: str = ""
    processes: int = Field(default=1, ge=1)
    seeds: list[int] = Field(min_length=1)
    settings: Settings = {}
    until: Until | None = None
    methods: dict[str, Method] = {}
    configs: list[str] = []
    configs_except: list[str] = []
    cases: dict[str, Case] = Field(min_length=1)
    tuning: Tuning = Tuning()
    baselines: list[str] = []
    history: list[str] = []
    keep: list[str] = []
    pictures: dict[str, Picture] = {}
    traffic: Traffic | None = None
    distances: bool = False
    results: str | None = None
    convergence: str | None = None
    states_gb: float = Field(default=0.0, ge=0.0)
    wandb: Wandb | None = None


def read_file(path: Path) -> File:
    """The study in a YAML file.

    Raises:
        WrongStudy: It cannot be read, or has a setting that is unknown or of the wrong kind.
    """
    content = read_yaml(path)
    try:
        return File.model_validate(content)
    except ValidationError as error:
        raise WrongStudy(f"{path}: {_summary(error)}") from error


def read_yaml(path: Path) -> dict[str, Any]:
    """The settings in a YAML file.

    Raises:
        WrongStudy: It cannot be read, or holds no settings.
    """
    try:
        content = yaml_input.read_yaml(path)
    except yaml_input.WrongYaml as error:
        raise WrongStudy(str(error)) from error
    if not isinstance(content, dict):
        raise WrongStudy(f"{path} holds no settings (name: value): give the YAML file of a study")
    return content


def _summary(error: ValidationError) -> str:
    """The first thing that is wrong: the setting, the value, the remedy."""
    result = error.errors()[0]
    location = [str(part) for part in result["loc"]]
    if result["type"] == "extra_forbidden":
        parts: dict[tuple[str, int], type[_Part]] = {
            ("methods", 3): Method,
            ("cases", 3): Case,
            ("cases", 4): Until,
            ("until", 2): Until,
            ("tuning", 2): Tuning,
            ("wandb", 2): Wandb,
            ("pictures", 3): Picture,
        }
        known = list(parts.get((location[0], len(location)), File).model_fields)
        near = difflib.get_close_matches(location[-1], known, n=1)
        advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
        return f"{'.'.join(location)} is not a setting of a study: {advice}"
    given = "" if result["type"] == "missing" else f" (given: {str(result['input'])[:60]})"
    return f"{'.'.join(location)}: {result['msg']}{given}"
