"""What is installed without the clone: the wheel has everything that the program reads, and versions agree."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

import fl_lightning

ROOT = Path(__file__).parents[1]


def test_the_version_is_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), flags=re.MULTILINE)
    assert cited is not None
    assert project["version"] == fl_lightning.__version__ == cited[1]


@pytest.mark.full
def test_the_wheel_has_configurations_templates_and_types(tmp_path: Path) -> None:
    for name in ("fl_lightning", "callbacks", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    build = "from setuptools.build_meta import build_wheel; build_wheel('dist')"
    subprocess.run([sys.executable, "-c", build], cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("dist/*.whl")
    archive = zipfile.ZipFile(wheel)
    names = set(archive.namelist())
    configs = [*ROOT.glob("configs/*.yaml"), *ROOT.glob("configs/papers/*.yaml")]
    assert {f"fl_lightning/{path.relative_to(ROOT)}" for path in configs} <= names
    for path in configs:  # a link to a file is that file
        assert archive.read(f"fl_lightning/{path.relative_to(ROOT)}") == path.read_bytes()
    own = {path.relative_to(ROOT) for path in ROOT.glob("fl_lightning/**/*") if path.is_file()}
    assert {str(path) for path in own if "__pycache__" not in path.parts} <= names
    assert {f"fl_lightning/callbacks/{path.name}" for path in ROOT.glob("callbacks/*.py")} <= names
    assert not any(name.startswith(("tests/", "benchmarks/", "studies/")) for name in names)
