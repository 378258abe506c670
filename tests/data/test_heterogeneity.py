"""Simulated heterogeneity: statistics of every kind, who is changed, and what is refused."""

import csv
import functools

import pytest
import torch
from sites import OPEN, make_sites
from task_data import graph_data, graphs_of, link_data, node_data
from torch.optim import SGD

from fl_lightning import ClientModule, FederatedDataModule, SequentialExecutor, StackedExecutor
from fl_lightning.callbacks import RunReport
from fl_lightning.data import (
    FL60,
    ClientSplit,
    EdgeInsertion,
    EdgeRemoval,
    FeatureNoise,
    LabelNoise,
    LabelScarcity,
    MetisPartitioner,
    MissingFeatures,
    PlantedCommunities,
    UnlabeledClients,
)
from fl_lightning.models import GCN, MLP, PooledGCN
from fl_lightning.remote import LoopbackChannel, federate
from fl_lightning.report.record import RunRecord
from fl_lightning.strategies import (
    SCAFFOLD,
    FedAux,
    FedAvg,
    FedGTA,
    FedProto,
    FedSheafHN,
    PFedGraph,
    Pooled,
    SheafRidge,
)

RATE = functools.partial(SGD, lr=0.05)
EVERY = [
    FeatureNoise(0.5, clients=0.5),
    MissingFeatures(0.3, clients=0.5),
    EdgeRemoval(0.4, clients=0.5),
    EdgeInsertion(0.4, clients=0.5, kind="heterophilic"),
    LabelNoise(0.4, clients=0.5),
    LabelScarcity(0.5, clients=0.5),
    UnlabeledClients(0.25),
]


def nodes(tmp_path, *kinds, seed: int = 0) -> FederatedDataModule:
    source = PlantedCommunities(num_nodes=400, num_communities=4, num_classes=4, num_features=20)
    data = FederatedDataModule(
        source,
        MetisPartitioner(4),
        ClientSplit(0.5, 0.25),
        heterogeneity=list(kinds),
        cache_dir=str(tmp_path / "cache"),
        seed=seed,
    )
    data.setup()
    return data


def rows(*kinds) -> FederatedDataModule:
    data = FederatedDataModule(FL60(num_examples=40), heterogeneity=list(kinds), batch_size=8)
    data.setup()
    return data


def fields_of(client) -> dict[str, torch.Tensor]:
    own = {name: value for name, value in vars(client).items() if isinstance(value, torch.Tensor)}
    return own | (fields_of(client.union) | own if hasattr(client, "union") else {})


def differing(one, other) -> set[str]:
    """The tensors in which two clients differ."""
    before, after = fields_of(one), fields_of(other)
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize(
    ("kind", "touched"),
    [
        (FeatureNoise(1.0, clients=0.5), {"x_NF"}),
        (MissingFeatures(0.5, clients=0.5), {"x_NF"}),
        (EdgeRemoval(0.5, clients=0.5), {"edge_index_2E"}),
        (EdgeInsertion(0.5, clients=0.5), {"edge_index_2E"}),
        (LabelNoise(0.5, clients=0.5), {"y_N"}),
        (LabelScarcity(0.5, clients=0.5), {"y_N", "train_mask_N"}),
        (UnlabeledClients(0.5), {"y_N", "train_mask_N"}),
    ],
    ids=lambda kind: type(kind).__name__,
)
def test_half_of_the_clients_change_and_the_others_stay_to_the_bit(kind, touched, tmp_path):
    plain, data, again = nodes(tmp_path), nodes(tmp_path, kind), nodes(tmp_path, kind)
    [(_, names)] = data.statistics().simulated
    assert len(names) == 2
    for before, after, repeated in zip(plain.clients, data.clients, again.clients, strict=True):
        assert differing(before, after) == (touched if after.name in names else set())
        assert not differing(after, repeated)
        held_out_N = ~before.train_mask_N
        assert torch.equal(before.y_N[held_out_N], after.y_N[held_out_N])  # validation and test keep their labels
    assert len({each.partition_hash for each in (plain, data, nodes(tmp_path, kind, seed=1))}) == 3
    assert data.partition_hash == again.partition_hash


def test_noise_has_its_standard_deviation_and_grows_with_its_strength(tmp_path):
    plain, weak, strong = (nodes(tmp_path, *kinds) for kinds in ([], [FeatureNoise(0.5)], [FeatureNoise(2.0)]))
    for before, one, two in zip(plain.clients, weak.clients, strong.clients, strict=True):
        noise, more = one.x_NF - before.x_NF, two.x_NF - before.x_NF
        assert float(noise.std() / before.x_NF.std()) == pytest.approx(0.5, rel=0.05)
        assert abs(float(noise.mean())) < 0.05
        assert torch.allclose(4 * noise, more, atol=1e-5)  # the same draw


def test_entries_or_whole_columns_are_missing(tmp_path):
    plain = nodes(tmp_path)
    some = nodes(tmp_path, MissingFeatures(0.3))
    more = nodes(tmp_path, MissingFeatures(0.6))
    columns = nodes(tmp_path, MissingFeatures(0.25, kind="columns"))
    lacking = set()
    for before, one, two, whole in zip(*(each.clients for each in (plain, some, more, columns)), strict=True):
        assert float((one.x_NF == 0).float().mean()) == pytest.approx(0.3, abs=0.04)
        assert bool(((two.x_NF == 0) | (one.x_NF != 0)).all())  # what is missing stays missing
        kept = one.x_NF != 0
        assert torch.equal(one.x_NF[kept], before.x_NF[kept])
        gone_F = (whole.x_NF == 0).all(dim=0)
        assert int(gone_F.sum()) == 5
        assert torch.equal(whole.x_NF[:, ~gone_F], before.x_NF[:, ~gone_F])
        lacking.add(tuple(gone_F.tolist()))
    assert len(lacking) > 1  # not the same ones at every client


def edges_of(client) -> set[tuple[int, int]]:
    return set(map(tuple, client.edge_index_2E.t().tolist()))


def test_a_share_of_the_edges_is_removed_in_both_directions(tmp_path):
    plain, some, more = (nodes(tmp_path, *kinds) for kinds in ([], [EdgeRemoval(0.25)], [EdgeRemoval(0.75)]))
    for before, one, two in zip(plain.clients, some.clients, more.clients, strict=True):
        assert edges_of(two) < edges_of(one) < edges_of(before)
        assert one.num_edges == before.num_edges - 2 * round(0.25 * before.num_edges / 2)
        assert not one.is_directed
        assert edges_of(one) == {(b, a) for a, b in edges_of(one)}
    assert nodes(tmp_path, EdgeRemoval(1.0)).clients[0].num_edges == 0


@pytest.mark.parametrize("kind", ["random", "heterophilic"])
def test_new_edges_are_new_and_heterophilic_ones_join_classes(kind, tmp_path):
    plain, some, more = (
        nodes(tmp_path, *kinds) for kinds in ([], [EdgeInsertion(0.5, kind=kind)], [EdgeInsertion(2.0, kind=kind)])
    )
    unlike = []
    for before, one, two in zip(plain.clients, some.clients, more.clients, strict=True):
        assert edges_of(before) < edges_of(one) < edges_of(two)
        assert one.num_edges == before.num_edges + 2 * round(0.5 * before.num_edges / 2)
        assert edges_of(one) == {(b, a) for a, b in edges_of(one)}
        assert torch.equal(
            one.edge_index_2E, one.edge_index_2E[:, (one.edge_index_2E[0] * 400 + one.edge_index_2E[1]).argsort()]
        )
        new = torch.tensor(sorted(edges_of(one) - edges_of(before))).t()
        assert bool((new[0] != new[1]).all())
        unlike.append(float((one.y_N[new[0]] != one.y_N[new[1]]).float().mean()))
    assert min(unlike) == 1.0 if kind == "heterophilic" else max(unlike) < 1.0


def test_edges_of_many_graphs_keep_their_weights_and_stay_inside_a_graph():
    plain = graph_data()
    data = graph_data(heterogeneity=[EdgeInsertion(0.2), EdgeRemoval(0.3)])
    for before, after in zip(plain.clients, data.clients, strict=True):
        of_N = torch.arange(len(after.num_nodes_G)).repeat_interleave(after.num_nodes_G)
        source_E, target_E = after.union.edge_index_2E
        assert torch.equal(of_N[source_E], of_N[target_E])
        assert set(after.union.edge_weight_E.tolist()) <= set(before.union.edge_weight_E.tolist())
        kept = dict(zip(map(tuple, before.union.edge_index_2E.t().tolist()), before.union.edge_weight_E, strict=True))
        for edge, weight in zip(after.union.edge_index_2E.t().tolist(), after.union.edge_weight_E, strict=True):
            assert kept.get(tuple(edge), weight) == weight
        assert not after.union.is_directed


@pytest.mark.parametrize("kind", ["uniform", "pair"])
def test_a_share_of_the_training_labels_is_wrong(kind, tmp_path):
    plain, some, more = (
        nodes(tmp_path, *kinds) for kinds in ([], [LabelNoise(0.4, kind=kind)], [LabelNoise(0.8, kind=kind)])
    )
    steps = []
    for before, one, two in zip(plain.clients, some.clients, more.clients, strict=True):
        wrong_N = one.y_N != before.y_N
        assert int(wrong_N.sum()) == round(0.4 * before.num_examples)
        assert not bool((wrong_N & ~before.train_mask_N).any())
        assert torch.equal(one.y_N[wrong_N], two.y_N[wrong_N])
        steps += ((one.y_N - before.y_N) % 4)[wrong_N].tolist()
    counts = torch.bincount(torch.tensor(steps), minlength=4)
    assert counts[0] == 0
    if kind == "pair":
        assert counts[1] == len(steps)
    else:
        assert float(counts[1:].min()) > 0.2 * len(steps)  # a third each


def test_labels_are_lost_and_forgotten(tmp_path):
    plain = nodes(tmp_path)
    for strength, left in ((0.8, 0.2), (1.0, 0.0)):
        for before, after in zip(plain.clients, nodes(tmp_path, LabelScarcity(strength)).clients, strict=True):
            assert after.num_examples == max(1, round(left * before.num_examples))
            assert bool((after.y_N[before.train_mask_N & ~after.train_mask_N] == -1).all())
    data = node_data("numbers", tmp_path, gaps=False)
    scarce = FederatedDataModule(
        data.source, data.partitioner, data.splitter, heterogeneity=[UnlabeledClients(0.3)], cache_dir=str(tmp_path)
    )
    scarce.setup()
    assert sorted(client.num_examples for client in scarce.clients)[:2] == [0, 10]
    (unlabeled,) = (client for client in scarce.clients if not client.num_examples)
    assert unlabeled.y_N.isnan().all(dim=1).sum() == 10


def test_the_same_kind_twice_draws_twice(tmp_path):
    once, twice = nodes(tmp_path, EdgeRemoval(0.5)), nodes(tmp_path, EdgeRemoval(0.5), EdgeRemoval(0.5))
    assert twice.clients[0].num_edges == pytest.approx(once.clients[0].num_edges / 2, abs=2)
    one = nodes(tmp_path, LabelNoise(0.5), EdgeRemoval(0.5))
    assert torch.equal(one.clients[0].edge_index_2E, once.clients[0].edge_index_2E)  # what others draw is not changed


def test_the_table_and_its_file_tell_who_was_changed(tmp_path):
    data = nodes(tmp_path, FeatureNoise(0.5, clients=0.25), UnlabeledClients(0.5))
    table = data.statistics()
    [(noisy, [name]), (unlabeled, both)] = table.simulated
    assert (noisy, unlabeled, len(both)) == ("FeatureNoise (strength 0.5)", "UnlabeledClients", 2)
    assert f"FeatureNoise (strength 0.5) at 1 of 4 clients ({name})" in str(table.rich_table().caption)
    table.to_csv(tmp_path / "table.csv")
    with (tmp_path / "table.csv").open(newline="") as file:
        found = {row["client"]: row["simulated"] for row in csv.DictReader(file)}
    assert noisy in found[name]
    assert all(unlabeled in found[each] for each in both)
    assert [row.num_train for row in table.rows if row.client in both] == [0, 0]


@pytest.mark.parametrize("task", ["nodes", "examples", "graphs"])
def test_both_executors_agree(task, make_trainer, assert_same, tmp_path):
    if task == "nodes":
        data, net = nodes(tmp_path, *EVERY), GCN
    elif task == "examples":
        data, net = rows(*(kind for kind in EVERY if not kind.changes_edges)), MLP
    else:
        inserted = EdgeInsertion(0.1, clients=0.5)
        kinds = [inserted if isinstance(kind, EdgeInsertion) else kind for kind in EVERY]
        data, net = graph_data(heterogeneity=kinds[:-1], batch_size=5), PooledGCN
    results = []
    for executor in (SequentialExecutor(), StackedExecutor(max_padding=0.9)):
        trainer = make_trainer(executor=executor, precision="64-true", num_rounds=2)
        result = trainer.fit(ClientModule(functools.partial(net, hidden_channels=8), RATE), data, FedAvg())
        results.append((result, trainer.run.executor.state().parameters))
    assert_same(*results, tolerance=1e-6)


@pytest.mark.full
@pytest.mark.parametrize(
    "strategy",
    [FedAux(), FedGTA(), FedProto(), FedSheafHN(num_neighbors=2), PFedGraph(), SCAFFOLD(), SheafRidge(num_neighbors=2)],
    ids=lambda strategy: type(strategy).__name__,
)
def test_methods_live_with_unlabeled_clients(strategy, make_trainer, tmp_path):
    data = nodes(tmp_path, UnlabeledClients(0.5))
    trainer = make_trainer(num_rounds=2)
    result = trainer.fit(None, data, strategy)
    assert 0 <= result["test/acc"] <= 1
    assert all(bool(value.isfinite().all()) for value in trainer.run.executor.state().parameters.values())


def test_sites_apply_it_to_their_own_data(make_trainer, tmp_path):
    """A site has the setting in its own file, and makes of its client what a simulation makes of it.

    A site without any label does not respond, whatever its policy (``min_examples`` is at least 1).
    """
    data = nodes(tmp_path, *EVERY[:-1])

    def parts():
        model = ClientModule(functools.partial(GCN, hidden_channels=8), RATE)
        model.take_task(data.task)
        return model, FedAvg()

    sites = make_sites(data.clients, tmp_path / "sites", parts, OPEN)
    expected = make_trainer(num_rounds=1, executor=SequentialExecutor()).fit(parts()[0], data, FedAvg())
    remote, strategy = make_trainer(num_rounds=1), FedAvg()
    elsewhere = federate(remote, LoopbackChannel(sites), strategy)
    assert remote.fit(parts()[0], elsewhere, strategy) == expected


def test_the_report_tells_it(make_trainer, tmp_path):
    data = nodes(tmp_path, LabelNoise(0.3, clients=0.5))
    trainer = make_trainer(num_rounds=1, callbacks=[RunReport()])
    trainer.fit(ClientModule(functools.partial(GCN, hidden_channels=8), RATE), data, FedAvg())
    record = RunRecord.read(trainer.run.folder)
    assert record is not None
    assert record.partition is not None
    [(kind, names)] = record.partition.simulated
    assert (kind, len(names)) == ("LabelNoise (strength 0.3, kind uniform)", 2)


def test_one_pool_of_whole_graphs_has_no_changed_edges(make_trainer, tmp_path):
    data = nodes(tmp_path, EdgeRemoval(0.5))
    with pytest.raises(ValueError, match=r"'whole', but data.heterogeneity changes edges .* set it to 'cut'"):
        make_trainer().fit(ClientModule(GCN, RATE), data, Pooled(graph="whole"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FeatureNoise(-1), r"FeatureNoise.strength must be a number in \[0, 100\], got -1"),
        (lambda: EdgeRemoval(1.5), r"EdgeRemoval.strength must be a number in \[0, 1\], got 1.5"),
        (lambda: LabelNoise(0.5, clients=2), r"LabelNoise.clients must be a number in \[0, 1\], got 2"),
        (lambda: LabelNoise(0.5, kind="next"), "LabelNoise.kind must be uniform or pair, got 'next'"),
        (lambda: EdgeInsertion(0.5, kind="any"), "EdgeInsertion.kind must be random or heterophilic, got 'any'"),
        (lambda: MissingFeatures(0.5, kind="all"), "MissingFeatures.kind must be entries or columns, got 'all'"),
        (lambda: rows("noise"), "data.heterogeneity holds 'noise': give a list of kinds"),
        (lambda: rows(EdgeRemoval(0.5)), "EdgeRemoval changes edges, but examples here have none: leave it out"),
        (
            lambda: graph_data(heterogeneity=[EdgeInsertion(0.5, kind="heterophilic")]),
            "heterophilic is for nodes of one class each, but the task is GraphClassification",
        ),
        (lambda: graph_data(heterogeneity=[EdgeInsertion(10.0)]), "of client-00: strength=10 asks for .* lower it"),
        (
            lambda: graph_data(kind="numbers", heterogeneity=[LabelNoise(0.5)]),
            "LabelNoise is for examples of one class each, but graphs here have numbers: leave it out",
        ),
        (lambda: rows(UnlabeledClients(1.0)), "leaves no client a training example: lower UnlabeledClients.clients"),
    ],
)
def test_what_makes_no_sense_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("kind", [EdgeRemoval(0.5), EdgeInsertion(0.5), LabelScarcity(0.5), UnlabeledClients(0.5)])
def test_edges_and_labels_of_links_are_refused(kind, tmp_path):
    with pytest.raises(ValueError, match=f"{type(kind).__name__} is for .*links .*: lower .* instead"):
        link_data(tmp_path, heterogeneity=[kind])


def test_features_of_links_and_graphs_may_be_noisy(tmp_path):
    plain, data = link_data(tmp_path), link_data(tmp_path, heterogeneity=[FeatureNoise(0.5)])
    for before, after in zip(plain.clients, data.clients, strict=True):
        assert not torch.equal(before.graph.x_NF, after.graph.x_NF)
        assert torch.equal(before.pair_P2, after.pair_P2)
        assert torch.equal(before.graph.edge_index_2E, after.graph.edge_index_2E)
    sets = FederatedDataModule(graphs_of(), heterogeneity=[MissingFeatures(1.0)])  # type: ignore[arg-type]
    sets.setup()
    assert not any(bool(client.union.x_NF.any()) for client in sets.clients)
