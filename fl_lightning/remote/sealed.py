"""A site's own files: readable by their owner only, on the disk before anything leaves, with damage detected."""

import hmac
import logging
import os
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from fl_lightning.files import damaged_secret, durable_file, private_folder, secret_file

_log = logging.getLogger(__name__)
_DIGITS = 64
_KEY, _PRIVACY = "account_key", "privacy.json"
_KEY_BYTES = 32
#: The records of an account, each in the form in which the file of the secret names it once it exists.
_RECORDS = (_PRIVACY, "sums.sqlite")
#: How long to wait for another process of the site that has locked the account.
SECONDS_TO_WAIT = 60.0


class SealedFiles:
    """Files in a folder, each followed by a keyed digest of its name and content.

    Args:
        folder: Where they are stored.
        digest: Returns the keyed digest of some bytes, 64 hexadecimal digits.
    """

    def __init__(self, folder: Path, digest: Callable[[bytes], str]) -> None:
        self.folder, self._digest = folder, digest

    def write(self, name: str, content: bytes) -> None:
        """Write a file; once this returns, it survives a power failure."""
        write_durably(self.folder / name, content + self._seal(name, content))

    def read(self, name: str) -> bytes | None:
        """The content of a file; None if it does not exist or is damaged, in which case it is renamed."""
        path = self.folder / name
        try:
            sealed = path.read_bytes()
        except FileNotFoundError:
            return None
        content = sealed[:-_DIGITS]
        if hmac.compare_digest(sealed[-_DIGITS:], self._seal(name, content)):
            return content
        aside = path.with_name(f"{name}.damaged")
        _log.error("%s is damaged and was renamed to %s: the site waits for a server to start again", path, aside.name)
        path.replace(aside)
        return None

    def drop(self, name: str) -> None:
        """Delete a file, if it exists."""
        (self.folder / name).unlink(missing_ok=True)

    def _seal(self, name: str, content: bytes) -> bytes:
        return self._digest(name.encode() + content).encode()


def write_durably(path: Path, content: bytes) -> None:
    """Write a file that only its owner may read; once this returns, it survives a power failure.

    Args:
        path: The file; its folder is created.
        content: What to write.

    Raises:
        CannotWrite: The disk is full, the folder read-only, ...
    """
    with durable_file(path, len(content), secret=True) as file:
        file.write(content)


def account_key(folder: Path) -> bytes:
    """The secret with which an account's files are sealed; created once, even if several processes start together.

    Args:
        folder: The account's folder; created if it does not exist, accessible to its owner only.

    Raises:
        ValueError: The secret is damaged.
    """
    with _locked(folder):
        return _secret(folder)[0]


def has_begun(folder: Path, record: str) -> bool:
    """Whether a record of an account exists, so that its file cannot be missing unless it was lost.

    Args:
        folder: The account's folder.
        record: Name of its file.

    Raises:
        ValueError: The account's secret is damaged.
    """
    with _locked(folder):
        return record in _secret(folder)[1]


def begin(folder: Path, record: str) -> None:
    """Note beside the account's secret, on the disk, that a record exists; its file must be written before.

    Args:
        folder: The account's folder.
        record: Name of its file.

    Raises:
        ValueError: The account's secret is damaged.
    """
    with _locked(folder):
        key, begun = _secret(folder)
        if record not in begun:
            write_durably(folder / _KEY, key + " ".join(sorted({*begun, record})).encode())


def copy_account(source: Path, target: Path) -> None:
    """Copy what an account has counted, without its ledger, so that a trial of a job changes nothing.

    Args:
        source: The account's folder; nothing is copied if there is no account in it.
        target: The folder of the copy.

    Raises:
        ValueError: The account's secret is damaged.
    """
    if not any((source / name).exists() for name in (_KEY, *_RECORDS)):
        return
    with _locked(source):
        key, begun = _secret(source)
    write_durably(private_folder(target) / _KEY, key + (_PRIVACY.encode() if _PRIVACY in begun else b""))
    if (source / _PRIVACY).exists():
        write_durably(target / _PRIVACY, (source / _PRIVACY).read_bytes())


def _locked(folder: Path) -> FileLock:
    private_folder(folder)
    return FileLock(folder / "account.lock", timeout=SECONDS_TO_WAIT, mode=0o600)


def _secret(folder: Path) -> tuple[bytes, list[str]]:
    """The account's secret, and the records that exist; the secret is created if there is no account yet."""
    left = [record for record in _RECORDS if (folder / record).exists()]
    if left and not (folder / _KEY).exists():
        raise ValueError(
            f"{_KEY} is missing beside {', '.join(left)}: restore it from a copy, or move its folder away to start over"
        )
    content = secret_file(folder / _KEY, lambda: os.urandom(_KEY_BYTES))
    key, begun = content[:_KEY_BYTES], content[_KEY_BYTES:].decode(errors="replace").split()
    if len(key) < _KEY_BYTES or not set(begun) <= set(_RECORDS):
        raise damaged_secret(folder / _KEY, content)
    return key, begun
