"""What cannot fit is refused before it is taken, with the numbers and the remedy; what fits is not."""

import functools
import re
from pathlib import Path

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, SparseAdam

from fl_lightning import SequentialExecutor, StackedExecutor, memory
from fl_lightning.relations.topology import Ring
from fl_lightning.strategies import FedAvg, FedSheafHN, PFedHN, SheafFMTL
from fl_lightning.strategies.decentralized import DenseMaps, ImplicitMaps
from fl_lightning.strategies.hypernetwork.heads import FactoredHead, FullHead


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch):
    """Sets how many bytes are available."""
    return lambda num_bytes: monkeypatch.setattr(memory, "available", lambda device: num_bytes)


def test_dense_maps_are_refused_where_implicit_ones_fit(free) -> None:
    free(10_000_000)
    complete_CC = torch.ones(4, 4).fill_diagonal_(0)
    needed = 4 * 3 * 1000 * 100_000 * 4
    message = rf"would take {needed:,} bytes .* 10,000,000 .* set strategy.maps to ImplicitMaps, or lower strategy.proj"
    with pytest.raises(ValueError, match=message):
        DenseMaps([100_000] * 4, complete_CC, projection_fraction=0.01)
    ImplicitMaps([100_000] * 4, complete_CC, projection_fraction=0.01, max_rank=1)
    DenseMaps([1000] * 4, complete_CC, projection_fraction=0.01)


def test_heads_are_refused_by_their_weights(free) -> None:
    free(100_000_000)
    with pytest.raises(ValueError, match=r"would take 160,000,000 bytes .* strategy.head to FactoredHead or ChunkedH"):
        FullHead(100, 200_000)
    FactoredHead(100, 200_000)


@pytest.mark.parametrize(
    ("optimizer", "copies"),
    [
        (Adam, 2),
        (AdamW, 2),
        (functools.partial(Adam, lr=0.1, amsgrad=True), 3),
        (functools.partial(Adam, fused=True), 2),
        (SGD, 0),
        (functools.partial(SGD, momentum=0.9), 1),
    ],
)
def test_an_optimizer_is_asked_what_it_keeps(optimizer, copies) -> None:
    parameters = [torch.ones(3, 2, requires_grad=True), torch.ones((), requires_grad=True)]
    built = optimizer(parameters)
    assert memory.state_copies(built) == copies
    assert not built.state
    assert torch.equal(parameters[0].detach(), torch.ones(3, 2))


class Remembers(SGD):
    """Has in itself what it has stepped by, and a number that no step changes."""

    def __init__(self, parameters) -> None:
        super().__init__(parameters, lr=0.1)
        self.last, self.bound, self._step_count = 0.0, float("nan"), 0

    def step(self, closure=None):
        self.last = self.param_groups[0]["params"][0].grad
        self._step_count += 1
        return super().step(closure)


def test_what_an_optimizer_keeps_in_itself_is_named() -> None:
    """Numbers and a tensor of several cannot be compared as they are."""
    built = Remembers([torch.ones(3, 2, requires_grad=True)])
    assert memory.step_on_zeros(built)[2] == {"last", "_step_count"}
    assert built.last == 0.0
    assert built._step_count == 0


@pytest.mark.parametrize("executor", [SequentialExecutor, StackedExecutor])
def test_clients_that_do_not_fit_are_refused(executor, free, federation, make_model, make_trainer) -> None:
    model = make_model(optimizer=functools.partial(Adam, lr=0.1, amsgrad=True))
    model.build(6, 3)
    needed = 5 * 4 * 4 * model.num_parameters
    free(needed - 1)
    message = rf"5 clients of {model.num_parameters} parameters .* would take .* max_group_mib and storage 'disk'"
    with pytest.raises(ValueError, match=message):
        make_trainer(executor=executor()).fit(model, federation, FedAvg())


def test_what_fits_is_not_refused(free, federation, make_model, make_trainer) -> None:
    free(1_000_000)
    make_trainer(num_rounds=1).fit(make_model(), federation, FedAvg())
    free(150_000)
    small = StackedExecutor(max_group_mib=1e-6, storage="disk")  # one client at a time
    make_trainer(num_rounds=1, executor=small).fit(make_model(), federation, FedAvg())


@pytest.mark.parametrize(
    "strategy", [PFedHN, functools.partial(FedSheafHN, num_neighbors=2)], ids=["PFedHN", "FedSheafHN"]
)
def test_a_generator_that_does_not_fit_is_refused(strategy, free, federation, make_model, make_trainer) -> None:
    free(30_000)
    with pytest.raises(ValueError, match=r"would take [\d,]+ bytes .*(FactoredHead or ChunkedHead)"):
        make_trainer().fit(make_model(), federation, strategy())


def test_sheaf_fmtl_names_the_remedy(free, federation, make_model, make_trainer) -> None:
    free(50_000)
    with pytest.raises(ValueError, match="ImplicitMaps"):
        make_trainer().fit(make_model(), federation, SheafFMTL(topology=Ring(), projection_fraction=1.0))


def test_an_optimizer_that_cannot_step_is_a_setting(federation, make_model, make_trainer) -> None:
    with pytest.raises(ValueError, match=r"model.optimizer: SparseAdam cannot step: .*dense gradients"):
        make_trainer().fit(make_model(optimizer=SparseAdam), federation, FedAvg())


# ---------------------------------------------------------------- what there is


def test_the_machine_has_memory() -> None:
    free = memory.available(torch.device("cpu"))
    assert free is None or free > 2**20


def test_swap_counts_and_other_systems_have_no_metrics(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   5 kB\nSwapFree: 2 kB\nHugePages: 0\n")
    assert memory._of_machine(tmp_path / "meminfo") == 7 * 1024
    assert memory._of_machine(tmp_path / "nothing") is None


def test_limits_of_control_groups(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/a/b\n")
    for folder, limit, used in (("a/b", "max", "1"), ("a", "1000", "700")):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "memory.max").write_text(limit + "\n")
        (tmp_path / folder / "memory.current").write_text(used)
        (tmp_path / folder / "memory.stat").write_text("anon 600\ninactive_file 50\n")
    assert memory._of_cgroups(tmp_path, own) == 350
    own.write_text("4:cpu,memory:/\n")
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory/memory.limit_in_bytes").write_text("2000")
    (tmp_path / "memory/memory.usage_in_bytes").write_text("500")
    (tmp_path / "memory/memory.stat").write_text("total_inactive_file 100\n")
    assert memory._of_cgroups(tmp_path, own) == 1600
    assert memory._of_cgroups(tmp_path, tmp_path / "nothing") is None


def test_the_message_names_both_numbers(free) -> None:
    free(2**30)
    expected = "maps would take 2,147,483,648 bytes of memory (2.0 GiB) on cpu, where 1,073,741,824 (1.0 GiB) are"
    with pytest.raises(ValueError, match=re.escape(expected)):
        memory.require(2**31, "maps", "take fewer")
    memory.require(2**30, "maps", "take fewer")
