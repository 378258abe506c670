"""Partitions of a graph into clients, and statistics of the parts."""
