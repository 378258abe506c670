"""What a server knows about clients whose data are elsewhere: a registry, but no data."""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from lightning import LightningDataModule
from torch import Tensor

from fl_lightning.batches.base import Batch, Collator
from fl_lightning.federation import ClientRegistry, common_edges
from fl_lightning.relations.topology import Topology
from fl_lightning.remote.channel import Channel, ask_all
from fl_lightning.remote.message import Message
from fl_lightning.remote.own import common_own
from fl_lightning.remote.responses import check_response, why_wrong
from fl_lightning.remote.schema import MOST_OUTPUTS, shown
from fl_lightning.strategies import Strategy
from fl_lightning.tasks import Task, task_of

_log = logging.getLogger(__name__)
#: What to do about facts that sites must have in common.
_REMEDY = {
    "task": "Give all sites the same kind of target",
    "num_features": "Give all sites the same features, or set own: [features] in each site's file",
}


class Elsewhere(Collator):
    """Stands for batches of clients whose data are at their sites."""

    def __init__(self, *, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype

    def size(self, client: int) -> NoReturn:
        """Not known."""
        self._refuse()

    def client_data(self, client: int) -> NoReturn:
        """Not here."""
        self._refuse()

    def set_client_data(self, client: int, client_data: Any) -> NoReturn:
        """Not here."""
        self._refuse()

    def __call__(self, clients: Sequence[int]) -> Batch:
        """Not here."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ValueError("the clients' data are at their sites: no batches can be made of them here")


class RemoteData(LightningDataModule):
    """The clients of a remote federation, in the order of the channel's sites.

    Args:
        channel: The channel to the sites.
        strategy: The strategy, whose name the sites are sent.
        num_outputs: Classes of the whole federation; None for as many as the sites have seen.
        relation_graph: Draws or reads the client relation graph; None for none.
        seed: Seed of that draw.
        retries: How often a site that does not respond is asked again.
        max_outputs: The most outputs that a site's data may have.
    """

    def __init__(
        self,
        channel: Channel,
        strategy: Strategy,
        *,
        num_outputs: int | None = None,
        relation_graph: Topology | None = None,
        seed: int = 0,
        retries: int = 1,
        max_outputs: int = MOST_OUTPUTS,
    ) -> None:
        super().__init__()
        self.channel = channel
        self.strategy = strategy
        self.num_outputs = num_outputs
        self.relation_graph = relation_graph
        self.seed = seed
        self.retries = retries
        self.max_outputs = max_outputs
        self._registry: ClientRegistry | None = None

    def prepare_data(self) -> None:
        """Ask every site who it is."""
        if self._registry is None:
            self._registry = self._enroll()

    def setup(self, stage: str | None = None) -> None:
        """The same."""
        self.prepare_data()

    @property
    def registry(self) -> ClientRegistry:
        """Who the clients are; their sizes are not known."""
        self.prepare_data()
        assert self._registry is not None
        return self._registry

    def _enroll(self) -> ClientRegistry:
        question = Message(kind="enroll", about={"strategy": type(self.strategy).__name__})
        names = self.channel.names
        responses, failures = ask_all(self.channel, dict.fromkeys(range(len(names)), question), retries=self.retries)
        for client, response in responses.items():
            try:
                check_response(question, response)
            except Exception as error:  # whatever is wrong with a response is its site's failure
                failures[client] = why_wrong(error)
                continue
            if response.kind == "failure":
                failures[client] = shown(response.about["why"], 1000)
            else:
                has = {"outputs": response.about["num_outputs"], **_counted(task_of(response.about["task"]))}
                for what, count in has.items():
                    if count > self.max_outputs:
                        failures[client] = (
                            f"its data have {count} {what}, but policy.max_outputs is {self.max_outputs} at the server"
                        )
        if failures:
            summary = "; ".join(f"{names[client]}: {why}" for client, why in sorted(failures.items()))
            raise ValueError(f"sites that cannot take part: {summary}. Start them, or leave them out of the federation")
        clients = [responses[client].about for client in range(len(names))]
        own = common_own(dict(zip(names, clients, strict=True)))
        tasks = [task_of(card["task"]) for card in clients]
        task = tasks[0].of_all(tasks)
        facts = {"task": [each.of_all(tasks) for each in tasks]}
        if "features" not in own:
            facts["num_features"] = [card["num_features"] for card in clients]
        for fact, values in facts.items():
            if any(value != values[0] for value in values):
                said = {name: card[fact] for name, card in zip(names, clients, strict=True)}
                raise ValueError(f"the sites' {fact} must be the same: {said}. {_REMEDY[fact]}")
        self._check_classes(names, clients, own)
        for what in _counted(task):
            _warn_of_fewer(names, [_counted(each)[what] for each in tasks], what, "number them alike everywhere")
        called = [card["name"] for card in clients]
        if len(set(called)) < len(called):
            raise ValueError(f"the sites' clients need distinct names, these are {', '.join(called)}")
        width, density = clients[0]["num_features"], sum(card["density"] for card in clients) / len(clients)
        if "features" in own:  # narrower ones are padded with zeros
            width = max(card["num_features"] for card in clients)
            density = sum(card["density"] * card["num_features"] / width for card in clients) / len(clients)
        counts = tuple(card["num_outputs"] for card in clients)
        identity = json.dumps([[card["name"], card["data"]] for card in clients]).encode()
        self.has_validation = any(card["has_validation"] for card in clients)
        relation_CC: Tensor | None = None
        if self.relation_graph is not None:
            relation_CC = self.relation_graph.relations(len(clients), self.seed)
        return ClientRegistry(
            names=tuple(called),
            sizes=(0,) * len(clients),
            cost=(0,) * len(clients),
            task=task,
            num_features=tuple(width) if isinstance(width, list) else width,
            num_outputs=self.num_outputs or max(counts),
            own_inputs="features" in own,
            own_outputs=counts if "outputs" in own else (),
            relation_CC=relation_CC,
            **common_edges({name: card["edges"] for name, card in zip(names, clients, strict=True)}),
            data_digests=tuple(card["data"] for card in clients),
            partition_hash=hashlib.sha256(identity).hexdigest(),
            layout=task.layout_for(density),
        )

    def _check_classes(self, names: Sequence[str], cards: Sequence[Mapping[str, Any]], own: Sequence[str]) -> None:
        """Refuse sites whose classes do not mean the same, and more classes than outputs."""
        groups: dict[str, list[str]] = {}
        for name, card in zip(names, cards, strict=True):
            groups.setdefault(card["class_names"], []).append(name)
        if len(groups) > 1 and "outputs" not in own:
            summary = "; ".join(
                f"{', '.join(members)}: {f'list {digest[:8]}' if digest else 'none'}"
                for digest, members in groups.items()
            )
            raise ValueError(
                f"the sites' class_names are not the same: {summary}. Give every site's data the same "
                f"list class_names in "
                "the same order, and number its labels by it"
            )
        above = {name: card["num_outputs"] for name, card in zip(names, cards, strict=True)}
        if self.num_outputs is not None and self.num_outputs < max(above.values()):
            summary = ", ".join(f"{name} has {count}" for name, count in above.items() if count > self.num_outputs)
            raise ValueError(
                f"num_outputs is {self.num_outputs}, but {summary}: set num_outputs (--num_outputs) to at least "
                f"{max(above.values())}, or leave it out"
            )
        if self.num_outputs is None and "outputs" not in own:
            remedy = "correct it there, or set num_outputs (--num_outputs), by which such a site is refused"
            _warn_of_fewer(names, list(above.values()), "outputs", f"if that is a wrong label, {remedy}")

    @property
    def clients(self) -> tuple[None, ...]:
        """None for each client: their data are not here."""
        return (None,) * len(self.registry)

    def collator(self, clients: Sequence[Any], *, device: torch.device, dtype: torch.dtype) -> Elsewhere:
        """A collator that makes no batches."""
        return Elsewhere(device=device, dtype=dtype)


def _counted(task: Task) -> dict[str, int]:
    """What a task counts in the data of its client, by its name in words."""
    return {name.removeprefix("num_"): getattr(task, name) for name in task.counted}


def _warn_of_fewer(names: Sequence[str], counts: Sequence[int], what: str, remedy: str) -> None:
    """Say that the site with the most of something determines the nets of all."""
    most = max(counts)
    if min(counts) < most:
        name = names[counts.index(most)]
        _log.warning(
            "%s has %d %s, other sites as few as %d: all nets have %d; %s", name, most, what, min(counts), most, remedy
        )
