"""Apply the words of design.md, "Third design", section 5, to a tree. See README.md beside this file.

    python tools/words/apply.py --root TREE [--no-results] [--no-format]
"""

import argparse
import importlib
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import engine  # noqa: E402
import tables as T  # noqa: E402
import text as X  # noqa: E402
import wrap  # noqa: E402


def git(root: Path, *words: str) -> str:
    return subprocess.run(["git", "-C", str(root), *words], check=True, capture_output=True, text=True).stdout


def tracked(root: Path) -> list[str]:
    out = git(root, "ls-files", "-z").split("\0")
    return [name for name in out if name and (root / name).is_file()]


def spelled_names(root: Path, files: list[str]) -> dict[str, str]:
    """Identifiers with a part in British spelling, and their American form."""
    found: dict[str, str] = {}
    for name in files:
        if name.endswith((".py", ".pyi")):
            for word in re.findall(r"[A-Za-z_][A-Za-z_0-9]*", (root / name).read_text()):
                new = X.spell(word)
                if new != word and word not in T.PROTECTED and word.lower() not in PLAIN:
                    found[word] = new
    return found


#: Files that hold old names on purpose.
KEPT = {"fl_lightning/strategies/former_settings.py", "fl_lightning/renamed.py"}

RUFF = str(Path(sys.executable).with_name("ruff"))

#: Words that are prose as well as names: as names they are changed by the rules of text alone.
PLAIN: set[str] = {"towards", "travelling", "per"}


def move(root: Path) -> list[str]:
    done = []
    for old, new in T.FILES.items():
        if (root / old).exists() and not (root / new).exists():
            (root / new).parent.mkdir(parents=True, exist_ok=True)
            git(root, "mv", old, new)
            done.append(f"{old} -> {new}")
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path.cwd())
    parser.add_argument("--no-results", action="store_true", help="leave studies/results as it is")
    parser.add_argument("--no-format", action="store_true")
    parser.add_argument("--only", default="", help="regex of files, for trials")
    options = parser.parse_args()
    root = options.root.resolve()
    if (root / "docs/reference/glossary.md").exists():
        sys.exit("this tree has the new words already: client_state is another thing there, so nothing is applied twice")
    print("\n".join(move(root)))
    files = tracked(root)
    names = {**spelled_names(root, files), **T.NAMES}
    for new in list(names.values()):
        pass
    tables = engine.Tables(
        names=names, attrs=T.ATTRS, locals=T.LOCALS, module_names=T.MODULE_NAMES, modules=T.MODULES, literals=T.LITERALS,
        protected=set(T.PROTECTED),
    )
    tables.prose = X.prose
    spelled = {old: new for old, new in names.items() if X.spell(old) == new}
    exact = re.compile(r"(?<![A-Za-z0-9_])(" + "|".join(sorted(map(re.escape, spelled), key=len, reverse=True)) + r")(?![A-Za-z0-9_])") if spelled else None

    def word(text: str, file: str) -> str:
        text = X.word_only(text, file)
        inner = text.strip("rbfuRBFU").strip("\"'")
        if inner in T.NAMES and inner[:1].isupper():
            text = text.replace(inner, T.NAMES[inner])
        if exact is not None and inner not in T.PROTECTED:
            text = exact.sub(lambda m: spelled[m[1]] if m[1] not in T.PROTECTED else m[1], text)
        return text

    tables.word = word  # type: ignore[attr-defined]
    tables.test_name = X.test_name  # type: ignore[attr-defined]
    log = engine.Log()
    python = [f for f in files if f.endswith((".py", ".pyi")) and re.search(options.only, f) and f not in KEPT]
    first: dict[str, str] = {}
    for file in python:
        engine.collect((root / file).read_text(), file, tables, log)
    log = engine.Log(known_params={k: dict(v) for k, v in log.params.items()})
    for file in python:
        source = (root / file).read_text()
        try:
            first[file] = engine.convert(source, file, tables, log)
        except Exception as error:
            print(f"FAILED {file}: {error!r}")
            raise
    changed = 0
    for file, new in first.items():
        if new != (root / file).read_text():
            changed += 1
            (root / file).write_text(new)
    print(f"{changed} Python files changed")
    if not options.only:
        pages(root, files, names)
        import settings

        settings.write(root)
        patches(root)
    for kind, notes in log.notes.items():
        if kind != "literal":
            print(f"== {kind}: {len(notes)}")
            print("\n".join(notes))
    counts = Counter(note.rpartition(": ")[2] for note in log.notes["literal"])
    print("== literals", dict(counts))
    if not options.only and not options.no_results:
        import results

        results.migrate(root)
    for _ in range(2):
        wrap.split_tree(root, tracked(root))
        if not options.no_format:
            subprocess.run([RUFF, "format", "-q", "."], cwd=root, check=False)
    if not options.no_format:
        for command in (["ruff", "check", "--fix", "-q", "."], ["ruff", "format", "-q", "."], ["ruff", "check", "--output-format=concise", "."]):
            done = subprocess.run([RUFF, *command[1:]], cwd=root, capture_output=True, text=True)
            print(" ".join(command), done.returncode, done.stdout[-6000:], done.stderr[-2000:])
    wrap.wrap_tree(root, tracked(root))
    long_lines(root)


def pages(root: Path, files: list[str], names: dict[str, str]) -> None:
    """Everything that is not Python."""
    import pages as P

    changed = P.convert(root, files, names)
    print(f"{len(changed)} other files changed")


def patches(root: Path) -> None:
    """Exact replacements of pieces that no rule covers: (file, old, new); what is not found is reported."""
    import patches as Q

    for file, old, new in Q.PATCHES:
        path = root / file
        if not path.exists():
            print(f"PATCH: no file {file}")
            continue
        source = path.read_text()
        if new in source and (old not in source or old in new):
            continue
        if old not in source:
            print(f"PATCH does not apply: {file}: {old[:90]!r}")
            continue
        path.write_text(source.replace(old, new))


def long_lines(root: Path) -> None:
    for file in tracked(root):
        if file.endswith((".py", ".md")) and not file.startswith("studies/results"):
            limit = 120
            for number, line in enumerate((root / file).read_text().splitlines(), 1):
                if file.endswith(".py") and len(line) > limit:
                    print(f"LONG {file}:{number}: {len(line)}")


if __name__ == "__main__":
    main()
