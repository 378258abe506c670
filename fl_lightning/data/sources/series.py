"""Series in time and place: a client is a state or a road sensor, and the map relates the clients.

Road sensors (:class:`METRLA`, :class:`PEMSBAY`) give speeds in miles an hour every 5 minutes. An example is a window
whose first part, x (history, 1), forecasts the rest, y (horizon,); windows are in order of time. Where no splitter is
given it is ``ChronologicalSplit`` with a ``gap`` of (history + horizon - 1) / stride, rounded down: no reading has two
roles, as most would have in a random split of windows that overlap.
Zeros and NaN are failures of a sensor; its last reading takes their place (before its first reading, that one).
Inputs and targets are views of one table, and take no memory of their own.
The relation graph is DCRNN's, a Gaussian kernel of road distances cut at 0.1, made symmetric by the greater of the two
directions, with a zero diagonal.

Their files, <set> being metr_la or pems_bay: ``traffic/traffic_graphs.npz`` with ``<set>_ids`` (C,) and ``<set>_adj``
(C, C), and ``traffic/<set>_speed.npz`` with ``ids`` (C,) in any order and ``speed`` (T, C). From DCRNN's pandas files:
``np.savez("metr_la_speed.npz", ids=frame.columns.astype(str), speed=frame.to_numpy("float32"))``.

Sources: Li et al., "Diffusion Convolutional Recurrent Neural Network", ICLR 2018 (DCRNN); Lin, Lan, He, Li,
"Graph-Relational Federated Learning: Enhanced Personalization and Robustness" (Panacea), section IV, whose 34,249
windows of METR-LA are those of history 12, horizon 12 and stride 1. Its errors (1.0e-3 on METR-LA) do not tell its
scale: repeating the last reading has 0.43 over 12 steps of our week in z-scores, and 0.014 in min-max scaling.

Shape legend: C clients, T time steps, N windows, Y years.
"""

from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fl_lightning.data.settings import check_count, check_flag, check_number
from fl_lightning.data.sources.array_file import read_arrays
from fl_lightning.data.sources.examples import Examples, ExampleSource
from fl_lightning.data.split import ChronologicalSplit, Splitter

_GRAPHS = "traffic/traffic_graphs.npz"


class TPT48(ExampleSource):
    """Monthly temperatures of the 48 contiguous states of the USA: an example is a year, its months 1-6 forecast 7-12.

    x (6,) and y (6,). The relation graph joins states with a common border (105 edges). The paper has 125 examples a
    client, the years 1895 to 2019, though it says 2008 to 2019, which are 12.

    Scaling: the paper does not print its own. Min-max to [0, 1] of each state is the one under which simple predictors
    give the paper's errors (2.1e-3 to 3.5e-3 with standard deviations over states of 0.5e-3 to 1.5e-3): the same six
    numbers for all states have a squared error of 2.7e-3 (sd 1.0e-3), each state's own mean months 2.2e-3 (0.5e-3).
    Min-max of the whole table gives 6.0e-3 and 0.8e-3, z-scores 0.2 and 0.03. Least and greatest value are taken over
    the years in use, whatever their role.

    File: ``tpt48/tpt48.npz`` with ``temp_F`` (C, Y, 12) degrees Fahrenheit, ``years`` (Y,), ``state`` (C,) names,
    ``adj`` (C, C) borders.

    Args:
        first_year: The first year that is used.
        last_year: The last one.
        scaling: Min-max to [0, 1] of each ``state``, or of the whole ``table``.

    Source: Panacea, section IV; data of NOAA's nClimDiv.
    """

    def __init__(
        self, first_year: int = 1895, last_year: int = 2019, scaling: Literal["state", "table"] = "state"
    ) -> None:
        check_count("first_year", first_year, least=0)
        check_count("last_year", last_year, least=0)
        if first_year > last_year:
            raise ValueError(f"first_year={first_year} is after last_year={last_year}.")
        if scaling not in ("state", "table"):
            raise ValueError(f"scaling={scaling!r} is not known to TPT48; use 'state' or 'table'.")
        self.first_year = first_year
        self.last_year = last_year
        self.scaling = scaling

    def load(self, root: Path, seed: int) -> Examples:  # noqa: D102
        layout = {
            "temp_F": "(C, Y, 12) temperatures",
            "years": "(Y,) years",
            "state": "(C,) names",
            "adj": "(C, C) borders",
        }
        arrays = read_arrays(root, ["tpt48/tpt48.npz"], layout, whole=("years",))
        years = arrays["years"]
        chosen = (years >= self.first_year) & (years <= self.last_year)
        if not chosen.any():
            raise ValueError(
                f"first_year={self.first_year}, last_year={self.last_year}: the file has the years {years.min()} to "
                f"{years.max()}."
            )
        degrees = arrays["temp_F"][:, chosen].astype(np.float64)
        axes = (1, 2) if self.scaling == "state" else (0, 1, 2)
        low, high = degrees.min(axis=axes, keepdims=True), degrees.max(axis=axes, keepdims=True)
        scaled_CYM = torch.from_numpy(((degrees - low) / (high - low)).astype(np.float32))
        return Examples(
            names=tuple(map(str, arrays["state"])),
            x=tuple(scaled_CYM[:, :, :6]),
            y=tuple(scaled_CYM[:, :, 6:]),
            num_outputs=6,
            relation_CC=_undirected(arrays["adj"]),
        )


class _RoadSensors(ExampleSource):
    """Windows over the speeds of sensors, as the module says.

    Args:
        history: Readings of the input.
        horizon: Readings of the target.
        stride: Readings from the start of a window to the start of the next.
        normalize: Bring speeds to mean 0 and standard deviation 1; False leaves miles an hour.
        statistics_share: The mean and the deviation are those of all sensors in this first share of the time, in
            (0, 1]: less than trains, so that the future stays unknown.
    """

    prefix: ClassVar[str]

    def __init__(
        self,
        history: int = 12,
        horizon: int = 12,
        stride: int = 1,
        normalize: bool = True,
        statistics_share: float = 0.6,
    ) -> None:
        for name, count in {"history": history, "horizon": horizon, "stride": stride}.items():
            check_count(name, count)
        check_flag("normalize", normalize)
        check_number("statistics_share", statistics_share, most=1, above_0=True)
        self.history = history
        self.horizon = horizon
        self.stride = stride
        self.normalize = normalize
        self.statistics_share = statistics_share

    @property
    def default_splitter(self) -> Splitter:
        """In order of time, with a gap as long as windows overlap."""
        return ChronologicalSplit(gap=(self.history + self.horizon - 1) // self.stride)

    def load(self, root: Path, seed: int) -> Examples:
        ids, adjacency = self._read_graph(root)
        speed = fill_gaps(self._read_speed(root, ids))
        length = self.history + self.horizon
        if len(speed) < length:
            raise ValueError(
                f"history={self.history} + horizon={self.horizon} need {length} time steps; there are {len(speed)}: "
                "take fewer."
            )
        if self.normalize:
            known = speed[: max(1, round(len(speed) * self.statistics_share))]
            speed = (speed - known.mean()) / known.std()
        window_CNT = torch.from_numpy(speed.astype(np.float32)).T.contiguous().unfold(1, length, self.stride)
        return Examples(
            names=tuple(ids),
            x=tuple(window_CNT[:, :, : self.history, None]),
            y=tuple(window_CNT[:, :, self.history :]),
            num_outputs=self.horizon,
            relation_CC=_undirected(adjacency),
        )

    def _read_graph(self, root: Path) -> tuple[list[str], npt.NDArray[Any]]:
        names = {f"{self.prefix}_ids": "(C,) sensors", f"{self.prefix}_adj": "(C, C) adjacency of DCRNN"}
        ids, adjacency = read_arrays(root, [_GRAPHS], names).values()
        return [str(sensor) for sensor in ids], adjacency

    def _read_speed(self, root: Path, ids: list[str]) -> npt.NDArray[np.float64]:
        """Speeds (T, C) in the order of ``ids``."""
        layout = {"ids": "(C,) sensors", "speed": "(T, C) miles an hour every 5 minutes"}
        path = f"traffic/{self.prefix}_speed.npz"
        arrays = read_arrays(root, [path], layout, gaps=("speed",))
        column = {str(sensor): index for index, sensor in enumerate(arrays["ids"])}
        if missing := [sensor for sensor in ids if sensor not in column]:
            raise ValueError(f"{root / path} has no speeds of {len(missing)} sensors of the graph: {missing[:5]} ...")
        return arrays["speed"][:, [column[sensor] for sensor in ids]].astype(np.float64)


class METRLA(_RoadSensors):
    """207 sensors of Los Angeles County, March to June 2012; windows, graph and files as the module says.

    Without ``traffic/metr_la_speed.npz`` the week of 1 to 7 March 2012 is read: ``metr_la_speed_week`` (2016, C) in
    ``traffic/traffic_graphs.npz``, in which missing readings are filled already.
    """

    prefix = "metr_la"

    def _read_speed(self, root: Path, ids: list[str]) -> npt.NDArray[np.float64]:
        if (root / "traffic/metr_la_speed.npz").is_file():
            return super()._read_speed(root, ids)
        layout = {"metr_la_speed_week": "(T, C) miles an hour every 5 minutes"}
        return read_arrays(root, [_GRAPHS], layout, gaps=list(layout))["metr_la_speed_week"].astype(np.float64)


class PEMSBAY(_RoadSensors):
    """325 sensors of the Bay Area, January to May 2017; windows, graph and files as the module says."""

    prefix = "pems_bay"


def fill_gaps(speed_TC: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Put a sensor's last reading instead of zeros and NaN; before its first reading, that one.

    Example:
        >>> fill_gaps(np.array([[0.0], [5.0], [np.nan], [7.0]])).T.tolist()
        [[5.0, 5.0, 5.0, 7.0]]
    """
    present_TC = np.nan_to_num(speed_TC) > 0
    if not present_TC.any(axis=0).all():
        raise ValueError(f"{int((~present_TC.any(axis=0)).sum())} sensors have no reading at all.")
    time_T1 = np.arange(len(speed_TC))[:, None]
    last_TC = np.maximum.accumulate(np.where(present_TC, time_T1, -1), axis=0)
    last_TC = np.where(last_TC < 0, present_TC.argmax(axis=0), last_TC)
    return np.take_along_axis(speed_TC, last_TC, axis=0)


def _undirected(adjacency: npt.NDArray[Any]) -> Tensor:
    """Symmetric by the greater of two directions, zero diagonal, float32."""
    weight_CC = torch.from_numpy(adjacency.astype(np.float32))
    return torch.maximum(weight_CC, weight_CC.T).fill_diagonal_(0)
