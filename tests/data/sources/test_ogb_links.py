"""Graphs of OGB for link prediction, in its own files."""

import gzip
import io
from pathlib import Path

import numpy as np
import pytest
import torch
from link_leaks import check_no_leak

from fl_lightning import FederatedDataModule
from fl_lightning.data import GivenSplit, GlobalSplit, Links, MetisPartitioner, OgbLinkSource, RandomPartitioner

NODES = 40


def links_of(draw: np.random.Generator, count: int) -> np.ndarray:
    """Different pairs of nodes, the smaller first, (count, 2)."""
    first, second = np.triu_indices(NODES, 1)
    chosen = draw.permutation(len(first))[:count]
    return np.stack([first[chosen], second[chosen]], axis=1)


def write_ogb(root: Path, name: str, *, legacy: bool = False) -> dict[str, np.ndarray]:
    """A tiny data set in OGB's layout; its links by part. A training pair is tested on, too, as in ogbl-collab."""
    folder, draw = root / name.replace("-", "_"), np.random.default_rng(1)
    links = links_of(draw, 260)
    parts = {"train": links[:200], "valid": links[200:220], "test": np.concatenate([links[220:], links[:1]])}
    table = {"edge": parts["train"], "num-node-list": [[NODES]], "num-edge-list": [[len(parts["train"])]]}
    if name != "ogbl-ddi":
        table["node-feat"] = draw.normal(size=(NODES, 3))
    if name == "ogbl-citation2":
        table["node_year"] = np.full((NODES, 1), 2015)
    if name == "ogbl-collab":
        table |= {"edge_weight": np.ones((200, 1), int), "edge_year": np.full((200, 1), 2015)}
    (folder / "raw").mkdir(parents=True)
    for file, rows in table.items():
        text = io.StringIO()
        np.savetxt(text, rows, delimiter=",", fmt="%g")
        (folder / "raw" / f"{file}.csv.gz").write_bytes(gzip.compress(text.getvalue().encode()))
    split = folder / "split" / {"ogbl-ddi": "target"}.get(name, "time")
    split.mkdir(parents=True)
    for part, pairs in parts.items():
        content = {"edge": pairs, "edge_neg": links_of(draw, 20)}
        if name == "ogbl-citation2":
            content = {"source_node": pairs[:, 0], "target_node": pairs[:, 1]}
        torch.save(content, split / f"{part}.pt", _use_new_zipfile_serialization=not legacy)
    (folder / "RELEASE_v1.txt").touch()
    return parts


@pytest.mark.parametrize("name", ["ogbl-collab", "ogbl-ddi", "ogbl-citation2"])
def test_the_given_split_is_that_of_ogb(name, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr("builtins.input", None)
    parts = write_ogb(tmp_path, name, legacy=name == "ogbl-collab")
    allowed = set(torch.serialization.get_safe_globals())
    for _ in range(2):  # converts, then reads the converted file
        source = OgbLinkSource(name)
        data = FederatedDataModule(
            Links(source, pool_size=20), RandomPartitioner(2), root=str(tmp_path), cache_dir=str(tmp_path / "cache")
        )
        data.setup()
        assert isinstance(data.splitter, GivenSplit)
        check_no_leak(data)
    assert set(torch.serialization.get_safe_globals()) == allowed
    assert capsys.readouterr().out == ""
    assert data.num_features == (1 if name == "ogbl-ddi" else 3)
    expected = {part: set(map(tuple, pairs.tolist())) for part, pairs in parts.items()}
    expected["train"] -= expected["test"]
    for client, own in zip(data.clients, data.allocation.source_idx, strict=True):
        linked = client.y_N[:, 0] > 0.5
        masks = {"train": client.train_mask_N, "valid": client.val_mask_N, "test": client.test_mask_N}
        members = set(client.graph.node_idx_N.tolist())
        for part, mask in masks.items():
            mine = {tuple(sorted(pair)) for pair in own[mask & linked].tolist()}
            assert mine == {pair for pair in expected[part] if members.issuperset(pair)}


def test_another_split_may_be_drawn(tmp_path) -> None:
    write_ogb(tmp_path, "ogbl-ddi")
    data = FederatedDataModule(
        Links(OgbLinkSource("ogbl-ddi"), features="identity", pool_size=20),
        MetisPartitioner(2),
        GlobalSplit(0.85, 0.05),
        root=str(tmp_path),
        cache_dir=str(tmp_path / "cache"),
    )
    data.setup()
    check_no_leak(data)
    assert data.num_features == NODES


def test_what_cannot_be_read_is_named(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"OgbLinkSource.name is 'ogbn-arxiv': give one of ogbl-collab, ogbl-ddi"):
        OgbLinkSource("ogbn-arxiv")
    with pytest.raises(ValueError, match=r"OgbLinkSource.name is 'ogbl-biokg', a knowledge graph, in which two nodes"):
        OgbLinkSource("ogbl-biokg")
    write_ogb(tmp_path, "ogbl-collab")
    folder = tmp_path / "ogbl_collab"
    (folder / "split" / "time" / "test.pt").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"ogbl_collab/split cannot be read .* does not hold OGB's split"):
        OgbLinkSource().load(tmp_path, tmp_path / "cache")
    (folder / "RELEASE_v1.txt").unlink()
    with pytest.raises(FileNotFoundError, match=r"ogbl-collab: .*ogbl_collab has no RELEASE_v1.txt.*FL_DATA_ROOT"):
        OgbLinkSource().load(tmp_path, tmp_path / "cache")


def test_a_split_that_would_run_code_is_refused(tmp_path) -> None:
    write_ogb(tmp_path, "ogbl-collab")
    path = tmp_path / "ogbl_collab" / "split" / "time" / "test.pt"

    class Runs:
        def __reduce__(self):
            return print, ("it ran",)

    torch.save({"edge": Runs()}, path)
    with pytest.raises(ValueError, match="split"):
        OgbLinkSource().load(tmp_path, tmp_path / "cache")
