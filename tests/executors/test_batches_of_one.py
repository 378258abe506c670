"""BatchNorm and training steps of one example: refused before the first round, by both executors."""

import dataclasses
import functools

import pytest
import torch
from torch import nn
from torch_geometric.data import Data

from fl_lightning import ClientModule, FederatedDataModule, SequentialExecutor, StackedExecutor
from fl_lightning.data import ClientSplit, Examples, ExampleSource
from fl_lightning.models import GIN, MLP, BatchNorm
from fl_lightning.strategies import FedAvg, FedBN, FedSSP

EXECUTORS = pytest.mark.parametrize("executor", [SequentialExecutor, StackedExecutor])


@dataclasses.dataclass
class Dots(ExampleSource):
    """Clients with some training examples each, one in three of theirs to train on."""

    sizes: tuple[int, ...] = (8, 9)

    def load(self, root, seed: int) -> Examples:
        draw = torch.Generator().manual_seed(seed)
        labels = tuple(torch.arange(3 * size) % 2 for size in self.sizes)
        x = tuple(torch.randn(len(y), 2, generator=draw) + 3.0 * y[:, None] for y in labels)
        return Examples(names=tuple("abcd"[: len(labels)]), x=x, y=labels, num_outputs=2)


class TorchNormed(nn.Sequential):
    """A net with PyTorch's own BatchNorm, which clients are run one after another with."""

    def __init__(self, in_features: int, num_outputs: int) -> None:
        super().__init__(nn.Linear(in_features, 4), nn.BatchNorm1d(4), nn.Linear(4, num_outputs))

    def forward(self, batch):
        return super().forward(batch.x)


NETS = pytest.mark.parametrize("net", [functools.partial(MLP, batch_norm=True), TorchNormed])


def fit(make_trainer, executor, net, sizes=(8, 9), **settings):
    data = FederatedDataModule(Dots(sizes), splitter=ClientSplit(train=1 / 3, val=1 / 3), **settings)
    trainer = make_trainer(executor=executor(), num_rounds=1)
    return trainer, lambda: trainer.fit(ClientModule(net), data, FedAvg(num_epochs=1))


@EXECUTORS
@NETS
@pytest.mark.filterwarnings("ignore:model.net has torch.nn's BatchNorm")
def test_a_short_last_batch_is_refused_by_client_and_remedy(make_trainer, executor, net) -> None:
    trainer, run = fit(make_trainer, executor, net, batch_size=4)
    message = r"client 'b' .* one example.*Expected more than 1 value per channel.*data\.drop_last.*data\.batch_size"
    with pytest.raises(ValueError, match=message):
        run()
    assert not trainer.started


@EXECUTORS
@NETS
@pytest.mark.filterwarnings("ignore:model.net has torch.nn's BatchNorm")
@pytest.mark.parametrize("remedy", [{"batch_size": 4, "drop_last": True}, {"batch_size": 5}, {}])
def test_the_remedies_train(make_trainer, executor, net, remedy) -> None:
    _, run = fit(make_trainer, executor, net, **remedy)
    assert run()["test/acc"] >= 0


@EXECUTORS
@pytest.mark.parametrize("settings", [{}, {"batch_size": 4}, {"batch_size": 4, "steps_per_epoch": 2}])
def test_a_client_with_one_training_example_is_refused(make_trainer, executor, settings) -> None:
    _, run = fit(make_trainer, executor, functools.partial(MLP, batch_norm=True), (8, 1, 1), **settings)
    with pytest.raises(ValueError, match=r"client 'b' .*so do 1 more.*data\.splitter"):
        run()


@EXECUTORS
def test_batches_of_one_that_are_drawn_are_refused(make_trainer, executor) -> None:
    _, run = fit(make_trainer, executor, functools.partial(MLP, batch_norm=True), batch_size=1, steps_per_epoch=3)
    with pytest.raises(ValueError, match=r"client 'a' .*larger data\.batch_size"):
        run()


@EXECUTORS
def test_nets_without_batch_norm_take_one_example(make_trainer, executor) -> None:
    _, run = fit(make_trainer, executor, MLP, (8, 1), batch_size=7)
    assert run()["test/acc"] >= 0


def graphs(sizes: list[int]) -> list[Data]:
    """Paths with so many nodes."""
    ends = [torch.arange(size - 1) for size in sizes]
    return [
        Data(x=torch.rand(size, 3), edge_index=torch.stack([end, end + 1]), y=torch.tensor(index % 2))
        for index, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]


@EXECUTORS
@pytest.mark.parametrize(
    ("net", "strategy"), [(functools.partial(GIN, batch_norm=True), FedAvg), (None, FedSSP)], ids=["GIN", "FedSSP"]
)
def test_a_graph_of_one_node_is_refused_whichever_client_has_it(make_trainer, executor, net, strategy) -> None:
    """The first client's batches of one graph have four nodes; a stack trained the second silently."""
    data = FederatedDataModule([graphs([4] * 9), graphs([1] * 9)], splitter=ClientSplit(0.6, 0.2), batch_size=2)
    message = r"client 'client-01' may have .* one graph of one node.*data\.drop_last.*without BatchNorm"
    with pytest.raises(ValueError, match=message):
        make_trainer(executor=executor(), num_rounds=1).fit(strategy.client_class(net), data, strategy())
    enough = FederatedDataModule([graphs([4] * 9), graphs([2] * 9)], splitter=ClientSplit(0.6, 0.2), batch_size=2)
    trainer = make_trainer(executor=executor(), num_rounds=1)
    trainer.fit(strategy.client_class(net), enough, strategy())
    assert not trainer.run.num_failures


def test_a_strategy_that_brings_batch_norm_is_checked_too(make_trainer) -> None:
    data = FederatedDataModule(Dots(), splitter=ClientSplit(train=1 / 3, val=1 / 3), batch_size=4)
    with pytest.raises(ValueError, match=r"client 'b' .*data\.drop_last"):
        make_trainer(num_rounds=1).fit(data=data, strategy=FedBN())


def test_the_layer_itself_refuses_one_example_that_counts() -> None:
    layer, x = BatchNorm(4), torch.randn(2, 5, 4)
    one, two = (torch.arange(5).expand(2, 5) < torch.tensor([[3], [count]]) for count in (1, 2))
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        layer(x[0], one[1])
    layer = BatchNorm(4)
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
        layer.train()(x[0], one[1])
    assert layer.eval()(x[0], one[1]).isfinite().all()
    assert layer.train()(x[0], two[1]).isfinite().all()
