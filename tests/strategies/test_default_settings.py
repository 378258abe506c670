"""With nothing set but the data a strategy comes to what its own configuration comes to, less two points."""

import os
from pathlib import Path

import default_settings
import pytest
import yaml
from default_settings import MARGIN, accuracy, arguments_of, data_alone, rows, write_default

ROWS = {row["config"]: row for row in rows()}
#: A graph on which wrong defaults are seen within seconds.
SMALL = {
    "source": {"class_path": "PlantedCommunities", "init_args": {"num_nodes": 600, "num_features": 128, "noise": 0.3}},
    "partitioner": "GivenPartitioner",
}
SIX = ("fedavg_cora", "fedopt_cora", "pfedme_cora", "dpsgd_cora", "local_aux_cora", "sfl_cora")


def test_the_table_names_every_configuration_of_cora_and_of_fl60() -> None:
    actual = {path.stem for kind in ("cora", "fl60") for path in default_settings.ROOT.glob(f"configs/*_{kind}.yaml")}
    actual |= {"fedaux_cora", "fedsheafhn_cora"}  # of configs/papers
    others = {"fedavg_mask_cora", "fedavg_links_cora"}  # LocalAux without its mixing, and another task
    assert set(ROWS) == actual - others


@pytest.mark.parametrize("name", list(ROWS))
def test_what_is_left_of_a_configuration_are_its_data(name: str) -> None:
    config = yaml.safe_load(default_settings.file_of(name).read_text())
    left = data_alone(config)
    assert set(left) == {"data", "strategy", "trainer"}
    settings = {} if isinstance(left["strategy"], str) else left["strategy"]["init_args"]
    assert set(settings) <= {"topology"}


@pytest.mark.parametrize("name", SIX)
@pytest.mark.filterwarnings("ignore")
def test_defaults_are_near_the_own_configuration_on_a_small_graph(name: str, tmp_path: Path) -> None:
    config = yaml.safe_load(default_settings.file_of(name).read_text())
    relations = {key: value for key, value in config["data"].items() if key == "relation_graph"}
    config["data"] = SMALL | relations
    actual = {}
    for kind, content in {"own": config, "default": data_alone(config)}.items():
        path = tmp_path / f"{kind}.yaml"
        path.write_text(yaml.safe_dump(content))
        actual[kind] = accuracy(arguments_of(path, 10, 0), tmp_path)
    assert actual["default"] >= actual["own"] - MARGIN


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ROWS))
@pytest.mark.filterwarnings("ignore")
def test_defaults_reach_the_own_configuration(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    if name.endswith("_cora") and not (Path(os.environ.get("FL_DATA_ROOT", "")) / "Cora").exists():
        pytest.skip("Cora is not there (FL_DATA_ROOT)")
    config = write_default(name, tmp_path)
    seeds = [int(seed) for seed in row["seeds"].split()]
    metrics = [accuracy(arguments_of(config, int(row["rounds"]), seed), tmp_path) for seed in seeds]
    assert sum(metrics) / len(metrics) >= float(row["own"]) - MARGIN
