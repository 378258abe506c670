"""Neural sheaf diffusion on the collaboration graph.

FedSheafHN (Liang et al., "Personalized Subgraph Federated Learning with Sheaf Collaboration", ECAI 2025), eqs. (5)
to (9), after Bodnar et al., "Neural Sheaf Diffusion", NeurIPS 2022. Departures: the skip connection has a learnable
gain that starts at the paper's 1, as in Bodnar et al., and D is regularized before it is inverted.

Shape legend: C clients (nodes), E incident pairs (columns of ``edge_index_2E``), S stalk dimension, H hidden channels,
D input channels. Column (n, m) stands for node n on the edge e = {n, m} and carries the restriction map F of n in e.
A square block is stored as a matrix ``(S, S)``, a diagonal one as its diagonal ``(S,)``.
"""

from collections.abc import Callable
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from fl_lightning.kernels.autograd import first_derivative_only
from fl_lightning.relations.edges import opposite_pairs


class _InverseSquareRoot(torch.autograd.Function):
    """(A + offset I)^(-1/2) of symmetric positive semidefinite A, differentiable at repeated eigenvalues.

    The derivative of eigenvectors divides by differences of eigenvalues; that of the matrix function need not
    (Daleckii and Krein): with s = (eigenvalue + offset)^(-1/2) its divided difference is -(s_i s_j)^2 / (s_i + s_j).
    """

    @staticmethod
    def forward(ctx: Any, block_CSS: Tensor, offset: float) -> Tensor:
        eigenvalue_CS, vector_CSS = torch.linalg.eigh(block_CSS)
        root_CS = (eigenvalue_CS.clamp_min(0.0) + offset).rsqrt()
        ctx.save_for_backward(root_CS, vector_CSS)
        inverse_root_CSS: Tensor = (vector_CSS * root_CS.unsqueeze(-2)) @ vector_CSS.mT
        return inverse_root_CSS

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, gradient_CSS: Tensor) -> tuple[Tensor, None]:
        root_CS, vector_CSS = ctx.saved_tensors
        row_CS1, column_C1S = root_CS.unsqueeze(-1), root_CS.unsqueeze(-2)
        divided_CSS = -(row_CS1 * column_C1S).square() / (row_CS1 + column_C1S)
        symmetric_CSS = (gradient_CSS + gradient_CSS.mT) / 2
        return vector_CSS @ (divided_CSS * (vector_CSS.mT @ symmetric_CSS @ vector_CSS)) @ vector_CSS.mT, None


def inverse_square_root(blocks: Tensor, offset: float) -> Tensor:
    """(A + offset I)^(-1/2) of positive semidefinite blocks ``(C, S, S)``, or of diagonal ones ``(C, S)``."""
    if blocks.dim() == 2:
        return (blocks + offset).rsqrt()
    root: Tensor = _InverseSquareRoot.apply(blocks, offset)  # type: ignore[no-untyped-call]
    return root


def _times(blocks: Tensor, x_BSH: Tensor) -> Tensor:
    return blocks.unsqueeze(-1) * x_BSH if blocks.dim() == 2 else blocks @ x_BSH


def _transposed(blocks: Tensor) -> Tensor:
    return blocks if blocks.dim() == 2 else blocks.mT


def rotations(numbers_ESS: Tensor) -> Tensor:
    """Cayley transform (I - A)(I + A)^(-1) of the skew part A of each matrix: orthogonal with determinant 1."""
    skew_ESS = numbers_ESS - numbers_ESS.mT
    identity_SS = torch.eye(skew_ESS.shape[-1], dtype=skew_ESS.dtype, device=skew_ESS.device)
    rotation_ESS: Tensor = torch.linalg.solve(identity_SS + skew_ESS, identity_SS - skew_ESS)  # the factors commute
    return rotation_ESS


class _Restriction(NamedTuple):
    """One family of restriction maps: how many axes of S numbers it has, F of those numbers, and F^T F of F."""

    num_axes: int
    maps: Callable[[Tensor], Tensor]
    gram: Callable[[Tensor], Tensor]


_RESTRICTIONS = {
    "diagonal": _Restriction(1, lambda numbers: numbers, torch.square),
    "bundle": _Restriction(2, rotations, lambda maps_ESS: torch.ones_like(maps_ESS[..., 0])),
    "general": _Restriction(2, lambda numbers: numbers, lambda maps_ESS: maps_ESS.mT @ maps_ESS),
}


def sheaf_laplacian(maps: Tensor, edge_index_2E: Tensor, num_clients: int) -> Tensor:
    """The sheaf Laplacian of eq. (5) as a dense matrix, for inspection, tests and plots; training does not build it.

    L_nn is the sum over the edges e of n of F(n, e)^T F(n, e), and L_nm is -F(n, e)^T F(m, e).

    Shapes:
        maps ``(E, S, S)`` or diagonals ``(E, S)``; edge_index_2E ``(2, E)``; result ``(C * S, C * S)``.
    """
    maps_ESS = maps.diag_embed() if maps.dim() == 2 else maps
    stalk_dimension = maps_ESS.shape[-1]
    laplacian_CCSS = maps.new_zeros(num_clients, num_clients, stalk_dimension, stalk_dimension)
    opposite_E = opposite_pairs(edge_index_2E, num_clients)
    for (n, m), map_n, map_m in zip(edge_index_2E.T.tolist(), maps_ESS, maps_ESS[opposite_E], strict=True):
        laplacian_CCSS[n, n] += map_n.T @ map_n
        laplacian_CCSS[n, m] -= map_n.T @ map_m
    return laplacian_CCSS.transpose(1, 2).reshape(num_clients * stalk_dimension, -1)


class Sheaf(NamedTuple):
    """Restriction maps on a graph: ``maps (E, S[, S])``, ends of the pairs ``(E,)``, D^(-1/2) ``(C, S[, S])``."""

    maps: Tensor
    source_E: Tensor
    opposite_E: Tensor
    scale: Tensor

    def normalized_laplacian(self, x_CSH: Tensor) -> Tensor:
        """Delta x = D^(-1/2) L D^(-1/2) x of eq. (6), computed along the edges; 0 at a client without edges."""
        scaled_CSH = _times(self.scale, x_CSH)
        # index_select rather than indexing: the backward of indexing adds in no fixed order, even on a CPU. On a GPU
        # index_add is deterministic only under torch.use_deterministic_algorithms.
        on_edge_ESH = _times(self.maps, scaled_CSH.index_select(0, self.source_E))
        disagreement_ESH = on_edge_ESH - on_edge_ESH.index_select(0, self.opposite_E)
        pulled_back_ESH = _times(_transposed(self.maps), disagreement_ESH)
        return _times(self.scale, torch.zeros_like(x_CSH).index_add(0, self.source_E, pulled_back_ESH))


class SheafLearner(nn.Module):
    """Learn a sheaf from node representations: the numbers of each map are tanh(MLP([x_n || x_m])).

    The MLP has one hidden layer. Its first matrix acts on x_n and x_m by halves before they are gathered, which is
    the same sum without the concatenation of every pair.
    """

    def __init__(self, stalk_dimension: int, hidden_channels: int, restriction_map: str, offset: float) -> None:
        super().__init__()
        flat_channels = stalk_dimension * hidden_channels
        self.restriction_map = restriction_map
        self.shape = (stalk_dimension,) * _RESTRICTIONS[restriction_map].num_axes
        self.offset = offset
        self.own = nn.Linear(flat_channels, hidden_channels)
        self.other = nn.Linear(flat_channels, hidden_channels, bias=False)
        self.numbers = nn.Linear(hidden_channels, stalk_dimension ** len(self.shape))

    def forward(self, x_CSH: Tensor, edge_index_2E: Tensor, opposite_E: Tensor) -> Sheaf:
        """Return the sheaf on the graph whose opposite columns are ``opposite_E``."""
        source_E, target_E = edge_index_2E
        flat_CX = x_CSH.flatten(1)
        own_EH, other_EH = self.own(flat_CX).index_select(0, source_E), self.other(flat_CX).index_select(0, target_E)
        numbers_EX = self.numbers(functional.elu(own_EH + other_EH)).tanh()
        restriction = _RESTRICTIONS[self.restriction_map]
        maps = restriction.maps(numbers_EX.unflatten(1, self.shape))
        gram = restriction.gram(maps)
        diagonal = gram.new_zeros(len(x_CSH), *gram.shape[1:]).index_add(0, source_E, gram)
        return Sheaf(maps, source_E, opposite_E, inverse_square_root(diagonal, self.offset))


class _SheafLayer(nn.Module):
    """X <- (1 + tanh eps) X - ELU(Delta (I (x) W_1) X W_2), eqs. (7) and (8); eps has one number per stalk axis."""

    def __init__(self, stalk_dimension: int, hidden_channels: int) -> None:
        super().__init__()
        self.gain_S1 = nn.Parameter(torch.zeros(stalk_dimension, 1))
        self.stalk_mixing_SS = nn.Parameter(torch.eye(stalk_dimension))
        self.channel_mixing_HH = nn.Parameter(nn.init.orthogonal_(torch.empty(hidden_channels, hidden_channels)))

    def forward(self, x_CSH: Tensor, sheaf: Sheaf) -> Tensor:
        mixed_CSH = self.stalk_mixing_SS @ x_CSH @ self.channel_mixing_HH
        return (1 + self.gain_S1.tanh()) * x_CSH - functional.elu(sheaf.normalized_laplacian(mixed_CSH))


class SheafDiffusion(nn.Module):
    """Enrich client embeddings by diffusion along a learned sheaf: Linear, ELU, dropout, layers of eq. (8), Linear.

    Args:
        in_channels: Width of the embeddings.
        num_layers: Diffusion layers, at least 1.
        stalk_dimension: d, the numbers a restriction map acts on, at least 1.
        hidden_channels: h, the channels in each stalk dimension, at least 1.
        restriction_map: ``diagonal`` (d numbers), ``bundle`` (rotations; for d = 1 the only one is 1, so the sheaf is
            constant and nothing is learned) or ``general`` (any d x d matrix).
        linear: Keep the sheaf learned from the first layer's input; otherwise every layer learns its own.
        dropout: Fraction of the encoded channels dropped in training.
        out_channels: Width of the result; ``in_channels`` when not given.
        skip: Add the result, which then starts at a tenth, to the embeddings: eq. 8's residual in their own space.
        offset: Added to the eigenvalues of D before inversion. It bounds the gradient where all maps of a client are
            close to 0; the eigenvalues of Delta stay in [0, 2].

    Shapes:
        x_CD ``(C, in_channels)``; edge_index_2E ``(2, E)``, undirected, without self loops; result
        ``(C, out_channels)``.

    Raises:
        ValueError: A setting is out of range, or (in ``forward``) the edge index is not undirected.
    """

    def __init__(
        self,
        in_channels: int = 128,
        *,
        num_layers: int = 2,
        stalk_dimension: int = 1,
        hidden_channels: int = 20,
        restriction_map: Literal["diagonal", "bundle", "general"] = "diagonal",
        linear: bool = False,
        dropout: float = 0.0,
        out_channels: int | None = None,
        skip: bool = False,
        offset: float = 1e-3,
    ) -> None:
        super().__init__()
        if skip and out_channels not in (None, in_channels):
            raise ValueError(f"skip adds to the {in_channels} embedding channels, so out_channels must not differ")
        self.skip = skip
        if restriction_map not in _RESTRICTIONS:
            raise ValueError(f"restriction_map={restriction_map!r} is unknown. Choose one of {sorted(_RESTRICTIONS)}.")
        sizes = {"num_layers": num_layers, "stalk_dimension": stalk_dimension, "hidden_channels": hidden_channels}
        if min(sizes.values()) < 1 or offset <= 0:
            raise ValueError(f"{sizes} and offset={offset}: the first three must be at least 1, offset above 0.")
        flat_channels = stalk_dimension * hidden_channels
        self.encoder = nn.Sequential(
            nn.Linear(in_channels, flat_channels),
            nn.ELU(),
            nn.Dropout(dropout),
            nn.Unflatten(1, (stalk_dimension, hidden_channels)),
        )
        self.learners = nn.ModuleList(
            SheafLearner(stalk_dimension, hidden_channels, restriction_map, offset)
            for _ in range(1 if linear else num_layers)
        )
        self.layers = nn.ModuleList(_SheafLayer(stalk_dimension, hidden_channels) for _ in range(num_layers))
        self.decoder = nn.Linear(flat_channels, in_channels if out_channels is None else out_channels)
        if skip:
            with torch.no_grad():
                self.decoder.weight.mul_(0.1)

    def forward(self, x_CD: Tensor, edge_index_2E: Tensor) -> Tensor:
        """Return the enriched embeddings, one row per client."""
        opposite_E = opposite_pairs(edge_index_2E, len(x_CD))
        x_CSH = self.encoder(x_CD)
        for layer, learner in zip_longest(self.layers, self.learners):
            if learner is not None:
                sheaf = learner(x_CSH, edge_index_2E, opposite_E)
            x_CSH = layer(x_CSH, sheaf)
        enriched: Tensor = self.decoder(x_CSH.flatten(1))
        return x_CD + enriched if self.skip else enriched
