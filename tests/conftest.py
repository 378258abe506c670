"""A tiny federation and the builders around it."""

import dataclasses
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningDataModule
from tiers import DURATIONS, TESTS, Durations, function_of, is_of_the_second_tier, long_tests
from torch.optim import SGD, Adam

from fl_lightning import ClientModule, FederatedDataModule, FederatedTrainer
from fl_lightning.batches.graphs import GraphCollator
from fl_lightning.callbacks.neighbor_ids import neighbor_ids
from fl_lightning.data import ClientGraph
from fl_lightning.federation import ClientRegistry
from fl_lightning.models import GCN
from fl_lightning.strategies import FedAux, FedSagePlus, FedSSP, Strategy
from fl_lightning.tasks import NodeClassification
from fl_lightning.testing import comparison
from fl_lightning.testing.federations import GROUPS, SIZES, small_graphs

torch.set_num_threads(1)
os.environ.setdefault("WANDB_X_SERVICE_WAIT", "300")  # seconds; a busy machine may take more than the 30 of W&B

os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # of pytest's own folders

#: For the temporary files of this session alone, those of its collection among them.
TEMPORARY = Path(tempfile.mkdtemp(prefix="fl-tests-", dir=os.environ["PYTEST_DEBUG_TEMPROOT"]))  # short: for sockets
os.environ["TMPDIR"], tempfile.tempdir = str(TEMPORARY), None

#: What libraries leave there: modules that PyG generates, with their bytecode, torchrun's logs, the compiler's cache,
#: W&B's media, MPI's.
LEFT_BY_LIBRARIES = (
    "_propagate_",
    "_edge_updater_",
    "_Sequential_",
    "__pycache__",
    "torchelastic_",
    "torchinductor_",
    "pymp-",
    "wandb",
    "ompi.",
)


@pytest.fixture(scope="session", autouse=True)
def temporary_folder() -> Iterator[None]:
    """Nothing of ours may be left in the folder for temporary files."""
    yield
    left = [path.name for path in TEMPORARY.iterdir() if not any(name in path.name for name in LEFT_BY_LIBRARIES)]
    assert not left, f"left in the folder for temporary files: {left}"


def pytest_unconfigure() -> None:
    """Remove the folder for temporary files."""
    shutil.rmtree(TEMPORARY, ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is of the second tier beside what its own file marks."""
    long = long_tests()
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        folder, *_ = item.path.relative_to(TESTS).parts if TESTS in item.path.parents else ("",)
        if function_of(item.nodeid) in long or is_of_the_second_tier(folder, item.path.name, item.name, parameters):
            item.add_marker(pytest.mark.full)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-durations", action="store_true", help=f"write {DURATIONS.name}; for a run of all tests")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--write-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations())


def pytest_itemcollected(item: pytest.Item) -> None:
    """Refuse names of tests that differ between processes: those that share the tests out could not agree on them."""
    if " at 0x" in item.nodeid:
        raise pytest.UsageError(f"{item.nodeid} has an address in its name: give its parameters ids")


class GivenClients(LightningDataModule):
    """A federation of the given graphs."""

    def __init__(self, clients: Sequence[ClientGraph], num_classes: int) -> None:
        super().__init__()
        self.clients = list(clients)
        place_C = torch.tensor([int(client.name[-1]) for client in clients])
        apart_CC = (place_C[:, None] - place_C).abs()
        ring_CC = ((apart_CC == 1) | (apart_CC == len(clients) - 1)).float()  # whatever their order
        self.registry = ClientRegistry.of(
            clients,
            task=NodeClassification(),
            num_outputs=num_classes,
            relation_CC=ring_CC,
            groups=tuple(GROUPS[int(client.name[-1]) % len(GROUPS)] for client in clients),
            partition_hash="given",
        )
        self.has_validation = True

    def setup(self, stage: str | None = None) -> None:
        pass

    def collator(self, clients: Sequence[ClientGraph], *, device: torch.device, dtype: torch.dtype) -> GraphCollator:
        return GraphCollator(clients, layout=self.registry.layout, device=device, dtype=dtype)


@pytest.fixture(scope="session")
def federation(tmp_path_factory: pytest.TempPathFactory) -> FederatedDataModule:
    """Five clients of 30 to 8 nodes, three classes, six features."""
    data = small_graphs(tmp_path_factory.mktemp("cache"))
    ids_NM = neighbor_ids(data.source.load(data.root, data.cache_dir).edge_index, sum(SIZES), secret="s", max_ids=9)
    clients = tuple(dataclasses.replace(each, neighbor_ids_NM=ids_NM[each.node_idx_N]) for each in data.clients)
    data._allocation = dataclasses.replace(data.allocation, clients=clients, groups=GROUPS)  # of overlapping clients
    return data


@pytest.fixture(scope="session")
def graphs(federation: FederatedDataModule) -> tuple[ClientGraph, ...]:
    return federation.clients


@pytest.fixture(scope="session")
def given_clients() -> Callable[..., GivenClients]:
    """Builds a federation of given graphs."""

    def build(clients: Sequence[ClientGraph], num_classes: int = 3) -> GivenClients:
        return GivenClients(clients, num_classes)

    return build


@pytest.fixture(scope="session")
def make_model() -> Callable[..., ClientModule]:
    """Builds a client module, or a strategy's own, with its default net at width 8, that learns fast."""

    def build(
        kind: type[ClientModule] | type[Strategy] | Strategy = ClientModule,
        optimizer: Callable[..., Any] | None = None,
        gradient_clip_val: float | None = None,
        **net: Any,
    ) -> ClientModule:
        # where all edges are alike the gradients of FedSSP's filters are 0 but for rounding, which Adam scales up
        fast = functools.partial(SGD, lr=0.1) if kind is FedSSP else functools.partial(Adam, lr=0.05, weight_decay=5e-4)
        optimizer = optimizer or fast
        client_class = getattr(kind, "client_class", kind)
        owner = next((one for one in (FedAux, FedSagePlus) if issubclass(client_class, one.client_class)), Strategy)
        net_class = getattr(kind, "default_net", None) or owner.default_net or GCN
        net_factory = functools.partial(net_class, **{"hidden_channels": 8, **net})
        return client_class(net_factory, optimizer, gradient_clip_val=gradient_clip_val)

    return build


@pytest.fixture
def wandb_mode(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets W&B's mode, which otherwise stays that of whoever asked first in this process."""
    import wandb

    def set_mode(mode: str) -> None:
        monkeypatch.setenv("WANDB_MODE", mode)
        monkeypatch.setenv("WANDB_SILENT", "true")
        wandb.teardown()

    yield set_mode
    wandb.teardown()


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., FederatedTrainer]:
    """Builds a trainer of three rounds without loggers, in the test's own folder."""

    def build(**settings: Any) -> FederatedTrainer:
        defaults = {
            "num_rounds": 3,
            "accelerator": "cpu",
            "logger": False,
            "default_callbacks": False,
            "default_root_dir": str(tmp_path),
        }
        return FederatedTrainer(**{**defaults, **settings})

    return build


@pytest.fixture(scope="session")
def assert_same() -> Callable[..., None]:
    """Compares nested states leaf by leaf, exactly or within a tolerance."""
    return comparison.assert_same
