"""Parts of a batch's training examples, and other draws on it."""

import dataclasses

import pytest
import torch
from torch import Tensor

from fl_lightning.batches import Batch, ClientExamples, ExampleBatch, ExampleCollator, GraphCollator
from fl_lightning.batches.base import single
from fl_lightning.kernels.randomness import MASK_63, random_places, splitmix64, subkey

CPU = {"device": torch.device("cpu"), "dtype": torch.float32}
SIZES = (23, 9, 40, 3, 0)  # training examples of each client, of twice as many and one
KEYS = torch.arange(len(SIZES)) * 1_000_003 + 17


@pytest.fixture
def batches() -> ExampleCollator:
    members = []
    for number, size in enumerate(SIZES):
        train = torch.arange(2 * size + 1) % 2 == 1
        masks = {"train_mask_N": train, "val_mask_N": ~train, "test_mask_N": torch.zeros_like(train)}
        x = torch.randn(len(train), 2, generator=torch.Generator().manual_seed(number))
        members.append(ClientExamples(name=str(number), x_NX=x, y_N=train.long(), **masks))
    return ExampleCollator(members, **CPU)


def everyone(batches: ExampleCollator) -> ExampleBatch:
    return batches(range(len(SIZES))).replace({"key": KEYS})


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_parts_are_disjoint_and_of_equal_sizes(batches, parts) -> None:
    batch = everyone(batches)
    masks = torch.stack([part.train_mask for part in batch.split(parts)])

    sizes = masks.sum(dim=-1)
    for client, size in enumerate(SIZES):
        if size < parts:
            assert all(torch.equal(mask, batch.train_mask[client]) for mask in masks[:, client])
        else:
            assert torch.equal(masks[:, client].sum(dim=0), batch.train_mask[client].long())
            assert sizes[:, client].max() - sizes[:, client].min() <= 1


def test_parts_differ_in_nothing_but_training_examples_and_keys(batches) -> None:
    batch = everyone(batches)
    parts = batch.split(3)

    for part in parts:
        for name in batch.tensors().keys() - {"train_mask", "key"}:
            assert getattr(part, name) is getattr(batch, name)
        assert part.batch_size == batch.batch_size
    keys = torch.stack([batch.key, *(part.key for part in parts), batch.with_draw(1).key, batch.with_draw(2).key])
    assert len(keys.unique()) == keys.numel()
    assert (keys >= 0).all()


def test_one_client_a_stack_and_vmap_have_the_same_parts(batches) -> None:
    batch = everyone(batches)
    stacked = batch.split(3)

    def masks_and_keys(tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        parts = batch.replace(tensors).split(3)
        return torch.stack([part.train_mask for part in parts]), torch.stack([part.key for part in parts])

    masks_CPN, keys_CP = torch.vmap(masks_and_keys)(batch.tensors())
    for client in range(len(SIZES)):
        alone = single(batches([client])).replace({"key": KEYS[client]})  # without the others' padding
        for number, part in enumerate(alone.split(3)):
            assert torch.equal(part.train_mask, stacked[number].train_mask[client, : len(part.y)])
            assert torch.equal(part.train_mask, masks_CPN[client, number, : len(part.y)])
            assert part.key == stacked[number].key[client] == keys_CP[client, number]
    assert not (masks_CPN & ~batch.train_mask[:, None]).any()


def test_clients_under_vmap_may_have_one_key_or_one_batch(batches) -> None:
    batch = everyone(batches)
    common = torch.vmap(
        lambda tensors, key: torch.stack([p.train_mask for p in batch.replace({**tensors, "key": key}).split(2)], 1),
        in_dims=(0, None),
    )(batch.tensors(), KEYS[0])
    expected = batch.replace({"key": KEYS[0].expand(len(SIZES))}).split(2)
    assert torch.equal(common, torch.stack([part.train_mask for part in expected], dim=2))

    one = single(batches([0]))
    several = torch.vmap(lambda key: one.replace({"key": key}).split(2)[0].train_mask)(KEYS)
    alone = [one.replace({"key": key}).split(2)[0].train_mask for key in KEYS]
    assert torch.equal(several, torch.stack(alone))
    assert len(several.unique(dim=0)) == len(KEYS)


def test_every_example_is_as_likely_in_every_part(batches) -> None:
    one = single(batches([0]))
    part = torch.vmap(lambda key: one.replace({"key": key}).split(3)[1].train_mask)(torch.arange(2_000))
    drawn = part[:, one.train_mask].double().mean(dim=0)
    assert (drawn - 8 / 23).abs().max() < 5 * (8 / 23 * 15 / 23 / 2_000) ** 0.5


def test_graphs_are_split_too(graphs) -> None:
    batch = GraphCollator(graphs, **CPU)(range(5))
    parts = batch.split(2)
    assert torch.equal(parts[0].train_mask ^ parts[1].train_mask, batch.train_mask)
    assert all(part.adjacency is batch.adjacency for part in parts)


def test_no_parts_are_refused(batches) -> None:
    with pytest.raises(ValueError, match="into 0 parts: split it into at least 1"):
        everyone(batches).split(0)


def test_another_draw_is_the_same_batch_with_another_key(batches) -> None:
    batch: Batch = everyone(batches)
    assert batch.with_draw(0) is batch
    drawn = batch.with_draw(3)
    assert dataclasses.replace(drawn, key=batch.key).tensors().keys() == batch.tensors().keys()
    assert all(getattr(drawn, name) is value for name, value in batch.tensors().items() if name != "key")

    mapped = torch.vmap(lambda tensors: batch.replace(tensors).with_draw(3).key)(batch.tensors())
    alone = [single(batches([client])).replace({"key": KEYS[client]}).with_draw(3).key for client in range(len(SIZES))]
    assert torch.equal(drawn.key, mapped)
    assert torch.equal(drawn.key, torch.stack(alone))


@pytest.mark.parametrize("part", [0, 5, 2**63 + 11, -1])
def test_keys_that_follow_from_keys_are_splitmix(part) -> None:
    keys = [0, 1, 2**31, 2**62 + 7, 2**63 - 1]
    expected = [splitmix64(key ^ (part & (2**64 - 1))) & MASK_63 for key in keys]
    assert subkey(torch.tensor(keys), part).tolist() == expected
    twice = [splitmix64(key ^ 1) & MASK_63 for key in expected]
    assert subkey(torch.tensor(keys), part, 1).tolist() == twice


def test_places_are_an_order() -> None:
    mask = torch.tensor([True, False, True, True, False, True])
    index = random_places(torch.tensor(5), mask)
    assert sorted(index.tolist()) == list(range(6))
    assert sorted(index[mask].tolist()) == list(range(4))
    padded = random_places(torch.tensor(5), torch.cat([mask, torch.zeros(3, dtype=torch.bool)]))
    assert torch.equal(padded[:6][mask], index[mask])
