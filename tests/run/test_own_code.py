"""Which source files of a user's own a configuration leads to."""

import sys
from pathlib import Path

import pytest

from fl_lightning.run.own_code import digest_of_files, own_files, own_names


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is searched for modules."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def write(folder: Path, **files: str) -> None:
    """Write modules by name, with ``__`` between the folder and the file."""
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/', 1)}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def test_own_classes_are_found_wherever_settings_name_them(folder: Path) -> None:
    write(folder, mine="", nets__="", nets__small="")
    settings = {
        "strategy": {"class_path": "mine.Mine", "init_args": {"num_epochs": 1}},
        "model.net": "nets.small.Net",
        "trainer": {"callbacks": [{"class_path": "mine.Watch"}, "fl_lightning.callbacks.EarlyStopping"]},
        "model.optimizer": "torch.optim.Adam",
        "data.root": "runs.of.nobody",
        "data.file": "nets/small.py",
    }
    assert own_names([settings]) == ("mine.Mine", "mine.Watch", "nets.small.Net")
    assert own_names({"strategy": "FedAvg", "data": "json.JSONDecoder", "x": "numpy.ndarray"}) == ()
    assert digest_of_files(own_files(())) == ""


def test_what_own_modules_import_counts_too(folder: Path) -> None:
    write(
        folder,
        mine="import torch, yaml\nfrom helper import f\nfrom fl_lightning import ClientModule\nclass Mine: ...",
        helper="def f():\n    import deep.inner",
        deep____init__="",
        deep__inner="from . import sibling\nfrom .other import *",
        deep__sibling="import mine",
        deep__other="",
        deep__unused="",
    )
    files = own_files(["mine.Mine"])
    assert list(files) == [
        "deep/__init__.py",
        "deep/inner.py",
        "deep/other.py",
        "deep/sibling.py",
        "helper.py",
        "mine.py",
    ]
    before = digest_of_files(files)
    write(folder, helper='# a comment\ndef f():\n    """Words."""\n    import deep.inner')
    write(folder, deep__unused="x = 1")
    assert digest_of_files(own_files(["mine.Mine"])) == before
    write(folder, deep__other="x = 1")
    assert digest_of_files(own_files(["mine.Mine"])) != before


def test_nothing_is_imported_and_code_that_cannot_be_read_counts_as_bytes(folder: Path) -> None:
    write(folder, broken="raise RuntimeError(\n", loud="raise RuntimeError")
    before = own_files(["broken.Mine", "loud.Mine"])
    assert list(before) == ["broken.py", "loud.py"]
    assert not {"broken", "loud"} & set(sys.modules)
    write(folder, broken="raise ValueError(\n")
    assert own_files(["broken.Mine", "loud.Mine"]) != before


def test_an_installed_package_counts_only_where_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = tmp_path / "site-packages"
    installed.mkdir()
    for each in (tmp_path, installed):
        monkeypatch.syspath_prepend(each)
    write(installed, theirs____init__="from .net import Net", theirs__net="import another", another="")
    write(tmp_path, mine="import theirs")
    assert list(own_files(["mine.Mine"])) == ["mine.py"]
    assert list(own_files(["theirs.Net"])) == ["theirs/__init__.py", "theirs/net.py"]


def test_weights_that_a_net_starts_from_count(tmp_path: Path) -> None:
    file = tmp_path / "w.pt"
    file.write_bytes(b"one")
    settings = {"model.net.init_args.file": str(file), "data": [{"path": str(file)}], "seed": 1}
    names = own_names(settings)
    assert names == (str(file),)
    first = own_files(names)
    assert list(first) == [str(file)]
    file.write_bytes(b"two")
    assert own_files(names) != first
