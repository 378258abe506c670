"""What importing the package does not run, and that what is put off works as if it had run."""

import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest

from fl_lightning.strategies import FedAvg

HEAVY = (
    "matplotlib",
    "networkx",
    "pandas",
    "scipy.signal",
    "scipy.stats",
    "sklearn",
    "sympy",
    "torch.distributed.fsdp",
    "torchmetrics.functional.audio",
    "torch_geometric.datasets.planetoid",
    "torch_geometric.llm",
    "wandb",
)


def run(code: str) -> str:
    """What a fresh process prints."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "statement", ["fl_lightning.FederatedTrainer; fl_lightning.callbacks", "import fl_lightning.cli"]
)
def test_the_package_leaves_heavy_libraries_alone(statement: str) -> None:
    actual = run(f"""
        import sys
        import fl_lightning.deferred
        assert "torch" not in sys.modules
        fl_lightning.deferred.install()
        {statement}
        from fl_lightning.deferred import KNOWN, is_deferred
        print([name for name in {HEAVY!r} if name in sys.modules], [name for name in KNOWN if not is_deferred(name)])
    """)
    assert actual.strip() == "[] []"


@pytest.mark.full
def test_a_step_of_an_optimizer_leaves_the_compiler_alone_until_it_is_used() -> None:
    run("""
        import fl_lightning.deferred
        fl_lightning.deferred.install()
        import torch
        from fl_lightning import FederatedTrainer
        from fl_lightning.deferred import is_deferred
        from lightning.fabric.wrappers import OptimizedModule
        from torch import nn

        layer = nn.Linear(2, 1)
        optimizer = torch.optim.Adam(layer.parameters())
        optimizer.zero_grad()
        layer(torch.ones(1, 2)).sum().backward()
        before = layer.weight.clone()
        optimizer.step()
        assert not torch.equal(layer.weight, before)
        assert not isinstance(layer, OptimizedModule) and is_deferred("torch._dynamo")

        compiled = torch.compile(layer, backend="eager")
        assert torch.equal(compiled(torch.ones(1, 2)), layer(torch.ones(1, 2)))
        assert not is_deferred("torch._dynamo")
        assert isinstance(compiled, OptimizedModule) and issubclass(type(compiled), OptimizedModule)
        assert not isinstance(layer, OptimizedModule)
        optimizer.step()
        assert torch.optim.Adam(compiled.parameters()).param_groups
    """)


@pytest.mark.full
def test_a_submodule_runs_its_package_once() -> None:
    run("""
        import sys
        import fl_lightning.deferred
        fl_lightning.deferred.install()
        import torch
        from fl_lightning.deferred import is_deferred
        import torch._dynamo
        assert is_deferred("torch._dynamo")
        import torch._dynamo.utils as utils
        assert not is_deferred("torch._dynamo") and torch._dynamo.utils is utils is sys.modules["torch._dynamo.utils"]
        assert utils.__spec__.name == "torch._dynamo.utils" and torch._dynamo.disable.__module__.startswith("torch.")
    """)


@pytest.mark.full
@pytest.mark.filterwarnings("default")
def test_the_libraries_are_whole_when_they_are_asked_for() -> None:
    run("""
        from fl_lightning.deferred import install, is_deferred
        install()
        from fl_lightning import FederatedTrainer
        import matplotlib, torch, torchmetrics
        matplotlib.use("agg")
        assert is_deferred("torchmetrics") and is_deferred("torchmetrics.utilities.plot")
        accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        assert isinstance(accuracy, torchmetrics.Metric) and not is_deferred("torchmetrics")
        accuracy.update(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 1]))
        figure, axes = accuracy.plot()
        assert figure is axes.figure and not is_deferred("torchmetrics.utilities.plot")

        import torch_geometric
        assert is_deferred("torch_geometric.datasets")
        from torch_geometric.datasets import Planetoid
        assert torch_geometric.datasets.Planetoid is Planetoid and not is_deferred("torch_geometric.datasets")
    """)


@pytest.mark.full
def test_other_versions_of_a_library_are_slower_and_no_more() -> None:
    run("""
        import fl_lightning.deferred
        fl_lightning.deferred.KNOWN["torchmetrics"].pop("_logger")
        fl_lightning.deferred.KNOWN["torch._dynamo"].clear()
        from fl_lightning import FederatedTrainer
        import torch, torchmetrics
        assert not fl_lightning.deferred.is_deferred("torchmetrics")
        assert torchmetrics.Accuracy(task="multiclass", num_classes=3)
        torch.optim.Adam([torch.nn.Parameter(torch.ones(1))]).step()
    """)


@pytest.mark.full
def test_what_was_imported_before_stays() -> None:
    run("""
        import torchmetrics, torch._dynamo
        disable = torch._dynamo.disable
        from fl_lightning import FederatedTrainer
        from fl_lightning.deferred import KNOWN, is_deferred
        assert not any(is_deferred(name) for name in ("torchmetrics", "torchmetrics.utilities.plot", "torch._dynamo"))
        assert torch._dynamo.disable is disable
    """)


@pytest.mark.full
def test_importing_the_package_changes_nothing_for_others() -> None:
    run("""
        import signal, sys, warnings
        import lightning, torch_geometric.datasets
        before = list(sys.meta_path), list(sys.path_hooks), list(warnings.filters), signal.getsignal(signal.SIGINT)
        import torch
        threads, random = torch.get_num_threads(), torch.get_rng_state()
        import fl_lightning
        for name in fl_lightning.__all__:
            getattr(fl_lightning, name)
        assert before[:2] == (list(sys.meta_path), list(sys.path_hooks))
        assert before[3] is signal.getsignal(signal.SIGINT)
        assert threads == torch.get_num_threads() and torch.equal(random, torch.get_rng_state())
    """)
    run("""
        import fl_lightning
        fl_lightning.FederatedTrainer
        import torch_geometric.datasets
        assert "Planetoid" in dir(torch_geometric.datasets)
    """)
    run("""
        from fl_lightning.deferred import install, is_deferred
        install()
        import torch_geometric
        assert is_deferred("torch_geometric.datasets")
        assert "Planetoid" in dir(torch_geometric.datasets)
    """)


def test_a_fit_from_python_leaves_the_allocator_alone(monkeypatch, federation, make_model, make_trainer) -> None:
    from fl_lightning.run import allocator

    def refuse() -> None:
        raise AssertionError("it is the process that malloc belongs to")

    monkeypatch.setattr(allocator, "_keeps", False)  # a test of the command may have asked for it in this process
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda _: refuse())
    make_trainer(num_rounds=1).fit(make_model(), federation, FedAvg())


@pytest.mark.parametrize("keeps", [False, True])
def test_what_is_kept_is_returned_when_the_data_are_there(
    keeps, monkeypatch, federation, make_model, make_trainer
) -> None:
    from fl_lightning.run import allocator

    returned = []
    library = SimpleNamespace(malloc_trim=returned.append)
    monkeypatch.setattr(allocator, "_keeps", keeps)
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda _: library)
    make_trainer(num_rounds=1).fit(make_model(), federation, FedAvg())
    assert set(returned) == ({0} if keeps else set())
