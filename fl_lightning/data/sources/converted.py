"""Data sets of PyG, constructed: nothing is written into a read-only root, and no two processes convert one at once."""

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock

from fl_lightning.data.sources.array_file import one_line
from fl_lightning.data.sources.folders import cache_folder, is_writable, unwritable_cache_message
from fl_lightning.data.sources.pickled_arrays import nothing_unpickled

_log = logging.getLogger(__name__)
#: Beside converted files: their checksum, which those that PyG has converted elsewhere lack.
_SEAL = "checksum.sha256"


def open_dataset(
    dataset_class: Any,
    arguments: dict[str, Any],
    root: Path,
    cache_dir: Path | None,
    download: Callable[[Any], None] | None = None,
    converted_folder: str = "",
    check_raw: Callable[[Path], None] | None = None,
) -> Any:
    """Construct a PyG data set without ever writing into a read-only root.

    Args:
        dataset_class: A ``torch_geometric.data.InMemoryDataset`` class.
        arguments: What it is constructed with, its root included.
        root: Folder of the data sets.
        cache_dir: Where converted files go if ``root`` is read-only; None for the default cache folder.
        download: Fetches the raw files instead of the class's own ``download``.
        converted_folder: In the class's ``processed/``, for converted files that no other data set reads.
        check_raw: Raises where a raw file could not be converted safely; called for each before it is.

    Returns:
        The data set.

    Raises:
        FileNotFoundError: If files are missing and cannot be downloaded; names the data set, the folder and the remedy.
        ValueError: If the files are damaged, or the class does not take the arguments.
    """
    name = str(arguments.get("name", dataset_class.__name__))
    cache = cache_folder(cache_dir)
    steps: list[str] = []
    download = download or dataset_class.download
    derived = _derive(dataset_class, root, cache, download, converted_folder, check_raw, steps)
    with _one_process_at_a_time(f"{dataset_class.__name__} {arguments}", cache):
        try:
            with nothing_unpickled():
                return derived(**arguments)
        except Exception as error:  # there is nothing that damaged pickles and archives do not raise
            import aiohttp

            if isinstance(error, OSError | aiohttp.ClientError) and not steps:
                raise FileNotFoundError(
                    f"{name} cannot be read from {root}, nor downloaded ({one_line(error)}). Set FL_DATA_ROOT or "
                    "data.root to the folder that holds the data set, or place its raw files there."
                ) from error
            damaged = steps[-1] if steps else f"Its arguments are {arguments}: correct them"
            raise ValueError(f"{name} cannot be read ({one_line(error)}). {damaged}.") from error


def _derive(
    dataset_class: Any,
    root: Path,
    cache: Path,
    download: Callable[[Any], None],
    converted_folder: str,
    check_raw: Callable[[Path], None] | None,
    steps: list[str],
) -> Any:
    """Subclass a data set so that conversion and download respect a read-only root and other data sets.

    What is read next, and the remedy if it is damaged, is added to ``steps``.
    """
    mirror = cache / "converted" / hashlib.sha256(str(root).encode()).hexdigest()[:16]

    def processed_dir(self: Any) -> str:
        _settle(self, dataset_class, root)
        beside_raw = os.path.join(dataset_class.processed_dir.fget(self), converted_folder).rstrip(os.sep)
        names = self.processed_file_names
        paths = [Path(beside_raw, name) for name in ([names] if isinstance(names, str) else names)]
        if all(path.exists() for path in paths) or is_writable(Path(beside_raw)):
            return str(beside_raw)
        return str(mirror / os.path.relpath(beside_raw, root))

    def checked_download(self: Any) -> None:
        _settle(self, dataset_class, root)
        missing = [path for path in map(Path, self.raw_paths) if not path.exists()]
        if not missing:
            return
        raw_dir = Path(self.raw_dir)
        if not is_writable(raw_dir):
            raise PermissionError(f"{missing[0]} is missing, and the folder is read-only")
        _log.info("Downloading %s to %s", dataset_class.__name__, raw_dir)
        raw_dir.mkdir(parents=True, exist_ok=True)
        try:
            download(self)
        finally:
            with contextlib.suppress(OSError):  # only folders that the failed download left empty
                for folder in (raw_dir, raw_dir.parent):
                    if folder != root:
                        folder.rmdir()

    def followed_process(self: Any) -> None:
        raw = Path(self.raw_dir)
        files = ", ".join(sorted(path.name for path in raw.iterdir())) if raw.is_dir() else ""
        of_raw = f"One of the files in {raw} is damaged ({files}): delete it and fetch it again"
        of_converted = f"{self.processed_paths[0]} or a file next to it is damaged: delete the folder; it is rebuilt"
        steps.append(of_converted if all(map(os.path.exists, self.processed_paths)) else of_raw)
        seal = Path(self.processed_dir, _SEAL)
        made_now = not all(map(os.path.exists, self.processed_paths))
        if made_now and check_raw is not None:
            for path in self.raw_paths:
                check_raw(Path(path))
        dataset_class._process(self)
        steps.append(of_converted)
        if made_now:
            seal.write_text(_digest(self.processed_paths))
        elif seal.exists() and seal.read_text() != _digest(self.processed_paths):
            raise ValueError(f"not the bytes that were written, says {seal.name}")

    members = {
        "processed_dir": property(processed_dir),
        "_download": checked_download,
        "_process": followed_process,
    }
    return type(dataset_class.__name__, (dataset_class,), members)


def _digest(paths: list[str]) -> str:
    """SHA-256 of some files together, as text."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _settle(dataset: Any, dataset_class: Any, root: Path) -> None:
    """Give a data set that would keep its files right in the root a folder of its class's name."""
    if Path(dataset_class.raw_dir.fget(dataset)) == Path(root, "raw"):
        dataset.root = str(root / dataset_class.__name__)


@contextlib.contextmanager
def _one_process_at_a_time(task: str, cache: Path) -> Iterator[None]:
    """Keep two processes from converting one data set at once: PyG does not write atomically."""
    locks = cache / "locks"
    lock = FileLock(locks / f"{hashlib.sha256(task.encode()).hexdigest()[:16]}.lock")
    try:
        locks.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise ValueError(unwritable_cache_message(cache, error)) from error
    try:
        yield
    finally:
        lock.release()
