import itertools
import math

import pytest
import torch

from fl_lightning.kernels.randomness import (
    derive_key,
    dropout,
    generator,
    keep_mask,
    kept_fraction,
    pair_words,
    random_order,
    random_places,
    random_uniform,
)


def key_of(*parts: int | str) -> torch.Tensor:
    return torch.tensor(derive_key(*parts))


def correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a.flatten().double(), b.flatten().double()]))[0, 1])


def test_every_part_of_a_key_counts() -> None:
    base = [3, "dropout", 7, 2, 5]
    changed = [
        [*base[:index], other, *base[index + 1 :]] for index, other in enumerate([4, "dropouts", 8, 3, 6], start=0)
    ]
    swapped = [7, "dropout", 3, 2, 5]
    keys = {derive_key(*parts) for parts in (base, *changed, swapped, base[:-1], [*base, 0])}

    assert len(keys) == 9
    assert all(0 <= key < 2**63 for key in keys)
    assert derive_key(*base) == derive_key(*base)


def test_keys_do_not_collide_over_rounds_clients_and_epochs() -> None:
    keys = [derive_key(0, "train", *path) for path in itertools.product(range(20), range(50), range(10))]

    assert len(set(keys)) == len(keys)
    bits = torch.tensor(keys)[:, None] >> torch.arange(63) & 1
    share = bits.double().mean(dim=0)
    assert (share - 0.5).abs().max() < 5 * 0.5 / math.sqrt(len(keys))


def test_negative_and_large_parts_are_keys_too() -> None:
    assert len({derive_key(part) for part in (-1, 1, 2**63, 2**64 - 2, 0)}) == 5


def test_generators_repeat() -> None:
    assert torch.equal(torch.rand(4, generator=generator(1, "a")), torch.rand(4, generator=generator(1, "a")))
    assert not torch.equal(torch.rand(4, generator=generator(1, "a")), torch.rand(4, generator=generator(1, "b")))


@pytest.mark.parametrize("probability", [0.1, 0.3, 0.5, 0.6, 0.9])
def test_masks_keep_the_share_they_say(probability) -> None:
    masks = torch.stack([keep_mask(key_of(i), 300, 100, probability) for i in range(10)]).double()

    kept = kept_fraction(probability)
    error = math.sqrt(kept * (1 - kept))
    assert abs(kept - (1 - probability)) <= 1 / 512
    assert abs(float(masks.mean()) - kept) < 4 * error / math.sqrt(masks.numel())
    # No row and no column is luckier than chance allows.
    assert (masks.mean(dim=(0, 2)) - kept).abs().max() < 5 * error / math.sqrt(1000)
    assert (masks.mean(dim=(0, 1)) - kept).abs().max() < 5 * error / math.sqrt(3000)
    rows = masks.mean(dim=2)
    assert float(rows.var()) == pytest.approx(kept * (1 - kept) / 100, rel=0.1)


def test_rows_columns_and_keys_are_independent() -> None:
    num_rows, num_columns = 500, 64
    bound = 5 / math.sqrt(num_rows * num_columns)
    keys = [key_of(0, "train", 0, client) for client in range(4)]
    masks = [keep_mask(key, num_rows, num_columns, 0.5) for key in keys]

    for a, b in itertools.combinations(masks, 2):
        assert abs(correlation(a, b)) < bound
    for mask in masks:
        for distance in (1, 2, 4, 8, 32):
            assert abs(correlation(mask[distance:], mask[:-distance])) < bound
            assert abs(correlation(mask[:, distance:], mask[:, :-distance])) < bound
        # A sum of a row's and a column's hash must not show: products over the corners of rectangles cancel.
        sign = mask.double() * 2 - 1
        rectangles = sign[:-1, :-4] * sign[1:, :-4] * sign[:-1, 4:] * sign[1:, 4:]
        assert abs(float(rectangles.mean())) < bound


@pytest.mark.parametrize("difference", [1, 2, 3, 1 << 31, 1 << 45])
def test_neighboring_keys_are_independent_at_every_shift(difference) -> None:
    # The layers of one step have neighboring keys; a shifted copy would drop the same pattern in each layer.
    key = key_of(0, "train", 0, 1)
    first = keep_mask(key, 300, 64, 0.5).double() * 2 - 1
    second = keep_mask(key + difference, 300, 64, 0.5).double() * 2 - 1

    for row, column in itertools.product(range(-4, 5), (-16, -8, -4, 0, 4, 8, 16)):
        overlap = first.roll((row, column), (0, 1)) * second
        assert abs(float(overlap.mean())) < 5 / math.sqrt(overlap.numel()), (row, column)


def test_padding_does_not_change_the_real_nodes() -> None:
    key = key_of(1, 2)
    small = keep_mask(key, 7, 10, 0.4)

    assert torch.equal(keep_mask(key, 50, 10, 0.4)[:7], small)
    assert torch.equal(keep_mask(key, 7, 33, 0.4)[:, :10], small)


def test_a_batch_of_keys_is_each_key_alone() -> None:
    keys = torch.stack([key_of(i) for i in range(6)]).view(2, 3)

    masks = keep_mask(keys, 5, 6, 0.3)

    assert masks.shape == (2, 3, 5, 6)
    for i, j in itertools.product(range(2), range(3)):
        assert torch.equal(masks[i, j], keep_mask(keys[i, j], 5, 6, 0.3))


@pytest.mark.parametrize("probability", [0.3, 0.5])
def test_dropout_scales_and_its_gradient_is_the_scaled_mask(probability) -> None:
    key = key_of(9)
    x = torch.randn(20, 7, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(20, 7, dtype=torch.float64)
    scaled_mask = keep_mask(key, 20, 7, probability).double() / kept_fraction(probability)

    out = dropout(x, key, probability)
    (gradient,) = torch.autograd.grad(out, x, upstream)

    torch.testing.assert_close(out, x * scaled_mask, rtol=1e-14, atol=0)
    torch.testing.assert_close(gradient, upstream * scaled_mask, rtol=1e-14, atol=0)
    assert (scaled_mask == 0).any()
    assert torch.autograd.gradcheck(lambda x: dropout(x, key, probability), x)


@pytest.mark.parametrize(("probability", "kept"), [(0.0005, 255 / 256), (0.9995, 1 / 256)])
def test_probabilities_near_the_bounds_drop_some_and_keep_some(probability, kept) -> None:
    assert kept_fraction(probability) == kept
    out = dropout(torch.ones(300, 64), key_of(3), probability)
    assert out.unique().tolist() == pytest.approx([0, 1 / kept])


def test_draws_stay_what_they_are() -> None:
    """Checkpoints go on by them, and the committed results were made with them."""
    key, allowed = key_of(7, "train", 3, 1), torch.arange(8) != 3
    assert int(key) == 81381948413764033
    torch.testing.assert_close(torch.rand(2, generator=generator(7, "a")), torch.tensor([0.55497068, 0.96415973]))
    assert keep_mask(key, 2, 8, 0.4).int().tolist() == [[1, 0, 0, 1, 1, 1, 0, 1], [1, 0, 1, 1, 0, 0, 1, 1]]
    uniform = [[0.28643783927, 0.39033010602, 0.04099658132], [0.80531135201, 0.6797040999, 0.89129039645]]
    torch.testing.assert_close(random_uniform(key, 2, 3), torch.tensor(uniform).double(), rtol=0, atol=1e-7)
    order, was_allowed = random_order(key, allowed, 8)
    assert order.tolist() == [5, 4, 0, 6, 7, 1, 2, 3]
    assert was_allowed.tolist() == [True] * 7 + [False]
    assert random_places(key, allowed).tolist() == [2, 5, 6, 7, 1, 0, 3, 4]
    words = pair_words(key.expand(3), torch.tensor([0, 1, 2]), torch.tensor([1, 0, 5]))
    assert words.tolist() == [-1861399643, -1143241398, -2143461314]


def test_uniform_numbers_are_uniform_and_independent() -> None:
    drawn = random_uniform(key_of(1), 400, 64)
    bound = 5 / math.sqrt(drawn.numel())
    assert abs(float(drawn.mean()) - 0.5) < bound * math.sqrt(1 / 12)
    assert float(drawn.var()) == pytest.approx(1 / 12, rel=0.03)
    assert torch.equal(random_uniform(key_of(1), 7, 64), drawn[:7])
    for other in (drawn.roll(1, 0), drawn.roll(1, 1), random_uniform(key_of(1) + 1, 400, 64)):
        assert abs(correlation(drawn, other)) < bound


def test_dropout_of_nothing_is_the_input() -> None:
    x = torch.randn(3, 4)
    assert dropout(x, key_of(0), 0.0) is x


def test_vmapped_dropout_is_a_loop() -> None:
    keys = torch.stack([key_of(i) for i in range(4)])
    x = torch.randn(4, 11, 6, requires_grad=True)

    mapped = torch.vmap(lambda x, key: dropout(x, key, 0.4))(x, keys)
    looped = torch.stack([dropout(row, key, 0.4) for row, key in zip(x, keys, strict=True)])

    assert torch.equal(mapped, looped)
    (gradient,) = torch.autograd.grad(mapped.square().sum(), x)
    (expected,) = torch.autograd.grad(looped.square().sum(), x)
    assert torch.equal(gradient, expected)
    shared = torch.vmap(lambda key: dropout(x[0], key, 0.4))(keys)
    assert torch.equal(shared, torch.stack([dropout(x[0], key, 0.4) for key in keys]))
    one_key = torch.vmap(lambda x: dropout(x, keys[0], 0.4))(x)
    assert torch.equal(one_key, torch.stack([dropout(row, keys[0], 0.4) for row in x]))
