"""Pooled: one owner has everybody's data and trains one model on them; the ceiling, as Local is the floor.

Net, roles of the examples and local epochs of a round are a client's, and each client is scored on its own examples. It
is no federated method, for nothing is kept apart. Ogier du Terrail et al.: "FLamby: Datasets and Benchmarks for
Cross-Silo Federated Learning in Realistic Healthcare Settings", NeurIPS 2022, section 4, calls it the pooled strategy.

Shape legend: N examples of the pool, K outputs.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fl_lightning.batches.base import Batch, pad
from fl_lightning.federation import Federation
from fl_lightning.models.output import NetOutput
from fl_lightning.round.client import ClientModule
from fl_lightning.round.context import Context, Parameters
from fl_lightning.round.payload import Payload
from fl_lightning.round.stage import Evaluation, Rows, Stage
from fl_lightning.strategies.base import Strategy
from fl_lightning.tasks import Task


@dataclass(kw_only=True, eq=False)
class Pooled(Strategy):
    """One training on all clients' data (``data/pool.py``, ``executors/on_pool.py``), whoever takes part in a round.

    A node that is a training example of one client and a validation or test example of another is left out of it.

    Args:
        graph: What is trained on where a graph was cut into clients: ``cut``, the clients' graphs side by side, or
            ``whole``, each node once with the edges between clients too, over which it is also predicted. The whole
            graph also has the nodes and edges (not the labels) of clients that are held out, so that these are not
            unseen. Clients whose graphs are no parts of one, or that hold examples, have ``cut`` alone.
    """

    graph: Literal["cut", "whole"] = "cut"

    shares_statistics = True
    needs_common_layers = True
    server_state: ClassVar[tuple[str, ...]] = ("model", "logits_NK")

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self._rows: tuple[Tensor, ...] = ()
        if self.graph == "whole":
            self.needs_own_examples, self.takes_unseen_clients = True, False  # type: ignore[misc]

    def check_task(self, task: Task) -> None:
        """Refuse a whole graph of what is no graph's nodes."""
        super().check_task(task)
        if self.graph == "whole" and not task.is_on_nodes:
            raise ValueError(
                f"strategy.graph is 'whole', but what is learned is of {task.examples}, not of the nodes of a graph "
                "that was cut into clients: set it to 'cut'"
            )

    def setup(self, federation: Federation) -> None:
        """Begin with the initial model."""
        super().setup(federation)
        if (client := federation.client) and client.running_statistics == "personal" and federation.statistics:
            raise ValueError(
                "Pooled has one model for all clients, but model.running_statistics is 'personal': set it to 'shared'"
            )
        self.model = {name: parameter.clone() for name, parameter in federation.parameters.items()}
        self.logits_NK: Tensor | None = None

    def place(self, rows: Sequence[Tensor]) -> None:
        """Be told where in a whole graph each client's nodes are, int64; nothing where there is none."""
        self._rows = tuple(rows)

    def stages(self, round_idx: int) -> Sequence[Stage]:
        """Train the pool; a whole graph's nodes are predicted there, and nowhere else."""
        stage = dataclasses.replace(self.training(round_idx), upload=tuple(self.federation.parameters))
        if self.graph == "whole":
            stage = dataclasses.replace(
                stage, client_outputs={"logits": predicted}, rows={"logits": Rows(of="example")}
            )
        return [stage]

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        """Keep the model."""
        if upload.clients:
            self.model = {name: tensor[0].clone() for name, tensor in upload.parameters.items()}
            self.logits_NK = upload.extras["logits"][0].clone() if "logits" in upload.extras else None

    def model_for(self, clients: Sequence[int]) -> Payload:
        """The model, for everyone."""
        parameters = {name: tensor.expand(len(clients), *tensor.shape) for name, tensor in self.model.items()}
        return Payload(clients=tuple(clients), parameters=parameters)

    def evaluations(self, clients: Sequence[int]) -> Mapping[str, Evaluation]:
        """The model on each client's own examples, or what it has predicted of them over the whole graph."""
        payload = self.model_for(clients)
        if self.logits_NK is None:
            return {"": Evaluation(payload=payload)}
        rows = [self._rows[client].to(self.logits_NK.device) for client in clients]
        logits_CNK = pad([self.logits_NK[row_N] for row_N in rows], self.logits_NK.device)
        lengths_C = torch.tensor([len(row_N) for row_N in rows], device=self.logits_NK.device)
        payload = dataclasses.replace(payload, extras={"logits": logits_CNK}, lengths={"logits": lengths_C})
        return {"": Evaluation(payload=payload, output=received)}

    def onboarding_stages(self) -> Sequence[Stage]:
        """None: clients that were held out are scored by the model as it is."""
        return ()

    def peer_bytes(self, stage: Stage, upload: Payload) -> list[int]:
        """None: all is in one place."""
        return [0] * len(upload.clients)


def predicted(client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> Tensor:
    """What the model says of each node, (N, K)."""
    return client.output(parameters, batch).logits


def received(client: ClientModule, parameters: Parameters, batch: Batch, context: Context) -> NetOutput:
    """What was said of the client's nodes."""
    logits_NK = context.received["logits"]
    return NetOutput(logits_NK, logits_NK)


received.takes_stacks = True  # type: ignore[attr-defined]
