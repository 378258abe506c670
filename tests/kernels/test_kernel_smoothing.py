import math

import pytest
import torch
from torch import Tensor

from fl_lightning.kernels import kernel_smoothing
from fl_lightning.kernels.cosine_series import CosineSeries
from fl_lightning.kernels.kernel_smoothing import kernel_smooth, smoothing_series

BANDWIDTHS = [0.01, 0.05, 0.1, 0.5, 1.0, 3.0, 10.0, 1e4]


def dense(h_ND: Tensor, score_N: Tensor, bandwidth: float) -> Tensor:
    kernel_NN = (-(((score_N[:, None] - score_N) / bandwidth) ** 2)).exp()
    return kernel_NN @ h_ND / kernel_NN.sum(dim=1, keepdim=True)


def scores(placement: str, num_nodes: int) -> Tensor:
    generator = torch.Generator().manual_seed(num_nodes)
    if placement == "uniform":
        return torch.rand(num_nodes, generator=generator, dtype=torch.float64) * 2 - 1
    if placement == "narrow":
        return (torch.randn(num_nodes, generator=generator, dtype=torch.float64) * 0.05 + 0.3).clamp(-1, 1)
    one_far = torch.ones(num_nodes, dtype=torch.float64)
    one_far[num_nodes // 2] = -1
    return one_far


def embeddings(num_nodes: int, channels: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(num_nodes + 1)
    return torch.randn(num_nodes, channels, generator=generator, dtype=torch.float64)


def value_and_gradients(form: object, h_ND: Tensor, score_N: Tensor, *, weight_ND: Tensor) -> tuple[Tensor, ...]:
    inputs = h_ND.clone().requires_grad_(), score_N.clone().requires_grad_()
    z_ND = form(*inputs)  # type: ignore[operator]
    return z_ND.detach(), *torch.autograd.grad(z_ND, inputs, weight_ND.to(z_ND.dtype))


@pytest.mark.parametrize("error", [1e-3, 1e-6, 1e-10])
@pytest.mark.parametrize("bandwidth", BANDWIDTHS)
def test_series_keeps_the_permitted_error_without_waste(bandwidth: float, error: float) -> None:
    series = CosineSeries.approximating(bandwidth, error)
    x = torch.linspace(-2, 2, 4_001, dtype=torch.float64, requires_grad=True)
    kernel = (-((x / bandwidth) ** 2)).exp()
    (slope,) = torch.autograd.grad(kernel.sum(), x)

    def actual(series: CosineSeries) -> tuple[Tensor, Tensor]:
        weighted_P = series.weights(x.device) * series.features(torch.zeros(1, dtype=torch.float64))[0]
        features = series.features(x)
        return (features @ weighted_P - kernel).abs().max(), (
            series.derivative(features) @ weighted_P - slope
        ).abs().max() / slope.abs().max()

    assert all(value <= error * (1 + 1e-9) + 1e-14 for value in actual(series))
    fewer = max(1, int(0.85 * series.num_frequencies) - 2)
    assert actual(series._replace(num_frequencies=fewer))[1] > error


@pytest.mark.parametrize("placement", ["uniform", "narrow", "one far"])
@pytest.mark.parametrize("tolerance", [1e-3, 1e-6, 1e-9])
@pytest.mark.parametrize("bandwidth", BANDWIDTHS)
def test_error_is_within_the_tolerance(bandwidth: float, tolerance: float, placement: str) -> None:
    num_nodes = 1800 if bandwidth < 0.05 else 500
    h, score, weight = embeddings(num_nodes), scores(placement, num_nodes), embeddings(num_nodes).flip(0)
    assert smoothing_series(bandwidth, num_nodes, tolerance) is not None

    z, grad_h, grad_score = value_and_gradients(
        lambda h, s: kernel_smooth(h, s, bandwidth=bandwidth, tolerance=tolerance), h, score, weight_ND=weight
    )
    exact_z, exact_grad_h, exact_grad_score = value_and_gradients(
        lambda h, s: dense(h, s, bandwidth), h, score, weight_ND=weight
    )

    slope = 2 / bandwidth * min(1, 2 / bandwidth)
    assert (z - exact_z).abs().max() <= tolerance * h.abs().max()
    assert (grad_h - exact_grad_h).abs().max() <= tolerance * weight.abs().max()
    assert (grad_score - exact_grad_score).abs().max() <= tolerance * slope * 3 * h.abs().max() * weight.abs().max()


@pytest.mark.parametrize(("dtype", "epsilon"), [(torch.float32, 2**-23), (torch.bfloat16, 2**-8)])
@pytest.mark.parametrize(
    ("bandwidth", "num_nodes"), [(0.01, 1500), *((bandwidth, n) for bandwidth in BANDWIDTHS for n in (40, 350))]
)
def test_low_precision_inputs_are_rounded_only_once(
    bandwidth: float, num_nodes: int, dtype: torch.dtype, epsilon: float
) -> None:
    h, score = embeddings(num_nodes).to(dtype), scores("uniform", num_nodes).to(dtype)
    inputs = h.double(), score.double()
    weight = embeddings(num_nodes).flip(0).to(dtype)

    z, grad_h, grad_score = value_and_gradients(
        lambda h, s: kernel_smooth(h, s, bandwidth=bandwidth), h, score, weight_ND=weight
    )
    exact = value_and_gradients(lambda h, s: dense(h, s, bandwidth), *inputs, weight_ND=weight.double())

    tolerance = max(1e-6, epsilon / 8)
    assert (z.dtype, grad_h.dtype, grad_score.dtype) == (dtype, dtype, dtype)
    torch.testing.assert_close(z.double(), exact[0], rtol=epsilon, atol=tolerance * float(h.abs().max()))
    torch.testing.assert_close(grad_h.double(), exact[1], rtol=epsilon, atol=tolerance * float(weight.abs().max()))
    torch.testing.assert_close(grad_score.double(), exact[2], rtol=epsilon, atol=20 * tolerance / bandwidth)


@pytest.mark.parametrize("device_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_nodes", [30, 300])
def test_autocast_does_not_coarsen_the_kernel(num_nodes: int, device_dtype: torch.dtype) -> None:
    h, score = embeddings(num_nodes).float().requires_grad_(), scores("uniform", num_nodes).float().requires_grad_()

    def run() -> tuple[Tensor, ...]:
        z = kernel_smooth(h, score, bandwidth=0.1)
        return z, *torch.autograd.grad(z.square().sum(), (h, score))

    plain = run()
    with torch.autocast("cpu", dtype=device_dtype):
        assert all(torch.equal(*pair) for pair in zip(run(), plain, strict=True))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("bandwidth", "is_dense"), [(1.0, False), (3.0, False), (0.2, True)])
def test_gradients_are_exact_twice(bandwidth: float, is_dense: bool, masked: bool) -> None:
    num_nodes = 45
    h, score = embeddings(num_nodes, 2).requires_grad_(), scores("uniform", num_nodes).requires_grad_()
    mask = torch.arange(num_nodes) % 7 != 3 if masked else None
    assert (smoothing_series(bandwidth, num_nodes) is None) == is_dense

    def smooth(h_ND: Tensor, score_N: Tensor) -> Tensor:
        return kernel_smooth(h_ND, score_N, bandwidth=bandwidth, mask_N=mask)

    assert torch.autograd.gradcheck(smooth, (h, score), fast_mode=True)
    assert torch.autograd.gradgradcheck(smooth, (h, score), fast_mode=True)
    reverse = torch.func.jacrev(smooth, argnums=(0, 1))(h.detach(), score.detach())
    plain = torch.autograd.functional.jacobian(smooth, (h, score))
    assert all(torch.allclose(*pair, atol=1e-12) for pair in zip(reverse, plain, strict=True))


@pytest.mark.parametrize("bandwidth", [0.2, 1.0])
def test_vmap_equals_a_loop(bandwidth: float) -> None:
    sizes = [45, 40, 6]
    h, score = embeddings(3 * 45).view(3, 45, 3).requires_grad_(), scores("uniform", 3 * 45).view(3, 45)
    score.requires_grad_()
    mask = torch.arange(45) < torch.tensor(sizes)[:, None]

    def smooth(h_ND: Tensor, score_N: Tensor, mask_N: Tensor) -> Tensor:
        return kernel_smooth(h_ND, score_N, bandwidth=bandwidth, mask_N=mask_N)

    def loss(h_ND: Tensor, score_N: Tensor, mask_N: Tensor) -> Tensor:
        return (smooth(h_ND, score_N, mask_N) ** 3).sum()

    stacked = torch.vmap(smooth)(h, score, mask)
    one_by_one = torch.stack([smooth(*client) for client in zip(h, score, mask, strict=True)])
    torch.testing.assert_close(stacked, one_by_one, atol=1e-12, rtol=0)

    outer = torch.autograd.grad(torch.vmap(loss)(h, score, mask).sum(), (h, score))
    inner = torch.vmap(torch.func.grad(loss, argnums=(0, 1)))(h.detach(), score.detach(), mask)
    looped = torch.autograd.grad((one_by_one**3).sum(), (h, score))
    torch.testing.assert_close(outer, looped, atol=1e-11, rtol=0)
    torch.testing.assert_close(inner, looped, atol=1e-11, rtol=0)

    shared_scores = torch.vmap(smooth, in_dims=(0, None, None))(h, score[0], mask[0])
    torch.testing.assert_close(shared_scores[0], stacked[0], atol=1e-12, rtol=0)


@pytest.mark.parametrize("bandwidth", [0.05, 1.0])
def test_padding_nodes_change_nothing_and_get_zeros(bandwidth: float) -> None:
    num_nodes, num_padded = 400, 70
    real = torch.ones(num_nodes + num_padded, dtype=torch.bool)
    real[torch.randperm(len(real), generator=torch.Generator().manual_seed(0))[:num_padded]] = False
    h, score, weight = embeddings(num_nodes), scores("narrow", num_nodes), embeddings(num_nodes).flip(0)
    padded = [torch.full((len(real), *x.shape[1:]), math.nan, dtype=x.dtype) for x in (h, score, weight)]
    for target, source in zip(padded, (h, score, weight), strict=True):
        target[real] = source

    alone = value_and_gradients(lambda h, s: kernel_smooth(h, s, bandwidth=bandwidth), h, score, weight_ND=weight)
    beside = value_and_gradients(
        lambda h, s: kernel_smooth(h, s, bandwidth=bandwidth, mask_N=real), *padded[:2], weight_ND=padded[2]
    )

    for without, with_padding in zip(alone, beside, strict=True):
        torch.testing.assert_close(with_padding[real], without, atol=1e-10, rtol=0)
        assert (with_padding[~real] == 0).all()


@pytest.mark.parametrize("num_nodes", [5, 300])
def test_a_client_of_padding_only_gets_zeros(num_nodes: int) -> None:
    nothing = torch.zeros(num_nodes, dtype=torch.bool)
    values = value_and_gradients(
        lambda h, s: kernel_smooth(h, s, bandwidth=1.0, mask_N=nothing),
        embeddings(num_nodes),
        scores("uniform", num_nodes),
        weight_ND=embeddings(num_nodes),
    )
    assert all((value == 0).all() for value in values)


@pytest.mark.parametrize("bandwidth", [0.1, 1.0])
def test_permuting_nodes_permutes_the_result(bandwidth: float) -> None:
    h, score = embeddings(400), scores("uniform", 400)
    order = torch.randperm(400, generator=torch.Generator().manual_seed(3))

    permuted = kernel_smooth(h[order], score[order], bandwidth=bandwidth)

    torch.testing.assert_close(permuted, kernel_smooth(h, score, bandwidth=bandwidth)[order], atol=1e-12, rtol=0)


@pytest.mark.parametrize("bandwidth", [0.05, 1.0])
def test_blocks_do_not_change_the_result(bandwidth: float, monkeypatch: pytest.MonkeyPatch) -> None:
    h, score, weight = embeddings(100), scores("uniform", 100), embeddings(100).flip(0)

    def run() -> tuple[Tensor, ...]:
        return value_and_gradients(lambda h, s: kernel_smooth(h, s, bandwidth=bandwidth), h, score, weight_ND=weight)

    whole = run()
    for numbers in (1, 20 * 33):
        monkeypatch.setattr(kernel_smoothing, "_BLOCK_NUMBERS", numbers)
        for blocked, unblocked in zip(run(), whole, strict=True):
            torch.testing.assert_close(blocked, unblocked, atol=1e-11, rtol=0)


def test_the_dense_form_would_not_fit_but_this_does() -> None:
    num_nodes = 60_000  # a kernel matrix of 29 GB
    h, score = embeddings(num_nodes, 2), scores("uniform", num_nodes)

    z, _, grad_score = value_and_gradients(
        lambda h, s: kernel_smooth(h, s, bandwidth=1.0), h, score, weight_ND=torch.ones_like(h)
    )

    weight_BN = (-((score[:20, None] - score) ** 2)).exp()
    torch.testing.assert_close(z[:20], weight_BN @ h / weight_BN.sum(1, keepdim=True), atol=1e-6, rtol=0)
    assert grad_score.isfinite().all()
    assert grad_score.abs().max() > 1e-3


def test_limits_of_the_bandwidth() -> None:
    """Identity where scores are distinct (Theorem 3.2's first step), the mean of all at the other end."""
    h = embeddings(300)
    score = torch.linspace(-1, 1, 300, dtype=torch.float64)[torch.randperm(300)]
    distance = [
        (kernel_smooth(h, score, bandwidth=bandwidth, tolerance=1e-9) - h).abs().max()
        for bandwidth in (0.02, 0.004, 0.001)
    ]

    assert distance[0] > distance[1] > distance[2]
    assert distance[2] < 1e-12
    torch.testing.assert_close(kernel_smooth(h, score, bandwidth=1e5), h.mean(0).expand(300, 3), atol=1e-6, rtol=0)
    tied = kernel_smooth(h, torch.zeros_like(score), bandwidth=1e-3)
    torch.testing.assert_close(tied, h.mean(0).expand(300, 3), atol=1e-12, rtol=0)
    assert torch.equal(kernel_smooth(h[:1], score[:1], bandwidth=1.0), h[:1])


@pytest.mark.parametrize("bandwidth", [1e-300, 1e-12, 1e-4, 1e12, 1e200])
def test_extreme_bandwidths_are_finite(bandwidth: float) -> None:
    values = value_and_gradients(
        lambda h, s: kernel_smooth(h, s, bandwidth=bandwidth),
        embeddings(200),
        scores("uniform", 200),
        weight_ND=embeddings(200),
    )
    assert all(value.isfinite().all() for value in values)


def test_the_series_depends_on_bandwidth_and_tolerance_not_on_padding() -> None:
    lengths = [smoothing_series(bandwidth, 17_000).num_features for bandwidth in BANDWIDTHS]

    assert lengths[:6] == sorted(lengths[:6], reverse=True)
    assert smoothing_series(0.05, 400) == smoothing_series(0.05, 900_000)
    assert smoothing_series(1.0, 100, 1e-3).num_features < smoothing_series(1.0, 100, 1e-6).num_features
    assert smoothing_series(0.01, 1000) is None


@pytest.mark.parametrize("bandwidth", [0.0, -1.0, math.inf, math.nan])
def test_bandwidth_out_of_range(bandwidth: float) -> None:
    with pytest.raises(ValueError, match=rf"bandwidth={bandwidth} .* above 0 and finite.*1 is the paper's choice"):
        kernel_smooth(embeddings(4), scores("uniform", 4), bandwidth=bandwidth)


@pytest.mark.parametrize("tolerance", [0.0, -1e-6, 0.5, math.nan])
def test_tolerance_out_of_range(tolerance: float) -> None:
    with pytest.raises(ValueError, match=rf"tolerance={tolerance} must be in .*1e-6 suits"):
        kernel_smooth(embeddings(4), scores("uniform", 4), bandwidth=1.0, tolerance=tolerance)
