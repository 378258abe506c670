"""FedGNN: FedAvg on graphs that are expanded with other clients' embeddings of nodes with common neighbors.

Wu, Wu, Cao, Huang, Xie: "FedGNN: Federated Graph Neural Network for Privacy-Preserving Recommendation", 2021; "A
federated graph neural network framework for privacy-preserving personalization" (FedPerGNN), Nature Communications 13,
2022. K_v are the hashed ids of all neighbors of node v, those that the cut took away too, and e_v is its hidden layer
(``models/expanded_gcn.py``) by the global model, in eval mode. Once in a while a matcher draws, for each v, at most
``num_neighbors`` nodes u of other clients, m_v of them, with

    common_neighbor   K_u ∩ K_v ≠ ∅        same_neighbors   K_u = K_v ≠ ∅

and sends ē_v, their mean. With d_v local neighbors, in training and in evaluation

    H² = ((1 - β) Â H¹ + β ē) W + b,     β_v = m_v / (m_v + d_v + 1)

with ē constant. For an absent client, what it sent last is used. With ``callbacks.NeighborIds`` the clients know K;
without it none does, no node is matched, and this is FedAvg. ``same_neighbors`` matches hardly any nodes in disjoint
parts.

Leaves the client: the model; once, for each of its nodes, the hashed ids of its neighbors; every few rounds, for each
node, its hidden layer, from which features can be computed. The matcher is the server here, and learns who shares
neighbors with whom; a client receives means of other clients' rows.

Departures: the paper is on recommendation. It has users with an item in common, attention, pseudo items and noisy
gradients; none of these exist in node classification, and what others ran under this name on it has never been
published. So this is our own reading, after the one line that FED-PUB writes about it (``same_neighbors``). Noise and
clipping are in ``remote.filters`` for any strategy. Matching takes memory for all pairs of nodes with a common
neighbor.
"""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor
from torch.func import functional_call

from fl_lightning.batches import Batch, GraphBatch
from fl_lightning.federation import Federation
from fl_lightning.kernels.randomness import splitmix64
from fl_lightning.models.expanded_gcn import ExpandedGCN
from fl_lightning.models.output import NetOutput
from fl_lightning.relations.node_matching import common_neighbors, drawn
from fl_lightning.round.client import ClientModule
from fl_lightning.round.context import Context, Parameters
from fl_lightning.round.payload import Payload, pad_examples
from fl_lightning.round.stage import Evaluation, Rows, Stage
from fl_lightning.strategies.base import RecordsMetrics
from fl_lightning.strategies.mixing.aggregation import Aggregation
from fl_lightning.strategies.mixing.fedavg import FedAvg


@dataclass(kw_only=True, eq=False)
class FedGNN(FedAvg, RecordsMetrics):
    """FedAvg on expanded graphs.

    Args:
        rule: Which nodes are matched: those with a ``common_neighbor``, or with the ``same_neighbors``.
        num_neighbors: Largest number of nodes that are drawn for a node, at least 1.
        num_warmup_rounds: Rounds of FedAvg before the first exchange, at least 0.
        refresh_every: Rounds from one exchange to the next, at least 1.
    """

    rule: Literal["common_neighbor", "same_neighbors"] = "common_neighbor"
    num_neighbors: int = 10
    num_warmup_rounds: int = 5
    refresh_every: int = 5
    personal: Sequence[str] = field(default=(), init=False)
    blend: bool = field(default=False, init=False)
    aggregation: Aggregation | None = field(default=None, init=False)

    server_state = ("sent", "num_nodes_C", "lends_C", "num_exchanges")

    default_net = ExpandedGCN
    own_net = True
    needs_graphs = needs_nodes = True
    takes_edge_weight = False
    needs_own_examples = True
    needs_whole_graphs = True

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require_at_least(0, "num_warmup_rounds")
        self.require_at_least(1, "num_neighbors", "refresh_every")

    def setup(self, federation: Federation) -> None:
        """Start without embeddings and neighbor ids.

        Raises:
            ValueError: The net is not for expanded graphs.
        """
        if federation.client is not None and not isinstance(federation.client.net, ExpandedGCN):
            raise ValueError("FedGNN needs a net for expanded graphs: set model.net to fl_lightning.models.ExpandedGCN")
        super().setup(federation)
        weight_FD = federation.parameters["convs.0.weight"]
        none_CND = weight_FD.new_zeros(federation.num_clients, 0, weight_FD.shape[1], device="cpu")
        number_CN = none_CND.sum(dim=2).long()
        self.sent = {"ids": none_CND.long(), "hidden": none_CND, "received": none_CND, "number": number_CN}
        self.num_nodes_C = torch.zeros(federation.num_clients, dtype=torch.int64)
        self.lends_C = torch.zeros(federation.num_clients, dtype=torch.bool)
        self.num_exchanges = 0
        self._pairs: tuple[np.ndarray, np.ndarray] | None = None

    def initial_stages(self) -> Sequence[Stage]:
        """The clients send the hashed ids of their nodes' neighbors."""
        return [Stage(name="register", client_outputs={"ids": ids_of}, rows={"ids": Rows(of="example")})]

    def stages(self, round_idx: int) -> Sequence[Stage]:
        """Train; every few rounds, send the hidden layer first."""
        late = round_idx - self.num_warmup_rounds
        due = late >= 0 and late % self.refresh_every == 0
        return [*([self.exchange()] if due else []), *super().stages(round_idx)]

    def exchange(self) -> Stage:
        """The clients send the hidden layer."""
        return Stage(name="exchange", client_outputs={"hidden": hidden_of}, rows={"hidden": Rows(of="example")})

    def onboarding_stages(self) -> Sequence[Stage]:
        """Unseen clients send neighbor ids and hidden layer, and train on what others have sent."""
        return [*self.initial_stages(), self.exchange(), *super().stages(0)]

    def training(self, round_idx: int) -> Stage:
        """Train on the expanded graphs."""
        return dataclasses.replace(super().training(round_idx), objective=expanded_loss)

    def configure(self, stage: Stage, clients: Sequence[int]) -> Payload:
        """The global model, and ē and m of the clients' nodes."""
        if stage.name == "register":
            return Payload(clients=tuple(clients))
        payload = self.mixed_models(clients)
        return payload if stage.name == "exchange" else self.expanded(payload)

    def expanded(self, payload: Payload) -> Payload:
        """A payload with ē and m, as soon as there are any."""
        if not self.num_exchanges:
            return payload
        rows = list(payload.clients)
        extras = {name: self.sent[name][rows].to(self.federation.device) for name in ("received", "number")}
        lengths = dict.fromkeys(extras, self.num_nodes_C[rows].to(self.federation.device))
        return dataclasses.replace(payload, extras=extras, lengths=lengths)

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        """Average the models; in an exchange, keep what was sent and match the nodes again."""
        if stage.name == "train":
            super().aggregate(stage, upload)
            return
        self.keep(stage, upload)
        if stage.name == "exchange":
            self.num_exchanges += 1
            self.match(self.federation.training_clients)
            mine = list(self.federation.training_clients)
            number_CN, nodes = self.sent["number"][mine], int(self.num_nodes_C[mine].sum())
            matched, lent = int((number_CN > 0).sum()), int(number_CN.sum())
            self.recorded_metrics = {"server/matched": matched / max(nodes, 1), "server/drawn": lent / max(matched, 1)}
        elif upload.clients and not self.sent["ids"].any():
            warnings.warn(
                "FedGNN: the clients have no neighbor ids, so this is FedAvg: add "
                "fl_lightning.callbacks.NeighborIds to trainer.callbacks",
                stacklevel=2,
            )

    def onboard(self, stage: Stage, upload: Payload) -> None:
        """Keep what unseen clients sent, and match their nodes alone."""
        if stage.name != "train":
            self.keep(stage, upload)
        if stage.name == "exchange":
            self.match(upload.clients)

    def keep(self, stage: Stage, upload: Payload) -> None:
        """Keep a row for each node of the clients that responded."""
        if not upload.clients:
            return
        rows, (name,) = list(upload.clients), stage.per_example
        self._put(name, rows, upload.extras[name].cpu())
        self.num_nodes_C[rows] = upload.lengths[name].cpu()
        if name == "hidden":
            self.lends_C[rows] = True

    def _put(self, name: str, rows: list[int], new_CN: Tensor) -> None:
        if not self.sent[name].numel():
            self.sent[name] = new_CN.new_zeros(self.federation.num_clients, *new_CN.shape[1:])
        size = max(each.shape[1] for each in (new_CN, *self.sent.values()))
        if name == "ids" or size > self.sent["ids"].shape[1]:
            self._pairs = None
        self.sent = {selected: pad_examples(each, size).clone() for selected, each in self.sent.items()}
        self.sent[name][rows] = pad_examples(new_CN, size)

    def match(self, clients: Sequence[int]) -> None:
        """Draw matching nodes of other clients for the nodes of some clients, and average their hidden layers."""
        rows, hidden_CND = list(clients), self.sent["hidden"]
        num_clients, size, width = hidden_CND.shape
        if self._pairs is None:
            self._pairs = common_neighbors(self.sent["ids"], same=self.rule == "same_neighbors")
        row_E, column_E = self._pairs
        wanted_E = np.isin(row_E // size, rows) & self.lends_C.numpy()[column_E // size]
        row_E, column_E = row_E[wanted_E], column_E[wanted_E]
        ticket_E = np.zeros(len(row_E), dtype=np.uint64)
        for name, node_E in (("expands", row_E), ("is drawn", column_E)):  # the same whatever the order of clients
            key_C = self.federation.keys(range(num_clients), name, self.num_exchanges).cpu().numpy().astype(np.uint64)
            node_key_E = splitmix64(key_C[node_E // size] ^ (node_E % size).astype(np.uint64))
            ticket_E = splitmix64(ticket_E ^ node_key_E)
        row_E, column_E = drawn(row_E, column_E, ticket_E, self.num_neighbors)
        number_N = np.bincount(row_E, minlength=num_clients * size)
        share = sp.csr_matrix((1 / number_N[row_E], (row_E, column_E)), shape=(num_clients * size,) * 2)
        received = torch.from_numpy(share @ hidden_CND.flatten(0, 1).double().numpy()).to(hidden_CND)
        self._put("received", rows, received.view(num_clients, size, width)[rows])
        self._put("number", rows, torch.from_numpy(number_N).view(num_clients, size)[rows])

    def evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """The averaged model on expanded graphs is the result.

        ``alone/...`` is the same model without the expansion, ``trained/...`` is before averaging.
        """
        model = self.mixed_models(clients)
        return {
            "": Evaluation(payload=self.expanded(model), output=expanded_output),
            "alone/": Evaluation(payload=model),
            "trained/": Evaluation(payload=self.expanded(model), output=expanded_output, prefer_trained=True),
        }

    def later_evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """Evaluations with ē and m, once there are any."""
        nothing = torch.zeros(len(clients), 0)
        extras = dict.fromkeys(("received", "number"), nothing)
        model = dataclasses.replace(self.mixed_models(clients), extras=extras, lengths=extras)
        return {
            kind: Evaluation(payload=model, output=expanded_output, prefer_trained=bool(kind))
            for kind in ("", "trained/")
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; pairs have to be matched again."""
        super().load_state_dict(state)
        self._pairs = None


def ids_of(client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
    """The hashed ids of its neighbors, 0 for none, (N, M)."""
    assert isinstance(batch, GraphBatch)
    return batch.degree.new_zeros(len(batch.degree), 1) if batch.neighbor_ids is None else batch.neighbor_ids


def hidden_of(client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
    """Its hidden layer, (N, D)."""
    output_ND: Tensor = client.call_part("convs.0", parameters, None, batch)
    return output_ND.relu()


def expanded_output(client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> NetOutput:
    """The net's output for the expanded graph."""
    assert isinstance(batch, GraphBatch)
    if "received" not in context.received:
        return client.output(parameters, batch)
    received_ND, number_N = context.received["received"], context.received["number"]
    share_N = (number_N / (number_N + batch.degree + 1)).to(received_ND)
    output: NetOutput = functional_call(client.net, dict(parameters), (batch, received_ND, share_N), tie_weights=False)
    return output


def expanded_loss(client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
    """The loss on the expanded graph."""
    return client.loss(expanded_output(client, parameters, batch, context), batch)


expanded_output.takes_stacks = expanded_loss.takes_stacks = True  # type: ignore[attr-defined]
