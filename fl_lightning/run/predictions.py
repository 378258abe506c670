"""The file of predictions, ``predictions.csv``, which is the same for a simulation and a site.

It has a row for each predicted example, with the columns

- ``client``, ``node``, ``graph`` or ``example`` (the user's own number), and ``name`` if they have names;
- ``split``: ``train``, ``val``, ``test``, or ``none`` for an example without a role;
- for classes: ``label`` (empty if unknown) and ``prediction``, both by the classes' names if they have any, and the
  probability of each class, ``probability_<class>``;
- for labels: ``label_<name>`` (1, 0, or empty if unknown) and ``probability_<name>`` for each of them;
- for links: ``source`` and ``target`` in the place of the number, ``linked`` (1 or 0) and ``score``, its probability;
- for numbers: ``target_0`` (empty if missing), ``prediction_0``, ``target_1``, ... for each number of a target.

So the test accuracy of a client is the share of its rows of the split ``test`` whose label is the prediction.
"""

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fl_lightning.batches.client_data import ClientData
from fl_lightning.federation import UserNames
from fl_lightning.files import whole_file
from fl_lightning.tasks import Task


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """The predictions for a client's examples.

    Attributes:
        task: The task.
        client_data: The data of the client.
        own: The user's names of the examples.
        output_NK: The prediction for each example, (N, num_outputs).
    """

    task: Task
    client_data: ClientData
    names: UserNames
    output_NK: Tensor


def write_predictions(path: Path, clients: Iterable[Predicted], *, secret: bool = False) -> None:
    """Write the file; see the module.

    Args:
        path: The file, which is replaced as a whole.
        clients: The predictions of each client, for one task and the same classes.
        secret: Whether only the owner of the file may read it.
    """
    clients = list(clients)
    has_names = any(each.names.names is not None for each in clients)
    with (
        whole_file(path, secret=secret) as temporary,
        temporary.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file,  # of half a character
    ):
        writer = csv.writer(file)
        for i, each in enumerate(clients):
            if i == 0:
                columns = each.task.target.columns(_names(each))
                numbers = each.task.number_columns or (each.task.example,)
                writer.writerow(["client", *numbers, *(["name"] if has_names else []), "split", *columns])
            writer.writerows(_rows(each, has_names))


def _rows(each: Predicted, has_names: bool) -> Iterator[list[object]]:
    """The rows of one client."""
    client_data, user_names, output_NK = each.client_data, each.names, each.output_NK.cpu()
    masks = {"train": client_data.train_mask_N, "val": client_data.val_mask_N, "test": client_data.test_mask_N}
    names, target = _names(each), each.task.target
    for row, (number, label, outputs) in enumerate(
        zip(user_names.number_N.tolist(), client_data.y_N.tolist(), output_NK.tolist(), strict=True)
    ):
        name = [user_names.names[row] if user_names.names is not None else ""] if has_names else []
        split = next((split for split, mask_N in masks.items() if mask_N[row]), "none")
        numbers = number if isinstance(number, list) else [number]
        yield [client_data.name, *numbers, *name, split, *target.row(label, outputs, names)]


def _names(each: Predicted) -> list[str]:
    """The name of each class or label, or its number if it has no name."""
    known = each.names.class_names or ()
    return [known[k] if k < len(known) else str(k) for k in range(each.output_NK.shape[1])]
