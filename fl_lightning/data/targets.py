"""Checks of the targets of nodes or graphs, which refuse invalid ones."""

import torch
from torch import Tensor

from fl_lightning.tasks.base import kind_of_target

_MANY_CLASSES = 1000
"""Up to this number, classes that do not occur are accepted; beyond, labels are taken for other numbers."""


def checked_targets(
    y: Tensor,
    num_nodes: int,
    name: str,
    ignore_label: int | None = None,
    given: str | None = None,
    example: str = "node",
    kind: str | None = None,
) -> Tensor:
    """Classes, int64 (N,) with -1 for unlabeled nodes; or labels or numbers, float32 (N, H) with nan for missing ones.

    Args:
        y: As it was given.
        num_nodes: N.
        name: What messages call the graph.
        ignore_label: A number that means none.
        given: Which of them they are; None where their type and shape say it.
        example: What messages call what has a target.
        kind: Which of them they are together with others that they are of one kind with; None to tell by themselves.

    Raises:
        ValueError: They are not sound.
    """
    is_table = y.dim() in (1, 2) and len(y) == num_nodes and y.numel() > 0 and not y.is_complex()
    kind = kind_of_target(y, given=given or kind) if is_table else "classes"
    if kind == "classes":
        return _checked_classes(y, num_nodes, name, ignore_label, example)
    y_NH = y.float().reshape(num_nodes, -1)
    if ignore_label is not None:
        y_NH = torch.where(y_NH == ignore_label, torch.nan, y_NH)
    known_NH = ~y_NH.isnan()
    if kind == "labels":
        is_sound = bool(((y_NH == 0) | (y_NH == 1) | ~known_NH).all())
    else:
        is_sound = (y.is_floating_point() or given is not None) and not bool(y_NH.isinf().any())
    one_hot = kind == "labels" and given is None and bool((y_NH.sum(dim=1) == 1).all())
    if not is_sound or one_hot:
        raise ValueError(
            f"{name}: the targets y are {y.dtype} of shape {tuple(y.shape)}, not classes (integers, one for each "
            f"{example}), labels (0 or 1) or finite numbers (of a floating-point type). "
            f"{_remedy_for_labels(y, num_nodes, example)}."
        )
    if not bool(known_NH.any()):
        raise ValueError(f"{name}: no {example} has a target; nan means missing.")
    return y_NH


def _checked_classes(y: Tensor, num_nodes: int, name: str, ignore_label: int | None, example: str) -> Tensor:
    y_N = y.squeeze(1) if y.dim() == 2 and y.shape[1] == 1 else y
    if y_N.dim() != 1 or len(y_N) != num_nodes or y_N.is_complex():
        raise ValueError(
            f"{name}: the labels y are {y.dtype} of shape {tuple(y.shape)} for {num_nodes} {example}s; one row "
            f"per {example} is supported. {_remedy_for_labels(y, num_nodes, example)}."
        )
    if y_N.dtype == torch.uint8 and ignore_label is None and bool((y_N == 255).any()):
        raise ValueError(
            f"{name}: the label of {example} {int(y_N.argmax())} is 255 in uint8, where 255 usually means no label. "
            "Set ignore_label on the source: to 255 if it does, to -1 if it is a class."
        )
    if y_N.is_floating_point():
        y_N = torch.where(y_N.isnan(), -1, y_N)
    class_N = y_N.long()
    if y_N.is_floating_point() and bool((y_N != class_N).any()):
        node = int((y_N != class_N).nonzero()[0])
        raise ValueError(
            f"{name}: the label of {example} {node} is {float(y_N[node])}; labels are integers, the classes 0, 1, ... "
            "(negative or nan: unlabeled)."
        )
    if ignore_label is not None:
        class_N = torch.where(class_N == ignore_label, -1, class_N)
    largest = int(class_N.max())
    if largest < 0:
        raise ValueError(f"{name}: no {example} has a label; the classes are 0, 1, ... (negative or nan: unlabeled).")
    if largest >= _MANY_CLASSES and largest >= 10 * (num_classes := torch.unique(class_N[class_N >= 0]).numel()):
        called = _called(example)
        raise ValueError(
            f"{name}: the label of {example} {int(class_N.argmax())} is {largest}, but only {num_classes} different "
            f"labels occur; number the classes 0, 1, ..., e.g. by `{called} = {called}.unique(return_inverse=True)[1]`."
        )
    return class_N


def _remedy_for_labels(y: Tensor, num_nodes: int, example: str) -> str:
    name = _called(example)
    if y.is_complex():
        return f"Give integers: `{name} = {name}.real.long()`"
    if example == "node" and (y.dim() == 0 or (len(y) == 1 and num_nodes > 1)):
        return (
            "A label of the whole graph is not supported here: give each node its own, a tensor of shape (num_nodes,), "
            "or each client a list of graphs, or one set of graphs for a partitioner, InMemoryGraphSet(graphs)"
        )
    if y.dim() == 0 or len(y) != num_nodes:
        return f"Give a label for each {example}, in the order of x; a negative one if a {example} has none"
    if y.dim() == 2 and bool(((y == 0) | (y == 1)).all()) and bool((y.sum(dim=1) == 1).all()):
        task = "give the source task='labels'" if example == "example" else "set `data.task = 'labels'`"
        several = f"if one {example} may have several labels, {task}"
        return f"Convert one-hot labels by `{name} = {name}.argmax(dim=1)`; {several}"
    return f"Give numbers as floats, `{name} = {name}.float()`, or one column of classes, e.g. `{name} = {name}[:, 0]`"


def _called(example: str) -> str:
    """What a user calls the targets: examples are pairs of tensors, which have no attributes."""
    return "y" if example == "example" else "data.y"
