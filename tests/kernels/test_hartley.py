import functools
import math

import pytest
import torch

from fl_lightning.kernels.hartley import RandomRows, hartley
from fl_lightning.kernels.randomness import generator

CPU = torch.device("cpu")
draw = functools.partial(generator, 0, 1)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 12, 25])
def test_hartley_is_its_own_inverse(length: int) -> None:
    matrix_NN = hartley(torch.eye(length, dtype=torch.float64))
    angle_NN = 2 * math.pi / length * torch.outer(torch.arange(length), torch.arange(length)).double()
    torch.testing.assert_close(matrix_NN, (angle_NN.cos() + angle_NN.sin()) / math.sqrt(length))
    torch.testing.assert_close(matrix_NN @ matrix_NN, torch.eye(length, dtype=torch.float64))


@pytest.mark.parametrize(("num_rows", "num_columns"), [(30, 60), (60, 60), (150, 60), (30, 59), (150, 59), (1, 1)])
def test_random_rows(num_rows: int, num_columns: int) -> None:
    rows = RandomRows(num_rows, num_columns, draw, dtype=torch.float64, device=CPU)
    matrix_RD = rows.times(torch.eye(num_columns, dtype=torch.float64)).T
    transposed_RD = rows.transposed_times(torch.eye(num_rows, dtype=torch.float64))
    torch.testing.assert_close(matrix_RD, transposed_RD)
    torch.testing.assert_close(matrix_RD.norm(dim=1), torch.ones(num_rows, dtype=torch.float64))
    largest = float(torch.linalg.eigvalsh(matrix_RD @ matrix_RD.T)[-1])
    assert largest <= math.ceil(num_rows / num_columns) * (1 + 1e-9 if num_columns == 60 else 1.1)


def test_random_rows_look_gaussian() -> None:
    rows = RandomRows(200, 5_000, draw, dtype=torch.float64, device=CPU)
    for model_D in (torch.ones(5_000).double(), torch.arange(5_000).double(), torch.eye(1, 5_000).double()[0]):
        image_R = rows.times(model_D / model_D.norm()) * math.sqrt(5_000)
        assert image_R.square().mean() == pytest.approx(1.0, abs=0.3)
        assert image_R.mean().abs() < 0.3
