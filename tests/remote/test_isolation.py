"""A job's process: what it can import, see and take, and what is copied of what it leaves."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nvflare", reason="needs the extra flare")

from fl_lightning.remote.flare import copy_files

pytestmark = pytest.mark.full  # each starts a process


def in_process(code: str, cwd: Path, **environment: str) -> str:
    """What a new process says that was started in a folder, as FLARE starts those of jobs (``python -m``)."""
    (cwd / "started.py").write_text(code)
    actual = subprocess.run(
        [sys.executable, "-m", "started"],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert actual.returncode == 0, actual.stderr
    return actual.stdout


ISOLATE = """
import importlib, os, sys
from pathlib import Path
from fl_lightning.remote.flare import isolate
work = isolate(Path(sys.argv[1] if len(sys.argv) > 1 else {root!r}), "0a1b-2c", {memory})
"""


def test_a_file_that_an_earlier_job_planted_is_not_imported(tmp_path) -> None:
    root = tmp_path / "kit"
    for folder in (root, root / "earlier" / "app_site" / "custom", root / "federations" / "run"):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "planted.py").write_text("print('planted')")
    code = ISOLATE.format(root=str(root), memory=None) + (
        "for name in ('planted', 'earlier.app_site.custom.planted', 'federations.run.planted'):\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except ImportError:\n"
        "        print('no', name)\n"
    )
    inside = os.pathsep.join([str(root / "earlier" / "app_site" / "custom"), str(root / "federations")])
    said = in_process(code, root, PYTHONPATH=inside)
    assert said.split("\n")[:-1] == [
        "no planted",
        "no earlier.app_site.custom.planted",
        "no federations.run.planted",
    ]


def test_modules_of_the_owner_are_found_where_pythonpath_says(tmp_path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "ward_nets.py").write_text("")
    (tmp_path / "kit").mkdir()
    code = ISOLATE.format(root=str(tmp_path / "kit"), memory=None) + "import ward_nets; print('found')\n"
    assert in_process(code, tmp_path / "kit", PYTHONPATH=str(own)) == "found\n"
    assert in_process(code, own, PYTHONPATH=str(own)) == "found\n"


def test_a_job_works_in_an_empty_folder_of_its_own_and_writes_for_its_owner_alone(tmp_path) -> None:
    root = tmp_path / "kit"
    left = root / "_work" / "0a1b-2c"
    left.mkdir(parents=True)
    (left / "of_an_earlier_job").touch()
    code = ISOLATE.format(root=str(root), memory=None) + (
        "print(work, list(work.iterdir()), oct(work.stat().st_mode & 0o777))\n"
        "(Path(sys.argv[0]).parent / 'made').touch()\n"
        "print(oct((Path(sys.argv[0]).parent / 'made').stat().st_mode & 0o777))\n"
    )
    assert in_process(code, tmp_path) == f"{left} [] 0o700\n0o600\n"
    assert not left.exists()  # it goes with the process


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a bound of Linux")
def test_memory_is_bounded_by_the_system(tmp_path) -> None:
    code = ISOLATE.format(root=str(tmp_path), memory=0.25) + (
        "import torch\n"
        "torch.zeros(2**24)\n"  # 64 MiB
        "try:\n"
        "    torch.zeros(2**30).add_(1)\n"  # 4 GiB
        "except (RuntimeError, MemoryError) as error:\n"
        "    print('refused')\n"
    )
    assert in_process(code, tmp_path) == "refused\n"


def test_what_comes_back_is_what_the_job_made(tmp_path) -> None:
    kit = tmp_path / "kit"
    (kit / "startup").mkdir(parents=True)
    (kit / "startup" / "server.key").write_text("secret")
    run = kit / "federations" / "wards" / "version_1"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "last.ckpt").write_text("made")
    (run / "key").symlink_to(kit / "startup" / "server.key")
    (run / "startup").symlink_to(kit / "startup")
    os.mkfifo(run / "pipe")

    copy_files(run, tmp_path / "result", within=kit / "federations")

    assert sorted(path.name for path in (tmp_path / "result").rglob("*")) == ["checkpoints", "last.ckpt"]
    (kit / "federations" / "link").symlink_to(kit / "startup")
    for elsewhere in (kit / "startup", kit / "federations" / ".." / "startup", kit / "federations" / "link"):
        with pytest.raises(ValueError, match="nothing is copied"):
            copy_files(elsewhere, tmp_path / "other", within=kit / "federations")
    assert not (tmp_path / "other").exists()
