"""The decentralized family: no server; clients send messages to their neighbors and combine what they receive.

All processes compute the combining step of all clients on the gathered messages, as they would that of a server; only
what is sent along the edges of the topology counts as communication (``peer_bytes``).

Shape legend: C clients, P numbers in the longest client's parameters (shorter ones are padded with zeros).
"""

import dataclasses
import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fl_lightning.federation import Federation
from fl_lightning.kernels.layout import rows_of
from fl_lightning.relations.topology import Topology, check_connected
from fl_lightning.round.payload import FLAT, Payload, to_wire
from fl_lightning.round.stage import Persistence, Stage
from fl_lightning.strategies.base import Strategy, server_dtype

#: Name of the stage in which the clients train and exchange nothing.
ALONE = "alone"
#: A pull that removes less than this share of every disagreement in so many rounds is as good as none.
_LEAST_SHARE, _MANY_ROUNDS = 0.1, 100


@dataclass(kw_only=True, eq=False)
class Decentralized(Strategy):
    """Base class of the family: train, exchange messages with the neighbors, combine (Jacobi: all clients at once).

    Unseen clients do not affect the training; after onboarding, they have only what they trained themselves.

    Args:
        topology: Builds the graph of the clients; None for the data's client relation graph.
        exchange_every: Rounds from one exchange to the next; in between, clients train alone and nothing is sent.
    """

    topology: Topology | None = None
    num_epochs: int = 1
    exchange_every: int = 1

    takes_unseen_clients: ClassVar[bool] = False
    server_state: ClassVar[tuple[str, ...]] = ("models_CP", "adjacency_CC")

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_at_least(1, "exchange_every")

    @abstractmethod
    def combine(self, clients: Tensor, trained_CP: Tensor) -> Tensor:
        """The new parameters of the clients that responded, (C, P).

        The result must not depend on the order of the clients: all of them read this round's messages.

        Args:
            clients: Indices of the clients that responded; only they exchange messages in this round.
            trained_CP: Their parameters after local training; those before are ``self.models_CP[clients]``.
        """

    def setup(self, federation: Federation) -> None:
        """Draw the topology over all clients; all of them start from the common initial parameters.

        Raises:
            ValueError: There is no topology, or it does not connect the training clients.
        """
        super().setup(federation)
        self.adjacency_CC = self._draw_topology(federation).to(federation.device)
        self.members = torch.tensor(federation.training_clients, device=federation.device)
        check_connected(self.neighbors(self.members), "the topology without the clients that are held out")
        nets = federation.architectures
        lengths = [sum(parameter.numel() for parameter in net.values()) for net in nets]
        starts = [to_wire({n: p[None] for n, p in net.items()}, max(lengths))[FLAT] for net in nets]
        #: Number of parameter values of each client.
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
        """Local training, and one exchange with the neighbors if it is due."""
        stage = dataclasses.replace(self.training(round_idx), upload=(FLAT,))
        return [dataclasses.replace(stage, name=ALONE) if (round_idx + 1) % self.exchange_every else stage]

    def persistence(self) -> Persistence:
        """No parameters: each client is sent its own combined model."""
        return dataclasses.replace(super().persistence(), parameters=())

    def configure(self, stage: Stage, clients: Sequence[int]) -> Payload:
        """Each client's own model, as last combined."""
        return self._combined_models(clients)

    def _combined_models(self, clients: Sequence[int]) -> Payload:
        rows = torch.tensor(clients, device=self.federation.device)
        return Payload(clients=tuple(clients), parameters={FLAT: self.models_CP.index_select(0, rows)})

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        """Combine the models of the clients that responded, or keep them as trained."""
        if upload.clients:
            rows = torch.tensor(upload.clients, device=self.federation.device)
            new_CP = trained_CP = upload.parameters[FLAT]
            if stage.name != ALONE:
                new_CP = self.combine(rows, trained_CP.to(server_dtype(trained_CP.dtype)))
            self.models_CP[rows_of(upload.clients, rows.device)] = new_CP.to(self.models_CP)

    def neighbors(self, clients: Tensor) -> Tensor:
        """Adjacency among some clients, boolean."""
        return self.adjacency_CC[clients][:, clients]

    def peer_bytes(self, stage: Stage, upload: Payload) -> Sequence[int]:
        """Bytes that each responding client sends to its neighbors in a stage; 0 if they train alone."""
        if stage.name == ALONE or not upload.clients:
            return [0] * len(upload.clients)
        numbers_C: list[int] = self.sent_numbers(torch.tensor(upload.clients, device=self.federation.device)).tolist()
        return [numbers * self.models_CP.element_size() for numbers in numbers_C]

    def sent_numbers(self, clients: Tensor) -> Tensor:
        """How many values each of them sends in an exchange, int64 (C,): its parameters to each present neighbor.

        It is called before they combine.
        """
        return self.neighbors(clients).sum(dim=1) * torch.tensor(self.sizes, device=clients.device)[clients]

    def model_for(self, clients: Sequence[int]) -> Payload | None:
        """Each client's model after combining; unseen clients' as trained, since they do not combine."""
        return self._combined_models(clients) if set(clients) <= set(self.federation.training_clients) else None

    def matrices(self) -> Mapping[str, Tensor]:
        """The topology among the training clients."""
        return {"adjacency": self.neighbors(self.members).to(self.models_CP.dtype)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the clients' models.

        Raises:
            ValueError: The state belongs to another topology.
        """
        adjacency_CC = self.adjacency_CC
        super().load_state_dict(state)
        if not torch.equal(adjacency_CC, self.adjacency_CC):
            raise ValueError(
                "the checkpoint's topology is not the one drawn now: set strategy.topology and its seed (or "
                "data.relation_graph) as they were"
            )


def warn_if_weak(product: float, factors: str, exchange_every: int) -> None:
    """Warn before training if the neighbors' pull is too weak to matter.

    Args:
        product: Share of the most strongly pulled disagreement that an exchange removes.
        factors: The factors of the product, in words.
        exchange_every: Rounds from one exchange to the next.
    """
    share = 1 - (1 - min(product, 1.0)) ** (_MANY_ROUNDS / exchange_every)
    if share < _LEAST_SHARE:
        warnings.warn(
            f"the pull of the neighbors is too weak to matter: {factors} is {product:.2g}, so that {_MANY_ROUNDS} "
            f"rounds remove at most {100 * share:.1g} % of any disagreement, and this is local training; raise "
            f"strategy.regularization, up to {1 / product:,.2g} times",
            stacklevel=4,
        )
