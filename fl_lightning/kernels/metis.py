"""Graphs cut by METIS.

Karypis and Kumar: "A Fast and High Quality Multilevel Scheme for Partitioning Irregular Graphs", SIAM Journal on
Scientific Computing, 1998.
"""

from typing import Any

import numpy as np

#: What METIS uses when no seed is given; our seed 0 maps to it, so that it gives the partitions of the papers.
_METIS_DEFAULT_SEED = 4321


def metis(first_N: Any, neighbor_E: Any, num_parts: int, seed: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The part of each node, (N,): k-way, minimal edge cut; by recursive bisection where that leaves parts empty.

    Args:
        first_N: Where the neighbors of each node begin, (N + 1,), an array of integers.
        neighbor_E: The neighbors of all nodes, (E,); both directions of every edge, no loops.
        num_parts: Number of parts, at most N.
        seed: Of METIS; 0 is its own default.
    """
    import pymetis

    index_type = pymetis.zero_copy_dtype()
    csr = pymetis.CSRAdjacency(first_N.astype(index_type, copy=False), neighbor_E.astype(index_type, copy=False))
    # numbers beyond 31 bits would overflow METIS's C int
    options = pymetis.Options(seed=(_METIS_DEFAULT_SEED + seed) % 2**31)

    def parts(recursive: bool) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        _, part_N = pymetis.part_graph(num_parts, csr, options=options, recursive=recursive)
        return np.asarray(part_N, dtype=np.int64)

    found_N = parts(recursive=False)
    if not np.bincount(found_N, minlength=num_parts).all():  # k-way may leave parts of small graphs without a node
        bisected_N = parts(recursive=True)
        if np.bincount(bisected_N, minlength=num_parts).all():
            return bisected_N
    return found_N
