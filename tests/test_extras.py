"""What is not installed is refused in one line that has the command which installs it."""

import importlib
import re
import tomllib
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from fl_lightning import extras
from fl_lightning.arguments import OVER_THE_NETWORK
from fl_lightning.command_line import main
from fl_lightning.remote import GaussianNoise
from fl_lightning.round.privacy import RecordPrivacy

ROOT = Path(__file__).parents[1]
OPTIONAL = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def command_of(extra: str) -> str:
    return f"pip install --editable '{ROOT}[{extra}]'"


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes modules look as if they were not installed."""

    def hide(*names: str) -> None:
        monkeypatch.setattr(extras, "find_spec", lambda name: None if name in names else find_spec(name))

    return hide


def test_the_modules_are_those_of_the_extras() -> None:
    packages = {"Crypto": "pycryptodome"}
    for extra, names in extras.MODULES.items():
        listed = [*OPTIONAL[extra], *(OPTIONAL["remote"] if extra == "flare" else ())]
        own = {re.split(r"[\[<>=]", each)[0] for each in listed} - {"fl-lightning"}
        assert {packages.get(name, name.replace("_", "-")) for name in names} == own


def test_all_has_every_extra() -> None:
    (everything,) = OPTIONAL["all"]
    named = set(everything.removeprefix("fl-lightning[").removesuffix("]").split(","))
    assert named | {"export", "remote"} == set(OPTIONAL) - {"all"}  # flare has remote, which has safetensors


@pytest.mark.parametrize("verb", OVER_THE_NETWORK)
def test_commands_over_the_network(verb: str, without: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    without("nvflare", "psutil")
    with pytest.raises(SystemExit) as ended:
        main([verb, "--help"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"fl-train: error: fl-train {verb} needs nvflare, psutil: {command_of('flare')}\n"


def test_settings_of_privacy(without: Callable[..., None]) -> None:
    without("dp_accounting")
    for make in (
        lambda: RecordPrivacy(max_grad_norm=1.0, noise_multiplier=1.0),
        lambda: GaussianNoise(clip_norm=1.0, noise_multiplier=1.0),
    ):
        with pytest.raises(ValueError, match=re.escape(f"needs dp_accounting: {command_of('privacy')}")):
            make()


def test_the_package_of_sites(without: Callable[..., None]) -> None:
    import fl_lightning.remote

    without("safetensors")
    with pytest.raises(ImportError, match=re.escape(f"fl_lightning.remote needs safetensors: {command_of('remote')}")):
        importlib.reload(fl_lightning.remote)


def test_outside_a_clone_the_remedy_names_the_package(
    without: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without("dp_accounting")
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "fl_lightning" / "extras.py"))
    with pytest.raises(extras.MissingExtra, match=r"^This needs dp_accounting: pip install 'fl-lightning\[privacy\]'$"):
        extras.require("privacy", "This")
