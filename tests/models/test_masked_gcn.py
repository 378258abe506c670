import functools

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from fl_lightning.batches.base import single
from fl_lightning.batches.graphs import GraphBatch, GraphCollator
from fl_lightning.models import GCN, MaskedGCN
from fl_lightning.models.masked_gcn import masked

CPU = torch.device("cpu")


@pytest.fixture
def collator(graphs) -> GraphCollator:
    return GraphCollator(graphs, device=CPU, dtype=torch.float64)


def build(num_layers: int = 2, **settings: float) -> MaskedGCN:
    torch.manual_seed(0)
    return MaskedGCN(6, 3, hidden_channels=4, num_layers=num_layers, **{"dropout": 0.0, **settings}).double()


def loss(net: torch.nn.Module, parameters: dict[str, Tensor], batch: GraphBatch) -> Tensor:
    return functional_call(net, parameters, (batch,)).logits.square().mean()


@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_masks_of_one_are_the_plain_gcn(num_layers, collator) -> None:
    net, batch = build(num_layers), single(collator([0]))
    plain = GCN(6, 3, hidden_channels=4, num_layers=num_layers, dropout=0.0).double()
    plain.load_state_dict({name: value for name, value in net.state_dict().items() if not name.endswith("mask")})

    for training in (True, False):
        torch.testing.assert_close(net.train(training)(batch), plain.train(training)(batch))
    masks = [name for name, _ in net.named_parameters() if "mask" in name]
    assert masks == [*(f"convs.{layer}.mask" for layer in range(num_layers)), "head.mask"]


def test_small_mask_entries_count_in_training_only(collator) -> None:
    net, batch = build(prune_below=0.1), single(collator([0]))
    with torch.no_grad():
        net.head.mask.fill_(-0.05)
        net.head.bias.fill_(2.0)

    assert (net.train()(batch).logits != 2).any()
    assert (net.eval()(batch).logits == 2).all()


def test_the_threshold_itself_counts() -> None:
    mask = torch.tensor([0.1, -0.1, 0.0999, -0.5], dtype=torch.float64)

    assert masked(torch.ones(4), mask, prune_below=0.1).tolist() == [0.1, -0.1, 0.0, -0.5]
    assert torch.equal(masked(torch.ones(4), mask, prune_below=0.0), mask)


def test_every_parameter_has_a_gradient(collator) -> None:
    net, batch = build(num_layers=3), single(collator([0]))
    net(batch).logits.square().sum().backward()

    for name, parameter in net.named_parameters():
        assert parameter.grad.abs().sum() > 0, name


def test_clients_at_once_are_clients_in_turn(collator) -> None:
    clients = [0, 1, 3]
    net, batch = build(dropout=0.4), collator(clients)
    draw = torch.Generator().manual_seed(1)
    stacked = {name: torch.randn(3, *p.shape, generator=draw, dtype=p.dtype) for name, p in net.named_parameters()}
    keys = torch.tensor([5, 6, 7])

    together = torch.vmap(lambda p, t: functional_call(net, p, (batch.replace(t),)).logits)(
        stacked, batch.tensors() | {"key": keys}
    )

    for row, client in enumerate(clients):
        alone = single(collator([client])).replace({"key": keys[row]})
        logits = functional_call(net, {name: t[row] for name, t in stacked.items()}, (alone,)).logits
        torch.testing.assert_close(together[row, : len(logits)], logits)


def test_sparse_features(graphs) -> None:
    collator = GraphCollator(graphs, device=CPU, dtype=torch.float64)
    dense = single(collator([1]))
    collator.sparse_features = True
    sparse = single(collator([1]))
    net = build()
    with torch.no_grad():
        net.convs[0].mask.uniform_(-1, 1)

    torch.testing.assert_close(net(sparse), net(dense))


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"prune_below": -1.0}, "prune_below"), ({"num_layers": 0}, "num_layers"), ({"dropout": 1.0}, "dropout")],
)
def test_impossible_settings_are_refused(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        functools.partial(MaskedGCN, 6, 3)(**settings)


def test_one_operator_serves_all_clients(collator) -> None:
    """A batch that is not mapped over, as a server's proxy graph: its adjacency multiplies all clients' columns."""
    net, proxy = build(), single(collator([2]))
    draw = torch.Generator().manual_seed(1)
    stacked = {
        name: torch.randn(4, *p.shape, generator=draw, dtype=p.dtype).requires_grad_()
        for name, p in net.named_parameters()
    }

    values = torch.vmap(lambda p: loss(net, p, proxy))(stacked)
    gradients = torch.autograd.grad(values.sum(), list(stacked.values()))

    for row in range(4):
        own = {name: tensor[row].detach().requires_grad_() for name, tensor in stacked.items()}
        alone = loss(net, own, proxy)
        torch.testing.assert_close(values[row], alone)
        for together, single_one in zip(gradients, torch.autograd.grad(alone, list(own.values())), strict=True):
            torch.testing.assert_close(together[row], single_one)
