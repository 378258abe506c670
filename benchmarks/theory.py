"""What the papers' theorems say, computed: tables and pictures of docs/explanation/*-theory.md.

    .venv/bin/python benchmarks/theory.py

Panacea's Theorem III.1 by alternating least squares, III.2 and III.3 by Monte Carlo, Sheaf-FMTL's Theorem 1 by
gradient descent on a small problem, FedAux's Theorems 3.1 and 3.2 on drawn embeddings. Nothing is trained on data; it
takes seconds. Writes benchmarks/results/theory_*.md and docs/pictures/theory_*.png. The same functions are tested in
tests/theory.

Shape legend: N clients (in FedAux nodes), D parameters (channels), K channels of embeddings, M attacked clients, E
edges.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fl_lightning.kernels.kernel_smoothing import kernel_smooth
from fl_lightning.models.projection_gcn import projection_scores, sequence_windows

ROOT = Path(__file__).parents[1]


def random_generator(seed: int) -> torch.Generator:
    """A generator for draws in double precision."""
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, generator: torch.Generator) -> Tensor:
    """Independent N(0, 1) in double precision."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


# ---------------------------------------------------------------- Panacea, Theorems III.1 to III.3


def aggregation(adjacency_NN: Tensor, num_layers: int) -> Tensor:
    """G of Θ = W V G: every client's mean over itself and its neighbors, ``num_layers`` times; columns sum to one.

    (The paper's definition makes the rows sum to one; its Property III.2, which the proofs use, needs the columns.)
    """
    own_NN = adjacency_NN.double() + torch.eye(len(adjacency_NN), dtype=torch.float64)
    return torch.linalg.matrix_power(own_NN / own_NN.sum(dim=0), num_layers)


def components(adjacency_NN: Tensor) -> Tensor:
    """The connected component of each client, (N,)."""
    count = len(adjacency_NN)
    reach_NN = torch.linalg.matrix_power(adjacency_NN.double() + torch.eye(count, dtype=torch.float64), count) > 0
    return reach_NN.to(torch.int8).argmax(dim=1)


def attacked_risk(
    g_NN: Tensor, attacked: int, num_parameters: int, num_channels: int, draws: int, component_N: Tensor | None = None
) -> float:
    """The mean risk over draws of W*, V* and V_0, where the first ``attacked`` clients give no gradient.

    Args:
        g_NN: G; the identity for pFedHN.
        attacked: m.
        num_parameters: d.
        num_channels: k.
        draws: Of the expectation.
        component_N: Draw V* alike in each component, so that V* G = V* as the paper assumes; None for independent ones.
    """
    count, random, total = len(g_NN), random_generator(0), 0.0
    p, q = g_NN[:, attacked:], g_NN[:, :attacked]
    left_over = (torch.eye(count, dtype=torch.float64) - p @ torch.linalg.pinv(p)) @ q
    for _ in range(draws):
        weight = normal(num_parameters, num_channels, generator=random)
        true = normal(num_channels, count, generator=random)
        start = normal(num_channels, count, generator=random)
        if component_N is not None:
            true = true[:, component_N]
        total += float((weight @ (true - start) @ left_over).square().sum()) / count
    return total / draws


def printed_risk(g_NN: Tensor, attacked: int, num_parameters: int, num_channels: int) -> float:
    """The risk of Theorem III.3; for the identity that of Theorem III.2, 2 d k m / n."""
    p, q = g_NN[:, attacked:], g_NN[:, :attacked]
    left_over = q - p @ torch.linalg.pinv(p) @ q
    return 2 * num_parameters * num_channels / len(g_NN) * float(left_over.square().sum())


def least_risk(models_DN: Tensor, g_NN: Tensor, num_channels: int, steps: int = 300) -> float:
    """The least ‖Θ* - W V G‖² / ‖Θ*‖² over W and V, found by alternating least squares from a random start.

    Args:
        models_DN: Θ*, the best model of each client in a column.
        g_NN: G; the identity for pFedHN.
        num_channels: k, the columns of W.
        steps: Of alternating least squares.
    """
    inverse_NN = torch.linalg.pinv(g_NN)
    embeddings_KN = normal(num_channels, len(g_NN), generator=random_generator(1))
    weight_DK = models_DN @ torch.linalg.pinv(embeddings_KN @ g_NN)
    for _ in range(steps):
        embeddings_KN = torch.linalg.pinv(weight_DK) @ models_DN @ inverse_NN
        weight_DK = models_DN @ torch.linalg.pinv(embeddings_KN @ g_NN)
    return float((models_DN - weight_DK @ embeddings_KN @ g_NN).square().sum() / models_DN.square().sum())


def truncation_risk(models_DN: Tensor, num_channels: int) -> float:
    """‖Θ* - Θ*_k‖² / ‖Θ*‖² of the best approximation of rank k, which is Theorem III.1's optimum."""
    squared = torch.linalg.svdvals(models_DN).square()
    return float(squared[num_channels:].sum() / squared.sum())


def client_graph(count: int, edge_probability: float, seed: int = 0) -> Tensor:
    """A random graph of clients, (N, N) of zeros and ones."""
    drawn = torch.rand(count, count, generator=random_generator(seed)) < edge_probability
    upper = drawn.triu(1).double()
    return upper + upper.T


# ---------------------------------------------------------------- Sheaf-FMTL, Theorem 1


class Descent(NamedTuple):
    """Gradient descent on Ψ by eqs. 18 and 19.

    Attributes:
        objective: Ψ before every step.
        squared_gradients: ‖∇Ψ‖² before every step.
        bound: (Ψ_0 - inf Ψ) / ρ with ρ from the curvatures that were met, where inf Ψ is taken as 0; inf where a step
            was too large for its curvature.
    """

    objective: list[float]
    squared_gradients: list[float]
    bound: float


def sheaf_descent(
    theta_ND: Tensor,
    maps_2ERD: Tensor,
    edges: Sequence[tuple[int, int]],
    target_ND: Tensor,
    *,
    coupling: float,
    step: float,
    map_step: float,
    num_steps: int,
) -> Descent:
    """Minimize Ψ = Σ_i ½ ‖θ_i - t_i‖² + λ/2 Σ_edges ‖P_ij θ_i - P_ji θ_j‖², of whose losses L = 1.

    Args:
        theta_ND: The models at first.
        maps_2ERD: P_ij and P_ji of every edge.
        edges: (i, j) of every edge.
        target_ND: t.
        coupling: λ.
        step: α.
        map_step: η.
        num_steps: K.
    """
    ends_2E = torch.tensor(edges).T
    theta, maps = theta_ND.clone().requires_grad_(), maps_2ERD.clone().requires_grad_()

    def psi() -> Tensor:
        near, far = torch.einsum("xerd,xed->xer", maps, theta[ends_2E])
        return (theta - target_ND).square().sum() / 2 + coupling / 2 * (near - far).square().sum()

    objective, squared, rates = [], [], []
    for _ in range(num_steps):
        value = psi()
        of_theta, of_maps = torch.autograd.grad(value, (theta, maps))
        objective.append(value.item())
        squared.append((of_theta.square().sum() + of_maps.square().sum()).item())
        curvature = 1 + coupling * largest_eigenvalue(maps.detach(), ends_2E, len(theta))
        theta = (theta - step * of_theta).detach().requires_grad_()
        of_maps = torch.autograd.grad(psi(), maps)[0]
        length = theta.detach().square().sum(dim=1)[ends_2E].sum(dim=0).max().item()
        maps = (maps - map_step * of_maps).detach().requires_grad_()
        rates += [step * (1 - step * curvature / 2), map_step * (1 - map_step * coupling * length / 2)]
    rho = min(rates)
    return Descent(objective, squared, objective[0] / rho if rho > 0 else float("inf"))


def largest_eigenvalue(maps_2ERD: Tensor, ends_2E: Tensor, num_clients: int) -> float:
    """The largest eigenvalue of the sheaf Laplacian P^T P."""
    _, num_edges, num_rows, num_columns = maps_2ERD.shape
    whole = maps_2ERD.new_zeros(num_edges, num_rows, num_clients, num_columns)
    edge = torch.arange(num_edges)
    whole[edge, :, ends_2E[0]] += maps_2ERD[0]
    whole[edge, :, ends_2E[1]] -= maps_2ERD[1]
    return float(torch.linalg.matrix_norm(whole.reshape(num_edges * num_rows, -1), ord=2)) ** 2


def small_sheaf(num_steps: int, step: float = 0.02, map_step: float = 0.002) -> Descent:
    """Six clients on a ring, four parameters, maps of two rows, λ = 1."""
    random = random_generator(0)
    edges = [(client, (client + 1) % 6) for client in range(6)]
    theta, target = normal(6, 4, generator=random), 2 * normal(6, 4, generator=random)
    maps = normal(2, len(edges), 2, 4, generator=random) / 2
    return sheaf_descent(theta, maps, edges, target, coupling=1.0, step=step, map_step=map_step, num_steps=num_steps)


def counter_example(num_steps: int) -> Descent:
    """Within Theorem 1's two conditions, and Ψ grows: N = 2, L = 1, λ = 4, P = 1, α = 0.9 < 1, η = 1e-9 < 2/(λ D²).

    The models grow 7.1-fold in an iteration, so that D² = 2 · 7.1⁸ bounds them over four.
    """
    theta = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    maps = torch.ones(2, 1, 1, 1, dtype=torch.float64)
    settings = {"coupling": 4.0, "step": 0.9, "map_step": 1e-9}
    return sheaf_descent(theta, maps, [(0, 1)], torch.zeros_like(theta), num_steps=num_steps, **settings)


# ---------------------------------------------------------------- FedAux, Theorems 3.1 and 3.2


def gradient_cosines(bandwidth: float, draws: int) -> list[float]:
    """Cosines of -∂loss/∂a with the direction Σ a on the unit sphere, which Theorem 3.1 says it has.

    200 centered embeddings of 8 channels with variances from 4 to 0.5, a linear softmax head on [h, z], cross entropy.
    """
    cosines = []
    for draw in range(draws):
        random = random_generator(draw)
        h = normal(200, 8, generator=random) * torch.linspace(4, 0.5, 8, dtype=torch.float64).sqrt()
        h = h - h.mean(dim=0)
        label = torch.randint(4, (200,), generator=random)
        head = normal(16, 4, generator=random) / 4
        a = torch.nn.functional.normalize(normal(8, generator=random), dim=0).requires_grad_()
        everyone = torch.ones(200, dtype=torch.bool)
        z = kernel_smooth(h, projection_scores(h, a), bandwidth=bandwidth, mask_N=everyone, tolerance=1e-9)
        loss = torch.nn.functional.cross_entropy(torch.cat([h, z], dim=1) @ head, label)
        descent, unit = -torch.autograd.grad(loss, a)[0], a.detach()
        covariance = h.T @ h / len(h)
        descent, oja = (v - (v @ unit) * unit for v in (descent, covariance @ unit))
        cosines.append(torch.nn.functional.cosine_similarity(descent, oja, dim=0).item())
    return cosines


def sorting_error(bandwidth: float) -> float:
    """Theorem 3.2: relative distance of Conv1D after smoothing from Conv1D after sorting, 100 nodes, 8 channels."""
    random = random_generator(0)
    h, a = normal(100, 8, generator=random), normal(8, generator=random)
    kernel = normal(24, 8, generator=random)
    score = projection_scores(h, a)
    weight = torch.exp(-(((score[:, None] - score) / bandwidth) ** 2))
    order = score.argsort()
    smoothed, sorted_ = (weight @ h / weight.sum(dim=1, keepdim=True))[order], h[order]
    convolved = sequence_windows(sorted_, 3) @ kernel
    return float((sequence_windows(smoothed, 3) @ kernel - convolved).norm() / convolved.norm())


# ---------------------------------------------------------------- pages

NUM_CLIENTS, ATTACKED, PARAMETERS, CHANNELS = 30, 6, 20, 5
PROBABILITIES = (0.0, 0.05, 0.1, 0.2, 0.4, 1.0)
BANDWIDTHS = (2.0, 1.0, 0.3, 0.1, 0.03)


def main() -> None:
    """Write the tables and the pictures."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def keep(name: str, lines: Sequence[str]) -> None:
        (ROOT / "benchmarks" / "results" / f"theory_{name}.md").write_text("\n".join(lines) + "\n")
        pyplot.tight_layout()
        pyplot.savefig(ROOT / "docs" / "pictures" / f"theory_{name}.png", dpi=120)
        pyplot.close()

    size = (PARAMETERS, CHANNELS)
    models_DN = normal(PARAMETERS, NUM_CLIENTS, generator=random_generator(0))
    lines = ["| probability of an edge | rank of G | least risk | printed |", "|---|---|---|---|"]
    for probability in PROBABILITIES:
        g = aggregation(client_graph(NUM_CLIENTS, probability), 1)
        risks = least_risk(models_DN, g, CHANNELS), truncation_risk(models_DN, CHANNELS)
        lines.append(f"| {probability:g} | {int(torch.linalg.matrix_rank(g))} | {risks[0]:.3f} | {risks[1]:.3f} |")
    (ROOT / "benchmarks" / "results" / "theory_panacea_optimum.md").write_text("\n".join(lines) + "\n")

    lines = ["| probability of an edge | printed | Monte Carlo | Monte Carlo, V* G = V* |", "|---|---|---|---|"]
    rows = []
    for probability in PROBABILITIES:
        graph = client_graph(NUM_CLIENTS, probability)
        g = aggregation(graph, 1)
        drawn = [attacked_risk(g, ATTACKED, *size, draws=400, component_N=c) for c in (None, components(graph))]
        rows.append([printed_risk(g, ATTACKED, *size), *drawn])
        lines.append(f"| {probability:g} | " + " | ".join(f"{value:.1f}" for value in rows[-1]) + " |")
    pyplot.figure(figsize=(6, 3.5))
    for label, values in zip(
        ("printed", "Monte Carlo", "Monte Carlo, V* G = V*"), zip(*rows, strict=True), strict=True
    ):
        pyplot.plot(PROBABILITIES, values, marker="o", label=label)
    pyplot.xlabel("probability of an edge between two clients")
    pyplot.ylabel("expected risk")
    pyplot.yscale("symlog", linthresh=0.1)
    pyplot.legend()
    keep("panacea", lines)

    descents = {"small steps": small_sheaf(4000), "counterexample": counter_example(4)}
    lines = ["| K | K · mean ‖∇Ψ‖² | bound |", "|---|---|---|"]
    small = descents["small steps"]
    sums = torch.tensor(small.squared_gradients).cumsum(0)
    lines += [f"| {k} | {sums[k - 1]:.1f} | {small.bound:.1f} |" for k in (10, 100, 1000, 4000)]
    values = ", ".join(f"{value:.3g}" for value in descents["counterexample"].objective)
    lines += ["", f"Ψ of the counterexample, step by step: {values}."]
    pyplot.figure(figsize=(6, 3.5))
    count = torch.arange(1, len(sums) + 1)
    pyplot.loglog(count, sums / count, label="mean ‖∇Ψ‖² of K steps")
    pyplot.loglog(count, small.bound / count, linestyle="--", label="bound, proportional to 1/K")
    pyplot.xlabel("K")
    pyplot.legend()
    keep("sheaf_fmtl", lines)

    lines = ["| σ | mean cosine with Σ a | positive, of 30 | error of Theorem 3.2 |", "|---|---|---|---|"]
    cosines = [gradient_cosines(bandwidth, 30) for bandwidth in BANDWIDTHS]
    errors = [sorting_error(bandwidth) for bandwidth in BANDWIDTHS]
    for bandwidth, those, error in zip(BANDWIDTHS, cosines, errors, strict=True):
        positive = sum(value > 0 for value in those)
        lines.append(f"| {bandwidth:g} | {sum(those) / len(those):+.2f} | {positive} | {error:.2g} |")
    _, (left, right) = pyplot.subplots(1, 2, figsize=(8, 3.5))
    left.boxplot(cosines, tick_labels=[f"{bandwidth:g}" for bandwidth in BANDWIDTHS])
    left.axhline(1, linestyle="--")
    left.set_xlabel("σ")
    left.set_ylabel("cosine of -gradient and Σ a")
    narrow = [10 ** (-power / 2) for power in range(10)]
    right.loglog(narrow, [sorting_error(bandwidth) for bandwidth in narrow], marker="o")
    right.set_xlabel("σ")
    right.set_ylabel("distance from sorting, relative")
    keep("fedaux", lines)


if __name__ == "__main__":
    main()
