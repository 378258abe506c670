"""What data are is asked of the task, and looked at nowhere else."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Where sources are composed of sources, and where kinds of data are told apart.
ALLOWED = ("fl_lightning/tasks/", "fl_lightning/data/sources/")
HELD = "GraphSource|ExampleSource|GraphSets|ClientGraph|ClientGraphs|ClientExamples"
TASKS = "(?:Node|Graph|Example)(?:Classification|Regression|Task)|LinkPrediction"
FORBIDDEN = (
    rf"isinstance\((?:[^()]|\([^()]*\))*?(?:\([^()]*)?\b(?:{HELD}|{TASKS})\b",
    r"\b(?:registry|record|task|data|card)\.kind\b",
    r"""(?:==|!=|\bin\b) *\(?["'](?:graphs|nodes|pairs|Node\w+|Graph(?:Class|Regr)\w+|Example\w+)["']""",
    r"\.(?:examples|example) *(?:==|!=)",
    r"\.target(?:\.name)? *(?:==|!=|is\b)",
    r"\btype\([^()]*\) *(?:is|==) *(?:" + HELD + "|" + TASKS + r")\b",
)


def offences(text: str) -> list[str]:
    return [actual[0] for pattern in FORBIDDEN for actual in re.finditer(pattern, text)]


def test_nobody_looks_at_the_kind_of_data() -> None:
    files = [*(ROOT / "fl_lightning").rglob("*.py"), *(ROOT / "callbacks").rglob("*.py")]
    assert len(files) > 300
    actual = {str(path.relative_to(ROOT)): offences(path.read_text()) for path in files}
    assert not {name: each for name, each in actual.items() if each and not name.startswith(ALLOWED)}


@pytest.mark.parametrize(
    "line",
    [
        "if isinstance(self.source, GraphSource):",
        "graphs = [c for c in clients if isinstance(c, (int, ClientExamples))]",
        'if registry.kind == "graphs":',
        "what = 'nodes' if task.examples == 'nodes' else 'examples'",
        'if about["name"] == "NodeRegression":',
        "if isinstance(registry.task, NodeRegression):",
        "if task.target is NUMBERS:",
    ],
)
def test_the_search_finds_what_it_looks_for(line: str) -> None:
    assert offences(line)
