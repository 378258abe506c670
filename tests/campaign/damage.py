"""Damaged versions of a file."""

import itertools
import random

NUM_PLACES = 16


def damaged(whole: bytes, seed: int) -> list[bytes]:
    """The file cut at, and with a byte flipped in, each of 16 ranges that cover it; empty; and of text."""
    draw = random.Random(seed)
    versions = [b"", b"no such file"]
    if not whole:
        return versions
    edges = [len(whole) * part // NUM_PLACES for part in range(NUM_PLACES + 1)]
    for start, end in itertools.pairwise(edges):
        index = draw.randrange(start, max(end, start + 1))
        flipped = bytearray(whole)
        flipped[index] ^= 1 << draw.randrange(8)
        versions += [whole[:index], bytes(flipped)]
    return versions
