"""A run as stored in its folder, read without torch and without the data."""

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fl_lightning.direction import direction_of, metric_of, metric_on_test
from fl_lightning.report.record import RunRecord
from fl_lightning.run.curve import NUM_OVERFLOWS, SIGNS, Curve, Marks, marks_of
from fl_lightning.yaml_input import read_yaml

Column = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """What is known of a run.

    Attributes:
        path: The folder, or another place that the run is known by.
        rounds: Numbers of the rounds that are over, (R,).
        history: Metrics of the rounds by name, (R,) each, nan where there is none.
        result: The content of ``result.json``; empty for a run that was killed or goes on.
        settings: Of the configuration, nested.
        record: The content of ``report.json``; None where there is none.
        malicious: Names of the malicious clients, by attack.
    """

    path: Path
    rounds: NDArray[np.int64]
    history: Mapping[str, Column]
    result: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    record: RunRecord | None = None
    malicious: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def malicious_names(self) -> set[str]:
        """Names of the malicious clients of all attacks."""
        return {name for members in self.malicious.values() for name in members}

    @property
    def name(self) -> str:
        """What the run is called: its last two folders."""
        return "/".join(self.path.parts[-2:])

    @property
    def strategy(self) -> str:
        """The strategy's name; empty if no file has it."""
        name = self.result.get("strategy") or (self.record.strategy if self.record else "")
        return str(name or _class_name(self.settings.get("strategy")))

    @property
    def status(self) -> str:
        """``finished``, ``interrupted``, ``failed``, or ``unknown`` for a run that was killed or is still running."""
        return str(self.result.get("status", "unknown"))

    @property
    def monitor(self) -> str:
        """The metric that chooses the round."""
        return str(self.result.get("monitor") or (self.record.monitor if self.record else "val/acc"))

    @property
    def test_metric(self) -> str:
        """The metric that is reported."""
        return metric_on_test(metric_of(self.monitor, {*self.history, *(self.result.get("result") or {})}))

    @property
    def less_is_better(self) -> bool:
        """Whether a smaller value of the monitored metric is better."""
        name = self.result.get("mode") or (self.record.mode if self.record else direction_of(self.monitor))
        return name == "min"

    @property
    def figures(self) -> dict[str, float]:
        """Metrics of the best round; taken from the rounds themselves if the run left no result."""
        known = self.result.get("result") or {}
        if known:
            return {name: math.nan if value is None else float(value) for name, value in known.items()}
        column = self.history.get(self.monitor)
        if column is None or not np.isfinite(column).any():
            return {}
        best = int(np.nanargmin(column) if self.less_is_better else np.nanargmax(column))
        figures = {name: float(values[best]) for name, values in self.history.items()}
        return {**figures, "best_round": float(self.rounds[best])}

    def reference(self, name: str) -> dict[str, float]:
        """What each reference of the run (``trainer.references``) has of a metric at its own best round.

        Args:
            name: The metric's; a reference has one model, so that what stands before its split plays no part.
        """
        bare = "/".join(name.split("/")[-2:])
        known = {label: metrics.get(bare) for label, metrics in (self.result.get("references") or {}).items()}
        return {label: float(value) for label, value in known.items() if value is not None}

    @property
    def best_round(self) -> int | None:
        """The round that validation chose."""
        result = self.figures.get("best_round")
        return None if result is None else int(result)

    @property
    def marks(self) -> Marks:
        """Whether it was still rising or diverged; of a run that left no word of it from the rounds themselves."""
        if "marks" in self.result:
            return {name: str(why) for name, why in self.result["marks"].items() if name in SIGNS}
        values = self.history.get(self.monitor)
        if values is None or self.best_round is None:
            return {}
        known = np.isfinite(values)
        overflows = self.history.get(NUM_OVERFLOWS)
        bare = f"val/{self.monitor.rpartition('/')[2]}"
        return marks_of(
            Curve(self.rounds[known].tolist(), values[known].tolist(), "min" if self.less_is_better else "max"),
            best_round=self.best_round,
            num_rounds=len(self.rounds),
            chance=self.record.reference.get(bare) if self.record else None,
            num_overflows=0 if overflows is None else int(np.nansum(overflows)),
        )

    def column(self, name: str) -> Column | None:
        """The metrics of a metric; None where no round has one."""
        result = self.history.get(name)
        return result if result is not None and np.isfinite(result).any() else None

    def client_values(self, metric: str) -> dict[str, float]:
        """Each client's value at the best round, by name; those without examples are left out.

        It is of the model that the reported metric is of: of the local ones where ``trained/val/acc`` is monitored.
        """
        chosen = None if self.record is None else self.record.best
        if self.record is None or chosen is None:
            return {}
        kind = self.test_metric.removesuffix(self.client_metric)
        values = chosen.scores.get(kind if kind in chosen.scores else "", {}).get(metric, [])
        named = zip((self.record.names[client] for client in chosen.clients), values, strict=False)
        return {name: value for name, value in named if value is not None}

    @property
    def client_metric(self) -> str:
        """The clients' own name of the reported metric: ``test/acc`` where ``benign/val/acc`` is monitored."""
        chosen = None if self.record is None else self.record.best
        known = list(chosen.scores.get("", {})) if chosen else []
        return next((name for name in known if self.test_metric.endswith(name)), self.test_metric)

    @property
    def reported_values(self) -> dict[str, float]:
        """The values of the clients that the reported metric is a mean over: of the benign ones where it says so."""
        left_out = self.malicious_names if self.test_metric.startswith("benign/") else ()
        return {name: value for name, value in self.client_values(self.client_metric).items() if name not in left_out}

    @property
    def flat_settings(self) -> dict[str, Any]:
        """The settings by dotted name; for a run from Python, as far as they are known."""
        return flatten(self.settings or (self.record.settings if self.record else {}))


def read(folder: Path, *, result: Mapping[str, Any] | None = None) -> Recorded:
    """Read a run's folder.

    Args:
        folder: The folder.
        result: What the run came to, in place of its ``result.json``.

    Raises:
        ValueError: There is no such folder, it is not that of a run, or a file is damaged.
    """
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}: give the folder of a run, such as runs/quickstart/version_0")
    names = ("metrics.csv", "result.json", "report.json", "config.yaml")
    if not any((folder / name).is_file() for name in names):
        raise ValueError(f"{folder} is not the folder of a run: it has none of {', '.join(names)}")
    with telling(folder):
        _check_links(folder)
        rounds, history = _read_rounds(folder / "metrics.csv")
        came_to = _read_result(folder / "result.json") if result is None else result
        named = str(came_to.get("config") or "config.yaml")
        config = named if Path(named).name == named else "config.yaml"  # nothing outside the folder is read
        return Recorded(
            path=folder.absolute(),
            rounds=rounds,
            history=history,
            result=came_to,
            settings=_read_settings(folder / config),
            record=RunRecord.read(folder),
            malicious=_read_json(folder / "malicious_clients.json"),
        )


@contextmanager
def telling(path: Path) -> Iterator[None]:
    """Name the run whose files are no run's, whatever stumbles over them.

    Raises:
        ValueError: In place of the errors that values of a wrong kind lead to.
    """
    try:
        yield
    except ValueError as error:
        if path.name in str(error):
            raise
        raise ValueError(f"{path} is damaged: {' '.join(str(error).split())}") from error
    except (LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: its files contradict each other ({type(error).__name__})") from error


def text_of(path: Path) -> str:
    """The text of a file of a run.

    Raises:
        ValueError: It is none.
    """
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is damaged: byte {error.start} is not UTF-8") from error


def _check_links(folder: Path) -> None:
    """Refuse a folder with a link to a file outside, which the page would show."""
    for path in folder.iterdir():
        is_read = path.suffix in (".csv", ".json", ".yaml")
        if is_read and path.is_symlink() and path.is_file() and not path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{path} is a link to a file outside the run's folder: replace it by the file")


def is_run(folder: Path) -> bool:
    """Whether a folder has a file that only runs have."""
    return any((folder / name).is_file() for name in ("metrics.csv", "result.json", "report.json"))


def columns_of(rows: Sequence[Mapping[str, Any]]) -> tuple[NDArray[np.int64], dict[str, Column]]:
    """Metrics by name; rows of the same round are one, and later ones win."""
    merged: dict[int, dict[str, float]] = {}
    for row in rows:
        result = {name: _number(value) for name, value in row.items() if name != "round" and name is not None}
        known = {name: value for name, value in result.items() if not math.isnan(value)}
        merged.setdefault(int(row["round"]), {}).update(known)
    names = dict.fromkeys(name for row in merged.values() for name in row)
    rounds = sorted(merged)
    columns = {name: np.array([merged[round_idx].get(name, math.nan) for round_idx in rounds]) for name in names}
    return np.array(rounds, dtype=np.int64), columns


def flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Leaves of nested settings by their dotted name; a class and its arguments are one step of the name.

    Example:
        >>> flatten({"strategy": {"class_path": "fl_lightning.strategies.FedAvg", "init_args": {"num_epochs": 3}}})
        {'strategy': 'FedAvg', 'strategy.num_epochs': 3}
    """
    if isinstance(value, Mapping) and "class_path" in value:
        inner = flatten(value.get("init_args") or {}, path)
        return {path: _class_name(value), **{name: leaf for name, leaf in inner.items() if name != path}}
    if isinstance(value, Mapping):
        dot = f"{path}." if path else ""
        return {name: leaf for key, item in value.items() for name, leaf in flatten(item, f"{dot}{key}").items()}
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        return {
            name: leaf for index, item in enumerate(value) for name, leaf in flatten(item, f"{path}.{index}").items()
        }
    return {path: value}


def _class_name(value: Any) -> str:
    path = value.get("class_path", value.get("class", "")) if isinstance(value, Mapping) else value or ""
    return str(path).rpartition(".")[2]


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):  # an empty field, or a word
        return math.nan


def _read_rounds(path: Path) -> tuple[NDArray[np.int64], dict[str, Column]]:
    if not path.is_file():
        return np.empty(0, dtype=np.int64), {}
    whole_lines = text_of(path).rpartition("\n")[0]  # a crash may have cut the last one off
    try:
        return columns_of(list(csv.DictReader(whole_lines.splitlines())))
    except (KeyError, ValueError, OverflowError, csv.Error) as error:
        raise ValueError(f"{path} is damaged: a row has no number of a round ({error})") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(text_of(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} is damaged: it holds no names and values")
    return content


#: The fields of result.json that are used, by the kind of their values.
_RESULT: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("strategy", "status", "monitor", "error", "config", "partition_hash"), (str,)),
    **dict.fromkeys(("result", "marks", "failures", "versions", "references"), (dict,)),
    "changes": (list,),
}


def _read_result(path: Path) -> dict[str, Any]:
    content = _read_json(path)
    for name, kinds in _RESULT.items():
        if not isinstance(content.get(name), (*kinds, type(None))):
            raise ValueError(f"{path} is damaged: {name} is {str(content[name])[:40]!r}")
    for name in ("result", "failures"):
        for key, value in (content.get(name) or {}).items():
            if not isinstance(value, int | float | None):
                raise ValueError(f"{path} is damaged: {name}.{key} is {str(value)[:40]!r}")
    return content


def _read_settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    content = read_yaml(path)
    return content if isinstance(content, dict) else {}
