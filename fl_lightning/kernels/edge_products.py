"""Products along the edges of many clients' graphs: of the two ends of every edge, and sums over the edges of a node.

Time and memory are linear in the edges. Both functions are bilinear and are each other's gradients, so that they can be
differentiated as often as wanted.

Shape legend: C clients, N nodes (padded to the largest client), E edges in both directions (padded likewise), K maps of
one graph side by side, D width, M = C·N.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from fl_lightning.kernels.autograd import quick
from fl_lightning.kernels.csr import coordinates, csr_matmul, with_values


class Edges:
    """The edges of C graphs without loops, ordered by the node that they lead to.

    It is an opaque object to ``vmap``: all clients' edges are passed in one instance.

    Args:
        matrix: Block-diagonal CSR matrix of the graphs (C·N x C·N); what is not zero is an edge, from column to row.
        num_blocks: C.

    Attributes:
        entry: Where the edges are among the entries of the matrix, int64, one number for each edge of any client.
        row: The nodes that they lead to, within the whole matrix.
        column: The nodes that they come from, likewise.
        place: Where they are in (C, E), flat.
        longest: E.
        num_nodes: C·N.
        dtype: Of the matrix.
    """

    def __init__(self, matrix: Tensor, num_blocks: int) -> None:
        row, column = coordinates(matrix)
        self.entry = ((row != column) & (matrix.values() != 0)).nonzero().flatten()
        self.row, self.column = row[self.entry], column[self.entry]
        self._like, self.num_blocks, self.num_nodes, self.dtype = matrix, num_blocks, len(matrix), matrix.dtype
        block = self.row // (len(matrix) // num_blocks)
        count_C = block.bincount(minlength=num_blocks)
        self.longest = max(1, int(count_C.max()))
        first_C = count_C.cumsum(0) - count_C
        self.place = block * self.longest + torch.arange(len(block), device=block.device) - first_C[block]

    def placed(self, value_VK: Tensor) -> Tensor:
        """Values of all edges, (V, K), where (C, E) has them, (C·E, K); 0 for padding."""
        return value_VK.new_zeros(self.num_blocks * self.longest, *value_VK.shape[1:]).index_copy(
            0, self.place, value_VK
        )

    @cached_property
    def _forwards(self) -> tuple[Tensor, Tensor]:
        """A CSR matrix of zeros with the edges as entries, and where each of them lies in (C, E), flat."""
        return self._matrix(self.row, self.column), self.place

    @cached_property
    def _backwards(self) -> tuple[Tensor, Tensor]:
        """The same of the edges turned round."""
        order = self.column.argsort(stable=True)
        return self._matrix(self.column[order], self.row[order]), self.place[order]

    def _matrix(self, row: Tensor, column: Tensor) -> Tensor:
        crow = torch.searchsorted(row, torch.arange(len(self._like) + 1, device=row.device), out_int32=True)
        values = torch.zeros(len(row), dtype=self._like.dtype, device=row.device)
        return torch.sparse_csr_tensor(crow, column.int(), values, self._like.shape, check_invariants=False)

    def products(self, to_KMD: Tensor, from_KMD: Tensor) -> Tensor:
        """What :func:`edge_products` returns for all clients, (K, C·E), without a gradient and not under ``vmap``."""
        matrix, index = self._forwards
        found_KE = to_KMD.new_zeros(len(to_KMD), self.num_blocks * self.longest)
        for found_E, to_MD, from_MD in zip(found_KE, to_KMD.to(matrix.dtype), from_KMD.to(matrix.dtype), strict=True):
            product = torch.sparse.sampled_addmm(matrix, to_MD, from_MD.mT, beta=0.0)
            found_E[index] = product.values().to(found_E.dtype)
        return found_KE

    def sums(self, weight_KE: Tensor, from_KMD: Tensor, *, turned: bool) -> Tensor:
        """What :func:`edge_sums` returns for all clients, (K, M, D); likewise."""
        matrix, index = self._backwards if turned else self._forwards
        pairs = zip(weight_KE.to(matrix.dtype), from_KMD.to(matrix.dtype), strict=True)
        return torch.stack([csr_matmul(with_values(matrix, w_E[index]), x_MD) for w_E, x_MD in pairs]).to(from_KMD)

    def maxima(self, value_KE: Tensor) -> Tensor:
        """What :func:`edge_maxima` returns for all clients, (K, M); likewise."""
        value_KV = value_KE[:, self.place]
        lowest_KM = value_KE.new_full((len(value_KE), len(self._like)), -torch.inf)
        return lowest_KM.scatter_reduce(1, self.row.expand_as(value_KV), value_KV, "amax")


@quick
class _EdgeProducts(Function):
    @staticmethod
    def forward(to_KND: Tensor, from_KND: Tensor, edges: Edges, owner: Tensor) -> Tensor:
        found_KE = edges.products(_all_nodes(to_KND), _all_nodes(from_KND))
        return found_KE.view(*to_KND.shape[:-2], edges.longest)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.edges, owner = inputs
        ctx.save_for_backward(*tensors, owner)

    @staticmethod
    def backward(ctx: Any, grad_KE: Tensor) -> tuple[Tensor, Tensor, None, None]:
        to_KND, from_KND, owner = ctx.saved_tensors
        grad_to = edge_sums(ctx.edges, grad_KE, from_KND, owner=owner)
        return grad_to, edge_sums(ctx.edges, grad_KE, to_KND, owner=owner, turned=True), None, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], to_KND: Tensor, from_KND: Tensor, edges: Edges, owner: Tensor
    ) -> tuple[Tensor, int]:
        *dims, _, owner_dim = in_dims
        folded = _Folded(info.batch_size, owner, owner_dim)
        ends = folded.stacked([to_KND, from_KND], dims)
        return folded.unstacked(edge_products(edges, *ends, owner=folded.owner))


@quick
class _EdgeSums(Function):
    @staticmethod
    def forward(weight_KE: Tensor, from_KND: Tensor, edges: Edges, turned: bool, owner: Tensor) -> Tensor:
        return edges.sums(weight_KE.flatten(1), _all_nodes(from_KND), turned=turned).view(from_KND.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *tensors, ctx.edges, ctx.turned, owner = inputs
        ctx.save_for_backward(*tensors, owner)

    @staticmethod
    def backward(ctx: Any, grad_KND: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        weight_KE, from_KND, owner = ctx.saved_tensors
        ends = (from_KND, grad_KND) if ctx.turned else (grad_KND, from_KND)
        grad_from = edge_sums(ctx.edges, weight_KE, grad_KND, owner=owner, turned=not ctx.turned)
        return edge_products(ctx.edges, *ends, owner=owner), grad_from, None, None, None

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple[Any, ...],
        weight_KE: Tensor,
        from_KND: Tensor,
        edges: Edges,
        turned: bool,
        owner: Tensor,
    ) -> tuple[Tensor, int]:
        *dims, _, _, owner_dim = in_dims
        folded = _Folded(info.batch_size, owner, owner_dim)
        weight_KE, from_KND = folded.stacked([weight_KE, from_KND], dims)
        return folded.unstacked(edge_sums(edges, weight_KE, from_KND, owner=folded.owner, turned=turned))


@quick
class _EdgeMaxima(Function):
    @staticmethod
    def forward(value_KE: Tensor, edges: Edges, owner: Tensor) -> Tensor:
        return edges.maxima(value_KE.detach().flatten(1)).view(*value_KE.shape[:-1], -1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.mark_non_differentiable(output)

    @staticmethod
    def backward(ctx: Any, grad_KN: Tensor) -> tuple[None, None, None]:
        return None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], value_KE: Tensor, edges: Edges, owner: Tensor) -> tuple[Tensor, int]:
        dim, _, owner_dim = in_dims
        folded = _Folded(info.batch_size, owner, owner_dim)
        [value_KE] = folded.stacked([value_KE], [dim])
        return folded.unstacked(edge_maxima(edges, value_KE, owner=folded.owner))


class _Folded:
    """What ``vmap`` maps over, as a further dimension of tensors: clients behind the K maps, else as more maps.

    Args:
        size: Of the mapped dimension.
        owner: Has a client dimension wherever edges have one.
        owner_dim: Where the mapped dimension is in it; None where this ``vmap`` is not over the clients.
    """

    def __init__(self, size: int, owner: Tensor, owner_dim: int | None) -> None:
        self.size, self.over_clients = size, owner_dim is not None
        self.owner = owner if owner_dim is None else owner.movedim(owner_dim, 0)

    def stacked(self, tensors: Sequence[Tensor], dims: Sequence[int | None]) -> list[Tensor]:
        """The tensors with it."""
        index = 1 if self.over_clients else 0
        moved = [
            tensor.movedim(dim, index)
            if dim is not None
            else tensor.unsqueeze(index).expand(*tensor.shape[:index], self.size, *tensor.shape[index:])
            for tensor, dim in zip(tensors, dims, strict=True)
        ]
        return moved if self.over_clients else [tensor.flatten(0, 1) for tensor in moved]

    def unstacked(self, result: Tensor) -> tuple[Tensor, int]:
        """The result, and where it has it."""
        return (result, 1) if self.over_clients else (torch.unflatten(result, 0, (self.size, -1)), 0)


def _all_nodes(x_KND: Tensor) -> Tensor:
    """(K, C·N, D), of (K, N, D) or (K, C, N, D)."""
    return x_KND.detach().flatten(1, -2)


def edge_products(edges: Edges, to_KND: Tensor, from_KND: Tensor, *, owner: Tensor) -> Tensor:
    """Inner product of the two ends of every edge, once for each of K maps; also under ``vmap``.

    Args:
        edges: The clients' edges.
        to_KND: Values of the nodes that edges lead to.
        from_KND: Values of the nodes that edges come from.
        owner: Any tensor of the clients that has a leading client dimension if they have graphs of their own, such as a
            mask of their batch (see :func:`fl_lightning.kernels.block_sparse.block_matmul`).

    Shapes:
        to_KND, from_KND: (K, N, D) of one client, under ``vmap`` too; of a stack (K, C, N, D).

    Returns:
        (K, E), or (K, C, E); 0 where a client has no more edges.
    """
    products: Tensor = _EdgeProducts.apply(to_KND, from_KND, edges, owner)  # type: ignore[no-untyped-call]
    return products


def edge_sums(edges: Edges, weight_KE: Tensor, from_KND: Tensor, *, owner: Tensor, turned: bool = False) -> Tensor:
    """For every node, the sum over the edges that lead to it of weight times value of the other end, (K, N, D).

    Args:
        edges: The clients' edges.
        weight_KE: Weights of the edges, in the order of :func:`edge_products`; padding is not read.
        from_KND: Values of the nodes.
        owner: As in :func:`edge_products`.
        turned: Sum over the edges that come from a node instead.
    """
    sums: Tensor = _EdgeSums.apply(weight_KE, from_KND, edges, turned, owner)  # type: ignore[no-untyped-call]
    return sums


def edge_maxima(edges: Edges, value_KE: Tensor, *, owner: Tensor) -> Tensor:
    """For every node, the greatest value of the edges that lead to it, (K, N); -inf of none. It has no gradient.

    Args:
        edges: The clients' edges.
        value_KE: Values of the edges, in the order of :func:`edge_products`; padding is not read.
        owner: As in :func:`edge_products`.
    """
    maxima: Tensor = _EdgeMaxima.apply(value_KE, edges, owner)  # type: ignore[no-untyped-call]
    return maxima
