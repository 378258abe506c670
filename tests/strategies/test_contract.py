"""What every strategy must do. A new one is found by itself."""

import inspect
from typing import Any

import pytest
import torch
from both_executors import both_executors
from saving import SavesAfter
from torch import Tensor

from fl_lightning import (
    Callback,
    Participation,
    Payload,
    SequentialExecutor,
    StackedExecutor,
    Stage,
    strategies,
)
from fl_lightning.callbacks import FederatedCheckpoint
from fl_lightning.executors import storage
from fl_lightning.relations.topology import Complete
from fl_lightning.round.selection import Selection
from fl_lightning.strategies import FGGP, Strategy

STRATEGIES = sorted(
    {
        kind
        for kind in vars(strategies).values()
        if inspect.isclass(kind) and issubclass(kind, Strategy) and not inspect.isabstract(kind)
    },
    key=lambda kind: kind.__name__,
)
#: Settings for a federation of five clients, for the strategies that have them.
TINY = {
    "num_epochs": 3,
    "init_epochs": 2,
    "pretrain_epochs": 2,
    "refine_epochs": 2,
    "num_federated_rounds": 2,
    "num_join_epochs": 2,
    "num_finetune_epochs": 2,
    "num_neighbors": 2,
    "num_warmup_rounds": 1,
    "refresh_every": 2,
    "hidden_channels": 8,
    "diffusion_lr": 0.01,
    "hypernetwork_lr": 0.01,
    "topology": Complete(),  # the same neighbours whatever the order of the clients
}
#: Everything that participation can do to a round.
BUSY = {"num_clients": 3, "dropout_probability": 0.2, "straggler_probability": 0.5, "held_out_fraction": 0.2}

pytestmark = [
    pytest.mark.parametrize("kind", STRATEGIES, ids=lambda kind: kind.__name__),
    pytest.mark.filterwarnings("ignore:DFedAvgM is for SGD with momentum"),
    pytest.mark.filterwarnings("ignore:the maps cannot make the clients agree"),
]


def tiny(kind: type[Strategy], *, dropout: bool = True) -> Strategy:
    names = inspect.signature(kind).parameters
    settings: dict[str, Any] = {name: value for name, value in TINY.items() if name in names}
    if not dropout:
        settings |= {name: 0.0 for name in names if name.endswith("dropout")}
        settings |= {name: "same" for name in names if name == "batches"}  # instead of parts drawn at random
    return kind(**settings)


def cloned(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {name: cloned(value) for name, value in state.items()}
    return type(state)(map(cloned, state)) if isinstance(state, list | tuple) else state


def test_the_known_strategies_are_found(kind: type[Strategy]) -> None:
    assert kind.__name__ in strategies.__all__
    assert {"FedAvg", "FedPer", "FedProx", "FedSheafHN", "Local"} <= {kind.__name__ for kind in STRATEGIES}


@both_executors
def test_rounds_run_and_learn(kind, executor, federation, make_model, make_trainer) -> None:
    trainer = make_trainer(num_rounds=6, executor=executor())

    result = trainer.fit(make_model(kind), federation, tiny(kind))

    state = trainer.run.executor.state()
    assert len(trainer.run.history) == 6
    assert all(torch.tensor(list(row.values())).isfinite().all() for row in trainer.run.history)
    first, *_, last = trainer.run.history
    loss = "classifier/train/loss" if kind is FGGP else "train/loss"  # the loss of its vote need not fall
    assert last[loss] < 0.95 * first[loss]
    assert all(tensor.isfinite().all() for tensor in state.tensors().values())
    learns = {name for name in state.parameters if any(stage.trains(name) for stage in trainer.run.strategy.stages(0))}
    start = trainer.run.model.parameter_dict()
    assert all((state.parameters[name] != start[name]).any() for name in learns)
    assert result["val/acc"] == max(row["val/acc"] for row in trainer.run.history)
    assert result["test/acc"] == trainer.run.history[result["best_round"]]["test/acc"]


class Tamper(Callback):
    """Hands a copy to the server, then overwrites what the clients sent."""

    def __init__(self) -> None:
        self.seen: list[tuple[Stage, Payload]] = []

    def on_upload(self, trainer: Any, stage: Stage, payload: Payload) -> Payload:
        copy = payload.copy()
        before = cloned(dict(trainer.run.executor.state().parameters))
        for tensor in payload.tensors().values():
            tensor.fill_(7)
        after = trainer.run.executor.state().parameters
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        self.seen.append((stage, copy))
        return copy


@both_executors
def test_uploads_are_detached_copies_of_what_was_asked_for(
    kind, executor, federation, make_model, make_trainer
) -> None:
    tamper = Tamper()
    trainer = make_trainer(executor=executor(), callbacks=tamper, participation=Participation(num_clients=3))

    trainer.fit(make_model(kind), federation, tiny(kind))

    assert len(tamper.seen) >= 3
    for stage, payload in tamper.seen:
        assert tuple(payload.parameters) == (("flat",) if stage.flat else stage.upload)
        assert {name if name in stage.signals else name.partition("/")[0] for name in payload.signals} == set(
            stage.signals
        )
        assert not any(tensor.requires_grad for tensor in payload.tensors().values())
        assert all(len(tensor) == len(payload.clients) for tensor in payload.tensors().values())
        assert payload.clients == tuple(sorted(payload.clients))
        examples = [federation.clients[client].num_examples for client in payload.clients]
        assert payload.num_examples.tolist() == examples


@both_executors
def test_resuming_is_exact(kind, executor, federation, make_model, make_trainer, assert_same, tmp_path) -> None:
    def trainer(num_rounds: int):
        return make_trainer(num_rounds=num_rounds, executor=executor(), participation=Participation(**BUSY), seed=1)

    uninterrupted = trainer(5)
    result = uninterrupted.fit(make_model(kind), federation, tiny(kind))

    first = trainer(2)
    first.callbacks = [SavesAfter(2, tmp_path / "v" / "two.ckpt")]
    first.fit(make_model(kind), federation, tiny(kind))
    resumed = trainer(5)
    torch.manual_seed(123)
    resumed_result = resumed.fit(make_model(kind), federation, tiny(kind), ckpt_path=str(tmp_path / "v" / "two.ckpt"))

    assert_same(resumed_result, result)
    leave_out = {"random", "callbacks"}
    assert_same(
        {name: value for name, value in resumed.state_dict().items() if name not in leave_out},
        {name: value for name, value in uninterrupted.state_dict().items() if name not in leave_out},
    )


@both_executors
def test_permuting_clients_permutes_results(
    kind, executor, graphs, given_clients, make_model, make_trainer, assert_same
) -> None:
    order = [3, 0, 4, 2, 1]
    runs = []
    for clients in (graphs, [graphs[client] for client in order]):
        trainer = make_trainer(executor=executor(), precision="64-true")
        result = trainer.fit(make_model(kind, dropout=0.0), given_clients(clients), tiny(kind, dropout=False))
        runs.append((trainer.run.executor.state(), trainer.run.scores, result))
    (state, scores, result), (permuted_state, permuted_scores, permuted_result) = runs

    assert_same(permuted_state.parameters, state.rows(order).parameters, tolerance=1e-8)
    for prefix, payload in scores.items():
        assert_same(permuted_scores[prefix].signals, payload.rows(order).signals, tolerance=1e-6)
    assert_same(permuted_result, result, tolerance=1e-6)


@pytest.mark.parametrize("participation", [{}, BUSY], ids=["everyone", "busy"])
def test_sequential_equals_stacked(
    kind, participation, federation, make_model, make_trainer, assert_same, monkeypatch
) -> None:
    monkeypatch.setattr(storage, "SMALLEST_FILE_BYTES", 1)
    small_groups = StackedExecutor(max_clients_per_group=2, max_group_mib=0.2, storage="disk")
    states = []
    for executor in (SequentialExecutor(), StackedExecutor(max_padding=0.8), small_groups):
        trainer = make_trainer(
            executor=executor, precision="64-true", participation=Participation(**participation), num_rounds=4, seed=1
        )
        result = trainer.fit(make_model(kind, dropout=0.5), federation, tiny(kind))
        states.append((trainer, result))
    (reference, expected), *others = states

    for trainer, result in others:
        for part in ("parameters", "signals"):
            assert_same(trainer.state_dict()["clients"][part], reference.state_dict()["clients"][part], tolerance=1e-9)
        assert_same(trainer.run.strategy.state_dict(), reference.run.strategy.state_dict(), tolerance=1e-9)
        for prefix, scores in reference.run.scores.items():
            assert_same(trainer.run.scores[prefix].signals, scores.signals, tolerance=1e-6)  # scores are float32
        assert_same(trainer.run.history, reference.run.history, tolerance=1e-6)
        assert_same(result, expected, tolerance=1e-6)


def test_models_are_scored_on_the_union_or_it_is_refused(kind, federation, make_model, make_trainer) -> None:
    trainer = make_trainer(num_rounds=1, evaluate_union=True)
    if kind.needs_own_examples:
        with pytest.raises(ValueError, match=r"evaluate_union is true, but .* cannot be scored on others'"):
            trainer.fit(make_model(kind), federation, tiny(kind))
        return
    assert trainer.fit(make_model(kind), federation, tiny(kind))["union/test/acc"] >= 0


@both_executors
def test_evaluation_leaves_the_clients_alone(kind, executor, federation, make_model, make_trainer, assert_same) -> None:
    trainer = make_trainer(executor=executor())
    trainer.fit(make_model(kind), federation, tiny(kind))
    before = cloned(trainer.state_dict())

    metrics = trainer.evaluate(trainer.run.training_clients)
    again = trainer.evaluate(trainer.run.training_clients)

    assert metrics == again
    assert metrics["val/acc"] > 0
    assert_same(trainer.state_dict(), before)


@both_executors
def test_new_clients_join_without_training_the_server(kind, executor, federation, make_model, make_trainer) -> None:
    states = {}

    class Watch(Callback):
        def on_checkpoint_point(self, trainer: Any) -> None:
            states["clients"] = cloned(dict(trainer.run.executor.state().parameters))
            if trainer.run.selection.best_round == trainer.run.round_idx - 1:
                states["server"] = cloned(trainer.run.strategy.state_dict())

    trainer = make_trainer(
        executor=executor(), callbacks=Watch(), participation=Participation(held_out_fraction=0.4), seed=1
    )

    result = trainer.fit(make_model(kind), federation, tiny(kind))

    new, old = list(trainer.run.new_clients), list(trainer.run.training_clients)
    assert (old, new) == ([0, 1, 3], [2, 4])
    assert 0 <= result["new/test/acc"] <= 1
    assert trainer.run.scores["new/"].clients == tuple(new)
    assert trainer.run.scores["new/"].signals["test/acc"][:, 1].tolist() == [
        int(federation.clients[client].test_mask_N.sum()) for client in new
    ]
    after = trainer.run.executor.state().parameters
    for name, before in states["clients"].items():
        assert torch.equal(after[name][old], before[old])
        assert torch.equal(before[new], trainer.run.model.parameter_dict()[name].expand_as(before[new]))
        stages = [*trainer.run.strategy.stages(0), *trainer.run.strategy.admission_stages()]
        learns = any(stage.trains(name) for stage in stages if stage.num_epochs or stage.num_steps)
        assert torch.equal(after[name][new], before[new]) != learns
    server, changed = trainer.run.strategy.state_dict(), []

    def compare(now: Any, then: Any, path: str) -> None:
        if isinstance(now, dict | list):
            for name in now if isinstance(now, dict) else range(len(now)):
                compare(now[name], then[name], f"{path}/{name}")
        elif isinstance(now, Tensor) and now.dim() and len(now) == 5 and not torch.equal(now, then):
            changed.append(path)  # what the server knows of each client: only the newcomers' rows may differ
            assert torch.equal(now[old], then[old]), path
        elif isinstance(now, Tensor):
            assert torch.equal(now, then), path
        else:
            assert now == then, path

    compare(server, states["server"], "")
    assert all(path.split("/")[1] not in ("generator", "optimizer", "models") for path in changed)


def test_new_clients_join_the_server_of_the_chosen_round(
    kind, federation, make_model, make_trainer, assert_same, monkeypatch
) -> None:
    monkeypatch.setattr(Selection, "_is_better", lambda selection, value, best: best is None)  # the first is chosen
    joins, results = Participation(held_out_fraction=0.4), []
    for num_rounds in (4, 1):
        trainer = make_trainer(num_rounds=num_rounds, participation=joins, seed=1)
        results.append(trainer.fit(make_model(kind), federation, tiny(kind)))
    assert results[0]["best_round"] == 0
    found = [{name: value for name, value in result.items() if name.startswith("new/")} for result in results]

    assert found[0]
    assert_same(found[0], found[1])


@both_executors
def test_a_checkpoint_scores_and_predicts_as_fit_reported(
    kind, executor, federation, make_model, make_trainer, assert_same
) -> None:
    def trainer(callbacks: Callback | None = None):
        return make_trainer(executor=executor(), callbacks=callbacks, participation=Participation(**BUSY), seed=1)

    fitted = trainer(FederatedCheckpoint())
    reported = fitted.fit(make_model(kind, dropout=0.5), federation, tiny(kind))
    best = str(fitted.run.folder / "checkpoints" / "best.ckpt")

    found = trainer().test(make_model(kind, dropout=0.5), federation, tiny(kind), ckpt_path=best)
    predicted = trainer().predict(make_model(kind, dropout=0.5), federation, tiny(kind), ckpt_path=best)

    assert_same(found, {name: reported[name] for name in found}, tolerance=1e-6)
    right = []
    for client, predicted_NK in predicted.items():
        graph = federation.clients[client]
        right.append((predicted_NK.argmax(dim=1) == graph.y_N)[graph.test_mask_N].double().mean())
    assert reported["test/acc"] == pytest.approx(float(torch.stack(right).mean()), abs=1e-6)


def test_results_do_not_depend_on_the_global_generators(
    kind, federation, make_model, make_trainer, assert_same
) -> None:
    results = []
    for seed in (0, 99):
        torch.manual_seed(seed)
        results.append(make_trainer(num_rounds=2).fit(make_model(kind), federation, tiny(kind)))
    other = make_trainer(num_rounds=2, seed=1).fit(make_model(kind), federation, tiny(kind))

    assert_same(results[0], results[1])
    assert other["train/loss"] != results[0]["train/loss"]


def test_the_main_evaluation_is_of_the_model_for_the_clients(
    kind, federation, make_model, make_trainer, assert_same
) -> None:
    trainer = make_trainer(num_rounds=2)
    strategy = tiny(kind)
    trainer.fit(make_model(kind), federation, strategy)

    model = strategy.model_for((3, 1))

    evaluated = strategy.evaluations((3, 1))[""].payload
    if evaluated is not None and not evaluated.parameters:  # signals for the rule of prediction alone
        evaluated = None
    assert (model is None) == (evaluated is None)
    if model is not None:
        assert model.clients == evaluated.clients == (3, 1)
        assert_same(dict(model.parameters), dict(evaluated.parameters))
