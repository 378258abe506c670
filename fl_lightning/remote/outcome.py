"""What a server says of a job that has ended, and the run's folder that it returns: neither is trusted.

A run's folder on the server has an id, which is kept when the run is resumed. A fetched folder replaces an earlier one
with the same id; otherwise it is a new version, so that it never mixes with another run of the same name.
"""

import json
import secrets
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fl_lightning.files import writing
from fl_lightning.remote.flare import OUTCOME_FILE, RUN_ID_FILE, copy_files
from fl_lightning.remote.job_schema import MAX_BYTES
from fl_lightning.remote.names import check_run_name
from fl_lightning.remote.schema import (
    LONGEST_REASON,
    MOST,
    WrongMessage,
    check_facts,
    hexadecimal,
    mapping,
    one_of,
    real,
    reason,
    record,
    shown,
    text,
    whole,
)
from fl_lightning.run.folder import new_run_folder


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome of a job.

    Attributes:
        status: ``finished``, ``refused`` (with a message for the user), ``failed``.
        message: Why it did not finish, safe to display.
        folder: The fetched folder of the run; None if there is none.
        facts: Bytes, seconds, times.
    """

    status: str
    message: str = ""
    folder: Path | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def _metric(fact: Any) -> str:
    """A number that may be nan or infinite."""
    return "" if isinstance(fact, float) else whole(-MOST, MOST)(fact)


def _folder(fact: Any) -> str:
    try:
        check_run_name(fact)
    except ValueError:
        return "must be the name of a folder"
    return ""


_BYTES = whole(0, 2**60)
_SECONDS = real(0, 1e12)
_TABLE = {
    "status": one_of("finished", "refused", "failed"),
    "message": reason,
    "bytes": record(down=_BYTES, up=_BYTES),
    "seconds": _SECONDS,
    "started": _SECONDS,
    "folder": _folder,
    "run": hexadecimal(32),
    "result": mapping(text(), _metric, 10_000),
}


def fetched(result: Path, status: str, config: str, root: Path, submitted: float) -> Outcome:
    """The outcome of a job, whose run is copied.

    Args:
        result: The folder that the server returned.
        status: How the job ended, in FLARE's words.
        config: The submitter's configuration, YAML, for the run's folder.
        root: The folder that contains the versions of the run.
        submitted: When the job was submitted, in seconds since the epoch.

    Raises:
        RuntimeError: The server's outcome is not as its table says.
        CannotWrite: The folder cannot be written.
    """
    output = next((path for path in result.rglob(OUTCOME_FILE) if path.is_file() and not path.is_symlink()), None)
    if output is None:
        return Outcome(status="failed", message=f"the job ended as {shown(status)}, before its result was written")
    try:
        content = _checked(output)
    except ValueError as error:
        raise RuntimeError(
            f"the server's {OUTCOME_FILE} of this job is wrong: {error}; nothing is fetched. Ask whoever runs the "
            "server about it, and use the same version of fl-lightning everywhere"
        ) from error
    folder = None
    if "folder" in content:
        folder = _fetch(output.parent / "run" / content["folder"], content["run"], config, root, within=result)
    facts = {
        "bytes": content["bytes"],
        "seconds": content["seconds"],
        "seconds_to_start": content["started"] - submitted,
        "result": content.get("result", {}),
    }
    message = shown(" ".join(content["message"].split()), LONGEST_REASON)
    return Outcome(status=content["status"], message=message, folder=folder, facts=facts)


def _checked(output: Path) -> Mapping[str, Any]:
    """What the server says.

    Raises:
        ValueError: It is not as its table says.
    """
    if (size := output.stat().st_size) > MAX_BYTES:
        raise WrongMessage(f"it has {size} bytes, at most {MAX_BYTES} are read")
    try:
        content = json.loads(output.read_bytes())
    except (ValueError, RecursionError) as error:
        raise WrongMessage(f"it is not valid JSON ({type(error).__name__})") from error
    check_facts(content, _TABLE, optional=("folder", "run", "result"))
    checked: Mapping[str, Any] = content
    if ("folder" in checked) != ("run" in checked) or ("folder" not in checked and checked["status"] == "finished"):
        raise WrongMessage("it does not say which run it is about")
    if "folder" in checked and not (output.parent / "run" / checked["folder"]).is_dir():
        raise WrongMessage(f"its folder {checked['folder']} is missing")
    return checked


def _fetch(source: Path, run: str, config: str, root: Path, *, within: Path) -> Path:
    """Copy a run's folder in place of an earlier copy of the same run, or else as a new version."""
    earlier = next((path for path in sorted(root.glob("version_*")) if _run_of(path) == run), None)
    new = root / f".{secrets.token_hex(8)}.new"
    with writing(earlier or root / "version_0"):
        root.mkdir(parents=True, exist_ok=True)
        try:
            copy_files(source, new, within=within)
            (new / RUN_ID_FILE).write_text(run)
            (new / "config.yaml").write_text(config)  # the server has the job alone
            if earlier is not None:
                shutil.rmtree(earlier)
            folder = earlier or new_run_folder(root)
            new.replace(folder)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    return folder


def _run_of(folder: Path) -> str:
    """The id of a fetched run; empty for any other."""
    with suppress(OSError, ValueError):
        return (folder / RUN_ID_FILE).read_text()
    return ""
