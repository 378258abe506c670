"""Files that a site keeps of itself: its owner's alone, on the disk before anything leaves, and known when damaged."""

import hmac
import logging
import os
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from fl_lightning.run.folder import private_folder, secret_file, whole_file

_log = logging.getLogger(__name__)
_DIGITS = 64
#: For another process of the site that has the account.
SECONDS_TO_WAIT = 60.0


class SealedFiles:
    """Files of a folder, each with a keyed digest of its name and content behind it.

    Args:
        folder: Where they lie.
        digest: Of some bytes, 64 hexadecimal digits.
    """

    def __init__(self, folder: Path, digest: Callable[[bytes], str]) -> None:
        self.folder, self._digest = folder, digest

    def write(self, name: str, content: bytes) -> None:
        """Write one; when this returns, it outlives a loss of power."""
        write_durably(self.folder / name, content + self._seal(name, content))

    def read(self, name: str) -> bytes | None:
        """The content of one; None where there is none, and where it is damaged: it is then moved aside."""
        path = self.folder / name
        try:
            sealed = path.read_bytes()
        except FileNotFoundError:
            return None
        content = sealed[:-_DIGITS]
        if hmac.compare_digest(sealed[-_DIGITS:], self._seal(name, content)):
            return content
        aside = path.with_name(f"{name}.damaged")
        _log.error("%s is damaged, and is now %s: the site waits for a server to begin", path, aside.name)
        path.replace(aside)
        return None

    def drop(self, name: str) -> None:
        """Delete one, if it is there."""
        (self.folder / name).unlink(missing_ok=True)

    def _seal(self, name: str, content: bytes) -> bytes:
        return self._digest(name.encode() + content).encode()


def write_durably(path: Path, content: bytes) -> None:
    """Write a file that its owner alone may read; when this returns, it outlives a loss of power.

    Args:
        path: The file; its folder is created.
        content: What to write.

    Raises:
        CannotWrite: The disk is full, the folder read-only, ...
    """
    with whole_file(path, len(content), secret=True) as temporary, temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def account_key(folder: Path) -> bytes:
    """The secret by which an account's files are sealed; made once, also where processes begin together.

    Args:
        folder: The account's; made if it is not there, for its owner alone.

    Raises:
        ValueError: The secret is damaged.
    """
    private_folder(folder)
    with FileLock(folder / "account.lock", timeout=SECONDS_TO_WAIT, mode=0o600):
        return secret_file(folder / "account_key", lambda: os.urandom(32), num_bytes=32)
