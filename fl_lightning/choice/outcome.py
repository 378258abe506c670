"""What a search decided so far, and what it came to."""

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fl_lightning.choice.halving import Arm, Plan
from fl_lightning.counts import count
from fl_lightning.files import whole_file
from fl_lightning.report.wording import number
from fl_lightning.study.edge import Point
from fl_lightning.study.store import Record

#: The beginning of a refusal of a strategy's setting.
_REFUSED_SETTING = re.compile(r"(?:\w+: )?(strategy\.\w+) is ")


def with_remedy(error: str) -> str:
    """Why a method failed; of a setting of its own, with the option that gives another value.

    Example:
        >>> with_remedy("strategy.num_neighbors is 5, but each of the 4 training clients has 3 others")[-52:]
        ' (--grid strategy.num_neighbors=VALUE tries another)'
    """
    found = _REFUSED_SETTING.match(error)
    return error if found is None else f"{error} (--grid {found[1]}=VALUE tries another)"


@dataclass(frozen=True, kw_only=True)
class Dropped:
    """A setting that did not go on.

    Attributes:
        arm: The setting.
        rounds: After how many rounds.
        value: Its validation metric then; None if there is none.
        why: In words.
    """

    arm: Arm
    rounds: int
    value: float | None
    why: str

    def __str__(self) -> str:
        value = "" if self.value is None else f" at {number(self.value)}"
        return f"{self.arm}: after {count(self.rounds, 'round')}{value}, {self.why}"


@dataclass(kw_only=True)
class Found:
    """What a search came to.

    Attributes:
        finalists: The chosen setting of each method that was trained with the reported seeds, the simplest first.
        edges: At which edges of what was tried it stands, by method; empty for none.
        records: Its records, by method and seed.
        has_new_seeds: Whether these are of new seeds; otherwise they are those of the search, without test metrics.
        left_out: Why methods did not take part.
        dropped: The settings that did not go on.
        num_rounds: Of a whole run.
        taken: Of the budget, by all starts together: seconds of the clock, or rounds.
        took: The same in words.
    """

    finalists: dict[str, Point] = field(default_factory=dict)
    edges: dict[str, str] = field(default_factory=dict)
    records: dict[str, dict[int, Record]] = field(default_factory=dict)
    has_new_seeds: bool = True
    left_out: dict[str, str] = field(default_factory=dict)
    dropped: list[Dropped] = field(default_factory=list)
    num_rounds: int = 0
    taken: float = 0.0
    took: str = ""


@dataclass(kw_only=True)
class Memory:
    """What was decided, in ``choice.json``; records say the rest.

    Attributes:
        path: The file.
        asked: Digest of what was asked for.
        plan: The plan.
        methods: Those that it is for; empty where an older version wrote it.
        rungs: Method and label of the settings that went on, for each rung.
    """

    path: Path
    asked: str
    plan: Plan | None = None
    methods: list[str] = field(default_factory=list)
    rungs: list[list[list[str]]] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path, asked: str) -> "Memory":
        """What was decided for the same; nothing if something else was asked for."""
        try:
            content = json.loads(path.read_text())
            if content["asked"] == asked:
                plan = None if content["plan"] is None else Plan(**content["plan"])
                methods = content.get("methods", [])
                return cls(path=path, asked=asked, plan=plan, methods=methods, rungs=content["rungs"])
        except (OSError, ValueError, LookupError, TypeError):  # none, or damaged: the records are what counts
            pass
        return cls(path=path, asked=asked)

    def write(self) -> None:
        """Write the file."""
        plan = None if self.plan is None else asdict(self.plan)
        content = {"asked": self.asked, "plan": plan, "methods": self.methods, "rungs": self.rungs}
        with whole_file(self.path) as temporary:
            temporary.write_text(json.dumps(content, indent=1) + "\n")
