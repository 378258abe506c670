"""Common parameters of nets with different architectures, in their flat parameter vectors."""

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def common_first(nets: Sequence[Mapping[str, Tensor]]) -> list[slice | Tensor]:
    """Indices of each net's flat parameters, those that all nets have first: the leading blocks of each name.

    Example:
        >>> narrow, wide = {"w": torch.zeros(2, 1), "b": torch.zeros(1)}, {"w": torch.zeros(2, 3), "b": torch.zeros(3)}
        >>> [index.tolist() for index in common_first([narrow, wide])]
        [[0, 1, 2], [0, 3, 6, 1, 2, 4, 5, 7, 8]]
    """
    if len(nets) == 1:
        return [slice(sum(parameter.numel() for parameter in nets[0].values()))]
    ranks = [{name: parameter.dim() for name, parameter in net.items()} for net in nets]
    names = [name for name, rank in ranks[0].items() if all(each.get(name) == rank for each in ranks)]
    blocks = {
        name: [slice(min(sizes)) for sizes in zip(*(net[name].shape for net in nets), strict=True)] for name in names
    }
    result: list[slice | Tensor] = []
    for net in nets:
        ends = itertools.accumulate(parameter.numel() for parameter in net.values())
        index = {
            name: torch.arange(end - parameter.numel(), end).view(parameter.shape)
            for (name, parameter), end in zip(net.items(), ends, strict=True)
        }
        common = torch.cat(
            [torch.zeros(0, dtype=torch.long), *(index[name][tuple(blocks[name])].flatten() for name in names)]
        )
        is_rest = torch.ones(sum(parameter.numel() for parameter in net.values()), dtype=torch.bool)
        is_rest[common] = False
        result.append(torch.cat([common, is_rest.nonzero().flatten()]))
    return result
