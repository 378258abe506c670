"""Link prediction from data to predictions: what a step draws, both executors, resume, nets and heuristics."""

import functools
import json

import pytest
import torch
from task_data import link_data, link_graph, relational_graph, rows_of_predictions
from torch.optim import SGD, Adam
from torch_geometric.data import Data

from fl_lightning import ClientModule, SequentialExecutor, StackedExecutor
from fl_lightning.batches.base import single
from fl_lightning.batches.client_graph import ClientGraph
from fl_lightning.batches.pairs import ClientPairs
from fl_lightning.callbacks import RunReport
from fl_lightning.callbacks.result_table import result_table
from fl_lightning.data import InMemorySource
from fl_lightning.models import GCN, LinkGCN
from fl_lightning.report.record import RunRecord
from fl_lightning.strategies import FedAvg, FedPer, FedSheafHN, Pooled
from fl_lightning.tasks import LinkPrediction, heuristics
from fl_lightning.tasks.heuristics import (
    KATZ_DECAY,
    adamic_adar,
    adjacency_of,
    common_neighbors,
    heuristic_metrics,
    katz,
)

CPU = {"device": torch.device("cpu"), "dtype": torch.float64}
BOTH = ("weight", "bias")
RATE = functools.partial(SGD, lr=0.05)


def client(**settings) -> ClientModule:
    return ClientModule(functools.partial(LinkGCN, hidden_channels=8, **settings), RATE)


@pytest.mark.parametrize("batch_size", [None, 40])
def test_steps_draw_negatives_by_key(batch_size, tmp_path) -> None:
    """A client's draws are the same alone and on a stack, differ from step to step, and come from its candidates."""
    data = link_data(tmp_path, batch_size=batch_size)
    collator = data.collator(data.clients, **CPU)
    keys = torch.tensor([[3, 8, 5], [4, 9, 6]])
    stacked = list(collator([0, 1, 2]).draws(keys))
    seen = set()
    for number, own in enumerate(data.clients):
        candidates = {tuple(each) for each in own.candidate_M2.tolist()}
        alone = list(single(collator([number])).draws(keys[:, number]))
        links = {tuple(each) for each in own.pair_P2[own.train_mask_N & (own.y_N[:, 0] > 0.5)].tolist()}
        for step, batch in enumerate(alone):
            other = stacked[step]
            mask, other_mask = batch.train_mask, other.train_mask[number]
            assert torch.equal(batch.pair[mask], other.pair[number][other_mask])
            assert torch.equal(batch.y[mask], other.y[number][other_mask])
            drawn = {tuple(each) for each in batch.pair[mask & (batch.y[:, 0] < 0.5)].tolist()}
            assert drawn <= candidates
            seen.add(frozenset(drawn))
            if batch_size is None:  # all links, and no pairs of the pools
                assert {tuple(each) for each in batch.pair[batch.y[:, 0] > 0.5].tolist()} == links
                assert mask.all()
    assert len(seen) == 6


@pytest.mark.parametrize(
    "net",
    [
        {},
        {"encoder": "sage"},
        {"encoder": "gat", "num_heads": 2},
        {"decoder": "dot"},
        {"decoder": "distmult", "num_relations": 2},
        {"dropout": 0.5, "batch_norm": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("batch_size", [None, 40])
def test_both_executors_agree(net, batch_size, make_trainer, assert_same, tmp_path) -> None:
    graph = relational_graph() if "num_relations" in net else link_graph()
    features = "identity" if "encoder" in net else "own"
    data = link_data(tmp_path, source=InMemorySource(graph), batch_size=batch_size, features=features)
    runs = []
    for executor in (SequentialExecutor(), StackedExecutor(max_padding=0.9)):
        trainer = make_trainer(executor=executor, precision="64-true", num_rounds=2)
        result = trainer.fit(client(**net), data, FedAvg())
        predicted = trainer.run.executor.predict(trainer.run.strategy.evaluations([0])[""], [0], 1)
        runs.append((result, trainer.run.history, trainer.run.executor.state().parameters, predicted))
    assert_same(*runs, tolerance=1e-6)
    metrics = {"auroc", "average_precision", "hits@10", "hits@50", "mrr", "loss", "acc"}
    assert {f"test/{name}" for name in metrics} <= set(runs[0][0])
    assert trainer.run.selection.monitor == "val/auroc"


def test_a_run_resumes_exactly(make_trainer, assert_same, tmp_path) -> None:
    whole = make_trainer(num_rounds=4, default_root_dir=str(tmp_path / "whole"))
    expected = whole.fit(client(), link_data(tmp_path, batch_size=40), FedAvg())
    first = make_trainer(num_rounds=2, default_root_dir=str(tmp_path / "first"))
    first.fit(client(), link_data(tmp_path, batch_size=40), FedAvg())
    first.save_checkpoint(tmp_path / "two.ckpt")
    again = make_trainer(num_rounds=4, default_root_dir=str(tmp_path / "again"))
    actual = again.fit(client(), link_data(tmp_path, batch_size=40), FedAvg(), ckpt_path=str(tmp_path / "two.ckpt"))
    assert_same((actual, again.run.history), (expected, whole.run.history))


def test_it_learns_more_than_the_heuristics_know(make_trainer, tmp_path) -> None:
    trainer = make_trainer(num_rounds=15)
    result = trainer.fit(ClientModule(LinkGCN), link_data(tmp_path), FedAvg())
    assert result["test/auroc"] > 0.75  # by chance: 0.5


def test_pooled_trains_on_all_links(make_trainer, tmp_path) -> None:
    result = make_trainer(num_rounds=2).fit(client(), link_data(tmp_path), Pooled())
    assert 0 <= result["test/auroc"] <= 1
    with pytest.raises(ValueError, match=r"strategy.graph is 'whole', but what is learned is of pairs, not"):
        make_trainer().fit(client(), link_data(tmp_path), Pooled(graph="whole"))


def test_nets_that_score_nodes_are_refused(make_trainer, tmp_path) -> None:
    message = "LinkPrediction needs a net with an output for each pair of nodes: set model.net to fl_lightning.models"
    with pytest.raises(ValueError, match=message):
        make_trainer().fit(ClientModule(GCN), link_data(tmp_path), FedAvg())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"encoder": "mlp"}, "encoder must be gcn or sage or gat, got 'mlp'"),
        ({"encoder": "gat", "hidden_channels": 6}, "hidden_channels=6 is impossible: set it to a multiple of num_head"),
        ({"decoder": "cosine"}, "decoder must be hadamard or dot or distmult, got 'cosine'"),
        ({"num_relations": 2}, "decoder 'hadamard' does not tell num_relations=2 apart: use 'distmult'"),
        ({"num_relations": 0}, "num_relations=0 is impossible: set it to an integer of at least 1"),
        ({"decoder": "dot", "out_channels": 2}, "decoder 'dot' has one output for a pair, not 2: use 'hadamard'"),
    ],
)
def test_wrong_settings_of_the_net_are_named(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        LinkGCN(3, **{"out_channels": 1, **settings})


def test_the_dot_product_by_hand(tmp_path) -> None:
    data = link_data(tmp_path)
    batch = single(data.collator(data.clients, **CPU)([0]))
    net = LinkGCN(5, 1, hidden_channels=3, num_layers=1, decoder="dot").double()
    z_ND = batch.adjacency.matrix.to_dense() @ batch.x @ net.convs[0].weight + net.convs[0].bias
    expected = (z_ND[batch.pair[:, 0]] * z_ND[batch.pair[:, 1]]).sum(dim=1, keepdim=True)
    torch.testing.assert_close(net(batch).logits, expected)


@pytest.mark.parametrize(
    ("net", "head"),
    [
        ({"decoder": "hadamard"}, {"head.weight", "head.bias"}),
        ({"decoder": "distmult"}, {"relations"}),
        ({"decoder": "dot", "batch_norm": True}, {f"{part}.1.{of}" for part in ("convs", "norms") for of in BOTH}),
        ({"decoder": "dot", "encoder": "sage"}, {f"convs.1.{of}" for of in (*BOTH, "neighbor_weight")}),
    ],
    ids=lambda part: str(part) if isinstance(part, dict) else "",
)
def test_the_last_layer_of_every_decoder_can_be_kept_local(net, head, make_trainer, tmp_path) -> None:
    """The default ``head.*`` of methods with own heads: where a decoder has no parameters, the last convolution's."""
    for strategy in (FedPer(), FedSheafHN(num_neighbors=None)):
        trainer = make_trainer(num_rounds=1)
        result = trainer.fit(client(**net), link_data(tmp_path), strategy)
        [names] = trainer.run.architectures
        assert set(strategy.select(list(names), ["head.*"])) == head
        assert result["test/auroc"] >= 0


def test_links_between_clients_are_found_and_said(make_trainer, tmp_path) -> None:
    """Nodes are linked by a group that no client's own edges show: each has links to other clients alone."""
    pairs = torch.combinations(torch.arange(60))
    kept = (pairs[:, 0] % 2 == pairs[:, 1] % 2) & (pairs[:, 0] % 3 != pairs[:, 1] % 3)
    few = torch.rand(len(pairs), generator=torch.Generator().manual_seed(1)) < 0.5
    graph = Data(x=torch.ones(60, 1), edge_index=pairs[kept & few].t(), membership=torch.arange(60) % 3)
    settings = {"source": InMemorySource(graph), "candidates": "across", "features": "identity"}
    data = link_data(tmp_path, **settings)
    trainer = make_trainer(num_rounds=8)
    result = trainer.fit(ClientModule(LinkGCN), data, FedAvg())
    assert result["test/auroc"] > 0.8
    said = json.loads((trainer.run.folder / "result.json").read_text())["candidates"]
    assert said == data.task.notes["candidates"]
    assert "of an own node with one of another client" in said
    names, values = ([str(cell) for cell in column.cells] for column in result_table(trainer, []).columns)
    assert values[names.index("candidates")] == said
    assert names[names.index("test/auroc") + 1] == "  worst client", "rows beneath a metric are of that metric"
    assert names.index("test/acc") > names.index("  per-client model selection")
    assert LinkPrediction().notes == {"candidates": "pairs of a client's own nodes"}


def test_distmult_by_hand(tmp_path) -> None:
    data = link_data(tmp_path, source=InMemorySource(relational_graph()))
    assert data.task == LinkPrediction(num_relations=2)
    batch = single(data.collator(data.clients, **CPU)([1]))
    net = LinkGCN(5, 1, hidden_channels=4, num_layers=1, encoder="gat", decoder="distmult", num_relations=2).double()
    with torch.no_grad():
        net.relations.copy_(torch.tensor([[1.0, 2.0, 0.5, -1.0], [-1.0, 1.0, 3.0, 0.0]]))
    z_ND = net.convs[0](None, batch)
    first_PD, second_PD = z_ND[batch.pair].unbind(dim=1)
    expected = (first_PD * net.relations[batch.relation] * second_PD).sum(dim=1, keepdim=True)
    torch.testing.assert_close(net(batch).logits, expected)


def test_relations_of_links_and_of_pairs_without(tmp_path) -> None:
    graph = relational_graph()
    known = {tuple(sorted(p)): r for p, r in zip(graph.edge_index.t().tolist(), graph.edge_type.tolist(), strict=True)}
    for own in link_data(tmp_path, source=InMemorySource(graph), num_negatives=2).clients:
        linked = own.y_N[:, 0] > 0.5
        pairs = own.graph.node_idx_N[own.pair_P2].tolist()
        assert [known[tuple(p)] for p, is_link in zip(pairs, linked, strict=True) if is_link] == own.relation_P[
            linked
        ].tolist()
        for mask in (own.train_mask_N, own.val_mask_N, own.test_mask_N):  # the same shares of relations
            shares = [own.relation_P[mask & each].double().mean() for each in (linked, ~linked)]
            assert abs(shares[0] - shares[1]) < 0.04


def test_distmult_tells_relations_apart(make_trainer, tmp_path) -> None:
    """Like and unlike nodes are linked, so that without the relation every pair is as likely as another."""
    data = link_data(tmp_path, source=InMemorySource(relational_graph()))
    found = {}
    for decoder in ("dot", "distmult"):
        settings = {"num_relations": 2} if decoder == "distmult" else {}
        net = functools.partial(LinkGCN, hidden_channels=16, num_layers=1, decoder=decoder, encoder="sage", **settings)
        module = ClientModule(net, functools.partial(Adam, lr=0.05))
        found[decoder] = make_trainer(num_rounds=10).fit(module, data, FedAvg())["test/auroc"]
    assert found["distmult"] > 0.65 > found["dot"] + 0.05  # at most 0.75


def test_other_numbers_of_relations_are_refused(make_trainer, tmp_path) -> None:
    data = link_data(tmp_path, source=InMemorySource(relational_graph()))
    assert data.task.default_net(5)(5, 1).relations.shape == (2, 64)
    with pytest.raises(ValueError, match="has num_relations=3, but the links are of 2 relations: set model"):
        make_trainer().fit(client(decoder="distmult", num_relations=3), data, FedAvg())


def square_with_tail() -> ClientPairs:
    """The nodes 0, 1, 2, 3 in a ring, and 4 beside 3; the pair (0, 2) is to be predicted, (1, 4) is no link."""
    graph = Data(x=torch.ones(5, 1), edge_index=torch.tensor([[0, 1, 2, 3, 3], [1, 2, 3, 0, 4]]), y=torch.zeros(5))
    own = graph.edge_index
    nobody = torch.zeros(5, dtype=torch.bool)
    pair = torch.tensor([[0, 1], [1, 2], [2, 3], [0, 3], [3, 4], [0, 2], [1, 4], [0, 2], [1, 4]])
    none = torch.zeros(9, dtype=torch.bool)
    train, val, test = none.clone(), none.clone(), none.clone()
    train[:5], val[5:7], test[7:] = True, True, True
    return ClientPairs(
        name="client",
        graph=ClientGraph(
            name="client",
            x_NF=graph.x,
            edge_index_2E=torch.cat([own, own.flip(0)], dim=1),
            y_N=graph.y,
            node_idx_N=torch.arange(5),
            train_mask_N=nobody,
            val_mask_N=nobody,
            test_mask_N=nobody,
        ),
        pair_P2=pair,
        candidate_M2=torch.tensor([[1, 3]]),
        y_N=torch.tensor([1, 1, 1, 1, 1, 1, 0, 1, 0]).float()[:, None],
        train_mask_N=train,
        val_mask_N=val,
        test_mask_N=test,
    )


def test_heuristics_by_hand() -> None:
    """0 and 2 share 1 and 3, of degrees 2 and 3; 1 and 4 share none, and 1-0-3-4 and 1-2-3-4 lead from 1 to 4."""
    own = square_with_tail()
    adjacency = adjacency_of(own)
    assert common_neighbors(adjacency, own.pair_P2)[5:7].tolist() == [2, 0]
    expected = 1 / torch.tensor(2.0).log() + 1 / torch.tensor(3.0).log()
    assert adamic_adar(adjacency, own.pair_P2)[5:7].tolist() == pytest.approx([float(expected), 0])
    walks = torch.zeros(5, 5)
    walks[tuple(own.graph.edge_index_2E)] = 1
    powers = sum(KATZ_DECAY**length * torch.linalg.matrix_power(walks, length) for length in (1, 2, 3, 4))
    assert katz(adjacency, own.pair_P2).tolist() == pytest.approx(powers[tuple(own.pair_P2.t())].tolist())
    metrics = heuristic_metrics([own])
    assert set(metrics) == {"common neighbors", "Adamic-Adar", "Katz"}
    assert metrics["common neighbors"]["test/auroc"] == metrics["Katz"]["val/mrr"] == 1
    assert "test/hits@10" not in metrics["Katz"]  # the pool has one pair


def test_heuristics_score_the_pools_alone_and_few_pairs_at_once(monkeypatch, tmp_path) -> None:
    """All walks from all training pairs at once took 29 seconds and 2 GB of one client with 8,000 nodes."""
    data = link_data(tmp_path, pool_size=20)
    expected = heuristic_metrics(data.clients)
    seen = []

    def spy(adjacency, pairs):
        seen.append(pairs)
        return common_neighbors(adjacency, pairs)

    monkeypatch.setattr(heuristics, "_BLOCK", 7)
    monkeypatch.setitem(heuristics.HEURISTICS, "spied on", spy)
    metrics = heuristic_metrics(data.clients)
    assert metrics.pop("spied on") == expected["common neighbors"]
    assert metrics == expected
    assert max(map(len, seen)) == 7
    pools = [client.pair_P2[client.val_mask_N | client.test_mask_N] for client in data.clients]
    assert torch.equal(torch.cat(seen), torch.cat(pools))


def test_the_file_of_predictions(make_trainer, tmp_path) -> None:
    data = link_data(tmp_path, source=InMemorySource(link_graph(), largest_component=True))
    trainer = make_trainer(num_rounds=1)
    trainer.fit(client(), data, FedAvg(num_epochs=1))
    rows = rows_of_predictions(trainer, data, tmp_path / "p.csv")
    assert list(rows[0]) == ["client", "source", "target", "split", "linked", "score"]
    edges = {tuple(sorted(each)) for each in link_graph().edge_index.t().tolist()}
    for row in rows:
        assert (tuple(sorted((int(row["source"]), int(row["target"])))) in edges) == (row["linked"] == "1")
        assert 0 <= float(row["score"]) <= 1
    assert {row["split"] for row in rows} == {"train", "val", "test"}


def test_the_report_has_the_scores_and_the_heuristics(make_trainer, tmp_path) -> None:
    trainer = make_trainer(num_rounds=1, callbacks=RunReport())
    data = link_data(tmp_path / "cache")
    trainer.fit(client(), data, FedAvg(num_epochs=1))
    record = RunRecord.read(trainer.run.folder)
    assert (record.examples, record.unkept) == ("pairs", [])
    linked = [bool(label) for label, _ in record.best.scored]
    tested = [each.y_N[each.test_mask_N, 0] for each in data.clients]
    assert linked == (torch.cat(tested) > 0.5).tolist()
    text = (trainer.run.folder / "report.html").read_text()
    assert "Scores of the test pairs" in text
    assert "ROC curve" in text
    metrics = heuristic_metrics(data.clients)
    assert trainer.run.references == metrics
    assert json.loads((trainer.run.folder / "result.json").read_text())["references"] == metrics
    for name in metrics:
        assert f"test/auroc of {name}" in text


def test_the_task_as_data() -> None:
    assert LinkPrediction().plain == {"name": "LinkPrediction", "num_relations": 1, "across_clients": False}
    assert str(LinkPrediction()) == "LinkPrediction"  # what is set is said behind it
    assert str(LinkPrediction(num_relations=3)) == "LinkPrediction (num_relations)"
    assert "pairs of a graph's nodes" in LinkPrediction().not_private
