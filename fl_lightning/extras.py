"""The optional dependencies (extras) of pyproject.toml, and the command that installs what is missing."""

from importlib.util import find_spec
from pathlib import Path

_REMOTE = ("cryptography", "Crypto", "safetensors")
#: The modules that parts of the package need, by extra.
MODULES = {
    "choose": ("optuna",),
    "cluster": ("submitit",),
    "export": ("safetensors",),
    "flare": (*_REMOTE, "nvflare", "psutil"),
    "molecules": ("rdkit",),
    "privacy": ("dp_accounting",),
    "remote": _REMOTE,
    "study": ("scikit_posthocs", "statsmodels"),
}


class MissingExtra(ImportError, ValueError):
    """A module of an extra is not installed."""


def is_installed(extra: str) -> bool:
    """Whether all modules of an extra can be imported."""
    return all(map(find_spec, MODULES[extra]))


def require(extra: str, what: str) -> None:
    """Check that an extra is installed.

    Args:
        extra: Name of the extra.
        what: What needs it: a setting, a command or a package.

    Raises:
        MissingExtra: One of its modules is missing; the message has the command that installs the extra.
    """
    if not is_installed(extra):
        missing = [name for name in MODULES[extra] if find_spec(name) is None]
        clone = Path(__file__).resolve().parents[1]
        editable = (clone / "pyproject.toml").is_file()
        command = f"--editable '{clone}[{extra}]'" if editable else f"'fl-lightning[{extra}]'"
        raise MissingExtra(f"{what} needs {', '.join(missing)}: pip install {command}")
