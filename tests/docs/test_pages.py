"""What the documentation names exists, and the commands that it shows are accepted."""

import json
import re
import shlex
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from doc_blocks import blocks, command_lines
from scripts import script

import fl_lightning
from fl_lightning.arguments import TRAINER_VERBS, VERBS, predicts_new_data
from fl_lightning.command_line import main

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").glob("*/*.md"), ROOT / "README.md"])
PAGES = [page for page in PAGES if "generated" not in page.parts]
TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("[!i]*.md"))


def commands(page: Path) -> list[str]:
    """The command lines of ``fl-train`` that a page shows after a ``$``."""
    lines = [line for language, text in blocks(page) if language == "console" for line in command_lines(text)]
    return [line for line in lines if line.startswith("fl-train")]


@pytest.mark.full
@pytest.mark.parametrize("notebook", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda notebook: notebook.stem)
def test_notebooks_run_and_show_what_they_came_to(
    notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``jupyter execute --inplace`` writes their outputs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FL_CACHE_DIR", str(tmp_path / "cache"))
    names: dict[str, object] = {"__name__": notebook.stem}
    for cell in json.loads(notebook.read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), notebook.name, "exec"), names)
            assert cell["outputs"]
            assert not any(output["output_type"] == "error" for output in cell["outputs"])
    plt.close("all")


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page not in TUTORIALS and commands(page)], ids=lambda page: page.stem
)
def test_commands_are_accepted(page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(ROOT)
    for line in commands(page):
        words = shlex.split(line, comments=True)[1:]
        if words[0] in VERBS or predicts_new_data(words):
            continue  # their own tests run them
        with pytest.raises(SystemExit) as ended:
            main([word for word in words if word not in ("--ckpt_path", "last", "--profile")] + ["--print_config"])
        assert not ended.value.code, line
        assert "strategy" in capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_that_a_page_names_exist(page: Path) -> None:
    for name in re.findall(
        r"(?:configs|benchmarks|studies|examples)/[\w/]+\.(?:yaml|py|json|md|ipynb)", page.read_text()
    ):
        assert (ROOT / name).is_file(), name


@pytest.mark.parametrize("page", [ROOT / "llms.txt", *PAGES], ids=lambda page: page.stem)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text):
        assert "generated/" in target or (page.parent / target).exists(), target


def test_llms_txt_names_what_python_has() -> None:
    text = (ROOT / "llms.txt").read_text()
    for name in re.findall(r"\bfl\.([\w.]+)", text):
        thing = fl_lightning
        for part in name.split("."):
            thing = getattr(thing, part)
    (verbs,) = re.findall(r"`fl-train ([a-z|]+) --config", text)
    assert set(verbs.split("|")) == set(TRAINER_VERBS)


def test_the_readme_shows_the_metrics_of_its_study() -> None:
    report = tables((ROOT / "studies" / "results" / "leaderboard_a" / "report.md").read_text())[0]
    shown = next(table for table in tables((ROOT / "README.md").read_text()) if "method" in table[0])
    of_study = {line["method"]: line for line in report}
    assert len(shown) == 10
    for row in shown:
        method = row["method"].removesuffix(" (ours)")
        for case in row.keys() - {"method"}:
            of_case = re.sub(r" [▲▼↗↯⊣]| \(best simple\)| · (-?\d+ %|no room)", "", of_study[method][case])
            assert row[case] == of_case, (method, case)


#: Metrics of a page that are no report's: printed in a paper, of tuning cells, or of a check that the page describes.
NO_REPORTS = {
    "decentralized": {"94.3", "94.4", "92.2"},
    "fedaux": {"68.5"},
    "robustness": {"43.2", "73.2"},
    "four-systems": {"79.1"},
    "panacea": {"42.5"},
}


@pytest.mark.parametrize(
    "page",
    [ROOT / "README.md", *sorted([*ROOT.glob("docs/results/*.md"), *ROOT.glob("docs/explanation/*.md")])],
    ids=lambda page: page.stem,
)
def test_metrics_in_sentences_are_those_of_the_reports_that_the_page_names(page: Path) -> None:
    """Metrics with a decimal, rounded: a cell that is trained again changes its report, and this finds the sentence."""
    text = page.read_text()
    named = [
        f"studies/results/{name}/report.md"
        for name in re.findall(r"(?:studies|results|sections)/(?!results/)([\w*]+)(?:\.yaml|/)", text)
    ]
    named += [f"benchmarks/results/{name}.md" for name in re.findall(r"benchmarks/(?:results/)?(\w+)\.", text)]
    reports = "".join(path.read_text() for name in set(named) for path in sorted(ROOT.glob(name)))
    sentences = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)|^\|.*?$", " ", text, flags=re.DOTALL | re.MULTILINE)
    written = set(re.findall(r"(?<![\d.])\d\d\.\d(?!\d)", sentences))
    reported = {f"{float(figure):.1f}" for figure in re.findall(r"\d\d\.\d+", reports)}
    missing = written - reported - NO_REPORTS.get(page.stem, set())
    assert not missing


def test_the_pages_of_methods_have_equations_papers_and_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import generate
    import method_pages
    from papers import ARXIV, EQUATIONS

    strategies = {cls.__name__: cls for cls in generate.concrete(generate.Strategy)}
    assert set(EQUATIONS) | set(ARXIV) <= set(strategies)
    assert set(strategies) - set(EQUATIONS) <= {"Oracle", "Pooled"}, "docs/papers.py has no equation of them"
    page = method_pages.page(strategies["SCAFFOLD"], generate.markdown, generate.settings_of(strategies["SCAFFOLD"]))
    for part in (
        "(https://arxiv.org/abs/1910.06378)",
        "$$",
        "configs/scaffold_cora.yaml",
        "| train | all parameters",
        "`server_lr`",
        "[Leaderboard A](../../results/leaderboard-a.md)",
        "85.1 ± 1.3",
    ):
        assert part in page, part
    assert "`SheafRidge`" in generate.plain("see :class:`~fl_lightning.strategies.SheafRidge`, x_i")


def test_long_tables_are_folded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import generate

    monkeypatch.setattr(generate, "ROOT", tmp_path)
    table = "| a | b |\n|---|---|\n" + "| 1 | 2 |\n" * 30
    (tmp_path / "report.md").write_text(f"# Report\n\n{table}\nWords.\n\n{table}")
    page = generate.table_page("report", tmp_path / "report.md")
    assert page.count("<details>") == 1
    assert page.index("Words.") < page.index("<details><summary>A table of 30 rows</summary>\n\n| a | b |")


def test_sections_of_a_report_are_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import generate

    (tmp_path / "report.md").write_text("# A\n\n## Test metrics\n\n### One\n\nx\n\n## Rounds to 95 % of it\n\ny\n")
    generate.write_sections(tmp_path / "report.md", tmp_path / "a")
    assert {path.name: path.read_text() for path in (tmp_path / "a").iterdir()} == {
        "test-metrics.md": "\n### One\n\nx\n\n",
        "rounds-to-95-of-it.md": "\ny\n",
    }


def test_a_section_of_a_study_without_a_report_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import generate

    monkeypatch.setattr(generate, "ROOT", tmp_path)
    (tmp_path / "studies" / "results" / "done").mkdir(parents=True)
    (tmp_path / "studies" / "results" / "done" / "report.md").touch()
    page = tmp_path / "page.md"
    page.write_text("../generated/sections/new/test-metrics.md\n../generated/sections/done/test-metrics.md\n")
    generate.write_missing_sections(page, tmp_path)
    assert (
        tmp_path / "new" / "test-metrics.md"
    ).read_text() == "Nothing of `studies/new.yaml` has been reported yet.\n"
    assert not (tmp_path / "done").exists()


@pytest.mark.parametrize("name", ["graph_gains", "reproduction", "similarity_signals"])
def test_tables_of_committed_runs_are_up_to_date(name: str) -> None:
    """If one is not: ``python benchmarks/<name>.py``."""
    module = script(f"benchmarks/{name}.py")
    assert module.PAGE.read_text() == module.text()


def tables(text: str) -> list[list[dict[str, str]]]:
    """The tables of a Markdown text, in order: rows by the names of their columns."""
    actual = []
    for block in re.findall(r"(?:^\|.*\|\n)+", text, flags=re.MULTILINE):
        names, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        actual.append([dict(zip(names, row, strict=True)) for row in rows])
    return actual
