"""FGGP: clusters and prototypes by hand, the alignment, the queue's vote, and what it reduces to."""

import dataclasses
import functools
import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from both_executors import both_executors
from grouped_clients import grouped_clients
from one_client import one_client
from path_graph import computed, path_graph
from torch import Tensor
from torch.func import functional_call

from fl_lightning import Callback, Participation, Payload, StackedExecutor
from fl_lightning.batches import GraphBatch
from fl_lightning.batches.base import single
from fl_lightning.batches.graphs import GraphCollator
from fl_lightning.callbacks import CommunicationLedger
from fl_lightning.federation import Federation
from fl_lightning.kernels.randomness import subkey
from fl_lightning.models import AugmentedGCN
from fl_lightning.models.augmented_gcn import SecondView, proposed_edges
from fl_lightning.models.output import NetOutput
from fl_lightning.round.context import Context
from fl_lightning.strategies import FGGP, FedAvg, FedPer
from fl_lightning.strategies.mixing.fggp import alignment, edge_loss, prototypes

OFF = {"view_weight": 0.0, "alignment_weight": 0.0, "edge_weight": 0.0}


@pytest.fixture
def fit(federation, make_model, make_trainer):
    """Run on the graphs."""

    def run(strategy, executor=StackedExecutor, data=None, kind=FGGP, **settings):
        trainer = make_trainer(executor=executor(), **{"seed": 1, **settings})
        trainer.fit(make_model(kind, dropout=0.5), data or federation, strategy)
        return trainer

    return run


def on_circle(*degrees: float) -> Tensor:
    angle = torch.tensor(degrees, dtype=torch.float64).deg2rad()
    return torch.stack([angle.cos(), angle.sin()], dim=1)


@pytest.fixture
def batch(graphs) -> GraphBatch:
    return single(GraphCollator(graphs[:1], device=torch.device("cpu"), dtype=torch.float64)([0]))


def test_prototypes_are_means_weighted_by_confidence(batch) -> None:
    draw = torch.Generator().manual_seed(0)
    output = NetOutput(*(torch.randn(len(batch.y), width, generator=draw).double() for width in (3, 4)))
    share = output.logits.softmax(dim=1)
    actual = prototypes(output, batch)
    for k in range(3):
        total, weight, count = torch.zeros(4).double(), 0.0, 0
        for v in range(len(batch.y)):
            labeled = bool(batch.train_mask[v])
            if (int(batch.y[v]) if labeled else int(share[v].argmax())) == k:
                confidence = 1.0 if labeled else float(share[v].max())
                total += confidence * output.embedding[v].relu()
                weight += confidence
                count += 1
        assert actual["counts"][k] == count  # labeled or predicted
        torch.testing.assert_close(actual["prototypes"][k], total / (weight + 1e-6))


def test_alignment() -> None:
    first = {"prototypes": on_circle(0, 60, 200), "counts": torch.tensor([4, 1, 0])}
    second = {"prototypes": 3 * on_circle(10, 90, 270), "counts": torch.tensor([2, 2, 2])}

    def score(degrees: float) -> float:
        return math.exp(math.cos(math.radians(degrees)) / 0.5)

    terms = [score(10) / (score(10) + score(50) + score(80)), score(30) / (score(30) + score(90) + score(80))]
    expected = -sum(map(math.log, terms)) / 2
    assert alignment(first, second, 0.5).item() == pytest.approx(expected)
    alone = {"prototypes": on_circle(0, 60, 200), "counts": torch.tensor([3, 0, 0])}
    assert alignment(alone, second, 0.5).item() == pytest.approx(0)


def test_proposed_edges_go_both_ways_and_padding_has_none(graphs) -> None:
    batch = GraphCollator(graphs, device=torch.device("cpu"), dtype=torch.float64)([0, 4])
    proposed = torch.zeros(2, 30, 1, dtype=torch.int64)  # what padding remembers must not matter
    edges = torch.vmap(lambda t, p: proposed_edges(batch.replace(t), p))(batch.tensors(), proposed)
    assert torch.equal(edges, edges.mT)
    assert edges[1, 8:].sum() == 0
    assert (edges[1, 0, :8] == 1).all()
    assert torch.equal(edges.diagonal(dim1=1, dim2=2), batch.example_mask.double())


@pytest.mark.parametrize("padding", [0, 3])
def test_the_augmentors_loss(padding) -> None:
    """Cross entropy over all pairs of nodes, in which the edges weigh as much as the other pairs."""
    score_NN = torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).double()

    def own(batch: Any) -> dict[str, Tensor]:
        score, proposed = F.pad(score_NN, (0, padding) * 2, value=9.0), torch.full((4 + padding, 1), -1)
        edges = proposed_edges(batch, proposed)
        nothing = NetOutput(batch.y[:, None].to(score), batch.y[:, None].to(score))
        return {"loss": edge_loss(SecondView(nothing, score, edges), batch)}

    edge_NN = torch.eye(4, dtype=torch.bool)
    for u, v in ((0, 1), (1, 2), (2, 3)):
        edge_NN[u, v] = edge_NN[v, u] = True
    share_NN = score_NN.sigmoid()
    expected = -(share_NN[edge_NN].log().mean() + (1 - share_NN[~edge_NN]).log().mean()) / 2
    torch.testing.assert_close(computed(own, path_graph(), padding=padding)["loss"], expected)


@pytest.mark.parametrize("weights", [(0.5, 0.0, 0.0), (0.0, 0.5, 0.0), (0.0, 0.0, 0.5), (0.3, 0.4, 0.5)])
def test_objective(graphs, weights) -> None:
    client, batch, (own,) = one_client(graphs[0], functools.partial(AugmentedGCN, hidden_channels=8))
    strategy = FGGP(**dict(zip(("view_weight", "alignment_weight", "edge_weight"), weights, strict=True)))
    key, proposed = torch.tensor(5), torch.full((len(batch.y), 1), -1)
    context = Context(received={"key": key}, client_state={"proposed": proposed}, step=2)
    view = functional_call(client.net, own, (batch, proposed, subkey(key, "step", 2)))
    first = client.output(own, batch)
    terms = [client.loss(view.output, batch)]
    terms += [alignment(prototypes(first, batch), prototypes(view.output, batch), 0.5), edge_loss(view, batch)]
    expected = client.loss(first, batch) + sum(w * term for w, term in zip(weights, terms, strict=True))
    torch.testing.assert_close(strategy.both_views(client, own, batch, context), expected)


def server(**settings: Any) -> FGGP:
    strategy = FGGP(**settings)
    start = {"head.weight": torch.zeros(2, 2), "augmentor.0": torch.zeros(1)}
    known = {"num_features": 2, "seed": 0, "device": torch.device("cpu"), "num_outputs": 2}
    strategy.setup(Federation(num_clients=2, training_clients=(0, 1), parameters=start, **known))
    return strategy


def answer(strategy: FGGP, vectors: Tensor, counts: Any) -> None:
    extras = {"class/prototypes": vectors, "class/counts": torch.tensor(counts)}
    upload = Payload(
        clients=(0, 1), parameters={"augmentor.0": torch.zeros(2, 1)}, extras=extras, num_examples=torch.ones(2)
    )
    strategy.aggregate(strategy.training(0), upload)


class Embeds:
    """Stands for a client whose embeddings are given."""

    def __init__(self, embedding_ND: Tensor) -> None:
        self.embedding_ND = embedding_ND

    def output(self, parameters: Any, batch: Any) -> NetOutput:
        return NetOutput(torch.zeros(len(self.embedding_ND), 2), self.embedding_ND)


def votes(strategy: FGGP, *degrees: float, scale: float = 1.0) -> Tensor:
    client = Embeds(scale * on_circle(*degrees).float())
    return strategy.vote(client, {}, None, Context(received=strategy.queue)).logits.exp()  # type: ignore[arg-type]


def test_the_queue_holds_the_newest_by_class() -> None:
    strategy = server(queue_length=1)
    both = torch.stack([on_circle(0, 90), on_circle(10, 80)]).float()
    answer(strategy, both, [[True, True], [True, False]])
    assert strategy.queue["classes"].tolist() == [1, 0]
    torch.testing.assert_close(strategy.queue["vectors"], on_circle(90, 5).float())
    answer(strategy, 7 * both, [[True, False], [False, False]])
    assert strategy.queue["classes"].tolist() == [0, 1]
    torch.testing.assert_close(strategy.queue["vectors"], on_circle(0, 90).float())


def test_one_vote_is_the_nearest_prototype() -> None:
    strategy = server(num_votes=1)
    both = torch.stack([on_circle(0, 90), on_circle(10, 80)]).float()
    answer(strategy, both, [[True, True], [True, False]])
    assert votes(strategy, 20, 60).argmax(dim=1).tolist() == [0, 1]
    assert torch.equal(votes(strategy, 20, 60, scale=4.0), votes(strategy, 20, 60))
    more = server(num_votes=5)
    answer(more, both, [[True, True], [True, False]])
    weight = torch.tensor([math.cos(math.radians(15)), math.cos(math.radians(70))]).div(0.1).softmax(dim=0)
    torch.testing.assert_close(votes(more, 20)[0], weight)


@both_executors
@pytest.mark.parametrize(("personal", "other"), [((), FedAvg), (("head.*",), FedPer)])
def test_without_its_terms_the_classifier_is_fedavgs_or_fedpers(personal, other, executor, fit, assert_same) -> None:
    actual = fit(FGGP(personal=personal, **OFF), executor)
    expected = fit(other(), executor)
    parameters = expected.run.executor.state().parameters
    state = actual.run.executor.state().parameters
    assert_same(dict(state), {**state, **parameters})
    assert [row["classifier/test/acc"] for row in actual.run.history] == [
        row["test/acc"] for row in expected.run.history
    ]


@pytest.mark.parametrize("weight", sorted(OFF))
def test_each_weight_is_felt(weight, fit) -> None:
    settings = {"num_epochs": 2, "num_votes": 3}
    first, second = (
        fit(FGGP(**{**settings, **OFF, **more}), num_rounds=1).run.executor.state().parameters
        for more in ({}, {weight: 1.0})
    )
    name = "augmentor.0" if weight == "edge_weight" else "convs.0.weight"
    assert (first[name] - second[name]).abs().max() > 1e-5


def test_clients_of_different_domains_keep_prototypes_of_their_own(given_clients, fit) -> None:
    """Two groups see the same classes elsewhere: one mean a class would be of neither."""
    clients = grouped_clients(shift=0, modulus=2)
    moved = [dataclasses.replace(c, x_NF=c.x_NF.roll(4 * (i % 2), dims=1)) for i, c in enumerate(clients)]
    trainer = fit(FGGP(num_votes=5), data=given_clients(moved, num_classes=2), num_rounds=8)
    assert trainer.run.history[-1]["server/prototypes"] > 2
    assert trainer.run.history[-1]["server/classes"] == 2
    assert trainer.run.selection.result["test/acc"] > 0.9


@pytest.mark.full
def test_prototypes_of_domains_beat_averaging(given_clients, fit) -> None:
    """Two groups see the same classes in other places, apart or overlapping."""
    gain = 0.0
    for shifts, seed in itertools.product((4, 1), (0, 1)):
        clients = [
            dataclasses.replace(each, x_NF=each.x_NF.roll(shifts * (i % 2), dims=1))
            for i, each in enumerate(grouped_clients(shift=0, modulus=2))
        ]
        data = given_clients(clients, num_classes=2)
        own, plain = (fit(strategy, data=data, num_rounds=8, seed=seed) for strategy in (FGGP(num_votes=5), FedAvg()))
        gain += own.run.selection.result["test/acc"] - plain.run.selection.result["test/acc"]
    assert gain / 4 > 0.01


class TwoAtATime(Participation):
    """Two other clients in every round."""

    def draw(self, clients, round_idx, seed):
        return dict.fromkeys([(2 * round_idx) % 5, (2 * round_idx + 1) % 5], 1.0), []


class Proposals(Callback):
    """Keeps who has neighbors after each round, the neighbors, and the stages of each round."""

    def __init__(self) -> None:
        self.known, self.proposed, self.stages = [], [], []

    def on_stage_end(self, trainer, stage, upload) -> None:
        self.stages.append(stage.name)

    def on_round_end(self, trainer, metrics) -> None:
        state = trainer.run.executor.state().extras["client_state/proposed"]
        rows = [state[client, : trainer.run.executor.collator.size(client)] for client in range(5)]
        self.known.append([bool((row_NP >= 0).any()) for row_NP in rows])
        self.proposed.append([row_NP.clone() for row_NP in rows])


@both_executors
def test_who_was_absent_when_neighbors_were_proposed_proposes_later(executor, fit) -> None:
    watch = Proposals()
    fit(FGGP(propose_every=10), executor, num_rounds=5, participation=TwoAtATime(), callbacks=watch)
    first, more = [True, True, False, False, False], [True, True, True, True, False]
    assert watch.known == [first, more, [True] * 5, [True] * 5, [True] * 5]
    assert watch.stages == ["propose", "train"] * 3 + ["train"] * 2
    assert torch.equal(watch.proposed[2][0], watch.proposed[0][0])  # which took part again


def test_bytes(fit) -> None:
    history = fit(FGGP(propose_every=2), callbacks=CommunicationLedger()).run.history
    model = 6 * 8 + 8 + 8 * 8 + 8 + 8 * 3 + 3 + 6 * 8 + 8 * 8
    for number, row in enumerate(history):
        assert row["comm/bytes_up"] == 5 * (4 * model + 4 * 3 * 8 + 3 * 8)
        assert row["comm/bytes_down"] == 5 * (4 * model + 8) * (2 if number % 2 == 0 else 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"edge_weight": -1}, r"strategy\.edge_weight must not be negative, got -1"),
        ({"temperature": 0}, r"strategy\.temperature must be positive, got 0"),
        ({"num_votes": 0}, r"strategy\.num_votes must be at least 1, got 0"),
    ],
)
def test_settings(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        FGGP(**settings)


def test_a_net_without_augmentor_is_refused(fit) -> None:
    with pytest.raises(ValueError, match=r"FGGP needs a net with an augmentor: set model\.net to"):
        fit(FGGP(), kind=FedAvg)
