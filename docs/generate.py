"""The pages that are made from the code and from the studies' files; called by conf.py."""

import collections
import inspect
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

import docstring_parser
from lightning.fabric.loggers.logger import Logger
from method_pages import page
from pydantic import BaseModel

import fl_lightning.callbacks
import fl_lightning.data
import fl_lightning.models
import fl_lightning.run.loggers
from fl_lightning.data import FederatedDataModule, GraphSampler, Heterogeneity, Partitioner, Source, Splitter
from fl_lightning.executors import Executor
from fl_lightning.round.client import ClientModule
from fl_lightning.round.participation import Participation
from fl_lightning.run.callback import Callback
from fl_lightning.strategies import Strategy
from fl_lightning.strategies.mixing.aggregation import Aggregation
from fl_lightning.study import schema
from fl_lightning.trainer import FederatedTrainer

ROOT = Path(__file__).parents[1]
#: Rows of a table that is not folded.
FEW_ROWS = 12
FAMILIES = {
    "mixing": "Mixing: the server averages, by one rule for all or by one for each client",
    "hypernetwork": "Hypernetwork: the server generates models",
    "decentralized": "Decentralized: clients talk to their neighbors",
    "strategies": "Without communication",
}
#: What settings can name, by the setting.
GROUPS: dict[str, type] = {
    "data.source": Source,
    "data.partitioner": Partitioner,
    "data.splitter": Splitter,
    "data.heterogeneity": Heterogeneity,
    "data.sampler": GraphSampler,
    "trainer.callbacks": Callback,
    "trainer.executor": Executor,
    "trainer.logger": Logger,
    "strategy.aggregation": Aggregation,
    "model": ClientModule,
}


def all_pages(docs: Path) -> None:
    """Write every generated page below ``docs/generated``, which git ignores."""
    target = docs / "generated"
    shutil.rmtree(target, ignore_errors=True)
    (target / "strategies").mkdir(parents=True)
    families = collections.defaultdict(list)
    for strategy in concrete(Strategy):
        family = strategy.__module__.split(".")[-2]
        families[family].append(strategy)
        (target / "strategies" / f"{strategy.__name__}.md").write_text(page(strategy, markdown, settings_of(strategy)))
    (target / "strategies.md").write_text(strategies_page(families))
    (target / "methods.md").write_text(methods(families))
    settings = settings_pages()
    (target / "settings").mkdir()
    for group, text in settings.items():
        (target / "settings" / f"{group}.md").write_text(text)
    (target / "settings.md").write_text(settings_page(settings))
    (target / "study-file.md").write_text(study_page())
    tables = [report.parent.name if report.stem == "report" else report.stem for report in results()]
    (target / "tables").mkdir()
    for name, report in zip(tables, results(), strict=True):
        (target / "tables" / f"{name}.md").write_text(table_page(name, report))
    (target / "tables.md").write_text(tables_page(tables))
    for report in sorted((ROOT / "studies" / "results").glob("*/report.md")):
        write_sections(report, target / "sections" / report.parent.name)
    for each in sorted((docs / "results").glob("*.md")):
        write_missing_sections(each, target / "sections")


def concrete(base: type) -> list[type]:
    """The classes of this project that can be named where ``base`` is asked for, by name."""
    result: dict[str, type] = {}
    waiting = [base]
    while waiting:
        cls = waiting.pop()
        waiting += cls.__subclasses__()
        is_ours = cls.__module__.startswith("fl_lightning.")
        if is_ours and not inspect.isabstract(cls) and not cls.__name__.startswith("_") and cls is not Callback:
            result[cls.__name__] = cls
    return [result[name] for name in sorted(result, key=str.lower)]


def strategies_page(families: dict[str, list[type]]) -> str:
    """The list of all strategies."""
    lines = ["# Strategies", "", "One file each; the page of each has its source, its equations and its settings.", ""]
    for family, title in FAMILIES.items():
        lines += [f"## {title}", "", "| strategy | in one line |", "|---|---|"]
        for strategy in families[family]:
            module = inspect.getmodule(strategy)
            first = inspect.cleandoc((module and module.__doc__) or "").partition("\n")[0]
            lines.append(f"| [{strategy.__name__}](strategies/{strategy.__name__}.md) | {cell(first)} |")
        lines.append("")
    every = [strategy.__name__ for family in FAMILIES for strategy in families[family]]
    return "\n".join([*lines, "```{toctree}", ":hidden:", "", *(f"strategies/{name}" for name in every), "```", ""])


def methods(families: dict[str, list[type]]) -> str:
    """The names of all methods with links, for the front page."""
    lines = []
    for family, title in FAMILIES.items():
        links = ", ".join(f"[{each.__name__}](generated/strategies/{each.__name__}.md)" for each in families[family])
        lines.append(f"- **{title}.** {links}.")
    return "\n".join([*lines, ""])


def settings_pages() -> dict[str, str]:
    """Every setting that is not a strategy's: a page for each group, by its name."""
    alone = {"trainer": FederatedTrainer, "trainer.participation": Participation, "data": FederatedDataModule}
    pages = {group: [*settings_of(cls), ""] for group, cls in alone.items()}
    nets = [getattr(fl_lightning.models, name) for name in sorted(fl_lightning.models.__all__)]
    groups = {group: concrete(base) for group, base in GROUPS.items()}
    groups["model.net"] = [cls for cls in nets if inspect.isclass(cls) and "forward" in vars(cls)]
    for group, classes in groups.items():
        pages[group] = []
        for cls in classes:
            pages[group] += [f"## {cls.__name__}", "", markdown(summary(cls)), "", *settings_of(cls), ""]
    return {group: "\n".join([f"# {group}", "", *lines]) for group, lines in pages.items()}


def settings_page(groups: Iterable[str]) -> str:
    """The list of the pages of settings."""
    lines = ["# Settings", "", "Those of the strategies are on [their own pages](strategies.md).", ""]
    return "\n".join([*lines, "```{toctree}", ":maxdepth: 2", "", *(f"settings/{name}" for name in groups), "```", ""])


def study_page() -> str:
    """What a study's file may have: a table for each of its parts."""
    parts = {
        "A study": schema.File,
        "methods": schema.Method,
        "cases": schema.Case,
        "until": schema.Until,
        "tuning": schema.Tuning,
        "pictures": schema.Picture,
        "traffic": schema.Traffic,
        "wandb": schema.Wandb,
    }
    lines = ["# The file of a study", "", "What `fl-train study` reads ([how studies work](../how-to/studies.md)).", ""]
    for title, part in parts.items():
        descriptions = {each.arg_name: each.description for each in docstring_parser.parse(part.__doc__ or "").params}
        lines += [f"## {title}", "", markdown(summary(part)), "", "| setting | default | meaning |", "|---|---|---|"]
        for name, field in part.model_fields.items():
            value = "(required)" if field.is_required() else shown_default(field.get_default())
            lines.append(f"| `{name}` | {value} | {cell(descriptions[name] or '')} |")
        lines.append("")
    return "\n".join(lines)


def shown_default(value: object) -> str:
    """A default of a study's file, as YAML would have it; of a part that may be missing, that it is left out."""
    if isinstance(value, BaseModel) or value in ({}, [], "", None):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def settings_of(cls: type) -> list[str]:
    """A table of the settings of a class, those of its bases among them."""
    descriptions = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("fl_lightning"):
            descriptions |= {
                each.arg_name: each.description for each in docstring_parser.parse(base.__doc__ or "").params
            }
    rows = [
        f"| `{name}` | {default(parameter)} | {cell(descriptions.get(name) or '')} |"
        for name, parameter in inspect.signature(cls).parameters.items()
        if parameter.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    ]
    return ["| setting | default | meaning |", "|---|---|---|", *rows] if rows else ["No settings."]


def default(parameter: inspect.Parameter) -> str:
    """The default value as a configuration file would have it."""
    value = parameter.default
    if value is inspect.Parameter.empty:
        return "(required)"
    names = {None: "null", True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return f"`{names[value]}`"
    if inspect.isclass(value) or inspect.isfunction(value):
        return f"`{value.__name__}`"
    if type(value).__repr__ is object.__repr__ or "<" in repr(value):
        return f"`{type(value).__name__}`"
    return f"`{value!r}`".replace("|", "\\|")


def summary(cls: type) -> str:
    """What a class's docstring says before its arguments."""
    parsed = docstring_parser.parse(inspect.cleandoc(cls.__doc__ or ""))
    parts = [parsed.short_description, parsed.long_description]
    return "\n\n".join(part for part in parts if part)


def markdown(text: str) -> str:
    """A docstring as Markdown: blocks that are indented stay as they are, roles lose their role."""
    lines = [line if line.startswith("    ") else plain(line) for line in text.splitlines()]
    return "\n".join(lines)


def plain(line: str) -> str:
    """A line of prose without what Markdown would take for markup."""
    line = re.sub(r":(?:class|meth|func|mod|attr):`(?:~[\w.]*\.)?([^`]*)`", r"``\1``", line)
    parts = line.split("``") if "``" in line else [line]
    prose = [
        part.replace("*", "\\*").replace("<", "&lt;").replace("|", "\\|").replace("_", "\\_") for part in parts[::2]
    ]
    code = [f"`{part}`" for part in parts[1::2]]
    return "".join(a + b for a, b in zip(prose, [*code, *[""] * (len(prose) - len(code))], strict=True))


def cell(text: str) -> str:
    """A text in one cell of a table."""
    return plain(" ".join(text.split())).replace("\\|", "|").replace("|", "\\|")


def tables_page(names: list[str]) -> str:
    """The list of all tables."""
    lines = ["# Tables", "", "What studies and benchmarks wrote, as they wrote it: a page each.", ""]
    return "\n".join([*lines, "```{toctree}", ":maxdepth: 1", "", *(f"tables/{name}" for name in names), "```", ""])


def table_page(name: str, file: Path) -> str:
    """A report: its first table is open, later ones that are long are folded."""
    body = file.read_text().replace("](", f"](../../../{file.parent.relative_to(ROOT)}/")
    if not body.startswith("#"):
        body = f"# {name}\n\n{body}"
    tables = iter(range(10**6))

    def fold(match: re.Match[str]) -> str:
        rows = match[0].count("\n") - 2
        if next(tables) == 0 or rows <= FEW_ROWS:
            return match[0]
        return f"<details><summary>A table of {rows} rows</summary>\n\n{match[0]}\n</details>\n"

    body = re.sub(r"(?:^\|.*\|\n)+", fold, body, flags=re.MULTILINE)
    return f"{body}\n\nFile: `{file.relative_to(ROOT)}`.\n"


def write_sections(report: Path, folder: Path) -> None:
    """A file for each section of a study's report, for the pages that include it: ``test-metrics.md``, ..."""
    folder.mkdir(parents=True)
    for section in re.split(r"^## ", report.read_text(), flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        (folder / f"{'-'.join(re.findall('[a-z0-9]+', title.lower()))}.md").write_text(body)


def write_missing_sections(page: Path, folder: Path) -> None:
    """What a page includes of studies that have no report yet: a sentence that says so."""
    for name, section in re.findall(r"generated/sections/(\w+)/([\w-]+\.md)", page.read_text()):
        if not (ROOT / "studies" / "results" / name / "report.md").exists():
            (folder / name).mkdir(parents=True, exist_ok=True)
            (folder / name / section).write_text(f"Nothing of `studies/{name}.yaml` has been reported yet.\n")


def results() -> Iterable[Path]:
    """The files with tables."""
    yield from sorted((ROOT / "studies" / "results").glob("**/*.md"))
    yield from sorted((ROOT / "benchmarks" / "results").glob("*.md"))
