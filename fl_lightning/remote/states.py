"""The states of a site's client on its disk, stored by their content."""

import hashlib
import os
from pathlib import Path

from fl_lightning.files import private_folder, secret_file, whole_file
from fl_lightning.remote.message import Message


class StateStore:
    """States of a client in a folder, each under a digest of its bytes.

    The digest is keyed by a secret of the folder's, so that a server that guesses a state cannot check its guess.

    Args:
        folder: Where they are stored; created if it does not exist, accessible to its owner only.

    Raises:
        ValueError: The folder's secret is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        private_folder(folder)
        self.key = secret_file(folder / "digest_key", lambda: os.urandom(32), num_bytes=32)

    def digest(self, content: bytes) -> str:
        """The keyed digest of some bytes, 64 hexadecimal digits."""
        return hashlib.blake2b(content, key=self.key, digest_size=32).hexdigest()

    def put(self, state: Message) -> str:
        """Store a state, and return its digest."""
        digest = self.digest(state.wire)
        path = self._path(digest)
        if self.get(digest) is None:  # not here, or damaged
            with whole_file(path, len(state.wire), secret=True) as temporary:
                temporary.write_bytes(state.wire)
        return digest

    def get(self, digest: str) -> Message | None:
        """A state; None if it is missing or damaged."""
        try:
            content = self._path(digest).read_bytes()
        except OSError:
            return None
        return Message.read(content) if self.digest(content) == digest else None

    def drop(self, digest: str) -> None:
        """Delete a state, if it exists."""
        self._path(digest).unlink(missing_ok=True)

    def __len__(self) -> int:
        """The number of stored states."""
        return len(list(self.folder.glob("*.state")))

    def _path(self, digest: str) -> Path:
        if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
            raise ValueError(f"{digest!r} is no digest")
        return self.folder / f"{digest}.state"
