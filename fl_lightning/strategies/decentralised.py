"""The decentralised family: no server; clients send messages to their neighbours and combine what they receive.

All processes play all clients' combining step on the gathered messages, as they do a server's; only what travels along
the edges of the topology is counted as communication (``peer_bytes``).

Shape legend: C clients, P numbers in the longest client's parameters (shorter ones are padded with zeros).
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fl_lightning.payload import FLAT, Payload, to_wire
from fl_lightning.stage import Evaluation, Stage
from fl_lightning.strategies.base import Federation, Strategy
from fl_lightning.topology import Topology, check_connected


class Decentralised(Strategy):
    """Base of the family: train, exchange messages with the neighbours, combine (Jacobi: everyone at once).

    Args:
        topology: Builds the graph of the clients; None takes the data's client relation graph.
        num_epochs: Local epochs a round.
        reset_optimizer: Start the clients' optimisers anew every round in place of keeping their state.
    """

    def __init__(self, *, topology: Topology | None = None, num_epochs: int = 1, reset_optimizer: bool = False) -> None:
        super().__init__(num_epochs=num_epochs, reset_optimizer=reset_optimizer)
        self.topology = topology

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
            ValueError: There is no topology, or the relation graph that is to be it is not connected.
        """
        super().setup(federation)
        self.adjacency_CC = self._draw_topology(federation).to(federation.device)
        starts = [to_wire({n: p[None] for n, p in net.items()}, max(self._lengths))[FLAT] for net in self._nets]
        self.models_CP = torch.cat([starts[client % len(starts)] for client in range(federation.num_clients)])

    def _draw_topology(self, federation: Federation) -> Tensor:
        if self.topology is not None:
            return self.topology(federation.num_clients, federation.seed)
        if federation.relation_CC is None:
            raise ValueError(
                "strategy.topology is missing, and the data have no client relation graph to take its place: set "
                "strategy.topology (Ring, ErdosRenyi, ...) or data.relation_graph"
            )
        return check_connected(federation.relation_CC > 0, "the data's client relation graph")

    @property
    def _nets(self) -> tuple[Mapping[str, Tensor], ...]:
        return self.federation.architectures or (self.federation.parameters,)

    @property
    def _lengths(self) -> list[int]:
        return [sum(parameter.numel() for parameter in net.values()) for net in self._nets]

    @property
    def sizes(self) -> list[int]:
        """Numbers in each client's parameters."""
        return [self._lengths[client % len(self._nets)] for client in range(self.federation.num_clients)]

    def stages(self, round_idx: int) -> Sequence[Stage]:
        """One exchange with the neighbours."""
        return [Stage(name="train", num_epochs=self.num_epochs, flat=True, reset_optimizer=self.reset_optimizer)]

    def configure(self, stage: Stage, clients: Sequence[int]) -> Payload:
        """What each client holds since it last combined."""
        rows = torch.tensor(clients, device=self.federation.device)
        return Payload(clients=tuple(clients), parameters={FLAT: self.models_CP[rows]})

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        """Everyone that answered combines."""
        if upload.clients:
            rows = torch.tensor(upload.clients, device=self.federation.device)
            self.models_CP[rows] = self.combine(rows, upload.parameters[FLAT])

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

    def evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """Each client's model after it has combined."""
        return {"": Evaluation(payload=self.configure(self.stages(0)[0], clients))}

    def matrices(self) -> Mapping[str, Tensor]:
        """The topology among the training clients."""
        members = torch.tensor(self.federation.training_clients, device=self.federation.device)
        return {"adjacency": self.neighbours(members).to(self.models_CP.dtype)}

    def state_dict(self) -> dict[str, Any]:
        """The clients' models and the topology."""
        return {"models": self.models_CP, "adjacency": self.adjacency_CC}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the clients' models and the topology."""
        self.models_CP = state["models"].to(self.federation.device)
        self.adjacency_CC = state["adjacency"].to(self.federation.device)
