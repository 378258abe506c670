"""The page of each method: its paper, its equations, what leaves the client, its settings and its results."""

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote_plus

from papers import ARXIV, ELSEWHERE, EQUATIONS

ROOT = Path(__file__).parents[1]
#: Studies with a row for a method, and the page of each.
_STUDIES = {
    **{f"leaderboard_{letter}": (f"Leaderboard {letter.upper()}", f"leaderboard-{letter}") for letter in "abc"},
    **{
        f"{paper}_printed": ("As printed", "reproduction")
        for paper in ("fedsheafhn", "fedaux", "panacea", "sheaf_fmtl")
    },
    "leaderboard_graphs": ("Leaderboard of graphs", "leaderboard-graphs"),
    "panacea": ("Panacea's tasks", "panacea-tasks"),
    "twin": ("TwinScaffold and its parts", "twin-scaffold"),
}
_MOST_CASES = 6
#: Between two formulas of one line: a line each fits a phone.
_BETWEEN = re.compile(r",?\s*\\qquad(?!\s*\\text\{\(eq)\s*")


def page(strategy: type, markdown: Callable[[str], str], settings: list[str]) -> str:
    """The page of a strategy.

    Args:
        strategy: Its class.
        markdown: Makes Markdown of a docstring.
        settings: The table of its settings.
    """
    module = inspect.getmodule(strategy)
    text = inspect.cleandoc((module and module.__doc__) or "")
    first, _, rest = text.partition("\n")
    name = strategy.__name__
    file = Path(inspect.getfile(strategy)).relative_to(ROOT)
    formulas = [part for line in EQUATIONS.get(name, []) for part in _BETWEEN.split(line)]
    equations = [f"$$\n{part.strip()}\n$$\n" for part in formulas]
    lines = [f"# {name}", "", markdown(first), "", *paper_of(name, text), *equations]
    if config := config_of(name):
        lines += ["```console", f"$ fl-train fit --config {config}", "```", ""]
    lines += ["## How it is written here", "", markdown(rest), "", f"File: `{file}`.", ""]
    lines += ["## What leaves the client", "", *leaves(name), ""]
    lines += ["## Settings", "", *settings, "", "## Results", "", *results_of(name), ""]
    return "\n".join(lines)


def config_of(name: str) -> str | None:
    """A configuration of the repository that trains it."""
    named = re.compile(rf"^strategy:\s+(?:class_path:\s+)?{name}\s*$", re.MULTILINE)
    paths = [*(ROOT / "configs").glob("*.yaml"), *(ROOT / "configs").glob("papers/*.yaml")]
    found = sorted(paths, key=lambda path: ("cora" not in path.name, len(path.name), path.name))
    return next((str(path.relative_to(ROOT)) for path in found if named.search(path.read_text())), None)


def paper_of(name: str, text: str) -> list[str]:
    """A link to the paper: the preprint, another page of it, or a search for its title."""
    title = re.search(r'"([A-Z][^"]{20,})"', " ".join(text.split()))
    if name in ARXIV:
        words = title[1].rstrip(",.") if title else f"arXiv:{ARXIV[name]}"
        return [f"Paper: [{words}](https://arxiv.org/abs/{ARXIV[name]}).", ""]
    if title is None:
        return []
    words = title[1].rstrip(",.?")
    link = ELSEWHERE.get(name, f"https://scholar.google.com/scholar?q={quote_plus(words)}")
    return [f"Paper: [{words}]({link}).", ""]


def leaves(name: str) -> list[str]:
    """The rows of the table of all methods (``benchmarks/what_leaves.py``)."""
    table = (ROOT / "docs" / "explanation" / "what-leaves-a-client.md").read_text()
    rows = re.findall(rf"^\| `{name}` \| (.*)$", table, flags=re.MULTILINE)
    link = "[what leaves a client](../../explanation/what-leaves-a-client.md)"
    if not rows:
        return [f"It is not in the table of {link}: it is for comparison, or trains on data in one place."]
    note = f"The meaning of the columns, and what leaves in every stage of every method: {link}."
    return ["| stage | what leaves the client | sums only |", "|---|---|---|", *(f"| {row}" for row in rows), "", note]


def results_of(name: str) -> list[str]:
    """Its rows in leaderboards and studies of what papers print; forms with other settings have rows of their own."""
    lines = []
    for study, (title, result_page) in _STUDIES.items():
        report = ROOT / "studies" / "results" / study / "report.md"
        if not report.is_file():
            continue
        head, *rows = re.findall(
            r"^\|.*\|$", report.read_text().partition("## Test metrics")[2].partition("\n## ")[0], re.M
        )
        cases = [each.strip() for each in head.strip("|").split("|")]
        mine = [
            [each.strip() for each in row.strip("|").split("|")]
            for row in rows
            if plain(row.split("|")[1]) == plain(name)
        ]
        if not mine:
            continue
        known = [place for place, value in enumerate(mine[0]) if place and value][:_MOST_CASES]
        if known:
            lines += [f"| [{title}](../../results/{result_page}.md) | {' | '.join(cases[place] for place in known)} |"]
            lines += [f"|---|{'---|' * len(known)}", f"| {mine[0][0]} | {' | '.join(mine[0][i] for i in known)} |", ""]
    if not lines:
        return ["It has no row in the leaderboards yet."]
    return [*lines, "↗ still rising, ↯ diverged, ⊣ at an edge of its grid ([Results](../../results/index.md))."]


def plain(name: str) -> str:
    """A method's name without what its class's name has no room for."""
    return re.sub(r"[^a-z0-9]", "", name.lower().replace("+", "plus"))
