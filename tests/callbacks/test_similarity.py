from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fl_lightning import FederatedDataModule, Participation, SequentialExecutor, StackedExecutor
from fl_lightning.callbacks import SimilarityLogger
from fl_lightning.callbacks.similarity import correlation, draw_matrices, recovery
from fl_lightning.data import ClientSplit, GivenPartitioner, SuperClusterSBM
from fl_lightning.round.payload import flatten
from fl_lightning.round.selection import Selection
from fl_lightning.run.loggers import TensorBoardLogger
from fl_lightning.strategies import FedAux, FedAvg, FedPub, FedSheafHN, Kin, Local

COMMUNITIES = np.array([0, 1, 0, 2, 1, 2])


def planted(noise: float = 0.0) -> np.ndarray:
    draw = np.random.default_rng(0).normal(size=(6, 6))
    return (COMMUNITIES[:, None] == COMMUNITIES) + noise * (draw + draw.T)


class Pictures:
    """A logger that takes pictures, as W&B's."""

    def __init__(self) -> None:
        self.pictures: list[tuple[str, int, tuple[int, ...]]] = []

    def log_image(self, key: str, images: list[np.ndarray], step: int) -> None:
        self.pictures.append((key, step, images[0].shape))

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        pass

    def finalize(self, status: str) -> None:
        pass


@pytest.fixture(scope="module")
def groups(tmp_path_factory) -> FederatedDataModule:
    """Six clients of two super-clusters."""
    source = SuperClusterSBM(num_nodes=180, num_blocks=6, intra_edge_probability=(0.2, 0.5))
    cache = str(tmp_path_factory.mktemp("cache"))
    data = FederatedDataModule(source, GivenPartitioner(), ClientSplit(), cache_dir=cache, root=cache)
    data.setup()
    return data


@pytest.mark.parametrize("noise", [0.0, 0.05])
@pytest.mark.parametrize("scale", [1.0, 1e-4])
def test_planted_communities_are_recovered(noise, scale) -> None:
    score = recovery(0.99 + scale * planted(noise), COMMUNITIES)

    assert score.nmi == pytest.approx(1)
    assert score.neighbors == 1
    assert score.correlation > 0.9


def test_a_matrix_of_other_groups_scores_low() -> None:
    other = np.array([0, 0, 1, 1, 2, 2])
    score = recovery((other[:, None] == other).astype(float), COMMUNITIES)

    assert score.nmi < 0.7
    assert score.neighbors < 0.5
    assert score.correlation < 0


def test_unknown_and_constant_matrices() -> None:
    constant = recovery(np.ones((6, 6)), COMMUNITIES)
    partly = planted()
    partly[2], partly[:, 2] = np.nan, np.nan

    assert np.isnan([constant.nmi, constant.correlation]).all()
    assert constant.neighbors == pytest.approx(1 / 5)  # chance
    assert recovery(partly, COMMUNITIES).nmi == pytest.approx(1)
    assert correlation(planted(), partly) == pytest.approx(1)
    assert np.isnan(recovery(np.full((6, 6), np.nan), COMMUNITIES).nmi)


@pytest.mark.full
@pytest.mark.parametrize("executor", [SequentialExecutor, StackedExecutor])
@pytest.mark.parametrize(
    ("kind", "own"),
    [
        (FedAux, {"projection", "mixing"}),
        (FedPub, {"functional embedding", "mixing"}),
        (FedAvg, set()),
    ],
)
def test_files_scores_and_pictures(kind, own, executor, groups, make_model, make_trainer, tmp_path) -> None:
    pictures = Pictures()
    trainer = make_trainer(
        num_rounds=4,
        executor=executor(),
        logger=[pictures, TensorBoardLogger(str(tmp_path / "board"))],
        callbacks=SimilarityLogger(rounds=[0, -1], ground_truth=True, communities="super_cluster"),
    )
    trainer.fit(make_model(kind), groups, kind())

    folder = trainer.run.folder / "similarity"
    assert sorted(path.name for path in folder.iterdir()) == [
        f"round_{index:04d}.{ending}" for index in (0, 3) for ending in ("npz", "png")
    ]
    saved = np.load(folder / "round_0003.npz")
    matrices = {*own, "parameters", "read-out", "pooled embedding"}
    assert set(saved) == matrices | {"clients", "communities"}
    assert saved["communities"].tolist() == [0, 0, 0, 1, 1, 1]
    assert saved["clients"].tolist() == list(trainer.run.registry.names)
    for name in matrices:
        assert saved[name].shape == (6, 6)
        assert np.isfinite(saved[name]).all()
    if "mixing" in own:
        np.testing.assert_allclose(saved["mixing"].sum(axis=1), 1, rtol=1e-6)
    assert [(key, step) for key, step, _ in pictures.pictures] == [("similarity", 0), ("similarity", 3)]
    assert pictures.pictures[0][2][2] == 3
    events = EventAccumulator(str(next(tmp_path.glob("board/*/version_0")))).Reload()
    assert [event.step for event in events.Images("similarity")] == [0, 3]
    scored = {row["round"] for row in trainer.run.history if "similarity/read-out_nmi" in row}
    assert scored == {0, 3}
    assert 0 <= trainer.run.history[3]["similarity/pooled_embedding_nmi"] <= 1


@pytest.mark.parametrize("executor", [SequentialExecutor, StackedExecutor])
def test_watching_changes_nothing(executor, groups, make_model, make_trainer, assert_same) -> None:
    states = []
    for callbacks in ([], [SimilarityLogger(every_n_rounds=1, ground_truth=True)]):
        trainer = make_trainer(executor=executor(), callbacks=callbacks)
        trainer.fit(make_model(), groups, FedAvg())
        states.append(trainer.run.executor.state())
    assert_same(states[1].tensors(), states[0].tensors())


def test_matrices_of_the_collaboration_graph(groups, make_model, make_trainer) -> None:
    trainer = make_trainer(callbacks=SimilarityLogger())
    trainer.fit(make_model(), groups, FedSheafHN(init_epochs=2, num_neighbors=2, hidden_channels=8))

    saved = np.load(trainer.run.folder / "similarity" / "round_0002.npz")

    assert set(saved) == {"clients", "embedding", "adjacency", "updates"}
    assert (saved["adjacency"] == saved["adjacency"].T).all()
    assert (saved["adjacency"].sum(axis=1) >= 2).all()
    assert np.trace(saved["adjacency"]) == 0


def test_clients_that_were_away_stay_empty(groups, make_model, make_trainer) -> None:
    trainer = make_trainer(
        num_rounds=1,
        callbacks=SimilarityLogger(communities="super_cluster"),
        participation=Participation(num_clients=4),
    )
    trainer.fit(make_model(), groups, FedAvg())

    saved = np.load(trainer.run.folder / "similarity" / "round_0000.npz")

    assert np.isfinite(saved["parameters"]).any(axis=1).sum() == 4
    assert np.isfinite(saved["parameters"]).sum() == 16


def test_unseen_clients_are_no_part_of_a_round(federation, make_model, make_trainer, monkeypatch) -> None:
    monkeypatch.setattr(Selection, "_is_better", lambda selection, value, best: best is None)  # the first is chosen
    joins = Participation(held_out_fraction=0.4)
    trainer = make_trainer(num_rounds=2, participation=joins, callbacks=SimilarityLogger(every_n_rounds=1))
    result = trainer.fit(make_model(), federation, FedAvg(num_epochs=1))  # unseen clients join as if in round 1
    assert "unseen/test/acc" in result
    with np.load(trainer.run.folder / "similarity" / "round_0001.npz") as kept:
        assert kept["parameters"].shape == (3, 3)


def test_cosines_are_of_what_was_sent(groups, make_model, make_trainer) -> None:
    trainer = make_trainer(num_rounds=1, callbacks=SimilarityLogger(readout=["head.bias"]), precision="64-true")
    trainer.fit(make_model(), groups, FedAvg())

    saved = np.load(trainer.run.folder / "similarity" / "round_0000.npz")

    rows = flatten(trainer.run.executor.state().parameters)
    expected = torch.nn.functional.cosine_similarity(rows[:, None], rows[None], dim=2)
    np.testing.assert_allclose(saved["parameters"], expected.numpy(), atol=1e-6)
    bias = trainer.run.executor.state().parameters["head.bias"]
    expected = torch.nn.functional.cosine_similarity(bias[:, None], bias[None], dim=2)
    np.testing.assert_allclose(saved["read-out"], expected.numpy(), atol=1e-6)


def test_nothing_to_show_is_nothing_written(groups, make_model, make_trainer) -> None:
    trainer = make_trainer(callbacks=SimilarityLogger())
    trainer.fit(make_model(), groups, Local())

    assert not (trainer.run.folder / "similarity").exists()


def test_an_unknown_attribute_is_refused(groups, make_model, make_trainer) -> None:
    with pytest.raises(ValueError, match=r"no 'color': .*super_cluster"):
        make_trainer(callbacks=SimilarityLogger(communities="color")).fit(make_model(), groups, FedAvg())


@pytest.mark.parametrize("count", [1, 5])
def test_pictures_of_many_and_constant_matrices(count) -> None:
    matrices = {f"matrix {index}": np.full((30, 30), float(index)) for index in range(count)}
    figure = draw_matrices(matrices, [f"client-{client:02d}" for client in range(30)], title="all alike")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()

    assert len(figure.axes) == 2 * count
    assert len(figure.axes[0].get_xticks()) <= 10


@pytest.mark.parametrize("settings", [{"every_n_rounds": 0}, {"rounds": []}])
def test_impossible_settings_are_refused(settings) -> None:
    with pytest.raises(ValueError, match="SimilarityLogger"):
        SimilarityLogger(**settings)


@pytest.mark.full
def test_groups_of_the_partition_are_the_communities(federation, make_model, make_trainer) -> None:
    trainer = make_trainer(callbacks=[SimilarityLogger(every_n_rounds=1)])
    trainer.fit(make_model(), federation, Kin())

    assert 0 <= trainer.run.history[-1]["similarity/embedding_neighbors"] <= 1
    assert "similarity/mixing_neighbors" in trainer.run.history[-1]


def test_communities_are_those_of_the_last_fit() -> None:
    logger = SimilarityLogger()
    for groups in ((0, 1, 1), ()):
        run = SimpleNamespace(registry=SimpleNamespace(groups=groups), training_clients=(0, 2))
        logger.on_fit_start(SimpleNamespace(run=run))
        assert (logger.community_C is None) == (not groups)


def test_rounds_beyond_the_last_are_no_others() -> None:
    def due(*rounds: int) -> list[int]:
        logger = SimilarityLogger(rounds=rounds)
        trainers = [SimpleNamespace(num_rounds=4, run=SimpleNamespace(round_idx=index)) for index in range(4)]
        return [trainer.run.round_idx for trainer in trainers if logger._due(trainer)]

    assert (due(0, 3), due(-1, -4), due(4, 7, -5)) == ([0, 3], [0, 3], [])
