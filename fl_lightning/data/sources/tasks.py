"""Tables of features whose rows belong to clients: sensors, schools, fields, people.

Sources: Smith et al., "Federated Multi-Task Learning", NeurIPS 2017 (Vehicle, HAR, GLEAM); Zhou et al., MALSAR, 2011
(School); Ben Issaid et al., "Tackling Feature and Sample Heterogeneity in Decentralized Multi-Task Learning: A
Sheaf-Theoretic Approach" (Sheaf-FMTL), appendix F, for all but Landmine.

Every data set is an ``.npz`` file with features ``X`` (M, F), labels -1 and 1 or 0 and 1 (or the targets of a
regression) ``y`` (M,), and ``task`` (M,), the number of each row's client; clients are in ascending order.
Where features are standardized, mean and deviation are of all clients' rows, whatever their role.

Shape legend: M examples of all clients, F features.
"""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from fl_lightning.data.settings import check_flag
from fl_lightning.data.sources.array_file import read_arrays
from fl_lightning.data.sources.examples import Examples, ExampleSource, client_names, split_by_client


class _TaskTable(ExampleSource):
    """One file, laid out as the module says.

    Args:
        standardize: Bring every feature, and the targets of a regression, to mean 0 and standard deviation 1; constant
            features stay as they are.
    """

    paths: ClassVar[tuple[str, ...]]
    kind: ClassVar[str]
    regression: ClassVar[bool] = False

    def __init__(self, standardize: bool) -> None:
        check_flag("standardize", standardize)
        self.standardize = standardize

    def load(self, root: Path, seed: int) -> Examples:
        layout = {"X": "(M, F) features", "y": "(M,) labels or targets", "task": "(M,) client of each row"}
        arrays = read_arrays(root, self.paths, layout, whole=("task",))
        x, y = arrays["X"].astype(np.float64), arrays["y"]
        if self.regression:
            y = y[:, None].astype(np.float64)
            y = standardized(y) if self.standardize else y.astype(np.float32)
        else:
            if not set(np.unique(y)) <= {-1, 0, 1} or {-1, 0} <= set(np.unique(y)):
                raise ValueError(f"{type(self).__name__}: y holds {np.unique(y)[:5]}; labels are -1 and 1, or 0 and 1.")
            y = (y > 0).astype(np.int64)
        x_MF = torch.from_numpy(standardized(x) if self.standardize else x.astype(np.float32))
        y_M = torch.from_numpy(y)
        clients = split_by_client(torch.from_numpy(arrays["task"]))
        return Examples(
            names=client_names(self.kind, len(clients)),
            x=tuple(x_MF[idx_N] for idx_N in clients),
            y=tuple(y_M[idx_N] for idx_N in clients),
            num_outputs=1 if self.regression else 2,
        )


class Vehicle(_TaskTable):
    """Two kinds of vehicles by the sound and the tremor they make, for 23 sensors (Duarte, Hu, 2004); 100 features.

    Files: ``vehicle_sensor/vehicle.npz`` (the full set), else ``vehicle_sensor/vehicle_ditto_train.npz`` (a sub-sample
    with 7 to 534 examples a client, standardized for each sensor), laid out as the module says.

    Args:
        standardize: Bring features to mean 0 and standard deviation 1; not needed for the sub-sample.
    """

    paths = ("vehicle_sensor/vehicle.npz", "vehicle_sensor/vehicle_ditto_train.npz")
    kind = "sensor"

    def __init__(self, standardize: bool = False) -> None:
        super().__init__(standardize)


class School(_TaskTable):
    """Exam scores (1 to 70) of 15,362 pupils of 139 schools (Goldstein, 1991); regression on 28 features.

    The last feature is constant: the intercept. File: ``school/school.npz``, laid out as the module says.

    Args:
        standardize: Bring features and scores to mean 0 and standard deviation 1; False leaves features of up to 91
            besides indicators of 0 and 1, and scores in points.
    """

    paths = ("school/school.npz",)
    kind = "school"
    regression = True

    def __init__(self, standardize: bool = True) -> None:
        super().__init__(standardize)


class Landmine(_TaskTable):
    """Mines or clutter in radar images of 29 fields (Xue et al., JMLR 2007); 9 features, mines are rare.

    Files: ``landmine/landmine.npz`` (the full set), else ``landmine/fmtl_small.npz`` (a tenth of it, 44 to 69 examples
    a client), laid out as the module says.

    Args:
        standardize: Bring features to mean 0 and standard deviation 1.
    """

    paths = ("landmine/landmine.npz", "landmine/fmtl_small.npz")
    kind = "field"

    def __init__(self, standardize: bool = False) -> None:
        super().__init__(standardize)


class GLEAM(_TaskTable):
    """Eating or not, by the head movements of 38 wearers of Google Glass (Rahman et al., 2015); 180 features.

    File: ``gleam/gleam.npz``, laid out as the module says; it is not publicly redistributable.

    Args:
        standardize: Bring features to mean 0 and standard deviation 1.
    """

    paths = ("gleam/gleam.npz",)
    kind = "person"

    def __init__(self, standardize: bool = True) -> None:
        super().__init__(standardize)


def standardized(table: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Bring each column to mean 0 and standard deviation 1, constant columns excepted; float32.

    Mean and deviation are of all clients' examples, tested ones among them, as in the published tables.

    Example:
        >>> standardized(np.array([[1.0, 5.0], [3.0, 5.0]])).tolist()
        [[-1.0, 5.0], [1.0, 5.0]]
    """
    mean, deviation = table.mean(axis=0), table.std(axis=0)
    varies = deviation > 1e-12 * np.abs(mean)
    scaled = (table - np.where(varies, mean, 0.0)) / np.where(varies, deviation, 1.0)
    return scaled.astype(np.float32)
