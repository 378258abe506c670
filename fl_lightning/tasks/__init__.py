"""Tasks on nodes, graphs, pairs of nodes and independent examples."""

from collections.abc import Mapping
from typing import Any

from fl_lightning.tasks.base import Drawing, Task
from fl_lightning.tasks.examples import ExampleClassification, ExampleRegression
from fl_lightning.tasks.graph import GraphClassification, GraphRegression
from fl_lightning.tasks.link import LinkPrediction
from fl_lightning.tasks.node import NodeClassification, NodeRegression

__all__ = [
    "TASKS",
    "Drawing",
    "ExampleClassification",
    "ExampleRegression",
    "GraphClassification",
    "GraphRegression",
    "LinkPrediction",
    "NodeClassification",
    "NodeRegression",
    "Task",
    "task_of",
]

#: The tasks by name.
TASKS: dict[str, type[Task]] = {
    task.__name__: task
    for task in (
        NodeClassification,
        NodeRegression,
        GraphClassification,
        GraphRegression,
        LinkPrediction,
        ExampleClassification,
        ExampleRegression,
    )
}


def task_of(plain: Mapping[str, Any]) -> Task:
    """The task that :attr:`Task.plain` describes.

    Example:
        >>> task_of({"name": "NodeClassification", "multi_label": True})
        NodeClassification(multi_label=True)
    """
    settings = dict(plain)
    return TASKS[settings.pop("name")](**settings)
