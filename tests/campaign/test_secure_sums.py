"""Secure sums: sites that lie in any step of them, and settings that change what a sum is."""

import dataclasses
import itertools
import math
import random
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from campaign.draws import drawn_settings
from campaign.record import Record
from campaign.test_hostile import mutated, tried
from remote.test_secure_settings import difference
from sites import OPEN, make_sites
from strategies.test_contract import STRATEGIES
from wrong_messages import Liar

from fl_lightning import Callback, FederatedDataModule
from fl_lightning.data import GivenPartitioner, PlantedCommunities
from fl_lightning.relations.topology import Ring
from fl_lightning.remote import LoopbackChannel, federate
from fl_lightning.remote.secure import weighting_of
from fl_lightning.run.failures import TooFewUpdates
from fl_lightning.strategies import FedAvg, FedOpt, FedPer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
HOSTILE, NAME = 1, "client-01"
STEPS = ("sum_keys", "sum_shares", "run", "sum_reveal", "evaluate")


class Reasons(Callback):
    """Notes why clients failed, over all rounds."""

    def __init__(self) -> None:
        self.why: dict[str, set[str]] = defaultdict(set)

    def on_round_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        for name, why in trainer.run.failures.items():
            self.why[name].add(why)


def lies(kind: type, number: int, seed: int, make: Any) -> Iterator[tuple[str, bool]]:
    """Whether the metrics of a federation of five are shares or missing, and nobody is blamed but the site that lies.

    Where the lie is in the numbers of a sum nobody can tell whose it is: the secure sum failed, and the run ends where
    all are.
    """
    for trial, step in itertools.product(range(number), STEPS):
        draw = random.Random(f"{seed} {kind.__name__} {step} {trial}")
        trainer, sites, model = make(kind, f"{step}{trial}")
        channel = LoopbackChannel([*sites[:HOSTILE], Liar(sites[HOSTILE], step, mutated, draw), *sites[HOSTILE + 1 :]])
        strategy = kind(num_epochs=1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                trainer.fit(model, federate(trainer, channel, strategy, secure=True), strategy)
            except TooFewUpdates as error:
                yield f"{step}, trial {trial}: {error}", step == "run" and "not its own" in str(error)
                continue
            except Exception as error:  # which is what the campaign looks for
                yield f"{step}, trial {trial}: {error!r}", False
                continue
        rows, why = trainer.run.history, next(each.why for each in trainer.callbacks if isinstance(each, Reasons))
        shares = all(
            math.isnan(value) or 0 <= value <= 1 for row in rows for name, value in row.items() if "acc" in name
        )
        blamed = {name for name, reasons in why.items() if any("the secure sum failed" not in each for each in reasons)}
        yield f"{step}, trial {trial}: {why}", shares and len(rows) == 2 and blamed <= {NAME}


@pytest.mark.parametrize("kind", [FedAvg, FedPer, FedOpt], ids=lambda kind: kind.__name__)
def test_sites_that_lie_in_secure_sums(
    kind: type,
    seed: int,
    record: Record,
    graphs: Any,
    given_clients: Any,
    make_model: Any,
    make_trainer: Any,
    tmp_path: Path,
) -> None:
    clients = given_clients(graphs[:5]).clients

    def make(kind: type, folder: str) -> tuple[Any, Any, Any]:
        sites = make_sites(clients, tmp_path / folder, lambda: (make_model(), kind(num_epochs=1)), OPEN)
        return make_trainer(num_rounds=2, callbacks=[Reasons()]), sites, make_model()

    tried(record, "sites that lie in secure sums", lies(kind, 6, seed, make))


def crossings(number: int, seed: int, data: FederatedDataModule) -> Iterator[tuple[str, bool]]:
    """Several settings of a strategy at once: the sum is what the open run comes to, or they are refused."""
    for kind, trial in itertools.product(STRATEGIES, range(number)):
        settings = drawn_settings(kind, random.Random(f"{seed} {kind.__name__} {trial}"))
        built = kind(**settings)
        try:
            weighting_of(built)
            actual = difference(lambda built=built: dataclasses.replace(built), data)
        except ValueError:  # refused
            actual = ""
        yield f"{kind.__name__} {settings}: {actual}", not actual


def test_settings_under_secure_sums(seed: int, record: Record, tmp_path: Path) -> None:
    source = PlantedCommunities(num_nodes=80, num_communities=4, num_features=6, num_classes=3)
    data = FederatedDataModule(source, GivenPartitioner(), relation_graph=Ring(), cache_dir=tmp_path, root=tmp_path)
    data.setup()
    tried(record, "settings under secure sums", crossings(8, seed, data))
