import torch

from fl_lightning.relations.time_warping import time_warping


def test_time_warping() -> None:
    series = torch.tensor([[1.0, 2, 3, 4, 5], [1, 1, 3, 5, 5], [2, 2, 2, 2, 2]], dtype=torch.float64)
    distance = time_warping(series)
    expected = [[0, 1.41421356, 3.87298335], [1.41421356, 0, 4.58257569], [3.87298335, 4.58257569, 0]]
    torch.testing.assert_close(distance, torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(time_warping(series + 3), distance)
