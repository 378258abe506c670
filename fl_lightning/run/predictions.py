"""The file of predictions, ``predictions.csv``: the same from a simulation and from a site.

A row for each node or example that was predicted, with the columns

- ``client``, ``node`` or ``example`` (the user's own number), and ``name`` where they have names;
- ``split``: ``train``, ``val``, ``test``, or ``none`` where it has no role;
- of classes ``label`` (empty where there is none), ``prediction``, both by the classes' names where they have any, and
  the probability of each class, ``probability_<class>``;
- of a regression ``target_0``, ``prediction_0``, ``target_1``, ... for each number of the target.

So the test accuracy of a client is the share of its rows of the split ``test`` whose label is the prediction.
"""

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fl_lightning.batches.client_examples import ClientExamples
from fl_lightning.batches.client_graph import ClientGraph
from fl_lightning.federation import OwnNames
from fl_lightning.run.folder import whole_file


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What was predicted for a client's nodes or examples.

    Attributes:
        holds: What the client holds.
        own: What its user calls that.
        output_NK: Class probabilities, or predicted targets, (N, num_outputs).
    """

    holds: ClientGraph | ClientExamples
    own: OwnNames
    output_NK: Tensor


def write_predictions(path: Path, clients: Iterable[Predicted], *, secret: bool = False) -> None:
    """Write the file; see the module.

    Args:
        path: The file, which is replaced as a whole.
        clients: Of one kind and with the same classes.
        secret: Only the owner of the file may read it.
    """
    clients = list(clients)
    has_names = any(each.own.names is not None for each in clients)
    with whole_file(path, secret=secret) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        for place, each in enumerate(clients):
            if place == 0:
                kind = "node" if isinstance(each.holds, ClientGraph) else "example"
                writer.writerow(["client", kind, *(["name"] if has_names else []), "split", *_columns(each)])
            writer.writerows(_rows(each, has_names))


def _columns(each: Predicted) -> list[str]:
    count = each.output_NK.shape[1]
    if each.holds.y_N.is_floating_point():
        return [f"{kind}_{place}" for place in range(count) for kind in ("target", "prediction")]
    return ["label", "prediction", *(f"probability_{_class(each.own, place)}" for place in range(count))]


def _rows(each: Predicted, has_names: bool) -> Iterator[list[object]]:
    """The rows of one client."""
    holds, own, output_NK = each.holds, each.own, each.output_NK.cpu()
    masks = {"train": holds.train_mask_N, "val": holds.val_mask_N, "test": holds.test_mask_N}
    regression = holds.y_N.is_floating_point()
    best_N = output_NK.argmax(dim=1).tolist()
    for row, (number, answer, outputs) in enumerate(
        zip(own.number_N.tolist(), holds.y_N.tolist(), output_NK.tolist(), strict=True)
    ):
        name = [own.names[row] if own.names is not None else ""] if has_names else []
        split = next((split for split, mask_N in masks.items() if mask_N[row]), "none")
        told = [f"{value:.6g}" for value in outputs]
        if regression:
            pairs = zip(answer, told, strict=True)
            found = [text for target, predicted in pairs for text in (f"{target:.6g}", predicted)]
        else:
            found = [_class(own, answer) if answer >= 0 else "", _class(own, best_N[row]), *told]
        yield [holds.name, number, *name, split, *found]


def _class(own: OwnNames, number: int) -> str:
    """A class by its name, or by its number where it has none."""
    names = own.class_names or ()
    return names[number] if number < len(names) else str(number)
