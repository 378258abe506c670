"""Mini-batches of examples, and both executors on them."""

import dataclasses
import functools

import pytest
import torch
from line_clients import Affine
from torch import nn
from torch.optim import SGD, Adam

from fl_lightning import (
    ClientModule,
    Evaluation,
    FederatedDataModule,
    Participation,
    SequentialExecutor,
    StackedExecutor,
)
from fl_lightning.batches.base import single
from fl_lightning.batches.examples import PART_NUMBERS, ExampleBatch, ExampleCollator
from fl_lightning.data import ClientExamples, ClientSplit, Examples, ExampleSource, GivenPartitioner, PlantedCommunities
from fl_lightning.executors.keys import derive_keys
from fl_lightning.kernels.randomness import random_order
from fl_lightning.models.output import NetOutput
from fl_lightning.relations.topology import Ring
from fl_lightning.round.payload import FLAT, Payload
from fl_lightning.round.stage import tune
from fl_lightning.strategies import FedAux, FedAvg, FedPub, FedSheafHN, Local

SIZES = (40, 9, 23)
CPU = {"device": torch.device("cpu"), "dtype": torch.float64}


class Clouds(ExampleSource):
    """Two classes of points, or sums of their coordinates."""

    def __init__(self, regression: bool = False, related: bool = False) -> None:
        self.regression = regression
        self.related = related

    def load(self, root, seed: int) -> Examples:
        draw = torch.Generator().manual_seed(seed)
        labels = [torch.arange(size) % 2 for size in SIZES]
        x = tuple(torch.randn(len(y), 2, generator=draw) + 3.0 * y[:, None] for y in labels)
        y = tuple(xs.sum(1, keepdim=True) for xs in x) if self.regression else tuple(labels)
        relation = torch.ones(3, 3).fill_diagonal_(0) if self.related else None
        names = ("a", "b", "c")
        return Examples(names=names, x=x, y=y, num_outputs=1 if self.regression else 2, relation_CC=relation)


def clients(sizes=SIZES) -> list[ClientExamples]:
    made = []
    for client, size in enumerate(sizes):
        role_N = torch.arange(size) % 4
        made.append(
            ClientExamples(
                name=f"client-{client}",
                x_NX=torch.arange(size, dtype=torch.float32)[:, None] + 100 * client,
                y_N=torch.arange(size) % 3,
                train_mask_N=role_N < 2,
                val_mask_N=role_N == 2,
                test_mask_N=role_N == 3,
            )
        )
    return made


def draw(batch: ExampleBatch, *keys: int) -> ExampleBatch:
    """One step's mini-batch."""
    return next(batch.draws(torch.tensor([keys if batch.key.dim() else keys[0]])))


def test_a_mini_batch_is_a_draw_of_each_clients_own_training_examples() -> None:
    batch = ExampleCollator(clients(), batch_size=8, **CPU)([0, 1, 2])

    drawn = draw(batch, 11, 12, 13)

    assert drawn.x.shape == (3, 8, 1)
    assert drawn.train_mask.sum(dim=1).tolist() == [8, 5, 8]  # client 1 has five training examples only
    assert not drawn.val_mask.any()
    assert not drawn.test_mask.any()
    for client, (x_B, y_B, mask_B) in enumerate(zip(drawn.x[..., 0], drawn.y, drawn.train_mask, strict=True)):
        index = (x_B - 100 * client)[mask_B].long()
        assert len(set(index.tolist())) == len(index)
        assert (index % 4 < 2).all()
        assert torch.equal(y_B[mask_B], index % 3)
    assert not torch.equal(drawn.x, draw(batch, 21, 22, 23).x)


def test_a_clients_draw_hangs_on_its_own_key_alone() -> None:
    collate = ExampleCollator(clients(), batch_size=4, **CPU)

    together, alone = draw(collate([0, 1, 2]), 11, 12, 13), draw(single(collate([2])), 13)

    assert torch.equal(together.x[2], alone.x)
    assert torch.equal(together.y[2], alone.y)


def keys_of(clients: tuple[int, ...], num_steps: int, round_idx: int = 0) -> torch.Tensor:
    """The keys that an executor gives the steps of some clients, (steps, C)."""
    return derive_keys(7, "train", round_idx, torch.tensor(clients)[None], torch.arange(num_steps)[:, None])


def seen_by(drawn: list[ExampleBatch], client: int) -> list[list[int]]:
    """The numbers of the examples in each of a client's batches, of a stack or its own."""
    rows = [(b.x[client], b.train_mask[client]) if b.key.dim() else (b.x, b.train_mask) for b in drawn]
    return [x_B1[mask_B, 0].long().remainder(100).tolist() for x_B1, mask_B in rows]


@pytest.mark.parametrize("batch_size", [1, 3, 5, 7, 20, 64])
def test_every_client_sees_each_of_its_examples_once_an_epoch(batch_size: int) -> None:
    collate = ExampleCollator(clients(), batch_size=batch_size, **CPU)
    lengths = [collate.steps_per_epoch(client) for client in range(3)]
    num_steps = 3 * max(lengths)  # the largest client's three epochs; the others go on meanwhile

    drawn = list(collate([0, 1, 2]).draws(keys_of((0, 1, 2), num_steps)))

    for client, size in enumerate(SIZES):
        own = [number for number in range(size) if number % 4 < 2]
        batches, orders = seen_by(drawn, client), []
        for start in range(0, num_steps - lengths[client] + 1, lengths[client]):
            epoch = batches[start : start + lengths[client]]
            assert all(len(batch) == batch_size for batch in epoch[:-1])
            orders.append([number for batch in epoch for number in batch])
            assert sorted(orders[-1]) == own
        assert len(orders) >= 3
        assert client == 1 or len(set(map(tuple, orders))) == len(orders)  # each in another order
    for each in drawn:
        assert torch.equal(each.example_mask, each.train_mask)
        assert not (each.val_mask | each.test_mask).any()


def test_a_pass_is_the_same_alone_and_in_any_stack() -> None:
    collate = ExampleCollator(clients(), batch_size=3, **CPU)
    together = list(collate([0, 1, 2]).draws(keys_of((0, 1, 2), 14)))
    turned = list(collate([2, 0]).draws(keys_of((2, 0), 14)))

    for client in range(3):
        alone = list(single(collate([client])).draws(keys_of((client,), 14)[:, 0]))
        assert seen_by(alone, client) == seen_by(together, client)
        assert [len(b.x) for b in alone] == [len(batch) for batch in seen_by(together, client)]  # without padding
        assert all(b.train_mask.all() for b in alone)
    assert seen_by(turned, 0) == seen_by(together, 2)
    assert seen_by(turned, 1) == seen_by(together, 0)


def test_less_work_is_the_beginning_of_the_same_pass() -> None:
    batch = single(ExampleCollator(clients(), batch_size=3, **CPU)([0]))
    whole, part = (seen_by(list(batch.draws(keys_of((0,), steps)[:, 0])), 0) for steps in (7, 4))  # 60 % of 7 steps
    assert part == whole[:4]
    assert len({number for each in part for number in each}) == 12


def test_a_short_last_batch_may_be_dropped() -> None:
    collate = ExampleCollator(clients(), batch_size=6, drop_last=True, **CPU)
    lengths = [collate.steps_per_epoch(client) for client in range(3)]
    assert lengths == [3, 1, 2]  # of 20, 5 and 12 examples
    drawn = list(collate([0, 1, 2]).draws(keys_of((0, 1, 2), 6)))

    assert [len(batch) for batch in seen_by(drawn, 0)] == [6] * 6
    assert [len(batch) for batch in seen_by(drawn, 1)] == [5] * 6  # its only batch stays
    for epoch in range(2):
        assert len({number for each in seen_by(drawn, 0)[3 * epoch : 3 * epoch + 3] for number in each}) == 18
    with pytest.raises(ValueError, match=r"data\.drop_last is for passes .* set data\.batch_size"):
        FederatedDataModule(Clouds(), drop_last=True)
    with pytest.raises(ValueError, match=r"leave data\.steps_per_epoch unset"):
        FederatedDataModule(Clouds(), batch_size=4, steps_per_epoch=3, drop_last=True)
    with pytest.raises(ValueError, match=r"data\.drop_last is 'no': give true or false"):
        FederatedDataModule(Clouds(), batch_size=4, drop_last="no")


def test_steps_that_are_set_are_drawn_by_themselves() -> None:
    """Their metrics are those of the studies: every step is a draw without replacement under its own key."""
    sizes = (40, 9, 23)
    batch = ExampleCollator(clients(sizes), batch_size=5, steps_per_epoch=3, **CPU)([0, 1, 2])
    keys = keys_of((0, 1, 2), 3)

    drawn = list(batch.draws(keys))

    for step, each in enumerate(drawn):
        order_CB, mask_CB = random_order(keys[step], batch.train_mask, 5)
        assert torch.equal(each.x[..., 0], batch.x[..., 0].gather(1, order_CB))
        assert torch.equal(each.train_mask, mask_CB)
    assert seen_by(drawn, 0) == [[37, 21, 1, 5, 24], [4, 0, 16, 24, 37], [33, 5, 37, 36, 32]]


def test_a_sample_holds_every_training_example_equally_often() -> None:
    batch = single(ExampleCollator(clients(), batch_size=5, steps_per_epoch=1, **CPU)([0]))

    drawn = torch.cat([drawn.x[:, 0] for drawn in batch.draws(torch.arange(2000))]).long()

    counts = torch.bincount(drawn, minlength=40)
    assert counts[torch.arange(40) % 4 >= 2].sum() == 0
    assert counts[torch.arange(40) % 4 < 2].sub(500).abs().max() < 100  # 500 expected, sd 20


def test_without_a_batch_size_a_step_has_all_training_examples() -> None:
    collate = ExampleCollator(clients(), **CPU)
    batch = collate([0, 1])

    drawn = draw(batch, 1, 2)

    for row, client in enumerate(clients()[:2]):
        own = client.x_NX[client.train_mask_N].double()
        assert torch.equal(drawn.x[row, : len(own)], own)
        assert drawn.train_mask[row].tolist() == [True] * len(own) + [False] * (20 - len(own))
    assert torch.equal(drawn.example_mask, drawn.train_mask)
    assert not drawn.val_mask.any()
    assert not drawn.test_mask.any()
    assert drawn.key.tolist() == [1, 2]
    assert [collate.steps_per_epoch(client) for client in range(3)] == [1, 1, 1]
    whole = drawn.select(torch.tensor([0]))
    assert draw(whole, 3).x is whole.x


def test_steps_of_an_epoch() -> None:
    assert [ExampleCollator(clients(), batch_size=5, **CPU).steps_per_epoch(client) for client in range(3)] == [4, 1, 3]
    assert ExampleCollator(clients(), batch_size=5, steps_per_epoch=50, **CPU).steps_per_epoch(1) == 50


def test_parts_cover_the_batch_once(monkeypatch) -> None:
    batch = ExampleCollator(clients(), **CPU)([0, 2])
    monkeypatch.setattr("fl_lightning.batches.examples.PART_NUMBERS", 26)

    parts = list(batch.parts())

    assert [part.x.shape for part in parts] == [(2, 13, 1)] * 3 + [(2, 1, 1)]
    assert torch.equal(torch.cat([part.x for part in parts], dim=1), batch.x)
    assert torch.equal(torch.cat([part.test_mask for part in parts], dim=1), batch.test_mask)
    assert all(part.key.shape == (2,) for part in parts)
    assert PART_NUMBERS > 26


def module() -> ClientModule:
    return ClientModule(Affine, functools.partial(SGD, lr=0.05))


@pytest.mark.parametrize("regression", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"batch_size": 4},
        {"batch_size": 5, "drop_last": True},
        {"batch_size": 6, "steps_per_epoch": 7},
    ],
)
def test_executors_agree(regression, settings, make_trainer, assert_same, monkeypatch) -> None:
    runs = []
    for executor in (SequentialExecutor(), StackedExecutor(max_padding=0.9), StackedExecutor(max_clients_per_group=1)):
        data = FederatedDataModule(Clouds(regression), **settings)
        trainer = make_trainer(executor=executor, precision="64-true", num_rounds=3)
        runs.append((trainer, trainer.fit(module(), data, FedAvg(num_epochs=2))))
        monkeypatch.setattr("fl_lightning.batches.examples.PART_NUMBERS", 32)
    (reference, expected), *others = runs

    monitor = "val/mse" if regression else "val/acc"
    assert expected[monitor] == pytest.approx((min if regression else max)(r[monitor] for r in reference.run.history))
    assert reference.run.history[-1]["train/loss"] < reference.run.history[0]["train/loss"]
    for trainer, result in others:
        assert_same(trainer.run.executor.state().parameters, reference.run.executor.state().parameters, tolerance=1e-10)
        assert_same(result, expected, tolerance=1e-5)
        predicted = trainer.run.executor.predict(Evaluation(), [0, 1, 2], 2)
        assert_same(predicted, reference.run.executor.predict(Evaluation(), [0, 1, 2], 2), tolerance=1e-5)
        assert [len(predicted[client]) for client in range(3)] == list(SIZES)


def test_executors_agree_where_clients_do_less(make_trainer, assert_same) -> None:
    """Stragglers end amid the passes of their group."""
    runs = []
    for executor in (SequentialExecutor(), StackedExecutor(max_padding=0.9)):
        trainer = make_trainer(
            executor=executor,
            precision="64-true",
            num_rounds=4,
            participation=Participation(straggler_probability=0.6, num_clients=2),
        )
        runs.append((trainer, trainer.fit(module(), FederatedDataModule(Clouds(), batch_size=3), FedAvg(num_epochs=4))))
    (reference, expected), (trainer, result) = runs
    assert_same(trainer.run.executor.state().parameters, reference.run.executor.state().parameters, tolerance=1e-10)
    assert_same(result, expected, tolerance=1e-6)


def test_a_resume_amid_the_run_goes_on_with_the_same_passes(make_trainer, assert_same, tmp_path) -> None:
    def run(num_rounds: int, ckpt_path: str | None = None):
        data = FederatedDataModule(Clouds(), batch_size=5, drop_last=True)
        trainer = make_trainer(num_rounds=num_rounds)
        trainer.fit(ClientModule(Affine, functools.partial(Adam, lr=0.05)), data, FedAvg(num_epochs=2), ckpt_path)
        return trainer

    whole, first = run(4), run(2)
    first.save_checkpoint(tmp_path / "v" / "two.ckpt")
    resumed = run(4, str(tmp_path / "v" / "two.ckpt"))
    assert_same(resumed.state_dict()["clients"], whole.state_dict()["clients"])


def test_regression_scores_are_mean_squared_errors(make_trainer) -> None:
    data = FederatedDataModule(Clouds(regression=True))
    trainer = make_trainer(num_rounds=1, precision="64-true")
    result = trainer.fit(module(), data, Local(num_epochs=1))

    errors = []
    for client, predicted in trainer.run.executor.predict(Evaluation(), [0, 1, 2], 0).items():
        client_data = data.clients[client]
        errors.append(float((predicted - client_data.y_N)[client_data.test_mask_N].square().mean()))
    assert result["test/mse"] == pytest.approx(sum(errors) / 3, rel=1e-5)
    assert result["test/mse_worst"] == pytest.approx(max(errors), rel=1e-5)
    assert result["test/min_over_rounds"] == result["test/mse"]
    assert trainer.run.selection.monitor == "val/mse"


def test_fine_tuning_may_train_some_parameters_only(make_trainer) -> None:
    for executor in (SequentialExecutor(), StackedExecutor(max_padding=0.9)):
        trainer = make_trainer(executor=executor, num_rounds=1)
        trainer.fit(module(), FederatedDataModule(Clouds()), Local(num_epochs=1))
        none = trainer.run.executor.predict(Evaluation(tuning=tune(5, trained=())), [0], 0)[0]
        bias = trainer.run.executor.predict(Evaluation(tuning=tune(5, trained=("head.bias",))), [0], 0)[0]
        own = trainer.run.executor.predict(Evaluation(), [0], 0)[0]
        assert torch.equal(none, own)
        shift = (bias.log() - own.log()).diff(dim=1)  # only the biases moved: the same shift of logits everywhere
        assert shift.abs().min() > 1e-3
        assert (shift - shift[0]).abs().max() < 1e-4


def test_the_relation_graph_is_the_datas_or_a_given_one() -> None:
    own, given, none = (
        FederatedDataModule(Clouds(related=related), relation_graph=graph)
        for related, graph in ((True, None), (True, Ring()), (False, None))
    )
    for data in (own, given, none):
        data.setup()

    assert none.relation_CC is None
    assert own.relation_CC.tolist() == [[0, 1, 1], [1, 0, 1], [1, 1, 0]]
    assert given.relation_CC.tolist() == [[0, 1, 1], [1, 0, 1], [1, 1, 0]]  # a ring of three


def test_the_hash_tells_data_apart() -> None:
    hashes = set()
    for settings in ({}, {"seed": 1}, {"splitter": ClientSplit(0.5, 0.3)}):
        data = FederatedDataModule(Clouds(), **settings)
        data.setup()
        hashes.add(data.partition_hash)
    assert len(hashes) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((PlantedCommunities(),), r"data\.partitioner is missing: PlantedCommunities"),
        ((Clouds(), GivenPartitioner()), r"Clouds has its own clients"),
        ((PlantedCommunities(), GivenPartitioner(), None, {"batch_size": 3}), r"trained full-batch"),
        ((Clouds(), None, None, {"batch_size": 0}), r"data\.batch_size must be at least 1, got 0"),
    ],
)
def test_settings_that_do_not_fit(arguments, message) -> None:
    *positional, settings = arguments if isinstance(arguments[-1], dict) else (*arguments, {})
    with pytest.raises(ValueError, match=message):
        FederatedDataModule(*positional, **settings)


def test_statistics_of_examples(tmp_path) -> None:
    data = FederatedDataModule(Clouds())
    data.setup()

    table = data.statistics()

    assert [row.num_examples for row in table.rows] == list(SIZES)
    assert table.means["num_examples"] == 24
    assert 0 <= table.heterogeneity < 0.1
    table.to_csv(tmp_path / "clients.csv")
    table.plot_labels(tmp_path / "labels.png")
    assert (tmp_path / "clients.csv").read_text().startswith("client,num_examples,num_classes,num_train")
    regression = FederatedDataModule(Clouds(regression=True))
    regression.setup()
    table = regression.statistics()
    assert table.columns == ("client", "num_examples", "num_train", "num_val", "num_test")
    assert table.cells[0][:2] == [regression.clients[0].name, SIZES[0]]
    assert [low for low, *_ in table.spreads["target of each example"]] == [
        pytest.approx(float(client.y_N.min())) for client in regression.clients
    ]
    table.plot_labels(tmp_path / "numbers.svg")
    assert "target of each example" in (tmp_path / "numbers.svg").read_text()


def test_records_are_plain() -> None:
    first = clients()[0]
    changed = dataclasses.replace(first, y_N=first.y_N * 0)
    assert (first.size, first.cost, first.num_examples) == (40, 40, 20)
    assert changed.x_NX is first.x_NX


class Wide(Affine):
    """Another architecture for the same task."""

    def __init__(self, num_features: int, num_outputs: int) -> None:
        super().__init__(num_features, 4)
        self.top = nn.Linear(4, num_outputs)

    def forward(self, batch: ExampleBatch) -> NetOutput:
        hidden = self.head(batch.x).tanh()
        return NetOutput(self.top(hidden), hidden)


class Exchange(Local):
    """Everyone sends all it has and gets it back, shifted."""

    def setup(self, federation) -> None:
        super().setup(federation)
        self.rows = None

    def stages(self, round_idx: int):
        return [dataclasses.replace(super().stages(round_idx)[0], upload=(FLAT,))]

    def configure(self, stage, clients):
        if self.rows is None:
            return None
        return Payload(clients=tuple(clients), parameters={"flat": self.rows[list(clients)] + 0.01})

    def aggregate(self, stage, upload) -> None:
        self.rows = upload.parameters["flat"]


def test_architectures_are_given_out_in_turn_and_executors_agree(make_trainer, assert_same) -> None:
    runs = []
    for executor in (SequentialExecutor(), StackedExecutor(max_padding=0.9)):
        trainer = make_trainer(executor=executor, precision="64-true", num_rounds=3)
        model = ClientModule([Affine, Wide], functools.partial(SGD, lr=0.05))
        data = FederatedDataModule(Clouds(), batch_size=6)
        runs.append((trainer, trainer.fit(model, data, Exchange(num_epochs=1))))
    (reference, expected), (trainer, result) = runs

    assert_same(result, expected, tolerance=1e-6)
    assert_same(trainer.run.executor.state().parameters, reference.run.executor.state().parameters, tolerance=1e-10)
    assert trainer.run.strategy.rows.shape == (3, 22)  # 2 x 4 + 4 + 4 x 2 + 2
    assert (trainer.run.strategy.rows[[0, 2], 6:] == 0).all()
    assert (trainer.run.strategy.rows[1] != 0).all()
    state = trainer.run.executor.state()
    assert {name.split("/")[0] for name in state.parameters} == {"net0", "net1"}
    assert (state.parameters["net1/top.weight"][[0, 2]] == 0).all()
    assert result["val/acc"] > 0.7


def test_resuming_with_architectures_is_exact(make_trainer, assert_same, tmp_path) -> None:
    def run(num_rounds: int, ckpt_path: str | None = None):
        model = ClientModule([Affine, Wide], functools.partial(Adam, lr=0.05))
        trainer = make_trainer(num_rounds=num_rounds)
        trainer.fit(model, FederatedDataModule(Clouds(), batch_size=6), Local(num_epochs=1), ckpt_path)
        return trainer

    whole, first = run(4), run(2)
    first.save_checkpoint(tmp_path / "v" / "two.ckpt")
    resumed = run(4, str(tmp_path / "v" / "two.ckpt"))

    assert_same(resumed.state_dict()["clients"], whole.state_dict()["clients"])
    assert any(name.startswith("net1/optimizer/exp_avg") for name in whole.run.executor.state().extras)


def test_most_strategies_need_clients_that_are_alike(make_trainer) -> None:
    with pytest.raises(ValueError, match=r"model\.net lists 2 nets, but FedAvg needs the same net for all clients"):
        make_trainer().fit(ClientModule([Affine, Wide]), FederatedDataModule(Clouds()), FedAvg())
    with pytest.raises(ValueError, match=r"model\.net is an empty list"):
        ClientModule([])


@pytest.mark.parametrize("kind", [FedAux, FedPub, FedSheafHN])
def test_some_strategies_need_graphs(kind, make_trainer) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__} is for clients with graphs, but these have independent"):
        make_trainer().fit(ClientModule(Affine), FederatedDataModule(Clouds()), kind())
