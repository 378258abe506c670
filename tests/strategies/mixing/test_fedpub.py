import functools
import math
import warnings

import pytest
import torch
from both_executors import both_executors
from torch import Tensor
from torch.optim import SGD

from fl_lightning import ClientModule, Payload
from fl_lightning.batches.base import single
from fl_lightning.batches.graphs import GraphCollator
from fl_lightning.federation import Federation
from fl_lightning.models import GCN, MaskedGCN
from fl_lightning.relations.similarity import cosine_similarity, mixing_breadth, softmax_mixing
from fl_lightning.round.context import Context
from fl_lightning.strategies import FedPub
from fl_lightning.strategies.client_outputs import FunctionalEmbedding, proxy_graph
from fl_lightning.strategies.objectives import sparse_masks

CPU = torch.device("cpu")
#: Three signatures at 0, 60 and 90 degrees.
SIGNATURES = [[1.0, 0.0], [0.5, math.sqrt(3) / 2], [0.0, 2.0]]
NAMES = ("convs.0.weight", "convs.0.mask", "head.bias")


def federation_of(num_clients: int, training=None) -> Federation:
    return Federation(
        num_clients=num_clients,
        training_clients=tuple(range(num_clients)) if training is None else training,
        num_features=3,
        parameters={name: torch.full((2,), 0.5, dtype=torch.float64) for name in NAMES},
        seed=3,
        device=CPU,
    )


def upload(clients, values, signatures) -> Payload:
    return Payload(
        clients=tuple(clients),
        parameters={name: torch.tensor(values, dtype=torch.float64) for name in ("convs.0.weight", "head.bias")},
        extras={"functional_embedding": torch.tensor(signatures, dtype=torch.float64)},
        num_examples=torch.tensor([1, 5, 2][: len(values)]),
    )


def prepared(training=None, num_clients: int = 3, **settings) -> FedPub:
    strategy = FedPub(**settings)
    strategy.setup(federation_of(num_clients, training))
    return strategy


VALUES = [[1.0, -1.0], [2.0, 0.0], [-4.0, 3.0]]


def test_a_round_of_mixing_by_hand() -> None:
    strategy = prepared(similarity_temperature=2.0)
    (stage,) = strategy.stages(0)

    strategy.aggregate(stage, upload((0, 1, 2), VALUES, SIGNATURES))

    cosines = [[1, 0.5, 0], [0.5, 1, math.sqrt(3) / 2], [0, math.sqrt(3) / 2, 1]]
    received = strategy.configure(stage, (2, 0)).parameters["head.bias"]
    for row, client in enumerate((2, 0)):
        weights = [math.exp(2 * cosine) for cosine in cosines[client]]
        for column in range(2):
            mean = sum(w * v[column] for w, v in zip(weights, VALUES, strict=True)) / sum(weights)
            assert float(received[row, column]) == pytest.approx(mean, rel=1e-12)
    assert stage.upload == ("convs.0.weight", "head.bias")
    metrics = strategy.metrics()
    assert metrics["server/similarity_min"] == pytest.approx(0, abs=1e-12)
    assert metrics["server/similarity_max"] == pytest.approx(math.sqrt(3) / 2)
    matrices = strategy.matrices()
    torch.testing.assert_close(matrices["functional embedding"], torch.tensor(cosines, dtype=torch.float64))
    torch.testing.assert_close(matrices["mixing"].sum(dim=1), torch.ones(3, dtype=torch.float64))


def test_clients_that_were_away_keep_their_model_and_are_not_mixed() -> None:
    strategy = prepared(similarity_temperature=0.0)
    (stage,) = strategy.stages(0)

    strategy.aggregate(stage, upload((0, 2), [VALUES[0], VALUES[2]], [SIGNATURES[0], SIGNATURES[2]]))

    received = strategy.configure(stage, (0, 1, 2)).parameters["head.bias"]
    assert received.tolist() == [[-1.5, 1.0], [0.5, 0.5], [-1.5, 1.0]]
    unknown = strategy.matrices()["mixing"].isnan()
    assert unknown.tolist() == [[False, True, False], [True, True, True], [False, True, False]]


def test_unseen_clients_receive_the_average_then_what_is_like_them() -> None:
    strategy = prepared(training=(0, 1, 2), num_clients=4, similarity_temperature=3.0)
    (stage,) = strategy.stages(0)
    strategy.aggregate(stage, upload((0, 1, 2), VALUES, SIGNATURES))
    models = {name: model.clone() for name, model in strategy.models.items()}

    first = strategy.configure(stage, (3,)).parameters["head.bias"][0]
    strategy.onboard(stage, upload((3,), [[9.0, 9.0]], [[0.0, 1.0]]))
    second = strategy.configure(stage, (3,)).parameters["head.bias"][0]

    torch.testing.assert_close(first, models["head.bias"][:3].mean(dim=0))
    weights = torch.tensor([0, math.sqrt(3) / 2, 1], dtype=torch.float64).mul(3).softmax(dim=0)
    torch.testing.assert_close(second, weights @ models["head.bias"][:3])
    assert all(torch.equal(strategy.models[name], model) for name, model in models.items())


@pytest.mark.parametrize("temperature", [0.0, 0.3, 10.0, 1000.0])
def test_mixing_rows_sum_to_one(temperature) -> None:
    signatures = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    mixing = softmax_mixing(cosine_similarity(signatures), temperature)

    torch.testing.assert_close(mixing.sum(dim=1), torch.ones(6, dtype=torch.float64))
    if temperature == 0:
        assert torch.equal(mixing, torch.full((6, 6), 1 / 6, dtype=torch.float64))
        assert mixing_breadth(mixing) == pytest.approx(1)
    if temperature == 1000:
        torch.testing.assert_close(mixing, torch.eye(6, dtype=torch.float64))
        assert mixing_breadth(mixing) == pytest.approx(1 / 6)


def test_both_penalties_have_the_gradients_of_the_paper() -> None:
    penalty = sparse_masks(NAMES, ("convs.0.weight", "head.bias"), sparsity_weight=0.1, proximal_weight=0.5)
    parameters = {
        "convs.0.weight": torch.tensor([1.0, -2.0], requires_grad=True),
        "convs.0.mask": torch.tensor([0.3, -4.0], requires_grad=True),
        "head.bias": torch.tensor([5.0], requires_grad=True),
    }
    anchor = {"convs.0.weight": torch.tensor([0.0, 1.0]), "head.bias": torch.tensor([4.0])}

    value = penalty(parameters, Context(anchor=anchor))
    value.backward()

    assert value.item() == pytest.approx(0.1 * 4.3 + 0.5 * (1 + 9 + 1))
    assert parameters["convs.0.weight"].grad.tolist() == [1.0, -3.0]
    assert parameters["convs.0.mask"].grad.tolist() == pytest.approx([0.1, -0.1])
    assert parameters["head.bias"].grad.tolist() == [1.0]
    assert sparse_masks(NAMES, (), sparsity_weight=0.0, proximal_weight=0.0) is None


def test_the_proxy_graph_is_a_random_partition() -> None:
    graph = proxy_graph(3, torch.Generator().manual_seed(0), num_blocks=5, nodes_per_block=100)
    source, target = graph.edge_index_2E

    assert (source // 100 == target // 100).all()
    assert set(zip(source.tolist(), target.tolist(), strict=True)) == set(
        zip(target.tolist(), source.tolist(), strict=True)
    )
    assert graph.num_edges / (5 * 100 * 99) == pytest.approx(0.1, abs=0.01)
    assert float(graph.x_NF.mean()) == pytest.approx(0, abs=0.1)
    assert float(graph.x_NF.std()) == pytest.approx(1, abs=0.1)


def test_the_functional_embedding_sees_the_proxy_graph_only(graphs) -> None:
    client = ClientModule(functools.partial(MaskedGCN, hidden_channels=4))
    client.build(6, 3)
    client.double().eval()
    proxy = proxy_graph(6, torch.Generator().manual_seed(0), nodes_per_block=4)
    batches = GraphCollator([*graphs, proxy], device=CPU, dtype=torch.float64)
    output = FunctionalEmbedding(single(batches([5])))
    parameters = {name: parameter.detach() for name, parameter in client.net.named_parameters()}

    actual = [output(client, parameters, single(batches([index])), Context()) for index in (0, 3)]

    torch.testing.assert_close(actual[0], client.net(output.proxy).embedding.mean(dim=0).detach())
    assert torch.equal(*actual)


@both_executors
def test_masks_stay_and_become_sparse(executor, federation, make_model, make_trainer) -> None:
    trainer = make_trainer(executor=executor(), num_rounds=6)
    sizes = []
    for weight in (0.0, 0.05):
        trainer.fit(
            make_model(FedPub, optimizer=functools.partial(SGD, lr=0.1)),
            federation,
            FedPub(num_epochs=2, mask_sparsity_weight=weight),
        )
        parameters = trainer.run.executor.state().parameters
        sizes.append(parameters["convs.0.mask"].abs().mean().item())
        assert not torch.equal(parameters["convs.0.mask"][0], parameters["convs.0.mask"][1])
        assert not any("mask" in name for name in trainer.run.strategy.models)
    assert sizes[1] < 0.97 * sizes[0]


def test_no_temperature_is_plain_averaging() -> None:
    strategy = prepared(similarity_temperature=0.0)
    (stage,) = strategy.stages(0)

    strategy.aggregate(stage, upload((0, 1, 2), VALUES, SIGNATURES))

    expected = torch.tensor(VALUES, dtype=torch.float64).mean(dim=0).expand(3, 2)
    torch.testing.assert_close(strategy.configure(stage, (0, 1, 2)).parameters["convs.0.weight"], expected)


def test_uniform_mixing_is_reported_once() -> None:
    strategy = prepared()
    (stage,) = strategy.stages(0)
    alike: list[list[float]] = [[1.0, 0.001 * client] for client in range(3)]
    for _ in range(9):
        strategy.aggregate(stage, upload((0, 1, 2), VALUES, alike))
    with pytest.warns(UserWarning, match="mixing has been uniform"):
        strategy.aggregate(stage, upload((0, 1, 2), VALUES, alike))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(20):
            strategy.aggregate(stage, upload((0, 1, 2), VALUES, alike))


def test_a_model_without_masks_is_refused(federation, make_model, make_trainer) -> None:
    with pytest.raises(ValueError, match=r"\*mask\*"):
        make_trainer().fit(make_model(), federation, FedPub())


@pytest.mark.parametrize(
    "settings",
    [
        {"similarity_temperature": -1.0},
        {"mask_sparsity_weight": -1.0},
        {"proximal_weight": -1.0},
        {"num_proxy_blocks": 0},
    ],
    ids=str,
)
def test_impossible_settings_are_refused(settings) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        prepared(**settings)


def test_the_base_model_has_a_functional_embedding_too(federation, make_model, make_trainer) -> None:
    strategy = FedPub(num_epochs=1, personal=[], mask_sparsity_weight=0.0)

    result = make_trainer().fit(make_model(), federation, strategy)

    assert isinstance(make_model().net_factories[0](6, 3), GCN)
    assert 0 < result["test/acc"] <= 1
    signature: Tensor = strategy.signatures.rows_CD
    assert signature.shape == (5, 8)
