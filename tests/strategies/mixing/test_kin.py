"""Kin, the oracle, masked averaging alone, and the blend of mixed and trained models."""

import dataclasses
import functools

import pytest
import torch
from both_executors import both_executors
from joined import Joined
from task_data import graph_data, link_data
from torch import Tensor

from fl_lightning import Callback, Participation
from fl_lightning.batches.base import single
from fl_lightning.kernels.masked_averaging import masked_average
from fl_lightning.round.context import Context
from fl_lightning.strategies import DPSGD, FedAvg, FedOpt, FedPer, FedSheafHN, Kin, Oracle, SheafRidge
from fl_lightning.strategies.client_outputs import graph_embedding
from fl_lightning.strategies.mixing import NormClipping


class Watch(Callback):
    """Keeps what was sent and what came back."""

    def __init__(self) -> None:
        self.sent, self.upload = [], []

    def on_send(self, trainer, stage, payload) -> None:
        self.sent.append(payload)

    def on_upload(self, trainer, stage, payload):
        self.upload.append(payload.copy())
        return payload


def shares(federation) -> Tensor:
    examples_C = torch.tensor([float(client.num_examples) for client in federation.clients], dtype=torch.float64)
    return examples_C / examples_C.sum()


# ---------------------------------------------------------------- the oracle


def test_the_oracle_mixes_half_inside_the_group(federation, make_model, make_trainer) -> None:
    watch = Watch()
    trainer = make_trainer(num_rounds=1, callbacks=watch, precision="64-true")
    trainer.fit(make_model(), federation, strategy := Oracle(group_share=0.25))

    w = shares(federation)
    inside = torch.tensor([[1, 0, 0, 1, 0], [0, 1, 1, 0, 1], [0, 1, 1, 0, 1], [1, 0, 0, 1, 0], [0, 1, 1, 0, 1]]) * w
    mixing = 0.25 * inside / inside.sum(dim=1, keepdim=True) + 0.75 * w
    for name, sent in watch.upload[0].parameters.items():
        expected = (mixing @ sent.flatten(1)).view_as(sent)
        torch.testing.assert_close(strategy.models[name], expected, rtol=1e-12, atol=1e-14)


def test_an_oracle_of_no_groups_is_fedavg(federation, make_model, make_trainer, assert_same) -> None:
    actual, expected = (
        make_trainer().fit(make_model(), federation, each) for each in (Oracle(group_share=0.0), FedAvg())
    )

    assert actual.pop("server/mixing_breadth") > 0.9  # examples are nearly alike
    assert_same(actual, expected, tolerance=1e-6)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"groups": [0, 1]}, "strategy.groups has 2 entries for 5 clients"), ({"group_share": 1.5}, "in \\[0, 1\\]")],
)
def test_an_oracle_that_cannot_know_is_refused(settings, message, federation, make_model, make_trainer) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer().fit(make_model(), federation, Oracle(**settings))


# ---------------------------------------------------------------- Kin


@both_executors
def test_kin_embeds_in_the_common_initial_frame(executor, federation, make_model, make_trainer) -> None:
    watch = Watch()
    trainer = make_trainer(executor=executor(), num_rounds=2, callbacks=watch, precision="64-true")
    trainer.fit(make_model(), federation, strategy := Kin(common_share=0.4, similarity_temperature=3.0))

    start, run = trainer.run.architectures[0], trainer.run
    embeddings = torch.stack(
        [graph_embedding(run.model, start, single(run.executor.collator([c])), Context()) for c in range(5)]
    )
    torch.testing.assert_close(watch.upload[0].extras["embedding"], embeddings, rtol=1e-10, atol=1e-12)
    assert not any(payload.extras for payload in watch.upload[1:])
    directions = embeddings / embeddings.norm(dim=1, keepdim=True)
    centered = directions - directions.mean(dim=0)
    unit = centered / centered.norm(dim=1, keepdim=True)
    w = shares(federation)
    kin = (3.0 * unit @ unit.T).exp() * w
    mixing = 0.6 * kin / kin.sum(dim=1, keepdim=True) + 0.4 * w
    for name, sent in watch.upload[-1].parameters.items():
        expected = (mixing @ sent.flatten(1)).view_as(sent)
        torch.testing.assert_close(strategy.models[name], expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(strategy.matrices()["mixing"], mixing.to(strategy.dtype), rtol=1e-10, atol=1e-12)


class LosesAnEmbedding(Watch):
    """Loses what a client sends before round 0."""

    def on_upload(self, trainer, stage, payload):
        return payload.rows([c for c in payload.clients if c != 2]) if stage.name == "embed" else payload


@pytest.mark.filterwarnings("ignore:.*its update was lost")
def test_who_is_not_embedded_has_the_weight_of_its_examples(federation, make_model, make_trainer) -> None:
    trainer = make_trainer(num_rounds=1, callbacks=LosesAnEmbedding())
    trainer.fit(make_model(), federation, strategy := Kin(common_share=0.5))
    assert strategy.signatures.known_C.tolist() == [True, True, False, True, True]
    examples = [float(client.num_examples) for client in federation.clients]
    assert strategy.signatures.examples_C.tolist() == examples


class TrainsOnNothing(Callback):
    """Leaves the second client no training examples."""

    needs_data = changes_training = True

    def on_clients(self, trainer, clients):
        none_N = torch.zeros_like(clients[1].train_mask_N)
        return (clients[0], dataclasses.replace(clients[1], train_mask_N=none_N), *clients[2:])


@pytest.mark.parametrize(
    "strategy",
    [Kin(common_share=0.5), FedSheafHN(num_neighbors=1), SheafRidge(num_neighbors=1)],
    ids=lambda strategy: type(strategy).__name__,
)
@pytest.mark.parametrize("kind", ["graphs", "pairs"])
def test_who_trains_on_nothing_is_not_embedded(kind, strategy, make_trainer, tmp_path) -> None:
    data = graph_data(cache_dir=str(tmp_path)) if kind == "graphs" else link_data(tmp_path)
    trainer = make_trainer(num_rounds=2, callbacks=TrainsOnNothing())
    trainer.fit(None, data, strategy)
    assert not any(trainer.run.num_failures.values())
    known = strategy.signatures if isinstance(strategy, Kin) else strategy.embeddings
    assert known.known_C.tolist() == [number != 1 for number in range(len(data.clients))]


@pytest.mark.parametrize("settings", [{"common_share": 1.0}, {"similarity_temperature": 0.0, "common_share": 0.5}])
def test_kin_without_similar_clients_is_fedavg(settings, federation, make_model, make_trainer, assert_same) -> None:
    actual = make_trainer().fit(make_model(), federation, Kin(**settings))
    expected = make_trainer().fit(make_model(), federation, FedAvg())

    assert_same({name: actual[name] for name in expected}, expected, tolerance=1e-6)


def test_unseen_clients_find_their_similar_clients(federation, make_model, make_trainer) -> None:
    joined = Joined()
    participation = Participation(held_out_fraction=0.4)
    trainer = make_trainer(participation=participation, seed=1, precision="64-true", callbacks=joined)
    trainer.fit(make_model(), federation, strategy := Kin(similarity_temperature=4.0, common_share=0.5))
    joined.restore(strategy)

    new, old = list(trainer.run.unseen_clients), list(trainer.run.training_clients)
    directions = strategy.signatures.rows_CD / strategy.signatures.rows_CD.norm(dim=1, keepdim=True)
    centered = directions - directions[old].mean(dim=0)
    unit = centered / centered.norm(dim=1, keepdim=True)
    w = shares(federation)[old] / shares(federation)[old].sum()
    kin = (4.0 * unit[new] @ unit[old].T).exp() * w
    mixing = 0.5 * kin / kin.sum(dim=1, keepdim=True) + 0.5 * w
    for name, model in strategy.mixed_models(new).parameters.items():
        expected = (mixing @ strategy.models[name][old].flatten(1)).view_as(model)
        torch.testing.assert_close(model, expected, rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------- pieces of the family


@both_executors
@pytest.mark.parametrize("kind", [FedAvg, FedPer, Oracle, functools.partial(Kin, common_share=0.3)])
def test_only_updated_coordinates_are_mixed(kind, executor, federation, make_model, make_trainer) -> None:
    watch = Watch()
    trainer = make_trainer(executor=executor(), num_rounds=2, callbacks=watch, precision="64-true")
    strategy = kind(masked_averaging=True)
    trainer.fit(make_model(), federation, strategy)

    sent, received = watch.upload[-1], watch.sent[-1]
    for name, tensor in sent.parameters.items():
        mixing = strategy.mixing_matrix(sent)
        expected = masked_average(mixing, tensor.flatten(1), received.parameters[name].flatten(1))
        actual = strategy.models[name].flatten(1)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


def test_only_updated_coordinates_are_mixed_without_a_server() -> None:
    strategy = DPSGD(masked_averaging=True)
    strategy.adjacency_CC = torch.tensor([[0, 1, 0], [1, 0, 1], [0, 1, 0]], dtype=torch.bool)
    strategy.models_CP = torch.zeros(3, 2, dtype=torch.float64)
    trained = torch.tensor([[3.0, 0.0], [0.0, 0.0], [0.0, 6.0]], dtype=torch.float64)

    actual = strategy.combine(torch.arange(3), trained)

    # client 1 hears both ends with 1/3 each, the ends hear it alone
    torch.testing.assert_close(actual, torch.tensor([[3.0, 0.0], [3.0, 6.0], [0.0, 6.0]], dtype=torch.float64))


def test_updated_coordinates_and_robust_rules_are_either_or() -> None:
    with pytest.raises(ValueError, match=r"strategy\.masked_averaging .* strategy\.aggregation .* set one of them"):
        FedAvg(masked_averaging=True, aggregation=NormClipping())


def test_a_server_optimizer_steps_toward_what_was_moved(federation, make_model, make_trainer, assert_same) -> None:
    settings = {"masked_averaging": True}
    expected = make_trainer().fit(make_model(), federation, FedAvg(**settings))

    actual = make_trainer().fit(
        make_model(), federation, FedOpt(server_optimizer="avgm", momentum=0.0, server_lr=1.0, **settings)
    )

    assert_same({name: actual[name] for name in expected}, expected, tolerance=1e-6)


@both_executors
@pytest.mark.parametrize("kind", [FedAvg, FedPer, Kin])
def test_the_blend_is_the_mean_of_mixed_and_trained(kind, executor, federation, make_model, make_trainer) -> None:
    trainer = make_trainer(executor=executor(), num_rounds=2, precision="64-true")
    strategy = kind(blend=True)
    trainer.fit(make_model(), federation, strategy)

    own, mixed = trainer.run.executor.state().parameters, strategy.mixed_models(range(5)).parameters
    client = trainer.run.model
    for number in range(5):
        batch = single(trainer.run.executor.collator([number]))
        mean = {name: (p[number] + mixed.get(name, p)[number]) / 2 for name, p in own.items()}
        expected = client.score_table(mean, batch, Context())["val/loss"]
        actual = trainer.run.scores["blend/"].extras["val/loss"][number]
        torch.testing.assert_close(actual, expected.float(), rtol=1e-5, atol=1e-6)
