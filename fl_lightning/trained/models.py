"""Modules that compute what a client's model predicts from plain tensors.

Inputs are prepared as the client's data are (``LoadedRun.data``): what the source of a run normalizes is not normalized
again here.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn

from fl_lightning.batches import ExampleCollator, GraphCollator
from fl_lightning.batches.base import Batch, single
from fl_lightning.batches.client_data import ClientData
from fl_lightning.batches.client_examples import ClientExamples
from fl_lightning.batches.client_graph import ClientGraph
from fl_lightning.batches.graph_sets import GraphSetBatch
from fl_lightning.batches.graphs import GraphBatch
from fl_lightning.data.edge_data import merged_edges
from fl_lightning.models.output import NetOutput, as_output, own_outputs
from fl_lightning.models.plain import PlainNet
from fl_lightning.models.plain_inputs import Inputs, parameters_of
from fl_lightning.round.client import ClientModule, OutputRule
from fl_lightning.tasks import Task
from fl_lightning.tasks.targets import Target

#: Two predictions that differ by less are the same: sums are added in another order.
TOLERANCE = 1e-4


class BatchModel(nn.Module):
    """A net of this package, or the rule by which a strategy computes outputs with it.

    Args:
        net: The net, which maps a batch to logits.
        client: The client whose outputs a rule computes, with the parameters in its ``net``; None without a rule.
        rule: Of the strategy (``Evaluation.output``); None for the net's own output.
        num_outputs: How many of the net's outputs, the first ones, are the client's own; None for all of them.
    """

    def __init__(
        self,
        net: nn.Module,
        client: ClientModule | None = None,
        rule: OutputRule | None = None,
        num_outputs: int | None = None,
    ) -> None:
        super().__init__()
        self.net = net
        self.num_outputs = num_outputs
        self._client = (client,)  # in a tuple, so that its net is not registered twice
        self._rule = rule

    @property
    def has_rule(self) -> bool:
        """Whether the outputs are those of a strategy's rule."""
        return self._rule is not None

    def forward(self, batch: Batch) -> Tensor:
        """The logits of one client's batch (``LoadedRun.batch``), (N, num_outputs)."""
        return self._output(batch).logits

    def _output(self, batch: Batch) -> NetOutput:
        client = self._client[0]
        if client is None or self._rule is None:
            return own_outputs(as_output(self.net(batch)), batch)
        return self._rule(client, client.parameter_dict(), batch, client.context)

    @property
    def _form(self) -> Tensor:
        """A parameter: device and floating point type of the inputs."""
        return next(self.parameters())


class GraphModel(BatchModel):
    """The same for one graph whose nodes are the examples."""

    def forward(  # type: ignore[override]
        self, x: Tensor, edge_index: Tensor, edge_weight: Tensor | None = None, edge_attr: Tensor | None = None
    ) -> Tensor:
        """The logits of each node.

        Args:
            x: Features (N, F).
            edge_index: Source and target of each edge, int64 (2, E); each edge in both directions unless the graph is
                directed. As in a client's graph, loops are left out, and of repeated edges the weights are added and
                the attributes averaged.
            edge_weight: Weight of each edge (E,).
            edge_attr: Attributes of each edge (E, K).

        Returns:
            Logits (N, num_outputs).
        """
        given = {"edge_weight": edge_weight, "edge_attr": edge_attr}
        values = {name: None if value is None else value.cpu() for name, value in given.items()}
        edge_index, carried, _ = merged_edges(edge_index.cpu(), values, len(x))
        graph = ClientGraph(
            **_unlabeled(len(x), self.num_outputs),
            x_NF=x.cpu(),
            edge_index_2E=edge_index,
            node_idx_N=torch.arange(len(x)),
            edge_weight_E=carried.get("edge_weight"),
            edge_attr_EK=carried.get("edge_attr"),
        )
        dense = {"sparse_features": False}
        with torch.autocast(self._form.device.type, enabled=False):  # torch has no sparse products in bfloat16
            batch = single(GraphCollator([graph], layout=dense, device=self._form.device, dtype=self._form.dtype)([0]))
        return super().forward(batch)


class ExampleModel(BatchModel):
    """The same for independent examples."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        """The logits of each example.

        Args:
            x: Rows of a table, series or images, (N, *shape).

        Returns:
            Logits (N, num_outputs).
        """
        examples = ClientExamples(**_unlabeled(len(x), self.num_outputs), x_NX=x.cpu().to(self._form.dtype))
        collator = ExampleCollator([examples], device=self._form.device, dtype=self._form.dtype)
        return super().forward(single(collator([0])))


def agree(predicted: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Whether predictions are equal but for rounding; numbers may be large, so that it is relative, too."""
    return predicted.shape == expected.shape and torch.allclose(
        predicted, expected, rtol=tolerance / 10, atol=tolerance
    )


def model_of(client: ClientModule, rule: OutputRule | None, task: Task, client_data: ClientData) -> nn.Module:
    """The module that computes a client's outputs: a user's own where it alone does so, else one of these.

    Args:
        client: The client, with its parameters and context.
        rule: The strategy's, if there is one.
        task: The task.
        client_data: The client's data, which say whether some of the outputs are not its own.
    """
    net, num_outputs = client.net, client_data.num_outputs
    module = net.whole_module if isinstance(net, PlainNet) else None
    takes_inputs = task.is_on_nodes or task.has_graph_examples or not task.has_graphs
    if module is not None and takes_inputs and rule is None and num_outputs is None:
        return module
    kind = BatchModel
    if task.is_on_nodes:
        kind = GraphModel
    elif not task.has_graphs:
        kind = ExampleModel
    return kind(net, None if rule is None else client, rule, num_outputs)


def inputs_of(model: nn.Module, client_data: ClientData, batch: Batch) -> dict[str, Any]:
    """The inputs of such a module for a client's own data, by the names that its ``forward`` has.

    Args:
        model: The module.
        client_data: The data.
        batch: The same as a batch of one client.
    """
    if type(model) is BatchModel:
        return {"batch": batch}
    if not isinstance(batch, GraphBatch):
        return {parameters_of(model.forward)[0]: cast(ClientExamples, client_data).x_NX}
    read = Inputs(model)
    read.pools = isinstance(batch, GraphSetBatch)
    if isinstance(batch, GraphSetBatch):
        from fl_lightning.models.stacked.graph import plain_graphs  # takes a second

        first, others = read.arguments(model, plain_graphs(batch))
    else:
        first, others = read.arguments(model, batch.plain)
    return {parameters_of(model.forward)[0]: first, **others}


def outputs_of(model: nn.Module, client_data: ClientData, batch: Batch, target: Target) -> tuple[Tensor, float]:
    """What such a module predicts, in the precision of autocast, and how far others of that precision may be from it.

    Args:
        model: The module.
        client_data: The data.
        batch: The same as a batch of one client.
        target: What is predicted.
    """
    result = model(**inputs_of(model, client_data, batch))
    logits: Tensor = result[0] if isinstance(result, tuple) else result
    kind = logits.device.type
    form = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else logits.dtype
    return target.predictions(logits), max(TOLERANCE, 8 * torch.finfo(form).eps)


def _unlabeled(size: int, num_outputs: int | None) -> dict[str, Any]:
    nothing = torch.zeros(size, dtype=torch.bool)
    roles = {f"{split}_mask_N": nothing for split in ("train", "val", "test")}
    return {"name": "given", "y_N": torch.full((size,), -1), "num_outputs": num_outputs, **roles}
