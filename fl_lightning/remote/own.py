"""What of a site's data means something else than at other sites: layers for these are its own and never leave."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from fl_lightning.batches.client_data import ClientData
from fl_lightning.federation import UserNames
from fl_lightning.tasks import Task

#: What may be a site's own.
KINDS = ("features", "outputs")


def own_of(own: Any, client_data: ClientData) -> list[str]:
    """What is a site's own, in the order of :data:`KINDS`; outputs also where the data say how many it has.

    Raises:
        ValueError: It is not a list of these, or features are meant that are no vectors.
    """
    if not isinstance(own, list | tuple) or not set(own) <= set(KINDS):
        raise ValueError(f"own is {own!r}: give a list of {' and '.join(KINDS)}, or leave it out")
    if "features" in own and not isinstance(client_data.num_features, int):
        raise ValueError(f"own has features, but those of {client_data.name} are no vectors: leave it out")
    return [kind for kind in KINDS if kind in own or (kind == "outputs" and client_data.num_outputs is not None)]


def with_own_outputs(client_data: ClientData, own: Sequence[str], task: Task, names: UserNames) -> ClientData:
    """The data with the number of their classes, if these are the site's own."""
    if "outputs" not in own or not task.target.has_classes or client_data.num_outputs is not None:
        return client_data
    count = task.target.num_outputs([client_data.y_N], len(names.class_names or ()))
    return dataclasses.replace(client_data, num_outputs=count)


def common_own(cards: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What all sites say is their own, by their cards.

    Raises:
        ValueError: They do not say the same, or their features cannot be made equally wide.
    """
    said = {name: list(card["own"]) for name, card in cards.items()}
    own, *others = said.values()
    if any(other != own for other in others):
        raise ValueError(
            f"the sites' own must be the same: {said}. Set own in each site's file to what means something else at "
            "each (features, outputs), or leave it out everywhere"
        )
    if "features" in own and any(not isinstance(card["num_features"], int) for card in cards.values()):
        raise ValueError("the sites' features are their own, but those of some are no vectors: leave own out")
    return own
