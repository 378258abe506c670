"""Writes docs/explanation/what-leaves-a-client.md: what each strategy's clients send, taken from its stages.

python benchmarks/what_leaves.py
"""

import functools
import inspect
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lightning.fabric import Fabric
from torch.optim import SGD

from fl_lightning import FederatedDataModule, strategies
from fl_lightning.data import GivenPartitioner, PlantedCommunities
from fl_lightning.models import GCN
from fl_lightning.relations.topology import Ring
from fl_lightning.remote.secure import check_stage, weighting_of
from fl_lightning.round.client import ClientModule
from fl_lightning.round.disclosure import COUNTS, CROSS_EDGES, SCORES, what_leaves
from fl_lightning.run.assembly import build_nets, describe_federation
from fl_lightning.strategies import Strategy

PAGE = Path(__file__).parents[1] / "docs" / "explanation" / "what-leaves-a-client.md"
#: Rounds that are looked at, for a strategy may ask for something now and then.
NUM_ROUNDS = 6
#: What some cannot do without.
SETTINGS: dict[str, dict[str, Any]] = {
    "Oracle": {"groups": [0, 0, 0, 0, 1, 1, 1, 1]},
    "SheafFMTL": {"projection_fraction": 0.9},  # maps with fewer rows warn
}

_HEAD = f"""# What leaves the client

This table is written by `python benchmarks/what_leaves.py` from the stages of each strategy, with its default settings
and net. In addition, the {COUNTS} leave in every stage,
and the {SCORES} at every evaluation. Features, edges, labels and
predictions never leave. (See `round/disclosure.py`; `communication.csv` of a run lists what leaves in every stage of
every round.)

With `data.cross_edges` the edges between clients are
{CROSS_EDGES}.
The methods that use them (`FedGCN`, `FedStruct`) tell the server the indices and degrees of all nodes, so that it knows
who has edges to whom, and sums over a node's neighbors at a client: where it has only one there, that neighbor's own
features (`FedGCN`) or degree (`FedStruct`).

A decentralized strategy's messages to neighbors go through the server, which computes for all clients. *Sums only*:
under secure aggregation the server learns nothing but the weighted sum of what leaves, and only sums of metrics
([below](#under-secure-aggregation)). If `validate_every` is set (`Kin`, `FedAux`, `LocalAux`, `FedPub`, `SheafRidge`),
the numerator and denominator of the validation metric leave for each model that is tried. `Pooled` is not in the table:
it trains on all clients' data in one place, and sites refuse it.

| strategy | stage | what leaves the client | sums only |
|---|---|---|---|
"""


def find_strategies() -> list[type[Strategy]]:
    """All that can be made without settings and keep clients apart, by name."""
    result = {each for each in vars(strategies).values() if inspect.isclass(each) and issubclass(each, Strategy)}
    result -= {strategies.Pooled}
    return sorted((each for each in result if not inspect.isabstract(each)), key=lambda each: each.__name__)


def set_up(kind: type[Strategy], data: FederatedDataModule) -> Strategy:
    """A strategy as it is when a run begins."""
    plain = (
        functools.partial(GCN, hidden_channels=8) if kind.client_class is ClientModule else None
    )  # its maps are small
    default = kind.default_net or plain
    net = {} if default is None else {"net": default}
    optimizer = functools.partial(SGD, lr=0.01, momentum=0.9)  # which all of them take
    model = kind.client_class(**net, optimizer=optimizer)
    strategy, fabric = kind(**SETTINGS.get(kind.__name__, {})), Fabric(accelerator="cpu", devices=1)
    nets = build_nets(fabric, model, strategy, data.registry, 0)
    strategy.setup(describe_federation(fabric, model, data.registry, tuple(range(data.num_clients)), nets, 0))
    return strategy


def rows(strategy: Strategy) -> list[tuple[str, str, str]]:
    """Stage, what leaves, and whether sums are enough; each once."""
    names = list(strategy.federation.parameters)
    stages = [*strategy.initial_stages(), *(stage for index in range(NUM_ROUNDS) for stage in strategy.stages(index))]
    result: dict[tuple[str, str, str], None] = {}
    for stage in stages:
        try:
            weighting_of(strategy)
            check_stage(stage)
            sums = "yes"
        except ValueError:
            sums = ""
        result[re.sub(r"-\d+$", "-*", stage.name), "; ".join(what_leaves(stage, names)) or "nothing", sums] = None
    longest = {name: max((text for other, text, _ in result if other == name), key=len) for name, _, _ in result}
    return [row for row in result if row[1] == longest[row[0]]]


def page() -> str:
    """The whole page; what is below the table is kept."""
    with TemporaryDirectory() as folder:
        source = PlantedCommunities(num_nodes=200, num_communities=8, num_features=8)
        data = FederatedDataModule(source, GivenPartitioner(), relation_graph=Ring(), cache_dir=folder, root=folder)
        data.setup()
        lines = [
            f"| `{kind.__name__}` | {stage} | {what} | {sums} |"
            for kind in find_strategies()
            for stage, what, sums in rows(set_up(kind, data))
        ]
    return _HEAD + "\n".join(lines) + "\n" + "".join(PAGE.read_text().partition("\n## ")[1:])


if __name__ == "__main__":
    PAGE.write_text(page())
