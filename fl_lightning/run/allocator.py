"""Keeps memory that tensors have freed, instead of returning it to the system after every step.

The C library returns large blocks at once, so each step's activations are new pages that the system must clear first:
at the size of ogbn-arxiv that takes more time than the computation. It is a setting of the whole process, so the
command line makes it; your own program can call :func:`fl_lightning.keep_freed_memory`.
"""

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h: M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
_LARGEST_BLOCK_BYTES = 1 << 30
_NEVER = -1


_keeps = False


def keep_freed_memory() -> bool:
    """Tell glibc's malloc to serve blocks of up to 1 GiB from its heap and never to shrink the heap.

    Returns:
        Whether the C library accepted both settings; on other systems nothing is changed.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # not glibc
        return False
    global _keeps
    _keeps = bool(mallopt(_MMAP_THRESHOLD, _LARGEST_BLOCK_BYTES)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))
    return _keeps


def release_freed_memory() -> None:
    """Return once what :func:`keep_freed_memory` has kept, such as that of cutting a large graph into clients."""
    if _keeps:
        ctypes.CDLL(None).malloc_trim(0)
