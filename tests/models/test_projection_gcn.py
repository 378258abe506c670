import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from fl_lightning.batches.base import single
from fl_lightning.batches.graphs import GraphCollator
from fl_lightning.kernels.kernel_smoothing import kernel_smooth
from fl_lightning.models import ProjectionGCN
from fl_lightning.models.projection_gcn import projection_scores, sequence_windows, sorted_rows

CPU = torch.device("cpu")
kinds = pytest.mark.parametrize(
    "settings",
    [
        {"masked": True, "num_layers": 1},
        {"masked": False, "num_layers": 3, "kernel_reads": "activation"},
        {"head_layers": 2, "bandwidth": 0.3},
        {"ordering": "hard", "sequence_kernel": 5},
        {"ordering": "hard", "kernel_reads": "activation"},
    ],
    ids=str,
)


@pytest.fixture
def collator(graphs) -> GraphCollator:
    return GraphCollator(graphs, device=CPU, dtype=torch.float64)


def build(**settings: object) -> ProjectionGCN:
    torch.manual_seed(0)
    return ProjectionGCN(6, 3, hidden_channels=4, **{"dropout": 0.0, **settings}).double()


def test_smoothed_embeddings_may_stay_whole(collator) -> None:
    """Dropout then leaves holes in the other half of the classifier's input alone, which is not read here."""
    batch, logits = single(collator([1])), []
    for settings in ({"dropout": 0.9}, {"dropout": 0.9, "drop_smoothed": False}, {"dropout": 0.0}):
        net = build(masked=False, num_layers=1, **settings).train()
        with torch.no_grad():
            net.head[0].weight[:, :4] = 0
        logits.append(net(batch).logits)
    dropped, kept, whole = logits

    torch.testing.assert_close(kept, whole)
    assert (dropped - whole).abs().max() > 1e-3


def embeddings(num_nodes: int, channels: int = 4, seed: int = 0) -> Tensor:
    return torch.randn(num_nodes, channels, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_by_hand(collator) -> None:
    """Eqs. 1 to 6, written down densely."""
    net, batch = build(masked=False, num_layers=1, bandwidth=0.5), single(collator([1]))
    h = net.convs[0](None, batch)
    cosine = (h / h.norm(dim=1, keepdim=True)) @ (net.projection / net.projection.norm())
    kernel = torch.exp(-((cosine[:, None] - cosine) ** 2) / 0.5**2)
    z = kernel @ h / kernel.sum(dim=1, keepdim=True)
    head = net.head[0]

    output = net(batch)

    torch.testing.assert_close(
        output.logits, torch.cat([h.relu(), z], dim=1) @ head.weight.T + head.bias, atol=1e-5, rtol=0
    )
    torch.testing.assert_close(output.embedding, h)


@kinds
def test_every_parameter_has_a_gradient(settings, collator) -> None:
    net, batch = build(**settings), single(collator([0]))
    weights = embeddings(len(batch.y), 3, seed=2)
    (net(batch).logits * weights).sum().backward()

    assert net.projection.grad.abs().min() > 0
    for name, parameter in net.named_parameters():
        assert parameter.grad.abs().sum() > 0, name


@kinds
def test_clients_at_once_are_clients_in_turn(settings, collator) -> None:
    clients = [0, 3, 4]  # 30, 12 and 8 nodes: most of the smallest is padding
    net, batch = build(**settings, dropout=0.4).train(), collator(clients)
    draw = torch.Generator().manual_seed(1)
    stacked = {
        name: torch.randn(3, *p.shape, generator=draw, dtype=p.dtype).requires_grad_()
        for name, p in net.named_parameters()
    }
    keys = torch.tensor([5, 6, 7])

    def logits(parameters, tensors) -> Tensor:
        one = batch.replace(tensors)
        return functional_call(net, parameters, (one,)).logits * one.example_mask[:, None]

    together = torch.vmap(logits)(stacked, batch.tensors() | {"key": keys})
    gradients = torch.autograd.grad(together.square().sum(), list(stacked.values()))

    for row, client in enumerate(clients):
        own = {name: t[row].detach().requires_grad_() for name, t in stacked.items()}
        alone = functional_call(net, own, (single(collator([client])).replace({"key": keys[row]}),)).logits
        torch.testing.assert_close(together[row, : len(alone)], alone, rtol=1e-7, atol=1e-9)
        expected = torch.autograd.grad(alone.square().sum(), list(own.values()))
        for of_all, of_one in zip(gradients, expected, strict=True):
            torch.testing.assert_close(of_all[row], of_one, rtol=1e-5, atol=1e-7)


def test_scores_are_cosines_and_their_gradient_is_finite_at_zero() -> None:
    h = embeddings(5)
    h[2] = 0.0
    h.requires_grad_()
    projection = embeddings(1)[0].requires_grad_()

    score = projection_scores(h, projection)
    score.sum().backward()

    torch.testing.assert_close(score.detach(), F.cosine_similarity(h, projection[None], dim=1).detach())
    assert score[2] == 0
    assert (h.grad[2] == 0).all()
    assert h.grad.isfinite().all()
    assert (projection_scores(h, 0 * projection) == 0).all()
    scaled = torch.autograd.grad(projection_scores(h, projection)[0], projection)[0] @ projection
    assert abs(float(scaled.detach())) < 1e-12  # the length of the vector does not matter


def test_gradient_of_the_projection(collator) -> None:
    net, batch = build(bandwidth=0.7), single(collator([2]))
    weights = embeddings(len(batch.y), 3, seed=2)

    def value(projection: Tensor) -> Tensor:
        parameters = dict(net.named_parameters()) | {"projection": projection}
        return (functional_call(net, parameters, (batch,)).logits * weights).sum()

    projection = net.projection.detach().clone().requires_grad_()
    (gradient,) = torch.autograd.grad(value(projection), projection)

    for direction in range(4):
        step = torch.zeros(4, dtype=torch.float64)
        step[direction] = 1e-4
        difference = (value(projection.detach() + step) - value(projection.detach() - step)) / 2e-4
        assert float(gradient[direction]) == pytest.approx(float(difference.detach()), rel=1e-3, abs=1e-6)


def test_projection_follows_the_covariance_for_a_wide_kernel() -> None:
    """Theorem 3.1: to first order in 1/σ², the gradient of a quadratic loss in the APV is a covariance times the APV.

    For embeddings of unit length, with scores s = h·a, a wide kernel gives z_v = (2/σ²) s_v Σ a + what all v share +
    O(σ^-4) with Σ the covariance of h, and the gradient of -½ Σ_v ‖z_v - mean z‖² is that of the linear term.
    """
    h = F.normalize(embeddings(40), dim=1)
    projection = F.normalize(embeddings(1, seed=3)[0], dim=0).requires_grad_()
    sigma = 60.0
    centered = h - h.mean(dim=0)
    covariance = centered.T @ centered / len(h)

    smoothed = kernel_smooth(h, projection_scores(h, projection), bandwidth=sigma, tolerance=1e-12)

    spread = smoothed - smoothed.mean(dim=0)
    linear = 2 / sigma**2 * (centered @ projection)[:, None] * (covariance @ projection)
    torch.testing.assert_close(spread, linear, rtol=0, atol=1e-3 * float(linear.detach().abs().max()))
    (gradient,) = torch.autograd.grad(-0.5 * spread.square().sum(), projection)
    (turn,) = torch.autograd.grad(-0.5 * linear.square().sum(), projection)
    tangential = turn - (turn @ projection) * projection.detach()  # the score does not see the vector's length
    torch.testing.assert_close(
        gradient, tangential.detach(), rtol=0, atol=1e-2 * float(tangential.detach().abs().max())
    )


@pytest.mark.parametrize("kernel_size", [1, 3, 5])
def test_windows_are_a_conv1d(kernel_size) -> None:
    sequence, weight = embeddings(7), embeddings(5 * kernel_size * 4, 1)[:, 0].view(5, 4, kernel_size)

    expected = F.conv1d(sequence.T[None], weight, padding=kernel_size // 2)[0].T

    flat = weight.permute(0, 2, 1).reshape(5, -1)
    torch.testing.assert_close(sequence_windows(sequence, kernel_size) @ flat.T, expected)


def test_sorting_puts_padding_last() -> None:
    h, score = embeddings(4), torch.tensor([0.5, -0.2, 0.1, -0.9], dtype=torch.float64)
    real = torch.tensor([True, True, True, False])

    rows, index = sorted_rows(h, score, real)

    torch.testing.assert_close(rows, torch.stack([h[1], h[2], h[0], torch.zeros(4, dtype=torch.float64)]))
    assert index.tolist() == [2, 0, 1, 3]


def test_narrow_kernel_and_conv1d_tend_to_the_sorted_sequence() -> None:
    """Theorem 3.2."""
    h, real = embeddings(12), torch.ones(12, dtype=torch.bool)
    score = torch.linspace(-0.9, 0.8, 12, dtype=torch.float64)[
        torch.randperm(12, generator=torch.Generator().manual_seed(0))
    ]
    hard = sequence_windows(sorted_rows(h, score, real)[0], 3)

    distances = []
    for sigma in (1.0, 0.3, 0.1, 0.05, 0.02):
        smoothed = kernel_smooth(h, score, bandwidth=sigma)
        distances.append(float((sequence_windows(sorted_rows(smoothed, score, real)[0], 3) - hard).norm()))

    assert distances == sorted(distances, reverse=True)
    assert distances[0] > 1
    assert distances[-1] < 1e-5


def test_hard_ordering_does_not_depend_on_the_order_of_nodes() -> None:
    h, projection = embeddings(9), embeddings(1, seed=5)[0]
    real, order = torch.ones(9, dtype=torch.bool), torch.randperm(9, generator=torch.Generator().manual_seed(0))

    def windows(rows: Tensor) -> Tensor:
        sequence, index = sorted_rows(rows, projection_scores(rows, projection), real)
        return sequence_windows(sequence, 3)[index]

    torch.testing.assert_close(windows(h[order]), windows(h)[order])


@pytest.mark.parametrize(
    "settings",
    [
        {"ordering": "soft"},
        {"kernel_reads": "nothing"},
        {"bandwidth": 0.0},
        {"tolerance": 0.0},
        {"sequence_kernel": 4},
        {"head_layers": 0},
        {"prune_below": -0.1},
        {"num_layers": 0},
    ],
    ids=str,
)
def test_impossible_settings_are_refused(settings) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        functools.partial(ProjectionGCN, 6, 3)(**settings)
