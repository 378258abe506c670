import csv
import itertools

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fl_lightning import Callback, Participation, SequentialExecutor, StackedExecutor
from fl_lightning.callbacks import TopologyLogger
from fl_lightning.callbacks.topology import draw_norms, draw_topology, short_names
from fl_lightning.relations.topology import Complete, ErdosRenyi, Ring, Star
from fl_lightning.run.loggers import TensorBoardLogger
from fl_lightning.strategies import DPSGD, DFedU, FedAvg, FedPub, FedSheafHN, Local, SheafFMTL

pytestmark = pytest.mark.filterwarnings("ignore:the maps cannot make the clients agree")


class Pictures:
    """A logger that takes pictures, as W&B's."""

    def __init__(self) -> None:
        self.pictures: list[tuple[str, int]] = []

    def log_image(self, key: str, images: list[np.ndarray], step: int) -> None:
        assert images[0].shape[2] == 3
        self.pictures.append((key, step))

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        pass

    def finalize(self, status: str) -> None:
        pass


@pytest.mark.parametrize("executor", [SequentialExecutor, StackedExecutor])
def test_pictures_files_and_loggers(executor, federation, make_model, make_trainer, tmp_path) -> None:
    pictures = Pictures()
    trainer = make_trainer(
        num_rounds=5,
        executor=executor(),
        logger=[pictures, TensorBoardLogger(str(tmp_path / "board"))],
        callbacks=TopologyLogger(every_n_rounds=2),
    )
    strategy = SheafFMTL(topology=Ring(), regularization=0.1, projection_fraction=0.1)
    trainer.fit(make_model(), federation, strategy)

    assert (trainer.run.folder / "topology.png").stat().st_size > 10_000
    files = sorted(path.name for path in (trainer.run.folder / "map_norms").iterdir())
    assert files == [f"round_{index:04d}.{ending}" for index in (1, 3, 4) for ending in ("csv", "png")]
    assert pictures.pictures == [("topology", 0), ("map_norms", 1), ("map_norms", 3), ("map_norms", 4)]
    events = EventAccumulator(str(next(tmp_path.glob("board/*/version_0")))).Reload()
    assert [event.step for event in events.Images("topology")] == [0]
    assert [event.step for event in events.Images("map_norms")] == [1, 3, 4]
    with (trainer.run.folder / "map_norms" / "round_0004.csv").open() as file:
        (_, *header), *rows = csv.reader(file)
    assert header == [row[0] for row in rows] == list(trainer.run.registry.names)
    written = np.array([row[1:] for row in rows], dtype=float)
    np.testing.assert_array_equal(written, strategy.matrices()["map_norms"].double())
    assert ((written > 0) == strategy.adjacency_CC.numpy()).all()


@pytest.mark.parametrize(
    "build",
    [
        lambda: SheafFMTL(topology=Ring(), regularization=0.3, map_step_size=0.1, projection_fraction=0.3),
        lambda: DFedU(topology=Star(), regularization=0.3),
        lambda: DPSGD(topology=Complete()),
    ],
    ids=["SheafFMTL", "DFedU", "DPSGD"],
)
def test_the_objective_is_losses_and_coupling(build, federation, make_model, make_trainer) -> None:
    strategy = build()
    seen: list[float] = []

    class Recompute(Callback):
        def on_evaluate(self, trainer, metrics, prefix) -> None:
            losses = trainer.run.scores[""].extras["train/loss"]
            coupling = 0.0
            if isinstance(strategy, DFedU):
                rows = strategy.models_CP.double()
                square_CC = (rows[:, None] - rows).square().sum(dim=2)
                coupling = 0.3 / 4 * float((strategy.adjacency_CC * square_CC).sum())
            elif isinstance(strategy, SheafFMTL):
                message_M = strategy.restriction_maps.project([row.float() for row in strategy.models_CP])
                coupling = 0.3 / 4 * float(strategy.restriction_maps.residual(message_M).square().sum())
            seen.append(float((losses[:, 0] / losses[:, 1]).sum()) + coupling)

    trainer = make_trainer(
        num_rounds=4,
        evaluate_every=2,
        callbacks=[TopologyLogger(), Recompute()],
        participation=Participation(num_clients=4),
    )
    trainer.fit(make_model(dropout=0.0), federation, strategy)

    logged = [row.get("server/objective") for row in trainer.run.history]
    assert [value is None for value in logged] == [True, False, True, False]
    assert logged[1::2] == pytest.approx(seen, rel=1e-4)
    if not isinstance(strategy, DPSGD):
        assert trainer.run.history[-1]["server/coupling"] > 1e-6


def test_watching_changes_nothing(federation, make_model, make_trainer, assert_same) -> None:
    states = []
    for callbacks in ([], [TopologyLogger(every_n_rounds=1)]):
        trainer = make_trainer(callbacks=callbacks)
        trainer.fit(make_model(), federation, SheafFMTL(topology=Ring(), projection_fraction=0.1))
        states.append((trainer.run.executor.state().tensors(), trainer.run.strategy.state_dict()))
    assert_same(states[1], states[0])


def test_a_graph_that_changes_is_drawn_anew(federation, make_model, make_trainer) -> None:
    """FedSheafHN computes its graph after the clients' first training, and again in round 1 and 3."""
    pictures, actual = Pictures(), []

    class Watch(Callback):
        def on_round_end(self, trainer, metrics) -> None:
            actual.append(trainer.run.strategy.matrices()["adjacency"])

    trainer = make_trainer(num_rounds=5, logger=[pictures], callbacks=[Watch(), TopologyLogger(every_n_rounds=1)])
    strategy = FedSheafHN(init_epochs=2, num_neighbors=1, refresh_every=2, hidden_channels=8)
    trainer.fit(make_model(), federation, strategy)

    changed = [0, *(index for index in range(1, 5) if not torch.equal(actual[index], actual[index - 1]))]
    assert pictures.pictures == [("topology", index) for index in changed]
    assert len(changed) > 1
    assert not (trainer.run.folder / "map_norms").exists()


def test_a_run_without_loggers_and_of_one_round(federation, make_model, make_trainer) -> None:
    trainer = make_trainer(num_rounds=1, callbacks=TopologyLogger(), participation=Participation(held_out_fraction=0.2))
    trainer.fit(make_model(), federation, SheafFMTL(topology=Complete(), projection_fraction=0.1))
    with (trainer.run.folder / "map_norms" / "round_0000.csv").open() as file:
        assert len(list(csv.reader(file))) == 1 + 4


@pytest.mark.parametrize("algorithm", [Local(), FedAvg(), FedPub()], ids=lambda value: type(value).__name__)
def test_a_strategy_without_a_graph_is_refused(algorithm, federation, make_model, make_trainer) -> None:
    trainer = make_trainer(callbacks=TopologyLogger())
    with pytest.raises(ValueError, match=rf"TopologyLogger: {type(algorithm).__name__} has no graph of its clients"):
        trainer.fit(make_model(algorithm), federation, algorithm)
    assert trainer.run.round_idx == 0


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"TopologyLogger\.every_n_rounds must be at least 1, got 0"):
        TopologyLogger(every_n_rounds=0)


def test_short_names() -> None:
    assert short_names(["school-000", "school-138"]) == ["000", "138"]
    assert short_names(["Ohio", "New Mexico"]) == ["Ohio", "New Mexico"]
    assert short_names(["client-3"]) == ["3"]


@pytest.mark.parametrize("count", [1, 2, 40])
@pytest.mark.parametrize("kind", ["client", "a rather long name of a"])
def test_labels_stay_apart(count, kind) -> None:
    """Every client is named in both pictures, in letters of at least 5.5 points; neighbors' ticks do not touch."""
    adjacency = ErdosRenyi(edge_probability=0.15)(count, 0).numpy() if count > 2 else Ring()(count, 0).numpy()
    names = [f"client-{index:02d}" if kind == "client" else f"{kind} {index}" for index in range(count)]
    for figure in (
        draw_topology(adjacency.astype(float), names, [5] * count),
        draw_norms(adjacency.astype(float), names),
    ):
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        axes, bar = figure.axes
        assert "examples" in bar.get_xlabel() or "norm" in bar.get_ylabel()
        texts = [*axes.texts[:count], *axes.get_yticklabels()]
        assert {text.get_text() for text in texts} >= set(short_names(names))
        assert min(text.get_fontsize() for text in texts if text.get_text()) >= 5.5
        boxes = [label.get_window_extent() for label in axes.get_yticklabels()]
        assert not any(first.overlaps(second) for first, second in itertools.pairwise(boxes))


def test_more_clients_than_labels() -> None:
    adjacency = Ring()(139, 0).numpy().astype(float)
    figure = draw_norms(adjacency, [f"school-{index:03d}" for index in range(139)])
    assert [label.get_text() for label in figure.axes[0].get_xticklabels()][:3] == ["000", "003", "006"]


def test_parts_of_a_graph_stand_apart() -> None:
    parts = np.kron(np.eye(2), np.ones((3, 3)) - np.eye(3))
    figure = draw_topology(parts, [f"client-{index}" for index in range(6)], range(6))
    position = figure.axes[0].collections[1].get_offsets()
    distance = np.linalg.norm(position[:, None] - position, axis=2)
    assert distance[:3, 3:].min() > 1.2 * distance[:3, :3].max()
