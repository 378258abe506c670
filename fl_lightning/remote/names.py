"""Names of runs, federations and participants that NVFlare and file systems accept without changing them."""

import re
from pathlib import Path
from typing import Any

#: Maximum length of a certificate's common name; NVFlare truncates longer names.
MAX_NAME = 64
_RUN = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")
_SITE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")
_HOST = re.compile(r"(?=.{1,64}\Z)[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*")
_ADMIN = re.compile(r"(?=.{1,64}\Z)[A-Za-z0-9_][A-Za-z0-9._+-]*@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*\.[A-Za-z]{2,}")
_PATH = re.compile(r"[A-Za-z0-9_./@+=,:-]+")


def check_run_name(name: Any, what: str = "the name of the run") -> None:
    """Refuse a name that is not a single folder name.

    Raises:
        ValueError: It is not.

    Example:
        >>> check_run_name("wards-20261125")
        >>> check_run_name("../startup")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: the name of the run is '../startup': give one of at most 64 letters, digits and ._- ...
    """
    _check(what, name, _RUN, "letters, digits and ._- that do not begin with a dot")


def check_site_name(name: Any, what: str = "the name of a site") -> None:
    """Refuse a name that NVFlare does not accept for a site.

    Raises:
        ValueError: It does not.
    """
    _check(what, name, _SITE, "letters, digits, _ and -")


def check_server_name(name: Any, what: str = "the name of the server") -> None:
    """Refuse a name that is not a host name, or that NVFlare would truncate to fit a certificate's common name.

    Raises:
        ValueError: It is such a name.
    """
    _check(what, name, _HOST, "letters, digits, - and dots, a host name; a longer one needs a short alias in DNS")


def check_admin_name(name: Any, what: str = "the name of the submitter") -> None:
    """Refuse a name that does not look like an e-mail address.

    Raises:
        ValueError: It is not.
    """
    _check(what, name, _ADMIN, "characters, like lead@example.org")


def check_folder_for_processes(folder: Path, what: str) -> None:
    """Refuse a folder whose path NVFlare splits when it starts a job's process.

    Raises:
        ValueError: It would.
    """
    whole = str(folder.absolute())
    if not _PATH.fullmatch(whole):
        odd = sorted(set(re.sub(_PATH, "", whole)))
        raise ValueError(
            f"{what} is {whole!r}, whose path has {', '.join(map(repr, odd))}: NVFlare splits the command of a job "
            "there; give a folder whose whole path consists of letters, digits and _./@+=,:-"
        )


def _check(what: str, name: Any, pattern: "re.Pattern[str]", allowed: str) -> None:
    if not isinstance(name, str) or not pattern.fullmatch(name):
        given = repr(name) if len(repr(name)) <= 80 else f"{repr(name)[:60]}... ({len(name)} characters)"
        raise ValueError(f"{what} is {given}: give one of at most {MAX_NAME} {allowed}")
