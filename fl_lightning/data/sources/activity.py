"""Human activities of 30 people, recognized from the motion sensors of a smartphone.

Source: Anguita et al., "A Public Domain Dataset for Human Activity Recognition Using Smartphones", ESANN 2013.
Shape legend: M windows of all people, S signals, T time steps, F features.
"""

from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from fl_lightning.data.sources.array_file import read_arrays
from fl_lightning.data.sources.examples import Examples, ExampleSource, client_names, split_by_client
from fl_lightning.data.sources.tasks import standardized


class HAR(ExampleSource):
    """Six activities of 30 people: windows of 128 readings at 50 Hz that overlap by half; 281 to 409 a person.

    ``raw`` gives windows (9, 128): body acceleration x y z (g), angular velocity x y z (rad/s), total acceleration x y
    z (g). ``statistics`` gives 72 features, of the nine signals and the magnitudes of the three vectors: mean, standard
    deviation, minimum, maximum, energy (mean square) and change (mean absolute difference of successive readings), each
    statistic of all 12 signals in turn, standardized over all people's windows. They stand in for the 561 features of
    the original, which need its filters: multinomial logistic regression on them reaches about 95 %.

    Windows stay in the file's order, in which neighbors overlap: a random split is what the papers do, but leaks half
    windows between the roles.

    File: ``har/har_raw.npz`` with ``halves`` (P, 9, 64) half windows, ``win`` (M, 2) the two halves of each window,
    ``y`` (M,) activities 0 to 5, ``subject`` (M,) people 1 to 30.

    Args:
        features: ``statistics`` or ``raw``.
    """

    class_names = ("walking", "walking upstairs", "walking downstairs", "sitting", "standing", "laying")

    def __init__(self, features: Literal["statistics", "raw"] = "statistics") -> None:
        if features not in ("statistics", "raw"):
            raise ValueError(f"features={features!r} is not known to HAR; use 'statistics' or 'raw'.")
        self.features = features

    def load(self, root: Path, seed: int) -> Examples:  # noqa: D102
        layout = {
            "halves": "(P, 9, 64) half windows",
            "win": "(M, 2) halves of each window",
            "y": "(M,) activities 0 to 5",
            "subject": "(M,) people",
        }
        arrays = read_arrays(root, ["har/har_raw.npz"], layout, whole=("win", "y", "subject"))
        outside = (arrays["win"] < 0) | (arrays["win"] >= len(arrays["halves"]))
        if outside.any():
            window = int(outside.any(axis=1).argmax())
            raise ValueError(
                f"{root / 'har/har_raw.npz'}: `win`[{window}] is {arrays['win'][window].tolist()}, but there are the "
                f"halves 0 to {len(arrays['halves']) - 1}: correct it."
            )
        x_MST = np.concatenate([arrays["halves"][arrays["win"][:, half]] for half in (0, 1)], axis=2)
        x = torch.from_numpy(x_MST if self.features == "raw" else standardized(window_statistics(x_MST)))
        y = torch.from_numpy(arrays["y"])
        clients = split_by_client(torch.from_numpy(arrays["subject"]))
        return Examples(
            names=client_names("subject", len(clients), first=1),
            x=tuple(x[idx_N] for idx_N in clients),
            y=tuple(y[idx_N] for idx_N in clients),
            num_outputs=6,
        )


def window_statistics(x_MST: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Describe windows by six statistics of each signal and of each vector's magnitude.

    Args:
        x_MST: Windows (M, S, T); each three successive signals are the components of a vector.

    Returns:
        (M, 6 * (S + S / 3)), as :class:`HAR` says.
    """
    num_windows, num_signals, num_steps = x_MST.shape
    vectors = x_MST.reshape(num_windows, num_signals // 3, 3, num_steps)
    signals = np.concatenate([x_MST, np.linalg.norm(vectors, axis=2)], axis=1)
    statistics = [
        signals.mean(axis=2),
        signals.std(axis=2),
        signals.min(axis=2),
        signals.max(axis=2),
        np.square(signals).mean(axis=2),
        np.abs(np.diff(signals, axis=2)).mean(axis=2),
    ]
    return np.concatenate(statistics, axis=1)
