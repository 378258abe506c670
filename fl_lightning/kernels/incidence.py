"""From the nodes to the ends of edges and back, for many clients' graphs at once.

Shape legend: C clients, N nodes (padded to the largest client), E edges in both directions (padded likewise), D width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fl_lightning.kernels.autograd import quick
from fl_lightning.kernels.block_sparse import BlockSparse, block_matmul
from fl_lightning.kernels.edge_products import Edges


class Incidence:
    """Which nodes the edges of C graphs come from and lead to; ``operator.derived(Incidence)`` makes it once.

    Args:
        operator: Its entries off the diagonal that are not zero are the edges, from column to row.

    Attributes:
        counts: How often every edge of a sample counts, (C·E, 1); None if these are all edges.
    """

    def __init__(self, operator: BlockSparse) -> None:
        edges = operator.edges
        self.edges = edges
        self._sources, self._targets = (_ends(edges, nodes) for nodes in (edges.column, edges.row))
        self._counted = self._targets
        self.counts: Tensor | None = None
        if operator.totals is not None:
            count = operator.matrix.values()[edges.entry]
            self._counted = _ends(edges, edges.row, count)
            self.counts = edges.placed(count.unsqueeze(-1))
        attributes = operator.entries
        self.attributes = None if attributes is None else edges.placed(attributes[edges.entry])
        """What every edge has, (C·E, K), or None."""

    def sources(self, x_ND: Tensor, *, owner: Tensor) -> Tensor:
        """What the node that each edge comes from has, (E, D), 0 for padding; also on a stack and under ``vmap``."""
        return block_matmul(self._sources, x_ND, owner=owner)

    def targets(self, x_ND: Tensor, *, owner: Tensor) -> Tensor:
        """What the node that each edge leads to has, (E, D), 0 for padding; likewise."""
        return block_matmul(self._targets, x_ND, owner=owner)

    def totals(self, message_ED: Tensor, *, owner: Tensor) -> Tensor:
        """The sum over the edges that lead to each node, (N, D); padding is not read; likewise.

        In a sample of edges each counts as often as the operator says.
        """
        return block_matmul(self._counted, message_ED, transpose=True, owner=owner)

    def values(self, value_SK: Tensor, *, owner: Tensor) -> Tensor:
        """Constants of the edges of all clients, (C·E, K), as each client's, (E, K); likewise."""
        found: Tensor = _EdgeValues.apply(owner, (value_SK, self.edges.longest))  # type: ignore[no-untyped-call]
        return found


def as_often(operator: BlockSparse, weight_KE: Tensor, *, owner: Tensor) -> Tensor:
    """Weights of edges, (K, E), times how often each edge counts, if these are a sample; likewise."""
    if operator.totals is None:
        return weight_KE
    incidence = operator.derived(Incidence)
    assert incidence.counts is not None
    return weight_KE * incidence.values(incidence.counts, owner=owner).squeeze(-1)


def _ends(edges: Edges, node: Tensor, value: Tensor | None = None) -> BlockSparse:
    """A matrix (E, N) of each client with a value (None: one) where an edge has a node."""
    height, width = edges.num_blocks * edges.longest, edges.num_nodes
    order = node.argsort(stable=True)
    value = torch.ones(len(node), dtype=edges.dtype, device=node.device) if value is None else value
    matrix = _matrix(edges.place, node, value, (height, width))
    transposed = _matrix(node[order], edges.place[order], value[order], (width, height))
    return BlockSparse(matrix, transposed, edges.num_blocks)


def _matrix(row: Tensor, column: Tensor, value: Tensor, size: tuple[int, int]) -> Tensor:
    """A CSR matrix, whose rows ascend."""
    crow = torch.searchsorted(row, torch.arange(size[0] + 1, device=row.device), out_int32=True)
    return torch.sparse_csr_tensor(crow, column.int(), value, size, check_invariants=False)


@quick
class _EdgeValues(Function):
    @staticmethod
    def forward(owner: Tensor, values: tuple[Tensor, int]) -> Tensor:
        return values[0].view(*owner.shape[:-1], values[1], -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        return None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], owner: Tensor, values: tuple[Tensor, int]
    ) -> tuple[Tensor, int | None]:
        if in_dims[0] is None:
            return _EdgeValues.apply(owner, values), None  # type: ignore[no-untyped-call]
        return _EdgeValues.apply(owner.movedim(in_dims[0], 0), values), 0  # type: ignore[no-untyped-call]
