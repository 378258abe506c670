"""Damaged checkpoints and configurations: refused in one line, or what they say is what is done."""

import shutil
from pathlib import Path

import hypothesis
import pytest
import yaml
from campaign.command import call, empty_folder
from campaign.configuration import NAMES, small, write
from campaign.damage import damaged
from campaign.record import SEED, Record
from campaign.test_command_lines import same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fl_lightning.run import checkpoint

LAST = Path("runs", "small", "version_0", "checkpoints", "last.ckpt")
BINARY = [b"\x00" * 100, bytes(range(256)), b"\xff\xfe\x00\x01", b"PK\x03\x04", b"\x80\x04."]
EVERY_ROUND = {
    "class_path": "FederatedCheckpoint",
    "init_args": {"every_seconds": 0, "every_n_rounds": 1, "keep": None},
}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A checkpoint of two rounds."""
    with empty_folder() as folder:
        assert call(["fit", f"--config={write(small('FedSheafHN'), folder / 'small.yaml')}"], seconds=60).code == 0
        return (folder / LAST).read_bytes()


def is_refused(path: Path) -> bool:
    """Whether a checkpoint is refused in one line that names it."""
    try:
        checkpoint.read(path)
    except ValueError as error:
        assert str(path) in str(error)  # noqa: PT017
        return "\n" not in str(error)
    return False


@pytest.mark.parametrize("seed_of_places", range(4))
def test_damaged_checkpoints(written: bytes, seed: int, seed_of_places: int, tmp_path: Path, record: Record) -> None:
    path = tmp_path / "last.ckpt"
    lost = []
    versions = damaged(written, seed + seed_of_places) + BINARY
    for number, version in enumerate(versions):
        path.write_bytes(version)
        survived = is_refused(path)
        record.count("damaged checkpoints", survived=survived)
        lost += [] if survived else [number]
    assert not lost, f"seed {seed + seed_of_places}: versions {lost} were read"


@settings(max_examples=100, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@hypothesis.seed(SEED)
@given(st.data())
def test_checkpoints_with_other_bytes(written: bytes, tmp_path: Path, record: Record, data: st.DataObject) -> None:
    """Any bytes in any place."""
    index = data.draw(st.integers(0, len(written) - 1))
    other = data.draw(st.binary(min_size=1, max_size=64))
    version = written[:index] + other + written[index + len(other) :]
    path = tmp_path / "last.ckpt"
    path.write_bytes(version)
    survived = version == written or is_refused(path)
    record.count("damaged checkpoints", survived=survived)
    assert survived


def test_a_damaged_last_gives_way_to_the_one_before(seed: int, record: Record) -> None:
    with empty_folder() as folder:
        config = small("FedAvg", num_rounds=2, callbacks=[EVERY_ROUND])
        words = ["fit", f"--config={write(config, folder / 'small.yaml')}"]
        assert call(words).code == 0  # ends after a round, as every call does
        whole = (folder / LAST).read_bytes()
        shutil.copytree("runs", "sound")
        for version in damaged(whole, seed)[::4]:
            shutil.rmtree("runs")
            shutil.copytree("sound", "runs")
            (folder / LAST).write_bytes(version)
            ending = call([*words, "--ckpt_path=last"])
            warned = "it is damaged or not a checkpoint" in ending.said and "; continuing from " in ending.said
            survived = ending.code == 0 and warned and checkpoint.read(folder / LAST)["round"] == 2
            record.count("damaged last.ckpt beside a sound checkpoint", survived=survived)
            assert survived, f"seed {seed}: {ending}"
        shutil.rmtree("runs")
        shutil.copytree("sound", "runs")
        for path in LAST.parent.iterdir():
            path.write_bytes(path.read_bytes()[:-1])
        ending = call([*words, "--ckpt_path=last"])
        assert ending.is_one_line, ending
        assert str(LAST) in ending.said


def damaged_configurations(number: int, seed: int, record: Record) -> list[str]:
    """What is wrong with so many runs of damaged files."""
    faults = []
    with empty_folder() as folder:
        path, versions = folder / "small.yaml", []
        for index, name in enumerate(NAMES):
            whole = write(small(name), path).read_bytes()
            versions += [(name, version) for version in damaged(whole, seed + index)]
        versions += [("", version) for version in BINARY]
        for name, version in versions[:: max(1, len(versions) // number)]:
            path.write_bytes(version)
            shutil.rmtree("runs", ignore_errors=True)
            ending = call(["fit", "--config=small.yaml", "--trainer.logger=false"])
            survived = ending.is_one_line or (ending.is_long and ending.config is not None)
            if ending.code == 0 and ending.config:
                given_config = yaml.safe_load(version)
                survived = all(
                    same(value, ending.config.get(group)) for group, value in given_config.items() if group != "data"
                )
            record.count("damaged configurations", survived=survived)
            if not survived:
                faults.append(f"seed {seed}, {name}: {version!r}\n{ending.crash}\n{ending.said}")
    return faults


def test_damaged_configurations(seed: int, record: Record) -> None:
    faults = damaged_configurations(25, seed, record)
    assert not faults, "\n".join(faults)


@pytest.mark.slow
def test_many_damaged_configurations(seed: int, record: Record) -> None:
    faults = damaged_configurations(10**6, seed + 1, record)
    assert not faults, "\n".join(faults)
