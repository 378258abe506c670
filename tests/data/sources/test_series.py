from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from example_files import NUM_STEPS, SENSORS, save, write_example_files

from fl_lightning import FederatedDataModule
from fl_lightning.data import METRLA, PEMSBAY, TPT48


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_example_files(tmp_path_factory.mktemp("root"))


@pytest.mark.parametrize("scaling", ["state", "table"])
def test_tpt48_years_and_scaling(scaling: Any, root: Path):
    examples = TPT48(2001, 2003, scaling=scaling).load(root, 0)
    assert examples.names == ("Ohio", "Utah")
    assert examples.relation_CC is not None
    assert examples.relation_CC.tolist() == [[0, 1], [1, 0]]
    file = np.load(root / "tpt48/tpt48.npz")["temp_F"][:, 1:4]
    axes = (1, 2) if scaling == "state" else None
    low, high = file.min(axis=axes, keepdims=True), file.max(axis=axes, keepdims=True)
    actual = np.stack([torch.cat([x, y], dim=1).numpy() for x, y in zip(examples.x, examples.y, strict=True)])
    np.testing.assert_allclose(actual, (file - low) / (high - low), atol=1e-6)
    with pytest.raises(ValueError, match="the file has the years 2000 to 2004"):
        TPT48(1990, 1995).load(root, 0)


@pytest.mark.parametrize(("history", "horizon", "stride"), [(3, 2, 1), (12, 12, 5), (4, 1, 7)])
def test_traffic_windows(history: int, horizon: int, stride: int, root: Path):
    examples = METRLA(history, horizon, stride, normalize=False).load(root, 0)
    assert examples.names == tuple(SENSORS)
    starts = torch.arange(0, NUM_STEPS - history - horizon + 1, stride)
    for sensor, (x, y) in enumerate(zip(examples.x, examples.y, strict=True)):
        first = starts[:, None] + 1 + 1000 * sensor
        assert torch.equal(x, (first + torch.arange(history)).float()[..., None])
        assert torch.equal(y, (first + history + torch.arange(horizon)).float())
    assert examples.relation_CC is not None
    torch.testing.assert_close(examples.relation_CC, torch.tensor([[0, 0.5, 0], [0.5, 0, 0.3], [0, 0.3, 0]]))


@pytest.mark.parametrize("stride", [1, 2, 5])
def test_without_a_splitter_each_reading_has_one_role(stride: int, root: Path, tmp_path: Path):
    source = METRLA(4, 3, stride, normalize=False)
    data = FederatedDataModule(source, root=str(root), cache_dir=str(tmp_path))
    data.setup()
    first = data.clients[0]
    readings = torch.cat([first.x_NX[..., 0], first.y_N], dim=1)
    masks = (first.train_mask_N, first.val_mask_N, first.test_mask_N)
    seen = [set(readings[mask_N].flatten().tolist()) for mask_N in masks]
    assert all(seen)
    assert len(set.union(*seen)) == sum(map(len, seen))


def test_traffic_is_normalized_by_its_past(root: Path):
    raw = np.load(root / "traffic/traffic_graphs.npz")["metr_la_speed_week"][: NUM_STEPS // 2].astype(float)
    examples = METRLA(1, 1, statistics_share=0.5).load(root, 0)
    expected = (np.arange(1, NUM_STEPS) - raw.mean()) / raw.std()
    np.testing.assert_allclose(examples.x[0][:, 0, 0].numpy(), expected, rtol=1e-5)


def test_full_speed_files(root: Path, tmp_path: Path):
    """Columns in any order; gaps are filled by the last reading; the full file goes before the week."""
    graphs = dict(np.load(root / "traffic/traffic_graphs.npz"))
    save(tmp_path, "traffic/traffic_graphs", **graphs)
    speed = np.array([[0.0, 5.0, 9.0], [4.0, 0.0, 8.0], [3.0, np.nan, 7.0]])
    save(tmp_path, "traffic/metr_la_speed", ids=np.array(["33", "11", "22"]), speed=speed)
    examples = METRLA(2, 1, normalize=False).load(tmp_path, 0)
    assert [x[0, :, 0].tolist() + y[0].tolist() for x, y in zip(examples.x, examples.y, strict=True)] == [
        [5, 5, 5],
        [9, 8, 7],
        [4, 4, 3],
    ]
    with pytest.raises(ValueError, match=r"history=3 \+ horizon=1 need 4 time steps; there are 3"):
        METRLA(3, 1).load(tmp_path, 0)
    save(tmp_path, "traffic/metr_la_speed", ids=np.array(["33", "11", "44"]), speed=speed)
    with pytest.raises(ValueError, match=r"no speeds of 1 sensors of the graph: \['22'\]"):
        METRLA(2, 1).load(tmp_path, 0)
    assert PEMSBAY(3, 2, normalize=False).load(root, 0).x[1][0, 0, 0] == 1001
