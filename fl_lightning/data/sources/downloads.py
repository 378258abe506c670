"""Downloads of PyG's data sets: servers are verified, archives stay in their folder, and files appear in one step."""

import contextlib
import os
import shutil
import ssl
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from typing import Any
from unittest import mock
from urllib.error import URLError

from torch_geometric.data import download_url
from torch_geometric.data.extract import extract_gz
from torch_geometric.io import fs


class UntrustedServer(OSError):
    """The certificate of a server cannot be verified."""


@contextlib.contextmanager
def verified_downloads() -> Iterator[None]:
    """Have PyG verify the servers that it downloads from, and unpack archives within their folder only.

    Its ``download_url`` takes any certificate, and its ``fs.cp`` joins the names in an archive to the folder as they
    are, so that ``../`` leads out of it. Both are replaced for everybody within the context.
    """
    import torch_geometric.data.download as module

    verified = SimpleNamespace(request=SimpleNamespace(urlopen=_verified))
    with mock.patch.object(module, "urllib", verified), mock.patch.object(fs, "cp", _fetch):
        yield


@contextlib.contextmanager
def scratch_for(folder: Path) -> Iterator[Path]:
    """An empty folder beside another, for files that are moved into that with :func:`move_into`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-", ignore_cleanup_errors=True) as name:
        scratch = Path(name, folder.name)  # with the permissions of a folder, which the temporary one has not
        scratch.mkdir()
        yield scratch


def move_into(folder: Path, scratch: Path, last: list[str]) -> None:
    """Move everything into a folder, in one step if it is empty.

    Args:
        folder: Where to; what is there already and has the same name is replaced.
        scratch: Where from, on the same file system.
        last: Names of what is moved after all else, in this order: that by which a reader tells that all is there.
    """
    with contextlib.suppress(OSError):  # it is not there, or not empty
        folder.rmdir()
    if not folder.exists():
        os.replace(scratch, folder)
        return
    for path in sorted(scratch.iterdir(), key=lambda path: last.index(path.name) if path.name in last else -1):
        target = folder / path.name
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        os.replace(path, target)


def _verified(url: str, **_: Any) -> Any:
    """Open a URL, as ``urllib.request.urlopen`` does.

    Raises:
        UntrustedServer: The server's certificate cannot be verified.
    """
    try:
        return urllib.request.urlopen(url, context=ssl.create_default_context())
    except URLError as error:
        if isinstance(error.reason, ssl.SSLCertVerificationError):
            raise UntrustedServer(
                f"{url} is not read, because the certificate of its server cannot be verified "
                f"({error.reason.verify_message}). If a proxy of your organization stands between, set SSL_CERT_FILE "
                "to its certificates"
            ) from error
        raise


def _fetch(url: str, folder: str, extract: bool = False, **_: Any) -> None:
    """Download a file into a folder, and unpack it there if need be, as ``torch_geometric.io.fs.cp`` does."""
    if not extract:
        download_url(url, folder)
        return
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        archive = download_url(url, scratch)
        if archive.endswith(".zip"):
            _unzip(archive, folder)
        elif archive.endswith(".tar.gz"):
            if not hasattr(tarfile, "data_filter"):
                raise RuntimeError(f"to unpack {Path(archive).name} safely takes Python 3.11.4 or later")
            with tarfile.open(archive) as file:
                file.extractall(folder, filter="data")
        else:
            extract_gz(archive, scratch, log=False)
            os.unlink(archive)
            [unpacked] = Path(scratch).iterdir()
            os.replace(unpacked, Path(folder, unpacked.name))


def _unzip(archive: str, folder: str) -> None:
    with zipfile.ZipFile(archive) as file:
        for name in file.namelist():
            path = PurePosixPath(name.replace("\\", "/"))
            if path.is_absolute() or ".." in path.parts:
                raise zipfile.BadZipFile(f"it has a file {name!r}, which lies outside the folder")
        file.extractall(folder)
