"""Computations for one client or many at once, independent of rounds and servers."""
