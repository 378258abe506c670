"""What a stage may have clients compute, keep and hear: both executors, resume, failures."""

import contextlib
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from saving import SavesAfter
from torch import Tensor, nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR

from fl_lightning import ClientModule, Evaluation, Participation, Payload, SequentialExecutor, StackedExecutor
from fl_lightning.batches.base import single
from fl_lightning.batches.graphs import GraphCollator
from fl_lightning.executors.hooks import check_hooks
from fl_lightning.executors.optimizer_state import check_optimizer
from fl_lightning.kernels.randomness import generator
from fl_lightning.models import GCN, NormalizedGCN, Twin
from fl_lightning.models.output import NetOutput
from fl_lightning.round.client import parameters_of
from fl_lightning.round.context import Context
from fl_lightning.round.program import PLAIN, Change, LocalProgram
from fl_lightning.round.stage import Rows, Stage, StageAddress, StateSpec
from fl_lightning.strategies import FedAvg, Local
from fl_lightning.strategies.client_outputs import graph_embedding, proxy_graph

EXECUTORS = {
    "sequential": SequentialExecutor,
    "stacked": functools.partial(StackedExecutor, max_padding=0.8),
    "groups": functools.partial(StackedExecutor, max_clients_per_group=2),
}
each_executor = pytest.mark.parametrize("executor", EXECUTORS.values(), ids=EXECUTORS)


class Training(FedAvg):
    """FedAvg whose training stage has more settings."""

    more: ClassVar[Mapping[str, Any]] = {}
    remembers: ClassVar[Mapping[str, StateSpec]] = {}

    def __init__(self, *, num_epochs: int = 3, more: Mapping[str, Any] | None = None, remembers: Any = None) -> None:
        super().__init__(num_epochs=num_epochs)
        self.own_more = dict(more or {})
        self.own_state_specs = dict(remembers or {})
        self.uploads: list[Payload] = []

    def client_state(self) -> Mapping[str, StateSpec]:
        return self.own_state_specs

    def client_outputs(self) -> Mapping[str, Any]:
        return self.own_more.get("client_outputs", {})

    def training(self, round_idx: int) -> Stage:
        return dataclasses.replace(super().training(round_idx), **self.own_more)

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        self.uploads.append(upload)
        super().aggregate(stage, upload)


@pytest.fixture
def fit(federation, make_model, make_trainer):
    """Run a strategy; return the trainer."""

    def run(executor, strategy, model=None, **settings):
        settings = {"num_rounds": 3, "precision": "64-true", "seed": 1, **settings}
        trainer = make_trainer(executor=executor(), **settings)
        trainer.fit(model or make_model(dropout=0.5), federation, strategy)
        return trainer

    return run


def agree(fit, assert_same, make_strategy, **settings) -> list[Any]:
    """Run under every executor; all must end alike. Returns the strategies."""
    runs = []
    for executor in EXECUTORS.values():
        strategy = make_strategy()
        trainer = fit(executor, strategy, **settings)
        runs.append((strategy, trainer.run.executor.state(), trainer.run.history))
    (_, reference, history), *others = runs
    for _, state, own in others:
        assert_same(state.parameters, reference.parameters, tolerance=1e-9)
        assert_same(state.extras, reference.extras, tolerance=1e-9)
        assert_same(own, history, tolerance=1e-6)
    return [strategy for strategy, *_ in runs]


# ------------------------------------------------------------------ anchor, received tensors, step


class AnchoredClient(ClientModule):
    """Its objective reads the anchor without a penalty being set."""

    def objective(self, parameters, batch, context):
        pull = sum((parameters[name] - context.anchor[name]).square().sum() for name in parameters)
        return super().objective(parameters, batch, context) + 0.5 * pull


def test_an_objective_sees_the_anchor_under_every_executor(fit, assert_same, make_model) -> None:
    agree(fit, assert_same, FedAvg, model=make_model(AnchoredClient))


class Sends(Training):
    """Sends each client a direction that its objective goes along, and a row for each of its nodes."""

    def configure(self, stage: Stage, clients: Any) -> Payload:
        payload = super().configure(stage, clients)
        self.generator = torch.Generator().manual_seed(0)
        weight = payload.parameters["head.weight"]
        directions = torch.arange(len(self.federation.training_clients)).to(weight)[list(clients)]
        lengths = torch.tensor([30, 24, 18, 12, 8])[list(clients)]
        indices = torch.arange(30, dtype=weight.dtype).expand(len(clients), -1) * 0.1
        rows = torch.where(torch.arange(30) < lengths[:, None], indices, 0)
        extras = {"direction": directions[:, None, None] * torch.ones_like(weight), "rows": rows}
        return dataclasses.replace(payload, extras=extras, lengths={"rows": lengths})


def along(client: ClientModule, parameters: Any, batch: Any, context: Context) -> Tensor:
    output = client.output(parameters, batch)
    weights_N = context.received["rows"] * batch.example_mask
    loss = client.loss(output, batch) + 1e-2 * (weights_N[:, None] * output.embedding).square().sum()
    return loss + (0.1 * (context.step + 1)) * (context.received["direction"] * parameters["head.weight"]).sum()


def test_received_tensors_and_step_reach_the_objective(fit, assert_same) -> None:
    agree(fit, assert_same, lambda: Sends(more={"objective": along}), participation=Participation(num_clients=3))


def test_bytes_of_rows_are_counted_without_padding() -> None:
    rows = torch.ones(2, 5, 3)
    payload = Payload(clients=(0, 1), extras={"rows": rows}, lengths={"rows": torch.tensor([5, 2])})
    assert payload.num_bytes == 7 * 3 * 4
    assert payload.mask("rows").sum(dim=1).tolist() == [5, 2]
    assert payload.rows([1]).num_bytes == 2 * 3 * 4


@each_executor
def test_a_parameter_that_the_net_lacks_is_named(executor, fit) -> None:
    class Wrong(FedAvg):
        def configure(self, stage, clients):
            payload = super().configure(stage, clients)
            return dataclasses.replace(payload, parameters={**payload.parameters, "control": torch.ones(5, 2)})

    with pytest.raises(ValueError, match=r"the strategy sends a parameter 'control' of shape \(2,\), but the"):
        fit(executor, Wrong())


# ------------------------------------------------------------------ steps


def flip_second(client: Any, parameters: Any, gradients: Any, batch: Any, context: Context) -> Change:
    """The second gradient is turned around; all are added up."""
    turned = {name: gradient * (-0.5 if context.step == 1 else 1.0) for name, gradient in gradients.items()}
    total = {
        name: context.client_state[name] + gradient
        for name, gradient in gradients.items()
        if name in context.client_state
    }
    return Change(gradients=turned, client_state=total)


def follow(parameters: Any, context: Context) -> Change:
    """Every second step the anchor follows."""
    if context.step % 2 == 0:
        return Change()
    moved = {name: context.anchor[name] + 0.5 * (parameters[name] - context.anchor[name]) for name in parameters}
    back = {"head.bias": moved["head.bias"]}
    return Change(anchor=moved, parameters=back)


def pull(parameters: Any, context: Context) -> Tensor:
    return torch.stack([(parameters[n] - context.anchor[n]).square().sum() for n in sorted(parameters)]).sum()


def total_gradient(client: Any, parameters: Any, batch: Any, context: Context) -> dict[str, Tensor]:
    return {
        "bias": context.client_state["head.bias"] * (1 + context.step),
        "weight": context.client_state["head.weight"],
    }


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("model", [{}, {"gradient_clip_val": 0.05}, {"optimizer": functools.partial(SGD, lr=0.2)}])
def test_gradient_rule_moving_anchor_and_memory(busy, model, fit, assert_same, make_model) -> None:
    def strategy() -> Training:
        first = {"head.bias": StateSpec(initial=torch.zeros(3).double(), lasting=False)}
        first["head.weight"] = StateSpec(initial=torch.zeros(3, 8).double())
        program = LocalProgram(step=flip_second, final=follow, send_anchor=True)
        more: dict[str, Any] = {"program": program, "penalty": pull}
        return Training(num_epochs=4, more=more | {"client_outputs": {"gradient": total_gradient}}, remembers=first)

    participation = Participation(num_clients=4, straggler_probability=0.5) if busy else None
    strategies = agree(fit, assert_same, strategy, model=make_model(dropout=0.3, **model), participation=participation)
    last = strategies[0].uploads[-1]
    assert set(last.extras) == {"gradient/bias", "gradient/weight"}
    assert all(tensor.flatten(1).any(dim=1).all() for tensor in last.extras.values())
    assert not busy or len(set(last.num_steps.tolist())) > 1
    for other in strategies[1:]:
        assert_same(dict(other.uploads[-1].extras), dict(last.extras), tolerance=1e-9)
        assert other.uploads[-1].num_steps.tolist() == last.num_steps.tolist()


def back_to_anchor(parameters: Any, context: Context) -> Change:
    """Every third step the head starts from the anchor."""
    return Change(parameters={"head.weight": context.anchor["head.weight"]} if context.step % 3 == 0 else {})


@pytest.mark.parametrize(
    "more",
    [
        {"num_steps": 5},
        {"program": LocalProgram(init=back_to_anchor)},
        {"program": LocalProgram(repeat=2)},
        {"program": LocalProgram(repeat=2, restart=True)},
        {"optimizer": functools.partial(SGD, lr=0.3, momentum=0.9)},
        {"optimizer": functools.partial(Adam, lr=0.1), "num_steps": 4},
        {"trained": ("head.*",)},
    ],
    ids=" and ".join,
)
def test_steps_of_a_stage(more, fit, assert_same) -> None:
    busy = Participation(num_clients=4, straggler_probability=0.5)
    (reference, *_) = agree(fit, assert_same, lambda: Training(num_epochs=5, more=more), participation=busy)
    assert int(reference.uploads[-1].num_steps.max()) <= 5 * more.get("program", PLAIN).repeat


@each_executor
def test_an_optimizer_of_a_stage_leaves_the_clients_own_alone(executor, fit) -> None:
    trainer = fit(executor, Training(more={"optimizer": functools.partial(SGD, lr=0.1, momentum=0.9)}))
    extras = trainer.run.executor.state().extras
    assert not any(tensor.any() for name, tensor in extras.items() if name.startswith("optimizer/"))


@each_executor
def test_parameters_change_before_a_step(executor, fit) -> None:
    """After the fourth step the head is one step from where the round began, not four."""
    plain = fit(executor, Training(num_epochs=1), num_rounds=1).run
    start = plain.architectures[0]["head.weight"]
    for num_epochs, same in ((1, True), (4, False)):
        more = {"program": LocalProgram(init=back_to_anchor)}
        kept = fit(executor, Training(num_epochs=num_epochs, more=more), num_rounds=1).run
        ends = [each.executor.state().parameters["head.weight"] for each in (plain, kept)]
        assert torch.equal(*ends) == same
        assert (ends[1] - start).abs().max() < 0.2


# ------------------------------------------------------------------ memory


def follow_embedding(client: ClientModule, parameters: Any, gradients: Any, batch: Any, context: Context) -> Change:
    """What a step begins with, its dropout too."""
    output = client.output(parameters, batch)
    nodes_ND = 0.5 * context.client_state["of/nodes"] + (context.step + 1) * output.embedding
    return Change(
        client_state={"of/nodes": nodes_ND, "of/bias": context.client_state["of/bias"] + parameters["convs.0.bias"]}
    )


def near_followed(client: ClientModule, parameters: Any, batch: Any, context: Context) -> Tensor:
    output = client.output(parameters, batch)
    apart_ND = (output.embedding - context.client_state["of/nodes"]) * batch.example_mask[:, None]
    return client.loss(output, batch) + 0.01 * apart_ND.square().sum()


def stepping() -> Training:
    state_specs = {
        "of/nodes": StateSpec(initial=torch.full((8,), 0.1, dtype=torch.float64), per_example=True),
        "of/bias": StateSpec(initial=torch.zeros(8, dtype=torch.float64)),
    }
    extras = {"bias": lambda client, p, batch, context: context.client_state["of/bias"]}
    more = {"objective": near_followed, "program": LocalProgram(step=follow_embedding), "client_outputs": extras}
    return Training(more=more, remembers=state_specs)


def test_memory_that_changes_with_every_step(fit, assert_same) -> None:
    busy = Participation(num_clients=4, straggler_probability=0.5)
    for strategy in agree(fit, assert_same, stepping, participation=busy):
        assert all(upload.extras["bias"].any() for upload in strategy.uploads)


@each_executor
def test_memory_is_of_the_parameters_that_a_step_began_with(executor, fit) -> None:
    """A convolution's bias is zero before the first step."""
    for num_epochs, moved in ((1, False), (2, True)):
        strategy = stepping()
        strategy.num_epochs = num_epochs
        fit(executor, strategy, num_rounds=1)
        assert strategy.uploads[-1].extras["bias"].any() == moved


def remember_nodes(client: ClientModule, parameters: Any, batch: Any, context: Context) -> Tensor:
    return 0.5 * context.client_state["nodes"] + client.output(parameters, batch).embedding


def near_memory(client: ClientModule, parameters: Any, batch: Any, context: Context) -> Tensor:
    output = client.output(parameters, batch)
    apart_ND = (output.embedding - context.client_state["nodes"]) * batch.example_mask[:, None]
    return client.loss(output, batch) + 0.01 * apart_ND.square().sum() + 0.1 * context.client_state["count"]


def remembering() -> Training:
    state_specs = {
        "nodes": StateSpec(initial=torch.full((8,), 0.1, dtype=torch.float64), per_example=True),
        "count": StateSpec(initial=torch.zeros((), dtype=torch.float64)),
    }
    more = {
        "objective": near_memory,
        "client_state": {
            "nodes": remember_nodes,
            "count": lambda client, p, batch, context: context.client_state["count"] + 1,
        },
        "client_outputs": {"nodes": lambda client, p, batch, context: client.output(p, batch).embedding},
        "rows": {"nodes": Rows(of="example")},
    }
    return Training(more=more, remembers=state_specs)


def test_memory_of_nodes_and_of_clients(fit, assert_same) -> None:
    strategies = agree(fit, assert_same, remembering, participation=Participation(num_clients=3))
    for strategy in strategies:
        for upload in strategy.uploads:
            sizes = torch.tensor([30, 24, 18, 12, 8])[list(upload.clients)]
            assert upload.lengths["nodes"].tolist() == sizes.tolist()
            assert not upload.extras["nodes"][~upload.mask("nodes")].any()
            assert upload.num_bytes == sum(t.nbytes for t in upload.parameters.values()) + int(sizes.sum()) * 8 * 8


@each_executor
def test_memory_is_resumed_exactly(executor, fit, federation, make_model, make_trainer, assert_same, tmp_path) -> None:
    busy = Participation(num_clients=3)
    whole = fit(
        executor,
        remembering(),
        num_rounds=4,
        participation=busy,
        callbacks=[SavesAfter(2, tmp_path / "v" / "two.ckpt")],
    )
    resumed = make_trainer(executor=executor(), num_rounds=4, precision="64-true", seed=1, participation=busy)
    resumed.fit(make_model(dropout=0.5), federation, remembering(), ckpt_path=str(tmp_path / "v" / "two.ckpt"))
    assert_same(dict(resumed.run.executor.state().extras), dict(whole.run.executor.state().extras))
    counts = whole.run.executor.state().extras["client_state/count"]
    assert counts.sum() == 4 * 3


@each_executor
def test_memory_of_a_client_that_fails_is_rolled_back(executor, fit) -> None:
    def fails(client: Any, parameters: Any, batch: Any, context: Context) -> Tensor:
        return parameters["head.bias"].sum() / (batch.example_mask.sum() != 18)

    strategy = remembering()
    strategy.own_more["client_outputs"] = {"odd": fails}
    strategy.own_more["rows"] = {}
    with pytest.warns(UserWarning, match="failed in stage 'train'"):
        trainer = fit(executor, strategy)
    assert trainer.run.executor.state().extras["client_state/count"].tolist() == [3, 3, 0, 3, 3]
    assert (trainer.run.executor.state().extras["client_state/nodes"][2, :18] == 0.1).all()


# ------------------------------------------------------------------ failures


class Explodes(ClientModule):
    """Raises for the client of 18 nodes, and for all that are computed with it."""

    def loss(self, output: NetOutput, batch: Any) -> Tensor:
        if batch.example_mask.shape[-1] == 18 or mapped_clients(batch) > 1:
            raise RuntimeError("odd client")
        return super().loss(output, batch)


def mapped_clients(batch: Any) -> int:
    """How many clients ``vmap`` maps over."""
    functorch = torch._C._functorch
    return len(functorch.get_unwrapped(batch.y)) if functorch.is_batchedtensor(batch.y) else 1


@pytest.mark.parametrize("executor", ["sequential", "stacked"])
def test_only_the_culprit_is_blamed(executor, fit, make_model) -> None:
    with pytest.warns(UserWarning, match=r"client-02 failed in stage 'train' round 0: RuntimeError: odd client"):
        trainer = fit(EXECUTORS[executor], FedAvg(), model=make_model(Explodes), num_rounds=1)
    assert trainer.run.history[-1]["num_failures"] == 1


@pytest.mark.parametrize("net", [functools.partial(GCN, dropout=0.5), NormalizedGCN], ids=["dropout", "statistics"])
def test_clients_beside_a_failing_one_are_trained_as_if_it_were_not_there(net, fit, make_model, assert_same) -> None:
    states = []
    for executor in ("sequential", "stacked"):
        model = Explodes(functools.partial(net, hidden_channels=8), make_model().optimizer_factory)
        with pytest.warns(UserWarning, match="odd client"):
            trainer = fit(EXECUTORS[executor], Local(), model=model)
        states.append(dict(trainer.run.executor.state().parameters))
    assert_same(states[1], states[0], tolerance=1e-9)


def test_memory_of_nodes_beside_a_failing_client(fit, make_model, assert_same) -> None:
    runs = []
    for executor in ("sequential", "stacked"):
        with pytest.warns(UserWarning, match="odd client"):
            trainer = fit(EXECUTORS[executor], remembering(), model=make_model(Explodes))
        assert trainer.run.num_failures == {"client-02": 3}
        runs.append(trainer.run.executor.state())
    for row, size in {0: 30, 1: 24, 3: 12, 4: 8}.items():
        first, second = (run.extras["client_state/nodes"][row, :size] for run in runs)
        torch.testing.assert_close(first, second, rtol=1e-9, atol=1e-12)
    assert_same(dict(runs[0].parameters), dict(runs[1].parameters), tolerance=1e-9)


@pytest.mark.parametrize("executor", ["sequential", "stacked"])
def test_a_parameter_that_is_an_output_too_beside_a_failing_client(executor, fit, make_model) -> None:
    """As FedAux's projection vector: it is sent once, of the clients that respond."""
    strategy = remembering()
    strategy.own_more["client_outputs"] = {"head.bias": lambda client, parameters, *_: parameters["head.bias"].clone()}
    strategy.own_more["rows"] = {}
    with pytest.warns(UserWarning, match="odd client"):
        trainer = fit(EXECUTORS[executor], strategy, model=make_model(Explodes))
    assert trainer.run.num_failures == {"client-02": 3}
    assert all(torch.equal(each.extras["head.bias"], each.parameters["head.bias"]) for each in strategy.uploads)


# ------------------------------------------------------------------ evaluation


def reversed_classes(client: ClientModule, parameters: Any, batch: Any, context: Context) -> NetOutput:
    output = client.output(parameters, batch)
    return NetOutput(output.logits.flip(-1) * context.received.get("scale", 1.0), output.embedding)


class Evaluates(FedAvg):
    """Other predictions, other optimizers, failures."""

    def evaluations(self, clients):
        tuning = Stage(name="adapt", num_steps=2, optimizer=functools.partial(SGD, lr=0.5), trained=("head.*",))
        payload = super().evaluations(clients)[""].payload
        scale = torch.full((len(clients),), 2.0, dtype=torch.float64)
        scaled = dataclasses.replace(payload, extras={"scale": scale})
        return {
            "": Evaluation(payload=payload),
            "reversed/": Evaluation(payload=scaled, output=reversed_classes),
            "adapted/": Evaluation(payload=payload, tuning=tuning),
            "both/": Evaluation(tuning=tuning, output=reversed_classes),
        }


def test_evaluation_with_its_own_optimizer_steps_and_predictions(fit, assert_same, federation) -> None:
    agree(fit, assert_same, Evaluates)
    trainer = fit(SequentialExecutor, Evaluates())
    last = trainer.run.history[-1]
    assert len({last["val/loss"], last["reversed/val/loss"], last["adapted/val/loss"], last["both/val/loss"]}) == 4
    actual = [
        trainer.run.executor.predict(trainer.run.strategy.evaluations((0,))["reversed/"], (0,), 0)[0],
        fit(StackedExecutor, Evaluates()).run.executor.predict(
            trainer.run.strategy.evaluations((0,))["reversed/"], (0,), 0
        )[0],
    ]
    assert_same(actual[0], actual[1], tolerance=1e-6)


@each_executor
def test_a_client_that_cannot_be_evaluated_is_left_out(executor, fit) -> None:
    def odd(client: ClientModule, parameters: Any, batch: Any, context: Context) -> NetOutput:
        if batch.example_mask.shape[-1] == 18 or mapped_clients(batch) > 1:
            raise RuntimeError("odd client")
        return client.output(parameters, batch)

    class Odd(FedAvg):
        def evaluations(self, clients):
            return {"": Evaluation(), "odd/": Evaluation(output=odd)}

    with pytest.warns(UserWarning, match="failed in the evaluation 'odd/': RuntimeError"):
        trainer = fit(executor, Odd())
    assert 2 not in trainer.run.scores["odd/"].clients
    assert trainer.run.scores[""].clients == (0, 1, 2, 3, 4)


class InTwoWays(FedAvg):
    """The first two clients are evaluated with their own models, one of them by other predictions."""

    def evaluations(self, clients):
        others = {0: Evaluation(), 1: Evaluation(output=reversed_classes)}
        shared = dataclasses.replace(super().evaluations(clients)[""], others=others)
        return {**super().evaluations(clients), "": shared, "reversed/": Evaluation(output=reversed_classes)}


@each_executor
def test_clients_are_evaluated_each_in_its_own_way(executor, fit, assert_same) -> None:
    run = fit(executor, InTwoWays()).run
    strategy, clients = run.strategy, run.training_clients
    shared = FedAvg.evaluations(strategy, clients)[""]
    expected = run.executor.evaluate({"": shared}, clients, 0)[""].upload.extras["val/loss"]
    actual = run.scores[""].extras["val/loss"]
    assert run.scores[""].clients == clients
    assert torch.equal(actual[0], run.scores["trained/"].extras["val/loss"][0])
    assert torch.equal(actual[1], run.scores["reversed/"].extras["val/loss"][1])
    assert_same(actual[2:], expected[2:], tolerance=1e-6)
    predictions = run.executor.predict(strategy.evaluations(clients)[""], clients, 0)
    assert sorted(predictions) == list(clients)
    assert_same(predictions[3], run.executor.predict(shared, clients, 0)[3], tolerance=1e-6)
    assert_same(predictions[0], run.executor.predict(Evaluation(), clients, 0)[0], tolerance=1e-6)


# ------------------------------------------------------------------ several models, graphs


class TwinAveraging(FedAvg):
    """FedAvg of one copy; the other is trained alone."""

    def __init__(self) -> None:
        super().__init__(num_epochs=2)
        self.personal = ("personal.*",)

    def build_net(self, net: nn.Module) -> nn.Module:
        return Twin(net)

    def training(self, round_idx: int) -> Stage:
        return dataclasses.replace(super().training(round_idx), objective=both)


def both(client: ClientModule, parameters: Any, batch: Any, context: Context) -> Tensor:
    losses = [client.loss(client.part_output(part, parameters, batch), batch) for part in Twin.models]
    return losses[0] + losses[1]


both.takes_stacks = True  # type: ignore[attr-defined]


@pytest.mark.parametrize("clip", [None, 0.05])
def test_two_models_are_trained_as_if_each_were_alone(clip, fit, assert_same, make_model) -> None:
    def model() -> ClientModule:
        return make_model(dropout=0.0, gradient_clip_val=clip)

    for executor in EXECUTORS.values():
        twin = fit(executor, TwinAveraging(), model=model()).run.executor.state().parameters
        averaged = fit(executor, FedAvg(num_epochs=2), model=model()).run.executor.state().parameters
        alone = fit(executor, Local(num_epochs=2), model=model()).run.executor.state().parameters
        assert_same(parameters_of("shared", twin), dict(averaged), tolerance=1e-12)
        assert_same(parameters_of("personal", twin), dict(alone), tolerance=1e-12)


def add_node(client: ClientModule, parameters: Any, graph: Any, context: Context) -> Any:
    """One more node, joined to the first, with its features."""
    num_nodes = graph.num_nodes
    edges = torch.tensor([[0, num_nodes], [num_nodes, 0]])
    edge_index = torch.cat([graph.edge_index_2E, edges], dim=1)
    order = (edge_index[0] * (num_nodes + 1) + edge_index[1]).argsort()
    nobody = torch.zeros(1, dtype=torch.bool)
    return dataclasses.replace(
        graph,
        x_NF=torch.cat([graph.x_NF, graph.x_NF[:1] + parameters["head.bias"].sum().float()]),
        edge_index_2E=edge_index[:, order],
        y_N=torch.cat([graph.y_N, torch.tensor([-1])]),
        train_mask_N=torch.cat([graph.train_mask_N, nobody]),
        val_mask_N=torch.cat([graph.val_mask_N, nobody]),
        test_mask_N=torch.cat([graph.test_mask_N, nobody]),
        node_idx_N=torch.cat([graph.node_idx_N, torch.tensor([-1])]),
    )


def growing() -> Training:
    strategy = remembering()
    strategy.own_more["program"] = LocalProgram(rewrite=add_node)
    return strategy


def test_a_stage_rewrites_the_graphs(fit, assert_same) -> None:
    agree(fit, assert_same, growing, participation=Participation(num_clients=3), num_rounds=4)
    trainer = fit(EXECUTORS["stacked"], growing())
    assert [trainer.run.executor.collator.size(client) for client in range(5)] == [33, 27, 21, 15, 11]
    predictions = trainer.run.executor.predict(Evaluation(), (0, 4), 0)
    assert [len(predictions[client]) for client in (0, 4)] == [30, 8]


@each_executor
def test_rewritten_graphs_are_resumed(
    executor, fit, federation, make_model, make_trainer, assert_same, tmp_path
) -> None:
    whole = fit(executor, growing(), num_rounds=4, callbacks=[SavesAfter(2, tmp_path / "v" / "two.ckpt")])
    resumed = make_trainer(executor=executor(), num_rounds=4, precision="64-true", seed=1)
    resumed.fit(make_model(dropout=0.5), federation, growing(), ckpt_path=str(tmp_path / "v" / "two.ckpt"))
    assert_same(dict(resumed.run.executor.state().extras), dict(whole.run.executor.state().extras))
    assert_same(dict(resumed.run.executor.state().parameters), dict(whole.run.executor.state().parameters))


# ------------------------------------------------------------------ Lightning's hooks, optimizers, addresses


class OwnOptimizer(ClientModule):
    def configure_optimizers(self):
        return SGD(self.net.parameters(), lr=1e-9)


def test_an_own_configure_optimizers_is_obeyed(fit, assert_same, make_model) -> None:
    with pytest.warns(UserWarning, match="OwnOptimizer overrides configure_optimizers, which the stacked executor"):
        trainer = fit(StackedExecutor, FedAvg(), model=make_model(OwnOptimizer))
    start = trainer.run.architectures[0]
    state = trainer.run.executor.state().parameters
    assert all((state[name] - start[name]).abs().max() < 1e-6 for name in start)


class Scheduled(ClientModule):
    def configure_optimizers(self):
        optimizer = SGD(self.net.parameters(), lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": StepLR(optimizer, 1)}


def test_schedulers_are_refused_by_name(fit, make_model) -> None:
    with pytest.raises(ValueError, match="configure_optimizers returned dict of SGD, StepLR: return one optimizer"):
        fit(SequentialExecutor, FedAvg(), model=make_model(Scheduled))


def test_no_optimizer_is_refused() -> None:
    for returned, named in ((None, "NoneType"), ([SGD([torch.zeros(1)])], "list of SGD")):
        with pytest.raises(ValueError, match=f"returned {named}: return one optimizer"):
            check_optimizer(returned)


@pytest.mark.parametrize(
    ("name", "method", "advice"),
    [
        ("setup", lambda self, stage: None, "overrides setup, which a federation never calls: override __init__"),
        ("prepare_data", lambda self: None, "overrides prepare_data, which a federation never calls"),
        ("teardown", lambda self, stage: None, "overrides teardown, which"),
        ("training_epoch_end", lambda self, outputs: None, "never calls: override on_train_epoch_end instead"),
        ("on_train_batch_strat", lambda self, *args: None, "never calls: did you mean on_train_batch_start"),
        ("training_step", lambda self, batch: None, r"training_step is called with \(self, batch, batch_idx\), but"),
        ("loss", lambda self, output: None, r"loss is called with \(self, output, batch\), but it takes others"),
        ("scores", lambda self, output, batch, more: None, "scores is called with .*missing a required .*'more'"),
        ("clip", lambda self, gradients, norm=1.0: None, None),
        ("training_step", lambda self, *args: None, None),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_methods_that_would_not_be_called_as_they_are_meant_are_refused(name, method, advice) -> None:
    client = type("Own", (ClientModule,), {name: method})()
    with pytest.raises(ValueError, match=f"model: Own.*{advice}") if advice else contextlib.nullcontext():
        check_hooks(client)


@pytest.mark.parametrize("hook", ["validation_step", "optimizer_step", "on_validation_epoch_end", "on_fit_start"])
@pytest.mark.parametrize("executor", ["sequential", "stacked"])
def test_hooks_that_nothing_calls_are_refused(hook, executor, fit, make_model) -> None:
    kind = type("Hooked", (ClientModule,), {hook: lambda self, *args: None})
    with pytest.raises(ValueError, match=f"model: Hooked overrides {hook}, which a federation never calls"):
        fit(EXECUTORS[executor], FedAvg(), model=make_model(kind))


def test_sequential_calls_the_hooks_of_a_step(fit, make_model) -> None:
    calls: list[str] = []
    names = [
        "on_before_zero_grad",
        "on_before_backward",
        "on_after_backward",
        "on_before_optimizer_step",
        "on_train_batch_start",
        "on_train_batch_end",
    ]
    kind = type("Noted", (ClientModule,), {n: lambda self, *args, n=n: calls.append(n) for n in names})
    fit(SequentialExecutor, FedAvg(num_epochs=1), model=make_model(kind), num_rounds=1)
    order = ["on_train_batch_start", *names[:4], "on_train_batch_end"]
    assert calls == order * 5


def test_a_stage_is_found_at_its_address(federation, make_model, make_trainer) -> None:
    strategy = FedAvg(num_epochs=2)
    make_trainer(num_rounds=1).fit(make_model(), federation, strategy)
    actual = strategy.stage(StageAddress(phase="round", round_idx=3, name="train"))
    assert (actual.name, actual.num_epochs) == ("train", 2)
    assert strategy.stage(StageAddress(phase="onboarding", round_idx=3, name="train")).upload == actual.upload
    with pytest.raises(ValueError, match="FedAvg has no stage at StageAddress"):
        strategy.stage(StageAddress(phase="initial", round_idx=0, name="train"))


# ------------------------------------------------------------------ the server in a round


class Relays(FedAvg):
    """Within a round every client hears its predecessor's embedding; the server trains the average on a proxy."""

    def stages(self, round_idx: int) -> list[Stage]:
        embed = Stage(name="embed", client_outputs={"embedding": graph_embedding})
        return [embed, *super().stages(round_idx)]

    def training(self, round_idx: int) -> Stage:
        return dataclasses.replace(super().training(round_idx), objective=toward_neighbor)

    def configure(self, stage: Stage, clients: Any) -> Payload:
        payload = super().configure(stage, clients)
        if stage.name == "embed":
            return payload
        rows = [self.heard.clients.index(client) for client in clients]
        neighbors = self.heard.extras["embedding"].roll(1, dims=0)[rows]
        return dataclasses.replace(payload, extras={"neighbor": neighbors})

    def aggregate(self, stage: Stage, upload: Payload) -> None:
        if stage.name == "embed":
            self.heard = upload
            return
        super().aggregate(stage, upload)
        graph = proxy_graph(self.federation.num_features, generator(0, "proxy"), num_blocks=2, nodes_per_block=5)
        batch = single(GraphCollator([graph], device=torch.device("cpu"), dtype=torch.float64)([0]))
        model = {name: tensor[0].clone().requires_grad_() for name, tensor in self.models.items()}
        confidence = self.federation.client.output(model, batch).logits.logsumexp(dim=-1).sum()
        actual = torch.autograd.grad(confidence, list(model.values()), allow_unused=True)
        for (name, parameter), gradient in zip(model.items(), actual, strict=True):
            self.models[name] = (parameter.detach() - 0.01 * (0 if gradient is None else gradient))[None]


def toward_neighbor(client: ClientModule, parameters: Any, batch: Any, context: Context) -> Tensor:
    apart_D = graph_embedding(client, parameters, batch, context) - context.received["neighbor"]
    return client.objective(parameters, batch, context) + 0.1 * apart_D.square().sum()


def test_clients_hear_each_other_within_a_round_and_the_server_trains(fit, assert_same, make_model) -> None:
    model = make_model(dropout=0.5, optimizer=functools.partial(SGD, lr=0.2))  # Adam would enlarge rounding errors
    strategies = agree(fit, assert_same, Relays, participation=Participation(num_clients=3), model=model)
    assert_same(strategies[1].models, strategies[0].models, tolerance=1e-9)


# ------------------------------------------------------------------ mixing


class Blockwise(FedAvg):
    """The head by its own weights."""

    def mixing_matrix(self, upload):
        weights = torch.zeros(1, len(upload.clients), dtype=torch.float64)
        weights[0, 0] = 1.0
        return {"head.*": weights, "*": super().mixing_matrix(upload)}


def test_each_group_of_parameters_has_its_own_weights(fit, assert_same) -> None:
    strategy, plain = Blockwise(), FedAvg()
    first = fit(StackedExecutor, strategy, num_rounds=1)
    fit(StackedExecutor, plain, num_rounds=1)
    trained = first.run.executor.state().parameters
    assert_same(strategy.models["head.weight"][0], trained["head.weight"][0], tolerance=1e-12)
    assert_same(strategy.models["convs.0.weight"], plain.models["convs.0.weight"], tolerance=1e-12)
