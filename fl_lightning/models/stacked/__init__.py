"""Users' modules of PyG layers on a stack of clients.

PyG is imported by these modules, which takes a second, so that they are imported where a net needs them.
"""
