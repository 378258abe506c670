"""What sources in a file of the user's have in common."""

from pathlib import Path
from typing import Any

from fl_lightning.data.settings import digest_of_file
from fl_lightning.data.sources.base import Source


class InFile(Source):
    """A source that is called by its file and depends on its contents; it comes before another base.

    Attributes:
        path: The file.
    """

    path: Path

    def __str__(self) -> str:
        """With the file."""
        return f"{type(self).__name__}({str(self.path)!r})"

    def identity(self) -> dict[str, Any]:
        """Depends on the file's contents, not on its place."""
        return {**super().identity(), "sha256": digest_of_file(self.path)}  # type: ignore[safe-super]
