"""What all sources of examples share, tables and generated data; the real files where they are."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from example_files import save, write_example_files

from fl_lightning.data import (
    FL60,
    GLEAM,
    HAR,
    METRLA,
    PEMSBAY,
    TPT48,
    CompCars,
    Examples,
    ExampleSource,
    GRDAToy,
    HeterogeneousCIFAR10,
    Landmine,
    PlantedRelations,
    RotatedMNIST,
    School,
    Vehicle,
)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_example_files(tmp_path_factory.mktemp("root"))


SMALL: list[ExampleSource] = [
    FL60(num_clients=5, num_examples=7),
    PlantedRelations(num_clients=5, num_groups=2, num_examples=7),
    GRDAToy("DG-15"),
    TPT48(2000, 2004),
    METRLA(history=3, horizon=2),
    PEMSBAY(history=3, horizon=2),
    RotatedMNIST(num_clients=8),
    HeterogeneousCIFAR10(num_clients=4),
    Vehicle(),
    School(),
    Landmine(),
    GLEAM(),
    HAR(),
    HAR(features="raw"),
    CompCars(),
]
DRAWN = (FL60, PlantedRelations, RotatedMNIST, HeterogeneousCIFAR10)


def name_of(value: object) -> str:
    return type(value).__name__


@pytest.mark.parametrize("source", SMALL, ids=name_of)
def test_every_source_is_determined_by_its_settings_and_the_seed(source: ExampleSource, root: Path):
    first, again, other = (source.load(root, seed) for seed in (0, 0, 1))
    assert first.names == again.names
    for one, two in zip((*first.x, *first.y), (*again.x, *again.y), strict=True):
        assert torch.equal(one, two)
    same = all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(first.x, other.x, strict=True))
    assert same == (not isinstance(source, DRAWN))
    assert json.loads(json.dumps(source.identity()))["source"] == type(source).__name__
    if first.relation_CC is not None:
        assert again.relation_CC is not None
        assert torch.equal(first.relation_CC, again.relation_CC)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (TPT48(), TPT48(first_year=2008)),
        (HAR(), HAR(features="raw")),
        (Vehicle(), Landmine()),
        (METRLA(), METRLA(stride=2)),
    ],
)
def test_identities_tell_settings_apart(one: ExampleSource, other: ExampleSource):
    assert one.identity() != other.identity()


@pytest.mark.parametrize(
    "source", [source for source in SMALL if not isinstance(source, FL60 | PlantedRelations)], ids=name_of
)
def test_missing_files_name_the_path_the_layout_and_the_remedy(source: ExampleSource, tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=rf"no {tmp_path}/\w+/.*expected an \.npz file with .*FL_DATA_ROOT"):
        source.load(tmp_path, 0)


def test_files_of_another_layout_are_refused(tmp_path: Path):
    save(tmp_path, "school/school", X=np.ones((2, 3)))
    with pytest.raises(ValueError, match=r"school\.npz cannot be read .*the expected layout.*`task` \(M,\) client"):
        School().load(tmp_path, 0)
    (tmp_path / "school/school.npz").write_bytes(b"no archive")
    with pytest.raises(ValueError, match="does not hold the expected layout"):
        School().load(tmp_path, 0)
    save(tmp_path, "gleam/gleam", X=np.ones((2, 3)), y=np.array([1, 2]), task=np.zeros(2))
    with pytest.raises(ValueError, match="labels are -1 and 1, or 0 and 1"):
        GLEAM().load(tmp_path, 0)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: FL60(num_clients=0), "num_clients must be .* got 0"),
        (lambda: PlantedRelations(strength=1.5), "strength must be .* got 1.5"),
        (lambda: PlantedRelations(num_clients=3), "num_clients must be .* got 3"),
        (lambda: GRDAToy("DG-16"), "'DG-16' is not a data set"),
        (lambda: TPT48(2010, 2009), "first_year=2010 is after"),
        (lambda: TPT48(scaling="month"), "scaling='month'"),
        (lambda: METRLA(stride=0), "stride must be .* got 0"),
        (lambda: METRLA(statistics_share=0.0), "statistics_share must be .* got 0.0"),
        (lambda: RotatedMNIST(examples_per_client=0), "examples_per_client must be .* got 0"),
        (lambda: HeterogeneousCIFAR10(classes_per_client=11), "classes_per_client=11"),
        (lambda: HAR(features="pixels"), "features='pixels'"),
    ],
)
def test_senseless_settings(build: Callable[[], ExampleSource], message: str):
    with pytest.raises(ValueError, match=message):
        build()


def test_fl60_has_the_sizes_and_the_relations_of_its_formula():
    examples = FL60(num_clients=300, num_examples=60, noise=0.0).load(Path(), 0)
    axis_C2 = torch.stack([x_N2[1] for x_N2 in examples.x])  # without noise a class 1 example is its mean
    radius_C = axis_C2.norm(dim=1)
    unit_C2 = axis_C2 / radius_C[:, None]
    angle_C = torch.atan2(unit_C2[:, 1], unit_C2[:, 0]) % (2 * math.pi)
    torch.testing.assert_close(radius_C, angle_C / math.pi, rtol=0, atol=1e-4)
    torch.testing.assert_close(torch.stack([x_N2[0] for x_N2 in examples.x]), -axis_C2)
    assert all(y_N.bincount().tolist() == [30, 30] for y_N in examples.y)
    assert float(angle_C.mean()) == pytest.approx(math.pi, abs=0.3)

    assert examples.relation_CC is not None
    cosine_CC = unit_C2 @ unit_C2.T
    for low in (-1.0, -0.5, 0.0, 0.5):
        among = ((cosine_CC >= low) & (cosine_CC < low + 0.5)).fill_diagonal_(False)
        expected = float((1 + cosine_CC[among]).mean() / 2)
        assert float(examples.relation_CC[among].mean()) == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
def test_planted_relations_are_as_strong_as_asked(strength):
    """Planes of one group agree by the strength, those of two groups by chance; the graph shows the groups."""
    source = PlantedRelations(strength, 120, 4, 2000, num_features=8, noise=0.0, within=0.5, between=0.1)
    examples = source.load(Path(), 3)
    sides_CF = torch.stack(
        [((2.0 * y_N - 1)[:, None] * x_NF).mean(dim=0) for x_NF, y_N in zip(examples.x, examples.y, strict=True)]
    )
    cosine_CC = torch.nn.functional.normalize(sides_CF) @ torch.nn.functional.normalize(sides_CF).T
    group_C = torch.arange(120) % 4
    same_CC = (group_C[:, None] == group_C).fill_diagonal_(False)
    assert float(cosine_CC[same_CC].mean()) == pytest.approx(strength, abs=0.07)
    assert examples.relation_CC is not None
    other_CC = group_C[:, None] != group_C
    assert float(examples.relation_CC[same_CC].mean()) == pytest.approx(0.5, abs=0.05)
    assert float(examples.relation_CC[other_CC].mean()) == pytest.approx(0.1, abs=0.02)


def test_wrong_labels_of_planted_relations_are_their_share():
    clean, noisy = (PlantedRelations(1.0, 20, 2, 500, noise=noise).load(Path(), 0) for noise in (0.0, 0.2))
    wrong = torch.stack([a != b for a, b in zip(clean.y, noisy.y, strict=True)]).double().mean()
    assert float(wrong) == pytest.approx(0.2, abs=0.02)


def test_fl60_noise_is_a_standard_deviation():
    examples = FL60(1, 20_000, noise=0.5).load(Path(), 0)
    torch.testing.assert_close(
        examples.x[0][examples.y[0] == 1].std(dim=0), torch.tensor([0.5, 0.5]), rtol=0.05, atol=0
    )


def test_tables_are_grouped_by_client(root: Path):
    examples = Vehicle().load(root, 0)
    table = np.load(root / "vehicle_sensor/vehicle_ditto_train.npz")["X"]
    assert examples.names == ("sensor-00", "sensor-01", "sensor-02")
    assert [y_N.tolist() for y_N in examples.y] == [[1, 1], [0, 0, 1], [1]]
    np.testing.assert_array_equal(examples.x[1].numpy(), table[[0, 3, 4]])


def test_the_full_table_goes_before_the_sub_sample(root: Path, tmp_path: Path):
    for path, size in (("vehicle_sensor/vehicle_ditto_train", 3), ("vehicle_sensor/vehicle", 5)):
        save(tmp_path, path, X=np.ones((size, 2)), y=np.ones(size), task=np.zeros(size))
    assert len(Vehicle().load(tmp_path, 0).x[0]) == 5


def test_standardized_regression(root: Path):
    examples = School().load(root, 0)
    x, y = torch.cat(examples.x), torch.cat(examples.y)
    assert examples.num_outputs == 1
    assert y.shape == (6, 1)
    torch.testing.assert_close(y.mean(), torch.tensor(0.0))
    torch.testing.assert_close(x.std(dim=0, correction=0), torch.tensor([1.0, 1.0, 0.0]))
    assert x[:, 2].tolist() == [1.0] * 6  # the intercept
    assert torch.cat(School(standardize=False).load(root, 0).y).T.tolist() == [[20, 30, 10, 40, 50, 60]]


def test_har_windows_and_their_statistics(root: Path):
    examples = HAR(features="raw").load(root, 0)
    halves = np.load(root / "har/har_raw.npz")["halves"]
    assert examples.names == ("subject-01", "subject-02")
    assert examples.y[0].tolist() == [1, 3, 0, 1]
    np.testing.assert_array_equal(examples.x[0][1].numpy(), np.concatenate([halves[3], halves[4]], axis=1))

    raw = torch.cat(examples.x)
    statistics = torch.cat(HAR().load(root, 0).x)
    assert statistics.shape == (8, 72)

    def standardized(values: torch.Tensor) -> torch.Tensor:
        return (values - values.mean()) / values.std(correction=0)

    length = raw[:, 3:6].norm(dim=1)  # of the angular velocity: signal 10 of 12
    for block, of_vector in enumerate(
        [length.mean(1), length.std(1, correction=0), length.amin(1), length.amax(1), length.square().mean(1)]
    ):
        torch.testing.assert_close(statistics[:, 12 * block + 10], standardized(of_vector), rtol=1e-4, atol=1e-4)
    change = raw[:, 0].diff(dim=1).abs().mean(dim=1)
    torch.testing.assert_close(statistics[:, 60], standardized(change), rtol=1e-4, atol=1e-4)


X, CLASSES = torch.zeros(3, 2), torch.tensor([0, 1, 1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"names": ("a", "a")}, "2 names \\(1 different\\)"),
        ({"x": (X,)}, "2 names .*1 x"),
        ({"x": (X, X.double())}, "b: x is torch.float64"),
        ({"x": (X, torch.zeros(3, 4))}, "b: x is .*the X of the other clients, \\(2,\\)"),
        ({"y": (CLASSES, CLASSES + 1)}, "b: the class of example 1 is 2, but the classes are 0 to 1"),
        ({"y": (CLASSES, CLASSES[:2])}, "b: y is torch.int64 \\(2,\\) for 3 examples"),
        ({"y": (CLASSES, torch.zeros(3, 2))}, "b: y is torch.float32"),
        ({"y": (torch.zeros(3), torch.zeros(3))}, "a: y is torch.float32 \\(3,\\)"),
        ({"relation_CC": torch.eye(2)}, "with a zero diagonal"),
        ({"relation_CC": torch.tensor([[0.0, 1.0], [0.5, 0.0]])}, "symmetric"),
        ({"relation_CC": torch.tensor([[0.0, -1.0], [-1.0, 0.0]])}, "non-negative"),
    ],
)
def test_examples_must_fit_together(change: dict[str, Any], message: str):
    sound = {"names": ("a", "b"), "x": (X, X), "y": (CLASSES, CLASSES), "num_outputs": 2}
    assert Examples(**sound).num_clients == 2
    with pytest.raises(ValueError, match=message):
        Examples(**{**sound, **change})


@pytest.mark.parametrize(
    ("source", "path", "num_clients", "smallest", "largest", "shape", "num_edges"),
    [
        (GRDAToy("DG-15"), "grda_toy", 15, 100, 100, (2,), 56),
        (GRDAToy("DG-60"), "grda_toy", 60, 100, 100, (2,), 545),
        (TPT48(), "tpt48", 48, 125, 125, (6,), 105),
        (TPT48(first_year=2008), "tpt48", 48, 12, 12, (6,), 105),
        (METRLA(), "traffic", 207, 1993, 1993, (12, 1), 1313),
        (Vehicle(), "vehicle_sensor", 23, 7, 534, (100,), None),
        (School(), "school", 139, 22, 251, (28,), None),
        (Landmine(), "landmine", 29, 44, 69, (9,), None),
        (HAR(features="raw"), "har", 30, 281, 409, (9, 128), None),
        (RotatedMNIST(examples_per_client=50), "MNIST", 40, 50, 50, (1, 28, 28), None),
        (HeterogeneousCIFAR10(examples_per_client=50), "CIFAR10", 30, 50, 50, (3, 32, 32), None),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, ExampleSource) else "",
)
def test_real_files(
    source: ExampleSource,
    path: str,
    num_clients: int,
    smallest: int,
    largest: int,
    shape: tuple[int, ...],
    num_edges: int | None,
):
    root = os.environ.get("FL_DATA_ROOT")
    if not root or not Path(root, path).is_dir():
        pytest.skip(f"FL_DATA_ROOT has no {path}")
    if (Path(root, path) / "metr_la_speed.npz").exists() or (Path(root, path) / "vehicle.npz").exists():
        pytest.skip(f"{path} holds the full data set")
    examples = source.load(Path(root), 0)
    sizes = [len(x) for x in examples.x]
    assert (examples.num_clients, min(sizes), max(sizes)) == (num_clients, smallest, largest)
    assert all(x.shape[1:] == shape and bool(x.isfinite().all()) for x in examples.x)
    if examples.relation_CC is None:
        assert num_edges is None
    else:
        assert int((examples.relation_CC > 0).sum()) == 2 * (num_edges or 0)


@pytest.mark.parametrize(
    ("path", "source", "changes", "message"),
    [
        (
            "school/school",
            School(),
            {"X": np.full((6, 3), np.inf)},
            r"`X`\[0, 0\] is inf, which is not a finite float32",
        ),
        ("school/school", School(), {"X": np.full((6, 3), 1e300)}, r"`X`\[0, 0\] is 1e\+300, which is not a finite"),
        ("school/school", School(), {"y": np.ones(5)}, r"the arrays are `X` \(6, 3\), `y` \(5,\).*expected an .npz"),
        ("school/school", School(), {"X": np.ones(6)}, r"the arrays are `X` \(6,\)"),
        ("school/school", School(), {"X": np.ones((6, 0))}, "none of them empty"),
        ("school/school", School(), {"task": np.full(6, 1.5)}, r"`task`\[0\] is 1.5, which is not a whole number"),
        ("school/school", School(), {"task": np.full(6, "a")}, "`task` holds texts"),
        ("school/school", School(), {"X": np.ones((6, 3)) * 1j}, "`X` is of type complex128"),
        ("har/har_raw", HAR(), {"win": np.full((8, 2), 9)}, r"`win`\[0\] is \[9, 9\], but there are the halves 0 to 8"),
        ("har/har_raw", HAR(), {"y": np.full(8, 6)}, "class of example 0 is 6, but the classes are 0 to 5"),
        ("tpt48/tpt48", TPT48(2000, 2004), {"temp_F": np.ones((2, 5, 12))}, "x of example 0 is not finite"),
        (
            "MNIST/mnist",
            RotatedMNIST(4),
            {"x_test": np.ones((20, 28, 28))},
            "`x_test` is float64; give images as uint8",
        ),
        ("MNIST/mnist", RotatedMNIST(4), {"y_test": np.full(20, 10)}, "is 10, but the classes are 0 to 9"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_unsound_arrays_are_refused_with_the_place(
    tmp_path: Path, path: str, source: ExampleSource, changes: dict[str, Any], message: str
):
    write_example_files(tmp_path)
    save(tmp_path, path, **{**np.load(tmp_path / f"{path}.npz"), **changes})
    with pytest.raises(ValueError, match=message) as refusal:
        source.load(tmp_path, 0)
    assert "\n" not in str(refusal.value)
