import pytest
import torch

from fl_lightning.kernels.low_rank_sum import LowRankSum

CPU = torch.device("cpu")


@pytest.mark.parametrize("max_rank", [1, 2, 5, 9])
def test_truncation_stays_within_its_bound(max_rank: int) -> None:
    random = torch.Generator().manual_seed(0)
    truncated = LowRankSum(40, 60, max_rank=max_rank, tolerance=0.0, dtype=torch.float64, device=CPU)
    exact = torch.zeros(40, 60, dtype=torch.float64)
    v_D = torch.randn(60, generator=random, dtype=torch.float64)
    for update in range(100):
        v_D = v_D + 0.1 * torch.randn(60, generator=random, dtype=torch.float64)
        u_R = torch.randn(40, generator=random, dtype=torch.float64)
        exact += torch.outer(u_R, v_D)
        truncated.add(u_R, v_D)
        error = (truncated.coefficient_BR.T @ truncated.basis_BD - exact).norm()
        assert error <= truncated.dropped + 1e-9
        assert truncated.num_used <= truncated.capacity
        if update == truncated.capacity:  # the first truncation is the best there is
            weights = torch.linalg.svdvals(exact - torch.outer(u_R, v_D))
            assert error == pytest.approx(float(weights[max_rank:].norm()))
    assert truncated.dropped > 0
    kept_KD = truncated.basis_BD[: truncated.num_orthonormal]
    torch.testing.assert_close(kept_KD @ kept_KD.T, torch.eye(len(kept_KD), dtype=torch.float64))
    torch.testing.assert_close(
        truncated.row_squares(), (truncated.coefficient_BR.T @ truncated.basis_BD).square().sum(dim=1)
    )


def test_orthonormal_in_float32_after_many_slow_updates() -> None:
    random = torch.Generator().manual_seed(0)
    kept = LowRankSum(50, 300, max_rank=8, tolerance=1e-6, dtype=torch.float32, device=CPU)
    v_D = torch.randn(300, generator=random)
    for _ in range(500):
        v_D += 1e-4 * torch.randn(300, generator=random)
        kept.add(torch.randn(50, generator=random), v_D)
    basis_KD = kept.basis_BD[: kept.num_orthonormal]
    torch.testing.assert_close(basis_KD @ basis_KD.T, torch.eye(len(basis_KD)), rtol=0, atol=1e-5)
