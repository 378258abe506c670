"""Downloads of PyG's data sets from a server on this machine, and conversions of what was downloaded."""

import datetime
import errno
import gzip
import http.server
import io
import ipaddress
import logging
import os
import shutil
import ssl
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.data import Data, InMemoryDataset, download_url
from torch_geometric.datasets import TUDataset
from torch_geometric.io import fs

from fl_lightning.data import PyGSource, TUSource
from fl_lightning.data.sources import converted

FILES = {
    "A": "1, 2\n2, 1\n4, 5\n5, 4\n",
    "graph_indicator": "1\n1\n1\n2\n2\n2\n",
    "graph_labels": "1\n-1\n",
    "node_labels": "3\n3\n5\n5\n3\n5\n",
}


def archive(files: dict[str, str], cut: int | None = None) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        for name, text in files.items():
            file.writestr(name, text)
    return content.getvalue()[:cut]


def tu_files(**more: str) -> dict[str, str]:
    return {f"TWO/TWO_{name}.txt": text for name, text in {**FILES, **more}.items()}


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that the data sets below, and those of the TU collection, are downloaded from."""
    folder = tmp_path / "web"
    folder.mkdir()
    for dataset_class in (TUDataset, Fetched):
        monkeypatch.setattr(dataset_class, "url", folder.as_uri())
    (folder / "TWO.zip").write_bytes(archive(tu_files()))
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


class Fetched(InMemoryDataset):
    """Downloads a file with its features, unpacked if need be."""

    url = ""

    def __init__(self, root: str, file: str) -> None:
        self.file = file
        super().__init__(root)
        self.load(self.processed_paths[0])

    raw_file_names = "x.txt"
    processed_file_names = "data.pt"

    def download(self) -> None:
        if self.file == "x.txt":
            download_url(f"{self.url}/x.txt", self.raw_dir)
        else:
            fs.cp(f"{self.url}/{self.file}", self.raw_dir, extract=True)

    def process(self) -> None:
        x = torch.tensor([[float(line)] for line in Path(self.raw_paths[0]).read_text().split()])
        y = torch.zeros(len(x), dtype=torch.long)
        self.save([Data(x=x, edge_index=torch.tensor([[0, 1], [1, 0]]), y=y)], self.processed_paths[0])


def fetched(root: Path, file: str = "x.txt") -> list[float]:
    data = PyGSource(f"{__name__}.Fetched", {"file": file}).load(root, root.parent / "cache")
    numbers: list[float] = data.x.flatten().tolist()
    return numbers


def two(root: Path, **settings: Any) -> Any:
    return TUSource("TWO", **settings).load(root, root.parent / "cache")


def test_a_set_of_the_tu_collection_is_downloaded(web: Path, root: Path) -> None:
    assert [graph.x.shape for graph in two(root).graphs] == [(3, 3), (3, 3)]
    names = files_in(root / "TU" / "TWO")
    assert {name for name in names if name.startswith("raw")} == {f"raw/TWO_{name}.txt" for name in FILES}
    assert {path.name for path in (root / "TU" / "TWO").iterdir()} == {"raw", "processed"}
    assert (root / "TU" / "TWO" / "raw").stat().st_mode == web.stat().st_mode


@pytest.mark.parametrize("name", ["TWO/../../../../escaped.txt", "../escaped.txt", "/escaped.txt", "..\\escaped.txt"])
def test_an_archive_does_not_write_outside_its_folder(web: Path, root: Path, name: str, tmp_path: Path) -> None:
    (web / "TWO.zip").write_bytes(archive({**tu_files(), name: "x"}))
    message = r"TWO cannot be read .*escaped.txt', which lies outside the folder.*The download failed: try again, or"
    with pytest.raises(ValueError, match=message):
        two(root)
    assert not files_in(root)
    assert not [*tmp_path.rglob("*escaped*")]


@pytest.mark.parametrize(
    "content",
    [archive(tu_files(), cut=-30), archive(tu_files(), cut=60), b""],
    ids=["without its end", "its beginning alone", "empty"],
)
def test_a_damaged_archive_is_a_failed_download(web: Path, root: Path, content: bytes) -> None:
    (web / "TWO.zip").write_bytes(content)
    with pytest.raises(ValueError, match=r"TWO cannot be read \(BadZipFile.*The download failed: try again, or place"):
        two(root)
    assert not [*root.rglob("TWO")]
    (web / "TWO.zip").write_bytes(archive(tu_files()))
    assert len(two(root).graphs) == 2


def test_an_archive_that_lacks_a_file_is_a_failed_download(web: Path, root: Path) -> None:
    files = tu_files()
    del files["TWO/TWO_graph_indicator.txt"]
    (web / "TWO.zip").write_bytes(archive(files))
    with pytest.raises(ValueError, match=r"has no TWO_graph_indicator.txt\). The download failed: .*root/TU/TWO/raw"):
        two(root)
    assert not files_in(root)


@pytest.mark.usefixtures("web")
def test_a_download_that_ends_midway_leaves_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyG takes a set for whole that has two of its files, and the features of nodes may come after them."""
    move = fs.mv

    def ended(source: str, target: str) -> None:
        if source.endswith("node_labels.txt"):
            raise KeyboardInterrupt
        move(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(fs, "mv", ended)
        with pytest.raises(KeyboardInterrupt):
            two(root)
    assert not files_in(root)
    assert two(root).graphs[0].x.shape == (3, 3)


def test_other_archives(web: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (web / "x.txt.gz").write_bytes(gzip.compress(b"1 2"))
    (web / "x.zip").write_bytes(archive({"x.txt": "3 4"}))
    (web / "plain").write_text("5 6")
    for name, member in (("x.tar.gz", "x.txt"), ("bad.tar.gz", "../x.txt")):
        with tarfile.open(web / name, "w:gz") as file:
            file.add(web / "plain", member)
    for name, numbers in (("x.txt.gz", [1, 2]), ("x.zip", [3, 4]), ("x.tar.gz", [5, 6])):
        assert fetched(root, name) == numbers
        shutil.rmtree(root / "Fetched")
    with pytest.raises(ValueError, match=r"OutsideDestinationError.*The download failed"):
        fetched(root, "bad.tar.gz")
    assert not files_in(root)
    monkeypatch.delattr(tarfile, "data_filter")
    with pytest.raises(ValueError, match=r"to unpack x\.tar\.gz safely takes Python 3\.11\.4 or later"):
        fetched(root, "x.tar.gz")


def write_certificate(folder: Path) -> Path:
    """A self-signed certificate of this machine's, with its key."""
    x509 = pytest.importorskip("cryptography.x509", reason="needs the extra remote")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    today = datetime.datetime.now(datetime.UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(today - datetime.timedelta(days=1))
        .not_valid_after(today + datetime.timedelta(days=1))
        .add_extension(address, critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "server.pem").write_bytes(secret + certificate.public_bytes(pem))
    return folder / "server.pem"


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def server(web: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The certificate of a server that has the folder, by https."""
    certificate = write_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), lambda *given: Quiet(*given, directory=str(web))
    ) as listening:
        listening.socket = context.wrap_socket(listening.socket, server_side=True)
        for dataset_class in (TUDataset, Fetched):
            monkeypatch.setattr(dataset_class, "url", f"https://127.0.0.1:{listening.server_port}")
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield certificate
        listening.shutdown()
        thread.join()


@pytest.mark.parametrize("load", [fetched, two], ids=["download_url", "cp"])
def test_a_server_is_verified(server: Path, web: Path, root: Path, load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (web / "x.txt").write_text("1 2")
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    message = r"is missing in .*root.*https://127.*(x.txt|TWO.zip) is not read, because the certificate of its server"
    with pytest.raises(FileNotFoundError, match=message + r".*set SSL_CERT_FILE.*; or place its raw files there"):
        load(root)
    assert not files_in(root)
    monkeypatch.setenv("SSL_CERT_FILE", str(server))
    load(root)
    assert files_in(root)


@pytest.mark.usefixtures("web")
def test_what_pyg_downloads_with_is_restored(root: Path) -> None:
    import torch_geometric.data.download as module

    before = module.urllib, fs.cp
    with pytest.raises(FileNotFoundError, match=r"cannot be read .*none.zip"):
        fetched(root, "none.zip")
    assert (module.urllib, fs.cp) == before


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with each conversion."""
    counted: list[int] = []
    process = Fetched.process

    def counting(self: Any) -> None:
        counted.append(1)
        process(self)

    monkeypatch.setattr(Fetched, "process", counting)
    return counted


def test_what_has_changed_is_converted_again(
    web: Path, root: Path, count: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    (web / "x.txt").write_text("1 2")
    raw = root / "Fetched" / "raw" / "x.txt"
    assert fetched(root) == fetched(root) == [1, 2]
    assert len(count) == 1
    os.utime(raw, (1, 1))  # as a copy of the folder has it
    assert fetched(root) == [1, 2]
    assert len(count) == 1
    with caplog.at_level(logging.WARNING):
        raw.write_text("3 4")
        assert fetched(root) == fetched(root) == [3, 4]
        (raw.parent / "more.txt").touch()
        fetched(root)
    assert [line.partition("raw: ")[2] for line in caplog.messages] == [
        "x.txt has changed since it was converted; it is converted again.",
        "more.txt is new since it was converted; it is converted again.",
    ]
    assert len(count) == 3


@pytest.mark.parametrize("record", [None, "", "{", "[]", '{"x.txt": 3}'])
def test_what_an_older_version_converted_is_converted_once_again(
    web: Path, root: Path, count: list[int], record: str | None
) -> None:
    (web / "x.txt").write_text("1 2")
    fetched(root)
    [path] = root.rglob("made-from.json")
    path.unlink()
    if record is not None:
        path.write_text(record)
    assert fetched(root) == fetched(root) == [1, 2]
    assert len(count) == 2


def test_a_conversion_that_ends_midway_begins_anew(
    web: Path, root: Path, count: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (web / "x.txt").write_text("1 2")
    fetched(root)
    raw = root / "Fetched" / "raw" / "x.txt"
    for name in ("data.pt", "checksum.sha256", "made-from.json"):
        raw.write_text(f"3 {len(count)}")
        replace = os.replace

        def ended(source: Any, target: Any, name: str = name, replace: Any = replace) -> None:
            if Path(target).name == name:
                raise KeyboardInterrupt
            replace(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", ended)
            with pytest.raises(KeyboardInterrupt):
                fetched(root)
        assert fetched(root) == [float(number) for number in raw.read_text().split()]
        raw.write_text("7")
        fetched(root)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        MemoryError(),
        PermissionError(errno.EACCES, "Permission denied"),
    ],
    ids=["disk", "memory", "rights"],
)
def test_a_file_is_not_called_damaged_where_the_machine_lacks_something(
    web: Path, root: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    (web / "x.txt").write_text("1 2")

    def fails(dataset: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Fetched, "process", fails)
        with pytest.raises(
            ValueError, match=r"cannot be converted into .*processed/.* \(.*free disk space or memory"
        ) as says:
            fetched(root)
    assert "damaged" not in str(says.value)
    assert fetched(root) == [1, 2]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "load", lambda *_, **__: fails(None))
        with pytest.raises(ValueError, match=r"Fetched cannot be read \(.*free disk space or memory") as says:
            fetched(root)
    assert "damaged" not in str(says.value)


def test_a_read_only_root_whose_files_change(web: Path, root: Path, count: list[int]) -> None:
    (web / "x.txt").write_text("1 2")
    fetched(root)
    shutil.rmtree(root / "Fetched" / "processed")
    folder = root / "Fetched"
    try:
        for text, numbers in (("1 2", [1, 2]), ("3 4", [3, 4])):
            folder.chmod(0o755)
            (folder / "raw" / "x.txt").write_text(text)
            folder.chmod(0o555)
            for _ in range(2):
                assert fetched(root) == numbers
        assert not (folder / "processed").exists()
        folder.chmod(0o755)
        fetched(root)  # beside the raw files
        (folder / "raw" / "x.txt").write_text("5 6")
        folder.chmod(0o555)
        assert fetched(root) == [5, 6]  # in the cache
    finally:
        folder.chmod(0o755)
    assert len(count) == 5


@pytest.mark.usefixtures("web")
def test_one_lock_for_a_folder_whatever_the_settings(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[str] = []

    class Lock(converted.FileLock):  # type: ignore[misc]
        def acquire(self, *arguments: Any, **settings: Any) -> Any:
            held.append(str(self.lock_file))
            return super().acquire(*arguments, **settings)

    monkeypatch.setattr(converted, "FileLock", Lock)
    for settings in ({}, {"use_edge_attr": True}, {"use_node_attr": False}):
        two(root, **settings)
    (root.parent / "link").symlink_to(root)
    two(root.parent / "link")
    assert (len(held), len(set(held))) == (4, 1)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("graph_labels", None, "there is no TWO_graph_labels.txt"),
        ("graph_indicator", "1\n1\n1\n2\n3\n3\n", "there are 2 targets for 3 graphs"),
        ("graph_labels", "1\n2\n3\n", "there are 3 targets for 2 graphs"),
        ("graph_indicator", "1\n1\n1\n2\n2\n9\n", "there are 2 targets for 9 graphs"),
    ],
)
@pytest.mark.usefixtures("web")
def test_damaged_sets_of_the_tu_collection(root: Path, file: str, text: str | None, message: str) -> None:
    two(root)
    path = root / "TU" / "TWO" / "raw" / f"TWO_{file}.txt"
    path.unlink()
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=rf"TU/TWO/raw cannot be read .*{message}.*Fetch or write it again"):
        two(root)
    path.write_text(FILES[file])
    assert len(two(root).graphs) == 2
