"""Which tier of tests notices faults that are made on purpose: ``python tests/mutations/run.py [PART OF A NAME]``.

Each fault of ``faults.yaml`` is made in a copy of the tree, where the tests that it names run: first those of the first
tier, and where these pass all of them. A fault that no test notices, or whose line is no longer there, ends it with 1.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
TIERS = {"make test": "not slow and not full", "make test-full": "not slow"}


def copy_tree(target: Path) -> None:
    """Copy what git knows, with the callbacks where they are imported from."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--", "*.py", "*.toml", "*.pyi", "*.yaml", "*.csv", "fl_lightning"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split("\0")
    for name in filter(None, names):
        if not name.startswith("studies/results"):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target / name)
    (target / "fl_lightning" / "callbacks").symlink_to(target / "callbacks")


def notices(tree: Path, tests: list[str], tier: str) -> bool:
    """Whether one of the tests fails in the tree."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-x", "-m", TIERS[tier], *tests]
    done = subprocess.run(
        command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, capture_output=True, text=True
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(done.stdout + done.stderr)
    return done.returncode == 1


def noticed_by(fault: dict[str, str], tree: Path) -> str:
    """The first tier that notices a fault, or why there is none."""
    path = tree / fault["file"]
    whole = path.read_text()
    if whole.count(fault["old"]) != 1:
        return f"no line of {fault['file']} is its own any more"
    path.write_text(whole.replace(fault["old"], fault["new"]))
    try:
        return next((tier for tier in TIERS if notices(tree, list(fault["tests"]), tier)), "nobody notices")
    finally:
        path.write_text(whole)


def main() -> int:
    """Make the faults whose description has a text in it, and say who notices each."""
    faults = yaml.safe_load((Path(__file__).parent / "faults.yaml").read_text())
    actual = []
    with tempfile.TemporaryDirectory() as folder:
        copy_tree(Path(folder))
        for fault in (each for each in faults if not sys.argv[1:] or sys.argv[1] in each["what"]):
            actual.append(noticed_by(fault, Path(folder)))
            sys.stdout.write(f"{actual[-1]}: {fault['what']}\n")
            sys.stdout.flush()
    return int(not set(actual) <= set(TIERS))


if __name__ == "__main__":
    sys.exit(main())
