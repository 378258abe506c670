"""Data sets of PyG, constructed: nothing is written into a read-only root, and no two processes convert one at once."""

import contextlib
import hashlib
import json
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

from fl_lightning.data.sources.array_file import is_of_the_machine, one_line
from fl_lightning.data.sources.downloads import UntrustedServer, move_into, scratch_for, verified_downloads
from fl_lightning.data.sources.folders import cache_folder, is_writable, unwritable_cache_message
from fl_lightning.data.sources.pickled_arrays import nothing_unpickled

_log = logging.getLogger(__name__)
#: Beside converted files: their checksum, which those that PyG has converted elsewhere lack.
_SEAL = "checksum.sha256"
#: Beside these: size, time and checksum of each raw file that was there when they were made.
_MADE_FROM = "made-from.json"
#: What is replaced while a data set is read is replaced for all threads.
_ONE_THREAD = threading.RLock()


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

    What is converted is kept until a raw file changes. Servers of downloads are verified.

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
    opening = _Opening(
        dataset_class, root, cache, download or dataset_class.download, converted_folder, check_raw, _locks_in(cache)
    )
    with _ONE_THREAD, opening.locked:
        try:
            with nothing_unpickled(), verified_downloads():
                return opening.derived()(**arguments)
        except UntrustedServer as error:
            raise FileNotFoundError(f"{name} is missing in {root}. {error}; or place its raw files there.") from error
        except Exception as error:  # there is nothing that damaged pickles and archives do not raise
            said = opening.with_paths(one_line(error))
            if isinstance(error, OSError) and not opening.steps:
                raise FileNotFoundError(
                    f"{name} cannot be read from {root}, nor downloaded ({said}). Set FL_DATA_ROOT or "
                    "data.root to the folder that holds the data set, or place its raw files there."
                ) from error
            if is_of_the_machine(error):
                raise ValueError(
                    f"{name} cannot be {opening.task} ({said}): free disk space or memory, or set FL_CACHE_DIR to a "
                    "folder that this user may write"
                ) from error
            damaged = opening.steps[-1] if opening.steps else f"Its arguments are {arguments}: correct them"
            raise ValueError(f"{name} cannot be read ({said}). {damaged}.") from error


@dataclass
class _Opening:
    """How one data set is read: its class is derived such that files go where they should.

    Attributes:
        locked: Holds the lock of the raw folder, from when that is known.
        steps: What is read next, and the remedy if it is damaged.
        task: What is being done, for messages.
        scratch: The folder that a raw folder's files are downloaded to, and that.
    """

    dataset_class: Any
    root: Path
    cache: Path
    download: Callable[[Any], None]
    converted_folder: str
    check_raw: Callable[[Path], None] | None
    locks: Path
    locked: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    steps: list[str] = field(default_factory=list)
    scratch: tuple[str, str] | None = None
    task: str = "read"
    _is_locked: bool = False

    def derived(self) -> Any:
        """The class, whose conversion and download respect a read-only root and other data sets."""
        members = {
            "raw_dir": property(lambda dataset: dataset.__dict__.get("_raw_in") or self._raw_dir(dataset)),
            "processed_dir": property(lambda dataset: dataset.__dict__.get("_processed_in") or self._settled(dataset)),
            "_download": lambda dataset: self._download(dataset),
            "_process": lambda dataset: self._process(dataset),
        }
        return type(self.dataset_class.__name__, (self.dataset_class,), members)

    def with_paths(self, text: str) -> str:
        """A message that names the raw folder where it named the one that files are downloaded to."""
        return text.replace(*self.scratch) if self.scratch else text

    def _raw_dir(self, dataset: Any) -> str:
        return str(self.dataset_class.raw_dir.fget(dataset))

    def _begin(self, dataset: Any) -> None:
        """Settle the folder of a data set, and keep other processes from it: PyG does not write atomically."""
        if Path(self._raw_dir(dataset)) == Path(self.root, "raw"):  # each class needs one of its own
            dataset.root = str(self.root / self.dataset_class.__name__)
        if not self._is_locked:
            folder = os.path.realpath(self._raw_dir(dataset))
            lock = FileLock(self.locks / f"{hashlib.sha256(folder.encode()).hexdigest()[:16]}.lock")
            self.locked.enter_context(lock)
            self._is_locked = True

    def _settled(self, dataset: Any) -> str:
        """The folder of the converted files, which does not change from then on."""
        self._begin(dataset)
        dataset.__dict__["_processed_in"] = self._chosen_folder(dataset)
        return str(dataset.__dict__["_processed_in"])

    def _chosen_folder(self, dataset: Any) -> str:
        """Beside the raw files, unless that is read-only and has not what is needed."""
        beside_raw = os.path.join(self._own_processed_dir(dataset), self.converted_folder).rstrip(os.sep)
        names = dataset.processed_file_names
        paths = [Path(beside_raw, name) for name in ([names] if isinstance(names, str) else names)]
        if all(map(is_writable, (Path(beside_raw), Path(beside_raw).parent))):
            return beside_raw
        if all(path.exists() for path in paths) and not _change_since(Path(beside_raw), self._raw_files(dataset)):
            return beside_raw
        mirror = self.cache / "converted" / hashlib.sha256(str(self.root).encode()).hexdigest()[:16]
        return str(mirror / os.path.relpath(beside_raw, self.root))

    def _own_processed_dir(self, dataset: Any) -> str:
        return str(self.dataset_class.processed_dir.fget(dataset))

    def _raw_files(self, dataset: Any) -> dict[str, Path]:
        """All files in the raw folder by name, or of one with converted files in it those that the class lists."""
        raw_dir = Path(self._raw_dir(dataset))
        is_shared = Path(self._own_processed_dir(dataset)).is_relative_to(raw_dir)
        given = [Path(path) for path in dataset.raw_paths] if is_shared else [raw_dir]
        files = [file for path in given for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()]
        return {os.path.relpath(file, raw_dir): file for file in sorted(files)}

    def _download(self, dataset: Any) -> None:
        self._begin(dataset)
        missing = [path for path in map(Path, dataset.raw_paths) if not path.exists()]
        if not missing:
            return
        raw_dir = Path(dataset.raw_dir)
        if not all(map(is_writable, (raw_dir, raw_dir.parent))):
            raise PermissionError(f"{missing[0]} is missing, and the folder is read-only")
        _log.info("Downloading %s to %s", self.dataset_class.__name__, raw_dir)
        try:
            with scratch_for(raw_dir) as scratch:
                self.scratch = str(scratch), str(raw_dir)
                self._download_to(scratch, dataset)
                move_into(raw_dir, scratch, last=_tops(dataset.raw_paths, raw_dir))
        finally:
            for folder in (raw_dir, raw_dir.parent):
                with contextlib.suppress(OSError):  # only folders that the failed download left empty
                    if folder != self.root:
                        folder.rmdir()

    def _download_to(self, scratch: Path, dataset: Any) -> None:
        remedy = f"The download failed: try again, or place the raw files in {dataset.raw_dir}"
        dataset.__dict__["_raw_in"] = str(scratch)
        try:
            self.download(dataset)
        except OSError:
            raise
        except Exception:
            self.steps.append(remedy)
            raise
        finally:
            del dataset.__dict__["_raw_in"]
        for path in map(Path, dataset.raw_paths):  # a few classes have their folder written out
            if not path.exists() and not (scratch / os.path.relpath(path, dataset.raw_dir)).exists():
                self.steps.append(remedy)
                raise ValueError(f"what was downloaded has no {path.name}")

    def _process(self, dataset: Any) -> None:
        self._begin(dataset)
        raw, folder = Path(dataset.raw_dir), Path(dataset.processed_dir)
        raw_files = self._raw_files(dataset)
        of_raw = f"One of the files in {raw} is damaged ({', '.join([*raw_files][:20])}): delete it and fetch it again"
        of_converted = f"{dataset.processed_paths[0]} or a file next to it is damaged: delete the folder; it is rebuilt"
        is_made = all(map(os.path.exists, dataset.processed_paths)) and not dataset.force_reload
        if is_made and (change := _change_since(folder, raw_files)):
            _log.warning("%s: %s; it is converted again.", raw, change)
            is_made = False
        self.steps.append(of_converted if is_made else of_raw)
        if is_made:
            self.dataset_class._process(dataset)
            if (folder / _SEAL).exists() and (folder / _SEAL).read_text() != _digest(dataset.processed_paths):
                raise ValueError(f"not the bytes that were written, says {_SEAL}")
            return
        if self.check_raw is not None:
            for path in dataset.raw_paths:
                self.check_raw(Path(path))
        self.task = f"converted into {folder}"
        with scratch_for(folder) as scratch:
            dataset.__dict__["_processed_in"] = str(scratch)
            try:
                self.dataset_class._process(dataset)
                (scratch / _SEAL).write_text(_digest(dataset.processed_paths))
                (scratch / _MADE_FROM).write_text(json.dumps(_record(raw_files)))
            finally:
                dataset.__dict__["_processed_in"] = str(folder)
            (folder / _MADE_FROM).unlink(missing_ok=True)  # if this is interrupted it begins anew
            move_into(folder, scratch, last=[*_tops(dataset.processed_paths, folder), _SEAL, _MADE_FROM])
        self.steps.append(of_converted)
        self.task = "read"


def _tops(paths: list[str], folder: Path) -> list[str]:
    """What lies right in a folder and leads to some of its files."""
    return [Path(os.path.relpath(path, folder)).parts[0] for path in paths]


def _change_since(folder: Path, raw_files: dict[str, Path]) -> str:
    """What has changed since a folder's files were converted; empty if nothing has, or if PyG has converted them."""
    if not (folder / _SEAL).exists():
        return ""
    try:
        known = json.loads((folder / _MADE_FROM).read_text())
        if differing := sorted(known.keys() ^ raw_files.keys()):
            return f"{differing[0]} {'is new' if differing[0] in raw_files else 'is gone'} since it was converted"
        for name, path in raw_files.items():
            size, time, checksum = known[name]
            now = path.stat()
            if now.st_size != size or (now.st_mtime_ns != time and _sha256(path) != checksum):
                return f"{name} has changed since it was converted"
    except (OSError, ValueError, TypeError, AttributeError):
        return "it is not known what it was converted from"
    return ""


def _record(raw_files: dict[str, Path]) -> dict[str, tuple[int, int, str]]:
    """Size, time of the last change and checksum of files."""
    stats = {name: path.stat() for name, path in raw_files.items()}
    return {name: (stats[name].st_size, stats[name].st_mtime_ns, _sha256(path)) for name, path in raw_files.items()}


def _digest(paths: list[str]) -> str:
    """SHA-256 of some files together, as text."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(bytes.fromhex(_sha256(Path(path))))
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _locks_in(cache: Path) -> Path:
    """The folder of locks.

    Raises:
        ValueError: It cannot be written.
    """
    locks = cache / "locks"
    try:
        locks.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(unwritable_cache_message(cache, error)) from error
    if not os.access(locks, os.W_OK):
        raise ValueError(unwritable_cache_message(cache, f"{locks} is read-only"))
    return locks
