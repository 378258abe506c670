import torch

from fl_lightning.kernels.lanczos import largest_eigenvalue


def test_it_is_bounded_closely() -> None:
    random = torch.Generator().manual_seed(0)
    for _ in range(10):
        square_DD = torch.randn(60, 60, dtype=torch.float64, generator=random)
        matrix_DD = square_DD @ square_DD.T
        start_D = torch.randn(60, dtype=torch.float64, generator=random)
        exact = float(torch.linalg.eigvalsh(matrix_DD)[-1])
        assert 0.99 * exact <= largest_eigenvalue(lambda v, m=matrix_DD: m @ v, start_D, 16) <= 1.2 * exact


def test_an_eigenvector_ends_it() -> None:
    assert largest_eigenvalue(lambda vector: 3 * vector, torch.tensor([2.0, 0.0]), 16) == 3
