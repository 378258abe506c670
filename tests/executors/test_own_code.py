"""A user's code in a client: what runs on a stack, what is there in ``training_step``, how its errors are told."""

import copy
import dataclasses
import functools
import gc
import inspect
import pickle
import random
import re
import warnings
from pathlib import Path
from typing import Any, ClassVar

import lightning
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR
from torchmetrics.classification import MulticlassF1Score

import fl_lightning
from fl_lightning import ClientModule, Participation, SequentialExecutor, StackedExecutor, strategies
from fl_lightning.batches import GraphCollator
from fl_lightning.executors.failure import Failure, WrongReturn, failure_of
from fl_lightning.executors.trial import why_not_stacked
from fl_lightning.models.output import NetOutput
from fl_lightning.round.privacy import RecordPrivacy
from fl_lightning.round.program import Change, LocalProgram
from fl_lightning.round.stage import Stage
from fl_lightning.run.failures import ClientFailure, TooFewUpdates
from fl_lightning.strategies import (
    APFL,
    MOON,
    Ditto,
    FedAux,
    FedAvg,
    FedProto,
    FedProx,
    FedSage,
    FedSagePlus,
    PerFedAvg,
)


class Masked(ClientModule):
    """The loss as most write it."""

    def loss(self, output: Any, batch: Any) -> Tensor:
        return F.cross_entropy(output.logits[batch.train_mask], batch.y[batch.train_mask])


class MaskedObjective(ClientModule):
    def objective(self, parameters: Any, batch: Any, context: Any) -> Tensor:
        logits = self.output(parameters, batch).logits
        return F.cross_entropy(logits[batch.train_mask], batch.y[batch.train_mask])


class MaskedScores(ClientModule):
    def scores(self, output: Any, batch: Any) -> Any:
        actual = super().scores(output, batch)
        assert bool(batch.train_mask.any()) or True  # a Python branch on a tensor
        return actual


class Drops(nn.Module):
    """Dropout of PyTorch's, which ``vmap`` does not take."""

    def __init__(self, num_features: int, num_outputs: int) -> None:
        super().__init__()
        self.lin = nn.Linear(num_features, num_outputs)

    def forward(self, batch: Any) -> Tensor:
        return self.lin(F.dropout(batch.propagated_x, 0.5, self.training))


class Weighted(ClientModule):
    """A loss that ``vmap`` takes."""

    def loss(self, output: Any, batch: Any) -> Tensor:
        return 2 * super().loss(output, batch)


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (Masked, r"Masked's own code \(loss\)"),
        (MaskedObjective, r"MaskedObjective's own code \(objective\)"),
        (MaskedScores, r"MaskedScores's own code \(scores\)"),
        (lambda: ClientModule(Drops), r"ClientModule's own code \(Drops.forward\)"),
    ],
    ids=["loss", "objective", "scores", "net"],
)
def test_what_vmap_does_not_take_runs_one_by_one(model: Any, named: str, federation: Any, make_trainer: Any) -> None:
    trainer = make_trainer(num_rounds=2, executor=StackedExecutor())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model(), federation, FedAvg(num_epochs=1))
    (line,) = [str(each.message) for each in caught if "one after another" in str(each.message)]
    assert re.search(named + r" does not run on a stack \(\w+: .+\): clients are run one after another", line)
    assert "\n" not in line
    assert isinstance(trainer.run.executor, SequentialExecutor)
    assert not trainer.run.num_failures


def test_a_fault_of_the_users_is_not_hidden_by_one_of_vmap(federation: Any, make_trainer: Any) -> None:
    class Wrong(Masked):
        def loss(self, output: Any, batch: Any) -> Tensor:
            return super().loss(output, batch) * torch.ones(2, 3).matmul(torch.ones(2))

    trainer = make_trainer(executor=StackedExecutor(), participation=Participation(on_failure="stop"))
    with (
        pytest.warns(UserWarning, match="does not run on a stack"),
        pytest.raises(
            ClientFailure, match=r"client-00 failed .*: RuntimeError: size mismatch.*test_own_code.py:\d+, in loss"
        ),
    ):
        trainer.fit(Wrong(), federation, FedAvg(num_epochs=1))


def test_a_masked_loss_is_the_packages_own(federation: Any, make_trainer: Any) -> None:
    states = []
    for model in (Masked(), ClientModule()):
        trainer = make_trainer(num_rounds=2, executor=SequentialExecutor())
        trainer.fit(model, federation, FedAvg(num_epochs=2))
        states.append(trainer.run.executor.state().parameters)
    for name, value in states[0].items():
        torch.testing.assert_close(value, states[1][name], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:.*one after another")
def test_several_architectures_run_one_by_one_together(federation: Any, make_trainer: Any) -> None:
    trainer = make_trainer(num_rounds=1, executor=StackedExecutor())
    nets = [fl_lightning.models.GCN, Drops]
    trainer.fit(ClientModule(net=nets), federation, strategies.Local(num_epochs=1))
    assert all(isinstance(part, SequentialExecutor) for part in trainer.run.executor.parts.values())


def test_what_vmap_takes_stays_on_the_stack(federation: Any, make_trainer: Any) -> None:
    trainer = make_trainer(num_rounds=1, executor=StackedExecutor())
    trainer.fit(Weighted(), federation, FedAvg(num_epochs=1))
    assert isinstance(trainer.run.executor, StackedExecutor)


class Sums(nn.Module):
    """Of neighbors; ``of_all`` is taken over all rows, ``of_edges`` along the edges of one client."""

    def __init__(self, num_features: int, num_outputs: int, of_all: Any = None, of_edges: bool = False) -> None:
        super().__init__()
        self.lin, self.of_all, self.of_edges = nn.Linear(num_features, num_outputs), of_all, of_edges
        nn.init.zeros_(self.lin.bias)  # so that rows of padding are 0 at first

    def forward(self, batch: Any) -> Tensor:
        h = self.lin(batch.sum_neighbors(batch.x))
        if self.of_edges:
            source, target = batch.edge_index
            h = h.index_add(0, target, h[source])
        return h if self.of_all is None else h - self.of_all(h)


class PenalizesAll(ClientModule):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return super().loss(output, batch) + output.logits.square().mean()


class ScoresAll(ClientModule):
    def scores(self, output: Any, batch: Any) -> Any:
        confidence = output.logits.softmax(dim=-1).amax(dim=-1)
        return {**super().scores(output, batch), "val/sure": (confidence.sum(), batch.val_mask.sum())}


class CountsAll(ClientModule):
    def example_count(self, batch: Any) -> Tensor:
        return torch.full_like(batch.key, batch.y.shape[-1])


class ReadsEdges(ClientModule):
    def loss(self, output: Any, batch: Any) -> Tensor:
        source, target = batch.edge_index
        p = output.logits.softmax(dim=-1)
        return super().loss(output, batch) + (p[source] - p[target]).square().mean()


class ReadsPlain(ClientModule):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return super().loss(output, batch) / batch.plain.x.shape[0]


class DecaysItself(ClientModule):
    def loss(self, output: Any, batch: Any) -> Tensor:
        return super().loss(output, batch) + 0.1 * sum(p.square().sum() for p in self.parameters())


class DecaysGiven(ClientModule):
    def objective(self, parameters: Any, batch: Any, context: Any) -> Tensor:
        return super().objective(parameters, batch, context) + 0.1 * sum(p.square().sum() for p in parameters.values())


class ScoresItself(ClientModule):
    def scores(self, output: Any, batch: Any) -> Any:
        return {**super().scores(output, batch), "val/norm": (self.net.lin.weight.norm(), batch.val_mask.sum() * 0 + 1)}


def centered(h: Tensor) -> Tensor:
    return h.mean(dim=0, keepdim=True)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize(
    ("model", "why"),
    [
        (lambda: Weighted(Sums), "^$"),
        (lambda: ScoresAll(Sums), "^padding changes its val/sure: leave out what batch.example_mask says"),
        (lambda: PenalizesAll(Sums), "^padding changes its losses"),
        (lambda: CountsAll(Sums), "^padding changes its example counts"),
        (lambda: ClientModule(functools.partial(Sums, of_all=centered)), "^padding changes its losses"),
        (lambda: ClientModule(functools.partial(Sums, of_edges=True)), "^AttributeError: a stack .* has no edge_index"),
        (lambda: ReadsEdges(Sums), "^AttributeError: a stack of clients has no edge_index"),
        (lambda: ReadsPlain(Sums), "^AttributeError: 'NoneType' object has no attribute 'x'"),
        (lambda: DecaysGiven(Sums), "^$"),
        (lambda: DecaysItself(Sums), r"^its losses are computed from self.net or self.parameters\(\).* objective\("),
        (lambda: ScoresItself(Sums), r"^its val/norm are computed from self.net"),
    ],
    ids=[
        "right",
        "scores",
        "loss",
        "count",
        "net",
        "edges in net",
        "edges in loss",
        "plain graph",
        "given parameters",
        "own parameters in loss",
        "own parameters in scores",
    ],
)
def test_what_counts_padding_or_reads_what_one_client_has_does_not_run_on_a_stack(
    model: Any, why: str, precision: Any, graphs: Any
) -> None:
    client = model()
    client.build(6, 3)
    batch = GraphCollator(graphs, device=torch.device("cpu"), dtype=torch.float32)([0])
    fabric = lightning.Fabric(accelerator="cpu", precision=precision)
    assert re.search(why, why_not_stacked(client, batch, fabric))


class WholeStep(ClientModule):
    """A training step in the way of Lightning's and PyG's tutorials."""

    seen: ClassVar[dict[str, Any]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch)
        WholeStep.seen = {"x": batch.x, "edge_index": batch.edge_index, "logits": logits}
        return F.cross_entropy(logits[batch.train_mask], batch.y[batch.train_mask])


@pytest.mark.filterwarnings("ignore:WholeStep overrides training_step")
@pytest.mark.parametrize("sparse", [False, True])
def test_a_training_step_has_inputs_edges_and_its_own_logits(
    sparse: bool, federation: Any, given_clients: Any, make_trainer: Any, graphs: Any
) -> None:
    data = federation
    if sparse:
        wide = [F.pad(graph.x_NF, (0, 200)) for graph in graphs]
        data = given_clients([dataclasses.replace(g, x_NF=x) for g, x in zip(graphs, wide, strict=True)])
    trainer = make_trainer(num_rounds=1)
    trainer.fit(WholeStep(), data, FedAvg(num_epochs=1))
    last, seen = data.clients[-1], WholeStep.seen
    assert torch.equal(seen["x"], last.x_NF)
    assert torch.equal(seen["edge_index"], last.edge_index_2E)
    assert seen["logits"].shape == (last.num_nodes, 3)
    assert (trainer.run.executor._batch(0).sparse_x is not None) == sparse


class StepWithMore(ClientModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0.1 * self(batch).square().mean()


@pytest.mark.filterwarnings("ignore:.* overrides training_step")
@pytest.mark.parametrize(
    ("client", "strategy", "missing"),
    [
        (WholeStep, FedProx, "penalty"),
        (WholeStep, MOON, "objective"),
        (WholeStep, Ditto, "objective and penalty"),
        (WholeStep, FedAvg, None),
        (StepWithMore, FedProx, None),
    ],
)
def test_a_training_step_without_the_terms_of_the_strategy_is_said_to_be_another_method(
    client: Any, strategy: Any, missing: str | None, federation: Any, make_trainer: Any
) -> None:
    """With FedProx it was FedAvg, without a word."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_trainer(num_rounds=2).fit(client(), federation, strategy(num_epochs=1))
    said = [str(each.message) for each in caught if "leaves out" in str(each.message)]
    what = (
        f"WholeStep.training_step leaves out the strategy's {missing}, so that this is another method: return super()"
    )
    assert [line[: len(what)] for line in said] == ([what] if missing else [])


def of_own_net(client: Any, parameters: Any, batch: Any, context: Any) -> Tensor:
    return client.loss(client.output(parameters, batch), batch) + sum(p.square().sum() for p in client.parameters())


def of_given(client: Any, parameters: Any, batch: Any, context: Any) -> Tensor:
    return client.loss(client.output(parameters, batch), batch) + sum(p.square().sum() for p in parameters.values())


def logits_of_own_net(client: Any, parameters: Any, batch: Any, context: Any) -> NetOutput:
    return NetOutput(*(2 * part for part in client.output(client.parameter_dict(), batch)))


def logits_of_given(client: Any, parameters: Any, batch: Any, context: Any) -> NetOutput:
    return NetOutput(*(2 * part for part in client.output(parameters, batch)))


def toward_own_net(client: Any, parameters: Any, gradients: Any, batch: Any, context: Any) -> Change:
    return Change(gradients={name: g + 0.1 * client.net.get_parameter(name) for name, g in gradients.items()})


def toward_given(client: Any, parameters: Any, gradients: Any, batch: Any, context: Any) -> Change:
    return Change(gradients={name: g + 0.1 * parameters[name] for name, g in gradients.items()})


def rewrite_by_own_net(client: Any, parameters: Any, data: Any, context: Any) -> Any:
    assert all(torch.equal(own, parameters[name]) for name, own in client.net.named_parameters())
    return data


class OwnStage(FedAvg):
    """A strategy whose stage and evaluations have functions of a user's."""

    def __init__(
        self,
        *,
        objective: Any = None,
        client_output: Any = None,
        rule: Any = None,
        other: Any = None,
        tuned_by: Any = None,
        **program: Any,
    ) -> None:
        super().__init__(num_epochs=1)
        self.tuning = None if tuned_by is None else Stage(name="tune", objective=tuned_by)
        self.own = {"objective": objective, "client_outputs": {"own": client_output} if client_output else {}}
        self.own["program"] = LocalProgram(**program)
        self.rules = {"": rule, "other": other}

    def stages(self, round_idx: int) -> Any:
        (stage,) = super().stages(round_idx)
        return [dataclasses.replace(stage, **self.own)]

    def evaluations(self, clients: Any) -> Any:
        whole = super().evaluations(clients)[""]
        return {
            prefix: dataclasses.replace(whole, output=rule, tuning=self.tuning) for prefix, rule in self.rules.items()
        }


class ClipsByOwnNet(ClientModule):
    def clip(self, gradients: Any) -> Any:
        return {name: g if g is None else g * self.net.get_parameter(name).norm() for name, g in gradients.items()}


class ClipsOverClients(ClientModule):
    def clip(self, gradients: Any) -> Any:
        return {name: g if g is None else g / g.norm() for name, g in gradients.items()}


class ClipsRows(ClientModule):
    def clip(self, gradients: Any) -> Any:
        return {name: g if g is None else torch.stack([row / row.norm() for row in g]) for name, g in gradients.items()}


class ConstrainsByOwnNet(ClientModule):
    def constrain(self, parameters: Any, context: Any) -> Any:
        return {n: 0.5 * p / self.net.get_parameter(n).norm().clamp(min=1) for n, p in parameters.items()}


class ConstrainsGiven(ClientModule):
    def constrain(self, parameters: Any, context: Any) -> Any:
        return {name: 0.5 * p / p.norm().clamp(min=1) for name, p in parameters.items()}


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (ClipsByOwnNet, "its clipped gradients are computed from self.net or self.parameters"),
        (ClipsOverClients, r"its clipped gradients depend on those of other clients: gradients are \(C, \*shape\)"),
        (ClipsRows, None),
        (ConstrainsByOwnNet, "its constrained parameters are computed from self.net or self.parameters"),
        (ConstrainsGiven, None),
    ],
)
def test_a_clip_or_constraint_that_a_stack_would_change_is_not_run_on_one(
    kind: Any, why: str | None, federation: Any, make_trainer: Any
) -> None:
    """Gradients were scaled by the initial parameters, or by those of all clients, without a word."""
    scores = []
    for executor in (SequentialExecutor(), StackedExecutor()):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            scores.append(make_trainer(num_rounds=3, executor=executor).fit(kind(), federation, FedAvg(num_epochs=2)))
    assert abs(scores[0]["val/loss"] - scores[1]["val/loss"]) < 1e-6
    said = [str(each.message) for each in caught if "one after another" in str(each.message)]
    assert len(said) == (why is not None)
    assert why is None or re.search(why, said[0])


class LossReadsContext(ClientModule):
    def loss(self, output: Any, batch: Any) -> Tensor:
        pull = sum(anchor.square().sum() for anchor in self.context.anchor.values())
        return (1 + self.context.step) * super().loss(output, batch) * (1 + pull)


class ClipReadsContext(ClientModule):
    def clip(self, gradients: Any) -> Any:
        far = {name: anchor.abs().mean() for name, anchor in self.context.anchor.items()}
        assert min(far.values()) >= 0
        return {name: g if g is None else g * self.context.step for name, g in gradients.items()}


class ConstraintReadsContext(ClientModule):
    def constrain(self, parameters: Any, context: Any) -> Any:
        return {name: p.clamp(-0.1 * (1 + self.context.step), 0.2) for name, p in parameters.items()}


class ScoresReadContext(ClientModule):
    def scores(self, output: Any, batch: Any) -> Any:
        size = sum(anchor.square().sum() for anchor in self.context.anchor.values())
        return {name: (size * total, count) for name, (total, count) in super().scores(output, batch).items()}


class OutputsReadContext(FedAvg):
    def stages(self, round_idx: int) -> Any:
        (stage,) = super().stages(round_idx)
        outputs = {"own": lambda client, *_: client.context.anchor["head.bias"].sum()}
        step = LocalProgram(step=lambda client, _, g, *__: Change(gradients={n: client.context.step * g[n] for n in g}))
        return [dataclasses.replace(stage, client_outputs=outputs, program=step)]

    def aggregate(self, stage: Any, upload: Any) -> None:
        assert bool(upload.extras["own"].abs().gt(0).all()) or self.run.round_idx == 0
        super().aggregate(stage, upload)


@pytest.mark.parametrize("kind", [LossReadsContext, ClipReadsContext, ConstraintReadsContext, ScoresReadContext, None])
def test_what_a_client_computes_may_read_its_own_context_on_a_stack(
    kind: Any, federation: Any, make_trainer: Any
) -> None:
    """There it was empty: steps were always 0, and a pull to the anchor had no effect, without a word."""
    results, strategy = [], FedAvg if kind else OutputsReadContext
    for executor in (SequentialExecutor(), StackedExecutor()):
        trainer = make_trainer(num_rounds=2, executor=executor, precision="64-true")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            scores = trainer.fit((kind or ClientModule)(), federation, strategy(num_epochs=3))
        results.append((scores["val/loss"], dict(trainer.run.executor.state().parameters)))
    (one, mine), (other, others) = results
    assert one == pytest.approx(other, rel=1e-9)
    assert all(torch.allclose(tensor, others[name], atol=1e-9) for name, tensor in mine.items())


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"objective": of_own_net}, "of_own_net returned a result of client.net or client.parameters"),
        ({"client_output": of_own_net}, "of_own_net returned a result of client.net"),
        ({"rule": logits_of_own_net}, "logits_of_own_net returned a result of client.net"),
        ({"rule": logits_of_given, "other": logits_of_own_net}, "logits_of_own_net returned a result of client.net"),
        ({"tuned_by": of_own_net}, "of_own_net returned a result of client.net"),
        ({"tuned_by": of_given}, None),
        ({"step": toward_own_net}, "toward_own_net returned a result of client.net"),
        ({"step": toward_given}, None),
        ({"rewrite": rewrite_by_own_net}, None),  # computed for one client after another
        ({"objective": of_given, "client_output": of_given}, None),
        ({"objective": functools.partial(of_given)}, None),
    ],
)
def test_functions_of_a_strategy_that_read_the_clients_own_parameters_are_refused_on_a_stack(
    own: Any, message: str | None, federation: Any, make_trainer: Any
) -> None:
    """They used the initial model's, without a word."""
    scores = []
    for executor in (SequentialExecutor(), StackedExecutor()):
        fit = functools.partial(make_trainer(num_rounds=2, executor=executor).fit, ClientModule(), federation)
        if message is not None and isinstance(executor, StackedExecutor):
            with pytest.raises((WrongReturn, ClientFailure), match=message):
                fit(OwnStage(**own))
        else:
            scores.append(fit(OwnStage(**own))["val/acc"])
    assert max(scores) - min(scores) < 1e-6


class OwnObjective(ClientModule):
    def objective(self, parameters: Any, batch: Any, context: Any) -> Tensor:
        return super().objective(parameters, batch, context) + sum(p.square().sum() for p in parameters.values())


@pytest.mark.parametrize("executor", [SequentialExecutor, StackedExecutor])
@pytest.mark.parametrize(
    ("strategy", "is_left_out"),
    [(MOON, True), (APFL, True), (Ditto, True), (PerFedAvg, False), (FedProx, False), (FedAvg, False)],
)
def test_an_objective_that_the_strategy_replaces_is_said_to_be_left_out(
    executor: Any, strategy: Any, is_left_out: bool, federation: Any, make_trainer: Any
) -> None:
    """It was never called, without a word."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(num_rounds=2, executor=executor())
        trainer.fit(OwnObjective(), federation, strategy(num_epochs=1))
    assert type(trainer.run.executor) is executor
    said = [str(each.message) for each in caught if "left out" in str(each.message)]
    what = "OwnObjective.objective is left out, as the strategy's stage 'train' has an objective of its own: override"
    assert [line[: len(what)] for line in said] == ([what] if is_left_out else [])


class Draws(ClientModule):
    """Own code that draws by every generator, in training and in evaluation."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + torch.rand(()) + np.random.rand() + random.random())

    def loss(self, output: Any, batch: Any) -> Tensor:
        logits = F.dropout(output.logits, 0.5, self.training)
        return F.cross_entropy(logits[batch.train_mask], batch.y[batch.train_mask])

    def scores(self, output: Any, batch: Any) -> Any:
        drawn = {f"{split}/drawn": (torch.rand(()), torch.ones(())) for split in ("train", "val", "test")}
        return {**super().scores(output, batch), **drawn}


@pytest.mark.filterwarnings("ignore:Draws overrides training_step")
def test_draws_of_own_code_are_repeated_and_resumed_exactly(
    federation: Any, make_trainer: Any, assert_same: Any, tmp_path: Path
) -> None:
    """They came from generators that nothing seeds."""

    def fit(num_rounds: int, path: Path | None = None) -> Any:
        trainer = make_trainer(num_rounds=num_rounds)
        trainer.fit(Draws(), federation, FedAvg(num_epochs=2), None if path is None else str(path))
        return trainer

    fit(1).save_checkpoint(tmp_path / "one.ckpt")
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    whole, again, resumed = fit(2), fit(2), fit(2, tmp_path / "one.ckpt")
    for other in (again, resumed):
        assert_same(other.run.executor.state().parameters, whole.run.executor.state().parameters)
        assert other.run.history[-1]["val/drawn"] == whole.run.history[-1]["val/drawn"]
    assert len({row["val/drawn"] for row in whole.run.history}) == len(whole.run.history)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]


def test_draws_of_numpy_do_not_run_on_a_stack(graphs: Any) -> None:
    class Perturbs(ClientModule):
        def loss(self, output: Any, batch: Any) -> Tensor:
            return super().loss(output, batch) * (1 + np.random.rand())

    client = Perturbs(Sums)
    client.build(6, 3)
    batch = GraphCollator(graphs, device=torch.device("cpu"), dtype=torch.float32)([0])
    why = why_not_stacked(client, batch, lightning.Fabric(accelerator="cpu"))
    assert why == "its losses change from call to call"


# ---------------------------------------------------------------- errors


class Broken(ClientModule):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise IndexError("no such thing")  # the line that is told


LINE = inspect.getsourcelines(Broken.training_step)[1] + 1


class Choosy(ClientModule):
    """Fails for the smaller clients, each with a text of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if len(batch.y) < 20:
            raise ValueError(f"{len(batch.y)} nodes are too few")
        return super().training_step(batch, batch_idx)


def told_in(trainer: Any, model: ClientModule, federation: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(model, federation, FedAvg(num_epochs=1))
    return [str(each.message) for each in caught if "failed" in str(each.message)]


@pytest.mark.filterwarnings("ignore:Broken overrides training_step")
def test_an_error_of_all_clients_ends_the_run_at_once_with_its_line(federation: Any, make_trainer: Any) -> None:
    """The run went on to fail as many rounds as are allowed."""
    trainer = make_trainer(num_rounds=5)
    with pytest.raises(ClientFailure) as ended:
        trainer.fit(Broken(), federation, FedAvg(num_epochs=1))
    location = f"{Path(__file__)}:{LINE}, in training_step"
    assert str(ended.value) == f"all 5 clients failed in stage 'train' round 0: IndexError: no such thing ({location})"
    assert set(trainer.run.num_failures.values()) == {1}


@pytest.mark.filterwarnings("ignore:.* overrides training_step")
def test_an_error_of_all_clients_in_a_later_round_is_reported_once(federation: Any, make_trainer: Any) -> None:
    class BreaksLater(ClientModule):
        """What all clients fail with after they have trained may pass."""

        count = 0

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            type(self).count += 1
            if self.count > 5:
                raise IndexError("no such thing")
            return super().training_step(batch, batch_idx)

    trainer = make_trainer(num_rounds=5, participation=Participation(max_failed_rounds=2))
    with warnings.catch_warnings(record=True, action="always") as caught, pytest.raises(TooFewUpdates) as ended:
        trainer.fit(BreaksLater(), federation, FedAvg(num_epochs=1))
    (message,) = [str(each.message) for each in caught if "failed" in str(each.message)]
    assert message.startswith("all 5 clients failed in stage 'train' round 1: IndexError: no such thing (")
    assert message.endswith("); they are left out, and failures like it are only counted from now on")
    assert str(ended.value).count("IndexError") == 1
    assert "client-00 and 4 more: IndexError: no such thing" in str(ended.value)
    assert set(trainer.run.num_failures.values()) == {2}


@pytest.mark.filterwarnings("ignore:Choosy overrides training_step")
def test_an_error_of_some_clients_is_reported_once_and_counted(federation: Any, make_trainer: Any) -> None:
    trainer = make_trainer(num_rounds=3)
    (message,) = told_in(trainer, Choosy(), federation)
    assert message.startswith(
        "client-02 and 2 others failed in stage 'train' round 0: ValueError: 18 nodes are too few"
    )
    assert trainer.run.num_failures == {"client-02": 3, "client-03": 3, "client-04": 3}


@pytest.mark.filterwarnings("ignore:Broken overrides training_step")
def test_stop_stops_at_the_first_client(federation: Any, make_trainer: Any) -> None:
    trainer = make_trainer(participation=Participation(on_failure="stop"))
    with pytest.raises(
        ClientFailure, match=r"^client-00 failed .* no such thing \(.*test_own_code.py:\d+, in training"
    ):
        trainer.fit(Broken(), federation, FedAvg(num_epochs=1))
    assert trainer.run.num_failures == {"client-00": 1}


@pytest.mark.filterwarnings("ignore:.* overrides training_step")
@pytest.mark.parametrize(
    ("returned", "named"),
    [
        (None, "NoneType"),
        ({"acc": torch.ones(())}, "dict without 'loss'"),
        (torch.ones(2, requires_grad=True), r"a tensor of shape \(2,\)"),
        (torch.ones(()), "a tensor without gradient"),
    ],
    ids=["nothing", "dict", "vector", "constant"],
)
def test_a_training_step_that_returns_no_loss_is_told_what_to_return(
    returned: Any, named: str, federation: Any, make_trainer: Any
) -> None:
    class Returns(ClientModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return returned

    line = inspect.getsourcelines(Returns.training_step)[1]
    message = rf"all 5 .* training_step returned {named}: return the loss, .*test_own_code.py:{line}, in training_step"
    with pytest.raises(ClientFailure, match=message):
        make_trainer().fit(Returns(), federation, FedAvg(num_epochs=1))


@pytest.mark.filterwarnings("ignore:.*one after another")
@pytest.mark.parametrize("executor", [SequentialExecutor, StackedExecutor])
@pytest.mark.parametrize(
    ("name", "returned", "told"),
    [
        ("loss", lambda output, batch: None, "loss returned NoneType: return the loss, a scalar tensor"),
        ("loss", lambda output, batch: "low", "loss returned str: return the loss"),
        (
            "loss",
            lambda output, batch: F.cross_entropy(output.logits, batch.y, reduction="none"),
            r"loss returned a tensor of shape \(\d+,\): return the loss",
        ),
        ("objective", lambda parameters, batch, context: 3, "objective returned int: return the loss"),
        ("scores", lambda output, batch: None, "scores returned NoneType: return a mapping from names"),
        ("scores", lambda output, batch: {"val/acc": batch.y.sum()}, "scores returned a Tensor for 'val/acc'"),
        (
            "scores",
            lambda output, batch: {"val/acc": (batch.val_mask.float(), batch.val_mask.sum())},
            r"scores returned for 'val/acc' a numerator of shape \(\d+,\): return a mapping",
        ),
        ("clip", lambda gradients: None, "clip returned NoneType: return a mapping from names of parameters"),
        ("constrain", lambda parameters, context: None, "constrain returned NoneType: return a mapping"),
        ("constrain", lambda parameters, context: {"head.bias": 0}, "constrain returned a int for 'head.bias'"),
        ("example_count", lambda batch: 7, "example_count returned int: return the number of a client's examples"),
        ("example_count", lambda batch: batch.train_mask, r"example_count returned a tensor of shape \(\d+,\)"),
    ],
    ids=[
        *("none", "text", "unreduced", "objective", "no scores", "no pair", "unreduced scores"),
        *("no gradients", "no constraint", "no tensor", "number", "mask"),
    ],
)
def test_what_own_methods_return_is_checked_before_training(
    name: str, returned: Any, told: str, executor: Any, federation: Any, make_trainer: Any
) -> None:
    """Each client failed in each round, or the net was blamed, or losses were added up without a word."""

    def method(self: Any, *given: Any) -> Any:
        return returned(*given)

    method.__name__ = name
    client = type("Returns", (ClientModule,), {name: method})()
    with pytest.raises(WrongReturn, match=f"^{told}"):
        make_trainer(executor=executor()).fit(client, federation, FedAvg(num_epochs=1))


def test_a_loss_that_is_not_reduced_in_a_later_step_fails_on_the_stack_too(federation: Any, make_trainer: Any) -> None:
    class Later(Weighted):
        def loss(self, output: Any, batch: Any) -> Tensor:
            loss = super().loss(output, batch)
            return loss if self.round_idx == 0 else loss.expand(2)

    trainer = make_trainer(num_rounds=2, participation=Participation(on_failure="stop"))
    with pytest.raises(ClientFailure, match=r"WrongLoss: loss returned a tensor of shape \(2,\): return the loss"):
        trainer.fit(Later(), federation, FedAvg(num_epochs=1))


@pytest.mark.filterwarnings("ignore:.* overrides ")
def test_a_training_step_may_return_the_loss_in_a_mapping(federation: Any, make_trainer: Any) -> None:
    """Lightning's second form; every client failed in every round."""
    seen: list[Any] = []

    class Plain(ClientModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx)

    class InMapping(ClientModule):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": super().training_step(batch, batch_idx), "more": batch_idx}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append((outputs["loss"].requires_grad, outputs["more"]))

    plain, mapped = (make_trainer(num_rounds=2).fit(client, federation, FedAvg()) for client in (Plain(), InMapping()))
    assert mapped == plain
    assert set(seen) == {(False, 0)}


def test_an_error_on_the_stack_has_its_line_too(federation: Any, make_trainer: Any) -> None:
    class BrokenLoss(Weighted):
        def loss(self, output: Any, batch: Any) -> Tensor:
            if self.training:
                raise KeyError("weight")
            return super().loss(output, batch)

    trainer = make_trainer(executor=StackedExecutor(), participation=Participation(on_failure="stop"))
    with pytest.raises(
        ClientFailure, match=r"^client-00 and 1 other failed .*KeyError: 'weight' \(.*own_code.py:\d+, in loss\)"
    ):
        trainer.fit(BrokenLoss(), federation, FedAvg(num_epochs=1))


def test_a_failure_goes_to_other_processes_whole() -> None:
    why = Failure("ValueError: no", "mine.py:3, in loss")
    again = pickle.loads(pickle.dumps(why))
    assert (
        (again, again.location) == (why, why.location) == ("ValueError: no (mine.py:3, in loss)", "mine.py:3, in loss")
    )
    with pytest.raises(RuntimeError) as raised:
        torch.ones(2) @ torch.ones(3)
    assert "test_own_code.py" in failure_of(raised.value).location
    assert failure_of(ValueError("raised nowhere")).location == ""


# ---------------------------------------------------------------- what Lightning's Trainer has


@pytest.mark.filterwarnings("ignore:.* overrides training_step")
@pytest.mark.parametrize(
    ("uses", "instead"),
    [
        (lambda client: client.log("mine", 1.0), r"self\.log .*: a metric of the clients is what scores"),
        (lambda client: client.log_dict({"mine": 1.0}), r"self\.log_dict .*on_evaluate\(trainer, metrics, prefix\)"),
        (lambda client: client.logger, r"self\.logger .*scores"),
        (lambda client: client.loggers, r"self\.loggers .*scores"),
        (lambda client: client.optimizers(), r"self\.optimizers .*on_before_optimizer_step\(optimizer\) are given"),
        (lambda client: client.current_epoch, r"self\.current_epoch .*: self\.round_idx is the round"),
        (lambda client: client.global_step, r"self\.global_step .*self\.context\.step"),
        (lambda client: client.trainer.max_epochs, r"self\.trainer .*self\.round_idx"),
    ],
    ids=["log", "log_dict", "logger", "loggers", "optimizers", "current_epoch", "global_step", "trainer"],
)
def test_what_only_a_trainer_has_is_refused_with_what_there_is(
    uses: Any, instead: str, federation: Any, make_trainer: Any
) -> None:
    """They were accepted: values were logged nowhere, and epochs and steps stayed 0."""

    class Uses(ClientModule):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            uses(self)
            return super().training_step(batch, batch_idx)

    message = rf"all 5 clients failed .*Uses uses {instead}.*test_own_code.py:\d+"
    with pytest.raises(ClientFailure, match=message):
        make_trainer().fit(Uses(), federation, FedAvg(num_epochs=1))


@pytest.mark.parametrize("executor", [SequentialExecutor, StackedExecutor])
@pytest.mark.parametrize("resumed", [False, True], ids=["whole", "resumed"])
def test_a_client_knows_the_round(
    executor: Any, resumed: bool, federation: Any, make_trainer: Any, tmp_path: Path
) -> None:
    seen: dict[bool, set[int]] = {True: set(), False: set()}

    class Warms(ClientModule):
        """A term that begins in the third round."""

        def loss(self, output: Any, batch: Any) -> Tensor:
            seen[self.training].add(self.round_idx)
            return super().loss(output, batch) * (2.0 if self.round_idx >= 2 else 1.0)

        def scores(self, output: Any, batch: Any) -> Any:
            seen[self.training].add(self.round_idx)
            return super().scores(output, batch)

    def fit(num_rounds: int, path: Path | None = None) -> Any:
        trainer = make_trainer(num_rounds=num_rounds, executor=executor(), precision="64-true")
        trainer.fit(Warms(), federation, FedAvg(num_epochs=2), None if path is None else str(path))
        return trainer

    if resumed:
        fit(2).save_checkpoint(tmp_path / "two.ckpt")
        for each in seen.values():
            each.clear()
        fit(4, tmp_path / "two.ckpt")
    else:
        fit(4)
    rounds = {2, 3} if resumed else {0, 1, 2, 3}
    assert seen[True] - {0} == rounds - {0}  # own code is tried beforehand, as in round 0
    assert seen[False] - {0} == rounds - {0}


# ---------------------------------------------------------------- what is given as a client


class OfLightning(lightning.pytorch.LightningModule):
    pass


@pytest.mark.parametrize(
    ("client", "message"),
    [
        (
            ClientModule,
            r"^client is ClientModule, which is not a ClientModule: it is a class, .* client=ClientModule\(\)",
        ),
        (OfLightning(), "client is OfLightning, which is not a ClientModule: derive it from fl_lightning"),
        (OfLightning, "client is OfLightning, which is not a ClientModule: derive it"),
        (nn.Linear(1, 1), "client is Linear, which is not a ClientModule: it is a net, give client="),
        (3, "client is int, which is not a ClientModule: give client="),
    ],
    ids=["class", "LightningModule", "class of one", "net", "number"],
)
def test_what_is_no_client_is_reported_what_to_be(
    client: Any, message: str, federation: Any, make_trainer: Any
) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer().fit(client, federation, FedAvg())


class LitNet(lightning.pytorch.LightningModule):
    """A net of Lightning's without a training of its own."""

    def __init__(self, in_channels: int = 4, num_classes: int = 3) -> None:
        super().__init__()
        self.head = nn.Linear(in_channels, num_classes)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return self.head(x)


class LitTraining(LitNet):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise AssertionError

    def configure_optimizers(self) -> Any:
        raise AssertionError

    def on_train_epoch_end(self) -> None:
        raise AssertionError


def test_a_net_whose_training_would_be_ignored_is_refused(federation: Any, make_trainer: Any) -> None:
    """It trained with the default loss and optimizer, without a word."""
    widths = federation.registry.num_features, federation.registry.num_outputs
    message = (
        "LitTraining is a LightningModule with configure_optimizers, on_train_epoch_end, training_step, which a net "
        "never runs: .*ClientModule"
    )
    for net in (LitTraining, LitTraining(*widths)):
        with pytest.raises(ValueError, match=message):
            make_trainer().fit(ClientModule(net=net), federation, FedAvg())
    make_trainer(num_rounds=1).fit(ClientModule(net=LitNet), federation, FedAvg(num_epochs=1))


def clients_of_the_package() -> list[type[ClientModule]]:
    actual = {kind.client_class for kind in vars(strategies).values() if hasattr(kind, "client_class")}
    return sorted(actual - {ClientModule}, key=lambda kind: kind.__name__)


@pytest.mark.parametrize("kind", clients_of_the_package(), ids=lambda kind: kind.__name__)
def test_a_client_passes_on_all_settings_of_its_base(kind: type[ClientModule]) -> None:
    base, own = (inspect.signature(each).parameters for each in (ClientModule, kind))
    assert list(base)[:2] == list(own)[:2]
    for name, parameter in base.items():
        assert own[name].annotation == parameter.annotation
        assert own[name].default == parameter.default
    privacy = RecordPrivacy(max_grad_norm=1.0, noise_multiplier=1.0)
    given: dict[str, Any] = {"gradient_clip_val": 0.5, "running_statistics": "shared", "privacy": privacy}
    given |= {"metrics": ["f1"], "lr_scheduler": functools.partial(ExponentialLR, gamma=0.5)}
    assert given.keys() | {"net", "optimizer"} == base.keys()  # or this test knows too little
    client = kind(**given)
    kept = {name: getattr(client, name) for name in given}
    assert kept == {**given, "metrics": ("f1",)}


@pytest.mark.parametrize("kind", [FedAux, FedSage, FedSagePlus, FedProto])
def test_f1_is_measured_under_every_strategys_client(kind: Any, federation: Any, make_trainer: Any) -> None:
    settings = {"pretrain_epochs": 1, "refine_epochs": 1} if kind is FedSagePlus else {}
    trainer = make_trainer(num_rounds=1)
    result = trainer.fit(kind.client_class(metrics=["f1"]), federation, kind(num_epochs=1, **settings))
    assert 0 <= result["val/f1"] <= 1


def test_a_changing_buffer_of_an_own_net_is_refused_and_a_constant_one_is_not(
    federation: Any, make_trainer: Any
) -> None:
    class Scaled(nn.Module):
        def __init__(self, num_features: int, num_outputs: int) -> None:
            super().__init__()
            self.lin = nn.Linear(num_features, num_outputs)
            self.register_buffer("scale", torch.tensor(2.0))

        def forward(self, batch: Any) -> Tensor:
            return self.scale * self.lin(batch.propagated_x)

    class Moving(Scaled):
        def forward(self, batch: Any) -> Tensor:
            if self.training:
                self.scale = self.scale + 1
            return super().forward(batch)

    for executor in (StackedExecutor, SequentialExecutor):
        make_trainer(num_rounds=1, executor=executor()).fit(ClientModule(Scaled), federation, FedAvg(num_epochs=1))
        with pytest.raises(ValueError, match=r"model\.net changes scale while it trains, outside its parameters"):
            make_trainer(executor=executor()).fit(ClientModule(Moving), federation, FedAvg(num_epochs=1))


def test_a_client_outlives_its_trainer(make_trainer: Any, federation: Any) -> None:
    client = ClientModule()
    make_trainer().fit(client, federation, FedAvg(num_epochs=1))
    client.fabric = lightning.Fabric(accelerator="cpu")  # a weak reference, to what is gone at once
    gc.collect()
    assert copy.deepcopy(client).fabric is None
    assert pickle.loads(pickle.dumps(client)).fabric is None
    make_trainer().fit(client, federation, strategies.FedProx(num_epochs=1))


class SetsItsNet(ClientModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)


class SecondNet(ClientModule):
    def __init__(self, is_frozen: bool) -> None:
        super().__init__()
        self.teacher = nn.Linear(2, 2).requires_grad_(not is_frozen)


class StepsItself(ClientModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (SetsItsNet, r"SetsItsNet sets self.net, .*: give super\(\).__init__\(net=...\) instead"),
        (lambda: SecondNet(is_frozen=False), r"parameters beside its net \(teacher.weight, teacher.bias\).* or freeze"),
        (StepsItself, "model.automatic_optimization is False.*return the loss from training_step"),
        (lambda: ClientModule(metrics="f1"), r"model.metrics is 'f1': give a list, \['f1'\]"),
        (
            lambda: ClientModule(metrics=[MulticlassF1Score(num_classes=3)]),
            r"MulticlassF1Score\(\), which is not the name of a metric: give some of .* or override scores",
        ),
        (
            lambda: ClientModule(optimizer=torch.optim.SGD([torch.zeros(1)])),
            r"model.optimizer is a SGD: give its class, or .* functools.partial\(torch.optim.Adam",
        ),
        (lambda: ClientModule(optimizer="Adam"), "model.optimizer is a str: give its class"),
    ],
)
def test_what_a_lightning_module_may_have_and_a_client_not(
    make: Any, message: str, make_trainer: Any, federation: Any
) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer().fit(make(), federation, FedAvg(num_epochs=1))


def test_a_client_may_have_a_frozen_net_beside_its_own() -> None:
    client = SecondNet(is_frozen=True)
    for _ in range(2):  # a second run builds its net again
        client.build(4, 3)


@pytest.mark.parametrize("nets", [None, [fl_lightning.models.GCN] * 2], ids=["one net", "two nets"])
def test_a_frozen_net_beside_the_clients_own_may_score(nets: Any, federation: Any, make_trainer: Any) -> None:
    """It was gone where models were scored one after another, and with several nets."""

    class Projects(ClientModule):
        def __init__(self) -> None:
            super().__init__(net=nets)
            self.teacher = nn.Linear(3, 3).requires_grad_(False)

        def scores(self, output: Any, batch: Any) -> Any:
            return super().scores(NetOutput(self.teacher(output.logits), output.embedding), batch)

    trainer = make_trainer(num_rounds=1, executor=SequentialExecutor())
    strategy = strategies.Local if nets else FedAvg
    assert 0 <= trainer.fit(Projects(), federation, strategy(num_epochs=1))["val/acc"] <= 1
    assert not trainer.run.num_failures


def test_a_net_that_changes_its_batch_is_refused(federation: Any, make_trainer: Any) -> None:
    class Shrinking(nn.Module):
        def __init__(self, num_features: int, num_outputs: int) -> None:
            super().__init__()
            self.lin = nn.Linear(num_features, num_outputs)

        def forward(self, batch: Any) -> Tensor:
            return self.lin(batch.propagated_x.mul_(0.9))

    for executor in (StackedExecutor, SequentialExecutor):
        with pytest.raises(
            ValueError, match=r"model\.net changes batch\.propagated_x in place, .* compute a new tensor"
        ):
            make_trainer(executor=executor()).fit(ClientModule(Shrinking), federation, FedAvg(num_epochs=1))
