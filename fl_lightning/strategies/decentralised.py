"""The decentralised family: no server; clients send messages to their neighbours and combine what they receive.

All processes play all clients' combining step on the gathered messages, as they do a server's; only what travels along
the edges of the topology is counted as communication (``peer_bytes``).

Shape legend: C clients.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fl_lightning.payload import Payload
from fl_lightning.stage import Evaluation, Stage
from fl_lightning.strategies.base import Federation, Strategy
from fl_lightning.topology import Ring, Topology


class Decentralised(Strategy):
    """Base of the family: train, send the parameters to the neighbours, combine (Jacobi: everyone at once).

    Args:
        topology: Builds the graph of the clients; a ring by default.
        num_epochs: Local epochs a round.
        reset_optimizer: Start the clients' optimisers anew every round in place of keeping their state.
    """

    def __init__(self, *, topology: Topology | None = None, num_epochs: int = 1, reset_optimizer: bool = False) -> None:
        super().__init__(num_epochs=num_epochs, reset_optimizer=reset_optimizer)
        self.topology = topology or Ring()

    @abstractmethod
    def combine(self, messages: Payload, adjacency_CC: Tensor) -> Mapping[str, Tensor]:
        """Each client's parameters after it has heard from its neighbours among those that answered, (C, *shape).

        The result must not depend on the order of the clients: everyone reads this round's messages.
        """

    def setup(self, federation: Federation) -> None:
        """Draw the topology over all clients; everyone starts from the common initial parameters."""
        super().setup(federation)
        self.adjacency_CC = self.topology(federation.num_clients, federation.seed).to(federation.device)
        self.models = {
            name: tensor.expand(federation.num_clients, *tensor.shape).clone()
            for name, tensor in federation.parameters.items()
        }

    def stages(self, round_idx: int) -> Sequence[Stage]:
        """One exchange with the neighbours."""
        names = tuple(self.federation.parameters)
        return [Stage(name="train", num_epochs=self.num_epochs, upload=names, reset_optimizer=self.reset_optimizer)]

    def configure(self, stage: Stage, clients: Sequence[int]) -> Payload:
        """What each client holds since it last combined."""
        rows = torch.tensor(clients, device=self.federation.device)
        parameters = {name: model[rows] for name, model in self.models.items()}
        return Payload(clients=tuple(clients), parameters=parameters)

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        """Everyone that answered combines."""
        if upload.clients:
            rows = torch.tensor(upload.clients, device=self.federation.device)
            for name, tensor in self.combine(upload, self.adjacency_CC[rows][:, rows]).items():
                self.models[name][rows] = tensor

    def peer_bytes(self, stage: Stage, upload: Payload) -> int:
        """Bytes between neighbours: each client that answered sends its message to each neighbour that did."""
        if not upload.clients:
            return 0
        rows = torch.tensor(upload.clients, device=self.federation.device)
        return int(self.adjacency_CC[rows][:, rows].sum()) * (upload.num_bytes // len(upload.clients))

    def evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """Each client's model after it has combined."""
        return {"": Evaluation(payload=self.configure(self.stages(0)[0], clients))}

    def state_dict(self) -> dict[str, Any]:
        """The clients' models and the topology."""
        return {"models": dict(self.models), "adjacency": self.adjacency_CC}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the clients' models and the topology."""
        self.models = {name: tensor.to(self.federation.device) for name, tensor in state["models"].items()}
        self.adjacency_CC = state["adjacency"].to(self.federation.device)
