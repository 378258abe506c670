"""Nets of plain PyTorch for clients whose examples have no graphs."""

import functools
from typing import Any

import pytest
import torch
from task_data import Clouds
from torch import Tensor, nn
from torch.optim import SGD

from fl_lightning import ClientModule, FederatedDataModule, SequentialExecutor, StackedExecutor
from fl_lightning.batches.examples import ExampleBatch
from fl_lightning.data import Examples, ExampleSource
from fl_lightning.models import PlainExampleNet
from fl_lightning.models.fitting import fitted
from fl_lightning.strategies import FedAvg, FedPer

SLOW = functools.partial(SGD, lr=0.05)


def perceptron(width: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, outputs))


class Pictures(nn.Module):
    """Convolutions with every layer that minds padding or a key; no parameter of ``forward`` is called x."""

    def __init__(self, shape: tuple[int, ...], outputs: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(shape[0], 4, 3, padding=1), nn.BatchNorm2d(4)
        self.group, self.drop, self.last = nn.GroupNorm(2, 4), nn.Dropout2d(0.3), nn.Linear(4, outputs)

    def forward(self, image: Tensor) -> Any:
        hidden = self.drop(self.group(self.norm(self.conv(image)).relu())).mean(dim=(2, 3))
        return self.last(hidden), hidden


class Images(ExampleSource):
    """Three clients' images, of which one class is brighter."""

    def load(self, root: Any, seed: int) -> Examples:
        draw = torch.Generator().manual_seed(2)
        y = tuple(torch.arange(size) % 2 for size in (24, 40, 31))
        x = tuple(torch.randn(len(each), 2, 5, 5, generator=draw) + each.view(-1, 1, 1, 1) for each in y)
        return Examples(names=("a", "b", "c"), x=x, y=y, num_outputs=2)


def batch_of(x: Tensor) -> ExampleBatch:
    """One client's examples."""
    every = torch.ones(len(x), dtype=torch.bool)
    masks: dict[str, Any] = {f"{role}_mask": every for role in ("example", "train", "val", "test")}
    return ExampleBatch(x=x, y=torch.zeros(len(x), dtype=torch.int64), key=torch.tensor(3), **masks)


@pytest.mark.parametrize("batch_size", [None, 7])
@pytest.mark.parametrize(("source", "net"), [(Clouds, perceptron), (Images, Pictures)])
def test_both_executors_agree(source, net, batch_size, make_trainer, assert_same) -> None:
    data = FederatedDataModule(source(), batch_size=batch_size)
    data.setup()
    runs = []
    for executor in (StackedExecutor(max_padding=0.9), SequentialExecutor()):
        trainer = make_trainer(num_rounds=3, executor=executor, precision="64-true")
        result = trainer.fit(ClientModule(net, SLOW), data, FedPer(num_epochs=2))
        assert type(trainer.run.executor) is type(executor)
        runs.append((result, dict(trainer.run.executor.state().parameters)))
    assert_same(*runs, tolerance=1e-9)
    assert runs[0][0]["test/acc"] > 0.6


@pytest.mark.parametrize(("shape", "net"), [((4,), perceptron(4, 2)), ((2, 5, 5), Pictures((2, 5, 5), 2))])
def test_it_computes_what_the_module_does(shape, net) -> None:
    wrapped = fitted(net, shape[0] if len(shape) == 1 else shape, 2)
    assert isinstance(wrapped, PlainExampleNet)
    assert wrapped.why_alone == ""
    x = torch.randn(9, *shape)
    module = net.eval()
    expected = module(x)
    expected = expected[0] if isinstance(expected, tuple) else expected
    output = wrapped.eval()(batch_of(x))
    assert torch.allclose(output.logits, expected, atol=1e-6)
    last = list(module.modules())[-1]
    assert torch.allclose(last(output.embedding), expected, atol=1e-6)
    for part in (*net.modules(), *wrapped.modules()):
        if isinstance(part, (nn.Dropout, nn.Dropout2d)):
            part.p = 0.0
    wrapped.train()(batch_of(x))
    net.train()(x)
    for name, statistic in net.state_dict().items():
        if "running" in name:
            assert torch.allclose(wrapped.state_dict()[name], statistic, atol=1e-6), name


class Words(nn.Module):
    """The mean of the vectors of words, whose numbers the inputs are."""

    def __init__(self, in_features: int, num_outputs: int) -> None:
        super().__init__()
        self.vectors = nn.Embedding(5, 3)
        self.head = nn.Linear(3, num_outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.vectors(x.long()).mean(dim=1))


def test_inputs_may_be_numbers_of_things() -> None:
    net = fitted(Words, 4, 2)
    assert net.why_alone == ""
    x = torch.tensor([[0.0, 1, 2, 4], [4, 4, 4, 4]])
    assert torch.equal(net(batch_of(x)).logits, net.plain_module(x))


def test_batches_that_normalize_in_evaluation_leave_padding_out() -> None:
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    wrapped = fitted(nn.Sequential(norm, nn.Linear(4, 2)), 4, 2).eval()
    assert wrapped.why_alone == ""
    x = torch.randn(9, 4)
    padded = batch_of(torch.cat([x, 100 * torch.randn(5, 4)]))
    masked = padded.replace({"example_mask": torch.arange(14) < 9})
    assert torch.allclose(wrapped(masked).logits[:9], wrapped(batch_of(x)).logits, atol=1e-6)


def test_dropout_follows_from_the_key() -> None:
    net = fitted(perceptron, 4, 2).train()
    batch = batch_of(torch.randn(50, 4))
    first, again = net(batch).logits, net(batch).logits
    other = net(batch.replace({"key": torch.tensor(4)})).logits
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)


def test_an_encoder_gets_a_head() -> None:
    net = fitted(nn.Linear(4, 7), 4, 2)
    assert sorted(net.state_dict()) == ["bias", "head.bias", "head.weight", "weight"]
    assert net(batch_of(torch.randn(3, 4))).embedding.shape == (3, 7)
    assert net.head_names == ("head.weight", "head.bias")


class Recurrent(nn.Module):
    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.cells, self.last = nn.GRU(1, 6, batch_first=True), nn.Linear(6, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.cells(x.unsqueeze(-1))[1][0])


class AcrossExamples(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(dim=0))


class Follows(nn.Linear):
    """A running mean over all examples, which the outputs of training do not read."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__(width, outputs)
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.mean(dim=0))
        return super().forward(x)


def test_instances_are_normalized_on_a_stack_without_running_statistics_alone() -> None:
    for tracks, why in ((False, ""), (True, "0 (InstanceNorm1d) does not run on a stack of clients (its running stat")):
        norm = nn.InstanceNorm1d(3, affine=True, track_running_stats=tracks)
        net = PlainExampleNet(nn.Sequential(norm, nn.Flatten(), nn.Linear(15, 2)), (3, 5), 2)
        assert net.why_alone[: len(why)] == why
        assert bool(net.why_alone) == tracks


@pytest.mark.parametrize(
    ("net", "why"),
    [
        (Recurrent, "GRU has no form for a stack"),
        (nn.Sequential(nn.Linear(4, 6), nn.AlphaDropout(0.2), nn.Linear(6, 2)), "draws in a way"),
        (AcrossExamples(4, 2), "as if it computed across examples"),
        (Follows(4, 2), "has mean on a stack of clients that it does not have for one client"),
    ],
)
def test_what_does_not_run_on_a_stack_runs_client_by_client(net, why, make_trainer) -> None:
    data = FederatedDataModule(Clouds(), batch_size=8)
    data.setup()
    trainer = make_trainer(num_rounds=2, executor=StackedExecutor(max_padding=0.9))
    with pytest.warns(UserWarning, match=why):
        result = trainer.fit(ClientModule(net, SLOW), data, FedAvg(num_epochs=1))
    assert 0 < result["val/acc"] <= 1
    assert isinstance(trainer.run.executor, SequentialExecutor)


class TwoInputs(nn.Linear):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + y)


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (nn.Linear(5, 2), r"Linear cannot compute on examples of shape 4 \(RuntimeError: mat1 and mat2"),
        (TwoInputs(4, 2), "forward needs y, which clients' examples do not have"),
        (nn.Flatten(0), r"returns \[\(12,\)\] for 3 examples: return logits of shape \(num_examples, num_outputs\)"),
        (nn.Sequential(nn.Linear(4, 4), nn.Unflatten(1, (2, 2))), "for 3 examples: return logits"),
    ],
)
def test_what_is_no_net_for_examples_is_refused(net, message) -> None:
    with pytest.raises(ValueError, match=message):
        fitted(net, 4, 2)


def test_a_net_without_edges_is_refused_for_graphs(make_trainer, federation) -> None:
    net = nn.Sequential(nn.Linear(federation.num_features, 5))
    with pytest.raises(ValueError, match=r"Sequential reads no edges, .* give its forward a parameter edge_index"):
        make_trainer(num_rounds=1).fit(ClientModule(net), federation, FedAvg())


class Shifted(nn.Linear):
    def __init__(self, *, in_place: bool) -> None:
        super().__init__(4, 2)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.sub_(0.5) if self.in_place else x - 0.5)


def dropping(*, in_place: bool) -> nn.Module:
    return nn.Sequential(nn.Dropout(0.4, inplace=in_place), nn.Linear(4, 6), nn.AlphaDropout(0.2), nn.Linear(6, 2))


@pytest.mark.filterwarnings("ignore:model.net Sequential")
@pytest.mark.parametrize("kind", [Shifted, dropping])
def test_a_net_that_changes_its_inputs_leaves_the_clients_data_alone(kind, make_trainer, assert_same) -> None:
    data = FederatedDataModule(Clouds())
    data.setup()
    nets = [kind(in_place=True), kind(in_place=False)]
    nets[1].load_state_dict(nets[0].state_dict())
    results = [make_trainer(num_rounds=2).fit(ClientModule(net, SLOW), data, FedAvg(num_epochs=2)) for net in nets]
    assert_same(*results)


def test_lazy_layers_may_normalize() -> None:
    layers = nn.LazyLinear(6), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(2)
    net = fitted(lambda width, outputs: nn.Sequential(*layers), 4, 2)
    assert net.get_parameter("1.running_mean").shape == (6,)
    assert not dict(net.named_buffers())


class Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) if x.sum() < 1 else self.other(x)


def test_a_last_layer_that_depends_on_the_values_is_refused() -> None:
    net = fitted(Chooses(), 4, 2)
    with pytest.raises(ValueError, match=r"Chooses.forward computes logits without one, .* the same last layer"):
        net(batch_of(torch.ones(3, 4)))


class Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn_like(x))


@pytest.mark.parametrize("training", [True, False])
def test_own_random_numbers_follow_from_the_key(training) -> None:
    net, batch = fitted(Noisy, 4, 2).train(training), batch_of(torch.randn(9, 4))
    first, again = net(batch).logits, net(batch).logits
    assert torch.equal(first, again)
    assert not torch.allclose(first, net(batch.replace({"key": torch.tensor(4)})).logits)
