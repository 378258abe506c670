import functools
import math

import pytest
import torch
from both_executors import both_executors
from torch import Tensor, nn
from torch.optim import SGD, Adam

from fl_lightning import Participation, SequentialExecutor, StackedExecutor
from fl_lightning.data import ClientGraph
from fl_lightning.models import GCN, NetOutput, ProjectionGCN
from fl_lightning.strategies import FedAux, Local, LocalAux
from fl_lightning.strategies.mixing.fedaux import FedAuxClient
from fl_lightning.strategies.mixing.local_aux import LocalAuxClient

RATE, TEMPERATURE = 0.1, 2.0
#: One training target for each client: what its projection is drawn to, and its number.
TARGETS = [((1.0, 0.0), 2.0), ((0.0, -1.0), -1.0), ((0.6, 0.8), 3.0)]
START = [0.5, 0.5]


class Follower(nn.Module):
    """A number and a projection, both of which follow the client's single feature row (p_1, p_2, number)."""

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.zeros(()))
        self.projection = nn.Parameter(torch.tensor(START))

    def forward(self, batch) -> NetOutput:
        residual_N3 = batch.propagated_x - torch.cat([self.projection, self.number[None]])
        return NetOutput(residual_N3, residual_N3)


class Pull(LocalAuxClient):
    def loss(self, output, batch) -> Tensor:
        return 0.5 * (output.logits.square().sum(dim=1) * batch.train_mask).sum()

    def scores(self, output, batch) -> dict[str, tuple[Tensor, Tensor]]:
        error = (output.logits.square().sum(dim=1) * batch.example_mask).sum()
        return {"val/loss": (error, batch.val_mask.sum())}


@pytest.fixture
def pulls(given_clients):
    mask = torch.tensor([True, False, False])
    graphs = [
        ClientGraph(
            name=f"client-{index}",
            x_NF=torch.tensor([[*direction, number]] * 3),
            edge_index_2E=torch.zeros(2, 0, dtype=torch.int64),
            y_N=torch.zeros(3, dtype=torch.int64),
            train_mask_N=mask,
            val_mask_N=mask.roll(1),
            test_mask_N=mask.roll(2),
            node_idx_N=torch.arange(3) + 3 * index,
        )
        for index, (direction, number) in enumerate(TARGETS)
    ]
    return given_clients(graphs)


def model(**settings) -> Pull:
    return Pull(Follower, functools.partial(SGD, lr=RATE), **settings)


def strategy(**settings) -> LocalAux:
    return LocalAux(**{"personal": [], "mask_sparsity_weight": 0.0, "similarity_temperature": TEMPERATURE, **settings})


@both_executors
@pytest.mark.parametrize("mix_projection", [True, False])
@pytest.mark.parametrize("multiplier", [1.0, 4.0])
@pytest.mark.parametrize("sign_free", [True, False])
def test_two_rounds_by_hand(executor, mix_projection, multiplier, sign_free, pulls, make_trainer) -> None:
    trainer = make_trainer(num_rounds=2, executor=executor(), precision="64-true", monitor="val/loss")

    trainer.fit(
        model(projection_lr_multiplier=multiplier), pulls, strategy(mix_projection=mix_projection, sign_free=sign_free)
    )

    received = [(list(START), 0.0)] * 3
    for _ in range(2):
        trained = []
        for (projection, number), (direction, target) in zip(received, TARGETS, strict=True):
            moved = [p + multiplier * RATE * (d - p) for p, d in zip(projection, direction, strict=True)]
            trained.append((moved, number + RATE * (target - number)))
        received = []
        for own, _ in trained:
            cosines = [
                sum(map(float.__mul__, own, other)) / math.hypot(*own) / math.hypot(*other) for other, _ in trained
            ]
            alike = [abs(cosine) if sign_free else cosine for cosine in cosines]
            weights = [math.exp(TEMPERATURE * value) for value in alike]
            shares = [weight / sum(weights) for weight in weights]
            mixed = [sum(s * p[axis] for s, (p, _) in zip(shares, trained, strict=True)) for axis in range(2)]
            number = sum(s * value for s, (_, value) in zip(shares, trained, strict=True))
            received.append((mixed if mix_projection else own, number))
    models = trainer.run.strategy.models
    assert models["number"].tolist() == pytest.approx([number for _, number in received], rel=1e-6)
    assert ("projection" in models) == mix_projection
    if mix_projection:
        torch.testing.assert_close(models["projection"], torch.tensor([p for p, _ in received], dtype=torch.float64))
    own = trainer.run.executor.state().parameters["projection"].tolist()
    assert own == [pytest.approx(projection, rel=1e-6) for projection, _ in trained]


def test_opposite_vectors_are_alike_without_their_sign() -> None:
    projection_CD = torch.tensor([[1.0, 0.0], [-2.0, 0.0], [0.6, -0.8]])
    expected_CC = torch.tensor([[1.0, -1.0, 0.6], [-1.0, 1.0, -0.6], [0.6, -0.6, 1.0]])

    torch.testing.assert_close(FedAux().similarity(projection_CD, projection_CD), expected_CC)
    torch.testing.assert_close(LocalAux(sign_free=True).similarity(projection_CD, projection_CD), expected_CC.abs())


@both_executors
def test_a_share_goes_to_the_whole_federation(executor, pulls, make_trainer) -> None:
    """W = (1 - s) softmax + s w; the clients have one training example each."""
    runs = []
    for common_share in (0.0, 0.25, 1.0):
        trainer = make_trainer(num_rounds=1, executor=executor(), precision="64-true", monitor="val/loss")
        trainer.fit(model(), pulls, strategy(common_share=common_share))
        runs.append((trainer.run.strategy.models["number"], trainer.run.strategy.breadth))
    (kin, narrow), (both, wider), (common, widest) = runs

    torch.testing.assert_close(common, torch.full((3,), RATE * (2 - 1 + 3) / 3, dtype=torch.float64))
    torch.testing.assert_close(both, 0.75 * kin + 0.25 * common)
    assert narrow < wider < widest == pytest.approx(1.0)


@both_executors
def test_unit_norm_projection_is_kept_after_every_step(executor, pulls, make_trainer) -> None:
    trainer = make_trainer(num_rounds=1, executor=executor(), precision="64-true", monitor="val/loss")

    trainer.fit(model(projection_lr_multiplier=1.0, unit_norm_projection=True), pulls, strategy(num_epochs=3))

    for actual, (direction, _) in zip(trainer.run.executor.state().parameters["projection"], TARGETS, strict=True):
        expected = torch.tensor(START, dtype=torch.float64)
        for _ in range(3):
            expected = expected + RATE * (torch.tensor(direction, dtype=torch.float64) - expected)
            expected = expected / expected.norm()
        torch.testing.assert_close(actual, expected, rtol=1e-7, atol=1e-9)


def test_stragglers_are_constrained_alike(federation, make_model, make_trainer, assert_same) -> None:
    states = []
    for executor in (SequentialExecutor(), StackedExecutor()):
        trainer = make_trainer(
            executor=executor,
            precision="64-true",
            participation=Participation(num_clients=3, straggler_probability=0.6),
        )
        net = functools.partial(make_model(FedAuxClient).net_factories[0])
        client = FedAuxClient(net, functools.partial(Adam, lr=0.05), unit_norm_projection=True)
        trainer.fit(client, federation, FedAux(num_epochs=4))
        states.append(trainer.run.executor.state())
    assert_same(states[1].parameters, states[0].parameters, tolerance=1e-9)
    norms = states[0].parameters["projection"].norm(dim=1)
    started = states[0].extras["optimizer/started/projection"]
    torch.testing.assert_close(norms[started], torch.ones(int(started.sum()), dtype=torch.float64))


def test_the_projection_has_settings_of_its_own() -> None:
    factory = functools.partial(Adam, lr=0.02, weight_decay=0.3)
    client = FedAuxClient(ProjectionGCN, factory, projection_lr_multiplier=5.0, projection_weight_decay=0.0)
    client.build(4, 2)

    optimizer = client.configure_optimizers()

    others, projection = optimizer.param_groups
    assert projection["params"] == [client.net.projection]
    assert (others["lr"], others["weight_decay"]) == (0.02, 0.3)
    assert (projection["lr"], projection["weight_decay"]) == (pytest.approx(0.1), 0.0)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(client.net.parameters()))
    kept = FedAuxClient(ProjectionGCN, factory, projection_weight_decay=None)
    kept.build(4, 2)
    assert kept.configure_optimizers().param_groups[1]["weight_decay"] == 0.3


@both_executors
def test_without_personalized_mixing_all_share_one_model(executor, pulls, make_trainer) -> None:
    trainer = make_trainer(num_rounds=1, executor=executor(), precision="64-true", monitor="val/loss")

    trainer.fit(model(), pulls, strategy(personalized=False))

    assert trainer.run.strategy.models["number"].tolist() == pytest.approx([RATE * (2 - 1 + 3) / 3])
    assert "mixing" not in trainer.run.strategy.matrices()
    assert trainer.run.strategy.configure(trainer.run.strategy.stages(0)[0], (2,)).parameters["number"].shape == (1,)


def test_an_endless_temperature_is_local_training(federation, make_model, make_trainer, assert_same) -> None:
    """Every client keeps its own model where W is the identity."""
    states = []
    for strategy in (Local(num_epochs=2), FedAux(num_epochs=2, mask_sparsity_weight=0.0, similarity_temperature=1e12)):
        trainer = make_trainer(precision="64-true")
        trainer.fit(make_model(FedAuxClient), federation, strategy)
        states.append(trainer.run.executor.state().parameters)
    assert_same(states[1], states[0], tolerance=1e-9)


def test_the_signature_is_a_copy_of_the_projection(federation, make_model, make_trainer) -> None:
    trainer = make_trainer()
    trainer.fit(make_model(FedAuxClient), federation, FedAux())

    projections = trainer.run.executor.state().parameters["projection"]

    torch.testing.assert_close(trainer.run.strategy.signatures.rows_CD, projections)
    metrics = {"server/similarity_min", "server/similarity_mean", "server/similarity_max", "server/mixing_breadth"}
    assert all(metrics <= set(row) for row in trainer.run.history)


@both_executors
def test_the_trained_or_the_mixed_models_are_the_result(executor, pulls, make_trainer) -> None:
    rows = []
    for predict in ("trained", "mixed"):
        trainer = make_trainer(num_rounds=2, executor=executor(), precision="64-true", monitor="val/loss")
        trainer.fit(model(), pulls, strategy(predict=predict))
        rows.append(trainer.run.history[-1])
    by_trained, by_mixed = rows

    assert by_trained["val/loss"] == by_mixed["trained/val/loss"] != by_mixed["val/loss"]
    assert by_trained["mixed/val/loss"] == by_mixed["val/loss"]


def test_a_net_without_projection_is_refused(federation, make_model, make_trainer) -> None:
    with pytest.raises(ValueError, match="ProjectionGCN"):
        make_trainer().fit(FedAuxClient(GCN), federation, FedAux())


def test_another_client_is_refused(federation, make_model, make_trainer) -> None:
    with pytest.raises(ValueError, match="FedAux needs clients of the class FedAuxClient, but model is ClientModule"):
        make_trainer().fit(make_model(), federation, FedAux())


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="projection_lr_multiplier"):
        FedAuxClient(projection_lr_multiplier=0.0)
    with pytest.raises(ValueError, match="similarity_temperature"):
        FedAux(similarity_temperature=-1.0)


def test_fedaux_is_the_paper_and_says_where_the_rest_is() -> None:
    paper = FedAux()
    assert (paper.similarity_temperature, paper.mask_sparsity_weight, paper.common_share) == (10.0, 0.0, 0.0)
    client = FedAuxClient()
    assert (client.projection_lr_multiplier, client.projection_weight_decay) == (1.0, None)
    for name in ("sign_free", "mix_projection"):
        with pytest.raises(TypeError, match=rf"FedAux\({name}=...\): {name} moved to LocalAux"):
            FedAux(**{name: True})


def test_the_paper_mixes_the_vectors_and_our_variant_keeps_them(federation, make_model, make_trainer) -> None:
    for kind, mixed in ((FedAux, True), (LocalAux, False)):
        trainer = make_trainer(num_rounds=1)
        trainer.fit(make_model(kind), federation, kind())
        assert ("projection" in trainer.run.strategy.models) == mixed
        assert type(trainer.run.strategy) is kind


def test_the_released_codes_classifier_has_a_mask(federation, make_model, make_trainer) -> None:
    trainer = make_trainer(num_rounds=1)
    trainer.fit(make_model(FedAux, masked_head=True), federation, FedAux())
    masks = {name for name in trainer.run.executor.state().parameters if name.startswith("head") and "mask" in name}
    assert masks == {"head.0.mask"}
    assert not masks & set(trainer.run.strategy.models)
