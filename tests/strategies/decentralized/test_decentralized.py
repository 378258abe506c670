"""The decentralized family: hand-derived rounds, special cases, convergence, bytes and resuming."""

import functools
import itertools
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from both_executors import both_executors
from line_clients import (
    PATH,
    Affine,
    Edges,
    Lines,
    Slope,
    Wide,
    affine_client,
    along,
    lines,
    small_federation,
    upload_of,
)
from torch import Tensor, nn

from fl_lightning import (
    Callback,
    FederatedDataModule,
    Participation,
    Payload,
    SequentialExecutor,
    StackedExecutor,
)
from fl_lightning.callbacks import CommunicationLedger
from fl_lightning.relations.topology import Complete, Ring, Star, Topology
from fl_lightning.strategies import DPSGD, DFedU, Local, SheafFMTL
from fl_lightning.strategies.decentralized import DenseMaps, ImplicitMaps
from fl_lightning.strategies.decentralized.map_initialization import GaussianInitialization, IdentityInitialization

pytestmark = pytest.mark.filterwarnings("ignore:the maps cannot make the clients agree")


class Watch(Callback):
    """Keeps what the strategy holds before the first round and after each, and who took part."""

    def __init__(self) -> None:
        self.models: list[Tensor] = []
        self.participants: list[tuple[int, ...]] = []

    def on_fit_start(self, trainer: Any) -> None:
        self.models.append(trainer.run.strategy.models_CP.clone())
        if hasattr(trainer.run.strategy, "maps"):
            self.map_initializations = matrices(trainer.run.strategy)

    def on_stage_end(self, trainer: Any, stage: Any, payload: Payload) -> None:
        self.participants.append(payload.clients)
        self.models.append(trainer.run.strategy.models_CP.clone())


def identity_maps(scale: float = 1.0):
    return functools.partial(DenseMaps, initialization=IdentityInitialization(scale=scale))


def matrices(strategy: SheafFMTL) -> dict[tuple[int, int], np.ndarray]:
    """The maps by edge, with the clients' own indices."""
    actual = {}
    for i in range(len(strategy.sizes)):
        rank = int(strategy.rank_C[i])
        neighbors = [j for j in strategy.order if strategy.adjacency_CC[i, j]]
        lengths = [int(strategy.restriction_maps.num_rows_CC[rank, strategy.rank_C[j]]) for j in neighbors]
        parts = strategy.restriction_maps.matrix(rank).split(lengths)
        actual |= {(i, j): part.numpy().copy() for j, part in zip(neighbors, parts, strict=True)}
    return actual


def replay(designs, targets, models, maps, participants, *, alpha: float, lam: float, eta: float = 0.0):
    """Eqs. 18 and 19 as they are printed, for f_i the mean squared error of a linear model."""
    models, maps = [m.copy() for m in models], {edge: p.copy() for edge, p in maps.items()}
    for present in participants:
        edges = [(i, j) for i, j in maps if i in present and j in present]
        message = {(i, j): maps[i, j] @ models[i] for i, j in edges}
        new = [model.copy() for model in models]
        for i in present:
            gradient = 2 / len(targets[i]) * designs[i].T @ (designs[i] @ models[i] - targets[i])
            pull = sum(
                (maps[k, j].T @ (message[k, j] - message[j, k]) for k, j in edges if k == i),
                start=np.zeros_like(models[i]),
            )
            new[i] = models[i] - alpha * (gradient + lam * pull)
        models = new
        message = {(i, j): maps[i, j] @ models[i] for i, j in edges}
        for i, j in edges:
            maps[i, j] = maps[i, j] - eta * lam * np.outer(message[i, j] - message[j, i], models[i])
    return models, maps


def problem(data: FederatedDataModule, with_intercept: list[bool]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Design matrix and targets of each client's training examples."""
    designs, targets = [], []
    for client, whole in zip(data.clients, with_intercept, strict=True):
        x, y = client.x_NX[client.train_mask_N].double().numpy(), client.y_N[client.train_mask_N].double().numpy()
        designs.append(np.c_[x, np.ones(len(x))] if whole else x[:, :1])
        targets.append(y[:, 0])
    return designs, targets


# ---------------------------------------------------------------------------------------------- one round by hand


def test_dfedu_by_hand() -> None:
    relation_CC = torch.tensor([[0.0, 2.0, 0.0], [2.0, 0.0, 0.5], [0.0, 0.5, 0.0]])
    federation = small_federation(
        2, architectures=(), relation_CC=relation_CC, num_clients=3, training_clients=(0, 1, 2)
    )
    strategy = DFedU(regularization=0.4, edge_weights="relation")
    strategy.setup(federation)
    strategy.models_CP = torch.tensor([[1.0, -2.0], [3.0, 4.0], [-5.0, 0.5]], dtype=torch.float64)
    trained = upload_of([[0.5, -1.0], [2.0, 5.0], [-4.0, 1.0]])

    assert strategy.peer_bytes(strategy.stages(0)[0], trained) == [16, 32, 16]  # two float64 along each edge
    strategy.aggregate(strategy.stages(0)[0], trained)

    # L θ = 2 (θ0 - θ1), 2 (θ1 - θ0) + (θ1 - θ2) / 2, (θ2 - θ1) / 2; α λ = 0.2
    expected = torch.tensor([[1.3, 1.4], [0.4, 2.25], [-3.2, 1.35]], dtype=torch.float64)
    torch.testing.assert_close(strategy.models_CP, expected)
    # λ/2 (2 |θ0 - θ1|² + |θ1 - θ2|² / 2) = 0.2 (2 · 1.5325 + 13.77 / 2)
    assert strategy.metrics()["server/coupling"] == pytest.approx(1.99)


def test_sheaf_fmtl_by_hand() -> None:
    strategy = SheafFMTL(topology=Complete(), regularization=0.5, map_step_size=0.1, projection_fraction=1.0)
    strategy.setup(small_federation(2, 1))
    strategy.models_CP = torch.tensor([[3.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    maps = {"0": torch.tensor([[1.0, -1.0]]), "1": torch.tensor([[2.0]])}
    strategy.restriction_maps.load_state_dict(maps)

    strategy.aggregate(strategy.stages(0)[0], upload_of([[2.0, 2.0], [0.5, 0.0]]))

    # m01 = 2, m10 = -2: θ0 = (2, 2) - α λ 4 (1, -1), θ1 = 1/2 + α λ 4 · 2
    torch.testing.assert_close(strategy.models_CP, torch.tensor([[1.0, 3.0], [2.5, 0.0]], dtype=torch.float64))
    # now m01 = -2, m10 = 5: P01 = (1, -1) + η λ 7 (1, 3), P10 = 2 - η λ 7 · 5/2
    actual = matrices(strategy)
    np.testing.assert_allclose(actual[0, 1], [[1.35, 0.05]])
    np.testing.assert_allclose(actual[1, 0], [[1.125]])
    # the new maps disagree by 1.5 - 2.8125
    assert strategy.metrics()["server/coupling"] == pytest.approx(0.25 * 1.3125**2)


@both_executors
@pytest.mark.parametrize("num_participants", [4, 2, 3])
def test_rounds_are_those_of_the_printed_equations(executor, num_participants, make_trainer) -> None:
    """Three sizes of models on unequal data, with absent clients: they neither move nor are heard."""
    watch, data = Watch(), lines()
    strategy = SheafFMTL(topology=Edges(*PATH, (0, 3)), regularization=0.8, map_step_size=0.05, projection_fraction=0.7)
    trainer = make_trainer(
        num_rounds=5,
        executor=executor(),
        precision="64-true",
        callbacks=watch,
        participation=Participation(num_clients=num_participants),
    )
    trainer.fit(affine_client(Affine, Slope), data, strategy)

    whole = [True, False, True, False]
    designs, targets = problem(data, whole)
    start = [row[:size].numpy() for row, size in zip(watch.models[0], strategy.sizes, strict=True)]
    models, maps = replay(
        designs, targets, start, watch.map_initializations, watch.participants, alpha=0.05, lam=0.8, eta=0.05
    )
    assert strategy.sizes == [3, 1, 3, 1]
    assert watch.map_initializations[0, 1].shape == (1, 3)
    for row, size, expected in zip(strategy.models_CP, strategy.sizes, models, strict=True):
        np.testing.assert_allclose(row[:size], expected, rtol=1e-10)
        assert (row[size:] == 0).all()
    for edge, actual in matrices(strategy).items():
        np.testing.assert_allclose(actual, maps[edge], rtol=1e-10)
    for before, after, present in zip(watch.models, watch.models[1:], watch.participants, strict=False):
        assert len(present) == num_participants
        moved = (before != after).any(dim=1)
        assert moved.nonzero().flatten().tolist() == list(present)


@both_executors
@pytest.mark.parametrize("num_participants", [4, 2])
def test_dfedu_rounds_are_those_of_the_printed_equation(executor, num_participants, make_trainer) -> None:
    watch, data, weight = Watch(), lines(Lines(relation=0.7)), 0.7
    trainer = make_trainer(
        num_rounds=5,
        executor=executor(),
        precision="64-true",
        callbacks=watch,
        participation=Participation(num_clients=num_participants),
    )
    strategy = DFedU(regularization=0.8, edge_weights="relation")
    trainer.fit(affine_client(), data, strategy)

    designs, targets = problem(data, [True] * 4)
    maps = {edge: np.sqrt(weight) * np.eye(3) for i, j in PATH for edge in ((i, j), (j, i))}
    start = list(watch.models[0].numpy())
    expected, _ = replay(designs, targets, start, maps, watch.participants, alpha=0.05, lam=0.8)
    np.testing.assert_allclose(strategy.models_CP, expected, rtol=1e-7)  # the weights are float32


# ---------------------------------------------------------------------------------------------------- special cases


@both_executors
@pytest.mark.parametrize(
    ("weight", "settings"),
    [(1.0, {"topology": Ring()}), (1.0, {"edge_weights": "relation"}), (0.25, {"edge_weights": "relation"})],
    ids=["weights of one", "relation graph", "constant weight"],
)
def test_scaled_identity_maps_are_dfedu(executor, weight, settings, make_trainer, assert_same) -> None:
    topology = settings.get("topology")
    dfedu = DFedU(regularization=0.5, num_epochs=2, **settings)
    sheaf = SheafFMTL(
        topology=topology,
        regularization=0.5,
        num_epochs=2,
        map_step_size=0,
        projection_fraction=1,
        maps=identity_maps(scale=weight**0.5),
    )
    trainers = []
    for strategy in (dfedu, sheaf):
        trainer = make_trainer(
            num_rounds=4,
            executor=executor(),
            precision="64-true",
            callbacks=CommunicationLedger(),
            participation=Participation(num_clients=3),
        )
        trainer.fit(affine_client(), lines(Lines(relation=weight)), strategy)
        trainers.append(trainer)

    assert_same(sheaf.models_CP, dfedu.models_CP, tolerance=1e-12)
    assert_same(trainers[1].run.history, trainers[0].run.history, tolerance=1e-6)
    assert trainers[0].run.history[-1]["server/coupling"] > 0
    assert trainers[0].run.history[-1]["comm/bytes_total"] > 0


@both_executors
@pytest.mark.parametrize("kind", [DFedU, SheafFMTL])
def test_without_regularization_it_is_local(kind, executor, make_trainer, assert_same) -> None:
    runs = []
    for strategy in (Local(num_epochs=2), kind(topology=Ring(), regularization=0, num_epochs=2)):
        trainer = make_trainer(
            num_rounds=4,
            executor=executor(),
            callbacks=CommunicationLedger(),
            participation=Participation(num_clients=3),
        )
        result = trainer.fit(affine_client(momentum=0.9), lines(Lines(labels=True), batch_size=2), strategy)
        runs.append((trainer, result))
    (local, expected), (alone, result) = runs

    last = sorted(alone.run.executor.active)  # of the others the server keeps the models
    states = [trainer.run.executor.state().rows(last).tensors() for trainer in (alone, local)]
    assert_same(*states)
    assert_same(alone.run.scores[""].extras, local.run.scores[""].extras)
    assert_same({name: result[name] for name in expected}, expected)
    assert alone.run.history[-1]["comm/bytes_total"] == 0


@pytest.mark.parametrize("kind", [DFedU, SheafFMTL])
def test_a_strong_pull_leads_to_consensus(kind, make_trainer) -> None:
    """θ_i of λ -> ∞ is the minimizer of Σ f_i; α λ times the largest eigenvalue, 4, stays below 2."""
    data = lines()
    data.setup()
    designs, targets = problem(data, [True] * 4)
    normal = sum(x.T @ x / len(y) for x, y in zip(designs, targets, strict=True))
    pooled = np.linalg.solve(normal, sum(x.T @ y / len(y) for x, y in zip(designs, targets, strict=True)))
    spreads, distances = [], []
    for regularization in (0.5, 20.0):
        settings = {"topology": Complete(), "regularization": regularization}
        if kind is SheafFMTL:
            settings |= {"map_step_size": 0, "projection_fraction": 1, "maps": identity_maps()}
        strategy = kind(**settings)
        trainer = make_trainer(num_rounds=200, precision="64-true", evaluate_every=200)
        trainer.fit(affine_client(lr=0.02), data, strategy)
        spreads.append(float((strategy.models_CP - strategy.models_CP.mean(dim=0)).norm()))
        distances.append(np.linalg.norm(strategy.models_CP.numpy() - pooled))

    assert spreads[1] < spreads[0] / 15
    assert distances[1] < distances[0] / 10


def test_a_star_of_identity_maps_is_personalized_federated_learning() -> None:
    """Hanzely and Richtárik, 2020, eq. 2: each leaf is pulled by λ (θ_i - θ_center)."""
    strategy = SheafFMTL(
        topology=Star(), regularization=0.3, map_step_size=0, projection_fraction=1, maps=identity_maps()
    )
    strategy.setup(small_federation(2, 2, 2, 2))
    leaves = torch.tensor([[1.0, -2.0], [4.0, 0.5], [-3.0, 6.0]], dtype=torch.float64)
    strategy.models_CP = torch.cat([leaves.mean(dim=0, keepdim=True), leaves])
    before, gradient = strategy.models_CP.clone(), torch.tensor([[0.0, 0.0], [1.0, 2.0], [-1.0, 0.5], [0.2, -0.7]])

    strategy.aggregate(strategy.stages(0)[0], upload_of((before - 0.5 * gradient).tolist()))

    expected = before - 0.5 * (gradient + 0.3 * (before - before[0]))  # the mean of the leaves pulls the center nowhere
    torch.testing.assert_close(strategy.models_CP, expected)


def test_a_star_of_selections_is_hybrid_federated_learning() -> None:
    """The paper's eq. 16: P_i0 is the identity, P_0i selects the server's parameters that client i has."""
    strategy = SheafFMTL(
        topology=Star(), regularization=0.3, map_step_size=0, projection_fraction=1, maps=identity_maps()
    )
    sizes = (4, 2, 3, 1)
    strategy.setup(small_federation(*sizes))
    before = torch.tensor(
        [[1.0, -2.0, 0.5, 3.0], [4.0, 0.5, 0.0, 0.0], [-3.0, 6.0, 1.0, 0.0], [2.0, 0.0, 0.0, 0.0]], dtype=torch.float64
    )
    strategy.models_CP = before.clone()
    selected = torch.tensor([[1.0] * size + [0.0] * (4 - size) for size in sizes], dtype=torch.float64)
    gradient = selected * torch.tensor([[0.0], [1.0], [-1.0], [0.2]], dtype=torch.float64)

    strategy.aggregate(strategy.stages(0)[0], upload_of((before - 0.5 * gradient).tolist()))

    residual = selected * (before - before[0])  # θ_i - Π_i θ_0; the center's own is 0
    pull = residual.clone()
    pull[0] = -residual.sum(dim=0)
    torch.testing.assert_close(strategy.models_CP, before - 0.5 * (gradient + 0.3 * pull))


# ------------------------------------------------------------------------------------------------------ convergence


def sum_of_losses(data: FederatedDataModule, weight_decay: float, rows: Tensor) -> float:
    """Σ f_i(θ_i) in float64, with the weight decay's term."""
    total = 0.0
    for client, row in zip(data.clients, rows, strict=True):
        train = client.train_mask_N
        x, y = client.x_NX[train].double(), client.y_N[train]
        num_outputs = len(row) // 3
        logits = x @ row[: 2 * num_outputs].view(num_outputs, 2).T + row[2 * num_outputs :]
        if y.is_floating_point():
            total += float((logits - y.double()).square().mean())
        else:
            total += float(nn.functional.cross_entropy(logits, y))
        total += weight_decay / 2 * float(row.square().sum())
    return total


@pytest.mark.parametrize("fraction", [0.4, 1.0])
@pytest.mark.parametrize("labels", [False, True], ids=["least squares", "logistic regression"])
def test_the_objective_never_rises_where_the_theorem_holds(labels, fraction, make_trainer) -> None:
    """α < 2 / (N L), which leaves room for the coupling here, and η < 2 / (λ (|θ_i|² + |θ_j|²))."""
    decay, lam = 0.1, 0.5
    data = lines(Lines(labels=labels))
    data.setup()
    designs = [np.c_[client.x_NX, np.ones(client.size)][client.train_mask_N] for client in data.clients]
    largest = max(np.linalg.eigvalsh(x.T @ x / len(x))[-1] for x in designs)
    smoothness = largest * (0.5 if labels else 2) + decay
    alpha = 1.9 / (4 * smoothness)
    model = affine_client(lr=alpha, weight_decay=decay)
    strategy = SheafFMTL(topology=Ring(), regularization=lam, map_step_size=0.05, projection_fraction=fraction)
    objective: list[float] = []

    class Objective(Callback):
        def on_fit_start(self, trainer: Any) -> None:
            residual_M = strategy.restriction_maps.residual(strategy.restriction_maps.project(strategy._models()))
            strategy.coupling = lam / 4 * float(residual_M.square().sum())
            self.on_stage_end(trainer)
            assert alpha * (smoothness + lam * strategy.restriction_maps.largest_curvature()) < 2

        def on_stage_end(self, trainer: Any, *args: Any) -> None:
            loss = sum_of_losses(data, decay, strategy.models_CP)
            objective.append(loss + strategy.metrics()["server/coupling"])
            assert lam * 0.05 * strategy.restriction_maps.largest_map_curvature(strategy._models()) < 2

    trainer = make_trainer(num_rounds=60, precision="64-true", evaluate_every=60, callbacks=Objective())
    trainer.fit(model, data, strategy)

    assert len(objective) == 61
    assert all(after <= before + 1e-12 for before, after in itertools.pairwise(objective))
    assert objective[-1] < objective[0] - 0.1
    assert objective[0] - objective[10] > objective[50] - objective[60]


def test_a_pull_that_diverges_is_warned_of() -> None:
    federation = small_federation(3, 3, 3, 3)  # learning rate 0.5; the largest eigenvalue of a ring of four is 4
    for kind in (DFedU, functools.partial(SheafFMTL, maps=identity_maps(), projection_fraction=1, map_step_size=0)):
        with pytest.warns(UserWarning, match="the pull of the neighbors diverges: learning rate 0.5"):
            kind(topology=Ring(), regularization=1.01).setup(federation)
        kind(topology=Ring(), regularization=0.95).setup(federation)


def test_unscaled_normal_maps_diverge_for_large_models() -> None:
    federation = small_federation(*[3000] * 4, learning_rate=0.05)
    settings = {"topology": Ring(), "regularization": 0.01, "projection_fraction": 0.01, "map_step_size": 0}
    SheafFMTL(**settings).setup(federation)
    unscaled = SheafFMTL(
        **settings, maps=functools.partial(DenseMaps, initialization=GaussianInitialization(deviation=1.0))
    )
    with pytest.warns(UserWarning, match=r"sheaf Laplacian's largest eigenvalue .* start the maps smaller"):
        unscaled.setup(federation)

    unscaled.models_CP = torch.randn(4, 3000, dtype=torch.float64)
    couplings = []
    for _ in range(4):
        unscaled.aggregate(unscaled.stages(0)[0], upload_of(unscaled.models_CP.tolist()))
        couplings.append(unscaled.metrics()["server/coupling"])
    assert all(after > 1.5 * before for before, after in itertools.pairwise(couplings))


def test_maps_that_diverge_are_warned_of_once() -> None:
    strategy = SheafFMTL(topology=Ring(), regularization=0.5, map_step_size=0.1, projection_fraction=1)
    strategy.setup(small_federation(2, 2, 2))  # all models are zero
    with pytest.warns(UserWarning, match=r"the maps diverge: strategy\.map_step_size 0\.1 x .* is 4\.5"):
        strategy.aggregate(strategy.stages(0)[0], upload_of([[3.0, 6.0], [-6.0, 3.0], [0.0, 0.0]]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        strategy.aggregate(strategy.stages(0)[0], upload_of([[30.0, 6.0], [-6.0, 3.0], [0.0, 0.0]]))


# ------------------------------------------------------------------------------------- order, architectures, wiring


@pytest.mark.parametrize(
    "build",
    [
        DPSGD,
        functools.partial(DFedU, regularization=0.5),
        functools.partial(
            SheafFMTL, regularization=0.5, map_step_size=0.05, projection_fraction=0.7, maps=identity_maps()
        ),
    ],
    ids=["DPSGD", "DFedU", "SheafFMTL"],
)
def test_the_order_of_the_clients_changes_nothing(build, make_trainer, assert_same) -> None:
    runs = []
    for order in ((0, 1, 2, 3), (2, 0, 3, 1)):
        index = {client: position for position, client in enumerate(order)}
        topology = Edges(*((index[i], index[j]) for i, j in PATH))
        trainer = make_trainer(num_rounds=5, precision="64-true")
        result = trainer.fit(affine_client(), lines(Lines(order)), build(topology=topology))
        runs.append((trainer, result))
    (first, expected), (second, result) = runs

    assert_same(second.run.strategy.models_CP, first.run.strategy.models_CP[[2, 0, 3, 1]], tolerance=1e-12)
    assert_same(result, expected, tolerance=1e-6)
    for name, matrix in first.run.strategy.matrices().items():
        assert_same(second.run.strategy.matrices()[name], matrix[[2, 0, 3, 1]][:, [2, 0, 3, 1]], tolerance=1e-12)


def test_random_maps_belong_to_the_clients_names() -> None:
    sizes, names, order = (4, 2, 3), ("c", "a", "b"), (1, 2, 0)
    strategies = []
    for indices in ((0, 1, 2), order):
        federation = small_federation(
            *(sizes[index] for index in indices), client_names=tuple(names[index] for index in indices)
        )
        strategy = SheafFMTL(topology=Complete(), regularization=0.4, projection_fraction=1)
        strategy.setup(federation)
        rows = torch.arange(12.0).view(3, 4)[list(indices)]
        for row, size in zip(rows, strategy.sizes, strict=True):
            row[size:] = 0
        strategy.models_CP = rows.double()
        strategy.aggregate(strategy.stages(0)[0], upload_of((0.1 * rows).tolist()))
        strategies.append(strategy)
    first, second = strategies

    torch.testing.assert_close(second.models_CP, first.models_CP[list(order)])
    torch.testing.assert_close(
        second.matrices()["map_norms"], first.matrices()["map_norms"][list(order)][:, list(order)]
    )
    assert (first.matrices()["map_norms"] > 0).equal(first.adjacency_CC)
    assert first.peer_bytes(first.stages(0)[0], upload_of([[0.0] * 4] * 2, (0, 2))) == [2 * 3 * 8] * 2
    shuffled = SheafFMTL(topology=Complete(), regularization=0.4, projection_fraction=1)
    shuffled.setup(small_federation(4, 2, 3))
    assert not torch.equal(shuffled.matrices()["map_norms"], first.matrices()["map_norms"])


@pytest.mark.parametrize("maps", [DenseMaps, functools.partial(ImplicitMaps, max_rank=2)])
def test_architectures_together_on_both_executors(maps, make_trainer, assert_same) -> None:
    runs = []
    for executor in (SequentialExecutor(), StackedExecutor(max_padding=0.9), StackedExecutor(max_clients_per_group=1)):
        strategy = SheafFMTL(
            topology=Ring(), regularization=0.5, map_step_size=0.05, projection_fraction=0.5, num_epochs=2, maps=maps
        )
        trainer = make_trainer(num_rounds=5, executor=executor, precision="64-true")
        result = trainer.fit(affine_client(Affine, Slope, Wide), lines(Lines(labels=True), batch_size=2), strategy)
        runs.append((trainer, result))
    (reference, expected), *others = runs

    assert reference.run.strategy.sizes == [6, 2, 27, 6]
    assert reference.run.strategy.models_CP.shape == (4, 27)
    for trainer, result in others:
        assert_same(trainer.run.strategy.state_dict(), reference.run.strategy.state_dict(), tolerance=1e-9)
        assert_same(trainer.run.executor.state().parameters, reference.run.executor.state().parameters, tolerance=1e-9)
        assert_same(result, expected, tolerance=1e-6)


def test_more_architectures_than_clients(make_trainer) -> None:
    """The longest net belongs to nobody, but rows are as long as its parameters."""
    strategy = SheafFMTL(topology=Ring(), projection_fraction=0.5)
    trainer = make_trainer(num_rounds=2)
    trainer.fit(affine_client(Affine, Slope, Affine, Slope, Wide), lines(Lines(labels=True)), strategy)
    assert strategy.models_CP.shape == (4, 27)
    assert (strategy.models_CP[:, 6:] == 0).all()


def test_clients_held_out_join_with_what_they_train(make_trainer) -> None:
    trainer = make_trainer(participation=Participation(held_out_fraction=0.25), precision="64-true")
    strategy = DPSGD(topology=Complete(), num_epochs=20)
    trainer.fit(affine_client(lr=0.1), lines(), strategy)

    (new,) = trainer.run.unseen_clients
    own = trainer.run.executor.state().parameters["head.weight"][new]
    client = trainer.run.datamodule.clients[new]
    (predicted, bias) = trainer.run.executor.state().parameters["head.bias"][new], own
    error = (client.x_NX[client.test_mask_N].double() @ bias.T + predicted - client.y_N[client.test_mask_N]).square()
    assert trainer.run.scores["unseen/"].extras["test/mse"][0, 0] == pytest.approx(float(error.sum()), rel=1e-5)
    assert torch.equal(strategy.models_CP[new], torch.cat([p.flatten() for p in trainer.run.architectures[0].values()]))


@pytest.mark.parametrize("kind", [DPSGD, DFedU, SheafFMTL])
def test_the_topology_may_be_the_datas(kind, make_trainer) -> None:
    strategy = kind()
    make_trainer(num_rounds=1).fit(affine_client(), lines(Lines(relation=0.3)), strategy)
    assert torch.equal(strategy.adjacency_CC, along(PATH).bool())
    assert torch.equal(strategy.matrices()["adjacency"], along(PATH))

    drawn = kind()
    make_trainer(num_rounds=1).fit(affine_client(), lines(relation_graph=Star()), drawn)
    assert drawn.adjacency_CC[0].tolist() == [False, True, True, True]


@pytest.mark.parametrize(
    ("strategy", "source", "participation", "message"),
    [
        (DPSGD(), {}, {}, r"strategy\.topology is missing, and the data have no client relation graph"),
        (SheafFMTL(topology=Edges((0, 1), (2, 3))), {}, {}, "Edges on 4 clients is not connected"),
        (
            DFedU(topology=Edges(*PATH)),
            {},
            {"held_out_fraction": 0.5},
            "the topology without the clients that are held out on 2 clients is not connected",
        ),
        (
            DFedU(topology=Ring(), edge_weights="relation"),
            {},
            {},
            r"edge_weights is 'relation', but the data have none",
        ),
        (
            DFedU(topology=Ring(), edge_weights="relation"),
            {"relation": 0.5},
            {},
            r"1 edges of strategy\.topology have no weight",
        ),
    ],
)
def test_topologies_that_do_not_fit(strategy, source, participation, message, make_trainer) -> None:
    trainer = make_trainer(participation=Participation(**participation), seed=2)
    with pytest.raises(ValueError, match=message):
        trainer.fit(affine_client(), lines(Lines(**source)), strategy)


@pytest.mark.parametrize(
    "build",
    [
        lambda: DFedU(regularization=-1),
        lambda: SheafFMTL(regularization=-1),
        lambda: SheafFMTL(map_step_size=-0.1),
    ],
)
def test_impossible_settings(build) -> None:
    with pytest.raises(ValueError, match=r"strategy\.\w+ must not be negative"):
        build()


# ---------------------------------------------------------------------------------------------- bytes and messages


def test_bytes_by_hand() -> None:
    """A path of models of 8, 4, 6 and 6 numbers, γ = 1/2: messages of 2, 2 and 3 numbers along its edges."""
    row = [0.0] * 8
    first, second, third = (0, 1), (1, 2), (2, 3)
    # who is there, and along which edges both messages are sent, or one and a squared norm
    rounds = [
        (first, [first], []),
        ((0, 1, 2, 3), [second, third], [first]),
        ((0, 1, 2, 3), [], [first, second, third]),
        (first, [], [first]),  # 1 moves, and 2 does not hear of it; 2 and 3 stay as they were
        ((0, 1, 2, 3), [second], [first, third]),
        ((0, 2), [], []),  # no neighbors: both move, and nobody hears of it
        ((0, 1, 2, 3), [first, second, third], []),
        ((1,), [], []),
        ((), [], []),
        ((1, 2, 3), [second], [third]),
    ]
    length = {first: 2, second: 2, third: 3}
    for derive in (False, True):
        strategy = SheafFMTL(topology=Edges(*PATH), regularization=0.5, projection_fraction=0.5, derive_opening=derive)
        strategy.setup(small_federation(8, 4, 6, 6))
        stage = strategy.stages(0)[0]
        for clients, sent, derived in rounds:
            upload = upload_of([row] * len(clients), clients) if clients else Payload(clients=())
            numbers = sum(4 * length[edge] for edge in sent)
            numbers += sum(2 * (length[edge] + 1) if derive else 4 * length[edge] for edge in derived)
            assert sum(strategy.peer_bytes(stage, upload)) == 8 * numbers, (derive, clients)
            strategy.aggregate(stage, upload)


def test_maps_that_do_not_learn_need_one_message() -> None:
    upload = upload_of([[0.0] * 8] * 3)
    strategy = SheafFMTL(topology=Complete(), regularization=0.5, projection_fraction=0.5, map_step_size=0)
    strategy.setup(small_federation(8, 4, 6))
    assert strategy.peer_bytes(strategy.stages(0)[0], upload) == [8 * (2 + 3), 8 * (2 + 2), 8 * (3 + 2)]


def test_deriving_the_opening_halves_the_bytes_and_changes_nothing(make_trainer, assert_same) -> None:
    runs = []
    for derive in (False, True):
        strategy = SheafFMTL(
            topology=Ring(), regularization=0.5, map_step_size=0.05, projection_fraction=1, derive_opening=derive
        )
        trainer = make_trainer(num_rounds=4, callbacks=CommunicationLedger())
        trainer.fit(affine_client(), lines(), strategy)
        runs.append(trainer)
    sent, derived = runs

    assert_same(derived.run.strategy.state_dict(), sent.run.strategy.state_dict())
    numbers = 8 * 3  # directed edges of the ring, numbers of a message
    assert [row["comm/bytes_peer"] for row in sent.run.history] == [4 * 2 * numbers] * 4
    assert [row["comm/bytes_peer"] for row in derived.run.history] == [4 * 2 * numbers] + [4 * (numbers + 8)] * 3
    assert derived.run.history[-1]["comm/bytes_total"] == 4 * (2 * numbers + 3 * (numbers + 8))
    assert {row[f"comm/bytes_{way}"] for row in sent.run.history for way in ("up", "down")} == {0}


@pytest.mark.parametrize("maps", [DenseMaps, ImplicitMaps])
def test_openings_follow_from_the_closings_before(maps, make_trainer) -> None:
    """What a client derives is what its neighbor would send, along all edges whose ends were away together."""
    strategy = SheafFMTL(topology=Complete(), regularization=0.5, map_step_size=0.05, projection_fraction=1, maps=maps)
    compared: list[tuple[int, int]] = []

    class Spy(Callback):
        derived: Tensor | None = None

        def on_upload(self, trainer: Any, stage: Any, payload: Payload) -> Payload:
            if self.derived is not None:
                opening = strategy.restriction_maps.project(strategy._models()).view(4, 3, -1)
                for edge, (i, j) in enumerate(strategy.restriction_maps.edge_index_2E.T.tolist()):
                    if strategy.up_to_date_CC[i, j]:
                        sender, index = edge // 3, edge % 3
                        torch.testing.assert_close(
                            self.derived.view(4, 3, -1)[sender, index], opening[sender, index], rtol=1e-10, atol=1e-10
                        )
                        compared.append((i, j))
            return payload

        def on_fit_start(self, trainer: Any) -> None:
            derive = strategy.restriction_maps.messages_after_update

            def keep(*args: Any) -> Tensor:
                self.derived = derive(*args)
                return self.derived

            strategy.restriction_maps.messages_after_update = keep  # type: ignore[method-assign]

    trainer = make_trainer(
        num_rounds=8, precision="64-true", callbacks=Spy(), participation=Participation(num_clients=3)
    )
    trainer.fit(affine_client(), lines(), strategy)
    assert len(set(compared)) == 12
    assert len(compared) < 7 * 12


# --------------------------------------------------------------------------------------------------------- resuming


@pytest.mark.parametrize(
    "maps", [DenseMaps, functools.partial(ImplicitMaps, max_rank=2)], ids=["dense", "implicit and truncated"]
)
@both_executors
def test_resuming_is_exact_with_maps_and_bytes(executor, maps, make_trainer, assert_same, tmp_path) -> None:
    def run(num_rounds: int, ckpt_path: str | None = None):
        strategy = SheafFMTL(
            topology=Ring(),
            regularization=0.5,
            map_step_size=0.05,
            projection_fraction=0.5,
            maps=maps,
            derive_opening=True,
        )
        trainer = make_trainer(
            num_rounds=num_rounds,
            executor=executor(),
            callbacks=CommunicationLedger(),
            participation=Participation(num_clients=3),
        )
        trainer.fit(
            affine_client(Affine, Wide, momentum=0.9), lines(Lines(labels=True), batch_size=2), strategy, ckpt_path
        )
        return trainer

    whole, first = run(7), run(3)
    first.save_checkpoint(tmp_path / "v" / "three.ckpt")
    resumed = run(7, str(tmp_path / "v" / "three.ckpt"))

    start = SheafFMTL(topology=Ring(), projection_fraction=0.5, maps=maps)
    start.setup(whole.run.strategy.federation)
    for client in range(4):
        assert not torch.equal(
            whole.run.strategy.restriction_maps.matrix(client), start.restriction_maps.matrix(client)
        )
    start.load_state_dict(first.run.strategy.state_dict())
    assert start.metrics() == first.run.strategy.metrics()
    assert_same(resumed.run.strategy.state_dict(), whole.run.strategy.state_dict())
    assert_same(resumed.run.executor.state().tensors(), whole.run.executor.state().tensors())
    assert_same(resumed.run.history, whole.run.history)


def test_another_topology_is_refused(make_trainer, tmp_path) -> None:
    def run(topology: Topology, ckpt_path: str | None = None) -> None:
        trainer = make_trainer(num_rounds=1 if ckpt_path is None else 2)
        trainer.fit(affine_client(), lines(), DFedU(topology=topology), ckpt_path, resume_with_changes=True)
        trainer.save_checkpoint(tmp_path / "v" / "one.ckpt")

    run(Ring())
    with (
        pytest.warns(UserWarning, match="topology.class: Ring then, Complete now"),
        pytest.raises(ValueError, match="topology is not the one drawn now"),
    ):
        run(Complete(), str(tmp_path / "v" / "one.ckpt"))
