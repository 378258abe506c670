"""SheafRidge: its last layer in closed form, its embeddings in a common frame; and the family's metrics."""

import copy
import warnings

import pytest
import torch
from small_generators import Linear, WatchEmbeddings, federation_of, heard, ridge, updates
from torch import Tensor

from fl_lightning.round.payload import Payload, flatten, unflatten
from fl_lightning.strategies import SheafRidge
from fl_lightning.strategies.hypernetwork import NoDiffusion
from fl_lightning.strategies.hypernetwork.last_layer import ClosedFormLayer

EXAMPLES = torch.tensor([4, 1, 3, 2, 2])


def play(strategy: SheafRidge, clients, seed: int = 8) -> Tensor:
    """A round in which some clients respond; what they trained."""
    stage = strategy.stages(0)[0]
    sent = flatten(strategy.configure(stage, clients).parameters)
    upload = updates(clients, strategy, seed)
    trained = sent + flatten(upload.parameters)
    upload = Payload(
        clients=upload.clients, parameters=upload.parameters, num_examples=EXAMPLES[list(clients)], extras={}
    )
    strategy.aggregate(stage, upload)
    return trained


def test_the_layer_is_the_ridge_regression_of_the_models_on_the_features() -> None:
    draw = torch.Generator().manual_seed(0)
    feature = torch.randn(5, 3, generator=draw, dtype=torch.float64)
    models = torch.randn(5, 7, generator=draw, dtype=torch.float64)
    layer = ClosedFormLayer([4, 3], 5, ridge=0.3, strength=1.0).double()
    layer.ingest(range(5), models, EXAMPLES)

    centered = feature - EXAMPLES.double() / 12 @ feature
    centered = centered / centered.square().sum(dim=1).mean().sqrt()
    mean = EXAMPLES.double() @ models / 12
    weight = torch.linalg.solve(centered.T @ centered + 0.3 * torch.eye(3), centered.T @ (models - mean))
    torch.testing.assert_close(layer(feature, range(5)), mean + centered @ weight, rtol=1e-6, atol=1e-8)
    layer.strength_T.copy_(torch.tensor([0.0, 0.5]))
    actual = layer(feature, [3, 1])
    torch.testing.assert_close(actual[:, :4], mean[:4].expand(2, -1))
    expected = mean + 0.5 * (centered @ weight)[[3, 1]]
    torch.testing.assert_close(actual[:, 4:], expected[:, 4:], rtol=1e-6, atol=1e-8)


def test_nobody_or_one_client_is_no_regression() -> None:
    layer = ClosedFormLayer([2], 3, ridge=1.0, strength=1.0)
    layer.start_from(torch.tensor([1.0, 2.0]))
    feature = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    assert layer(feature, [2, 0]).tolist() == [[1.0, 2.0], [1.0, 2.0]]

    layer.ingest([1], torch.tensor([[5.0, 6.0]]), torch.tensor([7]))

    assert layer(feature, [2]).tolist() == [[5.0, 6.0]]


def test_the_loss_is_what_the_others_do_not_tell() -> None:
    """By a loop over clients, of whom each is fitted without; each tensor counts by its share of what moved."""
    draw = torch.Generator().manual_seed(0)
    feature, update = (torch.randn(5, width, generator=draw, dtype=torch.float64) for width in (3, 7))
    layer = ClosedFormLayer([4, 3], 5, ridge=0.3, strength=None).double()
    weight = torch.tensor([4.0, 1, 3, 2, 2]).double() / 12
    smoother = layer.smoother(feature, torch.ones(5, dtype=torch.bool), weight).detach()
    error = plain = 0.0
    for columns in (slice(0, 4), slice(4, 7)):
        own, scale = update[:, columns], float(update[:, columns].square().sum())
        for i in range(5):
            others = [j for j in range(5) if j != i]
            reported = smoother[i, others] @ own[others] / smoother[i, others].sum()
            mean = weight[others] @ own[others] / weight[others].sum()
            error += float((own[i] - reported).square().sum()) / scale
            plain += float((own[i] - mean).square().sum()) / scale
    actual = layer.loss(smoother, weight, layer.gram(update))
    assert actual.item() == pytest.approx(error / plain)


def test_an_unseen_client_keeps_of_its_own_model_as_much_as_the_others_do() -> None:
    layer = ClosedFormLayer([2, 1], 3, ridge=1.0, strength=1.0)
    layer.own_T = [0.25, 1.0]
    generated = torch.tensor([0.0, 4.0, 8.0])
    layer.keep_own_(generated, torch.tensor([4.0, 0.0, -8.0]))
    assert generated.tolist() == [1.0, 3.0, -8.0]


def test_sheaf_attention_mlp_and_ridge_are_really_trained() -> None:
    strategy = ridge(num_server_steps=2)
    strategy.setup(federation_of(5))
    heard(strategy, range(5))
    before = {name: p.detach().clone() for name, p in strategy.generator.named_parameters()}

    play(strategy, range(5))

    still = [name for name, p in strategy.generator.named_parameters() if torch.equal(p, before[name])]
    assert not [name for name in still if not name.endswith(".bias")]  # those before a normalization have no say


@pytest.mark.parametrize("strength", [0.0, 1.0])
def test_a_fixed_strength_decides_between_one_model_and_the_fit(strength) -> None:
    plain = {"embedding": "one_hot", "diffusion": NoDiffusion, "attention": "none", "num_hidden_layers": 0}
    strategy = ridge(strength=strength, ridge=1e-6, **plain)
    strategy.setup(federation_of(5))
    strategy.aggregate(strategy.initial_stages()[0], updates(range(5), strategy))

    trained = play(strategy, range(5))
    generated = flatten(strategy.generate_for_evaluation(range(5)).parameters)

    mean = EXAMPLES.double() @ trained / 12
    expected = trained if strength else mean.expand(5, -1)
    torch.testing.assert_close(generated, expected, rtol=1e-4, atol=1e-4)
    metrics = strategy.metrics()
    assert metrics["server/spread"] == pytest.approx(strength, abs=1e-3)
    assert metrics["server/explained"] == pytest.approx(1.0 if strength else metrics["server/explained"], abs=1e-3)


def test_a_number_that_a_client_left_alone_counts_as_those_that_moved_it() -> None:
    strategy = ridge(strength=0.0, masked_averaging=True)
    strategy.setup(federation_of(3))
    heard(strategy, range(3))
    stage = strategy.stages(0)[0]
    sent = flatten(strategy.configure(stage, range(3)).parameters)
    update = torch.ones_like(sent)
    update[0, :4] = 0.0
    update[1:, 8] = 0.0
    upload = Payload(
        clients=(0, 1, 2), parameters=unflatten(update, strategy.shapes), num_examples=torch.tensor([2, 1, 1])
    )

    strategy.aggregate(stage, upload)

    generated = flatten(strategy.generate_for_evaluation(range(3)).parameters)
    torch.testing.assert_close(generated, sent + 1)  # all that moved it moved it by one


def test_clients_that_did_not_answer_keep_their_last_model_in_the_fit() -> None:
    strategy = ridge(strength=1.0, ridge=1e-9)
    strategy.setup(federation_of(5))
    heard(strategy, range(5))
    first = play(strategy, range(5), seed=1)

    play(strategy, (0, 3), seed=2)

    torch.testing.assert_close(strategy.closed_form.layer.models_CP[[1, 2, 4]], first[[1, 2, 4]])
    assert not torch.allclose(strategy.closed_form.layer.models_CP[[0, 3]], first[[0, 3]])


@pytest.mark.parametrize("amid_trials", [False, True])
def test_trials_leave_nothing_behind(amid_trials) -> None:
    """Nor in a state that is saved amid them: it is that of the choice."""
    strategy, other = (ridge(validate_every=1, validate_personal=["*.bias"], masked_averaging=True) for _ in range(2))
    for each in (strategy, other):
        each.setup(federation_of(5))
        heard(each, range(5))
    stage = strategy.stages(0)[0]
    update = torch.ones_like(flatten(strategy.configure(stage, range(5)).parameters))
    update[0] = 0.0  # where nothing is its own, this client is given what moved
    strategy.aggregate(
        stage, Payload(clients=range(5), parameters=unflatten(update, strategy.shapes), num_examples=EXAMPLES)
    )
    before = flatten(strategy.generate_for_evaluation(range(5)).parameters)
    tried = [flatten(strategy.configure(stage, range(5)).extras) for stage in strategy.stages(1)[1:]]
    assert torch.equal(tried[0], before)
    assert not torch.equal(tried[-1], before)

    if not amid_trials:
        strategy.generate_for_evaluation(range(5))
    other.load_state_dict(copy.deepcopy(strategy.state_dict()))

    for each in (strategy, other):
        assert torch.equal(flatten(each.generate_for_evaluation(range(5)).parameters), before)


@pytest.mark.parametrize(("embedding_model", "sent"), [("own", [1, 3]), ("received", [1, 3]), ("initial", [])], ids=str)
def test_which_model_embeds(embedding_model, sent, federation, make_model, make_trainer) -> None:
    watch = WatchEmbeddings()
    make_trainer(num_rounds=4, callbacks=watch).fit(
        make_model(), federation, ridge(embedding_model=embedding_model, refresh_every=2)
    )

    assert [index for name, index, with_it in watch.sent if name == "train" and with_it] == sent
    first = "embed" if embedding_model == "initial" else "initial"
    assert next(name for name, _, with_it in watch.sent if with_it) == first


def test_permuted_embeddings_are_others() -> None:
    plain, permuted = ridge(), ridge(permute_embeddings=True)
    for strategy in (plain, permuted):
        strategy.setup(federation_of(5, training=(0, 1, 3, 4)))
        heard(strategy, range(5))

    mine, others = (each.embeddings.graph([0, 1, 3, 4, 2])[0] for each in (plain, permuted))

    assert not (mine[:4] == others[:4]).all(dim=1).any()
    torch.testing.assert_close(mine[4], others[4])  # held out of training
    torch.testing.assert_close(mine[:, 0].sort().values, others[:, 0].sort().values)


def test_a_collapsed_generator_is_reported_once() -> None:
    strategy = Linear(server_lr=1e-12)
    strategy.setup(federation_of(4))
    strategy.embeddings.zero_()
    reported = []
    for _ in range(25):
        strategy.configure(strategy.stages(0)[0], range(4))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            strategy.aggregate(strategy.stages(0)[0], updates(range(4), strategy))
        reported.append([str(each.message) for each in caught])

    assert [bool(each) for each in reported] == [False] * 9 + [True] + [False] * 15
    assert "for 10 rounds every client has been generated the same model" in reported[9][0]
    assert strategy.metrics()["server/spread"] == 0.0
    assert strategy.metrics()["server/captured_share"] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ridge": 0.0}, r"strategy\.ridge must be positive, got 0\.0"),
        ({"strength": 1.5}, r"strategy\.strength must be in \[0, 1\]"),
        ({"embedding": "one_hot", "embedding_model": "initial"}, "one_hot embeds with no model"),
    ],
)
def test_senseless_settings_are_refused(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        ridge(**settings)
