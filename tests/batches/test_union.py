"""Models are scored on their client's examples and on those of all clients together."""

import functools

import pytest
import torch
from both_executors import both_executors

from fl_lightning import Participation, StackedExecutor
from fl_lightning.batches.graphs import GraphCollator
from fl_lightning.strategies import FedAvg, FedPer


@pytest.fixture
def fit(federation, make_model, make_trainer):
    def run(strategy, executor, **settings):
        trainer = make_trainer(executor=executor(), num_rounds=2, seed=1, **settings)
        trainer.fit(make_model(), federation, strategy)
        return trainer

    return run


@both_executors
@pytest.mark.parametrize("kind", [FedAvg, FedPer])
def test_each_model_on_all_clients(kind, executor, fit, graphs) -> None:
    trainer = fit(kind(), executor, evaluate_union=True, precision="64-true")
    collator = GraphCollator(graphs, device=torch.device("cpu"), dtype=torch.float64)
    client = trainer.run.model.eval()
    state, mixed = trainer.run.executor.state().parameters, trainer.run.strategy.models
    mixed = {**state, **{name: tensor.expand(5, *tensor.shape[1:]) for name, tensor in mixed.items()}}
    for prefix, models in (("union/trained/", state), ("union/", mixed)):
        scores = trainer.run.scores[prefix].extras["test/acc"]
        for model in range(5):
            own = {name: tensor[model] for name, tensor in models.items()}
            right = count = 0
            for other in range(5):
                batch = collator([other])
                batch = batch.replace({name: tensor[0] for name, tensor in batch.tensors().items()})
                actual = client.score_table(own, batch, None)["test/acc"]  # type: ignore[arg-type]
                right, count = right + float(actual[0]), count + float(actual[1])
            assert scores[model].tolist() == [right, count]
    for row in trainer.run.history:
        ways = {"test/acc", "union/test/acc", "trained/test/acc", "union/trained/test/acc"}
        assert ways <= row.keys()
        assert {f"{way}_at_own_best_round" for way in ways - {"test/acc"}} <= trainer.run.selection.result.keys()
        if kind is FedAvg:  # one model for all
            assert row["union/test/acc"] == pytest.approx(row["test/acc_weighted"])
            assert row["union/test/acc_std"] == pytest.approx(0, abs=1e-6)


@both_executors
def test_it_changes_nothing_else(executor, fit, assert_same) -> None:
    busy = {"participation": Participation(num_clients=3, held_out_fraction=0.2)}
    plain, more = (fit(FedAvg(), executor, evaluate_union=union, **busy) for union in (False, True))
    kept = [{n: v for n, v in row.items() if not n.startswith("union/")} for row in more.run.history]
    assert_same(kept, plain.run.history)
    assert_same(dict(more.run.executor.state().tensors()), dict(plain.run.executor.state().tensors()))
    (unseen_client,) = more.run.unseen_clients
    count = sum(int(more.run.datamodule.clients[c].test_mask_N.sum()) for c in more.run.training_clients)
    assert more.run.scores["unseen/union/"].extras["test/acc"].tolist()[0][1] == count
    assert unseen_client not in more.run.training_clients


def test_groups_do_not_matter(fit, assert_same) -> None:
    runs = [
        fit(FedPer(), functools.partial(StackedExecutor, **settings), evaluate_union=True, precision="64-true")
        for settings in ({"max_padding": 0.9}, {"max_clients_per_group": 2})
    ]
    assert_same(runs[0].run.history, runs[1].run.history, tolerance=1e-6)
