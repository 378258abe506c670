"""Small configurations of every strategy, as a file given to ``fl-train`` would have them."""

import contextlib
import copy
import functools
import inspect
import io
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from strategies.test_contract import STRATEGIES, TINY

from fl_lightning.cli import main

Configuration = dict[str, Any]
NAMES = [kind.__name__ for kind in STRATEGIES]
#: A projection fraction whose maps have 250 MB and not 2.5 GB.
_TINY = {**TINY, "topology": {"class_path": "fl_lightning.relations.Complete"}, "projection_fraction": 0.01}


def small(name: str, **trainer: Any) -> Configuration:
    """A strategy on 60 generated nodes of five clients."""
    (kind,) = (kind for kind in STRATEGIES if kind.__name__ == name)
    settings = {key: copy.deepcopy(value) for key, value in _TINY.items() if key in inspect.signature(kind).parameters}
    size = {"num_nodes": 60, "num_communities": 5, "num_classes": 3, "num_features": 6}
    return {
        "seed_everything": 0,
        "trainer": {"num_rounds": 1, "accelerator": "cpu", "logger": False, "run_name": "small", **trainer},
        "strategy": {"class_path": name, "init_args": settings},
        "data": {
            "source": {"class_path": "PlantedCommunities", "init_args": size},
            "partitioner": {"class_path": "GivenPartitioner"},
            "relation_graph": {"class_path": "fl_lightning.relations.Ring"},
        },
    }


@functools.cache
def _complete(name: str) -> str:
    trainer = {
        "executor": {"class_path": "StackedExecutor"},
        "participation": {"class_path": "Participation"},
        "callbacks": [{"class_path": "FederatedCheckpoint"}],
    }
    said = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        main(["fit", f"--config={write(small(name, **trainer), Path(folder) / 'small.yaml')}", "--print_config"])
    return said.getvalue()


def complete(name: str) -> Configuration:
    """The same with every setting that there is."""
    config: Configuration = yaml.safe_load(_complete(name))
    return config


def as_word(value: Any) -> str:
    """A value as it stands on a command line."""
    if isinstance(value, str):
        return value
    return yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True).split("\n...")[0].strip()


Place = tuple[str | int, ...]


def places(config: Any, path: Place = ()) -> Iterator[Place]:
    """Where every setting stands, classes and groups included."""
    items = config.items() if isinstance(config, dict) else enumerate(config) if isinstance(config, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def look_up(config: Any, path: Place) -> Any:
    """The setting at a place.

    Raises:
        KeyError: There is none.
    """
    for key in path:
        try:
            config = config[key]
        except (LookupError, TypeError) as error:
            raise KeyError(path) from error
    return config


def write(config: Configuration, path: Path) -> Path:
    """Save as YAML."""
    path.write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
    return path
