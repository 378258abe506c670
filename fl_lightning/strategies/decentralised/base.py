"""The decentralised family: no server; clients send messages to their neighbours and combine what they receive.

All processes compute the combining step of all clients on the gathered messages, as they would a server's; only what
travels along the edges of the topology is counted as communication (``peer_bytes``).

Shape legend: C clients, P numbers in the longest client's parameters (shorter ones are padded with zeros).
"""

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fl_lightning.federation import Federation
from fl_lightning.relations.topology import Topology, check_connected
from fl_lightning.round.payload import FLAT, Payload, to_wire
from fl_lightning.round.stage import Stage
from fl_lightning.strategies.base import Strategy, server_dtype


@dataclass(kw_only=True, eq=False)
class Decentralised(Strategy):
    """Base of the family: train, exchange messages with the neighbours, combine (Jacobi: everyone at once).

    Clients held out of training have no say in it; when they join, they have only what they trained themselves.

    Args:
        topology: Builds the graph of the clients; None takes the data's client relation graph.
    """

    topology: Topology | None = None
    num_epochs: int = 1

    @abstractmethod
    def combine(self, clients: Tensor, trained_CP: Tensor) -> Tensor:
        """The new parameters of the clients that answered, (C, P).

        The result must not depend on the order of the clients: everyone reads this round's messages.

        Args:
            clients: Indices of those that answered; only they exchange messages in this round.
            trained_CP: Their parameters after local training; those before are ``self.models_CP[clients]``.
        """

    def setup(self, federation: Federation) -> None:
        """Draw the topology over all clients; everyone starts from the common initial parameters.

        Raises:
            ValueError: There is no topology, or it does not connect the training clients.
        """
        super().setup(federation)
        self.adjacency_CC = self._draw_topology(federation).to(federation.device)
        self.members = torch.tensor(federation.training_clients, device=federation.device)
        check_connected(self.neighbours(self.members), "the topology without the clients that are held out")
        nets = federation.architectures
        lengths = [sum(parameter.numel() for parameter in net.values()) for net in nets]
        starts = [to_wire({n: p[None] for n, p in net.items()}, max(lengths))[FLAT] for net in nets]
        #: Numbers in each client's parameters.
        self.sizes = [lengths[kind] for kind in federation.architecture_of]
        self.models_CP = torch.cat([starts[kind] for kind in federation.architecture_of])

    def _draw_topology(self, federation: Federation) -> Tensor:
        if self.topology is not None:
            return self.topology(federation.num_clients, federation.seed)
        if federation.relation_CC is None:
            raise ValueError(
                "strategy.topology is missing, and the data have no client relation graph to take its place: set "
                "strategy.topology (Ring, ErdosRenyi, ...) or data.relation_graph"
            )
        return check_connected(federation.relation_CC > 0, "the data's client relation graph")

    def stages(self, round_idx: int) -> Sequence[Stage]:
        """One exchange with the neighbours."""
        return [dataclasses.replace(self.training(round_idx), flat=True)]

    def configure(self, stage: Stage, clients: Sequence[int]) -> Payload:
        """What each client holds since it last combined."""
        return self._combined_models(clients)

    def _combined_models(self, clients: Sequence[int]) -> Payload:
        rows = torch.tensor(clients, device=self.federation.device)
        return Payload(clients=tuple(clients), parameters={FLAT: self.models_CP[rows]})

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        """Everyone that answered combines."""
        if upload.clients:
            rows = torch.tensor(upload.clients, device=self.federation.device)
            trained_CP = upload.parameters[FLAT]
            new_CP = self.combine(rows, trained_CP.to(server_dtype(trained_CP.dtype)))
            self.models_CP[rows] = new_CP.to(self.models_CP)

    def neighbours(self, clients: Tensor) -> Tensor:
        """Adjacency among some clients, boolean."""
        return self.adjacency_CC[clients][:, clients]

    def peer_bytes(self, stage: Stage, upload: Payload) -> int:
        """Bytes between neighbours: each client that answered sends its parameters to each neighbour that did."""
        if not upload.clients:
            return 0
        clients = torch.tensor(upload.clients, device=self.federation.device)
        degree_C: list[int] = self.neighbours(clients).sum(dim=1).tolist()
        numbers = sum(d * self.sizes[client] for d, client in zip(degree_C, upload.clients, strict=True))
        return numbers * self.models_CP.element_size()

    def model_for(self, clients: Sequence[int]) -> Payload | None:
        """Each client's model after it has combined; newcomers' as they trained it, for they combine nothing."""
        return self._combined_models(clients) if set(clients) <= set(self.federation.training_clients) else None

    def matrices(self) -> Mapping[str, Tensor]:
        """The topology among the training clients."""
        return {"adjacency": self.neighbours(self.members).to(self.models_CP.dtype)}

    def state_dict(self) -> dict[str, Any]:
        """The clients' models and the topology."""
        return {"models": self.models_CP, "adjacency": self.adjacency_CC}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the clients' models.

        Raises:
            ValueError: They lived on another topology.
        """
        if not torch.equal(state["adjacency"].to(self.adjacency_CC), self.adjacency_CC):
            raise ValueError(
                "the checkpoint's topology is not the one drawn now: set strategy.topology and its seed (or "
                "data.relation_graph) as they were"
            )
        self.models_CP = state["models"].to(self.federation.device)
