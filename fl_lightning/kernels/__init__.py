"""Computations for one client or many at once, which know nothing of rounds or servers."""
